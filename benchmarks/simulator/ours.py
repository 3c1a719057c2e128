"""Tidemill and the published policy in the same simulation: 14B, equal machines, trainer, engines and lengths.

    python -m benchmarks.simulator.ours [--all]

Two columns: strictly on policy like the published one (lag 0), and one version behind (lag 1). Our differences are
removed one by one, at lag 1 only with --all. The bound assumes perfect packing: equal lengths, no transfers, no waits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import write_result
from benchmarks.origin import parsed
from benchmarks.simulator.availability import MOST, SEGMENT_S, segments
from benchmarks.simulator.published_system import (
    FITTED,
    GROUP,
    INSTANCE,
    PROMPT_TOKENS,
    PROMPTS,
    RESERVED,
    base_spec,
    cost_model,
    workload,
)
from benchmarks.simulator.segments import (
    ENDLESS,
    Outcome,
    System,
    Total,
    check_evictions,
    play,
    play_all,
    published_system,
    total,
)
from tidemill.controller import router as per_sample
from tidemill.controller.fleet import Fleet
from tidemill.controller.length_model import LengthModel
from tidemill.controller.router import Waiting, WorkerLoad
from tidemill.hardware.engine_profile import rollout_of, steady_tokens_per_s
from tidemill.sim.baselines import MOST_PENDING, UNLIMITED, GroupRouter, rlboost_components
from tidemill.sim.costs import ProfiledEngine
from tidemill.sim.simulation import ComponentFactories

ROW, TARGET = "14B", 1.15
CHANGED = 0.03
"""Share of elements that change per version; with its position an element takes as many bytes as in a snapshot
(docs/reference/planner.md)."""
TICK_S = 10.0
"""Report interval of simulated workers; real ones report every 0.1 s."""


class AnyPrompt(LengthModel):
    """Predicts lengths from all samples, not per prompt."""

    def observe(self, prompt_id: str, prompt_tokens: int, lengths: Sequence[int]) -> None:
        super().observe("", 1, lengths)

    def expected_remaining(
        self, prompt_id: str, prompt_tokens: int, have: int, limit: int, siblings: Sequence[int] = ()
    ) -> float:
        return super().expected_remaining("", 1, have, limit, siblings)


class WithoutAffinity:
    """Implements `controller.router.Router`: ours, with every sample as a separate group."""

    rebalance = staticmethod(per_sample.rebalance)

    def dispatch(
        self, waiting: Sequence[Waiting], loads: Sequence[WorkerLoad], *, queue_limit: int
    ) -> list[tuple[int, str]]:
        alone = [msgspec.structs.replace(one, group=("", "", one.ordinal)) for one in waiting]
        strangers = [msgspec.structs.replace(load, groups=frozenset()) for load in loads]
        return per_sample.dispatch(alone, strangers, queue_limit=queue_limit)


def ours(
    lag: int, *, factories: ComponentFactories | None = None, delta_share: float = CHANGED, **fleet: Any
) -> System:
    schedule = {"max_policy_lag": lag, "membership": "first_finished" if lag else "planned"}
    return System(
        spec=base_spec(
            steps=ENDLESS, fleet={"seed_window_s": 150.0, "hand_over": "balance", **fleet}, schedule=schedule
        ),
        factories=factories or ComponentFactories(tick_s=TICK_S),
        delta_share=delta_share,
    )


def in_groups(lag: int) -> System:
    fleet = partial(Fleet, router=GroupRouter(group_size=GROUP, most_pending=MOST_PENDING))
    factories = msgspec.structs.replace(rlboost_components(GROUP), fleet=fleet, tick_s=TICK_S)
    return ours(lag, factories=factories, queue_limit=MOST_PENDING * GROUP, max_moves=UNLIMITED)


VARIATIONS: dict[str, Callable[[int], System]] = {
    "without hand-over by balance": lambda lag: ours(lag, hand_over="window"),
    "without individual migration of samples": in_groups,
    "without delta weights": lambda lag: ours(lag, delta_share=0.0),
    "without lengths by prompt": lambda lag: ours(
        lag, factories=ComponentFactories(fleet=partial(Fleet, lengths=AnyPrompt()), tick_s=TICK_S)
    ),
    "without prefix affinity": lambda lag: ours(
        lag, factories=ComponentFactories(fleet=partial(Fleet, router=WithoutAffinity()), tick_s=TICK_S)
    ),
    "without continuous balance": lambda lag: ours(lag, max_moves=0),
    "with tail consolidation": lambda lag: ours(lag, tail_fraction=0.1),
}
PUBLISHED, AS_ITS_CODE = "published policy", "truncated to finished samples, as in its code"
SYSTEMS: dict[str, Callable[[], System]] = {
    PUBLISHED: partial(published_system, ROW),
    AS_ITS_CODE: partial(published_system, ROW, moved="all"),
    **{f"ours, lag {lag}": partial(ours, lag) for lag in (0, 1)},
    **{f"{name}, lag {lag}": partial(make, lag) for name, make in VARIATIONS.items() for lag in (0, 1)},
}
ALWAYS = [name for name in SYSTEMS if name == "ours, lag 1" or not name.endswith("lag 1")]


def run_case(row: str, name: str, segment: str | None) -> Outcome:
    return play(row, SYSTEMS[name](), segment)


def bound(train_s_per_token: float) -> tuple[float, float]:
    """(tokens per second, per dollar) if nothing is lost: with r tokens a second of the reserved side, d of each of n
    machines, W in a batch and X seconds of learning, a step takes max(X, (W + r X) / (r + n d))."""
    machines, costs = cost_model(ROW, FITTED), workload()
    assert isinstance(machines.worker, ProfiledEngine)
    rollout = rollout_of(costs.lengths, samples=PROMPTS * GROUP, group_size=GROUP, prompt_tokens=PROMPT_TOKENS)
    each = steady_tokens_per_s(machines.worker.profile, rollout)
    reserved, train_s = each * RESERVED.gpus / INSTANCE.gpus, train_s_per_token * rollout.tokens
    tokens = usd = seconds = 0.0
    for trace in segments().values():
        held = trace.at_most(MOST[ROW])
        for (begin_s, count), (end_s, _) in pairwise([*held.steps, (SEGMENT_S, 0)]):
            step_s = max(train_s, (rollout.tokens + reserved * train_s) / (reserved + count * each))
            price = (RESERVED.usd_per_hour or 0.0) + count * (INSTANCE.preemptible_usd_per_hour or 0.0)
            seconds += end_s - begin_s
            tokens += rollout.tokens * (end_s - begin_s) / step_s
            usd += price * (end_s - begin_s) / 3600
    return tokens / seconds, tokens / usd


def check_variations(totals: Mapping[str, Total]) -> None:
    """Raises RuntimeError: a system with a difference removed or added has exactly the figures of ours."""
    for name, found in totals.items():
        for base in (f"ours, lag {name[-1]}", PUBLISHED):
            if name != base and found == totals.get(base):
                raise RuntimeError(f"{name}: the same as {base}, so the difference was not made")


def show(totals: dict[str, Total], best: tuple[float, float]) -> None:
    base = totals[PUBLISHED]
    table = Table(title="14B, over the published policy: throughput, and per dollar", box=box.SIMPLE)
    for column in ("system", "lag 0", "per $", "idle", "lag 1", "per $", "idle"):
        table.add_column(column, justify="left" if column == "system" else "right")

    def cells(found: Total) -> tuple[str, str, str]:
        speed, money = found.tokens_per_s / base.tokens_per_s, found.tokens_per_usd / base.tokens_per_usd
        return f"{speed:.3f}", f"{money:.3f}", f"{found.trainer_idle:.1%}"

    for name in (PUBLISHED, AS_ITS_CODE):
        table.add_row(name, *cells(totals[name]), "", "", "")
    for name in ("ours", *VARIATIONS):
        played = [totals.get(f"{name}, lag {lag}") for lag in (0, 1)]
        table.add_row(name, *(cell for found in played for cell in (cells(found) if found else ("", "", ""))))
    bounds = (f"{best[0] / base.tokens_per_s:.3f}", f"{best[1] / base.tokens_per_usd:.3f}", "")
    table.add_row("bound", *bounds, *bounds)
    Console(width=120).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="take things away at lag 1 too")
    found = play_all([(ROW, name) for name in (SYSTEMS if parsed(parser).all else ALWAYS)], run_case)
    totals = {name: total(outcomes) for (_, name), outcomes in found.items()}
    check_evictions(totals)
    check_variations(totals)
    published = found[ROW, PUBLISHED].values()
    best = bound(sum(one.train_s for one in published) / sum(one.tokens for one in published))
    show(totals, best)
    gain = totals["ours, lag 0"].tokens_per_usd / totals[PUBLISHED].tokens_per_usd
    verdict = "reached" if gain >= TARGET else "MISSED"
    print(f"target {TARGET:g} times the tokens per dollar at lag 0: {gain:.3f}, {verdict}")
    systems = {name: msgspec.to_builtins(one) for name, one in totals.items()}
    content = {"target": TARGET, "gain": gain, "bound": {"tokens_per_s": best[0], "tokens_per_usd": best[1]}}
    write_result("ours_against_published", {**content, "systems": systems})
    return 0 if gain >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
