"""Execute notebooks in a temporary folder, offline and within a deadline, and clean their outputs."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import nbclient
import nbclient.exceptions
import nbformat

DEADLINE_S = 900.0
"""Of a notebook. It takes at most three minutes on a quiet machine (`benchmarks.documentation`)."""
EXIT_GRACE_S = 5.0
MARK = "TIDEMILL_NOTEBOOK"
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"),
    "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm, without widgets
    **dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1,localhost"),
}
"""Requests to other machines fail at once."""
CLEANED = (
    (re.compile(r"\x1b\[[0-9;?]*[A-Za-z]"), ""),
    (re.compile(r"[^\n]*\r(?!\n)"), ""),  # overwritten lines of progress
    (re.compile(r"http://(?:127\.0\.0\.1|localhost):\d+"), "http://127.0.0.1:PORT"),
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?"), "TIME"),
    (re.compile(r"\b0x[0-9a-f]{6,}"), "0x…"),
    (re.compile(r"/tmp/ipykernel_\d+/\d+\.py"), "cell"),
)
SHOWN = ("text/html", "image/png", "text/plain")


class DeadlineMissed(Exception):
    """A notebook did not end in time."""


class Execution(NamedTuple):
    wall_s: float
    cpu_s: float


def execute(
    notebook: dict[str, Any],
    *,
    threads: int = 2,
    deadline_s: float = DEADLINE_S,
    environment: Mapping[str, str] | None = None,
) -> Execution:
    """Execute a notebook in a temporary folder and store its outputs in it.

    Args:
        threads: of PyTorch.
        environment: further variables of the kernel.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
        DeadlineMissed: it took longer than `deadline_s`.
        ChildProcessError: processes were still alive after the kernel had ended; they are killed.
    """
    mark = uuid.uuid4().hex
    given = {
        **os.environ,
        **OFFLINE,
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads)),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        **(environment or {}),
        MARK: mark,
    }
    started, cpu_started = time.monotonic(), _children_cpu_s()
    with tempfile.TemporaryDirectory(prefix="tutorial-") as folder:
        node = nbformat.reads(json.dumps(notebook), as_version=4)
        client = nbclient.NotebookClient(
            node,
            extra_arguments=["--IPKernelApp.log_level=ERROR"],  # does not encrypt its local ports, and warns of it
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": folder}},
            timeout_func=lambda _: max(1, round(started + deadline_s - time.monotonic())),  # of a cell
        )
        try:
            client.execute(env=given)
        except nbclient.exceptions.CellTimeoutError:
            raise DeadlineMissed(f"the notebook took more than {deadline_s:g} s") from None
        finally:
            left = _end_processes(mark)
    if left:
        raise ChildProcessError(f"the notebook left processes alive (killed now): {', '.join(left)}")
    done = Execution(wall_s=time.monotonic() - started, cpu_s=_children_cpu_s() - cpu_started)
    for cell, executed in zip(notebook["cells"], node.cells, strict=True):
        if cell["cell_type"] == "code":
            outputs = [cleaned(output, folder=folder) for output in joined(executed.outputs)]
            cell |= {"outputs": [each for each in outputs if each], "execution_count": executed.execution_count}
    return done


def cleaned(output: Mapping[str, Any], *, folder: str) -> dict[str, Any]:
    """An output without what differs between two executions on two machines; empty if nothing is left."""
    kind = output["output_type"]
    if kind == "stream":
        text = clean_text(output["text"], folder=folder)
        return {"output_type": kind, "name": output["name"], "text": _lines(text)} if text.strip() else {}
    data = {key: output["data"][key] for key in SHOWN if key in output["data"]}
    if "text/html" in data and data.get("text/plain", "").startswith("<"):
        del data["text/plain"]
    data = {
        key: value.strip() if key == "image/png" else _lines(clean_text(value, folder=folder))
        for key, value in data.items()
        if value.strip()
    }
    if not data:
        return {}
    count = {"execution_count": output["execution_count"]} if kind == "execute_result" else {}
    return {"output_type": kind, "data": data, "metadata": {}, **count}


def clean_text(text: str, *, folder: str) -> str:
    """Replace absolute paths, addresses, times, and codes of terminals."""
    for pattern, replacement in CLEANED:
        text = pattern.sub(replacement, text)
    text = text.replace(f"{folder}/", "").replace(folder, ".")
    for path in (str(Path(__file__).resolve().parents[2]), sys.prefix, str(Path.home())):
        if len(path) > 1:
            text = text.replace(path, "…")
    return text


def joined(outputs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Outputs, where successive texts of one stream are one output: a text may be cut anywhere, also in a code."""
    result: list[dict[str, Any]] = []
    for output in outputs:
        last = result[-1] if result else {}
        if output["output_type"] == "stream" and last.get("name") == output["name"]:
            last["text"] += output["text"]
        else:
            result.append(dict(output))
    return result


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _end_processes(mark: str) -> list[str]:
    """Wait until the processes of an execution have ended, kill those that have not, and return their commands."""
    deadline = time.monotonic() + EXIT_GRACE_S
    while (alive := _alive(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    return list(alive.values())


def _alive(mark: str) -> dict[int, str]:
    """Commands of live processes that inherited the mark, by process id."""
    alive: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            marked = f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # ended, or of another user
            continue
        if marked and command:  # a zombie has no command
            alive[int(folder.name)] = command
    return alive
