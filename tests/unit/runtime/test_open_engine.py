"""Engines that a worker refuses to open."""

from __future__ import annotations

import pytest

from tidemill.config.load import from_toml
from tidemill.config.schema import RunSpec, VllmConfig
from tidemill.core.errors import UserError
from tidemill.core.protocols import EngineCapabilities
from tidemill.rollout.engines import vllm
from tidemill.rollout.sampling import NOISE, STREAM
from tidemill.runtime.open_engine import check_capabilities

_TWO_RANKS = {"kind": "vllm", "tensor_parallel": 2}
ABLE = {
    "name": "able",
    "batch_invariant": True,
    "logprobs": True,
    "keeps_kv": False,
    "lora": True,
    "draws": NOISE,
}


@pytest.mark.parametrize(
    ("lacks", "settings", "where"),
    [
        ({"draws": STREAM}, "", "engine.kind"),
        ({"draws": STREAM}, "[fleet]\ninexact_migration = true", "engine.kind"),
        ({"draws": "murmur3, -log(-log(u))"}, "", "engine.kind"),
        ({"batch_invariant": False}, "[engine]\nbatch_invariant = true", "engine.batch_invariant"),
        ({"lora": False}, "[model]\nlora.rank = 4", "model.lora"),
    ],
)
def test_an_engine_that_cannot_keep_a_promise_is_refused(lacks: dict[str, object], settings: str, where: str) -> None:
    spec = from_toml(settings)
    check_capabilities(EngineCapabilities(**ABLE), spec)  # type: ignore[arg-type]
    with pytest.raises(UserError) as caught:
        check_capabilities(EngineCapabilities(**{**ABLE, **lacks}), spec)  # type: ignore[arg-type]
    assert caught.value.where == where


def test_an_engine_of_other_noise_joins_where_samples_may_move_inexactly() -> None:
    spec = from_toml("[fleet]\ninexact_migration = true")
    check_capabilities(EngineCapabilities(**{**ABLE, "draws": "murmur3, -log(-log(u))"}), spec)  # type: ignore[arg-type]


@pytest.mark.parametrize(("found", "what"), [("", "is not installed"), ("0.33.1", "was not tested")])
def test_a_missing_or_other_vllm_is_refused(found: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "installed_version", lambda: found)
    with pytest.raises(UserError, match=what):
        vllm.check_version()


@pytest.mark.parametrize(
    "name", ["pipeline_parallel_size", "speculative_config", "quantization", "enable_prefix_caching"]
)
def test_arguments_that_break_a_promise_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"args.{name} is not allowed"):
        VllmConfig(args={name: 1})
    assert VllmConfig(args={"swap_space": 1}).args == {"swap_space": 1}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"runtime": "inprocess"}, 'needs runtime = "ray"'),
        ({"sampling": {"top_k": 5}}, "no top-k"),
        ({"model": {"lora": {"rank": 4}}, "engine": {"kind": "vllm", "batch_invariant": True}}, "with adapters"),
        ({"model": {"lora": {"rank": 513}}}, "up to rank 512"),
        ({"engine": {"kind": "embedded", "tensor_parallel": 2}}, "tensor_parallel = 2 needs vLLM"),
        ({"engine": _TWO_RANKS, "placement": {"engine": "colocated"}}, 'choose "own"'),
        ({"engine": _TWO_RANKS, "model": {"lora": {"rank": 4}}}, "adapters were not tested with several ranks"),
        ({"engine": _TWO_RANKS, "ray": {"worker_gpus": 2}}, "a rank uses one GPU or none"),
        ({"engine": {"kind": "vllm", "vllm": {"args": {"tensor_parallel_size": 2}}}}, "set engine.tensor_parallel"),
        ({"placement": {"actor_tensor_parallel": 2}}, "needs vLLM"),
    ],
)
def test_what_vllm_cannot_do_is_refused_before_anything_starts(changes: dict[str, object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        RunSpec.model_validate({"runtime": "ray", "engine": {"kind": "vllm"}, **changes})
