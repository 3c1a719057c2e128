"""Whether evictions and kills change what an agent learns: a small batch-invariant `guess` with slow steps."""

from __future__ import annotations

import io
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.equivalent_runs import digests
from tests.training_process import RunningProcess, learned
from tidemill.agents.pool import EnvironmentPool
from tidemill.config.load import load_spec
from tidemill.core.protocols import CallLog
from tidemill.core.records import Episode, Observation, Record
from tidemill.jobs.train import train
from tidemill.telemetry.events import EVICTION, timestamp
from tidemill.telemetry.jsonl import read_lines
from tidemill.telemetry.run_dir import TRAINING_PURPOSE

ENVIRONMENTS = Path(__file__).resolve().parent / "agent_environments.py"
RECIPE = f"""\
[model]
source = "char"
[model.char]
hidden_size = 64
layers = 2
[task]
kind = "environment"
train_size = 40
held_out_size = 8
[env]
name = "{ENVIRONMENTS}:SlowGuess"
turns = 4
turn_tokens = 3
observation_tokens = 16
concurrency = 4
[scoring]
rewards = [{{ kind = "environment" }}, {{ kind = "regex", pattern = '^\\d', weight = 0.5 }}]
[sampling]
max_new_tokens = 12
[engine]
slots = 8
batch_invariant = true
tick_s = 0.02
[batch]
prompts = 4
group_size = 4
[optimizer]
learning_rate = 1e-3
[trainer]
threads = 1
[eval]
every_steps = 0
prompts = 4
[checkpoint]
every_steps = 4
"""
EVICTED = (
    "--pool.kind=synthetic",
    "--pool.workers=3",
    "--pool.mean_time_to_eviction_s=0.3",
    "--pool.mean_time_to_return_s=0.1",
    "--pool.noticed=0.3",
    "--pool.notice_s=0.1",
    "--fleet.drain_margin_s=0.05",
    "--fleet.seed_window_s=0.05",
)
MOST_DELAY_S = 1.5


class Acting(Record):
    """A turn in its environment, in seconds since the epoch."""

    sample: tuple[str, str, int, int]  # purpose, prompt, epoch, index
    turn: int
    begun: float
    ended: float

    @property
    def trained(self) -> bool:
        return self.sample[0] == TRAINING_PURPOSE


class EvictedRun(Record):
    """A run with evictions against the undisturbed one."""

    seed: int
    steps: int
    samples: int
    turns: int
    evictions: int
    evictions_acting: int  # while an episode was in its environment
    evictions_own_acting: int  # while a training episode whose last turn this worker generated was in its environment
    differing_samples: int  # tokens, logprobs, observations, rewards of turns, versions
    differing_steps: int  # weights


class KilledRun(Record):
    """A run whose process was killed again and again against the undisturbed one."""

    seed: int
    steps: int
    kills: int
    same: bool  # every completion, evaluation, and the weights after every step


def evicted_run(folder: Path, *, seed: int, steps: int) -> EvictedRun:
    """Run without and with evictions, in this process."""
    recipe, quiet, evicted = _recipe(folder), folder / f"quiet-{seed}", folder / f"evicted-{seed}"
    _run(recipe, quiet, seed, steps)
    with _acting_times() as acting:
        _run(recipe, evicted, seed, steps, *EVICTED)
    ours, theirs = _samples(quiet), _samples(evicted)
    workers = {key[1:]: line.pop("workers") for key, line in theirs.items()}
    for line in ours.values():
        line.pop("workers")
    evictions = [line for _, line in read_lines(evicted / "events.jsonl") if line["event"] == EVICTION]
    met = [
        [each for each in acting if timestamp(each.begun) <= line["time"] <= timestamp(each.ended)]
        for line in evictions
    ]
    own = [
        any(workers[each.sample][each.turn].endswith(f"/{line['worker']}") for each in found if each.trained)
        for line, found in zip(evictions, met, strict=True)
    ]
    return EvictedRun(
        seed=seed,
        steps=steps,
        samples=len(ours),
        turns=sum(len(line["turns"]) for line in ours.values()),
        evictions=len(evictions),
        evictions_acting=sum(map(bool, met)),
        evictions_own_acting=sum(own),
        differing_samples=sum(ours.get(key) != theirs.get(key) for key in ours.keys() | theirs.keys()),
        differing_steps=sum(one != other for one, other in zip(digests(quiet), digests(evicted), strict=True)),
    )


def killed_run(folder: Path, *, seed: int, steps: int, kills: int) -> KilledRun:
    """Kill the process of a run at random moments, at most `kills` times, and let it finish."""
    recipe, quiet, torn = _recipe(folder), folder / f"whole-{seed}", folder / f"torn-{seed}"
    _run(recipe, quiet, seed, steps)
    draw, done = random.Random(seed), 0
    more = (f"--run.seed={seed}", f"--trainer.steps={steps}")
    while done < kills:
        run = RunningProcess(recipe, torn, more)
        if not run.killed_when(lambda run=run: run.told("session_start") > 0, after_s=draw.uniform(0, MOST_DELAY_S)):  # type: ignore[misc]
            break
        done += 1
    RunningProcess(recipe, torn, more).ends(0)
    return KilledRun(seed=seed, steps=steps, kills=done, same=learned(torn) == learned(quiet))


def _recipe(folder: Path) -> Path:
    path = folder / "recipe.toml"
    path.write_text(RECIPE)
    return path


def _run(recipe: Path, directory: Path, seed: int, steps: int, *more: str) -> None:
    arguments = (f"@{recipe}", f"--run.dir={directory}", f"--run.seed={seed}", f"--trainer.steps={steps}", *more)
    train(load_spec(arguments, purpose="train"), telemetry_stream=io.StringIO())


@contextmanager
def _acting_times() -> Iterator[list[Acting]]:
    """All turns that environments answer in the block."""
    found, act = list[Acting](), EnvironmentPool.act

    async def timed(pool: EnvironmentPool, episode: Episode, calls: CallLog) -> Observation:
        begun, sample = time.time(), episode.sample_id
        try:
            return await act(pool, episode, calls)
        finally:
            key = (sample.purpose, sample.prompt_id, sample.epoch, sample.index)
            turn = len(episode.turns) - 1
            found.append(Acting(sample=key, turn=turn, begun=begun, ended=time.time()))

    with patch.object(EnvironmentPool, "act", timed):
        yield found


def _samples(run: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Every sample by step and name. `workers` are those that generated the ends of its turns."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in sorted((run / "samples").iterdir()):
        for _, line in read_lines(path):
            del line["sources"]
            line["workers"] = [turn.pop("segments")[-1]["worker"] for turn in line["turns"]]
            found[tuple(line[name] for name in ("step", "purpose", "prompt_id", "epoch", "index"))] = line
    return found
