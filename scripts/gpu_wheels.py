"""Collect the wheels that a machine with PyTorch and transformers, but no network, lacks to run Tidemill.

python scripts/gpu_wheels.py [--has FILE] [--python 3.12]

They are those of locks/default.txt that the dependencies in pyproject.toml need, without the packages of the machine,
and Tidemill's own: .gpu-wheels/, which travels with the checkout. FILE is the output of `pip list` there; without it,
the machine has `USUAL`. Prints the size, and the line that installs them.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / ".gpu-wheels"
TARGET = "/tmp/tidemill-site"
USUAL = frozenset(
    (
        "anyio",
        "attrs",
        "certifi",
        "click",
        "cloudpickle",
        "filelock",
        "fsspec",
        "h11",
        "hf-xet",
        "huggingface-hub",
        "idna",
        "jinja2",
        "markdown-it-py",
        "markupsafe",
        "mdurl",
        "numpy",
        "packaging",
        "pygments",
        "pyyaml",
        "regex",
        "requests",
        "rich",
        "safetensors",
        "tokenizers",
        "torch",
        "tqdm",
        "transformers",
        "triton",
        "typing-extensions",
        "xxhash",
    )
)
"""Packages of an image for training with PyTorch 2.11 and transformers 5.17. What these need is there, too."""
LARGEST_BYTES = 64 << 20  # a checkout with its wheels is copied to the machine at every change
PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)), "manylinux2014_x86_64"]
PIN = re.compile(r"^(?P<name>[a-z0-9][a-z0-9.-]*)==(?P<version>[^\s;]+)", re.MULTILINE)
LISTED = re.compile(r"^(?P<name>[A-Za-z0-9][\w.-]*)[ =]+\d", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--has", type=Path, help="output of `pip list` (or `pip freeze`) on the machine")
    parser.add_argument("--python", default="3.12", help="version of Python on the machine")
    options = parser.parse_args()
    present = USUAL if options.has is None else listed(options.has.read_text())
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    try:
        missing = sorted(missing_packages(dependencies, present, python=options.python))
        pins = locked(missing, (ROOT / "locks" / "default.txt").read_text())
    except LookupError as error:
        print(error.args[0], file=sys.stderr)
        return 2
    shutil.rmtree(WHEELS, ignore_errors=True)
    WHEELS.mkdir()
    collect(pins, python=options.python)
    nbytes = sum(wheel.stat().st_size for wheel in WHEELS.glob("*.whl"))
    print(*sorted(f"  {wheel.name}" for wheel in WHEELS.glob("*.whl")), sep="\n")
    print(f"{len(list(WHEELS.glob('*.whl')))} wheels, {nbytes / (1 << 20):.1f} MiB, in {WHEELS.relative_to(ROOT)}/")
    print(f"on the machine, in the root of the checkout:\n{install_line()}")
    if nbytes > LARGEST_BYTES:
        print(f"they take more than {LARGEST_BYTES >> 20} MiB", file=sys.stderr)
        return 1
    return 0


def install_line() -> str:
    """The code of the checkout comes first, so that an older wheel of it does no harm."""
    install = "python3 -m pip install -q --no-index --no-deps --no-compile --upgrade"
    return f"{install} --target {TARGET} {WHEELS.name}/*.whl && export PYTHONPATH=$PWD/src:{TARGET}"


def listed(text: str) -> frozenset[str]:
    """Names in the output of `pip list` or `pip freeze`."""
    return frozenset(canonicalize_name(found["name"]) for found in LISTED.finditer(text))


def missing_packages(dependencies: Iterable[str], present: frozenset[str], *, python: str) -> set[str]:
    """Names of all packages that `dependencies` need, directly or not, and the machine lacks.

    What packages need is read from those installed here, at the same versions.

    Raises:
        LookupError: a package is not installed here.
    """
    environment: dict[str, str] = {name: str(value) for name, value in default_environment().items()}
    environment |= {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    missing, due = set[str](), [Requirement(each) for each in dependencies]
    while due:
        requirement = due.pop()
        name = canonicalize_name(requirement.name)
        if name in present | missing or (requirement.marker and not requirement.marker.evaluate(environment)):
            continue
        missing.add(name)
        try:
            due += [Requirement(each) for each in requires(name) or ()]
        except PackageNotFoundError:
            raise LookupError(f"{name} is not installed here; run `make setup`, then this script in .venv") from None
    return missing


def locked(names: Iterable[str], lock: str) -> dict[str, str]:
    """The version of each package in a lock.

    Raises:
        LookupError: the lock does not name one of them.
    """
    pins: Mapping[str, str] = {found["name"]: found["version"] for found in PIN.finditer(lock)}
    if unknown := [name for name in names if name not in pins]:
        raise LookupError(f"locks/default.txt does not name {', '.join(unknown)}; run `make locks`")
    return {name: pins[name] for name in names}


def collect(pins: Mapping[str, str], *, python: str) -> None:
    """Download the wheels of packages, and build Tidemill's.

    Raises:
        subprocess.CalledProcessError: one cannot be had.
    """
    pip = [sys.executable, "-m", "pip"]
    platforms = [part for platform in PLATFORMS for part in ("--platform", platform)]
    kind = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]
    wanted = [f"{name}=={version}" for name, version in pins.items()]
    subprocess.run([*pip, "download", "-q", *kind, "-d", str(WHEELS), *wanted], check=True)
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(WHEELS), str(ROOT)], check=True)


if __name__ == "__main__":
    sys.exit(main())
