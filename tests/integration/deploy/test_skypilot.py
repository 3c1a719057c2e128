"""Rendered job groups in SkyPilot's own loader and program, and their commands on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidemill.core.errors import UserError
from tidemill.deploy.documents import Rendered
from tidemill.deploy.render import render
from tidemill.deploy.targets import target_of

pytestmark = pytest.mark.slow
VERSION = "0.14.1"
INSTALL_S, LOAD_S, RUN_S = 600, 120, 240
API_PORT = 46580
"""Of SkyPilot's own server on a user's machine."""
RECIPE = """\
[run]
name = "small"
[model]
source = "char"
[task]
kind = "arithmetic"
[pool]
kind = "synthetic"
workers = 1
[trainer]
steps = 4
[batch]
prompts = 4
group_size = 4
[deploy]
target = "sky"
image = "registry/tidemill@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
"""
LOAD = """\
import json, sys
from sky.utils import dag_utils, schemas
schemas._allow_additional_properties = lambda: False  # as on its server
for file in sys.argv[1:]:
    try:
        assert dag_utils.is_job_group_yaml(file)
        dag = dag_utils.load_job_group_from_yaml(file)
        dag_utils.fill_default_config_in_dag_for_job_launch(dag)
        loaded = [[task.name, [[str(r.cloud), r.use_spot, r.job_recovery, r.max_hourly_cost] for r in task.resources]]
                  for task in dag.tasks]
        print("loaded", json.dumps([dag.primary_tasks, loaded]))
    except Exception as error:
        print("loaded", json.dumps(f"{type(error).__name__}: {error}"))
"""


@pytest.fixture(scope="module")
def skypilot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an environment with SkyPilot, whose home is in it, too."""
    folder = tmp_path_factory.mktemp("skypilot")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install = [f"{folder}/bin/pip", "install", "--quiet", "--disable-pip-version-check", f"skypilot=={VERSION}"]
    done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode:
        pytest.skip(f"SkyPilot {VERSION} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    catalogue = folder / ".sky/catalogs/v8/common/accelerators.csv"  # which the loader would fetch from the network
    catalogue.parent.mkdir(parents=True)
    catalogue.write_text("AcceleratorName,Clouds\nH100,\"['AWS', 'GCP']\"\n", encoding="utf-8")
    return folder


def environment(folder: Path) -> dict[str, str]:
    path = f"{folder}/bin:{os.environ['PATH']}"
    return {**os.environ, "HOME": str(folder), "PATH": path, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}


def loaded(folder: Path, *texts: str) -> list[Any]:
    """What SkyPilot's loader makes of files: primary tasks and resources, or its error."""
    files = [folder / f"{index}.yaml" for index in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text, encoding="utf-8")
    command = [f"{folder}/bin/python", "-c", LOAD, *map(str, files)]
    done = subprocess.run(
        command, env=environment(folder), cwd=folder, capture_output=True, text=True, timeout=LOAD_S, check=True
    )
    return [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("loaded ")]


def small(folder: Path, *options: str) -> Rendered:
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE, encoding="utf-8")
    return render([f"@{recipe}", *options])


GPUS = ("--ray.trainer_gpus=1", "--ray.worker_gpus=1", "--deploy.accelerator=h100-80gb")
VARIANTS: list[tuple[str, ...]] = [
    (),
    ("--deploy.spot_max=64", "--deploy.secrets.HF_TOKEN=hub/token"),
    (*GPUS, '--deploy.sky.clouds=["kubernetes/one", "k8s/two"]', "--deploy.sky.volume=disk", "--deploy.models=weights"),
    (
        *GPUS,
        '--deploy.sky.clouds=["aws/us-east-1", "gcp"]',
        "--deploy.sky.bucket=s3://b",
        "--deploy.sky.max_hourly_cost=2",
    ),
    ("--deploy.models=gs://weights", "--pool.kind=static", "--pool.workers=0"),
]
PLANTED = [
    ("use_spot: false", "use_spott: false", "use_spot"),
    ("recover_on_exit_codes", "recover_on_exit_code", ""),
    ("- trainer\n", "- trainers\n", "unknown job"),
    ("name: rollout-0", "name: trainer", "Duplicate job name"),
    ("events:", "event:", ""),
    ("secrets:", "secret:", "secrets"),
]


def test_the_loader_accepts_what_is_rendered(skypilot: Path, tmp_path: Path) -> None:
    default, many, volumes, clouds, alone = loaded(skypilot, *(small(tmp_path, *each).text for each in VARIANTS))
    recovery = {"strategy": "FAILOVER"}
    trainer = ["None", False, {**recovery, "recover_on_exit_codes": [130]}, None]
    assert default == [["trainer"], [["trainer", [trainer]], ["rollout-0", [["None", True, recovery, None]]]]]
    assert len(many[1]) == 65
    assert [place[0] for place in volumes[1][0][1]] == ["Kubernetes", "Kubernetes"]
    assert sorted(place[0] for place in clouds[1][1][1]) == ["AWS", "GCP"]
    assert {place[3] for place in clouds[1][1][1]} == {2.0}
    assert [name for name, _ in alone[1]] == ["trainer"]


def test_the_loader_refuses_planted_defects(skypilot: Path, tmp_path: Path) -> None:
    text = small(tmp_path).text
    answers = loaded(skypilot, *(text.replace(old, new, 1) for old, new, _ in PLANTED))
    for (_, new, words), answer in zip(PLANTED, answers, strict=True):
        assert isinstance(answer, str), f"accepted {new}"
        assert words in answer


@pytest.fixture
def server(skypilot: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SkyPilot's local server, without a cloud, started by the first command and ended here."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", API_PORT)) == 0:
            pytest.skip(f"a server of SkyPilot runs on port {API_PORT}, and is not touched")
    for name, value in environment(skypilot).items():
        monkeypatch.setenv(name, value)
    yield
    subprocess.run(["sky", "api", "stop"], capture_output=True, timeout=LOAD_S, check=True)


@pytest.mark.timeout(300)
def test_the_verbs_run_skypilots_program(server: None, tmp_path: Path) -> None:
    result = small(tmp_path, '--deploy.sky.clouds=["aws"]', "--deploy.sky.bucket=s3://b")
    target = target_of(result.deploy)
    assert target.status(result) == []
    assert target.delete(result, storage=False) == []
    (refusal,) = target.refusals(result)
    assert "Cloud access is not set up" in refusal
    with pytest.raises(UserError, match="no cloud is set up"):
        target.apply(result)
    with pytest.raises(UserError, match="there is no such job"):
        target.print_log(result, follow=False)


def has_event(file: Path, words: str) -> bool:
    return file.exists() and words in file.read_text(encoding="utf-8")


@pytest.mark.timeout(600)
def test_the_commands_of_both_roles_run(tmp_path: Path) -> None:
    """A worker joins, and again after the loss of the trainer. SkyPilot's hook announces the worker's end, and that
    of the trainer ends it with a checkpoint and 130."""
    _, *tasks = yaml.safe_load_all(small(tmp_path, "--trainer.steps=10000", "--eval.every_steps=0").text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; the address that Ray would choose
        ip = str(probe.getsockname()[0])
    own = {**os.environ, "SKYPILOT_NODE_IPS": ip, "RAY_AUTH_TOKEN": "0" * 64}
    own["PATH"] = f"{Path(sys.executable).parent}:{own['PATH']}"
    with socket.socket() as probe:
        probe.bind((ip, 0))
        port = str(probe.getsockname()[1])

    def here(script: str, name: str) -> str:
        """A script with folders, ports and the address of this machine, which both roles share."""
        script = script.replace("/tmp/tidemill", str(tmp_path / name)).replace("trainer-0.small", ip)
        return script.replace("6379", port).replace("52366", "0")

    def take(index: int) -> None:
        """Run the hook, as SkyPilot does before a pod is taken."""
        (hook,), name = tasks[index]["config"]["hooks"], tasks[index]["name"]
        subprocess.run(["bash", "-c", here(hook["run"], name)], timeout=RUN_S, check=True)

    def wait_for(words: str) -> None:
        deadline = time.monotonic() + RUN_S / 2
        while not has_event(events, words):
            assert time.monotonic() < deadline, f"no {words}: {log.read_text(encoding='utf-8')}"
            assert running["trainer"].poll() is None, log.read_text(encoding="utf-8")
            time.sleep(0.5)

    events, log = tmp_path / "trainer/runs/small/events.jsonl", tmp_path / "trainer.log"

    def start(task: dict[str, Any]) -> None:
        name = task["name"]
        (tmp_path / name).mkdir(exist_ok=True)
        with (tmp_path / f"{name}.log").open("a") as output:
            command = ["bash", "-c", here(task["run"], name)]
            running[name] = subprocess.Popen(command, env=own, stdout=output, stderr=output, start_new_session=True)

    running: dict[str, subprocess.Popen[bytes]] = {}
    for task in tasks:
        start(task)
    try:
        wait_for('"event":"decode","lease":"lease-1-1"')
        os.killpg(running["trainer"].pid, signal.SIGKILL)
        running["trainer"].wait()
        deadline = time.monotonic() + RUN_S / 2
        while not has_event(tmp_path / "rollout-0.log", "exited unexpectedly"):  # Ray waits a minute for its head
            assert time.monotonic() < deadline
            time.sleep(0.5)
        start(tasks[0])
        wait_for('"event":"decode","lease":"lease-2-1"')
        take(1)
        assert running["rollout-0"].wait(30) == 0
        wait_for('"event":"notice","lease":"lease-2-1"')
        take(0)
        assert running["trainer"].wait(60) == 130
    finally:
        for process in running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
