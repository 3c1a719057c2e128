"""The workflow specification of NVIDIA OSMO 6 as strict models.

Fields and rules are those of its user guide (Workflows, Specification) and of its service; unknown keys are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

NAME = r"[a-zA-Z]([a-zA-Z0-9_-]*[a-zA-Z0-9])?"
LABEL_TEXT = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
MOST_LABELS = 16
OWN_TASK, OWN_FOLDER = "osmo-ctrl", "/osmo"
"""Of OSMO itself, in every task."""


def _text(value: Any) -> Any:
    """YAML's numbers and booleans where the specification has texts."""
    return str(value) if isinstance(value, bool | int | float) else value


def _expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from None
    return text


Name: TypeAlias = Annotated[str, Field(pattern=f"^{NAME}$")]
Text: TypeAlias = Annotated[str, BeforeValidator(_text)]
Regex: TypeAlias = Annotated[str, AfterValidator(_expression)]
Quantity: TypeAlias = Annotated[Text, Field(pattern=r"^\d+(\.\d+)?((T|G|M|K)(i|iB)?|B|m)?$")]
Duration: TypeAlias = Annotated[Text, Field(pattern=r"^(\d+(\.\d+)?(d|h|m|s|ms|us)?|P[0-9DHMST.]+)$")]
Url: TypeAlias = Annotated[str, Field(pattern=r"^(s3|gs|azure|tos|swift)://[^/\s]+(/\S*)?$")]
Codes: TypeAlias = Annotated[Text, Field(pattern=r"^\d+(-\d+)?(,\d+(-\d+)?)*$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Topology(_Strict):
    key: str
    group: str = "default"
    requirementType: Literal["required", "preferred"] = "required"


class Resource(_Strict):
    """The machine of a task."""

    cpu: int | None = Field(None, ge=0)
    memory: Quantity | None = None
    storage: Quantity | None = None
    gpu: int | None = Field(None, ge=0)
    platform: str | None = None
    nodesExcluded: tuple[str, ...] = ()
    topology: tuple[Topology, ...] = ()


class TaskInput(_Strict):
    """The output folder of an earlier task, of this workflow or (`workflow:task`) of another one."""

    task: Annotated[str, Field(pattern=f"^{NAME}(:{NAME})?$")]
    regex: Regex = ""


class UrlData(_Strict):
    """An input from or an output to object storage."""

    url: Url
    regex: Regex = ""


class Checkpoint(_Strict):
    """A folder of the task that is uploaded from time to time, and once more at the task's end."""

    path: str
    url: Url
    frequency: Duration
    regex: Regex = ""


class File(_Strict):
    """A file in the task's container: its contents, or a file beside the specification."""

    path: str = Field(min_length=2)
    contents: Text | None = None
    localpath: str | None = None
    base64: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.contents is None) == (self.localpath is None):
            raise ValueError(f"the file {self.path} needs contents or localpath, and not both")
        if f"{self.path}/".startswith(f"{OWN_FOLDER}/"):
            raise ValueError(f"{self.path}: {OWN_FOLDER} is OSMO's own folder")
        return self


class Task(_Strict):
    """A command in a container."""

    name: Name
    image: str = Field(min_length=1)
    command: tuple[Text, ...] = Field(min_length=1)
    args: tuple[Text, ...] = ()
    lead: bool = False
    environment: dict[str, Text] = {}
    credentials: dict[str, Text | dict[str, Text]] = {}
    inputs: tuple[TaskInput | UrlData, ...] = ()
    outputs: tuple[UrlData, ...] = ()
    files: tuple[File, ...] = ()
    resource: str = "default"
    volumeMounts: tuple[str, ...] = ()
    exitActions: dict[Literal["COMPLETE", "FAIL", "RESCHEDULE"], Codes] = {}
    checkpoint: tuple[Checkpoint, ...] = ()
    privileged: bool = False
    hostNetwork: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if _same_name(self.name) == OWN_TASK:
            raise ValueError(f"no task may have the name {OWN_TASK}")
        if twice := _repeated(file.path for file in self.files):
            raise ValueError(f"two files have the path {twice}")
        if twice := _repeated(str(code) for codes in self.exitActions.values() for code in _numbers(codes)):
            raise ValueError(f"two exitActions for exit code {twice}")
        return self


class Group(_Strict):
    """Tasks that start together and reach each other over the network."""

    name: Name
    barrier: bool = True
    ignoreNonleadStatus: bool = True
    tasks: tuple[Task, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        leaders = sum(task.lead for task in self.tasks)
        if leaders != 1 and len(self.tasks) > 1:
            raise ValueError(f"group {self.name} has {leaders} lead tasks, and needs one")
        return self


class Timeout(_Strict):
    """Per group: a limit on its time in the queue, and on its time from its first start, reschedules included."""

    exec_timeout: Duration | None = None
    queue_timeout: Duration | None = None


class Workflow(_Strict):
    """Tasks or groups, each after those whose outputs it reads."""

    name: Name
    pool: str = ""
    labels: dict[str, Annotated[str, Field(pattern=f"^{LABEL_TEXT}$")]] = Field({}, max_length=MOST_LABELS)
    timeout: Timeout = Timeout()
    resources: dict[str, Resource] = {}
    tasks: tuple[Task, ...] = ()
    groups: tuple[Group, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.tasks) == bool(self.groups):
            raise ValueError("needs tasks or groups, and not both")
        names = [task.name for tasks in self._in_order() for task in tasks] + [group.name for group in self.groups]
        if twice := _repeated(map(_same_name, names)):
            raise ValueError(f"two tasks or groups have the name {twice} (OSMO ignores case, and takes _ for -)")
        earlier = set[str]()
        for tasks in self._in_order():
            for task in tasks:
                needs = [each.task for each in task.inputs if isinstance(each, TaskInput) and ":" not in each.task]
                if missing := next((name for name in needs if name not in earlier), ""):
                    raise ValueError(f"task {task.name} needs {missing}, which is no task before it")
                if task.resource not in {"default", *self.resources}:
                    raise ValueError(f"task {task.name}: there is no resource {task.resource}")
            earlier |= {task.name for task in tasks}
        return self

    def _in_order(self) -> list[tuple[Task, ...]]:
        """The tasks of each group; a task without a group is one."""
        return [group.tasks for group in self.groups] or [(task,) for task in self.tasks]


class WorkflowFile(_Strict):
    """The file that `osmo workflow submit` reads."""

    version: Literal[2] = 2
    workflow: Workflow


def _same_name(name: str) -> str:
    """OSMO's names are equal if these texts are."""
    return name.lower().replace("_", "-")


def _repeated(values: Iterable[str]) -> str:
    """The first value that occurs twice; empty if none does."""
    seen = set[str]()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return ""


def _numbers(codes: str) -> Iterable[int]:
    """The exit codes of an action, as `0,2-4`."""
    for part in codes.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
