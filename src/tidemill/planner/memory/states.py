"""The question of `plan memory`, and the bytes of weights, gradients and optimizer state of every role."""

from __future__ import annotations

import difflib

from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.hardware.figures import Derivation
from tidemill.hardware.gpu_catalog import Gpu
from tidemill.hardware.model_shape import (
    FROZEN_BYTES,
    MIXED_PRECISION,
    TRAINED,
    ModelShape,
    Optimizer,
    adapted_widths,
)
from tidemill.hardware.trainer_profile import Recompute


class Role(Record):
    """One model of a run."""

    name: str
    trained: bool
    shares_base: bool = True  # with LoRA: uses the policy's frozen weights


ACTOR = Role(name="actor", trained=True)
CRITIC = Role(name="critic", trained=True)
REFERENCE = Role(name="reference", trained=False)
REWARD = Role(name="reward", trained=False, shares_base=False)

# Algorithms without a reward model are assumed to use rule-based rewards; --reward-params adds one.
ROLES: dict[str, tuple[Role, ...]] = {
    "ppo": (ACTOR, CRITIC, REFERENCE, REWARD),
    "grpo": (ACTOR, REFERENCE),
    "dr_grpo": (ACTOR,),
    "rloo": (ACTOR, REFERENCE),
    "reinforce_pp": (ACTOR, REFERENCE),
    "reinforce_pp_baseline": (ACTOR, REFERENCE),
    "dapo": (ACTOR,),
    "gspo": (ACTOR,),
    "cispo": (ACTOR,),
    "dpo": (ACTOR, REFERENCE),
    "reward_model": (ACTOR,),
    "sft": (ACTOR,),
}
WHOLE_BATCH = ("ppo", "reinforce_pp", "reinforce_pp_baseline")
"""Algorithms that whiten advantages over the batch, so training starts when the whole batch is generated."""
GENERATE_NOTHING = ("dpo", "reward_model", "sft")


def roles_of(algorithm: str) -> tuple[Role, ...]:
    """Models of an algorithm.

    Raises:
        UserError: unknown algorithm; suggests the nearest one.
    """
    if algorithm not in ROLES:
        close = difflib.get_close_matches(algorithm, ROLES, 1, 0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UserError("unknown algorithm", where=f"--algorithm {algorithm}", hint=f"{hint}known: {', '.join(ROLES)}")
    return ROLES[algorithm]


class Holding(Record):
    """How trained roles are stored."""

    optimizer: Optimizer = "adam"
    lora_rank: int = 0  # 0: train the whole model
    offload: bool = False  # moments and master weights in host memory


class Parallel(Record):
    """Degrees of parallelism of the trainer. GPUs = fsdp * tp * pp * replicas."""

    fsdp: int = 0  # GPUs over which states are sharded; 0: all
    tp: int = 1
    pp: int = 1
    ep: int = 1  # within fsdp

    @property
    def model_gpus(self) -> int:
        """GPUs that hold one copy of the model before FSDP."""
        return self.tp * self.pp


class Load(Record):
    """Sizes of the computation."""

    context: int = 4096  # tokens of a prompt and its completion
    microbatch_tokens: int = 0  # per data-parallel rank; 0: one sample
    samples_in_flight: int = 64  # over the whole cluster
    recompute: Recompute = "full"
    logits_budget: float = 1e15  # most bytes of logits and their gradients at once; Tidemill computes them in chunks

    @property
    def tokens(self) -> int:
        return self.microbatch_tokens or self.context


class MemoryQuestion(Record):
    """Everything that determines the memory."""

    algorithm: str
    shape: ModelShape
    gpu: Gpu
    critic: ModelShape | None = None  # None: as the policy
    reward: ModelShape | None = None
    reference: bool | None = None  # None: as the algorithm requires
    holding: Holding = Holding()
    parallel: Parallel = Parallel()
    load: Load = Load()
    engine_tp: int = 0  # GPUs of one engine; 0: the fewest that leave half of a GPU free
    generates_here: bool = True  # every GPU also generates; otherwise separate machines do
    margin: float = 0.1  # fraction of a GPU's memory lost to fragmentation and other programs


def check(question: MemoryQuestion) -> None:
    """Raises UserError: an option is invalid."""
    shape, parallel, load = question.shape, question.parallel, question.load
    least = {
        "--tp": (parallel.tp, 1),
        "--pp": (parallel.pp, 1),
        "--ep": (parallel.ep, 1),
        "--fsdp": (parallel.fsdp, 0),
        "--context": (load.context, 1),
        "--microbatch-tokens": (load.microbatch_tokens, 0),
        "--samples-in-flight": (load.samples_in_flight, 0),
        "--engine-tp": (question.engine_tp, 0),
        "--lora-rank": (question.holding.lora_rank, 0),
    }
    for option, (value, bound) in least.items():
        if value < bound:
            raise UserError(f"needs {bound} or more, was given {value}", where=option, hint="correct it")

    if question.critic and CRITIC not in roles_of(question.algorithm):
        raise UserError(f"{question.algorithm} has no critic", where="--critic-params", hint="leave it out")
    if question.holding.lora_rank > shape.hidden:
        what = f"a rank of {question.holding.lora_rank} is above the model's width of {shape.hidden}"
        raise UserError(what, where="--lora-rank", hint="8 to 64 are usual")
    if not 0 <= question.margin < 1:
        what = f"needs a share from 0 to below 1, was given {question.margin:g}"
        raise UserError(what, where="--margin", hint="0.1 is usual")
    if shape.heads % parallel.tp:
        what = f"{parallel.tp} does not divide the model's {shape.heads} attention heads"
        raise UserError(what, where="--tp", hint="take a divisor")
    if parallel.pp > shape.layers:
        what = f"{parallel.pp} stages exceed the model's {shape.layers} layers"
        raise UserError(what, where="--pp", hint="a stage needs at least one layer")
    if parallel.ep > 1 and not shape.experts:
        raise UserError("the model has no experts", where="--ep", hint="leave it out, or give --model")
    if parallel.ep > 1 and shape.experts % parallel.ep:
        what = f"{parallel.ep} does not divide the model's {shape.experts} experts"
        raise UserError(what, where="--ep", hint="take a divisor")
    if parallel.fsdp and parallel.fsdp % parallel.ep:
        what = f"{parallel.ep} does not divide --fsdp {parallel.fsdp}; the experts are divided among those GPUs"
        raise UserError(what, where="--ep", hint="take a divisor")


LORA = "LoRA, arXiv 2106.09685: two matrices, rank × (in + out), for each linear layer except the output head"
OFFLOAD = "ZeRO-Offload, arXiv 2101.06840: optimizer state is kept in host memory"


class RoleStates(Record):
    """Bytes of one role over the whole cluster, on GPUs and hosts."""

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


def all_states(question: MemoryQuestion, sheet: Derivation) -> list[RoleStates]:
    """States of all roles, the policy first."""
    roles = [role for role in roles_of(question.algorithm) if question.reference is not False or role != REFERENCE]
    roles += [REFERENCE] if question.reference and REFERENCE not in roles else []
    roles += [REWARD] if question.reward and REWARD not in roles else []
    own = {"critic": question.critic, "reward": question.reward}

    def served(role: Role) -> bool:
        """Whether it uses the policy's frozen weights."""
        adapter = question.holding.lora_rank > 0
        return adapter and role.shares_base and role is not ACTOR and own.get(role.name) is None

    return [
        role_states(role, own.get(role.name) or question.shape, question.holding, sheet, base_elsewhere=served(role))
        for role in roles
    ]


def role_states(
    role: Role, shape: ModelShape, holding: Holding, sheet: Derivation, *, base_elsewhere: bool
) -> RoleStates:
    """Compute the states of one role.

    Args:
        shape: of this role's model.
        base_elsewhere: with LoRA, its frozen weights are counted with another role.
    """
    trained = role.trained and not holding.lora_rank
    frozen = 0.0 if trained or base_elsewhere else shape.parameters
    learning = shape.parameters if trained else _adapter(role, shape, holding, sheet)
    each = TRAINED[holding.optimizer]
    weights = "frozen_parameters * frozen_bytes + trained_parameters * trained_bytes"
    formulas = {"weights": ("bytes", weights, MIXED_PRECISION)}
    if learning:
        kept = f"{MIXED_PRECISION}; {OFFLOAD}" if holding.offload else MIXED_PRECISION
        formulas |= {
            "gradients": ("bytes", "trained_parameters * bytes_each", MIXED_PRECISION),
            "optimizer": ("bytes", "trained_parameters * (moments + master)", kept),
        }
    states = sheet.evaluate(
        formulas,
        label=f"{role.name}.{{}}_bytes",
        frozen_parameters=frozen,
        frozen_bytes=FROZEN_BYTES,
        trained_parameters=learning,
        trained_bytes=each.weights,
        bytes_each=each.gradients,
        moments=each.moments,
        master=each.master,
    )
    return RoleStates(
        role=role.name,
        trained=role.trained,
        parameters=shape.parameters,
        weights=states["weights"],
        gradients=states.get("gradients", 0.0),
        optimizer=states.get("optimizer", 0.0),
        offloaded=holding.offload,
    )


def _adapter(role: Role, shape: ModelShape, holding: Holding, sheet: Derivation) -> float:
    """Parameters of a trained role's adapter."""
    if not (role.trained and holding.lora_rank):
        return 0.0
    attention, mlp, dense_layers = adapted_widths(shape)
    return sheet.compute(
        f"{role.name}.adapter_parameters",
        "parameters",
        formula="rank * (layers * attention + dense_layers * mlp)",
        source=f"{LORA}; experts have none",
        rank=holding.lora_rank,
        layers=shape.layers,
        attention=attention,
        dense_layers=dense_layers,
        mlp=mlp,
    )
