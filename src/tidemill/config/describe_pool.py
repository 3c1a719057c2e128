"""Where a run's samples will be generated, in words: the workers that come and go, their warnings and their prices."""

from __future__ import annotations

from tidemill.config.pool import RayPool, StaticPool, SyntheticPool, TracePool
from tidemill.config.schema import RunSpec
from tidemill.config.words import counted


def pool_topics(spec: RunSpec) -> list[tuple[str, str]]:
    """(topic, sentence) pairs; none where the reserved side generates everything and costs nothing."""
    fleet, pool = spec.fleet, spec.pool
    said = []
    if preemptible(spec):
        said = [("workers", f"{_workers(pool)}; {_place(spec)}"), ("seeding", _seeding(spec))]
        if not isinstance(pool, StaticPool):
            said.insert(1, ("notice", _notice(spec)))
    prices = [
        f"${dollars:g} an hour for {whom}"
        for dollars, whom in (
            (fleet.reserved_usd_per_hour, "the reserved side"),
            (fleet.preemptible_usd_per_hour if preemptible(spec) else 0.0, "each preemptible worker"),
        )
        if dollars
    ]
    return [*said, ("prices", ", ".join(prices))] if prices else said


def preemptible(spec: RunSpec) -> bool:
    """Whether any worker may come and go."""
    return not isinstance(spec.pool, StaticPool) or spec.pool.workers > 0


def pool_notes(spec: RunSpec) -> list[str]:
    """Settings of pool and fleet that will probably not do what was hoped."""
    notice_s, hand_back_s = _notice_s(spec), spec.fleet.hand_back_s
    if 0 < notice_s <= hand_back_s:
        limit = f"fleet.hand_back_s = {hand_back_s:g}"
        return [f"a notice of {notice_s:g} s is no longer than {limit}: a warned worker hands its samples back at once"]
    return []


def _workers(pool: StaticPool | TracePool | SyntheticPool | RayPool) -> str:
    if isinstance(pool, StaticPool):
        return f"{counted(pool.workers, 'preemptible worker')}, there from the start"
    if isinstance(pool, TracePool):
        speed = "" if pool.speed == 1 else f", {pool.speed:g} times as fast"
        begin = f" from second {pool.start_s:g}" if pool.start_s else ""
        return f"as many preemptible workers as {pool.path} has{begin}{speed}, at most {pool.max_workers}"
    if isinstance(pool, SyntheticPool):
        return (
            f"{counted(pool.workers, 'preemptible worker')}; on average one is evicted after "
            f"{pool.mean_time_to_eviction_s:g} s and back {pool.mean_time_to_return_s:g} s later"
        )
    labels = ", ".join(f"{name}={value}" for name, value in pool.selector.items())
    return f"at most {counted(pool.max_workers, 'preemptible worker')}, on nodes labelled {labels or 'anyhow'}"


def _place(spec: RunSpec) -> str:
    if spec.runtime == "inprocess":
        return "simulated in this process"
    where = f"the cluster at {spec.ray.address}" if spec.ray.address else "a cluster of this machine"
    return f"Ray actors on {where}"


def _notice_s(spec: RunSpec) -> float:
    return spec.pool.notice_s if isinstance(spec.pool, TracePool | SyntheticPool) else 0.0


def _notice(spec: RunSpec) -> str:
    notice_s = _notice_s(spec)
    back = f"samples are handed back {min(notice_s, spec.fleet.hand_back_s):g} s before the end"
    if isinstance(spec.pool, RayPool):
        return "as the cluster gives it; without one, samples go on elsewhere from the tokens that arrived"
    share = spec.pool.noticed if isinstance(spec.pool, SyntheticPool) else 1.0
    if not notice_s or not share:
        return "none; samples of a worker that was taken go on elsewhere from the tokens that arrived"
    whom = "each eviction" if share == 1 else f"{100 * share:g} % of evictions"
    return f"{notice_s:g} s before {whom}; {back}"


def _seeding(spec: RunSpec) -> str:
    fleet = spec.fleet
    if not fleet.seeding:
        return "none: the reserved side never generates, and the run waits while no worker is there"
    return (
        f"the reserved side generates too in the first {fleet.seed_window_s:g} s of a step (this adapts), and whenever "
        "no worker is there"
    )
