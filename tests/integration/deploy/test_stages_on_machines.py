"""Stages of one recipe on several machines: two at once on a shared folder, and as tasks of OSMO."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.char_task import char_task
from tests.commands import DEADLINE_S, run_fork, run_here
from tests.forked import Forked
from tests.machines import KILLED_CODE, OsmoTasks, network_of, no_namespaces
from tidemill.deploy.osmo.model import WorkflowFile
from tidemill.deploy.render import render
from tidemill.pipeline.stage_plan import content_digest

RECIPE = (
    """\
[run]
name = "letters"

"""
    + char_task()
    + """\
held_out_fraction = 0.2

[sampling]
max_new_tokens = 3

[engine]
batch_invariant = true

[batch]
prompts = 4
group_size = 8

[optimizer]
learning_rate = 1e-3

[trainer]
threads = 1

[eval]
every_steps = 0
prompts = 8

[checkpoint]
every_steps = 2

[data]
path = "demonstrations.jsonl"
end_token = false

[supervised]
epochs = 20
minibatch_tokens = 64
microbatch_tokens = 64

[deploy]
target = "osmo"
image = "registry/tidemill@sha256:0"
[deploy.osmo]
url = "s3://bucket/runs"

[[stage]]
name = "sft"
kind = "sft"

[[stage]]
name = "explore"
kind = "rl"
[stage.trainer]
steps = 12
[stage.deploy]
osmo.platform = "sim"

[[stage]]
name = "rl"
kind = "rl"
[stage.model]
source = "stage:sft"
[stage.trainer]
steps = 4

[[stage]]
name = "out"
kind = "export"
[stage.model]
source = "stage:rl"
[stage.export]
dtype = "bf16"
"""
)
TRAIN = ("train", "@r.toml", "--run.dir=D")
ISOLATED = "tests.machines:isolated_main"
pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("pipelines")]
needs_namespaces = pytest.mark.skipif(bool(why := no_namespaces()), reason=f"no network namespaces: {why}")


def write_inputs(folder: Path) -> None:
    (folder / "r.toml").write_text(RECIPE, encoding="utf-8")
    rows = [{"prompt": f"{a}+{b}=", "completion": f"{a + b}\n"} for a in range(10) for b in range(10)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "demonstrations.jsonl").write_text(text, encoding="utf-8")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    write_inputs(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def in_sequence(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Artefacts of all stages that one process ran one after another."""
    place = tmp_path_factory.mktemp("sequence")
    write_inputs(place)
    ran = run_fork(*TRAIN, cwd=place)
    assert ran.code == 0, ran.err
    return artefacts(place / "D/stages")


def artefacts(stages: Path) -> dict[str, str]:
    """Digests of the weights that each finished stage made, by its folder."""
    files = {each.parent: each.parent / "summary.json" for each in stages.glob("*/stage.json")}
    files |= {each.parent.parent: each for each in stages.glob("out-*/model/tidemill.json")}
    return {folder.name: json.loads(path.read_bytes())["weights_digest"] for folder, path in sorted(files.items())}


def steps(stages: Path, name: str) -> int:
    """Number of steps that a stage has recorded."""
    return sum(path.read_bytes().count(b"\n") for path in stages.glob(f"{name}-*/metrics.jsonl"))


def stage_folder(name: str) -> Path:
    (found,) = Path("D/stages").glob(f"{name}-*")
    return found


def wait_for(reached: Callable[[], bool], awaited: str, *processes: Forked) -> None:
    """Raises AssertionError: one of the processes ended with an error, or the deadline passed."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline_s, f"waited in vain for {awaited}"
        for process in processes:
            assert not process.poll(), process.communicate(0)
        time.sleep(0.002)


@needs_namespaces
def test_two_stages_at_once_on_two_machines_and_one_of_them_killed(in_sequence: dict[str, str]) -> None:
    stages = Path("D/stages")
    with (
        Forked(*TRAIN, "--only=sft", target=ISOLATED) as sft,
        Forked(*TRAIN, "--only=explore", target=ISOLATED) as explore,
    ):
        wait_for(
            lambda: steps(stages, "sft") > 0 and steps(stages, "explore") > 2, "both stages to train", sft, explore
        )
        assert sft.poll() is None, "the stages did not run at once"
        assert len({network_of(pid) for pid in (sft.pid, explore.pid, os.getpid())}) == 3
        explore.kill()
        assert explore.wait(DEADLINE_S) == -9
        assert sft.wait(DEADLINE_S) == 0, sft.communicate(0)
    untouched = content_digest(stage_folder("sft"), where="sft")
    planned = {row["stage"]: row["action"] for row in run_here(*TRAIN, "--dry-run", "--json").data["plan"]}
    assert planned == {"sft": "done", "explore": "resume", "rl": "run", "out": "wait"}
    with Forked(*TRAIN, "--only=explore", target=ISOLATED) as explore:
        assert explore.wait(DEADLINE_S) == 0, explore.communicate(0)
    assert content_digest(stage_folder("sft"), where="sft") == untouched
    assert json.loads((stage_folder("explore") / "summary.json").read_bytes())["sessions"] == 2
    found = artefacts(stages)
    assert len(found) == 2
    assert found.items() <= in_sequence.items()


def osmo_tasks(folder: Path) -> OsmoTasks:
    """The tasks of the rendered workflow."""
    ((_, text),) = render(["@r.toml"]).files.items()
    place = folder / "osmo"
    place.mkdir()
    return OsmoTasks(place, WorkflowFile.model_validate(yaml.safe_load(text)).workflow)


def test_the_tasks_of_osmo_make_what_the_recipe_makes(folder: Path, in_sequence: dict[str, str]) -> None:
    tasks = osmo_tasks(folder)
    for task in tasks.workflow.tasks:
        assert tasks.run(task.name) == 0, tasks.printed
    # Each task leaves the folder of its own stage, and a run directory here takes them as finished stages.
    outputs = tasks.folder / "outputs"
    assert [len(list((outputs / name).iterdir())) for name in ("sft", "explore", "rl", "out")] == [1, 1, 1, 1]
    stages = Path("D/stages")
    stages.mkdir(parents=True)
    for each in outputs.glob("*/*"):
        (stages / each.name).symlink_to(each)
    assert artefacts(stages) == in_sequence
    plan = run_here(*TRAIN, "--dry-run", "--json").data["plan"]
    assert [row["action"] for row in plan] == ["done"] * 4


def test_a_rescheduled_task_resumes_from_what_osmo_has_uploaded(folder: Path, in_sequence: dict[str, str]) -> None:
    tasks = osmo_tasks(folder)

    def has_checkpoint(machine: Path) -> bool:
        stages = machine / "tmp/runs/letters/stages"
        return any(stages.glob("explore-*/checkpoints/step_2")) and steps(stages, "explore") > 3

    assert tasks.run("explore", until=has_checkpoint) == KILLED_CODE
    (kept,) = (tasks.folder / "store/bucket/runs/letters/explore/stages").iterdir()
    assert not list(kept.glob("ledger.sqlite*"))
    assert not (tasks.folder / "outputs").exists()
    assert tasks.run("explore") == 0, tasks.printed
    (made,) = (tasks.folder / "outputs/explore").iterdir()
    summary = json.loads((made / "summary.json").read_bytes())
    assert summary["sessions"] == 2
    assert summary["weights_digest"] == in_sequence[made.name]
    assert not (kept / "stage.json").exists()


def test_a_task_without_the_output_of_a_stage_before_it_fails(folder: Path) -> None:
    tasks = osmo_tasks(folder)
    (tasks.folder / "outputs/sft/sft-0123456789").mkdir(parents=True)  # of another configuration
    assert tasks.run("rl") == 2
    assert "needs stage sft, which is not finished with its current configuration" in tasks.printed
