"""What it saves that a reward model reads a sample while it is being generated, on Ray and in one process.

    python -m benchmarks.overlap_scoring [--steps 8] [--places actor,own_thread,shared_thread]

A small policy writes long completions; the reward model is several times its size, with weights of a seed. Steps take
turns within one run: in every other one the reader is not told of growth and computes everything when a sample is
finished. That is all the difference: the chunks, their shapes, and the shared prompt are the same. All samples of the
last two steps are scored once more at the end, without any growth: each score must have the very bits it had.

- *delay*: from a sample's last token to its score (its turn behind others included), median over a step's samples.
- *tail*: from the step's last token to its last score.
- *step*: its wall time per 1,000 generated tokens (the samples of two steps are not the same), all included.

Places: an actor of its own on Ray; a thread of its own in one process; the one thread that also generates, which has
nothing left over while it does, so that nothing is to be gained there and nothing lost.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.measuring import write_result
from tidemill.config.model import CharModelConfig
from tidemill.config.schema import RunSpec
from tidemill.core.buffers import TokenBuffer
from tidemill.core.clock import Clock
from tidemill.core.protocols import Reader
from tidemill.core.records import Growth, Read, SampleId
from tidemill.models.char import build_char_model
from tidemill.models.codec import load_codec
from tidemill.models.heads import reward_head, save_head
from tidemill.runtime.inprocess import in_process
from tidemill.runtime.machinery import Machinery, OpenMachinery
from tidemill.runtime.readers import Readers
from tidemill.runtime.train import train
from tidemill.telemetry.metrics import STEP_TIME, read_metrics
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import RunDirectory

LETTERS = "".join(chr(code) for code in range(0x100, 0x300))  # a large alphabet: an untrained model seldom ends early
POLICY = {"alphabet": "0123456789+=\n" + LETTERS, "hidden_size": 128, "layers": 4, "heads": 4, "context": 512}
REWARD = POLICY | {"hidden_size": 384, "layers": 8, "heads": 8}
PLACES: dict[str, dict[str, Any]] = {
    "actor": {"runtime": "ray", "placement": {"reward_model": "actor"}},
    "own_thread": {"reading": {"own_thread": True}},
    "shared_thread": {},
}
WARM_UP = 2  # steps


def spec_of(directory: Path, reward: Path, place: str, steps: int) -> RunSpec:
    more = PLACES[place]
    sections: dict[str, Any] = {
        "run": {"name": "overlap", "dir": str(directory)},
        "model": {"source": "char", "char": POLICY},
        "task": {"kind": "arithmetic", "shots": 0},
        "sampling": {"max_new_tokens": 300},
        "scoring": {"rewards": [{"kind": "model", "model": str(reward)}]},
        "engine": {"slots": 8},
        "batch": {"prompts": 2, "group_size": 4},
        "optimizer": {"learning_rate": 1e-9},  # steps differ by the samples they draw, and by nothing else
        "trainer": {"steps": WARM_UP + steps, "threads": 1, "device": "cpu"},
        "eval": {"every_steps": 0, "prompts": 1},
        "checkpoint": {"every_steps": 0},
        "telemetry": {"live": False},
    }
    reading = {"ahead": True, "chunk_tokens": 64} | more.get("reading", {})
    return RunSpec.model_validate(sections | more | {"reading": reading})


def reward_folder(folder: Path) -> Path:
    folder.mkdir()
    config = CharModelConfig.model_validate(REWARD)
    build_char_model(config, folder)
    digest = load_codec(folder).vocabulary_digest
    head = reward_head(config.hidden_size)
    save_head(folder, head, kind="reward_model", pooling="last_token", vocabulary_digest=digest)
    return folder


@dataclass(kw_only=True)
class Turns:
    """Implements `Reader` around another, which hears of growth in every other step only."""

    reader: Reader
    step: int = 1
    delays_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # by step
    said: dict[int, list[tuple[SampleId, TokenBuffer, int, bytes]]] = field(default_factory=lambda: defaultdict(list))
    same: int = 0

    @property
    def ahead(self) -> bool:
        return self.step % 2 == 0

    def grow(self, grown: Sequence[Growth]) -> None:
        if self.ahead:
            self.reader.grow(grown)

    async def read(self, sample_id: SampleId, token_ids: TokenBuffer, prompt_tokens: int) -> Read:
        began = time.perf_counter()
        read = await self.reader.read(sample_id, token_ids, prompt_tokens)
        if sample_id.purpose == "train":
            self.delays_s[self.step].append(time.perf_counter() - began)
            self.said[self.step].append((sample_id, token_ids, prompt_tokens, read.numbers))
        return read

    def forget(self, sample_ids: Sequence[SampleId]) -> None:
        self.reader.forget(sample_ids)

    def take_counts(self) -> tuple[int, int]:
        """Asked for once a step, at its end."""
        self.step += 1
        return self.reader.take_counts()

    async def close(self) -> None:
        await self.check()

    async def check(self) -> None:
        """Read the last two steps' samples again, without growth."""
        for step in (self.step - 2, self.step - 1):
            for sample_id, token_ids, prompt_tokens, numbers in self.said[step]:
                again = await self.reader.read(sample_id, token_ids, prompt_tokens)
                assert again.numbers == numbers, f"{sample_id} was scored otherwise when it was read ahead"
                assert again.tokens_ahead == 0
                self.same += 1


def taking_turns(place: str, found: list[Turns]) -> OpenMachinery:
    if place == "actor":
        from tidemill.runtime.cluster.machinery import on_ray

        opening: OpenMachinery = on_ray
    else:
        opening = in_process

    @asynccontextmanager
    async def opened(spec: RunSpec, run: RunDirectory, recorder: Recorder, clock: Clock) -> AsyncIterator[Machinery]:
        async with opening(spec, run, recorder, clock) as machinery:
            ((folder, reader),) = machinery.readers.rewards.items()
            found.append(turns := Turns(reader=reader))
            yield replace(machinery, readers=Readers(rewards={folder: turns}))
            await asyncio.wait_for(turns.check(), 600.0)

    return opened


def measured(folder: Path, reward: Path, place: str, steps: int) -> dict[str, Any]:
    found: list[Turns] = []
    spec = spec_of(folder / place, reward, place, steps)
    train(spec, telemetry_stream=io.StringIO(), open_machinery=taking_turns(place, found))
    (turns,) = found
    lines = {line.step: line.values for line in read_metrics(spec.directory / "metrics.jsonl")}
    figures: dict[str, Any] = {"samples_scored_twice_with_the_same_bits": turns.same}
    for side, parity in (("ahead", 0), ("late", 1)):
        of_side = [step for step in range(WARM_UP + 1, WARM_UP + steps + 1) if step % 2 == parity]
        figures[side] = {
            "delay_s": statistics.median(statistics.median(turns.delays_s[step]) for step in of_side),
            "tail_s": statistics.median(lines[step]["time_score_s"] for step in of_side),
            "rollout_s": statistics.median(lines[step]["time_rollout_s"] for step in of_side),
            "step_s": statistics.median(
                1000 * lines[step][STEP_TIME] / lines[step]["tokens_generated"] for step in of_side
            ),
            "tokens": sum(lines[step]["tokens_generated"] for step in of_side),
            "read_ahead_share": sum(lines[step]["tokens_read_ahead"] for step in of_side)
            / sum(lines[step]["tokens_read_ahead"] + lines[step]["tokens_read_late"] for step in of_side),
        }
    names = ("delay_s", "tail_s", "step_s")
    figures["times_faster"] = {name: figures["late"][name] / figures["ahead"][name] for name in names}
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="counted ones, half of them on each side")
    parser.add_argument("--places", default=",".join(PLACES))
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as name:
        reward = reward_folder(Path(name) / "reward")
        for place in options.places.split(","):
            results[place] = found = measured(Path(name), reward, place, options.steps)
            ratios = ", ".join(f"{key.removesuffix('_s')} {value:.2f}x" for key, value in found["times_faster"].items())
            print(f"{place}: late / ahead: {ratios}")
            for side in ("late", "ahead"):
                print(f"  {side:6}", {key: round(value, 3) for key, value in found[side].items()}, flush=True)
            print(f"  scored again with the same bits: {found['samples_scored_twice_with_the_same_bits']} samples")
    write_result("overlap_scoring", {"steps": options.steps, "policy": POLICY | {"alphabet": len(POLICY["alphabet"])},  # type: ignore[arg-type]
                                     "reward_model": REWARD | {"alphabet": len(REWARD["alphabet"])}, **results})  # type: ignore[arg-type]  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
