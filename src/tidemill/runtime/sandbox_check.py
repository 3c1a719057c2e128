"""Whether a run needs a sandbox, and whether it works: without one the run does not start."""

from __future__ import annotations

from tidemill.config.schema import RunSpec
from tidemill.envs.agents.find import find_environment
from tidemill.sandbox.open_sandbox import check_sandbox


def check_needed_sandbox(spec: RunSpec) -> None:
    """Run a command in a sandbox, if a reward or the environment needs one.

    Raises:
        UserError: the back-end does not work on this machine, or the environment is wrong.
    """
    rewards = (*spec.scoring.rewards, *spec.eval.rewards)
    environment = spec.env.enabled and find_environment(spec.env, spec.sandbox).function
    if any(reward.kind == "tests" for reward in rewards) or getattr(environment, "needs_sandbox", False):
        check_sandbox(spec.sandbox)
