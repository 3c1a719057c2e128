"""The built-in tasks by name, and tasks of the user."""

from __future__ import annotations

from tidemill.core.errors import UserError, exception_text
from tidemill.extensions.registry import resolve
from tidemill.robots.task import Task
from tidemill.robots.tasks.quadruped import Quadruped
from tidemill.robots.tasks.reach import Reach
from tidemill.robots.tasks.swingup import Swingup
from tidemill.robots.tasks.tandem import Tandem

TASKS: dict[str, type[Task]] = {"swingup": Swingup, "reach": Reach, "quadruped": Quadruped, "tandem": Tandem}


def open_task(name: str) -> Task:
    """A built-in task, or one of the user: `path/file.py:Task`.

    Raises:
        UserError: there is no such task, or it has no model or joints.
    """
    if name in TASKS:
        return TASKS[name]()
    found = resolve(name, "control_task", where="robot.task").function
    if not (isinstance(found, type) and issubclass(found, Task)):
        what, hint = f"{name} is not a subclass of tidemill.robots.task.Task", "derive it from that class"
        raise UserError(what, where="robot.task", hint=hint)
    for attribute in ("model", "joints"):
        if not hasattr(found, attribute):
            what, hint = f"{name} has no attribute {attribute}", f"add {attribute} = ... to the class"
            raise UserError(what, where="robot.task", hint=hint)
    try:
        return found()
    except Exception as error:
        what, hint = f"{name}() fails: {exception_text(error)}", "a task is made without arguments"
        raise UserError(what, where="robot.task", hint=hint) from error
