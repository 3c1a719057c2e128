"""Program that runs a Ray node under a scheduler that signals every process of a job, as Slurm does.

The raylet would die of SIGTERM at once, and the run would get no notice. Here all processes of Ray block it: on the
head training writes a checkpoint first, and a worker drains its node. In the job's folder, which its machines share,
are the recipe, a marker (a random text that tells the folder from another one of its name), and the state of the head.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from tidemill.core import ipc
from tidemill.core.errors import DeadlineError, TidemillError, UserError
from tidemill.core.records import Record

CHECKPOINT_CODE, DRAINED_CODE = 130, 143
"""Exit codes of a head and of a worker that are to be started again."""
HEAD_S = 3600.0
"""Wait of a worker for a head: a requeued one waits for its machine."""
ENDS_LABEL = "tidemill/ends-unix-s"
"""Label of a node whose job has a time limit: when that is over, in Unix seconds."""
MARGIN_S = 2.0
"""A worker ends this long before SIGKILL."""
LOOK_S = 0.5
CONNECT_S = 2.0
HEAD_FILE, MARKER_FILE, RECIPE_FILE = "head.json", "marker", "recipe.toml"


class Head(Record):
    """The state of the head; no address: it starts."""

    start: str = ""  # the start of the job that it belongs to
    address: str = ""
    token: str = ""
    exit_code: int | None = None  # of the run, once it has ended


def main() -> int:
    # First, as a thread that does not block the signal would let it end this process.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("head", "worker"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--marker", default="", help="content of FOLDER/marker; empty: not compared")
    parser.add_argument("--cpus", type=int, required=True)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--labels", type=json.loads, default={}, help="of the Ray node, as JSON")
    parser.add_argument("--grace-s", type=float, default=15.0, help="from SIGTERM to SIGKILL of a worker")
    given = parser.parse_args()
    ipc.adopt_descendants()
    temporary = tempfile.mkdtemp(prefix="tidemill-ray-", dir="/tmp")  # Ray's sockets allow no long path
    ends_unix_s = os.environ.get("SLURM_JOB_END_TIME", "")  # sbatch(1); Slurm 22.05 does not set it
    labels = given.labels | ({ENDS_LABEL: ends_unix_s} if ends_unix_s.isdigit() else {})
    node = {"num_cpus": given.cpus, "num_gpus": given.gpus, "labels": labels, "temp_dir": temporary}
    node |= {"min_worker_port": 0, "max_worker_port": 0, "include_log_monitor": False}
    try:
        _check(given.folder, given.marker)
        start = f"{os.environ.get('SLURM_JOB_ID', '')}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
        if given.role == "worker":
            return _work(given.folder, node, given.grace_s)
        if os.environ.get("SLURM_NODEID", "0") != "0":
            return _work(given.folder, node, 0, start)
        return _lead(given.folder, node, start)
    except TidemillError as error:
        _say(f"error: {error}")
        return error.exit_code
    finally:
        ipc.kill_children()
        shutil.rmtree(temporary, ignore_errors=True)


def _check(folder: Path, marker: str) -> None:
    """Raises UserError: the job cannot run on this machine."""
    if "SLURM_HET_SIZE" in os.environ:
        hint = "submit two jobs, as `tidemill deploy apply` does"
        raise UserError("a heterogeneous job is preempted and requeued as one, and is not supported", hint=hint)
    hint = "set deploy.slurm.runs to a folder that all nodes share, and apply again"
    if not (folder / RECIPE_FILE).exists():
        raise UserError(f"the job's folder is not on {socket.gethostname()}", where=str(folder), hint=hint)
    path = folder / MARKER_FILE
    if marker and (not path.exists() or path.read_text() != marker):
        what = f"{socket.gethostname()} has another folder of this name than the machine of `tidemill deploy apply`"
        raise UserError(what, where=str(folder), hint=hint)


def _lead(folder: Path, node: dict[str, Any], start: str) -> int:
    """Start Ray's head and train. Returns the exit code of training."""
    code = TidemillError.exit_code
    token = secrets.token_hex(32)
    try:
        _write(folder, Head(start=start))  # workers leave the previous head
        _authenticate(token)
        from tidemill.runtime.cluster.ray_internals import start_head  # Ray reads the environment at import

        address = start_head(**node).gcs_address
        _write(folder, Head(start=start, address=address, token=token))
        command = [sys.executable, "-m", "tidemill", "train", f"@{folder / RECIPE_FILE}"]
        training = subprocess.Popen(command, env=os.environ | {"RAY_ADDRESS": address})
        _say(f"trains on the cluster at {address}")
        while (ended := training.poll()) is None:  # the scheduler's SIGKILL ends the wait after SIGTERM
            if _sigterm():
                _say("SIGTERM: training writes a checkpoint")
                training.send_signal(signal.SIGINT)  # it blocks SIGTERM, of which a second one would end it at once
        code = ended if ended >= 0 else 128 - ended
        return code
    finally:
        _write(folder, Head(start=start, exit_code=None if code in (CHECKPOINT_CODE, DRAINED_CODE) else code))


def _work(folder: Path, node: dict[str, Any], grace_s: float, start: str = "") -> int:
    """Join the head, and each that follows it, until the run ends. Returns 0 then, or DRAINED_CODE after SIGTERM.

    Args:
        start: joins the head of this start of the job only, and leaves SIGTERM to it; empty: any head.
    """
    end_s = time.monotonic() + HEAD_S
    _say("waits for the head of the run")
    while (head := _read(folder)).exit_code is None:
        if start in ("", head.start) and _answers(head.address):
            return _join(folder, head, node, None if start else grace_s - MARGIN_S)
        if _sigterm() and not start:
            return DRAINED_CODE
        if time.monotonic() > end_s:
            raise DeadlineError("the head of the run", waited_s=HEAD_S, look_at=f"the log of its job in {folder}")
    _say(f"the run has ended with code {head.exit_code}")
    return 0


def _join(folder: Path, head: Head, node: dict[str, Any], drain_s: float | None) -> int:
    """Be a node of a cluster until its head is gone. Then this program starts again, as Ray keeps a process's cluster.

    Args:
        drain_s: time of the drain after SIGTERM; None: SIGTERM is left to the head, whose end is that of this node.
    """
    _authenticate(head.token)
    from tidemill.runtime.cluster.ray_internals import drain, start_node  # takes 2 s, too long for after SIGTERM

    try:
        joined = start_node(head.address, **node)
    except Exception as error:  # noqa: BLE001 - the head has gone meanwhile, or Ray's error is for the log
        _say(f"cannot join the cluster at {head.address}: {error}")
        return DRAINED_CODE
    _say(f"joined the cluster at {head.address}")
    end_s = None
    while _read(folder) == head and joined.remaining_processes_alive():
        if end_s is not None and time.monotonic() > end_s:
            break
        if _sigterm() and drain_s is not None and end_s is None:
            end_s = time.monotonic() + drain_s
            accepted = drain(joined, "the scheduler takes the machine", drain_s)
            _say(f"SIGTERM: {'the run has notice' if accepted else 'the cluster does not take the notice'}")
    if end_s is not None:
        return DRAINED_CODE
    if drain_s is None:
        return 0
    ipc.kill_children()
    shutil.rmtree(node["temp_dir"], ignore_errors=True)
    os.execv(sys.executable, [sys.executable, "-m", "tidemill.runtime.cluster.launch_node", *sys.argv[1:]])
    raise AssertionError  # not reached


def _authenticate(token: str) -> None:
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token, RAY_USAGE_STATS_ENABLED="0")


def _sigterm() -> bool:
    return signal.sigtimedwait([signal.SIGTERM], LOOK_S) is not None


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True


def _read(folder: Path) -> Head:
    path = folder / HEAD_FILE
    return msgspec.json.decode(path.read_bytes(), type=Head) if path.exists() else Head()


def _write(folder: Path, head: Head) -> None:
    path = folder / f"{HEAD_FILE}.new"
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(msgspec.json.encode(head))
    path.replace(folder / HEAD_FILE)


def _say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {socket.gethostname()}: {text}\n")


if __name__ == "__main__":
    sys.exit(main())
