"""A run with a policy lag of three, corrected publish by publish; and one that dies on the way."""

from __future__ import annotations

import io
import json
import tomllib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.char_task import char_task
from tidemill.config.load import merge
from tidemill.config.schema import RunSpec
from tidemill.core.protocols import Clock, Trainer
from tidemill.core.records import (
    Completion,
    Group,
    LogprobBuffer,
    PolicyVersion,
    StepMetrics,
    Trajectory,
    unpack_logprobs,
    unpack_tokens,
)
from tidemill.jobs.train import train
from tidemill.runtime.backend import RuntimeBackend
from tidemill.runtime.local import in_process
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.trainer import policy, update
from tidemill.trainer.update import PolicyOutcome

HIGH, STEPS, DIES_AT = 1.02, 6, 5
RECIPE = (
    char_task(layers=2)
    + f"""\
[scoring]
rewards = [{{ kind = "length", target_tokens = 12 }}]
[sampling]
max_new_tokens = 24
temperature = 0.8
[engine]
slots = 8
batch_invariant = true
tick_s = 0.001
[batch]
prompts = 2
group_size = 4
minibatches = 2
[schedule]
max_policy_lag = 3
[algorithm]
correction = {{ kind = "mu_step", high = {HIGH} }}
[optimizer]
learning_rate = 3e-3
[trainer]
steps = {STEPS}
threads = 1
[eval]
every_steps = 0
prompts = 1
"""
)


class Died(RuntimeError):
    """Simulates a power cut."""


@dataclass
class Watched:
    """Implements `core.protocols.Trainer` around the run's trainer: records its training groups by step."""

    inner: Trainer
    dies_at: int | None
    learned: dict[int, list[Group]] = field(default_factory=dict)

    @property
    def version(self) -> PolicyVersion:
        return self.inner.version

    async def accumulate(self, group: Group) -> None:
        self.learned.setdefault(self.version.number + 1, []).append(group)
        await self.inner.accumulate(group)

    async def commit(self, step: int) -> StepMetrics:
        if step == self.dies_at:
            raise Died
        return await self.inner.commit(step)

    async def logprobs(self, completions: Sequence[Completion]) -> Sequence[LogprobBuffer]:
        return await self.inner.logprobs(completions)


def live(directory: Path, *, checkpoint_every: int, dies_at: int | None = None) -> Watched:
    """Run one session in `directory`; returns its recording trainer."""
    keep = {"every_steps": checkpoint_every, "keep_last": STEPS}
    spec = RunSpec.model_validate(merge(tomllib.loads(RECIPE), {"run": {"dir": directory}, "checkpoint": keep}))
    watched: list[Watched] = []

    @asynccontextmanager
    async def opened(
        spec: RunSpec, run: RunDirectory, recorder: Recorder, clock: Clock
    ) -> AsyncIterator[RuntimeBackend]:
        async with in_process(spec, run, recorder, clock) as backend:
            watched.append(Watched(backend.trainer, dies_at))
            yield replace(backend, trainer=watched[0])

    if dies_at is None:
        train(spec, telemetry_stream=io.StringIO(), open_backend=opened)
    else:
        with pytest.raises(Died):
            train(spec, telemetry_stream=io.StringIO(), open_backend=opened)
    return watched[0]


@dataclass
class Seen:
    """Weights of all trained tokens, with the logprobs of the generating versions and of the trainer."""

    weights: list[Tensor] = field(default_factory=list)
    rollout: list[Tensor] = field(default_factory=list)
    proximal: list[Tensor] = field(default_factory=list)

    def outcome(self, algorithm: Any, microbatch: Any, *args: Any, **kwargs: Any) -> PolicyOutcome:
        """Replaces `policy_outcome`."""
        found = self._outcome(algorithm, microbatch, *args, **kwargs)
        self.weights.append(found.corrected.weights_T)
        self.rollout.append(microbatch.rollout_logprobs)
        self.proximal.append(microbatch.proximal_logprobs)
        return found

    def __post_init__(self) -> None:
        self._outcome = update.policy_outcome


@dataclass
class Finished:
    directory: Path
    watched: Watched
    seen: Seen


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, session_cache: Path) -> Finished:
    """A run with a checkpoint of every version."""
    directory, seen = tmp_path_factory.mktemp("mu_step") / "run", Seen()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "policy_outcome", seen.outcome)
        return Finished(directory, live(directory, checkpoint_every=1), seen)


def logprobs_by(model: PreTrainedModel, sample: Trajectory) -> list[float]:
    """Logprobs of the completion's tokens, by transformers' forward pass over the single sample."""
    ids, prompt = unpack_tokens(sample.token_ids), sample.prompt_length
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, prompt - 1 : -1]
    logprobs = (logits / 0.8).log_softmax(-1)[torch.arange(len(ids) - prompt), torch.tensor(ids[prompt:])]
    return logprobs.tolist()  # type: ignore[no-any-return]


def test_published_weights_equal_the_checkpoint(finished: Finished) -> None:
    checkpoints = finished.directory / "checkpoints"
    models = {
        number: AutoModelForCausalLM.from_pretrained(checkpoints / f"step_{number}") for number in range(1, STEPS)
    }
    compared = younger = late = 0
    for step, groups in finished.watched.learned.items():
        for sample in (one for group in groups for one in group.trajectories):
            rollout = unpack_logprobs(sample.rollout_logprobs)
            made_by = [run.version.number for run in sample.versions for _ in range(run.start, run.end)]
            newest = step - 1  # the trainer's version, and the last published one
            assert len(sample.publish_logprobs) <= newest - made_by[0]
            first = step - len(sample.publish_logprobs)
            for version, said in enumerate(map(unpack_logprobs, sample.publish_logprobs), start=first):
                independent = logprobs_by(models[version], sample)
                older = sum(maker < version for maker in made_by)
                known = max((at + 1 for at in range(older) if said[at] != rollout[at]), default=0)
                assert said[:known] == pytest.approx(independent[:known], abs=1e-5)
                assert said[known:] == rollout[known:]
                compared, younger, late = compared + known, younger + len(said) - older, late + older - known
    assert compared > 200 and younger > 20
    assert late < compared / 4  # generated before a publish, and reported after the trainer's logprobs were requested


def test_the_weights_differ_from_tis(finished: Finished) -> None:
    seen = finished.seen
    weights, rollout, proximal = (torch.cat(parts) for parts in (seen.weights, seen.rollout, seen.proximal))
    whole = (proximal - rollout).exp()
    # a token clipped at HIGH once can continue from there: twice as far, or back below its start
    assert int(((weights - whole.clamp(max=HIGH)).abs() > 1e-3).sum()) > 50
    assert float(weights.max()) > HIGH + 1e-3
    assert float(weights.max()) <= HIGH**4 + 1e-4  # three publishes, and from the last to the trainer


def digests(directory: Path) -> dict[int, str]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["weights_digest"] for line in lines}


def test_a_killed_run_repeats_its_steps_bit_for_bit(tmp_path: Path, session_cache: Path) -> None:
    died = live(tmp_path / "run", checkpoint_every=0, dies_at=DIES_AT)
    before = digests(tmp_path / "run")
    assert len(set(before.values())) == len(before) == DIES_AT  # every step changed the weights

    resumed = live(tmp_path / "run", checkpoint_every=0)

    learned = range(1, DIES_AT)
    assert {step: resumed.learned[step] for step in learned} == {step: died.learned[step] for step in learned}
    assert {step: digests(tmp_path / "run")[step] for step in before} == before
    noted = [one.publish_logprobs for step in learned for group in died.learned[step] for one in group.trajectories]
    assert sum(map(len, noted)) > 20
