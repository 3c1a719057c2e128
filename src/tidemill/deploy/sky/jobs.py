"""The verbs of `tidemill deploy` on SkyPilot, through the user's `sky`."""

from __future__ import annotations

import json
import re
import secrets
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from tidemill.config.deploy import DeployConfig
from tidemill.core.errors import UserError
from tidemill.deploy.documents import Rendered
from tidemill.deploy.programs import Program, ProgramFailed, refuse_unset
from tidemill.deploy.sky.tasks import TOKEN, TRAINER
from tidemill.hardware.sky_catalog import catalog_file, read_offers

SKY = Program(
    name="sky",
    install='install it with your clouds, as `pip install "skypilot[aws]==0.14.*"`, then `sky check`',
    look_at="see `sky api status`",
    meanings=(
        (("Cloud access is not set up", "Failed to import dependencies"), "no cloud is set up", "run `sky check`"),
        (
            ("VolumeNotFoundError",),
            "its volume is missing",
            "create it: `sky volumes apply`, with size and storage class",
        ),
    ),
    otherwise="see `sky check`",
)
LAUNCH_S = 1800.0
"""The first launch starts SkyPilot's controller of jobs, a machine."""
NONE = "No in-progress managed jobs"
STATES = {
    "PENDING": "waits for SkyPilot's controller",
    "STARTING": "its machine starts",
    "RUNNING": "runs",
    "RECOVERING": "lost its machine or stopped after a checkpoint; the next one starts",
    "CANCELLING": "is being cancelled",
    "CANCELLED": "was cancelled, or ended with the trainer",
    "SUCCEEDED": "has ended",
    "FAILED": "has failed",
    "FAILED_NO_RESOURCE": "found no machine",
}
ENDED = re.compile("SUCCEEDED|CANCELLED|FAILED.*")


class SkyPilot:
    """Args: deploy: its secrets name variables of this process."""

    def __init__(self, deploy: DeployConfig) -> None:
        self._deploy = deploy

    def diff(self, rendered: Rendered) -> str:
        what = "SkyPilot's program does not show what was submitted"
        raise UserError(
            what, where="deploy diff", hint="`deploy status` shows whether it runs; `deploy delete` ends it"
        )

    def apply(self, rendered: Rendered) -> list[str]:
        """Submit the job group. Jobs of SkyPilot cannot be changed, and a second one could have the same name."""
        if any(not ENDED.fullmatch(row["status"]) for row in self._rows(rendered)):
            raise UserError(
                "is there already", where=f"job {rendered.job}", hint="end it with `tidemill deploy delete`"
            )
        refuse_unset(self._deploy.secrets)
        if lacking := _lacking(rendered):
            raise UserError(lacking[0], where="deploy.sky.clouds", hint="see `sky gpus list`, or name other clouds")
        with TemporaryDirectory() as folder:  # of mode 700
            token = Path(folder, "token")
            token.write_text(f"{TOKEN}={secrets.token_hex(32)}\n", encoding="utf-8")
            options = [f"--secret-file={token}", *(f"--secret={variable}" for variable in self._deploy.secrets)]
            self._launch(rendered, folder, ["--yes", "--detach-run", *options])
        return [f"job {name}" for name in _names(rendered)]

    def status(self, rendered: Rendered) -> list[dict[str, str]]:
        return [
            {
                "kind": "Job",
                "name": row["task_name"],
                "role": row["task_name"].partition("-")[0],
                "state": STATES.get(row["status"], row["status"].lower()),
            }
            for row in self._rows(rendered)
        ]

    def print_log(self, rendered: Rendered, *, follow: bool) -> None:
        if not (rows := self._rows(rendered)):
            raise UserError(
                "there is no such job", where=f"job {rendered.job}", hint="start it: `tidemill deploy apply`"
            )
        SKY.pass_on(["jobs", "logs", "--follow" if follow else "--no-follow", str(rows[0]["job_id"]), TRAINER])

    def delete(self, rendered: Rendered, *, storage: bool) -> list[str]:
        if storage:
            raise UserError("volumes are not deleted here", where="--storage", hint="use `sky volumes delete`")
        rows = [row for row in self._rows(rendered) if not ENDED.fullmatch(row["status"])]
        if rows:
            SKY.run(["jobs", "cancel", "--yes", str(rows[0]["job_id"])], verb="jobs cancel")
        return [f"job {row['task_name']}" for row in rows]

    def refusals(self, rendered: Rendered) -> list[str]:
        """`sky jobs launch` has no dry run; it looks for machines, asks whether to go on, and gets the answer no."""
        try:
            with TemporaryDirectory() as folder:
                self._launch(rendered, folder, [], answer="n\n")
        except ProgramFailed as error:
            return _lacking(rendered) + ([] if "Aborted" in error.output else [str(error)])
        return _lacking(rendered)

    def _launch(self, rendered: Rendered, folder: str, options: list[str], *, answer: str = "") -> None:
        (name,) = rendered.files
        file = Path(folder, name)
        file.write_text(rendered.text, encoding="utf-8")
        SKY.run(["jobs", "launch", *options, str(file)], answer, verb="jobs launch", deadline_s=LAUNCH_S)

    def _rows(self, rendered: Rendered) -> list[dict[str, Any]]:
        """SkyPilot's records of the newest job group of this name, by task."""
        try:
            text = SKY.run(["jobs", "queue", "--all", "--output=json"], verb="jobs queue")
        except ProgramFailed as error:
            if NONE in error.output:
                return []
            raise
        start = re.search(r"^\[", text, re.MULTILINE)  # after remarks about its server
        rows = [row for row in json.loads(text[start.start() :] if start else "[]") if row["job_name"] == rendered.job]
        newest = max((row["job_id"] for row in rows), default=0)
        return sorted((row for row in rows if row["job_id"] == newest), key=lambda row: row["task_id"])


def _names(rendered: Rendered) -> list[str]:
    return [document["name"] for document in list(yaml.safe_load_all(rendered.text))[1:]]


def _lacking(rendered: Rendered) -> list[str]:
    """The clouds that lack an accelerator, as SkyPilot's catalogue says where it is on this machine."""
    wanted = {
        (place["infra"], gpu, count): None
        for document in list(yaml.safe_load_all(rendered.text))[1:]
        for gpu, count in document["resources"].get("accelerators", {}).items()
        for place in document["resources"].get("any_of", ())
    }
    return [f"{infra} has no machine with {count} {gpu}" for infra, gpu, count in wanted if not _has(infra, gpu, count)]


def _has(infra: str, gpu: str, count: int) -> bool:
    """Whether a cloud or its region offers a machine; also if that is unknown here."""
    cloud, region, *_ = [*infra.lower().split("/"), ""]
    if (file := catalog_file(cloud)) is None:
        return True
    offers = (each for each in read_offers(file) if each.accelerator == gpu and each.accelerators >= count)
    return any(region in ("", "*", offer.region) for offer in offers)
