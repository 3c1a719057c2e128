"""Runs that need a sandbox, on a machine without one."""

from __future__ import annotations

import pytest

from tests.sandboxes import close_launchers
from tidemill.config.load import load_spec
from tidemill.core.errors import UserError
from tidemill.jobs.sandbox_check import check_needed_sandbox

pytest.importorskip("reasoning_gym")
GYM = ("--task.kind=reasoning_gym", "--task.name=countdown")


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        (('--scoring.rewards=[{kind="task"}]',), True),
        (('--eval.rewards=[{kind="task"}]',), True),
        (('--scoring.rewards=[{kind="random"}]',), True),  # held-out answers are scored by the package
        (('--scoring.rewards=[{kind="exact"}]',), False),
        (('--scoring.rewards=[{kind="task"}]', "--sandbox.backend=http", "--sandbox.url=http://127.0.0.1:9"), True),
    ],
)
def test_scores_of_a_package_are_refused_without_a_sandbox(
    arguments: tuple[str, ...], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    close_launchers()
    monkeypatch.setenv("PATH", "/nowhere")
    spec = load_spec([*GYM, *arguments])
    if not refused:
        check_needed_sandbox(spec)
        return
    with pytest.raises(UserError, match="evaluates answers as Python, and its scores need a sandbox") as it:
        check_needed_sandbox(spec)
    assert it.value.hint


def test_a_wrong_generator_is_left_to_the_task() -> None:
    spec = load_spec(
        [
            "--task.kind=reasoning_gym",
            "--task.name=contdown",
            '--scoring.rewards=[{kind="task"}]',
            "--sandbox.backend=none",
        ]
    )
    check_needed_sandbox(spec)
