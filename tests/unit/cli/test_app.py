from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.cli.conftest import Pretend, Run
from tidemill.cli.app import VERBS
from tidemill.core.errors import GuardStop, UserError


def failing(error: BaseException) -> Callable[..., Any]:
    def train(*_: Any, **__: Any) -> None:
        raise error

    return train


@pytest.mark.parametrize("argv", [("--help",), ("-h",), ()])
def test_help_lists_every_verb(run: Run, argv: tuple[str, ...]) -> None:
    ran = run(*argv)
    assert ran.code == 0
    for verb, (_, words) in VERBS.items():
        assert verb in ran.out
        assert words in ran.out


def test_version(run: Run) -> None:
    assert run("--version").out.strip() == __import__("tidemill").__version__


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(run: Run, verb: str) -> None:
    ran = run(verb, "--help")
    assert ran.code == 0
    assert f"Usage: tidemill {verb}" in ran.out
    assert "Exit codes: 0" not in ran.out  # said once, where the verbs are listed


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("trian",), "error: trian: unknown verb\n  did you mean `tidemill train`?\n"),
        (
            ("xyzzy",),
            f"error: xyzzy: unknown verb\n  verbs: {', '.join(VERBS)}\n",
        ),
        (("@a.toml",), "error: @a.toml: expected a verb first\n  write `tidemill train @a.toml`, or another verb\n"),
        (
            ("--run.seed", "3"),
            (
                "error: --run.seed: expected a verb first\n  write `tidemill train @recipe.toml` and options after it; "
                "`tidemill --help` lists the verbs\n"
            ),
        ),
    ],
)
def test_without_a_verb(run: Run, argv: tuple[str, ...], says: str) -> None:
    ran = run(*argv)
    assert (ran.code, ran.out, ran.err) == (2, "", says)


def test_arguments_a_verb_does_not_take(run: Run) -> None:
    ran = run("export", "a", "b", "c")
    assert ran.code == 2
    assert "see `tidemill export --help`" in ran.err
    assert run("model", "gett").code == 2
    assert run("report").code == 2


def test_every_fault_is_a_line(run: Run) -> None:
    ran = run("train", "--trainer.stpes", "3", "--run.seed", "-1")
    assert ran.code == 2
    assert ran.err.splitlines() == [
        "error: run.seed: needs integer >= 0 and <= 18446744073709551615, was given -1 (command line)",
        "error: trainer.stpes: unknown key (command line); did you mean trainer.steps?",
    ]


def test_faults_as_json(run: Run) -> None:
    ran = run("train", "--trainer.stpes", "3", "--json")
    assert ran.data["exit_code"] == ran.code == 2
    assert ran.data["error"]["kind"] == "input"
    assert ran.data["error"]["issues"] == [
        {"what": "unknown key", "key": "trainer.stpes", "source": "command line", "hint": "did you mean trainer.steps?"}
    ]


@pytest.mark.parametrize(
    ("error", "code", "kind", "says"),
    [
        (UserError("is wrong", where="here", hint="mend it"), 2, "input", "error: here: is wrong\n  mend it"),
        (GuardStop("entropy collapsed"), 3, "guard", "stopped by a guard: entropy collapsed"),
        (KeyboardInterrupt(), 130, "interrupted", "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 2, "input", "error: x: no space left on device"),
        (ValueError("odd"), 1, "bug", "internal error: ValueError: odd"),
    ],
)
def test_exit_codes(run: Run, pretend: Pretend, error: BaseException, code: int, kind: str, says: str) -> None:
    pretend("tidemill.jobs.train", "train", failing(error))
    plain, as_json = run("train"), run("train", "--json")
    assert (plain.code, plain.out) == (code, "")
    assert plain.err.startswith(says)
    assert "Traceback" not in plain.err
    assert as_json.data["exit_code"] == as_json.code == code
    assert as_json.data["error"]["kind"] == kind
    assert as_json.err.startswith(says)


def test_debug_shows_the_traceback_in_any_position(run: Run, pretend: Pretend) -> None:
    pretend("tidemill.jobs.train", "train", failing(ValueError("odd")))
    for argv in (("--debug", "train"), ("train", "--debug"), ("train", "--debug", "--json")):
        ran = run(*argv)
        assert ran.code == 1
        assert "raise error\nValueError: odd" in ran.err


@pytest.mark.parametrize(("given", "code", "says"), [(5, 5, ""), (None, 0, ""), ("words", 1, "words\n")])
def test_a_library_that_ends_the_process_decides_the_code(
    run: Run, pretend: Pretend, given: int | str | None, code: int, says: str
) -> None:
    pretend("tidemill.jobs.train", "train", failing(SystemExit(given)))
    ran = run("train")
    assert (ran.code, ran.out, ran.err) == (code, "", says)
    assert run("train", "--json").data["exit_code"] == code
