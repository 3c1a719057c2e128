from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from tidemill.cli.output import explain, write_traceback
from tidemill.config.issues import ConfigError, ConfigIssue
from tidemill.core.errors import (
    DeadlineError,
    GuardStop,
    TidemillError,
    TrainerLost,
    UserError,
    as_user_error,
    root_error,
)


def test_of_concurrent_failures_the_cause_is_reported() -> None:
    user, bug = UserError("theirs"), ValueError("ours")
    assert root_error(ExceptionGroup("g", [bug, ExceptionGroup("inner", [user])])) is user
    assert root_error(BaseExceptionGroup("g", [user, KeyboardInterrupt()])).__class__ is KeyboardInterrupt
    assert root_error(ExceptionGroup("g", [bug, TypeError("later")])) is bug
    guard = GuardStop("stop")
    assert root_error(ExceptionGroup("g", [bug, guard])) is guard
    assert root_error(bug) is bug


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS])
def test_disk_and_permissions_are_the_users_to_mend(number: int) -> None:
    found = as_user_error(OSError(number, "Words Of The System", "runs/x"))
    assert found is not None
    assert str(found).startswith("runs/x: words of the system\n  ")


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (IsADirectoryError(errno.EISDIR, "Is a directory", "runs/x"), "expected a file"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "runs/x"), "a parent of that path is a file"),
    ],
)
def test_a_directory_for_a_file_is_the_users_to_mend(error: OSError, hint: str) -> None:
    found = as_user_error(error)
    assert found is not None
    assert found.where == "runs/x"
    assert found.hint.startswith(hint)


@pytest.mark.parametrize(("there", "readable", "hint"), [
    (True, False, "make it readable"), (True, True, "choose a writable place"),
    (False, False, "choose a writable place"),
])  # fmt: skip
def test_an_unreadable_file_has_a_hint_about_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, readable: bool, hint: str
) -> None:
    path = tmp_path / "file"
    if there:
        path.touch()
    # To root everything is readable.
    monkeypatch.setattr("os.access", lambda asked, _: readable or Path(asked) != path)
    found = as_user_error(PermissionError(errno.EACCES, "Permission denied", str(path)))
    assert found is not None
    assert found.hint.startswith(hint)


def test_other_system_errors_are_bugs() -> None:
    assert as_user_error(OSError(errno.EBADF, "Bad file descriptor")) is None
    assert explain(OSError(errno.EBADF, "Bad file descriptor"), debug=True).exit_code == 1


def test_out_of_memory_names_the_keys_to_lower() -> None:
    class OutOfMemoryError(RuntimeError):
        """Named as torch names it."""

    for error in (MemoryError(), OutOfMemoryError("CUDA out of memory. Tried 3 GiB\nmore words")):
        failure = explain(error)
        assert failure.exit_code == 2
        assert "batch.microbatch_tokens" in failure.data["hint"]
        assert "supervised.microbatch_tokens" in failure.data["hint"]
    assert failure.data["message"] == "out of memory: CUDA out of memory. Tried 3 GiB"


def test_out_of_memory_on_a_cpu_is_no_bug() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    failure = explain(caught.value)
    assert (failure.exit_code, failure.data["kind"]) == (2, "input")
    assert "tried to allocate 1125899906842624 bytes" in failure.text
    assert "engine.slots" in failure.data["hint"]


def test_a_bug_leaves_its_traceback_in_a_file() -> None:
    try:
        raise ValueError("odd")
    except ValueError as error:
        failure = explain(error)
    path = Path(failure.data["traceback"])
    assert 'raise ValueError("odd")' in path.read_text(encoding="utf-8")
    assert str(path) in failure.text
    assert "please report it" in failure.text
    path.unlink()


def test_nowhere_to_leave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent")
    assert write_traceback(ValueError("odd")).startswith("no file (")


def test_a_missed_deadline_is_no_bug_of_the_users_nor_a_riddle() -> None:
    failure = explain(DeadlineError("the worker", waited_s=3.0, look_at="its log"), debug=True)
    assert failure.exit_code == 1
    assert failure.data["kind"] == "deadline"
    assert "error: waited 3.0 s for the worker; look at its log" in failure.text
    assert "report" not in failure.text


def test_a_lost_trainer_is_no_bug() -> None:
    failure = explain(TrainerLost("the trainer died"), debug=True)
    assert (failure.exit_code, failure.data["kind"]) == (1, "lost")
    assert "error: the trainer died" in failure.text
    assert "report" not in failure.text


def test_other_errors_raised_on_purpose_speak_for_themselves() -> None:
    failure = explain(TidemillError("the ledger is torn"), debug=True)
    assert failure.text.splitlines()[-2] == "error: the ledger is torn"
    assert failure.data == {"kind": "bug", "message": "the ledger is torn"}


def test_several_faults_each_with_its_parts() -> None:
    error = ConfigError(
        [ConfigIssue(key="a.b", what="wrong", source="x.toml:1", hint="mend it"), ConfigIssue(what="bad")]
    )
    failure = explain(error)
    assert failure.text == "error: a.b: wrong (x.toml:1); mend it\nerror: bad"
    assert [issue["key"] for issue in failure.data["issues"]] == ["a.b", ""]
