"""Rewrite locks/: default.txt is what all extras resolve to today, lowest.txt and highest.txt end the ranges."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "dev,tasks,cluster,data,deploy,lora,robot,watch,tensorboard,wandb,trackio"
TESTED_EXTRAS = ("cluster", "data", "deploy", "gateway", "lora", "robot", "tasks", "watch")
TORCH = "torch==2.13.0"
BUILD = ("hatchling==1.33.0", "editables==0.6")
PIN = re.compile(r"^[a-z0-9][a-z0-9.-]*==[^\s;]+", re.MULTILINE)
HEADER = "# {}, transitive versions included; rewritten by `make locks`.\n"


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        write_default(Path(scratch))
        write_highest(Path(scratch))
        try:
            write_lowest(Path(scratch))
        except FileNotFoundError:
            print("locks/lowest.txt is unchanged: it needs uv; run `pip install uv`", file=sys.stderr)
            return 1
    return 0


def write_default(scratch: Path) -> None:
    """Resolve with pip, as `make` installs."""
    pins = resolve(scratch, TORCH, f"{ROOT}[{EXTRAS}]", *BUILD)
    (ROOT / "locks" / "default.txt").write_text(HEADER.format("Every version that `make` installs") + pins)


def write_highest(scratch: Path) -> None:
    """Resolve with pip, as a user installs."""
    pins = resolve(scratch, f"{ROOT}[{','.join(TESTED_EXTRAS)}]")
    header = HEADER.format("The highest versions that pass the tests of `make test-highest`")
    (ROOT / "locks" / "highest.txt").write_text(header + pins)


def resolve(scratch: Path, *requirements: str) -> str:
    """What pip would install for the requirements, as the lines of a lock."""
    report = scratch / "report.json"
    options = ["-qq", "--dry-run", "--ignore-installed", "--report", str(report)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *requirements], check=True, cwd=ROOT)
    pins: dict[str, str] = {}
    for package in json.loads(report.read_text())["install"]:
        metadata = package["metadata"]
        # A local build tag (2.13.0+cpu) names this machine's build, not the version wanted everywhere.
        pins[metadata["name"].lower().replace("_", "-")] = metadata["version"].split("+")[0]
    pins.pop("tidemill", None)
    return "".join(f"{name}=={pins[name]}\n" for name in sorted(pins))


def write_lowest(scratch: Path) -> None:
    """Resolve with uv: the lowest version of every direct dependency."""
    torch, resolved = scratch / "torch.txt", scratch / "lowest.txt"
    torch.write_text(TORCH + "\n")
    command = ["uv", "pip", "compile", "-q", "--python-version", "3.11", "--resolution", "lowest-direct"]
    command += ["-c", str(torch), "-o", str(resolved)]
    for extra in TESTED_EXTRAS:
        command += ["--extra", extra]
    subprocess.run([*command, "pyproject.toml"], check=True, cwd=ROOT)
    lines = "".join(f"{pin}\n" for pin in PIN.findall(resolved.read_text()))
    (ROOT / "locks" / "lowest.txt").write_text(HEADER.format("The lowest versions that pass the unit tests") + lines)


if __name__ == "__main__":
    sys.exit(main())
