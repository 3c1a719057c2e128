"""A cluster for a test: started in its own namespaces, reached with kubectl, gone with all its processes at the end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tests.processes import command_lines, end_namespace, processes_below

START_S = 30.0
PROBE = """mount -t tmpfs tmpfs "$0" && mkdir "$0/upper" "$0/work" "$0/root" &&
mount -t overlay overlay -o "lowerdir=/,upperdir=$0/upper,workdir=$0/work" "$0/root" && ip link add br0 type bridge"""
ISOLATED = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "double",
    "contexts": [
        {"name": "double", "context": {"cluster": "double", "user": "user"}},
        {"name": "nobody", "context": {"cluster": "double", "user": "nobody"}},
    ],
    "users": [{"name": "user", "user": {"token": "user"}}, {"name": "nobody", "user": {"token": "nobody"}}],
}
T = TypeVar("T")


def real_kubectl() -> str | None:
    return shutil.which("kubectl", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


def unavailable(folder: Path) -> str:
    """Why a cluster cannot run here; empty if it can. `folder` is an empty folder to try in."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    programs = ("ip", "unshare", "nsenter", "setpriv", "openssl")
    if missing := [name for name in programs if shutil.which(name) is None]:
        return f"needs {', '.join(missing)}"
    if real_kubectl() is None:
        return "needs kubectl"
    command = [*ISOLATED, "sh", "-c", PROBE, str(folder)]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class Kubernetes:
    """Context manager of a cluster whose volumes, logs and events lie in a folder.

    `bin` is a folder for PATH whose kubectl reaches the cluster.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.bin = self.folder / "bin"

    def __enter__(self) -> Self:
        self.bin.mkdir(parents=True)
        command = ["setpriv", "--pdeathsig", "KILL", *ISOLATED, sys.executable, "-m", "tests.doubles.kubernetes"]
        log = (self.folder / "double.log").open("wb")
        with log:
            self._process = subprocess.Popen(
                [*command, str(self.folder)], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        try:
            self.wait((self.folder / "ready").exists, "the API server", START_S)
            self._write_kubectl()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop()

    def _stop(self) -> None:
        end_namespace(self._process, START_S)

    def _write_kubectl(self) -> None:
        certificate = str(self.folder / "certificate.pem")
        cluster = {"server": "https://10.9.0.1:6443", "certificate-authority": certificate}
        config = KUBECONFIG | {"clusters": [{"name": "double", "cluster": cluster}]}
        (self.folder / "kubeconfig").write_text(json.dumps(config))
        inside = next(processes_below(self._process.pid))
        program = self.bin / "kubectl"
        program.write_text(
            f"#!/bin/sh\nexport KUBECONFIG={self.folder}/kubeconfig\n"
            f'exec nsenter --target {inside} --net {real_kubectl()} --cache-dir {self.folder}/cache "$@"\n'
        )
        program.chmod(0o755)

    def kubectl(self, *arguments: str, deadline_s: float = 30.0) -> str:
        command = [str(self.bin / "kubectl"), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=deadline_s).stdout

    def wait(self, result: Callable[[], T], what: str, deadline_s: float) -> T:
        """Wait until a function returns something true, and return it."""
        end = time.monotonic() + deadline_s
        while not (value := result()):
            if self._process.poll() is not None or time.monotonic() > end:
                log = (self.folder / "double.log").read_text()[-2000:]
                events = "\n".join(map(str, self.events()[-20:]))
                raise TimeoutError(f"waited {deadline_s:g} s for {what}; {events}\n{log}")
            time.sleep(0.05)
        return value

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """What happened, in the order of time: pods, patches of the autoscaler, signals, ends, jobs."""
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if name in ("", event["event"])]

    def processes(self) -> dict[int, str]:
        """Command lines of everything that runs in the cluster, by process id."""
        return command_lines(processes_below(self._process.pid))
