"""Rewrite locks/: default.txt is what all extras resolve to today, lowest.txt and highest.txt end the ranges.

image-cpu.txt and image-cuda.txt are the packages of the container images, with the versions of default.txt.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "dev,tasks,cluster,data,deploy,lora,robot,watch,tensorboard,wandb,trackio"
TESTED_EXTRAS = ("cluster", "data", "deploy", "gateway", "lora", "robot", "tasks", "watch")
TORCH = "torch==2.13.0"
IMAGE_EXTRAS = ("cluster", "data", "gateway", "lora", "tasks", "watch")
# KubeRay's probes and `ray job submit` use Ray's dashboard and its agent.
IMAGE_RAY = "ray[default]"
CUDA = re.compile(r"^(triton|cuda-|nvidia-)")
BUILD = ("hatchling==1.33.0", "editables==0.6")
PIN = re.compile(r"^[a-z0-9][a-z0-9.-]*==[^\s;]+", re.MULTILINE)
HEADER = "# {}, transitive versions included; rewritten by `make locks`.\n"


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        write_default(Path(scratch))
        write_highest(Path(scratch))
        try:
            write_lowest(Path(scratch))
            write_images(Path(scratch))
        except FileNotFoundError:
            print("locks/lowest.txt and image-*.txt are unchanged: they need uv; run `pip install uv`", file=sys.stderr)
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
    torch = scratch / "torch.txt"
    torch.write_text(TORCH + "\n")
    options = ["--resolution", "lowest-direct", "-c", str(torch)]
    pins = compile_with_uv(scratch, TESTED_EXTRAS, "pyproject.toml", *options)
    lines = "".join(f"{pin}\n" for pin in pins)
    (ROOT / "locks" / "lowest.txt").write_text(HEADER.format("The lowest versions that pass the unit tests") + lines)


def write_images(scratch: Path) -> None:
    """Resolve with uv for Linux on x86-64; the two images differ in the build of torch and its libraries."""
    ray = scratch / "ray.in"
    ray.write_text(IMAGE_RAY + "\n")
    options = ["--python-platform", "x86_64-manylinux_2_28", "-c", "locks/default.txt"]
    pins = compile_with_uv(scratch, IMAGE_EXTRAS, "pyproject.toml", str(ray), *options)
    # `===` compares the version as text: `==2.13.0` would accept another build, such as 2.13.0+cpu.
    builds = {"cpu": f"{TORCH}+cpu", "cuda": TORCH.replace("==", "===")}
    for variant, torch in builds.items():
        kept = [pin for pin in pins if variant == "cuda" or not CUDA.match(pin)]
        lines = "".join(f"{torch if pin == TORCH else pin}\n" for pin in kept)
        header = HEADER.format(f"Every version in the {variant.upper()} image (Dockerfile)")
        (ROOT / "locks" / f"image-{variant}.txt").write_text(header + lines)


def compile_with_uv(scratch: Path, extras: Sequence[str], *arguments: str) -> list[str]:
    """The pins that `uv pip compile` resolves the extras and further arguments to."""
    resolved = scratch / "compiled.txt"
    command = ["uv", "pip", "compile", "-q", "--no-config", "--python-version", "3.11", "-o", str(resolved)]
    for extra in extras:
        command += ["--extra", extra]
    subprocess.run([*command, *arguments], check=True, cwd=ROOT)
    return PIN.findall(resolved.read_text())


if __name__ == "__main__":
    sys.exit(main())
