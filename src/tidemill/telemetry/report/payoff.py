"""Whether the preemptible machines of a run were worth their price, and if not, why: from the run's own figures."""

from __future__ import annotations

from typing import NamedTuple

from tidemill.core.formatting import compact, counted, dollars, percent
from tidemill.core.records import Record
from tidemill.telemetry.events import JOIN
from tidemill.telemetry.fleet_figures import (
    BY_PREEMPTIBLE,
    HOUR_S,
    ReservedOnly,
    amount,
    held_leases,
    lease_key,
    reserved_only,
)
from tidemill.telemetry.metrics import TOKENS_RECOMPUTED
from tidemill.telemetry.run_data import RunData


class FleetUse(Record):
    """What the verdict is computed from. Seconds of preemptible machines are summed over machines."""

    wall_s: float
    alone: ReservedOnly
    reserved_usd_per_hour: float
    preemptible_usd: float
    held_s: float
    starting_s: float  # of held_s: booting, loading weights
    generating_s: float  # of held_s
    tokens: int
    tokens_recomputed: int
    evictions: int
    one_machine: bool  # workers are simulated in the trainer's process

    @property
    def cost_usd(self) -> float:
        return self.reserved_usd_per_hour * self.wall_s / HOUR_S + self.preemptible_usd

    @property
    def alone_usd(self) -> float:
        return self.reserved_usd_per_hour * self.alone.seconds / HOUR_S

    @property
    def price_ratio(self) -> float:
        """Price of a preemptible machine relative to the reserved side's."""
        return self.preemptible_usd / self.held_s * HOUR_S / self.reserved_usd_per_hour

    @property
    def saving_needed(self) -> float:
        """Share of the reserved side's time that the machines have to save to pay for themselves."""
        return self.preemptible_usd / self.cost_usd


MARGIN = 0.25
"""How wrong the estimate of the reserved side alone may be, in either direction: see `reserved_only`."""


class Payoff(NamedTuple):
    pays: bool | None
    """None: the difference is smaller than the error of the estimate."""
    title: str
    text: str


def payoff(use: FleetUse) -> Payoff:
    """The machines pay if they save a larger share of the reserved side's time than their share of the bill."""
    change = use.cost_usd / use.alone_usd - 1
    pays = change < 0 if abs(change) >= MARGIN else None
    cost, alone = dollars(use.cost_usd), dollars(use.alone_usd)
    if pays is None:
        title = f"Whether preemptible machines paid is open: {cost}, and about {alone} without them"
    else:
        verdict, direction = ("paid", "less") if pays else ("did not pay", "more")
        title = f"Preemptible machines {verdict}: {cost} instead of {alone}, {percent(abs(change))} {direction}"
    saved = 1 - use.wall_s / use.alone.seconds
    took = f"they {'shortened' if saved > 0 else 'lengthened'} the run by {percent(abs(saved))}"
    price = f"At {percent(use.price_ratio)} of the reserved side's price, {took}"
    rate = f"{compact(use.tokens / use.alone.generating_s)} tokens/s"
    estimate = f"the reserved side generates all {compact(use.tokens)} tokens at {rate}, its fastest here,"
    error = f"an estimate, up to {percent(MARGIN)} too high or too low"
    sentences = (
        f"{price}; they pay from {percent(use.saving_needed)} on.",
        *(() if pays else (_reason(use),)),
        f"What it costs without them is {error}: {estimate} and otherwise works as long as it did.",
    )
    return Payoff(pays, title, " ".join(sentences))


def _reason(use: FleetUse) -> str:
    """The first cause that alone explains why they did not pay."""
    if use.one_machine:
        return 'All workers ran in the trainer\'s process: they shared its cores and added none. Use runtime = "ray".'
    share = use.alone.generating_s / use.alone.seconds
    if share < use.saving_needed:
        return (
            f"Generating is {percent(share)} of the time of the reserved side alone: even with all of it saved, they "
            "would not pay. They pay with longer completions."
        )
    lost_s, idle_s = use.starting_s, use.held_s - use.starting_s - use.generating_s
    paid = f"They generated in {percent(use.generating_s / use.held_s)} of the time paid for"
    again = f"{percent(use.tokens_recomputed / use.tokens)} of the tokens were computed again"
    if use.evictions and lost_s > idle_s:
        return (
            f"{paid}, and started in {percent(lost_s / use.held_s)}: {counted(use.evictions, 'eviction')}, after which "
            f"{again}. They pay if they live longer."
        )
    return (
        f"{paid}, and waited in {percent(idle_s / use.held_s)}; {again}. They pay if they always have work: larger "
        "batches, fewer machines, or a larger schedule.max_policy_lag."
    )


def payoff_of(data: RunData) -> Payoff | None:
    """None without prices, without preemptible machines, or if the reserved side generated nothing."""
    summary = data.summary
    leases = {
        key: one for key, one in held_leases(data.events.outline, data.sessions).items() if one.kind == "preemptible"
    }
    decoded, held_s = data.events.decoded, sum(one.end_s - one.start_s for one in leases.values())
    alone = reserved_only(decoded, data.sessions, summary["wall_s"], data.idle_s)
    preemptible_usd = summary["cost_by_kind_usd"]["preemptible"]
    price = data.setting("fleet", "reserved_usd_per_hour")
    if alone is None or not (held_s and preemptible_usd and price) or data.is_robot:
        return None
    starts = [event for event in data.events_named(JOIN) if lease_key(event) in leases]
    *_, duration_s, tokens, by = decoded.T
    generating_s = float(duration_s[by == BY_PREEMPTIBLE].sum())
    starting_s = min(held_s, sum(amount(event, "duration_s") for event in starts))
    return payoff(
        FleetUse(
            wall_s=summary["wall_s"],
            alone=alone,
            reserved_usd_per_hour=price,
            preemptible_usd=preemptible_usd,
            held_s=held_s,
            starting_s=starting_s,
            generating_s=min(generating_s, held_s - starting_s),
            tokens=int(tokens.sum()),
            tokens_recomputed=summary[TOKENS_RECOMPUTED],
            evictions=summary["evictions"],
            one_machine=data.in_one_process,
        )
    )
