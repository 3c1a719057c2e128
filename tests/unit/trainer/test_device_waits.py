"""The host does not wait for the GPU between the first microbatch of a batch and its optimizer step.

Runs on tensors without numbers (`tests.fake_gpu`), where whatever reads a number raises.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.fake_gpu import GPU, Operations, pretend_gpu
from tests.model_shapes import llama, qwen3
from tests.unit.trainer.test_policy import groups, spec
from tidemill.core.records import Group, PolicyVersion, VersionRun
from tidemill.models.attention import use_packed_attention
from tidemill.models.reward_model import ScalarHead
from tidemill.models.tree_forward import TreeForward
from tidemill.runtime.compute import ComputeThread
from tidemill.trainer import policy
from tidemill.trainer.critic import TrunkCritic, resolved
from tidemill.trainer.packing import MaskedCompletion, Microbatch, pack_completions
from tidemill.trainer.policy import PolicyTrainer
from tidemill.trainer.scoring import token_logprobs
from tidemill.trainer.update import UpdateSums

CPU = torch.device("cpu")


def known(model: Any) -> Any:
    """A model whose layers have seen their mask: each reads the window of its first mask, once."""
    use_packed_attention(model)
    packed = pack_completions([MaskedCompletion(b"\2\0\0\0\3\0\0\0", b"\4\0\0\0")], CPU)
    token_logprobs(TreeForward(model), packed, temperature=1.0, logits_budget_bytes=1 << 20)
    return model


def versioned(batch: list[Group]) -> list[Group]:
    """With two versions in each sample, of which the newer is sampled from the cache of the older."""
    old, new = (PolicyVersion(number=number, digest="") for number in (0, 1))

    def of(sample: Any) -> Any:
        end = sample.completion_length
        runs = (VersionRun(version=old, start=0, end=1), VersionRun(version=new, start=1, end=end))
        return msgspec.structs.replace(sample, versions=runs)

    return [msgspec.structs.replace(one, trajectories=tuple(map(of, one.trajectories))) for one in batch]


@pytest.mark.parametrize("microbatch_tokens", [30, 4096])
@pytest.mark.parametrize(
    ("settings", "own"),
    [
        (
            {"algorithm": {"kl_beta": 0.1, "entropy_bonus": 0.01, "correction": {"kind": "tis"}}},
            ["kl_ref", "kl_ref_k1"],
        ),
        ({"schedule": {"max_policy_lag": 1, "keep_cache": True}}, ["kept_cache_kl"]),
        ({"algorithm": {"loss": "gspo"}}, []),
        ({"batch": {"minibatches": 3, "epochs": 2}}, []),
        ({"algorithm": {"advantage": "gae"}, "critic": {"kind": "shared"}}, []),
    ],
    ids=["reference", "kept caches", "sequence losses", "minibatches", "critic"],
)
def test_microbatches_are_computed_without_reading_from_the_gpu(
    settings: dict[str, Any], own: list[str], microbatch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(policy, "weights_digest", lambda *_: "")
    settings = {**settings, "batch": {"microbatch_tokens": microbatch_tokens, **settings.get("batch", {})}}
    configured = spec(**settings)
    model, reference = known(qwen3()).to(GPU), known(llama()).to(GPU)
    forward, with_critic = TreeForward(model), configured.algorithm.needs_critic
    critic = TrunkCritic(forward, ScalarHead(64).to(GPU), configured.critic) if with_critic else None
    if critic is not None:  # advantages are computed on the host, from values
        monkeypatch.setattr(critic, "values", lambda each: resolved(torch.zeros(each.tokens)))
        monkeypatch.setattr(critic, "step", lambda denominator: resolved({}))
    trainer = PolicyTrainer(
        forward,
        configured,
        compute=ComputeThread(),
        source=Path(),
        reference=TreeForward(reference),
        critic=critic,
    )
    monkeypatch.setattr(trainer._advantages, "_device", CPU)
    computed, steps = list[Microbatch](), list[int]()
    run_round, backward = trainer._run_round, trainer._backward

    def watched(*args: Any, **kwargs: Any) -> None:
        with Operations():
            run_round(*args, **kwargs)

    def noted(microbatch: Microbatch) -> None:
        with Operations():
            backward(microbatch)
        computed.append(microbatch)

    def stepped(*_: Any, **__: Any) -> float:
        steps.append(len(computed))
        return 1.0

    monkeypatch.setattr(trainer, "_run_round", watched)
    monkeypatch.setattr(trainer, "_backward", noted)
    monkeypatch.setattr(policy, "clip_and_step", stepped)  # reads the norm
    for name in ("to_host", "values", "mismatch_by_lease"):  # at the end of a batch
        monkeypatch.setattr(UpdateSums, name, lambda self: {})
    sums = trainer._sums
    for one in versioned(groups()):
        trainer.add_group(one)
    trainer.finish_batch(1)
    assert len(steps) == configured.batch.minibatches * configured.batch.epochs
    assert len(computed) == len(steps) if microbatch_tokens == 4096 else len(computed) > len(steps)
    on_gpu = [*(sums.on_device[name] for name in ("entropy", "clipped", "approx_kl", "loss", *own)), sums.mismatch.kl]
    on_gpu += [*sums.details_on_device.values(), *([critic._sums.sums] if critic is not None else [])]
    assert len(sums.details_on_device) == 8
    assert [str(each.device) for each in on_gpu] == ["meta"] * len(on_gpu)
