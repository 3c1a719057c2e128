"""Two programs that alternate on one core, so that other load affects both equally.

Each side is a separate process with one thread, pinned to the same core. The parent passes the turn: while one works
the other sleeps on its pipe. The order alternates from round to round (A B, B A, ...).
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one turn; both sides must report the same."""

    samples: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One measured turn. CPU time is steadier if other processes use the core."""

    wall_s: float
    cpu_s: float
    work: Work
    notes: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class SideResult:
    turns: list[Turn]
    peak_rss_bytes: int


class Over(Exception):
    """No more turns. An exception, so that it also ends a trainer's loop."""


class Turns:
    """A side's end of the pipe: `begin` waits for the turn, `end` reports it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._wall = self._cpu = 0.0
        self._taken: tuple[float, float] | None = None

    def begin(self) -> None:
        """Wait for the turn. Raises Over if there is none left."""
        self._pipe.send(("ready", None))
        if self._pipe.recv() != "go":
            raise Over
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def stop_clock(self) -> None:
        """Before `end`: what follows does not count."""
        self._taken = time.perf_counter() - self._wall, time.process_time() - self._cpu

    def end(self, work: Work, **notes: float) -> None:
        if self._taken is None:
            self.stop_clock()
        assert self._taken is not None
        (wall_s, cpu_s), self._taken = self._taken, None
        self._pipe.send(("done", Turn(wall_s=wall_s, cpu_s=cpu_s, work=work, notes=notes)))


Side = Callable[[Turns, Mapping[str, Any]], None]
"""Sets itself up, then calls `begin` and `end` per turn until `begin` raises Over. A top-level function."""


def take_turns(
    sides: Mapping[str, tuple[Side, Mapping[str, Any]]], *, rounds: int, deadline_s: float, warm_up: bool = True
) -> dict[str, SideResult]:
    """Run `rounds` measured turns of each side, after an unmeasured one unless the sides warm up themselves.

    Raises RuntimeError if a side fails, is silent for `deadline_s`, or does different work from the first side.
    """
    core = max(os.sched_getaffinity(0))
    players = {name: _Player(name, side, settings, core, deadline_s) for name, (side, settings) in sides.items()}
    try:
        for player in players.values():
            player.wait_ready()
        for index in range(0 if warm_up else 1, rounds + 1):
            for name in list(players) if index % 2 == 0 else reversed(list(players)):
                turn = players[name].play(measured=index > 0)
                kind = "warm-up" if index == 0 else f"round {index} of {rounds}"
                print(f"  {name}: {kind}, {turn.wall_s:.2f} s ({turn.cpu_s:.2f} s CPU)", file=sys.stderr, flush=True)
        results = {name: player.finish() for name, player in players.items()}
    finally:
        for player in players.values():
            player.kill()
    _check_equal_work(results)
    return results


class _Player:
    """The parent's end of one side."""

    def __init__(self, name: str, side: Side, settings: Mapping[str, Any], core: int, deadline_s: float) -> None:
        self._name, self._deadline_s = name, deadline_s
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        os.environ |= ONE_THREAD | OFFLINE  # inherited; read when torch is imported
        self._process = context.Process(target=_run_side, args=(side, settings, theirs, core), daemon=True)
        self._process.start()
        theirs.close()
        self._turns: list[Turn] = []

    def wait_ready(self) -> None:
        self._receive("ready")

    def play(self, *, measured: bool) -> Turn:
        self._pipe.send("go")
        turn: Turn = self._receive("done")
        if measured:
            self._turns.append(turn)
        self._receive("ready")
        return turn

    def finish(self) -> SideResult:
        self._pipe.send("over")
        peak: int = self._receive("over")
        self._process.join(self._deadline_s)
        return SideResult(turns=self._turns, peak_rss_bytes=peak)

    def kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()

    def _receive(self, expected: str) -> Any:
        if not self._pipe.poll(self._deadline_s):
            raise RuntimeError(f"{self._name}: silent for {self._deadline_s:.0f} s while `{expected}` was awaited")
        try:
            kind, content = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self._name}: the process ended while `{expected}` was awaited") from None
        if kind != expected:
            raise RuntimeError(f"{self._name}: {content}")
        return content


def _run_side(side: Side, settings: Mapping[str, Any], pipe: Connection, core: int) -> None:
    os.sched_setaffinity(0, {core})
    try:
        try:
            side(Turns(pipe), settings)
        except Over:
            pipe.send(("over", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
    except Exception:  # noqa: BLE001 - whatever it is, the parent shows it
        pipe.send(("failed", traceback.format_exc()))


def _check_equal_work(results: Mapping[str, SideResult]) -> None:
    done = {name: [turn.work for turn in result.turns] for name, result in results.items()}
    first = next(iter(done.values()))
    if any(works != first for works in done.values()):
        raise RuntimeError(f"the sides did different work: {done}")
