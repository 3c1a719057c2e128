"""A rendered workflow on OSMO, through the user's `osmo` program and its login."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import unified_diff
from pathlib import Path
from typing import Any

from tidemill.config.deploy import DeployConfig
from tidemill.core.errors import UserError
from tidemill.deploy.documents import Rendered
from tidemill.deploy.programs import Program, ProgramFailed

NEWEST = 50
"""Workflows among which those of a job are looked for."""
LOG_LINES = 1000
"""Printed with --once."""
ALIVE = ("PENDING", "RUNNING", "WAITING")
PRIORITIES = ("low", "normal", "high")
"""Of OSMO; workflows of low priority may be preempted."""
OSMO = Program(
    name="osmo",
    install="install OSMO's client as its user guide says, or submit the file of `tidemill deploy render` elsewhere",
    look_at="check `osmo version`, and see `tidemill deploy status`",
    meanings=(
        (("login", "unauthorized", "token", "401"), "OSMO does not know this user", "run `osmo login URL`"),
        (
            ("credential",),
            "a credential is missing",
            "see `osmo credential list`, and set it with `osmo credential set`",
        ),
        (("pool",), "OSMO refuses the pool", "see `osmo pool list`, and set deploy.osmo.pool"),
    ),
    otherwise="see `osmo workflow --help`",
)


class OsmoService:
    """The workflows of a job are those of this user with its name. Implements `deploy.targets.Target`."""

    def __init__(self, deploy: DeployConfig) -> None:
        self._pool = ["--pool", deploy.osmo.pool] if deploy.osmo.pool else []
        is_priority = deploy.priority_class in PRIORITIES
        self._priority = ["--priority", deploy.priority_class.upper()] if is_priority else []

    def diff(self, rendered: Rendered) -> str:
        """The newest workflow as it was submitted, beside the rendered one."""
        ((name, text),) = rendered.files.items()
        newest = self._newest(rendered.job)
        before = _workflow("spec", newest["name"], "--template") if newest else ""
        old, new = (part.rstrip().splitlines() for part in (before, text))
        return "\n".join(unified_diff(old, new, newest.get("name", "nothing"), name, lineterm=""))

    def apply(self, rendered: Rendered) -> list[str]:
        """Raises UserError: a workflow of the job is alive; it would write the same checkpoints."""
        newest = self._newest(rendered.job)
        if newest and newest["status"] in ALIVE:
            what, hint = (
                f"the workflow {newest['name']} of this job has not ended",
                "`tidemill deploy delete` cancels it",
            )
            raise UserError(what, where="osmo workflow submit", hint=hint)
        with _on_disk(rendered) as path:
            options = ["--format-type", "json", *self._pool, *self._priority]
            submitted = json.loads(_workflow("submit", str(path), *options))
        return [f"workflow/{submitted['name']} submitted: {submitted['overview']}"]

    def status(self, rendered: Rendered) -> list[dict[str, str]]:
        newest = self._newest(rendered.job)
        if not newest:
            return []
        found = json.loads(_workflow("query", newest["name"], "--format-type", "json"))
        rows = [{"kind": "workflow", "name": newest["name"], "role": "job", "state": _state(found)}]
        tasks = [task for group in found["groups"] for task in group["tasks"]]
        return rows + [{"kind": "task", "name": each["name"], "role": "stage", "state": _state(each)} for each in tasks]

    def print_log(self, rendered: Rendered, *, follow: bool) -> None:
        newest = self._newest(rendered.job)
        if not newest:
            raise UserError(f"no workflow of {rendered.job}", hint="`tidemill deploy apply` submits it")
        code = OSMO.pass_on(["workflow", "logs", newest["name"], *([] if follow else ["-n", str(LOG_LINES)])])
        if code:
            raise UserError(f"osmo workflow logs ended with code {code}", hint="see `tidemill deploy status`")

    def delete(self, rendered: Rendered, *, storage: bool) -> list[str]:
        """Cancel what is alive; with `storage` also delete what its stages have kept at deploy.osmo.url."""
        alive = [each["name"] for each in self._workflows(rendered.job) if each["status"] in ALIVE]
        if alive:
            _workflow("cancel", *alive)
        deleted = [f"workflow/{name} cancelled" for name in alive]
        url = rendered.deploy.osmo.url.rstrip("/")
        if storage and url:
            OSMO.run(["data", "delete", f"{url}/{rendered.job}/"], verb="data delete")
            deleted.append(f"{url}/{rendered.job}/ deleted")
        return deleted

    def refusals(self, rendered: Rendered) -> list[str]:
        with _on_disk(rendered) as path:
            try:
                _workflow("validate", str(path), *self._pool)
            except ProgramFailed as error:
                return [line for line in error.output.splitlines() if line.strip()]
        return []

    def _newest(self, job: str) -> dict[str, Any]:
        return next(iter(self._workflows(job)), {})

    def _workflows(self, job: str) -> list[dict[str, Any]]:
        """Those of a job, whose names are JOB-NUMBER, from the newest."""
        options = ["--name", job, "--count", str(NEWEST), "--order", "desc", "--format-type", "json"]
        found = json.loads(_workflow("list", *options))["workflows"]
        return [each for each in found if re.fullmatch(rf"{re.escape(job)}-\d+", each["name"])]


def _workflow(verb: str, *arguments: str) -> str:
    return OSMO.run(["workflow", verb, *arguments], verb=f"workflow {verb}")


def _state(found: dict[str, Any]) -> str:
    """A status in plain words: `failed: preempted (exit code 3006)`."""
    word, _, why = str(found["status"]).partition("_")
    code = f" (exit code {found['exit_code']})" if found.get("exit_code") else ""
    return word.lower() + (f": {why.replace('_', ' ').lower()}" if why else "") + code


@contextmanager
def _on_disk(rendered: Rendered) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        ((name, text),) = rendered.files.items()
        path = Path(folder) / name
        path.write_text(text, encoding="utf-8")
        yield path
