"""Whether a run needs a sandbox, and whether it works: without one the run does not start."""

from __future__ import annotations

from tidemill.config.schema import RunSpec
from tidemill.config.task import ReasoningGymTask
from tidemill.envs.agents.find import find_environment
from tidemill.envs.text.reasoning_gym import check_scorer
from tidemill.envs.text.scorer import NOT_ABOUT_CORRECTNESS
from tidemill.sandbox.open_sandbox import check_sandbox


def check_needed_sandbox(spec: RunSpec) -> None:
    """Run a command in a sandbox, if a reward or the environment needs one, and the program that scores the task.

    Raises:
        UserError: the back-end does not work on this machine, or the environment or the task is wrong.
    """
    kinds = {reward.kind for reward in (*spec.scoring.rewards, *spec.eval.rewards)}
    environment = spec.env.enabled and find_environment(spec.env, spec.sandbox).function
    package = isinstance(spec.task, ReasoningGymTask) and ("task" in kinds or kinds <= NOT_ABOUT_CORRECTNESS)
    if "tests" in kinds or package or getattr(environment, "needs_sandbox", False):
        check_sandbox(spec.sandbox)
    if package:
        assert isinstance(spec.task, ReasoningGymTask)
        check_scorer(spec.task, spec.sandbox)
