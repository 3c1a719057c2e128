"""The Python environments of adapters: one for each package, with pinned versions, made on request."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tidemill.core.errors import UserError

PROGRAMS = Path(__file__).parent / "programs"
REQUIREMENTS = Path(__file__).parent / "requirements"
NAMES = ("gymnasium", "mcp", "openenv", "skyrl-gym", "textarena", "verifiers")
INSTALL_S = 1800.0


def adapter_python(name: str, given: str) -> str:
    """The interpreter of an adapter.

    Args:
        given: the user's own, with the package and msgspec in it; empty: the one that `install_adapter` made.

    Raises:
        UserError: it does not exist.
    """
    path = Path(given).expanduser() if given else _folder(name) / "bin" / "python"
    if not path.is_file():
        if given:
            hint = "give the path of a Python in which the package and msgspec are installed"
            raise UserError(f"{given} does not exist", where="env.params.python", hint=hint)
        hint = f"run `tidemill env install {name}`, or set env.params.python to a Python that has it"
        raise UserError(f"the package of {name} environments is not installed", where="env.name", hint=hint)
    return str(path.absolute())


def is_installed(name: str) -> bool:
    return (_folder(name) / "bin" / "python").is_file()


def install_adapter(name: str) -> Path:
    """Make the Python environment of an adapter, if it is missing; returns its folder.

    Raises:
        UserError: pip fails.
    """
    folder = _folder(name)
    if is_installed(name):
        return folder
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    requirements = str(_requirements(name))
    try:
        for command in (
            [sys.executable, "-m", "venv", str(unfinished)],
            [str(unfinished / "bin" / "python"), "-m", "pip", "install", "--quiet", "--requirement", requirements],
        ):
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
            if done.returncode:
                lines = done.stderr.strip().splitlines() or ["no message"]
                raise UserError(
                    f"{name} cannot be installed: {lines[-1]}", where=requirements, hint="look at pip's index"
                )
        try:
            unfinished.rename(folder)  # its scripts, which name the old place, are not used
        except OSError:
            if not folder.exists():  # another process was faster
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _folder(name: str) -> Path:
    """Of the environment; another one for other pins or another Python."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidemill" / "adapters"
    content = _requirements(name).read_bytes() + sys.version.encode() + os.path.realpath(sys.base_prefix).encode()
    cache.mkdir(parents=True, exist_ok=True)
    return cache / f"{name}-{hashlib.blake2b(content, digest_size=6).hexdigest()}"


def _requirements(name: str) -> Path:
    return REQUIREMENTS / f"{name}.txt"
