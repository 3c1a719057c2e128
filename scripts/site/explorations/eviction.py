"""Table of one batch whose machines change: the controller of a run in virtual time, with simulated engines, where one
machine is taken away, with different notices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias

from scripts.site.explorations.rounding import digits
from tidemill.config.schema import RunSpec
from tidemill.core.records import GenerateRequest, Group, Record, SampleId, TokenDelta, count
from tidemill.hardware.completion_lengths import LogNormalLengths
from tidemill.pool.provider import Change
from tidemill.sim.costs import WeightCosts
from tidemill.sim.outcome import SimulatedRun
from tidemill.sim.simulated_engine import SimulatedEngine
from tidemill.sim.simulation import ComponentFactories, CostModel, simulate_run
from tidemill.sim.workload import Workload
from tidemill.telemetry.events import DRAIN, EVICTION, JOIN, LEASE, LEASE_END, MIGRATION, NOTICE, TRAINING, event_text

NOTICES_S = (0.0, 4.0, 10.0)
TAKEN_S = 16.6
REPLACED_S = 19.0
REPORT_S = 1.0
SETTINGS: dict[str, dict[str, Any]] = {
    "batch": {"prompts": 4, "group_size": 4},
    "sampling": {"max_new_tokens": 640},
    "trainer": {"steps": 1},
    "eval": {"every_steps": 0},
    "pool": {"kind": "static", "workers": 3},
    "fleet": {"drain_margin_s": 0.5, "seeding": False},
}
ENDED = "the run ended"
SHOWN = (LEASE, JOIN, NOTICE, DRAIN, EVICTION, MIGRATION, LEASE_END, TRAINING)

Logged: TypeAlias = tuple[float, str, SampleId, int, str]
"""Time, lease, sample, tokens so far, and what happens: it is given to the engine (`start`), takes a slot (`begin`), is
reported (`report`), or why it ended."""


class Engine(Record):
    """The costs of an engine: 20 tokens a second for each of up to 6 samples."""

    slots: int = 6
    boot_s: float = 2.0
    cache_tokens: float = float("inf")
    longest_sample: float = float("inf")

    def decode_s(self, running: int, context_tokens: int, steps: int) -> float:
        return 0.05 * steps

    def prefill_s(self, tokens: int, samples: int = 1) -> float:
        return tokens / 4000


class Training(Record):
    """The costs of a trainer."""

    def accumulate_s(self, group: Group) -> float:
        return 1.5

    def commit_s(self) -> float:
        return 0.5

    def checkpoint_s(self) -> float:
        return 0.0


class Watched(SimulatedEngine):
    """Keeps what it is given and what it reports, with the time."""

    def __init__(self, *positional: Any, log: list[Logged], **named: Any) -> None:
        super().__init__(*positional, **named)
        self._log = log

    def submit(self, requests: Iterable[GenerateRequest], now_s: float) -> None:
        kept = list(requests)
        self._log += [(now_s, each.lease_id, each.sample_id, count(each.prefix_ids), "start") for each in kept]
        super().submit(kept, now_s)

    def _start(self, request: GenerateRequest) -> int:
        # The engine catches up when it is called, so that the clock may already be ahead of this moment.
        self._log.append((self._until_s, request.lease_id, request.sample_id, count(request.prefix_ids), "begin"))
        return super()._start(request)

    def flush(self, now_s: float) -> list[TokenDelta]:
        return self._reported(super().flush(now_s))

    def take_ended(self) -> list[TokenDelta]:
        return self._reported(super().take_ended())

    def _reported(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        now_s = asyncio.get_running_loop().time()
        self._log += [
            (now_s, delta.lease_id, delta.sample_id, delta.start + count(delta.token_ids), delta.finish or "report")
            for delta in deltas
        ]
        return deltas


def simulated(notice_s: float) -> tuple[SimulatedRun, list[Logged]]:
    """The run, and what its engines started and reported."""
    log: list[Logged] = []
    run = simulate_run(
        RunSpec.model_validate(SETTINGS),
        CostModel(
            trainer=Training(),
            weights=WeightCosts(nbytes=10, uplink_bytes_per_s=20.0, downlink_bytes_per_s=20.0, swap_s=0.1),
            worker=Engine(),
        ),
        Workload(lengths=LogNormalLengths(median=300, sigma=0.5, limit=640), prompt_tokens=100),
        _timetable(notice_s),
        factories=ComponentFactories(engine=partial(Watched, log=log), tick_s=REPORT_S, final_report=False),
    )
    return run, log


def _timetable(notice_s: float) -> Iterator[Change]:
    """Two machines; the first is taken, and a third one comes."""
    yield Change(time_s=0.0, place=0, to="up")
    yield Change(time_s=0.0, place=1, to="up")
    if notice_s:
        yield Change(time_s=TAKEN_S - notice_s, place=0, to="noticed", deadline_s=TAKEN_S)
    yield Change(time_s=TAKEN_S, place=0, to="down")
    yield Change(time_s=REPLACED_S, place=2, to="up")


def table() -> dict[str, Any]:
    """A run for each notice, with its machines, events and samples; times in seconds."""
    return {
        "notices": list(NOTICES_S),
        "report": REPORT_S,
        "margin": SETTINGS["fleet"]["drain_margin_s"],
        "slots": Engine().slots,
        "runs": [_run(*simulated(notice_s)) for notice_s in NOTICES_S],
    }


def _run(run: SimulatedRun, log: list[Logged]) -> dict[str, Any]:
    workers = {event["lease"]: event["worker"] for event in run.events if event["event"] == LEASE}
    machines = {name: dict[str, float]() for name in workers.values()}
    for event in run.events:
        if event["event"] in (LEASE, JOIN, NOTICE, DRAIN, EVICTION, LEASE_END):
            machines[event["worker"]].setdefault(event["event"], round(event["elapsed_s"], 2))
    (eviction,) = (event for event in run.events if event["event"] == EVICTION)
    moves = [event for event in run.events if event["event"] == MIGRATION and event["worker"] == eviction["worker"]]
    names = {sample: f"{sample.prompt_id}/{sample.index}" for _, _, sample, _, _ in log}
    moments = [_moment(event) for event in run.events if event["event"] in SHOWN and event.get("cause") != ENDED]
    moments += [
        {"at": round(at, 2), "kind": "sample", "text": f"sample {names[sample]} is complete: {tokens} tokens"}
        for at, _, sample, tokens, kind in log
        if kind in ("stop", "length")
    ]
    return {
        "seconds": digits(run.seconds, 4),
        "evicted": {
            "samples": sum(event["samples"] for event in moves),
            "kept": sum(event["tokens_kept"] for event in moves),
            "lost": eviction["tokens_lost"],
        },
        "trained": run.tokens_trained,
        "machines": machines,
        "moments": sorted(moments, key=lambda moment: moment["at"]),
        "samples": [
            {"name": name, "pieces": _pieces([line for line in log if line[2] == sample], workers)}
            for sample, name in sorted(names.items(), key=lambda pair: pair[1])
        ],
    }


def _moment(event: dict[str, Any]) -> dict[str, Any]:
    """When, what kind, and a sentence: that of the run's terminal, or one for an event that the terminal leaves out."""
    name, at = event["event"], round(event["elapsed_s"], 2)
    others = {
        LEASE: "{worker} is leased; its engine starts and pulls the weights",
        LEASE_END: "the lease of {worker} ends: {cause}",
        MIGRATION: "{samples} samples move from {worker} to {to_worker}, {tokens_kept:,} tokens kept",
        TRAINING: "the trainer has learned from the batch: new weights",
    }
    text = event_text(name, event) or others.get(name, "").format(**event)
    return {"at": at, "kind": name, "text": text}


def _pieces(lines: list[Logged], workers: dict[str, str]) -> list[dict[str, Any]]:
    """The parts of a sample on each machine: times and tokens reported so far."""
    pieces = list[dict[str, Any]]()
    for at, lease, _, tokens, kind in lines:
        if kind == "start":
            pieces.append({"worker": workers[lease], "at": [], "tokens": []})
        piece = pieces[-1]
        # An engine advances in whole steps: it may take a sample some milliseconds before it was given.
        piece["at"].append(max([round(at, 2), *piece["at"][-1:]]))
        piece["tokens"].append(tokens)
    return pieces
