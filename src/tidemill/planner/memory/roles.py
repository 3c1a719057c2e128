"""Which models an algorithm keeps, and which of them learn."""

from __future__ import annotations

import difflib

from tidemill.core.errors import UserError
from tidemill.core.records import Record


class Role(Record):
    """One model of a run."""

    name: str
    trained: bool
    shares_base: bool = True  # under an adapter: the policy's frozen weights are also its own


ACTOR = Role(name="actor", trained=True)
CRITIC = Role(name="critic", trained=True)
REFERENCE = Role(name="reference", trained=False)
REWARD = Role(name="reward", trained=False, shares_base=False)

# Rewards of the algorithms without a reward model are taken to be computed by rules; --reward-params adds one.
ROLES: dict[str, tuple[Role, ...]] = {
    "ppo": (ACTOR, CRITIC, REFERENCE, REWARD),
    "grpo": (ACTOR, REFERENCE),
    "dr_grpo": (ACTOR,),
    "rloo": (ACTOR, REFERENCE),
    "reinforce_pp": (ACTOR, REFERENCE),
    "reinforce_pp_baseline": (ACTOR, REFERENCE),
    "dapo": (ACTOR,),
    "gspo": (ACTOR,),
    "cispo": (ACTOR,),
    "dpo": (ACTOR, REFERENCE),
    "reward_model": (ACTOR,),
    "sft": (ACTOR,),
}
WHOLE_BATCH = ("ppo", "reinforce_pp", "reinforce_pp_baseline")
"""They whiten advantages over the batch, so that learning begins when all of it is there."""
GENERATE_NOTHING = ("dpo", "reward_model", "sft")


def roles_of(algorithm: str) -> tuple[Role, ...]:
    """Raises UserError: no such algorithm; the nearest is suggested."""
    if algorithm not in ROLES:
        close = difflib.get_close_matches(algorithm, ROLES, 1, 0.5)
        cure = f"did you mean {close[0]}? " if close else ""
        raise UserError("unknown algorithm", where=f"--algorithm {algorithm}", cure=f"{cure}known: {', '.join(ROLES)}")
    return ROLES[algorithm]
