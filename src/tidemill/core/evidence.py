"""Records of guards: what the reward guard saw in each step, what it decided, and the health of machines.

*Proxy* is the reward that is trained on, *gold* a second opinion on some samples (`role = "gold"`).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from tidemill.core.records import Record

GuardAction: TypeAlias = Literal["warn", "pause", "rollback", "stop"]
"""stop: the end of a run that was rolled back before, or cannot be."""


class GoldPair(Record, gc=False):
    """Both scores of one sample."""

    prompt_id: str
    index: int  # in its group
    step: int  # of its batch; of a canary: the step after which it was generated
    proxy: float
    gold: float
    source: Literal["batch", "canary", "person"] = "batch"


class Evidence(Record, omit_defaults=True):
    """What the guard knows about one step."""

    step: int
    proxy_mean: float  # over the samples of the batch with a valid reward
    proxy_spread: float  # their standard deviation
    samples: int  # with a valid reward
    pairs: tuple[GoldPair, ...] = ()  # also verdicts of people on earlier samples
    missing: int = 0  # samples chosen for gold that got none
    why_missing: str = ""  # of the first
    witnesses: dict[str, float] = {}  # figures that explain a decision, by name


class GuardDecision(Record, omit_defaults=True):
    """The reward rises and quality does not."""

    step: int  # newest step whose evidence counted
    onset: int  # first step with the fault, estimated
    test: Literal["gain", "gap", "witnessed gap"]
    reason: str  # two sentences
    number: int = 0  # of the run's decisions, from 1
    action: GuardAction = "warn"
    forgets: bool = True  # evidence of earlier steps does not count any more
    target: int = 0  # rollback: step of the checkpoint to return to; 0: the initial model
    proxy: tuple[float, float] = (0.0, 0.0)  # mean before the onset, and at the end
    gold: tuple[float, float] = (0.0, 0.0)


MachineState: TypeAlias = Literal["healthy", "suspect", "draining", "quarantined", "probation"]


class MachineHealth(Record):
    """A new judgement on a worker."""

    lease_id: str
    worker_id: str
    machine: str
    state: MachineState
    cause: str
    value: float = 0.0  # what was measured
    limit: float = 0.0
    acts: bool = True  # False: only a message
    wrong: bool = False  # it computed wrong tokens, possibly since `since_s`
    since_s: float = 0.0
    away_s: float = 0.0  # of a quarantine: do not lease the machine again for this long
