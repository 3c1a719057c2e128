"""Model states: the weights, gradients and optimizer state of every role, in bytes over the whole cluster."""

from __future__ import annotations

from tidemill.core.records import Record
from tidemill.planner.figures import Sheet
from tidemill.planner.memory.question import Holding, MemoryQuestion
from tidemill.planner.memory.roles import ACTOR, REFERENCE, REWARD, Role, roles_of
from tidemill.sim.profiles.model_shape import ModelShape, adapted_widths, adapter_parameters
from tidemill.sim.profiles.precision import FROZEN_BYTES, MIXED_PRECISION, TRAINED

LORA = "LoRA, arXiv 2106.09685: two matrices, rank × (in + out), beside each linear layer but the output head"
OFFLOAD = "ZeRO-Offload, arXiv 2101.06840: optimizer state lives in the memory of the host"


class RoleStates(Record):
    """Bytes of one role over the whole cluster, wherever they are."""

    role: str
    trained: bool
    parameters: float
    weights: float
    gradients: float
    optimizer: float
    offloaded: bool = False

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer

    @property
    def on_host(self) -> float:
        return self.optimizer if self.offloaded else 0.0

    @property
    def on_gpus(self) -> float:
        return self.total - self.on_host


def all_states(question: MemoryQuestion, sheet: Sheet) -> list[RoleStates]:
    """Of every role, the policy first."""
    return [
        role_states(role, shape, question.holding, sheet, base_elsewhere=served)
        for role, shape, served in _models(question)
    ]


def _models(question: MemoryQuestion) -> list[tuple[Role, ModelShape, bool]]:
    """(role, its shape, whether another role's weights serve it)"""
    roles = [role for role in roles_of(question.algorithm) if question.reference is not False or role != REFERENCE]
    roles += [REFERENCE] if question.reference and REFERENCE not in roles else []
    roles += [REWARD] if question.reward and REWARD not in roles else []
    own = {"critic": question.critic, "reward": question.reward}
    adapter = question.holding.lora_rank > 0

    def served(role: Role) -> bool:
        return adapter and role.shares_base and role is not ACTOR and own.get(role.name) is None

    return [(role, own.get(role.name) or question.shape, served(role)) for role in roles]


def role_states(role: Role, shape: ModelShape, holding: Holding, sheet: Sheet, *, base_elsewhere: bool) -> RoleStates:
    """What one role keeps.

    Args:
        shape: of this role's model.
        base_elsewhere: under an adapter, its frozen weights are counted with another role.
    """
    trained = role.trained and not holding.lora_rank
    frozen = 0.0 if trained or base_elsewhere else shape.parameters
    learning = shape.parameters if trained else _adapter(role, shape, holding, sheet)
    each = TRAINED[holding.optimizer]
    weights = sheet.note(
        f"{role.name}.weights_bytes",
        frozen * FROZEN_BYTES + learning * each.weights,
        "bytes",
        formula="frozen_parameters * frozen_bytes + trained_parameters * trained_bytes",
        source=MIXED_PRECISION,
        frozen_parameters=frozen,
        frozen_bytes=FROZEN_BYTES,
        trained_parameters=learning,
        trained_bytes=each.weights,
    )
    gradients = optimizer = 0.0
    if learning:
        gradients = sheet.note(
            f"{role.name}.gradients_bytes",
            learning * each.gradients,
            "bytes",
            formula="trained_parameters * bytes_each",
            source=MIXED_PRECISION,
            trained_parameters=learning,
            bytes_each=each.gradients,
        )
        optimizer = sheet.note(
            f"{role.name}.optimizer_bytes",
            learning * each.optimizer,
            "bytes",
            formula="trained_parameters * (moments + master)",
            source=f"{MIXED_PRECISION}; {OFFLOAD}" if holding.offload else MIXED_PRECISION,
            trained_parameters=learning,
            moments=each.moments,
            master=each.master,
        )
    return RoleStates(
        role=role.name,
        trained=role.trained,
        parameters=shape.parameters,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        offloaded=holding.offload,
    )


def _adapter(role: Role, shape: ModelShape, holding: Holding, sheet: Sheet) -> float:
    """Parameters of a trained role's adapter."""
    if not (role.trained and holding.lora_rank):
        return 0.0
    attention, mlp, dense_layers = adapted_widths(shape)
    return sheet.note(
        f"{role.name}.adapter_parameters",
        adapter_parameters(shape, holding.lora_rank),
        "parameters",
        formula="rank * (layers * attention + dense_layers * mlp)",
        source=f"{LORA}; experts get none",
        rank=holding.lora_rank,
        layers=shape.layers,
        attention=attention,
        dense_layers=dense_layers,
        mlp=mlp,
    )
