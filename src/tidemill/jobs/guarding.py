"""Opens the reward guard of a run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import msgspec

from tidemill.config.schema import RunSpec
from tidemill.core.errors import GuardStop
from tidemill.guard.checks import read_pairs
from tidemill.guard.probes import liked_probes
from tidemill.guard.reward_guard import RewardGuard
from tidemill.guard.verdicts import VerdictFiles
from tidemill.jobs.rollback import write_disputed
from tidemill.runtime.backend import RuntimeBackend
from tidemill.telemetry.events import GUARD_PROBE
from tidemill.telemetry.jsonl import read_lines
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import RunDirectory

NO_GOLD = 'no reward has role = "gold": reward hacking cannot be detected'


@asynccontextmanager
async def open_guard(
    spec: RunSpec, backend: RuntimeBackend, run: RunDirectory, recorder: Recorder, *, rollbacks: int
) -> AsyncIterator[RewardGuard | None]:
    """The guard; None without gold rewards, or if it is off. Before it stops the run, disputed.jsonl is written.

    Raises:
        GuardStop: before the first step, the reward likes texts that it should not, and the guard may stop the run.
    """
    if not spec.has_gold or spec.guard.action == "off":
        if spec.guard.action != "off":
            recorder.note(NO_GOLD)
        yield None
        return
    run_id = str(run.read_manifest()["run_id"])
    verdicts = VerdictFiles(run.checks, run_id, journalled=read_pairs(run.ledger), warn=recorder.note)
    guard = RewardGuard(
        spec.guard, backend.gold_scorer, verdicts=verdicts.new_pairs, keep_disputed=partial(write_disputed, run)
    )
    try:
        if spec.guard.probes and not rollbacks and not any(line.get("step") for _, line in read_lines(run.metrics)):
            await _probe_reward(spec, backend, recorder)
        yield guard
    finally:
        await guard.close()


async def _probe_reward(spec: RunSpec, backend: RuntimeBackend, recorder: Recorder) -> None:
    """Report texts that the reward should not like; not for agents, whose samples are episodes."""
    if spec.env.enabled:
        return
    stops = spec.sampling.stop or backend.task.default_stop_strings
    held_out = backend.task.source.held_out(spec.eval.prompts)
    liked = await liked_probes(backend.scorer, backend.codec, held_out, stop_strings=stops)
    for each in liked:
        recorder.event(GUARD_PROBE, **msgspec.structs.asdict(each))
    if liked and spec.guard.action in ("pause", "rollback"):
        names = ", ".join(each.probe for each in liked)
        hint = "correct the reward, or set guard.probes = false"
        raise GuardStop(f"not started: the reward likes {names} as much as right answers\n  {hint}")
