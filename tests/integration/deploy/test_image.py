"""The container image is built without a network, on this machine's Python instead of a base image.

The short build installs the packages that `tidemill recipe list` imports; the slow one all of locks/image-cpu.txt.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.root_filesystem import make_root
from tidemill import __version__

ROOT = Path(__file__).parents[3]
CONTEXT = ("Dockerfile", ".dockerignore", "LICENSE", "README.md", "locks", "pyproject.toml", "src")
BASE = "localhost/base"
DEADLINE_S = 900.0
LOCK = ROOT / "locks" / "image-cpu.txt"
TOOLS = re.compile(r"^(?:hatchling|packaging|pathspec|pluggy|setuptools|trove-classifiers)==.*", re.MULTILINE)
LIGHT = {
    "annotated-types", "anyio", "attrs", "cyclopts", "docstring-parser", "filelock", "h11", "httpcore2", "httpx2",
    "idna", "markdown-it-py", "mdurl", "msgspec", "numpy", "packaging", "pydantic", "pydantic-core", "pygments", "rich",
    "rich-rst", "tomlkit", "truststore", "typing-extensions", "typing-inspection", "xxhash",
}  # fmt: skip
"""What `tidemill recipe list` imports."""
MODELS = re.compile(r"\.(?:gguf|safetensors)$")
PIP_CACHE = re.compile(r"\.cache/")
BUILD = re.compile(r"^(?:build|large|packages|tidemill|wheels)/|/hatchling/")
RAY_JOB = """
ray start --head --port={port} --dashboard-port={dashboard} --dashboard-agent-listen-port={agent} --num-cpus=1 --block &
head=$!
trap 'kill $head; wait $head' EXIT  # `ray stop` would end the clusters of other tests too
python - <<'END'
import time, urllib.request
for _ in range(60):
    try:
        print("agent answers", urllib.request.urlopen("http://127.0.0.1:{agent}/api/healthz", timeout=5).status)
        break
    except OSError:
        time.sleep(1)
END
ray job submit --address=http://127.0.0.1:{dashboard} -- tidemill --version
"""
"""As KubeRay starts a head, probes it and submits a job."""

pytestmark = [
    pytest.mark.skipif(
        not shutil.which("buildah") or os.getuid() != 0, reason="needs buildah, and root for its chroots"
    ),
    pytest.mark.xdist_group("image"),
    pytest.mark.timeout(DEADLINE_S),
]


@dataclass(frozen=True, kw_only=True)
class Sources:
    """What a build reads."""

    context: Path
    wheels: Path


@dataclass(frozen=True, kw_only=True)
class Buildah:
    """buildah with its own store of images."""

    folder: Path

    def __call__(self, *arguments: str) -> str:
        """Standard output of a command, which must succeed."""
        store = ["--root", str(self.folder / "images"), "--runroot", str(self.folder / "run")]
        environment = {**os.environ, "BUILDAH_ISOLATION": "chroot"}
        command = ["buildah", *store, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def run(self, container: str, script: str) -> str:
        """Output of a script in a login shell, which KubeRay starts too."""
        return self("run", container, "--", "bash", "-lc", script).strip()


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    folder = tmp_path_factory.mktemp("buildah")
    buildah = Buildah(folder=folder)
    make_root(folder / "root")
    container = buildah("from", "scratch").strip()
    buildah("add", "--quiet", container, str(folder / "root"), "/")
    buildah("commit", "--quiet", "--rm", container, BASE)
    shutil.rmtree(folder / "root")
    yield buildah
    # buildah leaves its store mounted on itself.
    subprocess.run(["umount", "--recursive", str(folder / "images" / "overlay")], capture_output=True, check=False)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def light(buildah: Buildah, tmp_path_factory: pytest.TempPathFactory) -> Sources:
    pins = [line for line in LOCK.read_text().splitlines() if line.split("=")[0] in LIGHT]
    assert len(pins) == len(LIGHT)
    sources = prepare(tmp_path_factory.mktemp("light"), pins)
    build(buildah, sources, "light")
    return sources


def test_image_runs_as_user_1000_and_holds_neither_models_nor_leftovers(buildah: Buildah, light: Sources) -> None:
    with container_of(buildah, "light") as container:
        facts = buildah.run(container, "id -u; id -g; pwd; tidemill --version").split()
        assert facts == ["1000", "1000", "/home/tidemill", __version__]
        assert "spot-trace" in buildah.run(container, "tidemill recipe list")
        files = files_of(buildah, container)
    for leftover in (MODELS, PIP_CACHE, BUILD):
        assert [file for file in files if leftover.search(file)] == []


@pytest.mark.slow
def test_two_builds_hold_the_same_files(buildah: Buildah, light: Sources) -> None:
    build(buildah, light, "again")
    listed = []
    for name in ("light", "again"):
        with container_of(buildah, name) as container:
            listed.append(files_of(buildah, container))
    assert listed[0] == listed[1]


@pytest.mark.slow
def test_whole_image_starts_ray_and_takes_a_job(buildah: Buildah, tmp_path: Path) -> None:
    build(buildah, prepare(tmp_path, LOCK.read_text().splitlines()), "whole")
    port, dashboard, agent = free_ports(3)
    with container_of(buildah, "whole") as container:
        assert buildah.run(container, "python -m pip check") == "No broken requirements found."
        assert buildah.run(container, "ray --version") == "ray, version 2.60.0"
        assert buildah.run(container, "python -c 'import torch; print(torch.__version__)'").endswith("+cpu")
        assert "packages" in buildah.run(container, "tidemill doctor || true")
        output = buildah.run(container, RAY_JOB.format(port=port, dashboard=dashboard, agent=agent))
        assert [file for file in files_of(buildah, container) if MODELS.search(file)] == []
    assert "agent answers 200" in output, output
    assert f"\n{__version__}\n" in output, output
    assert "succeeded" in output, output


def prepare(folder: Path, pins: Sequence[str]) -> Sources:
    """The files of the checkout that a build may see, with other packages, and the wheels of these packages."""
    context, wheels, lock = folder / "context", folder / "wheels", folder / "lock.txt"
    context.mkdir()
    for name in CONTEXT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, context / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, context / name)
    (context / "locks" / LOCK.name).write_text("".join(f"{pin}\n" for pin in pins))
    pip = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--wheel-dir", str(wheels), "--requirement"]
    for lines in (TOOLS.findall((ROOT / "locks" / "default.txt").read_text()), pins):
        lock.write_text("\n".join(lines))
        subprocess.run([*pip, str(lock)], check=True, timeout=DEADLINE_S)
    return Sources(context=context, wheels=wheels)


def build(buildah: Buildah, sources: Sources, name: str) -> None:
    """Build the image without a network."""
    arguments = {"BASE": BASE, "BUILDER": BASE, "PIP_FIND_LINKS": "/wheels", "PIP_NO_INDEX": "1"}
    options = [f"--build-arg={key}={value}" for key, value in arguments.items()]
    volume = f"--volume={sources.wheels}:/wheels:ro"
    buildah("build", "--network=none", "--no-cache", volume, *options, f"--tag={name}", str(sources.context))


@contextmanager
def container_of(buildah: Buildah, image: str) -> Iterator[str]:
    container = buildah("from", image).strip()
    try:
        yield container
    finally:
        buildah("rm", container)


def files_of(buildah: Buildah, container: str) -> list[str]:
    """Paths of all files of a container, relative to its root."""
    folder = Path(buildah("mount", container).strip())
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports
