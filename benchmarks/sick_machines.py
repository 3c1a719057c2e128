"""Sick machines among 16 simulated ones: are they found, how soon, and are healthy ones left alone.

    python -m benchmarks.sick_machines [--seeds 200] [--healthy 50] [--first 1000] [--steps 24] [--processes 2]

The real controller, fleet and `MachineWatch` in virtual time; engines, trainer and weights are simulated. Each seed has
three sick machines with different faults that begin 150 to 240 s after the start, and 13 healthy ones. Other seeds
without faults follow, for false alarms alone. Machines differ in speed by a few percent, their speed varies by 4 % from
second to second, completions grow to twice their length during a run (the whole fleet becomes slower per token), and
the mismatch of healthy workers varies by a factor of two between batches.

- *bit flip*: one bit of the weights in memory, until the next version is loaded; its effect on logprobs is drawn from
  1e-7 to 1 nat per token, so that most flips are visible in the sums of the weights only;
- *stale weights*: loads change the version that a worker names, not its weights;
- *slow*: 1.3 times its usual time per token;
- *NaN*: a report in five has logprobs that are not numbers;
- *flaky join*: workers die after a minute on average, and seven of ten fail to start.

A batch counts as wrong if it was trained on tokens computed with other weights than their version's, or with NaN
logprobs. Thresholds were chosen on seeds 0 to 39. Also measured: the cost of a judgement in the controller, and of the
sums of weights in a worker.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import math
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from typing import Any

import msgspec
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measuring import exit_code, write_result
from benchmarks.origin import parsed
from benchmarks.subjects import check_counts
from tidemill.config.schema import RunSpec
from tidemill.controller.fleet import Fleet
from tidemill.core.errors import WorkerLost
from tidemill.core.protocols import Clock, LoopClock
from tidemill.core.records import (
    Group,
    Lease,
    Loaded,
    LogprobBuffer,
    PolicyVersion,
    Pulled,
    Record,
    Reward,
    SampleId,
    StepMetrics,
    TokenBuffer,
    Trajectory,
    WeightManifest,
    WeightsSum,
    WorkerReport,
    pack_logprobs,
    pack_tokens,
    unpack_logprobs,
)
from tidemill.guard.machines import MachineWatch
from tidemill.models.snapshots import snapshot_bytes, snapshot_layout, write_snapshot
from tidemill.pool.provider import Change, ScheduledProvider
from tidemill.rollout.weight_sources import EmptyModel
from tidemill.sim.outcome import Recording
from tidemill.sim.simulated_engine import SimulatedEngine
from tidemill.sim.simulated_trainer import LearningTrainer, SimulatedCheckpoints, SimulatedDisk
from tidemill.sim.simulated_worker import SimulatedWorker
from tidemill.sim.simulation import SimulatedComponents, drive
from tidemill.sim.virtual_time import run_virtual
from tidemill.sim.workload import SimulatedPrompts, SimulatedScorer
from tidemill.telemetry.events import WORKER_HEALTH
from tidemill.weights.snapshot import PARTS, allocate, part_sums, sealed

MACHINES, SICK = 16, 3
FAULTS = ("bit flip", "stale weights", "slow", "NaN", "flaky join")
FIRST_S, LAST_S = 150.0, 240.0
SLOTS, TICK_S, GROUP = 8, 1.0, 4
MEAN_TOKENS, GROWTH = 600, 1.0
JITTER, SPREAD = 0.04, 0.03
SLOWER = 1.3
NAN_SHARE = 0.2
LIVES_S, FAILS = 60.0, 0.7
PROBE = pack_tokens(range(16))
RIGHT, WRONG, NAN = 0, 1, 2
"""Tokens: simulated completions tell whether they were computed correctly."""
TARGET_FOUND, TARGET_HEALTHY, TARGET_BATCHES, TARGET_COST = 0.95, 0.01, 1.0, 0.01


class Costs(Record):
    """Of an engine like a small one on a GPU."""

    slots: int = SLOTS
    boot_s: float = 8.0
    cache_tokens: float = math.inf
    longest_sample: float = math.inf
    factor: float = 1.0

    def decode_s(self, running: int, context_tokens: int, steps: int) -> float:
        contexts = context_tokens + running * (steps - 1) / 2
        return steps * self.factor * (0.012 + 0.0003 * running + 3e-7 * contexts) if running else 0.0

    def prefill_s(self, tokens: int, samples: int = 1) -> float:
        return self.factor * 1e-5 * tokens


class TrainCosts(Record):
    def accumulate_s(self, group: Group) -> float:
        return 0.1

    def commit_s(self) -> float:
        return 1.0

    def checkpoint_s(self) -> float:
        return 0.0


class Tokens:
    """Completions that name how they were computed; their length grows with the number of the prompt."""

    def __init__(self, seed: int, prompts: int) -> None:
        self._seed, self._prompts = seed, prompts

    def length(self, sample_id: SampleId) -> int:
        drawn = random.Random(f"{self._seed} {sample_id.key}").lognormvariate(0.0, 0.5)
        return max(8, int(MEAN_TOKENS * (1 + GROWTH * int(sample_id.prompt_id[1:]) / self._prompts) * drawn))

    def tokens(
        self, sample_id: SampleId, version: PolicyVersion, start: int, end: int
    ) -> tuple[TokenBuffer, LogprobBuffer]:
        kind = WRONG if version.digest.startswith("wrong") else RIGHT
        return np.full(end - start, kind, np.int32).tobytes(), np.full(end - start, -1.0, np.float32).tobytes()


@lru_cache(maxsize=4096)
def sum_of(digest: str, part: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{digest} {part}".encode(), digest_size=8).digest(), "little")


def manifest(version: PolicyVersion) -> WeightManifest:
    return WeightManifest(
        version=version,
        digest=version.digest,
        nbytes=0,
        tensors=(),
        probe_ids=PROBE,
        probe_logprobs=pack_logprobs([-1.0] * 15),
        part_sums=tuple(sum_of(version.digest, part) for part in range(PARTS)),
    )


class Weights:
    """Implements `WeightSource` and `Publisher` without data."""

    async def prepare(self, version: PolicyVersion) -> Pulled:
        await asyncio.sleep(0.5)
        return Pulled(manifest=manifest(version), nbytes=0, full=True, pull_s=0.5, retries=0)

    def swap(self, pulled: Pulled) -> None: ...

    def close(self) -> None: ...


class Publisher:
    async def publish(self, version: PolicyVersion) -> WeightManifest:
        await asyncio.sleep(0.2)
        return manifest(version)

    async def close(self) -> None: ...


class Machine:
    """A machine and its fault; it keeps the fault when it is leased again."""

    def __init__(self, name: str, fault: str, rng: random.Random) -> None:
        self.name, self.fault, self.rng = name, fault, rng
        self.factor = math.exp(rng.gauss(0.0, SPREAD))
        self.began_s = math.inf  # of the fault
        self.effect = 10 ** rng.uniform(-7.0, 0.0) if fault == "bit flip" else 10 ** rng.uniform(-4.0, -2.0)
        self.worker: SickWorker | None = None
        self.workers: list[SickWorker] = []  # of all leases

    @property
    def sick(self) -> bool:
        return self.began_s < math.inf

    def begin(self, now_s: float) -> None:
        self.began_s = now_s
        worker = self.worker
        if self.fault == "slow":
            self.factor *= SLOWER
        elif self.fault == "bit flip" and worker is not None:
            worker.flip(now_s)
        elif self.fault == "flaky join" and worker is not None:
            worker.fail(WorkerLost("its process was killed"))


class SickWorker(SimulatedWorker):
    """Reports sums of its weights, in turn."""

    def __init__(self, *args: Any, machine: Machine, **more: Any) -> None:
        super().__init__(*args, **more)
        self.machine, self._part, self._flipped = machine, 0, -1
        self.reports = 0
        self._memory = ""  # digest of the weights
        self._last_sums: tuple[int, ...] = ()

    def flip(self, now_s: float) -> None:
        self._flushed += self.engine.flush(now_s)
        self._flipped = self.machine.rng.randrange(PARTS)
        self.engine.computes_with = PolicyVersion(number=self.engine.version.number, digest="wrong: a bit")

    def computes_with(self, version: PolicyVersion) -> PolicyVersion:
        machine, self._last_sums = self.machine, self.sums if self._memory else ()
        if machine.fault == "stale weights" and machine.sick and self._memory:
            return PolicyVersion(number=version.number, digest="wrong: stale")
        self._memory, self._flipped = version.digest, -1
        return version

    @property
    def sums(self) -> tuple[int, ...]:
        """Of the weights in memory."""
        return tuple(sum_of(self._memory, part) + (part == self._flipped) for part in range(PARTS))

    def probe(self, right: LogprobBuffer) -> LogprobBuffer:
        wrong = self.engine.computes_with.digest.startswith("wrong")
        return pack_logprobs(each - wrong * math.sqrt(self.machine.effect) for each in unpack_logprobs(right))

    async def load(self, version: PolicyVersion) -> Loaded:
        loaded = await super().load(version)
        return msgspec.structs.replace(loaded, part_sums=manifest(version).part_sums, last_sums=self._last_sums)

    async def next_report(self, timeout_s: float) -> WorkerReport | None:
        report = await super().next_report(timeout_s)
        if report is None or not self._memory:
            return report
        self.reports += 1
        part, self._part = self._part, (self._part + 1) % PARTS
        total = sum_of(self._memory, part) + (part == self._flipped)
        status = msgspec.structs.replace(
            report.status, weights=WeightsSum(version=report.status.version, part=part, total=total), engine="sim"
        )
        deltas, machine = report.deltas, self.machine
        if machine.fault == "NaN" and machine.sick and deltas and machine.rng.random() < NAN_SHARE:
            deltas = (_spoiled(deltas[0]), *deltas[1:])
        return msgspec.structs.replace(report, status=status, deltas=deltas)


def _spoiled(delta: Any) -> Any:
    tokens = len(delta.token_ids) // 4
    return msgspec.structs.replace(
        delta,
        token_ids=np.full(tokens, NAN, np.int32).tobytes(),
        logprobs=np.full(tokens, np.nan, np.float32).tobytes(),
    )


class Host:
    """Implements `WorkerHost`."""

    def __init__(self, machines: dict[str, Machine], completions: Tokens, clock: Clock) -> None:
        self.machines, self._completions, self._clock = machines, completions, clock
        self._jobs: set[asyncio.Task[None]] = set()

    async def start(self, lease: Lease) -> SickWorker:
        machine = self.machines[lease.machine]
        costs = Costs(factor=machine.factor)
        await asyncio.sleep(costs.boot_s)
        flaky = machine.fault == "flaky join" and machine.sick
        if flaky and machine.rng.random() < FAILS:
            raise WorkerLost("its driver did not start")
        worker = SickWorker(
            SimulatedEngine(costs, self._completions, now_s=self._clock.now()),
            clock=self._clock,
            worker_id=lease.worker_id,
            lease_id=lease.lease_id,
            source=Weights(),
            tick_s=TICK_S,
            heartbeat_s=TICK_S,
            machine=machine,
        )
        machine.worker = worker
        machine.workers.append(worker)
        self._start(self._vary(worker))
        if flaky:
            self._start(self._die(worker, machine.rng.expovariate(1 / LIVES_S)))
        return worker

    def _start(self, job: Any) -> None:
        task = asyncio.create_task(job)
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)

    async def _vary(self, worker: SickWorker) -> None:
        """Let its speed vary."""
        while not worker._dead:
            worker.engine.advance(self._clock.now())
            factor = worker.machine.factor * math.exp(worker.machine.rng.gauss(0.0, JITTER))
            worker.engine.costs = Costs(factor=factor)
            await asyncio.sleep(1.0)

    async def _die(self, worker: SickWorker, after_s: float) -> None:
        await asyncio.sleep(after_s)
        worker.fail(WorkerLost("its process was killed"))

    async def close(self) -> None:
        for job in self._jobs:
            job.cancel()


class MeasuringTrainer(LearningTrainer):
    """Measures the mismatch by lease, and notes wrong tokens that it was trained on."""

    def __init__(self, *args: Any, effects: dict[str, float], rng: random.Random, **more: Any) -> None:
        super().__init__(*args, **more)
        self.wrong: list[tuple[float, int, str]] = []  # time, step, machine
        self._effects, self._rng = effects, rng
        self._by_lease: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    async def accumulate(self, group: Group) -> None:
        for trajectory in group.trajectories:
            tokens = np.frombuffer(trajectory.completion_ids, np.int32)
            for run in trajectory.sources:
                kinds, machine = tokens[run.start : run.end], run.source.partition("/")[2]
                usual = 2e-4 * self._rng.lognormvariate(0.0, 0.7)
                effect = self._effects[machine] * int((kinds == WRONG).sum())
                self._by_lease[run.lease][0] += usual * len(kinds) + effect
                self._by_lease[run.lease][1] += len(kinds)
                if (kinds != RIGHT).any():
                    self.wrong.append((self._clock.now(), self.version.number + 1, machine))
        await super().accumulate(group)

    async def commit(self, step: int) -> StepMetrics:
        mismatch = {lease: (kl, n) for lease, (kl, n) in self._by_lease.items()}
        self._by_lease.clear()
        return msgspec.structs.replace(await super().commit(step), mismatch=mismatch)


class RecordingWatch(MachineWatch):
    """Records what it is told, so that the cost of judging can be measured without the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def joined(self, lease: Lease, now_s: float) -> None:
        self.calls.append(("joined", (lease, now_s)))
        super().joined(lease, now_s)

    def loaded(self, lease: Lease, loaded: Loaded, now_s: float) -> None:
        self.calls.append(("loaded", (lease, loaded, now_s)))
        super().loaded(lease, loaded, now_s)

    def reported(self, lease: Lease, report: WorkerReport, now_s: float) -> None:
        self.calls.append(("reported", (lease, report, now_s)))
        super().reported(lease, report, now_s)


def measure_judging(seed: int, steps: int) -> float:
    """CPU seconds per report of a run without faults."""
    recorded = RecordingWatch()
    reports = run_seed(seed, steps=steps, faults=False, watch=recorded).reports
    watch = MachineWatch()
    began_s = time.process_time()
    for name, arguments in recorded.calls:
        getattr(watch, name)(*arguments)
    return (time.process_time() - began_s) / reports


class Found(Record):
    """One sick machine."""

    seed: int
    fault: str
    found: bool
    seconds: float  # from the fault until it was rejected
    batches: int  # trained with its wrong tokens before
    batches_after: int
    listed: bool  # the event names all of these batches
    cause: str


class Outcome(Record):
    """One seed."""

    seed: int
    sick: tuple[Found, ...]
    healthy: int
    rejected: tuple[str, ...]  # causes for healthy machines
    suspected: int  # healthy machines that were suspects for a time
    reports: int


def spec_of(steps: int, prompts: int) -> RunSpec:
    return RunSpec.model_validate(
        {
            "batch": {"prompts": prompts, "group_size": GROUP, "order": "arrival"},
            "sampling": {"max_new_tokens": 8192},
            "engine": {"slots": SLOTS},
            "schedule": {"max_policy_lag": 1, "membership": "first_finished"},
            "trainer": {"steps": steps},
            "eval": {"every_steps": 0},
            "checkpoint": {"every_steps": 0},
            "pool": {"kind": "synthetic", "workers": MACHINES},
        }
    )


def run_seed(seed: int, *, steps: int, faults: bool, watch: MachineWatch | None = None) -> Outcome:
    rng = random.Random(f"{seed} {faults}")
    chosen = rng.sample(FAULTS, SICK) if faults else []
    places = rng.sample(range(MACHINES), len(chosen))
    fault_of = dict(zip(places, chosen, strict=True))
    machines = {
        f"spot-{at}": Machine(f"spot-{at}", fault_of.get(at, ""), random.Random(f"{seed} {at}"))
        for at in range(MACHINES)
    }
    starts = {f"spot-{at}": rng.uniform(FIRST_S, LAST_S) for at in places}
    spec = spec_of(steps, prompts=MACHINES * SLOTS // GROUP)
    watch = watch or MachineWatch()

    async def simulate() -> tuple[Recording, MeasuringTrainer]:
        clock = LoopClock()
        recording = Recording(clock)
        completions = Tokens(seed, steps * spec.batch.prompts)
        effects = {name: machine.effect for name, machine in machines.items()}
        trainer = MeasuringTrainer(TrainCosts(), clock=clock, effects=effects, rng=random.Random(seed))
        timetable: Iterator[Change] = iter([Change(time_s=0.1 * at, place=at, to="up") for at in range(MACHINES)])
        host = Host(machines, completions, clock)
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(at_s, machines[name].begin, at_s) for name, at_s in starts.items()]
        components = SimulatedComponents(
            local=None,
            slots=SLOTS,
            local_slots=SLOTS,
            trainer=trainer,
            scorer=SimulatedScorer(_no_time, _reward),
            source=SimulatedPrompts(spec.batch.prompts, different=10**6, prompt_tokens=64),
            checkpoints=SimulatedCheckpoints(SimulatedDisk(), trainer, TrainCosts()),
            provider=ScheduledProvider(timetable, clock=clock, session=1),
            host=host,
            publisher=Publisher(),
        )
        await drive(spec, components, recording, clock, make_fleet=partial(Fleet, machines=watch))
        for timer in timers:
            timer.cancel()
        await host.close()
        return recording, trainer

    recording, trainer = run_virtual(simulate())
    health = [event for event in recording.events if event["event"] == WORKER_HEALTH]
    tainted = [event for event in recording.events if event["event"] == "tainted"]
    rejected: dict[str, dict[str, Any]] = {}
    for event in health:
        if event["state"] in ("draining", "quarantined"):
            rejected.setdefault(event["machine"], event)
    sick = [_found(seed, machines[name], rejected.get(name), trainer, tainted) for name in starts]
    healthy = {name for name in machines if name not in starts}
    return Outcome(
        seed=seed,
        sick=tuple(sick),
        healthy=len(healthy),
        rejected=tuple(event["cause"] for name, event in rejected.items() if name in healthy),
        suspected=len({event["machine"] for event in health if event["state"] == "suspect"} & healthy),
        reports=sum(worker.reports for machine in machines.values() for worker in machine.workers),
    )


def _no_time(trajectory: Trajectory) -> float:
    return 0.0


def _reward(trajectory: Trajectory) -> Reward:
    return Reward(value=float(trajectory.sample_id.index % 2))


def _found(
    seed: int,
    machine: Machine,
    rejected: dict[str, Any] | None,
    trainer: MeasuringTrainer,
    tainted: Sequence[dict[str, Any]],
) -> Found:
    found_s = rejected["elapsed_s"] if rejected is not None else math.inf
    wrong = [(at_s, step) for at_s, step, name in trainer.wrong if name == machine.name]
    before = {step for at_s, step in wrong if at_s <= found_s}
    named = {int(step) for event in tainted if event["worker"] == machine.name for step in event["trained"]}
    return Found(
        seed=seed,
        fault=machine.fault,
        found=rejected is not None and found_s >= machine.began_s,
        seconds=found_s - machine.began_s,
        batches=len(before),
        batches_after=len({step for at_s, step in wrong if at_s > found_s}),
        listed=before <= named,
        cause=rejected["cause"] if rejected is not None else "",
    )


def measure_sums(megabytes: int = 256) -> dict[str, float]:
    """Cost of summing weights on one core of this machine."""
    torch.set_num_threads(1)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=8, vocab_size=8192
    )
    model = LlamaForCausalLM(config)
    layout = snapshot_layout(model, torch.float32)
    buffer = allocate(snapshot_bytes(layout))
    write_snapshot(model, layout, buffer)
    user, rounds = EmptyModel(model), 5
    began_s = time.process_time()
    for _ in range(rounds):
        measured = tuple(user.part_sum("learned", part) for part in range(PARTS))
    worker_s = (time.process_time() - began_s) / rounds
    assert measured == part_sums(layout, buffer), "worker and publisher compute different sums"
    began_s = time.process_time()
    for _ in range(rounds):
        part_sums(layout, buffer)
    publisher_s = (time.process_time() - began_s) / rounds
    began_s = time.process_time()
    sealed(layout, buffer)
    checksum_s = time.process_time() - began_s
    return {
        "gigabytes": len(buffer) / 1e9,
        "worker_s_per_report": worker_s / PARTS,
        "worker_gb_per_s": len(buffer) / 1e9 / worker_s,
        "publisher_s_per_version": publisher_s,
        "checksums_s_per_version": checksum_s,
    }


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Figures by fault, and of healthy machines."""
    sick = [each for outcome in outcomes for each in outcome.sick]
    by_fault = {}
    for fault in FAULTS:
        of_fault = [each for each in sick if each.fault == fault]
        found = [each for each in of_fault if each.found]
        by_fault[fault] = {
            "machines": len(of_fault),
            "found": len(found) / len(of_fault),
            "seconds_median": statistics.median(each.seconds for each in found),
            "seconds_p95": float(np.quantile([each.seconds for each in found], 0.95)),
            "wrong_batches_median": statistics.median(each.batches for each in of_fault),
            "wrong_batches_most": max(each.batches for each in of_fault),
            "wrong_batches_after": sum(each.batches_after for each in of_fault),
            "causes": dict(Counter(_kind(each.cause) for each in found)),
        }
    healthy = sum(outcome.healthy for outcome in outcomes)
    rejected = [cause for outcome in outcomes for cause in outcome.rejected]
    wrong = [each for each in sick if each.fault in ("bit flip", "stale weights", "NaN")]
    return {
        "faults": by_fault,
        "found": sum(each.found for each in sick) / len(sick),
        "healthy_machines": healthy,
        "healthy_quarantined": len(rejected) / healthy,
        "healthy_quarantined_causes": dict(Counter(map(_kind, rejected))),
        "healthy_suspected": sum(outcome.suspected for outcome in outcomes) / healthy,
        "wrong_batches_median": statistics.median(each.batches for each in wrong),
        "wrong_batches_after": sum(each.batches_after for each in sick),
        "wrong_batches_unlisted": sum(not each.listed for each in sick if each.found),
    }


def _kind(cause: str) -> str:
    """The cause without numbers and details."""
    words = cause.partition(", ")[0].partition("; ")[0].split()
    return " ".join(word for word in words if not any(map(str.isdigit, word)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sick_machines", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--healthy", type=int, default=50, help="seeds without faults")
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--dry", action="store_true", help="write no result")
    arguments = parsed(parser)
    outcomes = list[Outcome]()
    with ProcessPoolExecutor(arguments.processes) as pool:
        for faults, count in ((True, arguments.seeds), (False, arguments.healthy)):
            seeds = range(arguments.first, arguments.first + count)
            outcomes += pool.map(partial(run_seed, steps=arguments.steps, faults=faults), seeds)
    return report(outcomes, arguments.steps, dry=arguments.dry)


def report(outcomes: Sequence[Outcome], steps: int, *, dry: bool) -> int:
    """Print and write the figures; returns the exit code."""
    with_faults = [outcome.seed for outcome in outcomes if outcome.sick]
    healthy = len(outcomes) - len(with_faults)
    sick = sum(len(outcome.sick) for outcome in outcomes)
    check_counts("sick_machines", sick_machines=sick, reports=sum(outcome.reports for outcome in outcomes))
    figures = summary(outcomes)
    judging_s, sums = measure_judging(min(with_faults), steps), measure_sums()
    table = Table(title=f"{SICK} sick of {MACHINES} machines, {len(with_faults)} seeds; {healthy} seeds without faults")
    for column in ("fault", "machines", "found", "seconds, median", "95 %", "wrong batches, median", "most", "after"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for fault, row in figures["faults"].items():
        shown = (f"{row['found']:.1%}", f"{row['seconds_median']:.0f}", f"{row['seconds_p95']:.0f}")
        batches = (row["wrong_batches_median"], row["wrong_batches_most"], row["wrong_batches_after"])
        table.add_row(fault, str(row["machines"]), *shown, *map(str, batches))
    console = Console(width=120)
    console.print(table)
    console.print(
        f"found: {figures['found']:.1%}; healthy machines quarantined: {figures['healthy_quarantined']:.2%} of "
        f"{figures['healthy_machines']} {figures['healthy_quarantined_causes'] or ''}, suspected for a time: "
        f"{figures['healthy_suspected']:.1%}; wrong batches not listed: {figures['wrong_batches_unlisted']}"
    )
    console.print(
        f"cost: {1e6 * judging_s:.0f} µs per report in the controller; of {sums['gigabytes']:.2f} GB "
        f"of weights {1e3 * sums['worker_s_per_report']:.2f} ms per report in a worker, "
        f"{1e3 * sums['publisher_s_per_version']:.0f} ms per version at the publisher "
        f"({1e3 * sums['checksums_s_per_version']:.0f} ms for its checksums)"
    )
    found = {fault: row["found"] for fault, row in figures["faults"].items()}
    reached = {
        "found": all(share >= TARGET_FOUND for share in found.values()),
        "healthy": figures["healthy_quarantined"] <= TARGET_HEALTHY,
        "wrong_batches": figures["wrong_batches_median"] <= TARGET_BATCHES,
        "none_after": figures["wrong_batches_after"] == 0,
        "listed": figures["wrong_batches_unlisted"] == 0,
    }
    content = {
        "seeds": [min(with_faults), max(with_faults) + 1],
        "seeds_without_faults": healthy,
        "steps": steps,
        "targets": {"found": TARGET_FOUND, "healthy": TARGET_HEALTHY, "wrong_batches": TARGET_BATCHES},
        "figures": figures,
        "judging_s_per_report": judging_s,
        "sums": sums,
        "reached": reached,
    }
    if not dry:
        write_result("sick_machines", content)
    console.print(f"targets: {reached}")
    return exit_code(content)


if __name__ == "__main__":
    sys.exit(main())
