"""The installed command as a process: imports, output streams and exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest

from tests.commands import run_fork
from tests.forked import Forked
from tidemill.__main__ import main as process_main
from tidemill.cli.app import main

DEADLINE_S = 120.0
CHAR = """\
[model]
source = "char"
[model.char]
hidden_size = 32
layers = 1
[sampling]
max_new_tokens = 3
[eval]
prompts = 4
[batch]
prompts = 2
group_size = 2
"""


def tidemill(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tidemill", *argv]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def shell(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    line = ["bash", "-c", command]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@pytest.mark.parametrize(
    "argv",
    [["--help"], ["train", "--help"], ["train", "--dry-run"], ["trian"], ["model", "list"], ["doctor", "--help"]],
)
def test_cli_help_loads_no_tensor_library(tmp_path: Path, argv: list[str]) -> None:
    script = (
        "import sys\nfrom tidemill.cli.app import main\n"
        f"main({argv!r})\n"
        "loaded = {name.split('.')[0] for name in sys.modules} & {'torch', 'transformers', 'numpy', 'safetensors'}\n"
        "sys.exit(f'loaded {loaded}' if loaded & {'torch', 'transformers'} else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr


def test_cli_help_imports_few_modules(tmp_path: Path) -> None:
    script = "import sys\nfrom tidemill.cli.app import main\nmain(['--help'])\nsys.exit('pydantic' in sys.modules)\n"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0  # not even pydantic


@pytest.mark.parametrize(("argv", "code"), [(["--help"], 0), (["train", "--run.sede=3"], 2), (["trian"], 2)])
def test_exit_codes(tmp_path: Path, argv: list[str], code: int) -> None:
    assert tidemill(*argv, cwd=tmp_path).returncode == code


@pytest.mark.parametrize("argv", ["train --dry-run", "plan memory --params 7e9", "model list --json", "--help"])
def test_a_closed_pipe_is_no_error(tmp_path: Path, argv: str) -> None:
    done = shell(f"set -o pipefail; {sys.executable} -m tidemill {argv} | true", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


FULL = (">/dev/full", 2, "error: no space left on device\n  free some space and run the same command again\n")
CLOSED, NO_ERRORS = (">&-", 0, ""), ("2>&- >/dev/null", 0, "")


@pytest.mark.parametrize(
    ("argv", "where", "code", "says"),
    [
        *((argv, *FULL) for argv in ("plan memory --params 7e9", "model list --json", "--version")),
        *((argv, *CLOSED) for argv in ("plan memory --params 7e9", "--version")),
        *((argv, *NO_ERRORS) for argv in ("model list --json", "--version")),
    ],
)
def test_a_full_standard_output_is_reported(tmp_path: Path, argv: str, where: str, code: int, says: str) -> None:
    done = shell(f"{sys.executable} -m tidemill {argv} {where}", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", says)


def test_unencodable_characters_are_replaced(tmp_path: Path) -> None:
    done = shell(f"PYTHONIOENCODING=ascii {sys.executable} -m tidemill plan memory --params 7e9", tmp_path)
    assert done.returncode == 0
    assert "? the model's shape is estimated" in done.stdout


@pytest.mark.parametrize("argv", ["train --help", "plan memory --params 7e9"])
def test_a_terminal_without_columns_gets_the_full_output(tmp_path: Path, argv: str) -> None:
    done = shell(f"COLUMNS=0 {sys.executable} -m tidemill {argv}", tmp_path)
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) > 15


def test_ctrl_c_during_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "tidemill.cli.app", cast(ModuleType, Interrupted()))
    assert process_main() == 130


def test_train_then_eval_generate_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "char.toml").write_text(CHAR, encoding="utf-8")
    trained = run_fork("train", "@char.toml", "--trainer.steps=1", "--run.dir=D", "--json", cwd=tmp_path)
    assert trained.code == 0, trained.err
    summary = trained.data
    assert summary == {**summary, "steps": 1, "policy_version": 1}
    assert json.loads((tmp_path / "D/summary.json").read_text(encoding="utf-8"))["steps"] == 1
    assert (tmp_path / "D/report.html").is_file()
    # The rest runs in this process: importing torch takes most of the time of a command on a small model.
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "--checkpoint", "D", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["n"] == summary["eval"]["n"]
    assert main(["generate", "1+2=", "--checkpoint", "D", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["samples"][0]["prompt"] == "1+2="
    assert main(["report", "D"]) == 0
    assert capfd.readouterr().out == "D/report.html\n"
    assert main(["train", "@char.toml", "--trainer.steps=1", "--run.dir=D", "--batch.prompts=4"]) == 2
    assert "batch.prompts = 4, the run has 2" in capfd.readouterr().err


def test_ctrl_c_stops_a_run_with_a_checkpoint_and_exit_code_130(tmp_path: Path) -> None:
    (tmp_path / "char.toml").write_text(CHAR, encoding="utf-8")
    with Forked("train", "@char.toml", "--trainer.steps=100000", "--run.dir=D", "--json", cwd=tmp_path) as process:
        deadline = time.monotonic() + DEADLINE_S
        metrics = tmp_path / "D" / "metrics.jsonl"
        while time.monotonic() < deadline and process.poll() is None:
            if metrics.exists() and metrics.read_text(encoding="utf-8").count("\n") >= 3:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, err
    summary = json.loads(out)
    assert summary["interrupted"] is True
    assert (tmp_path / "D" / "checkpoints" / f"step_{summary['steps']}").is_dir()
