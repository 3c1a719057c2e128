"""Ranks that read only their rows hold the bits of a model that was loaded as a whole and then sharded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.integration.trainer.test_ranks import Arrays, one_step, slow_except
from tests.model_families import FAMILIES, build_family
from tests.model_folders import save_folder
from tests.model_shapes import MODEL_SHAPES, llama, qwen3
from tests.rank_processes import on_ranks
from tests.rotation import DAY, daily
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.records import Completion, pack_tokens, unpack_logprobs
from tidemill.hardware.figures import Derivation
from tidemill.hardware.gpu_catalog import load_catalog
from tidemill.hardware.process_memory import BF16, Models, rl_states
from tidemill.models import loading
from tidemill.models.checkpoint_manifest import seal
from tidemill.models.codec import load_codec
from tidemill.models.loading import load_model
from tidemill.models.lora import attach_adapter, base_state
from tidemill.models.ranks import Ranks, local_rows
from tidemill.models.reward_model import reward_head, save_head
from tidemill.models.shapes import shape_of_folder
from tidemill.models.snapshots import check_shardable
from tidemill.models.tree_forward import TreeForward
from tidemill.planner.memory.memory_plan import plan_memory
from tidemill.planner.memory.states import MemoryQuestion
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.model_bundle import load_model_bundle, reference_and_critic
from tidemill.trainer.critic import ModelCritic
from tidemill.trainer.policy import PolicyTrainer
from tidemill.trainer.scoring import completion_logprobs
from tidemill.trainer.sharding import load_shards, shard

# One process starts the server of the ranks.
pytestmark = pytest.mark.xdist_group("ranks")
CPU = torch.device("cpu")
PPO = {"name": "ppo", "kl_beta": 0.1}


def spec_of(folder: Path, ranks: Ranks, **sections: Any) -> RunSpec:
    given: dict[str, Any] = {
        "runtime": "ray",
        "model": {"source": str(folder), "lora": sections.pop("lora", {})},
        "trainer": {"threads": 1, "precision": "fp32", **sections.pop("trainer", {})},
        "batch": {"prompts": 5, "group_size": 3, "microbatch_tokens": 30},
        "optimizer": {"learning_rate": 1e-3},
        "sampling": {"max_new_tokens": 16},
        **sections,
    }
    given["trainer"]["shards"] = ranks.size
    return RunSpec.model_validate(given)


def rows_of(model: torch.nn.Module) -> Arrays:
    """The rows of this process, by every name of a tensor."""
    state = {**model.state_dict(keep_vars=True), **dict(model.named_buffers())}
    return {name: local_rows(tensor)[0].detach().numpy().copy() for name, tensor in state.items()}


def loaded_both_ways(ranks: Ranks, folder: Path, sections: dict[str, Any]) -> list[tuple[Arrays, Arrays]]:
    """(rows read from the files, rows of the whole model) of policy, reference and critic."""
    spec = spec_of(folder, ranks, **sections)
    bundle = load_model_bundle(spec, progress=lambda _: None, generates=False)
    assert all(parameter.is_meta or "lora" in name for name, parameter in bundle.model.named_parameters())
    reference, critic = reference_and_critic(bundle, ranks, progress=lambda _: None)
    pairs = []
    for model in (
        bundle.model,
        reference and reference.model,
        critic.model if isinstance(critic, ModelCritic) else None,
    ):
        if model is None:
            continue
        whole = load_model(folder, device=CPU)
        if reference is not None and model is reference.model:
            whole.requires_grad_(False)
        elif spec.model.lora.enabled:
            attach_adapter(whole.requires_grad_(False), spec.model)
        shard(TreeForward(whole), ranks)
        assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in whole.parameters()]
        names = [[name for name, _ in each.named_parameters()] for each in (model, whole)]
        assert names[0] == names[1], "the same parameters are tied"
        pairs.append((rows_of(model), rows_of(whole)))
    return pairs


CASES: dict[str, dict[str, Any]] = {
    "reference and critic": {"algorithm": PPO},
    "adapter": {"algorithm": PPO, "lora": {"rank": 3}},
    "recomputed activations": {"algorithm": {"kl_beta": 0.0}, "trainer": {"activation_checkpointing": True}},
}


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", slow_except(("reference and critic", "adapter")[DAY % 2], among=CASES))
def test_rows_are_those_of_the_whole_model(case: str, size: int, tmp_path: Path) -> None:
    shape = {2: "gemma3", 3: "llama"}[size]
    folder = save_folder(MODEL_SHAPES[shape](), tmp_path / "m", shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    for pairs in on_ranks(size, loaded_both_ways, folder, CASES[case]):
        assert len(pairs) == (3 if "algorithm" in CASES[case] and CASES[case]["algorithm"]["kl_beta"] else 1)
        for found, whole in pairs:
            assert found.keys() == whole.keys()
            for name, rows in whole.items():
                assert found[name].dtype == rows.dtype
                assert np.array_equal(found[name], rows), name


FAMILY_SHARES = 4


def family_both_ways(ranks: Ranks, folders: list[Path]) -> list[str]:
    """Names of tensors whose rows differ."""
    different = []
    for folder in folders:
        forward = TreeForward(loading.unloaded_model(folder), device=CPU)
        load_shards(forward, folder, ranks)
        whole = TreeForward(load_model(folder, device=CPU))
        shard(whole, ranks)
        found, expected = rows_of(forward.model), rows_of(whole.model)
        assert found.keys() == expected.keys()
        different += [f"{folder.name} {name}" for name in found if not np.array_equal(found[name], expected[name])]
    return different


@pytest.mark.parametrize("share", daily(range(FAMILY_SHARES), 1))
def test_rows_of_every_family(share: int, tmp_path: Path) -> None:
    folders = []
    for family, fields in list(FAMILIES.items())[share::FAMILY_SHARES]:
        folder = save_folder(build_family(family, fields), tmp_path / family)
        try:
            check_shardable(folder)
        except UserError:
            continue
        folders.append(folder)
    assert len(folders) >= 5
    assert on_ranks(2, family_both_ways, folders) == [[], []]


def trained_both_ways(ranks: Ranks, folder: Path, by_rows: bool) -> tuple[Arrays, str, str]:
    """Weights after a step, and the digests before and after it."""
    torch.set_num_threads(1)
    spec = spec_of(folder, ranks, algorithm={"kl_beta": 0.0})
    if by_rows:
        forward = load_model_bundle(spec, progress=lambda _: None, generates=False).forward
        load_shards(forward, folder, ranks)
    else:
        forward = TreeForward(load_model(folder, device=CPU))
        shard(forward, ranks)
    subject = PolicyTrainer(forward, spec, compute=ComputeThread(), source=folder, ranks=ranks)
    start = subject.version.digest
    one_step(subject, 1)
    return rows_of(subject.model), start, subject.version.digest


def test_a_step_of_read_rows_is_that_of_the_whole_model(tmp_path: Path) -> None:
    folder = save_folder(llama(), tmp_path / "m")
    by_rows, whole = (on_ranks(3, trained_both_ways, folder, way) for way in (True, False))
    for found, expected in zip(by_rows, whole, strict=True):
        assert found[1:] == expected[1:]
        assert all(np.array_equal(found[0][name], rows) for name, rows in expected[0].items())
    assert by_rows[0][1] != by_rows[0][2]


def critic_start(ranks: Ranks, folder: Path, critic: Path) -> tuple[Arrays, Arrays]:
    sections = {"algorithm": {"name": "ppo", "kl_beta": 0.0}, "critic": {"source": str(critic)}}
    bundle = load_model_bundle(spec_of(folder, ranks, **sections), progress=lambda _: None, generates=False)
    _, found = reference_and_critic(bundle, ranks, progress=lambda _: None)
    assert isinstance(found, ModelCritic)
    return rows_of(found.model), rows_of(found.head)


def test_a_critic_starts_from_a_reward_model_with_its_head(tmp_path: Path) -> None:
    folder, start = save_folder(llama(), tmp_path / "policy"), save_folder(llama(5), tmp_path / "reward")
    digest = load_codec(start).vocabulary_digest
    save_head(start, reward_head(64, seed=9), kind="reward_model", pooling="last_token", vocabulary_digest=digest)
    expected = load_model(start, device=CPU).get_parameter("model.embed_tokens.weight").detach().numpy()
    first, second = on_ranks(2, critic_start, folder, start)
    name = "model.embed_tokens.weight"
    assert np.array_equal(np.concatenate([first[0][name], second[0][name]]), expected)
    assert np.array_equal(first[1]["weight"], reward_head(64, seed=9).weight.detach().numpy())


def refusal(ranks: Ranks, folder: Path) -> tuple[str, str]:
    forward = TreeForward(loading.unloaded_model(folder), device=CPU)
    try:
        load_shards(forward, folder, ranks)
    except UserError as error:
        return error.what, error.where
    return "", ""


def _without(folder: Path, *names: str) -> None:
    weights = load_file(folder / "model.safetensors")
    for name in names:
        del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _infinite(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][-1, 3] = torch.inf  # a row of the last rank
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _other_size(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 100}))


def _damaged(folder: Path) -> None:
    seal(folder, step=3, score=None)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(9000)
        file.write(bytes(99))


REFUSED: dict[str, tuple[Any, str]] = {
    "missing": (
        lambda folder: _without(folder, "model.layers.1.mlp.up_proj.weight", "model.norm.weight"),
        "the weights lack model.layers.1.mlp.up_proj.weight and 1 more",
    ),
    "another size": (
        _other_size,
        "the weights do not fit the configuration at model.layers.0.mlp.down_proj.weight and 5 more",
    ),
    "not finite": (
        _infinite,
        (
            "the weights are not finite: model.layers.1.mlp.down_proj.weight has NaN, infinity or values beyond the "
            "range of torch.float32"
        ),
    ),
    "damaged": (_damaged, "the checkpoint is damaged: model.safetensors does not match its checksum"),
}


@pytest.mark.parametrize("case", slow_except("missing", "not finite", among=REFUSED))
def test_all_ranks_refuse_what_one_refuses(case: str, tmp_path: Path) -> None:
    damage, says = REFUSED[case]
    folder = save_folder(llama(), tmp_path / "m")
    damage(folder)
    assert on_ranks(2, refusal, folder) == [(says, str(folder))] * 2
    with pytest.raises(UserError) as whole:
        load_model(folder, device=CPU)
    if case != "another size":  # transformers says it at length
        assert whole.value.what == says


def read_in_blocks(ranks: Ranks, folder: Path) -> Arrays:
    loading.BLOCK_BYTES = 1000
    forward = TreeForward(loading.unloaded_model(folder), device=CPU)
    load_shards(forward, folder, ranks)
    return rows_of(forward.model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_other_dtypes_and_the_second_name_of_a_tied_head(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_folder(llama(), tmp_path / "m")
    expected = load_model(folder, device=CPU).state_dict()
    weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    parts = on_ranks(3, read_in_blocks, folder)
    for name, tensor in expected.items():
        rows = np.concatenate([part[name] for part in parts])
        assert np.array_equal(rows, tensor.to(dtype).float().numpy()), name


def test_an_untied_head_is_read(tmp_path: Path) -> None:
    folder = save_folder(qwen3(), tmp_path / "m")
    parts = on_ranks(2, read_in_blocks, folder)
    for name, tensor in load_model(folder, device=CPU).state_dict().items():
        assert np.array_equal(np.concatenate([part[name] for part in parts]), tensor.numpy()), name


def test_a_base_has_its_names_without_an_adapter(tmp_path: Path) -> None:
    spec = RunSpec.model_validate({"model": {"source": "char", "lora": {"rank": 2}}})
    model = llama()
    before = base_state(model).keys()
    attach_adapter(model, spec.model)
    assert base_state(model).keys() == before == llama().state_dict().keys()


def reference_logprobs(ranks: Ranks, folder: Path, by_rows: bool) -> list[float]:
    """Logprobs of the reference under bf16 autocast, with its rows in bf16 or in fp32."""
    torch.set_num_threads(1)
    spec = spec_of(folder, ranks, algorithm={"kl_beta": 0.1}, trainer={"precision": "bf16"})
    bundle = load_model_bundle(spec, progress=lambda _: None, generates=False)
    if by_rows:
        reference, _ = reference_and_critic(bundle, ranks, progress=lambda _: None)
        assert reference is not None and reference.model.dtype == torch.bfloat16
    else:
        reference = bundle.forward_of(load_model(folder, device=CPU))
        assert reference is not None
        shard(reference, ranks)
    prompt = pack_tokens(range(2, 12))
    completions = [Completion(prompt_ids=prompt, token_ids=pack_tokens(range(at, at + 9))) for at in (3, 40, 90)]
    with torch.no_grad():
        found = completion_logprobs(reference, completions, budget=100, temperature=1.0, logits_budget_bytes=1 << 20)
    return [value for each in found for value in unpack_logprobs(each)]


@pytest.mark.parametrize("shape", slow_except("llama", among=MODEL_SHAPES))
def test_a_reference_in_bf16_computes_what_its_rows_in_fp32_do(shape: str, tmp_path: Path) -> None:
    folder = save_folder(MODEL_SHAPES[shape](), tmp_path / "m")
    by_rows, whole = (on_ranks(2, reference_logprobs, folder, way)[0] for way in (True, False))
    assert by_rows and by_rows == whole


def state_bytes_of(ranks: Ranks, folder: Path) -> int:
    """Bytes of a rank's weights, gradients and moments, and of its reference."""
    torch.set_num_threads(1)
    spec = spec_of(folder, ranks, algorithm={"kl_beta": 0.1}, trainer={"precision": "bf16"})
    bundle = load_model_bundle(spec, progress=lambda _: None, generates=False)
    reference, _ = reference_and_critic(bundle, ranks, progress=lambda _: None)
    assert reference is not None
    subject = PolicyTrainer(
        bundle.forward, spec, compute=ComputeThread(), source=folder, reference=reference, ranks=ranks
    )
    step, gradients = subject.optimizer.step, list[int]()

    def counted(*arguments: Any) -> Any:
        gradients.append(sum(bytes_here(parameter.grad) for parameter in subject.model.parameters()))
        return step(*arguments)

    subject.optimizer.step = counted  # type: ignore[method-assign, assignment]
    one_step(subject, 1)
    moments = [value for state in subject.optimizer.state.values() for value in state.values()]
    held = [*subject.model.parameters(), *reference.model.parameters(), *moments]
    return gradients[0] + sum(map(bytes_here, held))


def bytes_here(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else local_rows(tensor)[0].nbytes


def test_the_forecast_of_uneven_rows(tmp_path: Path) -> None:
    """Of 1,001 rows of the vocabulary the first two of three ranks hold 334, the last 333."""
    config = LlamaConfig(
        vocab_size=1001,
        hidden_size=160,
        intermediate_size=400,
        num_hidden_layers=2,
        num_attention_heads=5,
        num_key_value_heads=1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    folder = save_folder(LlamaForCausalLM(config), tmp_path / "m")
    measured = on_ranks(3, state_bytes_of, folder)
    shape = shape_of_folder(folder)
    assert shape is not None
    spec = RunSpec.model_validate({"runtime": "ray", "trainer": {"shards": 3}, "algorithm": {"kl_beta": 0.1}})
    run = rl_states(spec, Models(policy=shape), BF16, Derivation()).total
    question = MemoryQuestion(algorithm="grpo", shape=shape, gpu=load_catalog().gpu("h100-80gb"))
    memory = sum(role.total for role in plan_memory(question).states) / 3
    assert max(measured) > min(measured)
    for forecast in (run, memory):
        for held in measured:
            assert forecast == pytest.approx(held, rel=0.05)
