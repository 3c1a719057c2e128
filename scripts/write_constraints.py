"""Rewrite constraints.txt: every version that all extras together resolve to today, transitive ones included."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "dev,tasks,cluster,data,lora,tensorboard,wandb,trackio"
BUILD = ("hatchling==1.33.0", "editables==0.6")
HEADER = "# Every version that `make` installs, transitive ones included; rewritten by `make constraints`.\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        resolve = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed"]
        resolve += ["--report", str(report)]
        subprocess.run([*resolve, "torch==2.13.0", f"{ROOT}[{EXTRAS}]", *BUILD], check=True, cwd=ROOT)
        resolved = json.loads(report.read_text())["install"]
    pins: dict[str, str] = {}
    for package in resolved:
        metadata = package["metadata"]
        # A local build tag (2.13.0+cpu) names this machine's build, not the version wanted everywhere.
        pins[metadata["name"].lower().replace("_", "-")] = metadata["version"].split("+")[0]
    pins.pop("tidemill", None)
    (ROOT / "constraints.txt").write_text(HEADER + "".join(f"{name}=={pins[name]}\n" for name in sorted(pins)))


if __name__ == "__main__":
    main()
