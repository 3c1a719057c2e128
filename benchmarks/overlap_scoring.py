"""Time saved when a reward model computes samples during generation, on Ray and in one process.

    python -m benchmarks.overlap_scoring [--steps 6] [--places actor,own_thread,shared_thread]

A small policy writes long completions; the reward model is several times its size, with random weights. There are two
runs per place. In every other step of a run the model gets no growing samples and computes everything when a sample
finishes; in the second run these are the other steps. Nothing else differs: samples, chunks, shapes and the shared
prompt are equal, so all scores and weights must be bit-identical, and each step is compared with itself.

- *delay*: from a sample's last token to its score (including its queue), mean over the step's samples.
- *tail*: from the step's last token to its last score.
- *step*: its wall time.

Places: a separate actor on Ray; a separate thread in one process; the single thread that also generates, which is never
idle meanwhile, so that nothing is gained or lost.
"""

from __future__ import annotations

import argparse
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
from benchmarks.origin import parsed
from benchmarks.subjects import check_counts
from tidemill.config.model import CharModelConfig
from tidemill.config.schema import RunSpec
from tidemill.core.protocols import Clock, FrozenScorer
from tidemill.core.records import ModelScores, NewTokens, SampleId, TokenBuffer
from tidemill.jobs.train import train
from tidemill.models.builtin import build_char_model
from tidemill.models.codec import load_codec
from tidemill.models.reward_model import reward_head, save_head
from tidemill.runtime.backend import OpenBackend, RuntimeBackend, scorers
from tidemill.runtime.frozen_scorers import FrozenScorers
from tidemill.runtime.local import in_process
from tidemill.telemetry.metrics import STEP_TIME, read_metrics
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import RunDirectory

LETTERS = "".join(chr(code) for code in range(0x100, 0x300))  # a large alphabet: an untrained model rarely stops early
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
        "optimizer": {"learning_rate": 1e-9},  # steps differ only in their samples
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
    """Implements `FrozenScorer` around another, which gets growing samples only in every other step."""

    model: FrozenScorer
    ahead_in: int  # even (0) or odd (1) steps
    step: int = 1
    delays_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # by step
    said: dict[int, dict[SampleId, bytes]] = field(default_factory=lambda: defaultdict(dict))

    @property
    def ahead(self) -> bool:
        return self.step % 2 == self.ahead_in

    def receive(self, new_tokens: Sequence[NewTokens]) -> None:
        if self.ahead:
            self.model.receive(new_tokens)

    async def score(self, sample_id: SampleId, token_ids: TokenBuffer, prompt_tokens: int) -> ModelScores:
        began = time.perf_counter()
        scores = await self.model.score(sample_id, token_ids, prompt_tokens)
        if sample_id.purpose == "train":
            self.delays_s[self.step].append(time.perf_counter() - began)
            self.said[self.step][sample_id] = scores.values
        return scores

    def forget(self, sample_ids: Sequence[SampleId]) -> None:
        self.model.forget(sample_ids)

    def take_counts(self) -> tuple[int, int]:
        """Called once per step, at its end."""
        self.step += 1
        return self.model.take_counts()

    async def close(self) -> None:
        """The model is closed by its owner."""


def taking_turns(place: str, ahead_in: int, found: list[Turns]) -> OpenBackend:
    if place == "actor":
        from tidemill.runtime.cluster.ray_backend import on_ray

        opening: OpenBackend = on_ray
    else:
        opening = in_process

    @asynccontextmanager
    async def opened(
        spec: RunSpec, run: RunDirectory, recorder: Recorder, clock: Clock
    ) -> AsyncIterator[RuntimeBackend]:
        async with opening(spec, run, recorder, clock) as backend:
            ((folder, model),) = backend.frozen.rewards.items()
            found.append(turns := Turns(model=model, ahead_in=ahead_in))
            frozen = FrozenScorers(rewards={folder: turns})
            scoring = scorers(spec, backend.task, frozen=frozen)
            yield replace(backend, frozen=frozen, scorer=scoring.training, eval_scorer=scoring.held_out)
            await scoring.close()

    return opened


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of one run."""

    weights: str
    scores: dict[SampleId, bytes]
    tokens: float
    share_ahead: float  # of all tokens read
    delay_s: float
    tail_s: float
    step_s: float


def run(directory: Path, reward: Path, place: str, *, ahead_in: int, steps: int) -> dict[int, Step]:
    found: list[Turns] = []
    spec = spec_of(directory, reward, place, steps)
    train(spec, telemetry_stream=io.StringIO(), open_backend=taking_turns(place, ahead_in, found))
    (turns,) = found
    return {
        line.step: Step(
            weights=line.weights_digest,
            scores=turns.said[line.step],
            tokens=line.values["tokens_generated"],
            share_ahead=line.values["tokens_read_ahead"]
            / (line.values["tokens_read_ahead"] + line.values["tokens_read_late"]),
            delay_s=statistics.fmean(turns.delays_s[line.step]),
            tail_s=line.values["time_score_s"],
            step_s=line.values[STEP_TIME],
        )
        for line in read_metrics(directory / "metrics.jsonl")
        if line.step > WARM_UP
    }


def check_pairs(place: str, pairs: Sequence[tuple[Step, Step]]) -> None:
    """Raises RuntimeError: weights or scores of a (late, ahead) pair differ, the first read ahead, or the second did
    not although the model had a thread."""
    for late, ahead in pairs:
        check_counts(place, scores=len(late.scores))
        if late.weights != ahead.weights:
            raise RuntimeError(f"{place}: the policies differ")
        if late.scores != ahead.scores:
            raise RuntimeError(f"{place}: scores differ when samples are read ahead")
        if late.share_ahead:
            raise RuntimeError(f"{place}: {late.share_ahead:.0%} of the tokens of a late step were read ahead")
        if place != "shared_thread":
            check_counts(place, tokens_read_ahead=ahead.share_ahead)


def measured(folder: Path, reward: Path, place: str, steps: int) -> dict[str, Any]:
    runs = [run(folder / f"{place}-{parity}", reward, place, ahead_in=parity, steps=steps) for parity in (0, 1)]
    pairs = [(runs[1 - step % 2][step], runs[step % 2][step]) for step in runs[0]]  # late and ahead
    check_pairs(place, pairs)
    figures: dict[str, Any] = {"steps": len(pairs), "samples_of_equal_bits": sum(len(late.scores) for late, _ in pairs)}
    for name in ("delay_s", "tail_s", "step_s"):
        ratios = [getattr(late, name) / getattr(ahead, name) for late, ahead in pairs]
        figures[name] = {
            "late": statistics.median(getattr(late, name) for late, _ in pairs),
            "ahead": statistics.median(getattr(ahead, name) for _, ahead in pairs),
            "times_faster": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
        }
    figures["share_ahead"] = statistics.fmean(ahead.share_ahead for _, ahead in pairs)
    figures["tokens_per_step"] = statistics.fmean(ahead.tokens for _, ahead in pairs)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="counted ones")
    parser.add_argument("--places", default=",".join(PLACES))
    options = parsed(parser)
    results = {}
    with tempfile.TemporaryDirectory() as name:
        reward = reward_folder(Path(name) / "reward")
        for place in options.places.split(","):
            results[place] = found = measured(Path(name), reward, place, options.steps)
            print(f"{place}: {found['samples_of_equal_bits']} samples of equal scores, "
                  f"{found['share_ahead']:.0%} of the tokens read ahead")  # fmt: skip
            for key in ("delay_s", "tail_s", "step_s"):
                row = found[key]
                print(f"  {key:8} late {row['late']:.3f}, ahead {row['ahead']:.3f}: {row['times_faster']:.2f}x "
                      f"({row['lowest']:.2f}-{row['highest']:.2f})", flush=True)  # fmt: skip
    write_result("overlap_scoring", {"steps": options.steps, "policy": POLICY | {"alphabet": len(POLICY["alphabet"])},  # type: ignore[arg-type]
                                     "reward_model": REWARD | {"alphabet": len(REWARD["alphabet"])}, **results})  # type: ignore[arg-type]  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
