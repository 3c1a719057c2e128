"""Writes bytecode of the tests and of what they import, with a process on each core.

Otherwise every process of pytest-xdist would compile all of it, in a checkout that has no bytecode yet.
"""

from __future__ import annotations

import contextlib
import py_compile
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import cache_from_source
from multiprocessing import get_context
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

FOLDERS = ("src", "tests", "benchmarks", "scripts")


def write_bytecode(repository: Path, config: pytest.Config) -> None:
    """Write what is missing; what is out of date is left to the processes that import it."""
    missing = list(_missing(repository))
    if sys.dont_write_bytecode or not missing:
        return
    with ProcessPoolExecutor(mp_context=get_context("fork"), initializer=_start, initargs=(config,)) as processes:
        list(processes.map(_compile, missing, chunksize=20))


def _missing(repository: Path) -> Iterator[Path]:
    for folder in FOLDERS:
        for file in (repository / folder).rglob("*.py"):
            if not _bytecode_of(file).exists():
                yield file


def _is_rewritten(file: Path) -> bool:
    """Whether pytest rewrites its assertions."""
    return file.name.startswith("test_") or file.name == "conftest.py"


def _bytecode_of(file: Path) -> Path:
    if _is_rewritten(file):
        return rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
    return Path(cache_from_source(file))


_config: pytest.Config


def _start(config: pytest.Config) -> None:
    global _config  # noqa: PLW0603 - pytest's configuration cannot be pickled with each file
    _config = config


def _compile(file: Path) -> None:
    if not _is_rewritten(file):
        py_compile.compile(str(file), quiet=2)
        return
    bytecode = _bytecode_of(file)
    bytecode.parent.mkdir(exist_ok=True)
    with contextlib.suppress(SyntaxError):  # which the process that imports it reports
        digest, code = rewrite._rewrite_test(file, _config)
        rewrite._write_pyc(_config.stash[rewrite.assertstate_key], code, digest, bytecode)
