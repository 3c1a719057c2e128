"""Trainer and engine take turns: the engine sleeps, wakes and loads in one order only, and nothing runs meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.engine_requests import engine, prompts, request
from tests.model_shapes import llama
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError, WeightsError
from tidemill.core.protocols import LoopClock
from tidemill.core.records import Completion, Group, LogprobBuffer, PolicyVersion, StepMetrics, pack_tokens
from tidemill.models.snapshots import Part, empty_copy
from tidemill.models.weight_stream import WeightStream, streamed_weights
from tidemill.rollout.weight_sources import EmptyModel, StreamedWeights
from tidemill.runtime import colocated
from tidemill.runtime.colocated import AlternatingTrainer
from tidemill.runtime.compute import ComputeThread

PROBE = pack_tokens(range(4))
NEXT = {
    ("awake", "receive"): "loaded",
    ("loaded", "receive"): "loaded",
    ("awake", "sleep"): "asleep",
    ("loaded", "sleep"): "asleep",
    ("asleep", "wake_weights"): "empty",
    ("empty", "receive"): "filled",
    ("filled", "receive"): "filled",
    ("filled", "wake_caches"): "loaded",
    ("loaded", "train"): "never",
    ("asleep", "train"): "asleep",
}
"""What an engine on a shared GPU allows: any other order is an error, or serves old weights."""


class StrictUser:
    """Fails on any other order."""

    def __init__(self) -> None:
        self.state, self.calls = "awake", list[str]()

    def step(self, call: str) -> None:
        assert (self.state, call) in NEXT, f"{call} while it is {self.state}: {self.calls}"
        self.state = NEXT[self.state, call]
        assert self.state != "never", "training beside an engine that is awake"
        self.calls.append(call)

    def receive(self, tensors: WeightStream, part: Part) -> None:
        for _ in tensors:
            pass
        self.step("receive")

    def sleep(self) -> None:
        self.step("sleep")

    def wake_weights(self) -> None:
        self.step("wake_weights")

    def wake_caches(self) -> None:
        self.step("wake_caches")

    def release(self, part: Part) -> None:
        pass


class Trainer:
    """Counts, and uses the device while it computes."""

    def __init__(self, user: StrictUser) -> None:
        self.user, self.version, self.groups = user, PolicyVersion(number=0, digest="0"), list[Group]()

    async def accumulate(self, group: Group) -> None:
        self.user.step("train")
        self.groups.append(group)

    async def commit(self, step: int) -> StepMetrics:
        self.user.step("train")
        self.version = PolicyVersion(number=step, digest=str(step))
        return StepMetrics(step=step, version=self.version, optimizer_steps=1, values={})

    async def logprobs(self, completions: Sequence[Completion]) -> list[LogprobBuffer]:
        return [b""] * len(completions)


class Turns:
    def __init__(self, *parts: Part) -> None:
        self.user, self.compute = StrictUser(), ComputeThread()
        self.inner = Trainer(self.user)
        self.engine = engine(llama())
        self.weights = StreamedWeights(self.user, lambda version: ((part, iter(())) for part in parts), probe_ids=PROBE)
        self.trainer = AlternatingTrainer(self.inner, self.engine, self.weights, self.compute)

    async def load(self) -> None:
        self.weights.swap(await self.weights.prepare(self.trainer.version))


@pytest.fixture
async def turns() -> Any:
    opened = Turns("learned")
    yield opened
    await opened.compute.close()


async def test_the_engine_sleeps_while_a_batch_is_trained_and_wakes_with_the_next_version(turns: Turns) -> None:
    await turns.load()
    for step in (1, 2):
        groups = [Group(position=place, prompt_id=f"{step}", trajectories=()) for place in range(3)]
        for each in groups:
            await turns.trainer.accumulate(each)
        assert turns.inner.groups[-3:] != groups
        await turns.trainer.commit(step)
        assert turns.inner.groups[-3:] == groups
        await turns.load()

    woken = ["wake_weights", "receive", "wake_caches"]
    assert turns.user.calls == ["receive", *["sleep", *["train"] * 4, *woken] * 2]
    assert turns.trainer.version.number == 2


async def test_a_base_is_received_again_before_the_adapter() -> None:
    turns = Turns("base", "learned")
    await turns.load()
    await turns.trainer.commit(1)
    await turns.load()
    await turns.compute.close()

    assert turns.user.calls[-4:] == ["wake_weights", "receive", "receive", "wake_caches"]


async def test_an_engine_with_running_samples_is_not_put_to_sleep(turns: Turns) -> None:
    turns.engine.submit([request(prompt) for prompt in prompts(2, length=5)])
    turns.engine.poll(0.0)

    with pytest.raises(RuntimeError, match="2 samples are running"):
        await turns.trainer.commit(1)


async def test_a_version_that_the_trainer_does_not_have_is_an_error() -> None:
    def streams(version: PolicyVersion) -> Iterator[tuple[Part, WeightStream]]:
        raise WeightsError(f"the trainer has version 3, not {version.number}")

    weights = StreamedWeights(StrictUser(), streams, probe_ids=PROBE)
    with pytest.raises(WeightsError, match="has version 3, not 2"):
        weights.swap(await weights.prepare(PolicyVersion(number=2, digest="2")))


async def test_an_embedded_engine_frees_its_memory_and_generates_the_same_again() -> None:
    model = llama()
    hollow = empty_copy(model, torch.float32)
    embedded = engine(hollow)
    user = EmptyModel(hollow, drop_caches=embedded.drop_caches)
    weights = StreamedWeights(
        user, lambda _: iter([("learned", streamed_weights(model, torch.float32))]), probe_ids=PROBE
    )
    found = []
    for number in (0, 1):
        version = PolicyVersion(number=number, digest="same weights")
        weights.swap(await weights.prepare(version))
        embedded.load(version)
        embedded.submit([request(prompt) for prompt in prompts(3, length=9)])
        tokens: dict[str, bytes] = {}
        while embedded.status().running or embedded.status().queued or not tokens:
            for delta in embedded.poll(0.0):
                tokens[delta.sample_id.prompt_id] = tokens.get(delta.sample_id.prompt_id, b"") + delta.token_ids
        found.append(tokens)
        computed = embedded.status().prompt_tokens_computed
        weights.sleep()
        assert sum(parameter.numel() for parameter in hollow.parameters()) == 0
        assert embedded.status().prompt_tokens_computed == computed > 0

    assert found[0] == found[1]
    assert len(found[0]) == 3


def test_an_engine_on_another_device_than_the_trainer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    user = SimpleNamespace(device_type="cuda")
    monkeypatch.setattr(colocated, "open_engine", lambda *_, **__: (engine(llama()), user))
    bundle: Any = SimpleNamespace(
        spec=RunSpec(), folder=Path("model"), rollout_dtype=torch.float32, device=torch.device("cpu")
    )
    with pytest.raises(UserError, match="the engine computes on cuda, and the trainer on cpu") as refused:
        colocated.open_colocated(
            bundle, cast(Any, None), cast(Any, None), clock=LoopClock(), prompt_tokens=1, probe_ids=PROBE
        )
    assert refused.value.where == "placement.engine"
