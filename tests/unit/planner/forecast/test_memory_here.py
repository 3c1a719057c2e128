from __future__ import annotations

from typing import Any

import pytest

from tests.planted import planted, spec_of
from tidemill.cli.plan_options import models_of
from tidemill.hardware.figures import Derivation
from tidemill.hardware.model_shape import adapter_parameters
from tidemill.hardware.process_memory import LIBRARIES
from tidemill.planner.forecast.forecast import memory_on_this_machine

KL = {"kl_beta": 0.01}


def memory(**sections: Any) -> tuple[float, dict[str, float]]:
    """Bytes in all, and of each part by name."""
    spec = spec_of(model={"source": "char"} | sections.pop("model", {}), **sections)
    sheet = Derivation()
    total = memory_on_this_machine(spec, models_of(spec), planted(spec), sheet)
    return total, {figure.name: figure.value for figure in sheet.figures}


def parameters() -> float:
    return models_of(spec_of(model={"source": "char"})).policy.parameters


def test_the_whole_model_keeps_16_bytes_per_parameter() -> None:
    total, parts = memory()
    assert parts["policy_bytes"] == 16 * parameters()
    named = ("policy_bytes", "activation_bytes", "logits_bytes", "kv_bytes")
    assert total == pytest.approx(sum(parts[name] for name in named) + LIBRARIES)


def test_an_adapter_adds_a_frozen_base() -> None:
    # 4 bytes for each frozen parameter, 16 for each of the adapter's; the base serves as the reference, too
    _, parts = memory(model={"lora": {"rank": 8}}, algorithm=KL)
    learned = adapter_parameters(models_of(spec_of(model={"source": "char"})).policy, 8)
    assert parts["policy_bytes"] == 4 * parameters() + 16 * learned
    assert parts["reference_bytes"] == 0


@pytest.mark.parametrize(
    ("sections", "more"),  # bytes per parameter of the policy
    [
        ({"algorithm": KL}, 4),
        ({"algorithm": {"name": "ppo", "kl_beta": 0}, "critic": {"kind": "own"}}, 16),
        ({"algorithm": {"name": "ppo"} | KL, "critic": {"kind": "own"}}, 20),
        ({"algorithm": {"name": "ppo"} | KL, "critic": {"kind": "shared"}}, 4),
        ({"schedule": {"max_policy_lag": 1}}, 4),
    ],
)
def test_frozen_models_are_counted(sections: dict[str, Any], more: int) -> None:
    # More models need at least their weights more; what the loss keeps per token may differ, too.
    alone, _ = memory()
    total, parts = memory(**sections)
    others = sum(
        value for name, value in parts.items() if name in ("reference_bytes", "critic_bytes", "engine_copy_bytes")
    )
    assert others == more * parameters()
    assert total - alone == pytest.approx(others, rel=0.02)


def test_a_shard_holds_its_part_of_every_model_and_no_engine() -> None:
    sections: dict[str, Any] = {"algorithm": {"name": "ppo"} | KL, "critic": {"kind": "own"}, "runtime": "ray"}
    _, whole = memory(**sections)
    _, shard = memory(**sections, trainer={"shards": 4})
    for name in ("policy_bytes", "critic_bytes", "reference_bytes"):
        assert shard[name] == whole[name] / 4
    assert shard["kv_bytes"] == 0
    assert shard["activation_bytes"] == whole["activation_bytes"]


def test_rows_of_episodes_between_two_turns_are_counted() -> None:
    _, alone = memory(engine={"slots": 4})
    environment = {"name": "guess", "turns": 3, "observation_tokens": 8}
    _, agent = memory(engine={"slots": 4}, env=environment, task={"kind": "environment"})
    assert agent["kv_bytes"] > alone["kv_bytes"] * (4 + 1 + 4) / (4 + 1)
