"""The schedules that `tidemill simulate` compares, and the cluster of a recipe's `[simulation]`.

A new schedule is a function, a row in `SCHEDULES` and a name in `config/pool.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from tidemill.config.learning import ScheduleConfig
from tidemill.config.pool import RayPool, ScheduleName, StaticPool
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.formatting import counted
from tidemill.core.records import Record
from tidemill.hardware.completion_lengths import Lengths, lengths_of_run, log_normal_of_mean
from tidemill.hardware.engine_profile import (
    CODED_PER_CORE_S,
    DELTA_ELEMENT_BYTES,
    EngineProfile,
    cache_bytes,
    engine_profile,
    generation_s,
    rollout_of,
    steady_tokens_per_s,
)
from tidemill.hardware.gpu_catalog import Catalog, Gpu, Link, Machine, load_catalog
from tidemill.hardware.measured_rows import ASSUMED, Efficiencies, measured_efficiencies
from tidemill.hardware.model_config import read_shape
from tidemill.hardware.model_shape import DTYPE_BYTES, TRAINED, ModelShape, adapter_parameters, shape_of_parameters
from tidemill.hardware.trainer_profile import learning_passes, trainer_profile, updating_s
from tidemill.sim.baselines import chunked_components, rlboost_components, rlboost_fleet
from tidemill.sim.costs import ProfiledEngine, ProfiledTrainer, WeightCosts
from tidemill.sim.simulation import ComponentFactories, CostModel
from tidemill.sim.workload import Workload


class Schedule(Record):
    """The differences of a schedule from the recipe."""

    description: str
    schedule: ScheduleConfig
    shares_gpus: bool  # reserved GPUs alternate between generation and training; else they are split
    fleet: dict[str, Any] = {}  # [fleet] keys
    elastic: bool = False  # preemptible workers also generate
    streams: bool = False  # train on each complete group; else on the whole batch
    deltas: bool = False  # workers pull deltas
    factories: ComponentFactories = ComponentFactories()  # replacement components


def colocated(spec: RunSpec) -> Schedule:
    """As in veRL: each engine has a fixed part of the batch."""
    return Schedule(
        description="all GPUs generate a batch, each engine a fixed part, then all train on it",
        schedule=ScheduleConfig(),
        shares_gpus=True,
        factories=chunked_components(),
    )


def disaggregated(spec: RunSpec) -> Schedule:
    return Schedule(
        description="some GPUs generate, the others train on whole batches, on policy",
        schedule=ScheduleConfig(),
        shares_gpus=False,
    )


def one_step_off(spec: RunSpec) -> Schedule:
    """As in slime: the next batch is generated with the previous weights during training."""
    return Schedule(
        description="some GPUs generate the next batch with the previous weights, while others train on this one",
        schedule=ScheduleConfig(max_policy_lag=1, unfinished="finish"),
        shares_gpus=False,
    )


def bounded_staleness(spec: RunSpec) -> Schedule:
    """AReaL (arXiv 2505.24298): samples continue under new weights; the first finished groups form a batch."""
    lag = spec.simulation.staleness
    return Schedule(
        description=f"generation runs ahead by up to {counted(lag, 'version')} and continues under new weights",
        schedule=ScheduleConfig(max_policy_lag=lag, membership="first_finished"),
        shares_gpus=False,
    )


def streamed(spec: RunSpec) -> Schedule:
    """StreamRL (arXiv 2504.15930), on policy: samples stream to the trainer, longest expected first."""
    return Schedule(
        description="some GPUs generate, the others train on each complete group, on policy",
        schedule=ScheduleConfig(),
        shares_gpus=False,
        streams=True,
    )


def rlboost(spec: RunSpec) -> Schedule:
    """RLBoost (arXiv 2510.19225), with the constants of its public code."""
    return Schedule(
        description="preemptible workers generate, reserved GPUs only at first; the samples of a prompt move together",
        schedule=ScheduleConfig(),
        fleet=rlboost_fleet(spec.batch.group_size),
        shares_gpus=True,
        elastic=True,
        streams=True,
        factories=rlboost_components(spec.batch.group_size),
    )


def tidemill(spec: RunSpec) -> Schedule:
    """The recipe: samples move individually, workers pull deltas, longest expected first."""
    return Schedule(
        description="the recipe: preemptible workers generate; reserved GPUs alternate between generation and training",
        schedule=spec.schedule,
        shares_gpus=True,
        elastic=True,
        streams=True,
        deltas=True,
    )


def tail_batching(spec: RunSpec) -> Schedule:
    """RollPacker's rounds (arXiv 2509.21009) on preemptible workers, with the recipe's keys of tail batching."""
    given = spec.schedule
    return msgspec.structs.replace(
        tidemill(spec),
        description="as tidemill, on policy; groups that end last are trained on in rounds of their own",
        schedule=ScheduleConfig(
            tail="batching",
            oversample=given.oversample,
            oversample_group=given.oversample_group,
            nominal_slots=given.nominal_slots,
        ),
    )


SCHEDULES: dict[ScheduleName, Callable[[RunSpec], Schedule]] = {
    "colocated": colocated,
    "disaggregated": disaggregated,
    "one_step_off": one_step_off,
    "bounded_staleness": bounded_staleness,
    "streamed": streamed,
    "rlboost": rlboost,
    "tidemill": tidemill,
    "tail_batching": tail_batching,
}


EXECUTABLE: frozenset[ScheduleName] = frozenset({"one_step_off", "bounded_staleness", "tidemill", "tail_batching"})
"""Schedules that a run can have, by its keys in [schedule]; the others are simulated for comparison."""
CHANGED_WEIGHTS = 0.03  # fraction of the bf16 weights that change in a step
CODING_CORES = 16
"""Cores per machine that encode and apply deltas; assumed."""
HELD = 0.9
"""Share of the training GPUs' memory for model states; the rest is for activations and fragmentation."""
CRITIC = 2.0
"""Training cost factor with a critic of the policy's size."""


class SimulatedCluster(Record):
    """A model and the machines of a simulation."""

    spec: RunSpec
    shape: ModelShape
    machine: Machine
    gpu: Gpu
    worker_machine: Machine
    worker_gpu: Gpu
    lengths: Lengths
    efficiencies: dict[str, Efficiencies] = {}  # by name of the GPU; assumed for others
    efficiency_remarks: tuple[str, ...] = ()
    own_engines: int = 1  # of a recipe with ranks, on reserved machines

    @property
    def gpus(self) -> int:
        """Reserved GPUs."""
        return self.spec.simulation.machines * self.machine.gpus

    @property
    def engine_gpus(self) -> int:
        return self.spec.simulation.engine_gpus

    @property
    def most_generating(self) -> int:
        """Reserved GPUs of all engines that fit. Raises UserError: none fits."""
        return self.spec.simulation.machines * self.engines_of(self.machine) * self.engine_gpus

    def engines_of(self, machine: Machine) -> int:
        """Engines per machine. Raises UserError: none fits."""
        if self.engine_gpus > machine.gpus:
            what = f"an engine needs {self.engine_gpus} GPUs, {machine.name} has {machine.gpus}"
            raise UserError(what, where="simulation.engine_gpus", hint=f"set at most {machine.gpus}")
        return machine.gpus // self.engine_gpus

    def cost_model(self, schedule: Schedule, *, generating: int, elastic: bool) -> CostModel:
        """The costs of a schedule on this cluster.

        Args:
            generating: reserved GPUs that generate; unless shared, the others train.
            elastic: with preemptible workers.

        Raises:
            UserError: the model does not fit.
        """
        engines = generating // self.engine_gpus
        return CostModel(
            trainer=self.trainer(self.learning(schedule, generating)),
            weights=self.weights(deltas=schedule.deltas),
            reserved=ProfiledEngine(profile=self.engine(self.gpu), engines=engines) if engines else None,
            reserved_load_s=self.load_s,
            shares_gpus=schedule.shares_gpus,
            streams=schedule.streams,
            worker=self.worker() if elastic else None,
        )

    def learning(self, schedule: Schedule, generating: int) -> int:
        """Training GPUs: in the schedule of a recipe with ranks and a reserved engine, those of its ranks."""
        if schedule.shares_gpus:
            return self.gpus
        return self.spec.trainer.shards if self.is_fixed(schedule) else self.gpus - generating

    def is_fixed(self, schedule: Schedule) -> bool:
        """Whether the recipe itself divides the GPUs between ranks and engines."""
        return schedule.elastic and self.spec.trainer.shards > 1 and self.spec.engine_is_apart

    def worker(self) -> ProfiledEngine:
        engines, profile = self.engines_of(self.worker_machine), self.engine(self.worker_gpu)
        return ProfiledEngine(profile=profile, engines=engines, boot_s=self.spec.simulation.boot_s)

    def engine(self, gpu: Gpu) -> EngineProfile:
        """Raises UserError: the weights do not fit the engine's GPUs."""
        gpus, dtype = self.engine_gpus, self.spec.simulation.engine_dtype
        share = self.efficiencies.get(gpu.name, ASSUMED).engine
        if (room := cache_bytes(self.shape, gpu, gpus=gpus, dtype=dtype, efficiency=share)) <= 0:
            what = f"the weights of an engine do not fit {gpus} × {gpu.title}: {-room / 1e9:.1f} GB are missing"
            raise UserError(what, where="simulation.engine_gpus", hint="use more or larger GPUs per engine")
        slots = self.spec.engine.slots
        return engine_profile(self.shape, gpu, gpus=gpus, dtype=dtype, slots=slots, efficiency=share)

    def trainer(self, gpus: int) -> ProfiledTrainer:
        """Raises UserError: the model states do not fit `gpus` GPUs."""
        states = self.states_bytes
        if (missing := states - HELD * gpus * self.gpu.memory_bytes) > 0:
            raise UserError(
                f"the training states do not fit {gpus} × {self.gpu.title}: {missing / 1e9:.0f} GB of "
                f"{states / 1e9:.0f} GB are missing",
                where="simulation.machines",
                hint="reserve more machines; `tidemill plan memory` counts everything",
            )
        spec = self.spec
        recompute, adapter = spec.trainer.activation_checkpointing is True, spec.model.lora.enabled
        critic = CRITIC if spec.algorithm.needs_critic else 1.0
        passes = critic * learning_passes(recompute=recompute, adapter=adapter)
        # Training GPUs within one machine: with several machines, those that engines leave over on each.
        together = self.machine.gpus % self.engine_gpus if spec.simulation.machines > 1 else self.machine.gpus
        machines = math.ceil(gpus / self.machine.gpus)
        update_s = updating_s(self.trained_parameters, self.gpu, gpus=gpus, machines=machines, offload=True)
        profile = trainer_profile(
            self.shape,
            self.gpu,
            gpus=gpus,
            gpus_per_machine=together or self.machine.gpus,
            network=Link(bytes_per_s=self.machine.network_bytes_per_s),
            update_s=update_s if self.offloads else None,
            efficiency=self.efficiencies.get(self.gpu.name, ASSUMED).trainer,
        )
        return ProfiledTrainer(
            profile=profile,
            passes=passes + self.has_reference,
            microbatch_tokens=spec.batch.microbatch_budget,
        )

    @property
    def has_reference(self) -> bool:
        """Whether the trainer also computes a reference."""
        return self.spec.algorithm.kl_beta > 0 and "reference" not in self.spec.placement.on_actors

    @property
    def offloads(self) -> bool:
        return self.spec.trainer.offload == "optimizer"

    @property
    def trained_parameters(self) -> float:
        """Trained and published parameters of the policy: all, or those of its adapter."""
        rank = self.spec.model.lora.rank
        return adapter_parameters(self.shape, rank) if rank else self.shape.parameters

    @property
    def states_bytes(self) -> float:
        """Weights, gradients and moments of trained models; adapters, critic and reference share a frozen base."""
        frozen = DTYPE_BYTES["bf16"] * self.shape.parameters
        learners = 2 if self.spec.algorithm.needs_critic else 1
        base = frozen if self.spec.model.lora.enabled or self.has_reference else 0.0
        states = TRAINED["adam"]
        each = states.total - states.optimizer if self.offloads else states.total
        return learners * each * self.trained_parameters + base

    @property
    def load_s(self) -> float:
        """Time until reserved engines have a new version: over links within a machine, else over the network."""
        if self.spec.simulation.machines > 1:
            return self.nbytes / self.machine.network_bytes_per_s
        return self.nbytes / self.engine_gpus / self.gpu.link_bytes_per_s

    @property
    def nbytes(self) -> float:
        """Bytes of a published version."""
        return self.trained_parameters * DTYPE_BYTES["bf16"]

    def weights(self, *, deltas: bool) -> WeightCosts:
        """Costs of publishing and pulling; deltas only if encoding, sending and applying one beats a snapshot."""
        downlink = self.worker_machine.network_bytes_per_s
        delta = self.trained_parameters * CHANGED_WEIGHTS * DELTA_ELEMENT_BYTES
        coding_s = self.trained_parameters / (CODED_PER_CORE_S * CODING_CORES)
        deltas = deltas and 2 * coding_s + delta / downlink < self.nbytes / downlink
        return WeightCosts(
            nbytes=round(self.nbytes),
            delta_nbytes=round(delta) if deltas else 0,
            uplink_bytes_per_s=self.spec.simulation.machines * self.machine.network_bytes_per_s,
            downlink_bytes_per_s=downlink,
            publish_s=coding_s if deltas else 0.0,
            pull_s=coding_s if deltas else 0.0,
            swap_s=2 * self.nbytes / self.engine_gpus / self.worker_gpu.bandwidth_bytes_per_s,
        )

    def workload(self) -> Workload:
        given = self.spec.simulation
        return Workload(
            lengths=self.lengths,
            prompt_tokens=given.prompt_tokens,
            prompt_correlation=given.prompt_correlation,
            solved=given.solved,
        )

    def balanced(self, *, overlapping: bool) -> int:
        """Generating GPUs in the split with the shortest step.

        Args:
            overlapping: the step takes the longer of generation (without tail) and training; else their sum.

        Raises:
            UserError: no split fits.
        """
        profile, spec = self.engine(self.gpu), self.spec
        samples = spec.batch.prompts * spec.batch.group_size
        rollout = rollout_of(
            self.lengths,
            samples=samples,
            group_size=spec.batch.group_size,
            prompt_tokens=float(spec.simulation.prompt_tokens),
        )
        tokens = samples * rollout.mean
        found: dict[int, float] = {}
        refused: UserError | None = None
        for engines in range(1, min(self.most_generating, self.gpus - 1) // self.engine_gpus + 1):
            try:
                trainer = self.trainer(self.gpus - engines * self.engine_gpus)
            except UserError as error:
                refused = refused or error
                continue
            learning_s = trainer.profile.step_s(
                tokens,
                rollout.prompt_tokens + rollout.mean,
                passes=trainer.passes,
                microbatch=trainer.microbatch_tokens,
            )
            if overlapping:
                generating_s = tokens / engines / max(steady_tokens_per_s(profile, rollout, samples / engines), 1e-9)
                found[engines] = max(generating_s, learning_s)
            else:
                found[engines] = generation_s(profile, rollout, samples / engines) + learning_s
        if not found:
            what = f"{self.gpus} GPUs cannot be split between generation and training"
            hint = refused.what if refused else "reserve more, or use a schedule that shares them"
            raise UserError(what, where="simulation.schedules", hint=hint)
        return min(found, key=found.__getitem__) * self.engine_gpus


def cluster_of(spec: RunSpec) -> SimulatedCluster:
    """The cluster of `[simulation]`.

    Raises:
        UserError: unknown model or machine (suggests the closest), impossible lengths, or invalid measured rows.
    """
    given = spec.simulation
    if (given.parameters is None) == (given.model is None):
        what = "no model given" if given.model is None else "both simulation.parameters and simulation.model are given"
        raise UserError(what, where="simulation", hint="set parameters = 14e9, or model to a folder with a config.json")
    shape = read_shape(given.model) if given.model is not None else shape_of_parameters(given.parameters or 0.0)
    catalog = load_catalog(given.catalog)
    machine = _machine(catalog, given.machine, "simulation.machine")
    worker = _machine(catalog, given.worker_machine, "simulation.worker_machine")
    gpu, worker_gpu = catalog.gpu(machine.gpu), catalog.gpu(worker.gpu)
    if given.lengths_from is not None:
        lengths: Lengths = lengths_of_run(given.lengths_from)
    else:
        limit = spec.sampling.max_new_tokens
        try:
            lengths = log_normal_of_mean(given.completion_tokens, sigma=given.completion_sigma, limit=limit)
        except UserError as error:
            hint = "raise sampling.max_new_tokens (the limit) or lower the mean"
            raise UserError(error.what, where="simulation.completion_tokens", hint=hint) from None
    efficiencies, remarks = measured_efficiencies(
        given.measured, catalog, shape=shape, gpus=(gpu, worker_gpu), engines=(spec.engine.kind,)
    )
    cluster = SimulatedCluster(
        spec=spec,
        shape=shape,
        machine=machine,
        gpu=gpu,
        worker_machine=worker,
        worker_gpu=worker_gpu,
        lengths=lengths,
        efficiencies=efficiencies,
        efficiency_remarks=remarks,
    )
    return msgspec.structs.replace(cluster, spec=_priced(cluster))


def with_all_machines(cluster: SimulatedCluster, pool: RayPool) -> tuple[SimulatedCluster, int]:
    """With machines for all workers of a Ray pool from the start, and their number. Prices are those of workers.

    A pool that selects no nodes has its workers on the reserved machines, beside the reserved engine.
    """
    if not pool.selector:
        own = cluster.spec.model_copy(update={"pool": StaticPool(workers=0)})
        return msgspec.structs.replace(cluster, spec=own, own_engines=1 + pool.max_workers), 0
    each = cluster.engines_of(cluster.worker_machine)
    static = StaticPool(workers=math.ceil(pool.max_workers / each))
    given, fleet = cluster.spec.fleet.preemptible_usd_per_hour, cluster.spec.fleet
    if given != cluster.worker_machine.preemptible_usd_per_hour:  # not filled in from the catalogue
        fleet = fleet.model_copy(update={"preemptible_usd_per_hour": each * given})
    spec = cluster.spec.model_copy(update={"pool": static, "fleet": fleet})
    return msgspec.structs.replace(cluster, spec=spec), static.workers


def _machine(catalog: Catalog, name: str, where: str) -> Machine:
    try:
        return catalog.machine(name)
    except UserError as error:
        hint = error.hint.replace("--catalog FILE", "simulation.catalog")
        raise UserError(error.what, where=where, hint=hint) from None


def _priced(cluster: SimulatedCluster) -> RunSpec:
    """The spec with catalogue prices where it has none."""
    fleet, machines = cluster.spec.fleet, cluster.spec.simulation.machines
    reserved, preemptible = cluster.machine.usd_per_hour or 0.0, cluster.worker_machine.preemptible_usd_per_hour or 0.0
    prices = {
        "reserved_usd_per_hour": fleet.reserved_usd_per_hour or machines * reserved,
        "preemptible_usd_per_hour": fleet.preemptible_usd_per_hour or preemptible,
    }
    return cluster.spec.model_copy(update={"fleet": fleet.model_copy(update=prices)})
