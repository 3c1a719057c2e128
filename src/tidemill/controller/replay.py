"""Apply the entries of a ledger to samples in flight, as when they were written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from tidemill.controller.entries import (
    Accepted,
    AnyEntry,
    CallEnded,
    CallStarted,
    Dropped,
    Observed,
    Opened,
    Published,
    Restarted,
    Rewarded,
    unreadable,
)
from tidemill.controller.in_flight import InFlight, PlannedGroup, SamplingPlan, plan_groups
from tidemill.controller.samples import IllegalTransition, SampleState
from tidemill.core.errors import UserError
from tidemill.core.records import Prompt

PromptAt: TypeAlias = Callable[[int], tuple[int, Prompt]]
"""Returns the (epoch, prompt) of a group's position."""


def replay(in_flight: InFlight, entry: AnyEntry, step: int, prompt_at: PromptAt) -> None:
    """Apply a stored entry.

    Raises:
        UserError: it contradicts earlier entries, or belongs to other prompts or settings.
    """
    try:
        if isinstance(entry, Opened):
            _replay_opened(in_flight, entry, step, prompt_at)
        elif isinstance(entry, Accepted):
            _replay_accepted(in_flight, entry, step)
        elif isinstance(entry, CallStarted | CallEnded | Observed):
            _replay_acting(in_flight, entry, step)
        elif isinstance(entry, Rewarded):
            for ordinal, reward in entry.rewards:
                in_flight.samples[ordinal].score(reward)
        elif isinstance(entry, Published):
            for ordinal, logprobs in entry.logprobs:
                in_flight.samples[ordinal].set_published(entry.version, logprobs)
        elif isinstance(entry, Restarted):
            for ordinal in entry.ordinals:
                in_flight.samples[ordinal].restart()
        elif isinstance(entry, Dropped):
            in_flight.close(entry.position)
    except (LookupError, IllegalTransition) as error:
        raise unreadable(step, str(error)) from error


def _replay_accepted(in_flight: InFlight, entry: Accepted, step: int) -> None:
    for tokens in entry.samples:
        sample = in_flight.samples[tokens.ordinal]
        if sample.state is SampleState.WAITING:
            sample.move(SampleState.RUNNING)
        if sample.state is not SampleState.RUNNING or tokens.start != sample.length:
            raise unreadable(step, f"sample {tokens.ordinal}: tokens at {tokens.start}, expected {sample.length}")
        sample.attempt, sample.turns.returning = tokens.attempt, False
        sample.extend(tokens.token_ids, tokens.logprobs, entry.versions[tokens.version], entry.source)
        if tokens.finish:
            sample.end_attempt(tokens.finish, "", in_flight.plan.sampling, in_flight.plan.agent)


def _replay_acting(in_flight: InFlight, entry: CallStarted | CallEnded | Observed, step: int) -> None:
    sample = in_flight.samples[entry.ordinal]
    turns, agent = sample.turns, in_flight.plan.agent
    if sample.state is not SampleState.ACTING or agent is None or len(turns.ended) - 1 != entry.turn:
        raise unreadable(step, f"sample {entry.ordinal}: {type(entry).__name__} of turn {entry.turn} does not fit")
    if isinstance(entry, CallStarted):
        turns.started_calls += (entry.index,)
    elif isinstance(entry, CallEnded):
        turns.finished_calls = {**turns.finished_calls, entry.index: entry.call}
    elif entry.start != sample.length:
        raise unreadable(step, f"sample {entry.ordinal}: observation at {entry.start}, expected {sample.length}")
    else:
        sample.observe(entry.answer, in_flight.plan.sampling, agent)


def _replay_opened(in_flight: InFlight, entry: Opened, step: int, prompt_at: PromptAt) -> None:
    pairs = [prompt_at(group.position) for group in entry.groups]
    different = [
        name for name in SamplingPlan.__struct_fields__ if getattr(entry.plan, name) != getattr(in_flight.plan, name)
    ]
    for group, (epoch, prompt) in zip(entry.groups, pairs, strict=True):
        (planned,) = plan_groups([(epoch, prompt)], first_position=group.position, from_version=group.from_version)
        different += [name for name in PlannedGroup.__struct_fields__ if getattr(planned, name) != getattr(group, name)]
    if different:
        raise UserError(
            f"step {step} was started with other prompts or settings (different: "
            f"{', '.join(dict.fromkeys(different))})",
            where="ledger.sqlite",
            hint="resume with the task, batch, sampling and seed settings the run was started with; or delete "
            "ledger.sqlite to generate the samples since the last checkpoint again",
        )
    for group in entry.groups:
        if group.position in in_flight.groups:  # opened a second time after a checkpoint was lost
            in_flight.close(group.position)
    in_flight.open(entry.groups, [prompt for _, prompt in pairs])
