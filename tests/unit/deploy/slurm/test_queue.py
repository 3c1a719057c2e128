from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.deploy.conftest import RenderRecipe
from tests.unit.deploy.slurm.test_batch import RECIPE
from tidemill.core.errors import UserError
from tidemill.deploy.documents import Rendered
from tidemill.deploy.slurm.queue import SlurmQueue

ENDED = "12|12_0|small-rollouts|{state}|{reason}|n1|{restarts}|{status}|"


@pytest.fixture
def here(rendered: RenderRecipe, tmp_path: Path) -> Rendered:
    return rendered(f"--deploy.slurm.runs={tmp_path}", recipe=RECIPE)


def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin" if scripts else str(folder))


@pytest.mark.parametrize(
    ("state", "reason", "restarts", "status", "words"),
    [
        ("RUNNING", "None", 0, 0, "runs on n1"),
        ("PENDING", "BeginTime", 1, 0, "waits in the queue until the previous start has ended everywhere"),
        ("PENDING", "QOSMaxJobs", 0, 0, "waits in the queue (QOSMaxJobs)"),
        ("FAILED", "NonZeroExitCode", 0, 2 * 256, "has failed on n1 with code 2"),
        ("FAILED", "JobLaunchFailure", 0, 4021, "could not open the log; do all nodes share deploy.slurm.runs?"),
        ("COMPLETED", "None", 2, 0, "has ended on n1, start 3"),
        ("DEADLINE", "None", 0, 0, "deadline on n1"),
    ],
)
def test_states_in_words(
    here: Rendered,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    reason: str,
    restarts: int,
    status: int,
    words: str,
) -> None:
    line = ENDED.format(state=state, reason=reason, restarts=restarts, status=status)
    programs(tmp_path, monkeypatch, squeue=f"echo '{line}'")
    (row,) = SlurmQueue().status(here)
    assert words in row["state"]
    assert (row["kind"], row["name"], row["role"]) == ("job 12_0", "small-rollouts", "rollouts")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("sbatch: error: invalid partition specified: x", "there is no such partition"),
        ("sbatch: error: Unable to contact slurm controller (connect failure)", "controller does not answer"),
        ("sbatch: error: Requested node configuration is not available", "no machine of the partition"),
        ("sbatch: error: something else", "something else"),
    ],
)
def test_messages_of_sbatch(
    here: Rendered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str, expected: str
) -> None:
    programs(tmp_path, monkeypatch, squeue="true", sbatch=f"echo '{message}' >&2; exit 1")
    with pytest.raises(UserError, match=expected):
        SlurmQueue().apply(here)
    assert [expected in line for line in SlurmQueue().refusals(here)] == [True, True]


def test_apply_submits_both_jobs_with_the_same_marker(
    here: Rendered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "calls"
    programs(tmp_path, monkeypatch, squeue="true", sbatch=f'echo "$@" >> {log}; echo "7;cluster"')
    folder = tmp_path / "deploy" / "small"
    folder.mkdir(parents=True)
    (folder / "head.json").write_text('{"exit_code": 0}', encoding="utf-8")
    assert SlurmQueue().apply(here) == ["small is submitted as job 7", "small-rollouts is submitted as job 7"]
    reserved, rollouts = log.read_text().splitlines()
    marker = (folder / "marker").read_text()
    assert f"--export=ALL,TIDEMILL_MARKER={marker},TIDEMILL_PYTHON=" in reserved
    assert marker in rollouts and "--dependency=after:7" in rollouts and "--dependency" not in reserved
    assert not (folder / "head.json").exists()  # the end of an earlier run
    assert SlurmQueue().diff(here) == ""


LIVE = {"small": "11|11|small|RUNNING|None|n1|0|0|", "small-rollouts": "12|12_0|small-rollouts|PENDING|None||1|0|"}


@pytest.mark.parametrize("name", LIVE)
def test_apply_leaves_the_files_of_a_live_job_and_the_marker(
    rendered: RenderRecipe, here: Rendered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    programs(tmp_path, monkeypatch, squeue=f"cat {tmp_path}/queue", sbatch="echo 7")
    queue, folder = tmp_path / "queue", tmp_path / "deploy" / "small"
    queue.write_text("")
    SlurmQueue().apply(here)
    before = {path.name: path.read_text() for path in folder.iterdir()}
    queue.write_text(LIVE[name] + "\n")
    options = ["--trainer.steps=7", "--deploy.slurm.account=lab", f"--deploy.slurm.runs={tmp_path}"]
    changed = rendered(*options, recipe=RECIPE)
    SlurmQueue().apply(changed)
    after = {path.name: path.read_text() for path in folder.iterdir()}
    own = {"small": {"recipe.toml", "reserved.sbatch"}, "small-rollouts": {"rollouts.sbatch"}}[name]
    assert {file for file in after if after[file] == before[file]} == {"marker", *own}
    assert all(f"small/{file} (rendered)" in SlurmQueue().diff(changed) for file in own)


def test_delete_leaves_a_folder_that_is_no_run(
    rendered: RenderRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(tmp_path, monkeypatch, squeue="true")
    team = tmp_path / "team"
    (team / "other").mkdir(parents=True)
    made = rendered(f"--deploy.slurm.runs={tmp_path}", f"--run.dir={team}", recipe=RECIPE)
    with pytest.raises(UserError, match="team: is not a run's folder"):
        SlurmQueue().delete(made, storage=True)
    (team / "manifest.json").write_text("{}", encoding="utf-8")
    assert SlurmQueue().delete(made, storage=True) == [str(team)]


def test_secrets_come_from_the_environment(rendered: RenderRecipe, tmp_path: Path) -> None:
    made = rendered(f"--deploy.slurm.runs={tmp_path}", '--deploy.secrets={HF_TOKEN = "hub/token"}', recipe=RECIPE)
    with pytest.raises(UserError, match="HF_TOKEN: is not set here"):
        SlurmQueue().apply(made)


def test_slurm_is_not_installed(here: Rendered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(tmp_path, monkeypatch)
    with pytest.raises(UserError, match="squeue is not installed, or not in PATH"):
        SlurmQueue().apply(here)


def test_no_log(here: Rendered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(tmp_path, monkeypatch, squeue="true")
    with pytest.raises(UserError, match="there is no log of small"):
        SlurmQueue().print_log(here, follow=True)
