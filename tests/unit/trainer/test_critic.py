"""Critics against a plain computation, one sample at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.model_folders import save_folder
from tests.model_shapes import HIDDEN, MODEL_SHAPES, llama
from tests.trajectories import trajectory
from tidemill.config.algorithm import CriticConfig
from tidemill.core.records import Trajectory, unpack_tokens
from tidemill.models.attention import use_packed_attention
from tidemill.models.reward_model import ScalarHead, reward_head
from tidemill.models.tree_forward import TreeForward, TreeOutput
from tidemill.models.weights_digest import weights_digest
from tidemill.trainer.critic import ModelCritic, ReturnScale, TrunkCritic
from tidemill.trainer.packing import Microbatch, WeightedSample, pack
from tidemill.trainer.scoring import token_logprobs

CPU = torch.device("cpu")
COEFFICIENT = 0.3
SAMPLES = [
    trajectory([5, 6, 7, 8], [9, 10, 11], 1.0),
    trajectory([5, 6, 7, 8], [9, 12], 0.0, index=1),
    trajectory([5, 6, 20], [21, 22, 23, 24], 0.5, index=2),
]


def packed(samples: Sequence[Trajectory] = SAMPLES) -> Microbatch:
    """With the token weights of a mean over samples."""
    weighted = [WeightedSample(trajectory=t, advantage=0.5, token_weight=1.0 / t.completion_length) for t in samples]
    return pack(weighted, CPU)


def plain_values(model: PreTrainedModel, head: ScalarHead, sample: Trajectory) -> Tensor:
    ids = torch.tensor([unpack_tokens(sample.token_ids)])
    hidden = model(ids, use_cache=False, output_hidden_states=True).hidden_states[-1][0]
    values: Tensor = head(hidden[sample.prompt_length - 1 : -1])
    return values


def in_microbatch_order(parts: Sequence[Tensor]) -> Tensor:
    """Per-sample tokens, sorted by the node that predicts them as in `pack`."""
    microbatch = packed()
    nodes = torch.cat(
        [torch.from_numpy(path)[t.prompt_length - 1 :] for path, t in zip(microbatch.tree.paths, SAMPLES, strict=True)]
    )
    return torch.cat(list(parts))[torch.argsort(nodes, stable=True)]


def returns_of(samples: Sequence[Trajectory]) -> list[Tensor]:
    return [torch.linspace(-1, 2, t.completion_length) + t.sample_id.index for t in samples]


def gradients(*modules: torch.nn.Module) -> dict[str, Tensor]:
    found = {f"{number}.{name}": p.grad for number, m in enumerate(modules) for name, p in m.named_parameters()}
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


def assert_equal_gradients(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert ours.keys() == plain.keys()
    largest = max(float(gradient.abs().max()) for gradient in plain.values())
    for name, gradient in plain.items():
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=1e-5 * largest, msg=name)


def model_critic(shape: str = "llama", *, clip: float = 0.0, source: Path = Path()) -> ModelCritic:
    model = MODEL_SHAPES[shape]()
    use_packed_attention(model)
    config = CriticConfig(learning_rate=1e-2)
    return ModelCritic(TreeForward(model), reward_head(HIDDEN), config, source=source, value_clip=clip)


def trunk_critic(model: PreTrainedModel) -> TrunkCritic:
    config = CriticConfig(kind="shared", learning_rate=1e-2)
    return TrunkCritic(TreeForward(model), reward_head(HIDDEN), config, value_coefficient=COEFFICIENT)


@pytest.mark.parametrize("shape", MODEL_SHAPES)
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_values_and_gradients_of_a_separate_model_equal_plain_ones(shape: str, clip: float) -> None:
    model, head = MODEL_SHAPES[shape](), reward_head(HIDDEN)
    plain = [plain_values(model, head, sample) for sample in SAMPLES]
    start = [values.detach() - 0.4 for values in plain]
    loss = torch.zeros(())
    for values, first, returns in zip(plain, start, returns_of(SAMPLES), strict=True):
        error = (values - returns).square()
        if clip:
            error = torch.max(error, (values.clamp(first - clip, first + clip) - returns).square())
        loss = loss + error.mean()
    loss.backward()
    critic = model_critic(shape, clip=clip)
    microbatch = packed()
    torch.testing.assert_close(
        critic.values(microbatch)(), in_microbatch_order([each.detach() for each in plain]), rtol=1e-5, atol=1e-5
    )
    critic.learn(microbatch, in_microbatch_order(returns_of(SAMPLES)), in_microbatch_order(start))
    assert_equal_gradients(gradients(critic.model, critic.head), gradients(model, head))
    assert critic.step(3.0)()["value_loss"] == pytest.approx(loss.item() / 3, rel=1e-5)


def forward(model: PreTrainedModel, microbatch: Microbatch) -> TreeOutput:
    return token_logprobs(TreeForward(model), microbatch, temperature=1.0, logits_budget_bytes=1 << 20)


def policy_loss(output: TreeOutput, microbatch: Microbatch) -> Tensor:
    return -(microbatch.weights * microbatch.advantages * output.logprobs).sum()


def joint_plain_gradients() -> dict[str, Tensor]:
    """Trunk: gradient of policy loss + coefficient × value loss. Head: gradient of the value loss."""
    model, head = llama(), reward_head(HIDDEN)
    use_packed_attention(model)
    microbatch = packed()
    returns = in_microbatch_order(returns_of(SAMPLES))
    output = forward(model, microbatch)
    values = head(output.states)[microbatch.head_rows]
    value_part = (microbatch.weights * (values - returns).square()).sum()
    trunk = torch.autograd.grad(policy_loss(output, microbatch) + COEFFICIENT * value_part, list(model.parameters()))
    values = head(output.states.detach())[microbatch.head_rows]
    (microbatch.weights * (values - returns).square()).sum().backward()
    names = [f"0.{name}" for name, _ in model.named_parameters()]
    head_gradients = {name.replace("0.", "1."): gradient for name, gradient in gradients(head).items()}
    return dict(zip(names, trunk, strict=True)) | head_gradients


@pytest.mark.parametrize("shared", [True, False])
def test_a_shared_trunk_has_both_gradients_and_one_forward_pass(shared: bool) -> None:
    model = llama()
    use_packed_attention(model)
    runs: list[int] = []
    model.base_model.register_forward_hook(lambda *_: runs.append(1))
    critic, microbatch = trunk_critic(model), packed()
    returns = in_microbatch_order(returns_of(SAMPLES))
    output = forward(model, microbatch)
    microbatch.states = output.states if shared else None
    values = critic.values(microbatch)()
    critic.learn(microbatch, returns, values)
    policy_loss(output, microbatch).backward()
    assert_equal_gradients(gradients(model, critic.head), joint_plain_gradients())
    assert len(runs) == (1 if shared else 3)


def test_states_without_a_graph_train_only_the_head() -> None:
    model = llama()
    use_packed_attention(model)
    critic, microbatch = trunk_critic(model), packed()
    microbatch.states = forward(model, microbatch).states.detach()
    critic.learn(microbatch, in_microbatch_order(returns_of(SAMPLES)), critic.values(microbatch)())
    assert gradients(model) == {}
    assert set(gradients(critic.head)) == {"0.weight", "0.bias"}


def test_a_new_value_head_outputs_zero() -> None:
    critic = ModelCritic(TreeForward(llama()), ScalarHead(HIDDEN), CriticConfig(), source=Path())
    use_packed_attention(critic.model)
    assert critic.values(packed())().tolist() == [0.0] * 9


def test_metrics_by_hand() -> None:
    critic = ModelCritic(TreeForward(llama()), ScalarHead(HIDDEN), CriticConfig(), source=Path())
    use_packed_attention(critic.model)
    microbatch = packed(SAMPLES[:1])  # three tokens of weight 1/3, and values of 0
    critic.learn(microbatch, torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 1.0, 3.0]))
    metrics = critic.step(1.0)()
    # (1 + 4 + 9) / 3 = 14/3; Var(R) = 2/3; R - V = (0, 1, 0): Var = 1/3 - 1/9 = 2/9; 1 - 1/3 = 2/3
    assert metrics["value_loss"] == pytest.approx(14 / 3)
    assert metrics["explained_variance"] == pytest.approx(2 / 3)
    assert (metrics["returns_mean"], metrics["value_clip_fraction"]) == (2.0, 0.0)
    assert critic.step(1.0)().keys() == {"value_grad_norm"}  # no tokens, no means


def test_values_converge_to_returns() -> None:
    critic, microbatch = model_critic(), packed()
    returns = in_microbatch_order(returns_of(SAMPLES))
    losses = []
    for _ in range(30):
        values = critic.values(microbatch)()
        critic.learn(microbatch, returns, values)
        losses.append(critic.step(3.0)()["value_loss"])
    assert losses[-1] < 0.1 * losses[0]


def test_updating_the_scale_keeps_every_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.trainer.critic.DECAY", 0.5)
    head, scale = reward_head(HIDDEN), ReturnScale()
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    before = head(hidden).detach()
    scale.update(head, mean=100.0, mean_square=100.0**2 + 9.0)  # deviation 3
    assert [scale.mean, scale.std] == pytest.approx([100.0, 3.0])
    torch.testing.assert_close(scale.mean + scale.std * head(hidden).detach(), before, rtol=1e-4, atol=1e-4)
    scale.update(head, mean=104.0, mean_square=104.0**2)
    # weights 0.25 and 0.5 of 0.75: mean (25 + 52) / 0.75; second moment (0.25 · 10009 + 0.5 · 10816) / 0.75
    assert scale.mean == pytest.approx(77 / 0.75)
    assert scale.std**2 == pytest.approx((0.25 * 10009 + 0.5 * 10816) / 0.75 - (77 / 0.75) ** 2)


def test_returns_of_any_scale_are_learned_if_normalised() -> None:
    config = CriticConfig(learning_rate=1e-2, normalize=True)
    model = llama()
    use_packed_attention(model)
    critic = ModelCritic(TreeForward(model), ScalarHead(HIDDEN), config, source=Path())
    microbatch = packed()
    returns = 1000 + 50 * in_microbatch_order(returns_of(SAMPLES))
    for _ in range(40):
        critic.learn(microbatch, returns, critic.values(microbatch)())
        metrics = critic.step(3.0)()
    # Two states have two returns, 1 and 2.5 apart: 2 · (0.5² + 1.25²) / 9 = 0.40 of the variance 2.32 is noise.
    assert 0.75 < metrics["explained_variance"] < 1 - 0.40 / 2.32
    assert float((critic.values(microbatch)() - returns).abs().mean()) < 60


@pytest.mark.parametrize("kind", ["model", "trunk"])
def test_a_restored_critic_continues_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    source, directory = save_folder(llama(), tmp_path / "source"), tmp_path / "state"
    directory.mkdir()

    def made() -> ModelCritic | TrunkCritic:
        if kind == "model":
            return model_critic(source=source)
        model = llama()
        use_packed_attention(model)
        return trunk_critic(model)

    def learn(critic: ModelCritic | TrunkCritic) -> None:
        microbatch = packed()
        critic.learn(microbatch, in_microbatch_order(returns_of(SAMPLES)), critic.values(microbatch)())
        critic.step(3.0)

    critic = made()
    learn(critic)
    learn(critic)
    critic.write_state(directory)
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    assert size <= critic.state_bytes() <= size + (128 << 10)
    learn(critic)
    restored = made()
    restored.read_state(directory)
    if kind == "trunk":  # the policy trainer restores the trunk
        restored.model.load_state_dict(critic.model.state_dict())
    learn(restored)
    assert restored.optimizer_steps == 3
    assert weights_digest(restored.head) == weights_digest(critic.head)
    assert kind == "trunk" or weights_digest(restored.model) == weights_digest(critic.model)
