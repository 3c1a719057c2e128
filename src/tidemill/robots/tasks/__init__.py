"""The built-in tasks by name, and tasks of the user."""

from __future__ import annotations

from tidemill.core.errors import UserError
from tidemill.extensions.registry import resolve
from tidemill.robots.task import Task
from tidemill.robots.tasks.quadruped import Quadruped
from tidemill.robots.tasks.swingup import Swingup

TASKS: dict[str, type[Task]] = {"swingup": Swingup, "quadruped": Quadruped}


def open_task(name: str) -> Task:
    """A built-in task, or one of the user: `path/file.py:Task`.

    Raises:
        UserError: there is no such task.
    """
    if name in TASKS:
        return TASKS[name]()
    found = resolve(name, "control_task", where="robot.task").function
    if not (isinstance(found, type) and issubclass(found, Task)):
        what, hint = f"{name} is not a subclass of tidemill.robots.task.Task", "derive it from that class"
        raise UserError(what, where="robot.task", hint=hint)
    return found()
