"""The jobs of a run in Slurm's queue, through the user's sbatch, squeue and scancel."""

from __future__ import annotations

import difflib
import secrets
import shutil
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tidemill.core.errors import DeadlineError, UserError
from tidemill.deploy.documents import Rendered
from tidemill.deploy.programs import Meaning, Program, ProgramFailed, refuse_unset
from tidemill.deploy.recipe_files import RECIPE
from tidemill.deploy.slurm.batch import LOG, MARKER, PYTHON, RESERVED, ROLLOUTS
from tidemill.deploy.slurm.job_state import FIELDS, LIVE, QueuedJob
from tidemill.telemetry.jsonl import disk_error

MARKER_FILE, HEAD_FILE = "marker", "head.json"
RUN_FILES = ("manifest.json", "pipeline.json", "config.toml")
"""One of them is in the folder of a run, from its start on."""
DELETE_S = 120.0
"""Slurm gives a cancelled job KillWait (30 s by default) and then kills it."""
LOOK_S = 1.0
MEANINGS: tuple[Meaning, ...] = (
    (("invalid partition",), "there is no such partition", "`sinfo -s` lists those of the cluster"),
    (
        ("invalid account", "invalid qos"),
        "the account or QOS is not this user's",
        "see `sacctmgr show assoc user=$USER`",
    ),
    (
        ("node configuration is not available", "node count", "cpu count"),
        "no machine of the partition has what the job asks for",
        "compare `sinfo -o '%P %c %m %G'` with the #SBATCH lines of `tidemill deploy render`",
    ),
    (
        ("unable to contact", "connection refused", "socket timed out", "controller"),
        "Slurm's controller does not answer",
        "check `scontrol ping`",
    ),
)


class SlurmQueue:
    """The target slurm."""

    def __init__(self) -> None:
        self._sbatch, self._squeue, self._scancel = (
            Program(
                name=name,
                install="run it on a login node of the cluster, or submit the files of `tidemill deploy render` there",
                look_at="check `scontrol ping`",
                meanings=MEANINGS,
                otherwise="`tidemill deploy check --server` asks Slurm without submitting",
            )
            for name in ("sbatch", "squeue", "scancel")
        )

    def diff(self, rendered: Rendered) -> str:
        folder, lines = _folder(rendered), list[str]()
        for name, text in rendered.files.items():
            path = folder / name
            before = path.read_text(encoding="utf-8") if path.exists() else ""
            lines += difflib.unified_diff(
                before.splitlines(keepends=True), text.splitlines(keepends=True), str(path), f"{path} (rendered)"
            )
        return "".join(lines)

    def apply(self, rendered: Rendered) -> list[str]:
        refuse_unset(rendered.deploy.secrets)
        queued = {job.name: job for job in self._jobs(rendered) if job.state in LIVE}
        names = {RESERVED: rendered.job, ROLLOUTS: f"{rendered.job}-rollouts"}
        folder, lines, reserved = _folder(rendered), list[str](), ""
        marker = self._write(folder, rendered, kept=[script for script, name in names.items() if name in queued])
        for script, name in names.items():
            if script not in rendered.files:
                continue
            if name in queued:
                job_id = queued[name].job_id
                lines.append(f"{name} is left as job {job_id}, which {queued[name].words}")
            else:
                after = [f"--dependency=after:{reserved}"] if reserved else []
                sets = f"--export=ALL,{MARKER}={marker},{PYTHON}={sys.executable}"
                job_id = self._submit([sets, *after, str(folder / script)])
                lines.append(f"{name} is submitted as job {job_id}")
            reserved = reserved or job_id
        return lines

    def _write(self, folder: Path, rendered: Rendered, *, kept: Sequence[str]) -> str:
        """Write the files, and a marker unless the folder has one; returns it.

        Args:
            kept: scripts of live jobs. With that of the reserved job the recipe is kept, which a requeued job reads.
        """
        path = folder / MARKER_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if RESERVED not in kept:
                (folder / HEAD_FILE).unlink(missing_ok=True)  # rollouts would take the last run's end for this one's
            if not path.exists():  # rollouts that are still queued know the one of the last `apply`
                path.write_text(secrets.token_hex(16), encoding="utf-8")
            for name, text in rendered.files.items():
                if (RESERVED if name == RECIPE else name) not in kept:
                    (folder / name).write_text(text, encoding="utf-8")
            return path.read_text(encoding="utf-8")
        except OSError as error:
            raise disk_error(error, folder) from error

    def _submit(self, arguments: list[str]) -> str:
        return self._sbatch.run(["--parsable", *arguments]).strip().split(";")[0]  # ID, or ID;CLUSTER

    def status(self, rendered: Rendered) -> list[dict[str, str]]:
        return [
            {
                "kind": f"job {job.shown_id}",
                "name": job.name,
                "role": "reserved" if job.name == rendered.job else "rollouts",
                "state": job.words,
            }
            for job in self._jobs(rendered)
        ]

    def print_log(self, rendered: Rendered, *, follow: bool) -> None:
        path, at = _folder(rendered) / LOG, 0
        while True:
            lives = any(job.name == rendered.job and job.state in LIVE for job in self._jobs(rendered))
            if path.exists():
                with path.open("rb") as file:
                    file.seek(at)
                    text = file.read()
                at += len(text)
                sys.stdout.write(text.decode("utf-8", "replace"))
                sys.stdout.flush()
            elif not lives:
                raise UserError(
                    f"there is no log of {rendered.job}", where=str(path), hint="see `tidemill deploy status`"
                )
            if not (follow and lives):
                return
            time.sleep(LOOK_S)

    def delete(self, rendered: Rendered, *, storage: bool) -> list[str]:
        run = Path(tomllib.loads(rendered.files[RECIPE])["run"]["dir"])
        if storage and run.exists() and not any((run / name).exists() for name in RUN_FILES):
            hint = "correct run.dir, or remove the folder yourself"
            raise UserError("is not a run's folder, and is not deleted", where=str(run), hint=hint)
        jobs = {job.job_id: job.name for job in self._jobs(rendered) if job.state in LIVE}
        if jobs:
            self._scancel.run(list(jobs))
        end_s = time.monotonic() + DELETE_S
        while left := [job.shown_id for job in self._jobs(rendered) if job.state in LIVE]:
            if time.monotonic() > end_s:
                look_at = f"`squeue --jobs={','.join(left)}`"
                raise DeadlineError("the end of cancelled jobs", waited_s=DELETE_S, look_at=look_at)
            time.sleep(LOOK_S)
        lines = [f"{name} (job {job_id})" for job_id, name in jobs.items()]
        if storage:
            for folder in (run, _folder(rendered)):
                if folder.exists():
                    try:
                        shutil.rmtree(folder)
                    except OSError as error:  # such as a file that a node still has open on NFS
                        raise disk_error(error, folder) from error
                    lines.append(str(folder))
        return lines

    def refusals(self, rendered: Rendered) -> list[str]:
        refused = list[str]()
        for script in (RESERVED, ROLLOUTS):
            if text := rendered.files.get(script):
                try:
                    self._sbatch.run(["--test-only"], text)
                except ProgramFailed as error:
                    refused.append(f"{script}: {error}")
        return refused

    def _jobs(self, rendered: Rendered) -> list[QueuedJob]:
        """Those in Slurm's memory: queued, running, and ended some minutes ago."""
        names = f"--name={rendered.job},{rendered.job}-rollouts"
        layout = f"--Format={','.join(f'{name}:|' for name in FIELDS)}"
        text = self._squeue.run(["--me", names, "--states=all", "--sort=i", "--noheader", layout])
        return [QueuedJob.of(line) for line in text.splitlines()]


def _folder(rendered: Rendered) -> Path:
    return Path(rendered.deploy.slurm.runs) / "deploy" / rendered.job
