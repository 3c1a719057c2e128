"""Ctrl-C and SIGTERM in a script: it ends after a checkpoint, with the run attached, and the same call resumes it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import tidemill as tm
from tests.forked import Forked
from tests.interrupted_script import arguments

DEADLINE_S = 60.0
NEXT = "the next line"


def script(folder: Path, *words: str) -> tuple[int, str, str, dict[int, str]]:
    """Exit code, both outputs, and the processes that are left."""
    (folder / "temporary").mkdir(exist_ok=True)
    env = {"TMPDIR": str(folder / "temporary")}
    with Forked(*words, target="tests.interrupted_script:main", cwd=folder, env=env) as process:
        out, err = process.communicate(DEADLINE_S)
        left = process.session()
    assert process.returncode is not None
    return process.returncode, out, err, left


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("action", "name", "code"),
    [
        ("catch", "SIGINT", 7),
        ("catch", "SIGTERM", 7),
        pytest.param("train", "SIGTERM", 128 + signal.SIGTERM, marks=slow),
        pytest.param("loop", "SIGINT", -signal.SIGINT, marks=slow),
        pytest.param("await", "SIGINT", -signal.SIGINT, marks=slow),
    ],
)
def test_a_signal_ends_the_script_after_a_checkpoint(tmp_path: Path, action: str, name: str, code: int) -> None:
    ended, out, err, left = script(tmp_path, action, name)
    assert ended == code, err
    assert NEXT not in out
    assert not left
    if action == "catch":
        assert out.split() == ["True", "2", "True"]
    run = tm.Run(tmp_path / "run")
    assert run.interrupted
    assert run.checkpoints


def test_an_interrupted_script_prints_a_short_traceback_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err, _ = script(tmp_path, "train", "SIGINT")
    assert (code, out) == (-signal.SIGINT, "")
    assert err.strip().splitlines()[-1] == "KeyboardInterrupt: the run in run was interrupted; the same call resumes it"
    trace = err[err.index("Traceback") :]
    assert trace.count("Traceback") == 1
    assert "asyncio" not in trace
    monkeypatch.chdir(tmp_path)
    resumed = tm.train("char-addition", **arguments(""))
    whole = tm.train("char-addition", **arguments("") | {"run_dir": "whole"})
    assert (resumed.finished, resumed.weights_digest) == (True, whole.weights_digest)


@pytest.mark.parametrize("action", ["evaluate", pytest.param("generate", marks=slow)])
def test_an_interrupt_of_other_functions_leaves_nothing(tmp_path: Path, action: str) -> None:
    code, out, err, left = script(tmp_path, action)
    assert code == -signal.SIGINT, err
    assert NEXT not in out
    assert err.count("Traceback") == 1
    assert not left
    assert not [path for path in (tmp_path / "temporary").iterdir() if path.name.startswith("tidemill-")]
