"""What `plan memory` is asked."""

from __future__ import annotations

from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.planner.memory.roles import CRITIC, roles_of
from tidemill.sim.profiles.catalog import Gpu
from tidemill.sim.profiles.model_shape import ModelShape
from tidemill.sim.profiles.precision import Optimizer
from tidemill.sim.profiles.training_memory import Recompute


class Holding(Record):
    """How the trained roles are held."""

    optimizer: Optimizer = "adam"
    lora_rank: int = 0  # 0: the whole model learns
    offload: bool = False  # moments and master in the host's memory


class Parallel(Record):
    """Degrees of parallelism of the trainer. GPUs = fsdp * tp * pp * replicas."""

    fsdp: int = 0  # GPUs over which states are sharded; 0: over all there are
    tp: int = 1
    pp: int = 1
    ep: int = 1  # among the fsdp ones

    @property
    def model_gpus(self) -> int:
        """GPUs that hold one copy of the model before it is sharded any further."""
        return self.tp * self.pp


class Load(Record):
    """What is computed at once."""

    context: int = 4096  # tokens of a prompt with its completion
    microbatch_tokens: int = 0  # on one data-parallel rank; 0: one sample
    samples_in_flight: int = 64  # over the whole cluster
    recompute: Recompute = "full"

    @property
    def tokens(self) -> int:
        return self.microbatch_tokens or self.context


class MemoryQuestion(Record):
    """Everything that memory depends on."""

    algorithm: str
    shape: ModelShape
    gpu: Gpu
    critic: ModelShape | None = None  # None: like the policy
    reward: ModelShape | None = None
    reference: bool | None = None  # None: as the algorithm has it
    holding: Holding = Holding()
    parallel: Parallel = Parallel()
    load: Load = Load()
    engine_tp: int = 0  # GPUs of one engine; 0: as few as leave half of a GPU free
    generates_here: bool = True  # every GPU also generates; otherwise machines of their own do
    margin: float = 0.1  # share of a GPU's memory that fragmentation and other programs take


def _check_bounds(question: MemoryQuestion) -> None:
    parallel, load = question.parallel, question.load
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
            raise UserError(f"needs {bound} or more, was given {value}", where=option, cure="correct it")


def check(question: MemoryQuestion) -> MemoryQuestion:
    """The question itself.

    Raises:
        UserError: what cannot be asked.
    """
    parallel, shape = question.parallel, question.shape
    _check_bounds(question)
    if question.critic and CRITIC not in roles_of(question.algorithm):
        raise UserError(f"{question.algorithm} has no critic", where="--critic-params", cure="leave it out")
    if question.holding.lora_rank > shape.hidden:
        what = f"a rank of {question.holding.lora_rank} is above the model's width of {shape.hidden}"
        raise UserError(what, where="--lora-rank", cure="8 to 64 are usual")
    if not 0 <= question.margin < 1:
        what = f"needs a share from 0 to below 1, was given {question.margin:g}"
        raise UserError(what, where="--margin", cure="0.1 is usual")
    if shape.heads % parallel.tp:
        what = f"{parallel.tp} does not divide the model's {shape.heads} attention heads"
        raise UserError(what, where="--tp", cure="take a divisor")
    if parallel.pp > shape.layers:
        what = f"{parallel.pp} stages for {shape.layers} layers"
        raise UserError(what, where="--pp", cure="a stage needs a layer")
    if parallel.ep > 1 and not shape.experts:
        raise UserError("the model has no experts to spread", where="--ep", cure="leave it out, or give --model")
    if parallel.ep > 1 and shape.experts % parallel.ep:
        what = f"{parallel.ep} does not divide the model's {shape.experts} experts"
        raise UserError(what, where="--ep", cure="take a divisor")
    if parallel.fsdp and parallel.fsdp % parallel.ep:
        what = f"{parallel.ep} does not divide --fsdp {parallel.fsdp}, among whose GPUs the experts are spread"
        raise UserError(what, where="--ep", cure="take a divisor")
    return question
