"""A trainer gets the parts that its configuration needs in its process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tidemill.config.schema import RunSpec
from tidemill.core.protocols import LoopClock
from tidemill.core.records import pack_tokens
from tidemill.models.ranks import OneRank
from tidemill.runtime.build_trainer import build_trainer
from tidemill.runtime.colocated import AlternatingTrainer
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.model_bundle import load_model_bundle
from tidemill.runtime.publishers import ModelPublisher, ProbePublisher, ShardPublisher
from tidemill.trainer.policy import PolicyTrainer
from tidemill.weights.snapshot import MemoryTransport
from tidemill.weights.store import WeightStore

COLOCATED = {"placement": {"engine": "colocated"}, "schedule": {"max_policy_lag": 0}}
WORKERS = {"pool": {"kind": "static", "workers": 1}}
APART = {"runtime": "ray", "placement": {"engine": "own"}}
AHEAD = {"algorithm": {"kl_beta": 0.1}, "reading": {"ahead": True}}


@pytest.mark.parametrize(
    ("settings", "trainer", "engine", "publisher", "reads"),
    [
        ({}, PolicyTrainer, True, None, False),
        (WORKERS, PolicyTrainer, True, ModelPublisher, False),
        (COLOCATED, AlternatingTrainer, True, ProbePublisher, False),
        (COLOCATED | WORKERS, AlternatingTrainer, True, ShardPublisher, False),
        (APART, PolicyTrainer, False, ShardPublisher, False),
        (APART | {"weights": {"lane": "collective"}}, PolicyTrainer, False, ProbePublisher, False),
        (AHEAD, PolicyTrainer, True, None, True),
    ],
)
async def test_the_parts_of_a_trainer(
    settings: dict[str, Any], trainer: type, engine: bool, publisher: type | None, reads: bool, tmp_path: Path
) -> None:
    model = {"source": "char", "char": {"hidden_size": 16, "layers": 1, "heads": 2}}
    spec = RunSpec.model_validate({"model": model, "trainer": {"threads": 1}} | settings)
    bundle = load_model_bundle(spec, progress=lambda _: None, generates=spec.engine_shares_model)
    compute = ComputeThread()
    parts = build_trainer(
        bundle,
        compute,
        clock=LoopClock(),
        checkpoints=tmp_path,
        prompt_tokens=4,
        probe_ids=pack_tokens([5, 6]) if publisher else b"",
        open_store=lambda: WeightStore(MemoryTransport(), compute=compute),
        sends_base=False,
        warn=pytest.fail,
    )
    assert isinstance(parts.trainer, trainer)
    assert (parts.engine is not None, parts.frozen_reference is not None) == (engine, reads)
    assert type(parts.publisher) is (publisher or type(None))
    for part in (parts.engine, parts.frozen_reference, compute):
        if part is not None:
            await part.close()


class FirstOfTwo(OneRank):
    """A rank whose other one always does the same."""

    size = 2

    def gather(self, value: bytes) -> list[bytes]:
        return [value, value]


@pytest.mark.parametrize(("ranks", "ahead"), [(OneRank(), True), (FirstOfTwo(), False)])
async def test_a_rank_of_several_does_not_compute_ahead(
    ranks: OneRank, ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks compute together, and one that computes ahead alone would wait for the others for ever."""
    model = {"source": "char", "char": {"hidden_size": 16, "layers": 1, "heads": 2}}
    spec = RunSpec.model_validate({"model": model, "trainer": {"threads": 1}} | AHEAD)
    monkeypatch.setattr("tidemill.runtime.model_bundle.load_shards", lambda *_, **__: None)  # needs the other rank
    compute = ComputeThread()
    parts = build_trainer(
        load_model_bundle(spec, progress=lambda _: None),
        compute,
        clock=LoopClock(),
        checkpoints=tmp_path,
        prompt_tokens=4,
        probe_ids=b"",
        open_store=pytest.fail,
        sends_base=False,
        warn=pytest.fail,
        ranks=ranks,
    )
    assert (parts.frozen_reference is not None) == ahead
    for part in (parts.engine, parts.frozen_reference, compute):
        if part is not None:
            await part.close()
