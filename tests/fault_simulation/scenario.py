"""Draws a scenario from a seed: a run, its fleet, and the faults of each life of the controller."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from tests.doubles.costs import ConstantEngine, ConstantTrainer
from tests.fault_simulation.episodes import AgentPlan
from tidemill.config.schema import RunSpec
from tidemill.controller.turns import AgentLimits
from tidemill.core.records import Record
from tidemill.weights.delta import CHUNK

FaultKind: TypeAlias = Literal[
    "taken",  # evicted; the provider reports it late
    "noticed",  # evicted with a notice from the provider
    "self_noticed",  # evicted with a notice from the worker
    "dies",  # the process dies
    "crashes",  # the worker raises
    "hangs",  # no message in either direction
    "slows",
    "delays",  # messages are late, in order
    "reorders",
    "repeats",
    "loses",  # some messages are lost
    "forgets",  # ignores some requests
    "corrupts",  # sends corrupted reports
    "computes wrongly",
]

BREAKING: frozenset[FaultKind] = frozenset({"crashes", "reorders", "loses", "corrupts"})
"""Faults that may fail an attempt at a sample; three failures end the run."""

RunFault: TypeAlias = Literal[
    "power cut", "stop", "scorer raises", "scorer hangs", "provider raises", "reserved engine dies"
]
"""A fault that ends a life of the controller."""


class MachineFault(Record):
    """A fault of one machine."""

    kind: FaultKind
    at_s: float  # after the grant
    lasts_s: float  # duration of a hang, delay or notice
    share: float  # share of affected messages or samples
    corruption: int  # index of the corruption


class WorkerRankFault(Record):
    """A fault of one rank of a worker's engine, in a step or while a version is swapped in."""

    kind: Literal["dies", "hangs"]
    rank: int  # modulo their number
    load: int  # of its loads, counted from 1; 0: in a step
    at_s: float  # of a step, after the worker has started
    noticed_s: float  # until a call to a dead rank fails


class MachinePlan(Record):
    """A machine and its faults."""

    name: str
    granted_s: float
    told_late_s: float  # delay of the provider's events
    told_twice: bool
    boot_s: float
    slowness: float
    faults: tuple[MachineFault, ...]
    ranks: int = 0  # of the worker's engine; 0: it is one process that shares no memory with others
    rank_faults: tuple[WorkerRankFault, ...] = ()
    node: int = 0  # workers of a node share the files of versions


class RankFault(Record):
    """A fault of one rank of a sharded trainer, in one of the calls to it."""

    kind: Literal["dies", "hangs", "raises", "lags"]
    rank: int  # modulo their number
    method: Literal["accumulate", "commit", "logprobs", "save", "restore_latest", "publish"]
    call: int  # counted from 1 in this life
    moment: Literal["before", "after"]  # its work and its collective operations


PartFaultKind: TypeAlias = Literal[
    "wrong byte",
    "torn",
    "no change",  # in place of changed elements
    "exchanged",  # with another part
    "missing",
    "wrong length",  # in the manifest, at the cost of the next part
    "wrong checksum",  # of the whole delta, in the manifest: a part has none
]


class PartFault(Record):
    """Damage to one part of a published delta."""

    kind: PartFaultKind
    sealed: bool  # the manifest has the lengths and the checksum of the damaged delta
    rank: int  # whose delta, modulo their number
    delta: int  # counted from 0 in this life
    part: int  # modulo their number
    seed: int  # of the change within the part
    reads: int  # of the manifest, until both are right again


class GuardPlan(Record):
    """A guard of the reward that rolls the run back, and its gold."""

    alarms: tuple[tuple[int, int], ...]  # (step whose evidence raises it, onset)
    again: tuple[tuple[int, int], ...]  # after the rollback: then the run stops
    gold_s: float  # longest score
    hangs: float  # share of scores
    fails: float
    keep_last: int  # checkpoints


class LifePlan(Record):
    """One life of the controller, from start to end."""

    seed: int
    fault: RunFault | None  # None in the last life, in which the run must finish
    fault_s: float
    journal_bytes: int  # written until the power cut
    journal_s: float  # per append
    loses_checkpoint: bool  # loses the newest one before this life
    salt: str  # of its versions
    spoiled: tuple[tuple[str, bool, int], ...]  # (kind of blob, torn rather than corrupt, reads)
    machines: tuple[MachinePlan, ...]
    ranks: int = 1  # of the trainer
    rank_fault: RankFault | None = None
    part_faults: tuple[PartFault, ...] = ()
    tainted_s: tuple[float, ...] = ()  # a worker is found to have computed wrongly
    rollback_cut: Literal["", "before", "between"] = ""  # power is cut before it, or after checkpoints were deleted

    @property
    def damages(self) -> bool:
        """Whether weights may be damaged on their way."""
        return bool(self.part_faults) or any(reads for _, _, reads in self.spoiled)


INFINITE_S = float("inf")


class Scenario(Record):
    """All choices of a seed."""

    seed: int
    sections: dict[str, Any]  # of the `RunSpec`
    engine: ConstantEngine
    trainer: ConstantTrainer
    tick_s: float
    heartbeat_timeout_s: float
    elastic: bool
    reserved: bool
    longest: int  # completion
    different_prompts: int
    score_s: float
    fetch_s: float
    lives: tuple[LifePlan, ...]
    agent: AgentPlan | None = None  # None: samples are single completions
    guard: GuardPlan | None = None
    early_steps: int = 0  # of the run, until its last life or the first that finishes them; 0: all
    part_elements: int = CHUNK  # of a part of a delta
    patience_s: float = INFINITE_S  # longest time without a new token while samples are unfinished

    @property
    def spec(self) -> RunSpec:
        return RunSpec.model_validate(self.sections)


MU_STEP = {"correction": {"kind": "mu_step"}}
"""Every publish needs logprobs of samples in flight."""
LONG_SILENCE_S = 10.0

AGENTS = (2, 5, 7)
"""Seeds with one of these remainders modulo 9 run an agent."""
RANKS = (1, 3)
"""Seeds with one of these remainders modulo 5 have a sharded trainer."""
GUARDS = (11, 18, 22, 23, 25, 28)
"""Seeds with one of these remainders modulo 29 have a guard that rolls back."""
TAILS = (5, 9)
"""Seeds with one of these remainders modulo 11 use tail batching."""
WORKER_RANKS = (3, 6)
"""Seeds with one of these remainders modulo 7 have workers of several GPUs, unless their machines live shortly."""
SHORT_LIVES = 7
"""Seeds with this remainder modulo 13 have machines that live shorter than a recomputation."""


def draw(seed: int) -> Scenario:
    """Draw the scenario of a seed; equal on every machine."""
    scenario = with_parts(_draw(seed))
    if has_tail(seed):
        scenario = with_tail(scenario)
    if seed % 13 == SHORT_LIVES:
        scenario = with_short_lives(scenario)
    if seed % 9 in AGENTS:
        scenario = with_agent(scenario)
    if seed % 5 in RANKS:
        scenario = with_ranks(scenario)
    if has_worker_ranks(seed):
        scenario = with_worker_ranks(scenario)
    return with_guard(scenario) if has_guard(seed) else scenario


def has_guard(seed: int) -> bool:
    return seed % 29 in GUARDS


def has_tail(seed: int) -> bool:
    return seed % 11 in TAILS


def has_worker_ranks(seed: int) -> bool:
    return seed % 7 in WORKER_RANKS and seed % 13 != SHORT_LIVES


def with_tail(scenario: Scenario) -> Scenario:
    """The scenario with tail batching, and sometimes with steps that are added when it is resumed."""
    rng, sections = random.Random(f"tail {scenario.seed}"), scenario.sections
    prompts, steps = rng.randint(1, 4), rng.randint(2, 7)
    schedule = {
        "tail": "batching",
        "oversample": rng.choice([1.0, 1.25, 1.5, 2.0]),
        "nominal_slots": rng.choice([0, 0, 1, 3, 8]),
        "oversample_group": rng.choice([0, 0, 1, 2]),
    }
    redraw = {"max_redraws": rng.randint(1, 3), "dynamic_sampling": rng.random() < 0.4}
    lives = [
        msgspec.structs.replace(life, tainted_s=tuple(rng.expovariate(1 / 10) for _ in range(rng.choice([0, 0, 1, 3]))))
        for life in scenario.lives
    ]
    changed = {
        "schedule": schedule,
        "batch": {**sections["batch"], "prompts": prompts, "group_size": rng.choice([2, 2, 3])},
        "trainer": {"steps": steps},
        "algorithm": redraw,
    }
    return msgspec.structs.replace(
        scenario,
        sections={**sections, **changed},
        longest=rng.choice([12, 40]),
        early_steps=rng.choice([0, 0, rng.randint(1, steps)]),
        lives=tuple(lives),
    )


def with_parts(scenario: Scenario) -> Scenario:
    """The scenario with deltas of several parts, some of which are damaged."""
    rng = random.Random(f"parts {scenario.seed}")
    lives = [
        msgspec.structs.replace(life, part_faults=tuple(_part_fault(rng) for _ in range(rng.choice([0, 0, 1, 2, 4]))))
        for life in scenario.lives
    ]
    return msgspec.structs.replace(scenario, lives=tuple(lives), part_elements=rng.choice([16, 64, 64, 256, CHUNK]))


def _part_fault(rng: random.Random) -> PartFault:
    return PartFault(
        kind=rng.choice([*get_args(PartFaultKind)]),
        sealed=rng.random() < 0.7,
        rank=rng.randrange(6),
        delta=rng.choice([0, 0, 1, 2, 3]),
        part=rng.randrange(1 << 16),
        seed=rng.getrandbits(32),
        reads=rng.choice([1, 2, 4, 1 << 30]),
    )


def with_short_lives(scenario: Scenario) -> Scenario:
    """The scenario with machines that are evicted before they have computed a sample's tokens again, one after the
    other, so that the reserved engine is never alone."""
    rng = random.Random(f"short lives {scenario.seed}")
    fleet = {**scenario.sections["fleet"], "seeding": True}
    engine = msgspec.structs.replace(scenario.engine, step_s=0.1, prefill_tokens_per_s=20.0)
    lives = [
        msgspec.structs.replace(life, machines=tuple(_short_lived(rng, at))) for at, life in enumerate(scenario.lives)
    ]
    return msgspec.structs.replace(
        scenario,
        sections={**scenario.sections, "fleet": fleet, "eval": {**scenario.sections["eval"], "every_steps": 0}},
        engine=engine,
        elastic=True,
        reserved=True,
        fetch_s=0.0,
        lives=tuple(lives),
        patience_s=40.0,
    )


def _short_lived(rng: random.Random, life: int) -> Iterator[MachinePlan]:
    """Machines that generate for half a second, for 100 s."""
    for index in range(250):
        end = MachineFault(kind=rng.choice(["taken", "noticed"]), at_s=0.6, lasts_s=0.1, share=0.0, corruption=0)
        machine = _sound(f"{life}-{index}", granted_s=0.4 * index)
        yield msgspec.structs.replace(machine, faults=(end,))
    yield _sound(f"{life}-rescue", granted_s=100.0)


def with_ranks(scenario: Scenario) -> Scenario:
    """The scenario with a sharded trainer; every life draws its number of ranks."""
    rng = random.Random(f"ranks {scenario.seed}")
    lives = [
        msgspec.structs.replace(
            life, ranks=rng.choice([1, 2, 2, 3]), rank_fault=_rank_fault(rng, ends_life=life.fault is not None)
        )
        for life in scenario.lives
    ]
    return msgspec.structs.replace(scenario, lives=tuple(lives))


def _rank_fault(rng: random.Random, *, ends_life: bool) -> RankFault | None:
    fault = RankFault(
        kind=rng.choice(["dies", "dies", "hangs", "raises", "lags"] if ends_life else ["lags"]),
        rank=rng.randrange(6),
        method=rng.choice(["accumulate", "commit", "logprobs", "save", "restore_latest", "publish"]),
        call=1 + int(rng.expovariate(1 / 2)),
        moment=rng.choice(["before", "after"]),
    )
    return fault if rng.random() < 0.8 else None


def with_worker_ranks(scenario: Scenario) -> Scenario:
    """The scenario with workers of several GPUs, some of whose ranks die or hang."""
    rng = random.Random(f"worker ranks {scenario.seed}")
    nodes = rng.choice([1, 1, 2, 4])
    hangs = scenario.heartbeat_timeout_s < INFINITE_S  # else nothing ends a worker that hangs

    def with_faults(machine: MachinePlan) -> MachinePlan:
        sound = machine.name.endswith("rescue")
        faults = () if sound else tuple(_worker_rank_fault(rng, hangs=hangs) for _ in range(rng.choice([0, 1, 1, 2])))
        return msgspec.structs.replace(
            machine, ranks=rng.choice([1, 2, 2, 3, 4]), rank_faults=faults, node=rng.randrange(nodes)
        )

    lives = [msgspec.structs.replace(life, machines=tuple(map(with_faults, life.machines))) for life in scenario.lives]
    # Without the reserved engine a run stops when workers live shorter than it takes to compute a sample again.
    sections = {**scenario.sections, "fleet": {**scenario.sections["fleet"], "seeding": True}}
    scenario = msgspec.structs.replace(scenario, lives=tuple(lives), sections=sections)
    if has_tail(scenario.seed) or rng.random() < 0.3:
        return scenario
    # Samples are longer than a step of training, so that versions are swapped in while they run.
    lag = rng.choice([1, 2, 4])
    prompts = sections["batch"]["prompts"]
    changed = {
        "schedule": {
            **{key: value for key, value in sections["schedule"].items() if key != "fresh_fraction"},
            "max_policy_lag": lag,
            "unfinished": "continue",
            "overcommit": lag * prompts,
        },
        "sampling": {"max_new_tokens": 30},
        "trainer": {"steps": rng.randint(4, 6)},
    }
    return msgspec.structs.replace(
        scenario,
        sections={**sections, **changed},
        longest=40,
        tick_s=min(scenario.tick_s, 1.0),  # a worker that reports rarely must not look idle
        engine=msgspec.structs.replace(scenario.engine, step_s=0.3),
    )


def _worker_rank_fault(rng: random.Random, *, hangs: bool) -> WorkerRankFault:
    return WorkerRankFault(
        kind=rng.choice(["dies", "dies", "hangs"] if hangs else ["dies"]),
        rank=rng.randrange(12),
        load=rng.choice([0, 0, 1, 2, 3, 4]),
        at_s=rng.choice([0.0, rng.uniform(0, 3), rng.expovariate(1 / 8)]),
        noticed_s=rng.choice([0.0, 0.3, 9.2]),
    )


GOLD = {"rewards": [{"kind": "exact"}, {"kind": "numeric", "role": "gold", "weight": 0.0}]}


def with_guard(scenario: Scenario) -> Scenario:
    """The scenario with a guard that returns to a checkpoint at a drawn step, and sometimes stops the run later."""
    rng = random.Random(f"guard {scenario.seed}")
    steps = rng.randint(3, 6)
    alarm, stops = rng.randint(1, steps), rng.random() < 0.3
    later = rng.randint(alarm, steps)
    ago = rng.choice([0, 0, 1, 2])
    plan = GuardPlan(
        alarms=((alarm, max(1, alarm - ago)),),
        again=((later, later),) if stops else (),
        gold_s=rng.choice([0.0, 0.5, 4.0, 15.0]),
        hangs=rng.choice([0.0, 0.0, 0.2]),
        fails=rng.choice([0.0, 0.1]),
        keep_last=rng.choice([1, 1, 2, 10]),
    )
    weights = rng.choice([{}, {"reward_weights": {"exact": 0.5}}])
    short_lives = scenario.patience_s < INFINITE_S  # with these, nothing is evaluated during training
    guard = {
        "action": "rollback",
        "amend": {"kl_beta": 0.1, **weights},
        "gold_share": rng.choice([0.1, 1.0]),
        "gold_timeout_s": rng.choice([2.0, 10.0]),
        "canary_every": 0 if short_lives else rng.choice([0, 0, 1, 2]),
        "canaries": rng.choice([1, 3]),
    }
    lives = [
        msgspec.structs.replace(life, rollback_cut=rng.choice(["", "before", "between"]) if life.fault else "")
        for life in scenario.lives
    ]
    checkpoint = {"every_steps": rng.choice([0, 1, 1, 2, 3])}
    changed = {"trainer": {"steps": steps}, "checkpoint": checkpoint, "scoring": GOLD, "guard": guard}
    sections = {**scenario.sections, **changed}
    return msgspec.structs.replace(scenario, sections=sections, guard=plan, lives=tuple(lives), early_steps=0)


def with_agent(scenario: Scenario) -> Scenario:
    """The scenario with episodes instead of single completions."""
    rng = random.Random(f"agents {scenario.seed}")
    algorithm = {name: value for name, value in scenario.sections["algorithm"].items() if name not in MU_STEP}
    plan = AgentPlan(
        limits=AgentLimits(context_tokens=rng.choice([16, 40, 200]), turn_tokens=rng.choice([0, 2, 5])),
        longest_turn=min(scenario.longest, rng.choice([2, 6, 12])),
        most_turns=rng.choice([2, 4, 8]),
        slow_s=rng.choice([0.0, 0.3, 3.0]),
        dead=rng.choice([0.0, 0.02, 0.2]),
        dies=rng.choice([0.0, 0.05, 0.3]),
        late=rng.choice([0.0, 0.5]),
        raises=rng.choice([0.0, 0.0, 0.02]),
    )
    return msgspec.structs.replace(scenario, sections={**scenario.sections, "algorithm": algorithm}, agent=plan)


def _draw(seed: int) -> Scenario:
    rng = random.Random(f"faults {seed}")
    sections = _sections(rng)
    elastic = rng.random() < 0.9
    lives = rng.choice([1, 1, 2, 2, 3, 4])
    heartbeat_timeout_s = rng.choice([3.0, 3.0, 6.0, INFINITE_S])
    engine = ConstantEngine(
        slots=rng.choice([1, 2, 3, 4, 8]),
        plateau=rng.choice([1, 2, 8]),
        step_s=rng.choice([0.02, 0.1, 0.3]),
        prefill_tokens_per_s=rng.choice([100.0, 10_000.0]),
    )
    longest = rng.choice([3, 12, 40])
    # A worker that reports only finished samples must not look idle.
    rarely = INFINITE_S if engine.decode_s(engine.slots, 0, longest) < LONG_SILENCE_S else 1.0
    return Scenario(
        seed=seed,
        sections=sections,
        engine=engine,
        trainer=ConstantTrainer(
            tokens_per_s=rng.choice([30.0, 300.0, 10_000.0]),
            commit=rng.choice([0.0, 0.3, 2.0]),
            checkpoint=rng.choice([0.0, 0.5]),
        ),
        tick_s=rng.choice([0.1, 0.3, 1.0, rarely]),
        heartbeat_timeout_s=heartbeat_timeout_s,
        elastic=elastic,
        reserved=not elastic or rng.random() < 0.7,
        longest=longest,
        different_prompts=rng.choice([17, 200]),
        score_s=rng.choice([0.0, 0.2, 2.0]),
        fetch_s=rng.choice([0.0, 0.15, 1.0]),
        lives=tuple(_life(rng, at, last=at == lives - 1, elastic=elastic) for at in range(lives)),
    )


def _sections(rng: random.Random) -> dict[str, Any]:
    prompts, lag = rng.randint(1, 5), rng.choice([0, 0, 1, 1, 2, 4])
    schedule: dict[str, Any] = {
        "max_policy_lag": lag,
        "membership": rng.choice(["planned", "first_finished"]),
        "unfinished": rng.choice(["continue", "finish", "restart"]),
        "on_lag_limit": rng.choice(["wait", "restart", "drop"]),
    }
    max_redraws = rng.randint(0, 3)
    overcommit = rng.choice(["none", "adaptive", "some", "fresh"])
    if lag and overcommit == "some":
        schedule["overcommit"] = rng.randint(0, lag * prompts)
    elif lag and overcommit == "adaptive":
        schedule["overcommit"] = "adaptive"
    if overcommit == "fresh":
        schedule["fresh_fraction"] = rng.choice([0.25, 0.5, 1.0])
    return {
        "schedule": schedule,
        "batch": {
            "prompts": prompts,
            "group_size": rng.choice([2, 2, 3, 4]),
            "order": rng.choice(["canonical", "arrival"]),
        },
        "sampling": {"max_new_tokens": rng.choice([2, 12, 30])},
        "trainer": {"steps": rng.randint(2, 5)},
        "algorithm": {
            "max_redraws": max_redraws,
            "dynamic_sampling": rng.random() < 0.25,
            **(MU_STEP if lag and rng.random() < 0.5 else {}),
        },
        "eval": {"every_steps": rng.choice([0, 2]), "prompts": rng.choice([1, 3])},
        "checkpoint": {"every_steps": rng.choice([0, 1, 2])},
        "fleet": {
            "size": rng.choice(["pool", "adaptive"]),
            "seeding": rng.random() < 0.7,
            "seed_window_s": rng.choice([0.0, 0.5, 5.0]),
            "queue_limit": rng.choice([1, 2, 8]),
            "max_moves": rng.choice([0, 2]),
            "tail_fraction": rng.choice([0.0, 0.0, 0.3, 0.9]),
            "drain_margin_s": rng.choice([0.0, 0.3, 2.0]),
            "join_timeout_s": 15.0,
        },
        "pool": {"kind": "static", "workers": 1},
    }


def _life(rng: random.Random, at: int, *, last: bool, elastic: bool) -> LifePlan:
    machines = [_machine(rng, f"{at}-{index}", last=last) for index in range(rng.randint(0, 6))] if elastic else []
    if elastic:
        machines.append(_sound(f"{at}-rescue", granted_s=60.0))
    blows: list[RunFault] = [*get_args(RunFault)]
    return LifePlan(
        seed=rng.getrandbits(32),
        fault=None if last else rng.choice([*blows, "power cut", "power cut", "power cut"]),
        fault_s=rng.expovariate(1 / 8),
        journal_bytes=int(rng.expovariate(1 / 6000)),
        journal_s=rng.choice([0.0, 0.0, 0.05, 0.5]),
        loses_checkpoint=rng.random() < 0.1,
        salt=rng.choice(["", "", f"life {at}"]),
        spoiled=tuple(
            (kind, rng.random() < 0.5, rng.choice([0, 0, 1, 2])) for kind in ("manifest", "snapshot", "delta")
        ),
        machines=tuple(machines),
    )


def _machine(rng: random.Random, name: str, *, last: bool) -> MachinePlan:
    kinds: list[FaultKind] = [*get_args(FaultKind)]
    if last:  # three failed attempts end a run, and this one must finish
        kinds = [kind for kind in kinds if kind not in BREAKING]
    return MachinePlan(
        name=name,
        granted_s=rng.choice([0.0, rng.uniform(0, 12)]),
        told_late_s=rng.choice([0.0, 0.0, rng.uniform(0, 4)]),
        told_twice=rng.random() < 0.2,
        boot_s=rng.choice([0.0, 0.3, rng.uniform(0, 20)]),
        slowness=rng.choice([1.0, 1.0, 3.0, 10.0]),
        faults=tuple(_fate(rng, rng.choice(kinds)) for _ in range(rng.choice([0, 1, 1, 2, 3]))),
    )


def _sound(name: str, *, granted_s: float) -> MachinePlan:
    """A machine without faults."""
    return MachinePlan(
        name=name, granted_s=granted_s, told_late_s=0.0, told_twice=False, boot_s=0.1, slowness=1.0, faults=()
    )


def _fate(rng: random.Random, kind: FaultKind) -> MachineFault:
    return MachineFault(
        kind=kind,
        at_s=rng.choice([0.0, rng.uniform(0, 1), rng.expovariate(1 / 5)]),
        lasts_s=rng.choice([rng.uniform(0, 2), rng.uniform(0, 8), 1e6]),
        share=rng.choice([0.02, 0.2, 1.0]),
        corruption=rng.randrange(16),
    )
