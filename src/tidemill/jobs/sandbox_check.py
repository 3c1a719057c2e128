"""Whether a run needs a sandbox, and whether it works: without one the run does not start."""

from __future__ import annotations

from tidemill.agents.find import find_environment
from tidemill.config.schema import RunSpec
from tidemill.config.task import ReasoningGymTask
from tidemill.core.errors import UserError
from tidemill.data.reasoning_gym import scorer_of
from tidemill.sandbox.open_sandbox import check_sandbox
from tidemill.scoring.builtin_rewards import NOT_ABOUT_CORRECTNESS
from tidemill.scoring.package_checks import check_program


def check_needed_sandbox(spec: RunSpec) -> None:
    """Run a command in a sandbox, if a reward or the environment needs one, and start the program that scores the task.

    Raises:
        UserError: the back-end does not work on this machine, or the environment is wrong.
    """
    kinds = {reward.kind for reward in (*spec.scoring.rewards, *spec.eval.rewards)}
    # The task's own scorer is a reward, or measures held-out answers because no reward tells correctness.
    if isinstance(spec.task, ReasoningGymTask) and ("task" in kinds or kinds <= NOT_ABOUT_CORRECTNESS):
        try:
            check_sandbox(spec.sandbox)
            if (check := scorer_of(spec.task)) is not None:
                check_program(check, spec.sandbox)
        except UserError as error:
            what = f"reasoning-gym evaluates answers as Python, and its scores need a sandbox: {error.what}"
            raise UserError(what, where=error.where, hint=error.hint) from error
        return
    environment = spec.env.enabled and find_environment(spec.env, spec.sandbox).function
    if "tests" in kinds or getattr(environment, "needs_sandbox", False):
        check_sandbox(spec.sandbox)
