"""Machines without a network between them, and tasks of OSMO on such machines; both share folders of this one."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.forked import Forked
from tidemill.cli.app import main
from tidemill.deploy.osmo.model import Task, TaskInput, Workflow

NEW_NETWORK = 0x40000000  # CLONE_NEWNET
DEADLINE_S = 100.0
KILLED_CODE = 137
PROGRAM = """\
#!/bin/sh
echo "$@" > {folder}/asked
while [ ! -f {folder}/code ]; do sleep 0.02; done
exit $(cat {folder}/code)
"""
"""Stands for `tidemill` in a script: the test runs the command in a fork, because an import of torch takes seconds."""


def isolated_main() -> int:
    """The command line in a network of its own, which reaches nothing; for `Forked(target=...)`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "no network namespaces")
    return main(sys.argv[1:])


def network_of(pid: int) -> str:
    """The network namespace of a process."""
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def no_namespaces() -> str:
    """Why there are no such networks here; empty if there are."""
    if shutil.which("unshare") is None:
        return "there is no unshare"
    return subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False).stderr.strip()


@dataclass
class OsmoTasks:
    """Runs tasks as OSMO does: each on a fresh machine, with inputs in folders and outputs in a store.

    Args:
        folder: an empty folder; `outputs/TASK` and `store` appear in it.
    """

    folder: Path
    workflow: Workflow
    machines: list[Path] = field(default_factory=list)
    printed: str = ""  # by the last task

    def run(self, name: str, *, until: Callable[[Path], bool] | None = None) -> int:
        """Run a task; returns its exit code.

        Args:
            until: of the machine's folder; once it holds, the checkpoint is uploaded and the machine lost.
        """
        (task,) = [each for each in self.workflow.tasks if each.name == name]
        machine = self.folder / f"machine-{len(self.machines)}"
        self.machines.append(machine)
        machine.mkdir()
        output = machine / "output"
        output.mkdir()
        tokens = {"output": str(output)}
        for index, source in enumerate(task.inputs):
            tokens[f"input:{index}"] = str(place := machine / "inputs" / str(index))
            stored = (
                self.folder / "outputs" / source.task if isinstance(source, TaskInput) else self._stored(source.url)
            )
            if stored.is_dir():
                shutil.copytree(stored, place)
            else:  # OSMO downloads nothing from an empty place
                place.mkdir(parents=True)
        code = self._execute(task, machine, tokens, until)
        if code == 0:
            shutil.copytree(output, self.folder / "outputs" / name)
        if code != KILLED_CODE:
            self._upload(task, machine)
        return code

    def _execute(self, task: Task, machine: Path, tokens: dict[str, str], until: Callable[[Path], bool] | None) -> int:
        def here(text: str) -> str:
            for token, value in tokens.items():
                text = text.replace(f"{{{{{token}}}}}", value)
            return text.replace("/etc/tidemill", f"{machine}/etc").replace("/tmp/tidemill", f"{machine}/tmp")

        for file in task.files:
            assert file.contents is not None and not file.base64
            path = Path(here(file.path))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(here(file.contents), encoding="utf-8")
        program = machine / "bin" / "tidemill"
        program.parent.mkdir()
        program.write_text(PROGRAM.format(folder=machine))
        program.chmod(0o755)
        path_variable = f"{program.parent}:{os.environ['PATH']}"
        command = [here(word) for word in (*task.command, *task.args)]
        with subprocess.Popen(command, cwd=machine, env={**os.environ, "PATH": path_variable}) as script:
            asked, deadline_s = machine / "asked", time.monotonic() + DEADLINE_S
            while script.poll() is None and not (asked.is_file() and asked.read_text().endswith("\n")):
                assert time.monotonic() < deadline_s, "the script did not start tidemill"
                time.sleep(0.01)
            code = KILLED_CODE
            try:
                if asked.is_file():
                    code = self._train(asked.read_text().split(), task, machine, until)
            finally:
                (machine / "code.new").write_text(str(code))
                (machine / "code.new").rename(machine / "code")
            return script.wait(DEADLINE_S)

    def _train(self, argv: list[str], task: Task, machine: Path, until: Callable[[Path], bool] | None) -> int:
        with Forked(*argv, cwd=machine) as process:
            deadline_s = time.monotonic() + DEADLINE_S
            while until and process.poll() is None:
                assert time.monotonic() < deadline_s, "the stage did not get that far"
                if until(machine):
                    self._upload(task, machine)  # while the stage writes
                    process.kill()
                    break
                time.sleep(0.005)
            out, err = process.communicate(DEADLINE_S)
        self.printed = f"{out}\n{err}"
        assert process.returncode is not None
        return KILLED_CODE if process.returncode < 0 else process.returncode

    def _upload(self, task: Task, machine: Path) -> None:
        """Copy what the expression of a checkpoint matches, as `osmo data upload` does: links are not followed."""
        for checkpoint in task.checkpoint:
            source = Path(checkpoint.path.replace("/tmp/tidemill", f"{machine}/tmp"))
            for folder, _, names in os.walk(source):
                for name in names:
                    path = Path(folder) / name
                    relative = path.relative_to(source.parent)
                    if re.match(checkpoint.regex, str(relative)):
                        target = self._stored(checkpoint.url) / relative
                        target.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copyfile(path, target)

    def _stored(self, url: str) -> Path:
        return self.folder / "store" / url.partition("://")[2]
