"""A trainer of several ranks computes the gradients, metrics and weights of one."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.adapters import adapted
from tests.model_folders import save_folder
from tests.model_shapes import HIDDEN, VOCABULARY, forward_of, llama, qwen3
from tests.rank_processes import on_ranks
from tests.rotation import DAY
from tests.trajectories import group, trajectory
from tests.workbench import RecordedSteps, demonstrations, fit_context, pairs, supervised_spec
from tidemill.config.algorithm import CriticConfig
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.records import Group, PolicyVersion, WeightManifest, unpack_logprobs
from tidemill.models.catalog import resolve
from tidemill.models.ranks import ONE_RANK, Ranks, local_rows
from tidemill.models.reward_model import reward_head
from tidemill.models.snapshots import empty_copy, joined_views, snapshot_bytes, snapshot_layout, write_snapshot
from tidemill.models.tree_forward import TreeForward
from tidemill.models.weights_digest import weights_digest
from tidemill.rollout.weight_sources import EmptyModel, rows_of
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.model_bundle import checkpoint_activations, load_model_bundle, reference_and_critic
from tidemill.trainer import critic as critics
from tidemill.trainer import policy, supervised_loop
from tidemill.trainer.critic import Critic, ModelCritic, TrunkCritic
from tidemill.trainer.objectives import PreferenceObjective, RewardObjective, SupervisedObjective
from tidemill.trainer.policy import PolicyTrainer
from tidemill.trainer.sharding import join_ranks, shard
from tidemill.trainer.supervised_loop import fit
from tidemill.trainer.update import clip_and_step
from tidemill.weights.puller import whole_manifest
from tidemill.weights.snapshot import (
    Snapshot,
    aligned,
    allocate,
    digest_of,
    joined_part_sums,
    part_sums,
    sealed,
    verify,
)

# One process starts the server of the ranks.
pytestmark = pytest.mark.xdist_group("ranks")
Arrays = dict[str, npt.NDArray[np.float32]]

KL_STOP = 0.01
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {}},
    "two minibatches, two epochs": {"algorithm": {}, "batch": {"minibatches": 5, "epochs": 2}},
    "kl": {"algorithm": {"kl_beta": 0.1}},
    "kl in the reward": {"algorithm": {"name": "ppo", "kl_beta": 0.1, "kl_in": "reward"}},
    "value head": {"algorithm": {"name": "ppo", "kl_beta": 0.0}, "critic": {"kind": "shared"}},
    "own critic": {"algorithm": {"name": "ppo", "kl_beta": 0.0}, "critic": {"kind": "own"}},
    "adapter": {"algorithm": {"kl_beta": 0.1}},
    "entropy bonus": {"algorithm": {"entropy_bonus": 0.1}},
    # Stops before the last minibatches, by a mean over the tokens of all ranks.
    "kl stop": {"algorithm": {"kl_stop": KL_STOP}, "batch": {"minibatches": 5, "epochs": 2}},
    "recomputed activations": {"algorithm": {}, "trainer": {"activation_checkpointing": True}},
    "recomputed MLPs": {"algorithm": {}, "trainer": {"activation_checkpointing": "selective"}},
    "bf16": {"algorithm": {}, "trainer": {"precision": "bf16"}},
}


def groups() -> list[Group]:
    """Five groups of three samples; microbatches of 30 tokens give rounds with and without padding."""
    rng = np.random.default_rng(0)
    made = []
    for position in range(5):
        prompt = rng.integers(2, VOCABULARY, 6).tolist()
        samples = []
        for index in range(3):
            completion = rng.integers(2, VOCABULARY, rng.integers(2, 9)).tolist()
            logprobs = (-5 + rng.random(len(completion))).tolist()
            samples.append(trajectory(prompt, completion, float(rng.random()), index=index, logprobs=logprobs))
        made.append(group(position, samples))
    return made


def spec_of(case: str) -> RunSpec:
    given = CASES[case]
    batch = {"prompts": 5, "group_size": 3, "microbatch_tokens": 30, **given.get("batch", {})}
    return RunSpec.model_validate(
        {
            "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.5},
            "sampling": {"max_new_tokens": 16},
            **given,
            "batch": batch,
        }
    )


def sharded(model: Any, ranks: Ranks, *, autocast: torch.dtype | None = None) -> TreeForward:
    forward = forward_of(model)
    assert forward is not None
    forward.autocast = autocast
    shard(forward, ranks)
    return forward


def critic_of(spec: RunSpec, forward: TreeForward, ranks: Ranks) -> Critic | None:
    if not spec.algorithm.needs_critic:
        return None
    config, head = CriticConfig(kind=spec.critic.kind, learning_rate=1e-2), reward_head(HIDDEN)
    if config.kind == "shared":
        return TrunkCritic(forward, head, config, value_coefficient=0.5, ranks=ranks)
    return ModelCritic(sharded(llama(3), ranks), head, config, ranks=ranks)


def train(ranks: Ranks, case: str) -> dict[str, Any]:
    """Two steps: gradients before each optimizer step, metrics, final weights and their digests."""
    torch.set_num_threads(1)
    spec = spec_of(case)
    autocast = torch.bfloat16 if spec.trainer.precision == "bf16" else None
    model = adapted() if case == "adapter" else qwen3() if case == "grpo" else llama()
    checkpoint_activations(model, spec.trainer.recomputes(on_gpu=False))
    forward = sharded(model, ranks, autocast=autocast)
    reference = sharded(llama(7), ranks) if spec.algorithm.kl_beta else None
    gradients: list[Arrays] = []

    def captured(optimizer: torch.optim.Optimizer, **settings: Any) -> float:
        parameters = [p for each in optimizer.param_groups for p in each["params"] if p.grad is not None]
        grads = [whole(parameter.grad, ranks) * settings["scale"] for parameter in parameters]
        gradients.append({str(index): gradient.numpy() for index, gradient in enumerate(grads)})
        return clip_and_step(optimizer, **settings)

    policy.clip_and_step = critics.clip_and_step = captured  # type: ignore[attr-defined]
    subject = PolicyTrainer(
        forward,
        spec,
        compute=ComputeThread(),
        source=Path(),
        reference=reference,
        critic=critic_of(spec, forward, ranks),
        ranks=ranks,
    )
    start, metrics, details = subject.version.digest, [], list[dict[str, list[float]]]()
    for step in (1, 2):
        for each in groups():
            subject.add_group(each)
        found = subject.finish_batch(step)
        values = found.values
        detailed = [update for update in found.updates if update.entropies]
        details.append({f"{u.sample_id}": unpack_logprobs(u.trainer_logprobs + u.entropies) for u in detailed})
        metrics.append({name: value for name, value in values.items() if "time" not in name and "cpu" not in name})
    policy.clip_and_step = critics.clip_and_step = clip_and_step  # type: ignore[attr-defined]
    return {
        "gradients": gradients,
        "metrics": metrics,
        "details": details,
        "digests": (start, subject.version.digest),
        "rows": sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters()),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def whole(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """All rows of a sharded gradient; the sum over the ranks of one that every rank holds."""
    result: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else ranks.all_sum(tensor)
    return result.detach().clone()


def slow_except(*usual: str, among: Iterable[Any] = CASES) -> list[Any]:
    """Parameters of a test, of which only `usual` run in `make test`."""
    return [case if case in usual else pytest.param(case, marks=pytest.mark.slow) for case in among]


@pytest.mark.parametrize("case", slow_except("grpo", ("value head", "adapter")[DAY % 2]))
def test_two_ranks_compute_the_gradients_of_one(case: str) -> None:
    (alone,) = on_ranks(1, train, case)
    first, second = on_ranks(2, train, case)
    # The gradients of the first step; later ones are those of weights that differ by rounding.
    tolerance = 0.1 if case == "bf16" else 1e-6  # shards keep the residual stream in bf16, too
    steps = 1 if not spec_of(case).algorithm.needs_critic else 2  # the critic's and the policy's
    for expected, found in zip(alone["gradients"][:steps], first["gradients"][:steps], strict=True):
        assert found.keys() == expected.keys()
        largest = max(float(np.abs(each).max()) for each in expected.values())
        for name, gradient in expected.items():
            scale = max(float(np.abs(gradient).max()), 1e-3 * largest)
            assert float(np.abs(found[name] - gradient).max()) <= tolerance * scale, name
    for expected, found in zip(alone["metrics"], first["metrics"], strict=True):
        coarse = case == "bf16" or "epochs" in case  # many optimizer steps amplify rounding
        assert found == pytest.approx(expected, rel=0.1 if coarse else 1e-3, abs=0.02 if coarse else 1e-4)
    assert first["metrics"] == second["metrics"]
    assert first["details"] == second["details"], "samples that another rank computed are there, too"
    assert first["details"][0].keys() == alone["details"][0].keys()
    if case != "bf16":
        for name, expected in alone["details"][0].items():
            assert first["details"][0][name] == pytest.approx(expected, abs=1e-3)
    assert first["digests"] == second["digests"]
    assert first["digests"][0] == alone["digests"][0]
    assert first["rows"] + second["rows"] == alone["parameters"]


@pytest.mark.slow
def test_ranks_beyond_the_rows_of_a_parameter() -> None:
    (alone,) = on_ranks(1, train, "value head")
    several = on_ranks(5, train, "value head")
    for name, gradient in alone["gradients"][1].items():
        found = several[4]["gradients"][1][name]
        assert float(np.abs(found - gradient).max()) <= 1e-5 * float(np.abs(gradient).max()), name
    assert len({each["digests"] for each in several}) == 1


@pytest.mark.slow
def test_the_same_number_of_ranks_gives_the_same_bits() -> None:
    first, second = (on_ranks(2, train, "grpo")[0] for _ in range(2))
    assert first["digests"] == second["digests"]
    assert first["metrics"] == second["metrics"]


def trainer_of(ranks: Ranks, case: str, *, source: Path) -> PolicyTrainer:
    spec = spec_of(case)
    model = adapted() if case == "adapter" else llama()
    forward = sharded(model, ranks)
    return PolicyTrainer(
        forward,
        spec,
        compute=ComputeThread(),
        source=source,
        critic=critic_of(spec, forward, ranks),
        reference=sharded(llama(7), ranks) if spec.algorithm.kl_beta else None,
        ranks=ranks,
    )


def one_step(subject: PolicyTrainer, step: int) -> None:
    for each in groups():
        subject.add_group(each)
    subject.finish_batch(step)


def state_of(subject: PolicyTrainer, ranks: Ranks) -> Arrays:
    """All weights and moments, of the policy and of a critic with a model of its own."""
    found: Arrays = {}
    parts = [("policy", subject.model, subject.optimizer)]
    if isinstance(subject._critic, ModelCritic):
        parts.append(("critic", subject._critic.model, subject._critic.optimizer))
    for part, model, optimizer in parts:
        for name, parameter in model.named_parameters():
            found[f"{part} {name}"] = all_rows(parameter).numpy()
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{part} {name} {key}"] = all_rows(value).numpy()
    return found


def all_rows(tensor: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return result.detach().clone()


def save(ranks: Ranks, case: str, folder: Path) -> tuple[Arrays, str]:
    subject = trainer_of(ranks, case, source=folder)
    one_step(subject, 1)
    if ranks.index == 0:
        (folder / "state").mkdir()
    ranks.barrier()
    subject.write_state(folder / "state")
    return state_of(subject, ranks), subject.version.digest


def restore(ranks: Ranks, case: str, folder: Path) -> tuple[Arrays, str]:
    subject = trainer_of(ranks, case, source=folder)
    subject.read_state(folder / "state")
    found = state_of(subject, ranks)
    one_step(subject, 2)
    return found, subject.version.digest


@pytest.mark.parametrize(
    ("case", "saved_by", "restored_by"),
    [
        ("grpo", 2, 1),
        ("grpo", 1, 2),
        *(
            pytest.param(case, *sizes, marks=pytest.mark.slow)
            for case in ("grpo", "own critic", "adapter")
            for sizes in ((2, 1), (1, 2), (2, 3), (2, 2))
            if (case, *sizes) not in {("grpo", 2, 1), ("grpo", 1, 2)}
        ),
    ],
)
def test_any_number_of_ranks_restores_a_checkpoint(case: str, saved_by: int, restored_by: int, tmp_path: Path) -> None:
    stored, digest = on_ranks(saved_by, save, case, tmp_path)[0]
    found, _ = on_ranks(restored_by, restore, case, tmp_path)[0]
    assert found.keys() == stored.keys()
    assert any("exp_avg_sq" in name for name in found)
    for name, value in stored.items():
        assert np.array_equal(found[name], value), name
    assert digest


def test_missing_rows_of_moments_are_not_restored(tmp_path: Path) -> None:
    on_ranks(2, save, "grpo", tmp_path)
    state = tmp_path / "state" / "trainer_state" / "state.json"
    written = json.loads(state.read_text())
    state.write_text(json.dumps({**written, "moments": written["moments"][:1]}))
    with pytest.raises(UserError, match=r"it has \d+ rows of the exp_avg"):
        restore(ONE_RANK, "grpo", tmp_path)


def test_the_export_of_two_ranks_has_the_bytes_of_one(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for size, folder in zip((1, 2), folders, strict=True):
        folder.mkdir()
        on_ranks(size, export, folder)
    names = {path.name for path in (folders[0] / "state").iterdir() if path.is_file()}
    assert "model.safetensors" in names
    for name in names:
        assert (folders[1] / "state" / name).read_bytes() == (folders[0] / "state" / name).read_bytes(), name


def export(ranks: Ranks, folder: Path) -> None:
    subject = trainer_of(ranks, "grpo", source=folder)
    if ranks.index == 0:
        (folder / "state").mkdir()
    ranks.barrier()
    subject.write_state(folder / "state")


def published(ranks: Ranks, shape: str) -> list[tuple[bytes, bytes]]:
    """(manifest, buffer) of this rank's rows, in bf16."""
    model = {"llama": llama, "qwen3": qwen3}[shape]()
    sharded(model, ranks)
    layout = snapshot_layout(model, torch.bfloat16)
    buffer = allocate(snapshot_bytes(layout))
    buffer[:] = 0
    write_snapshot(model, layout, buffer)
    entries = sealed(layout, buffer)
    version = PolicyVersion(number=3, digest="any")
    manifest = WeightManifest(version=version, digest=digest_of(entries), nbytes=len(buffer), tensors=entries)
    return [(msgspec.msgpack.encode(manifest), buffer.tobytes())]


@pytest.mark.parametrize(("shape", "size"), [("llama", 5), pytest.param("qwen3", 2, marks=pytest.mark.slow)])
def test_the_snapshots_of_several_ranks_make_that_of_one(shape: str, size: int) -> None:
    def snapshot(manifest: bytes, buffer: bytes) -> Snapshot:
        decoded = msgspec.msgpack.decode(manifest, type=WeightManifest)
        found = Snapshot(manifest=decoded, buffer=aligned(np.frombuffer(buffer, np.uint8)))
        verify(decoded, found.buffer)
        return found

    ((alone,),) = on_ranks(1, published, shape)
    expected = snapshot(*alone)
    parts = [snapshot(*part) for (part,) in on_ranks(size, published, shape)]
    whole = whole_manifest([part.manifest for part in parts])
    places = [(entry.name, entry.shape, entry.offset, entry.nbytes) for entry in whole.tensors]
    assert places == [(entry.name, entry.shape, entry.offset, entry.nbytes) for entry in expected.manifest.tensors]
    assert joined_part_sums(parts) == part_sums(expected.manifest.tensors, expected.buffer)
    bound = [empty_copy({"llama": llama, "qwen3": qwen3}[shape](), torch.bfloat16) for _ in range(2)]
    for _ in range(2):  # the second time into the same memory
        EmptyModel(bound[0]).bind(parts, "learned")
    EmptyModel(bound[1]).bind([expected], "learned")
    streamed = dict(joined_views(rows_of(parts)))
    for (name, joined), (_, tensor) in zip(bound[0].named_parameters(), bound[1].named_parameters(), strict=True):
        assert torch.equal(joined, tensor)
        assert torch.equal(streamed[name], tensor)


def fit_on_ranks(ranks: Ranks, kind: str, folder: Path) -> dict[str, Any]:
    """Three steps of a supervised objective; gradients of the first, metrics, and a resume for two more."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {"gradients": []}

    def captured(optimizer: torch.optim.Optimizer, **settings: Any) -> float:
        parameters = [p for each in optimizer.param_groups for p in each["params"] if p.grad is not None]
        grads = [whole(parameter.grad, ranks) * settings["scale"] for parameter in parameters]
        results["gradients"].append({str(index): gradient.numpy() for index, gradient in enumerate(grads)})
        return clip_and_step(optimizer, **settings)

    supervised_loop.clip_and_step = captured  # type: ignore[attr-defined]
    for steps in (3, 5):
        spec = supervised_spec(
            supervised={"minibatch_tokens": 120, "microbatch_tokens": 30, "epochs": 0},
            trainer={"steps": steps},
            optimizer={"learning_rate": 1e-3},
            checkpoint={"every_steps": 1},
        )
        forward = sharded(llama(), ranks)
        lines = RecordedSteps()
        context = fit_context(
            folder / "run", model=forward.model, source=folder / "model", forward=forward, ranks=ranks, telemetry=lines
        )
        objective: Any = {"sft": SupervisedObjective, "reward": RewardObjective, "dpo": PreferenceObjective}[kind]
        examples: Any = demonstrations(24) if kind == "sft" else pairs(24)
        result = fit(spec, objective(spec, context), train=examples[:20], held_out=examples[20:], context=context)
        results[f"metrics {steps}"] = [
            {name: value for name, value in each.values.items() if "time" not in name} for each in lines.steps
        ]
        results[f"resumed {steps}"] = result.resumed_from
        results[f"digest {steps}"] = lines.steps[-1].version.digest
    supervised_loop.clip_and_step = clip_and_step  # type: ignore[attr-defined]
    return results


@pytest.mark.parametrize("kind", slow_except("sft", among=("sft", "reward", "dpo")))
def test_supervised_stages_compute_on_two_ranks_what_they_compute_on_one(kind: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        save_folder(llama(), tmp_path / name / "model")
    (alone,) = on_ranks(1, fit_on_ranks, kind, tmp_path / "one")
    first, second = on_ranks(2, fit_on_ranks, kind, tmp_path / "two")
    for name, gradient in alone["gradients"][0].items():
        scale = max(float(np.abs(gradient).max()), 1e-6)
        assert float(np.abs(first["gradients"][0][name] - gradient).max()) <= 2e-6 * scale, name
    for steps in (3, 5):
        for expected, found in zip(alone[f"metrics {steps}"], first[f"metrics {steps}"], strict=True):
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-3)
        assert first[f"digest {steps}"] == second[f"digest {steps}"]
    assert (first["resumed 3"], first["resumed 5"]) == (0, 3)


def reward_digest(ranks: Ranks) -> str:
    """Of a sharded model and a head that every rank holds as a whole."""
    module = torch.nn.ModuleDict({"model": sharded(llama(), ranks), "head": reward_head(HIDDEN)})
    return weights_digest(module, ranks)


def test_the_digest_of_a_reward_model_does_not_depend_on_the_number_of_ranks() -> None:
    (alone,) = on_ranks(1, reward_digest)
    assert on_ranks(2, reward_digest) == [alone, alone]


def bytes_of_a_started_rank(ranks: Ranks, sizes: dict[str, Any]) -> tuple[int, int]:
    """(bytes of all parameters alive in this process, bytes of the policy as a whole)."""
    torch.set_num_threads(1)
    spec = RunSpec.model_validate({"runtime": "ray", "trainer": {"shards": 2, "threads": 1}, **sizes})
    bundle = load_model_bundle(spec, progress=lambda _: None, generates=False)
    whole_bytes = sum(parameter.nbytes for parameter in bundle.model.parameters())
    models = reference_and_critic(bundle, ranks, progress=lambda _: None)
    gc.collect()
    alive = [each for each in gc.get_objects() if isinstance(each, torch.nn.Parameter)]
    storages = {local_rows(each)[0].untyped_storage().data_ptr(): local_rows(each)[0].nbytes for each in alive}
    assert models == (None, None)
    return sum(storages.values()), whole_bytes


def test_no_whole_model_is_left_after_the_start_of_a_rank() -> None:
    model = {"source": "char", "char": {"alphabet": "0123456789+=\n", "hidden_size": 256}, "lora": {"rank": 2}}
    sizes = {"model": model, "algorithm": {"kl_beta": 0.0}}
    resolve(RunSpec.model_validate(sizes).model, progress=lambda _: None)
    for alive, whole_bytes in on_ranks(2, bytes_of_a_started_rank, sizes):
        assert alive <= 0.51 * whole_bytes


def first_rank_is_there(ranks: Ranks) -> bool:
    first = int(ranks.gather(str(os.getpid()).encode())[0])
    if ranks.index:
        time.sleep(0.3)
    return Path(f"/proc/{first}/fd").is_dir() and bool(list(Path(f"/proc/{first}/fd").iterdir()))


def test_a_rank_that_is_done_stays_connected_until_all_are() -> None:
    assert on_ranks(2, first_rank_is_there) == [True, True]


def test_ranks_that_do_not_share_a_folder_are_told_so(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"size": 2, "index": 0, "device": torch.device("cpu"), "one_machine": True}
    for meeting, timeout_s in ((tmp_path / "missing" / "meeting", 60.0), (tmp_path / "meeting", 0.5)):
        with pytest.raises(UserError, match="do not find each other") as refused:
            join_ranks(meeting, timeout_s=timeout_s, **settings)
        assert refused.value.where == "run.dir"
