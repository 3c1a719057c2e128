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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.root_filesystem import make_root
from tidemill import __version__

ROOT = Path(__file__).parents[3]
CONTEXT = ("Dockerfile", ".dockerignore", "LICENSE", "README.md", "locks", "pyproject.toml", "src")
BASE = "localhost/base"
DEADLINE_S = 900.0
TOOLS = re.compile(r"^(?:hatchling|packaging|pathspec|pluggy|setuptools|trove-classifiers)==.*\n", re.MULTILINE)
LIGHT = frozenset(
    "annotated-types anyio attrs cyclopts docstring-parser filelock h11 httpcore2 httpx2 idna markdown-it-py mdurl msgspec "
    "numpy packaging pydantic pydantic-core pygments rich rich-rst tomlkit truststore typing-extensions typing-inspection "
    "xxhash".split()
)
MODEL_FILES = (".bin", ".gguf", ".onnx", ".pt", ".pth", ".safetensors")

pytestmark = [
    pytest.mark.skipif(not shutil.which("buildah") or os.getuid() != 0, reason="needs buildah, and root for its chroots"),
    pytest.mark.xdist_group("image"),
    pytest.mark.timeout(DEADLINE_S),
]


@dataclass(frozen=True, kw_only=True)
class Buildah:
    """buildah with its own store of images."""

    folder: Path

    def __call__(self, *arguments: str) -> str:
        """Standard output of a command, which must succeed."""
        store = ["--root", str(self.folder / "images"), "--runroot", str(self.folder / "run")]
        environment = {**os.environ, "BUILDAH_ISOLATION": "chroot"}
        command = ["buildah", *store, *arguments]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def run(self, container: str, script: str) -> str:
        """Output of a script in a login shell, which KubeRay starts too."""
        return self("run", container, "--", "bash", "-lc", script).strip()


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Buildah:
    folder = tmp_path_factory.mktemp("buildah")
    buildah = Buildah(folder=folder)
    make_root(folder / "root")
    container = buildah("from", "scratch").strip()
    buildah("add", "--quiet", container, str(folder / "root"), "/")
    buildah("commit", "--quiet", "--rm", container, BASE)
    shutil.rmtree(folder / "root")
    return buildah


def test_two_offline_builds_run_as_a_user_and_hold_the_same_files(buildah: Buildah, tmp_path: Path) -> None:
    lock = ROOT / "locks" / "image-cpu.txt"
    pins = [line for line in lock.read_text().splitlines() if line.split("=")[0] in LIGHT]
    assert len(pins) == len(LIGHT)
    context = make_context(tmp_path / "context", pins)
    wheels = fetch_wheels(tmp_path, pins)
    listed = []
    for name in ("first", "second"):
        build(buildah, context, wheels, name)
        container = buildah("from", name).strip()
        listed.append(files_of(Path(buildah("mount", container).strip())))
        if name == "second":
            assert buildah.run(container, "id -u; id -g; pwd; tidemill --version").split() == [
                "1000",
                "1000",
                "/home/tidemill",
                __version__,
            ]
            assert "spot-trace" in buildah.run(container, "tidemill recipe list")
        buildah("rm", container)
    first, second = listed
    assert first == second
    assert {file for file in first if file.endswith(MODEL_FILES)} == set()
    assert {file for file in first if re.search(r"\.cache/|^build/|^tidemill/|^large/|^packages/", file)} == set()
    assert {file for file in first if "/hatchling/" in file} == set(), "the tools of the build are not in the image"


@pytest.mark.slow
def test_whole_image_starts_ray_and_takes_a_job(buildah: Buildah, tmp_path: Path) -> None:
    pins = (ROOT / "locks" / "image-cpu.txt").read_text().splitlines()
    build(buildah, make_context(tmp_path / "context", pins), fetch_wheels(tmp_path, pins), "whole")
    container = buildah("from", "whole").strip()
    assert buildah.run(container, "python -m pip check") == "No broken requirements found."
    assert buildah.run(container, "ray --version") == "ray, version 2.60.0"
    assert "torch 2.13.0+cpu" in buildah.run(container, "tidemill doctor")
    port, dashboard, agent = free_ports(3)
    output = buildah.run(
        container,
        f"""
        ray start --head --port={port} --dashboard-port={dashboard} --dashboard-agent-listen-port={agent} --num-cpus=1 \\
            --include-dashboard=true --temp-dir=/tmp/ray-image
        trap 'ray stop --force' EXIT
        python - <<'PROBE'
import time, urllib.request
for _ in range(60):
    try:
        print("probe", urllib.request.urlopen("http://127.0.0.1:{agent}/api/healthz", timeout=5).status)
        break
    except OSError:
        time.sleep(1)
PROBE
        ray job submit --address=http://127.0.0.1:{dashboard} -- tidemill --version
        """,
    )
    assert "probe 200" in output, output
    assert f"\n{__version__}\n" in output, output
    assert "succeeded" in output, output


def make_context(folder: Path, pins: Sequence[str]) -> Path:
    """The files of the checkout that the build may see, with other packages."""
    folder.mkdir()
    for name in CONTEXT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    (folder / "locks" / "image-cpu.txt").write_text("".join(f"{pin}\n" for pin in pins))
    return folder


def fetch_wheels(folder: Path, pins: Sequence[str]) -> Path:
    """A folder with the wheels of the pins and of the tools that build Tidemill."""
    tools = TOOLS.findall((ROOT / "locks" / "default.txt").read_text())
    wheels, lock = folder / "wheels", folder / "lock.txt"
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(wheels), "--requirement", str(lock)]
    for lines in (tools, [f"{pin}\n" for pin in pins]):
        lock.write_text("".join(lines))
        subprocess.run(pip, check=True, timeout=DEADLINE_S)
    return wheels


def build(buildah: Buildah, context: Path, wheels: Path, name: str) -> None:
    arguments = {"BASE": BASE, "BUILDER": BASE, "PIP_FIND_LINKS": "/wheels", "PIP_NO_INDEX": "1"}
    options = [f"--build-arg={key}={value}" for key, value in arguments.items()]
    buildah("build", "--network=none", "--no-cache", f"--volume={wheels}:/wheels:ro", *options, f"--tag={name}", str(context))


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports
