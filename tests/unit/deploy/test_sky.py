from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.unit.deploy.conftest import RECIPE, RenderRecipe
from tidemill.core.errors import UserError
from tidemill.deploy.documents import Document, Rendered
from tidemill.deploy.places import Places
from tidemill.deploy.sky.tasks import _written
from tidemill.deploy.targets import target_of

SKY = "--deploy.target=sky"
GPUS = ("--ray.trainer_gpus=8", "--ray.worker_gpus=1", "--deploy.accelerator=h100-80gb")


def tasks_of(result: Rendered) -> list[Document]:
    """The header of the group, the trainer and the rollout jobs."""
    return list(yaml.safe_load_all(result.text))


def test_a_recipe_becomes_a_job_group(rendered: RenderRecipe) -> None:
    result = rendered(SKY, "--deploy.sky.volume=disk", "--deploy.sky.max_hourly_cost=2.5", *GPUS)
    assert list(result.files) == ["small.yaml"]
    group, trainer, *rollouts = tasks_of(result)
    assert group == {
        "name": "small",
        "execution": "parallel",
        "primary_tasks": ["trainer"],
        "inter_connection": True,
    }
    image = "docker:registry/tidemill@sha256:0"
    # One trainer shard of 1 CPU, and the driver.
    assert trainer["resources"] == {
        "cpus": "2+",
        "memory": "3+",
        "accelerators": {"H100": 8},
        "use_spot": False,
        "image_id": image,
        "job_recovery": {"strategy": "FAILOVER", "recover_on_exit_codes": [130]},
    }
    assert trainer["volumes"] == {"/runs": "disk"}
    assert [each["name"] for each in rollouts] == ["rollout-0", "rollout-1"]
    assert rollouts[0]["resources"] == {
        "cpus": "1+",
        "memory": "2+",
        "accelerators": {"H100": 1},
        "use_spot": True,
        "image_id": image,
        "max_hourly_cost": 2.5,
        "job_recovery": {"strategy": "FAILOVER"},
    }
    assert "volumes" not in rollouts[0]
    assert 'dir = "/runs/small"' in trainer["run"]
    assert "recipe.toml" not in rollouts[0]["run"]
    assert "--address=trainer-0.small:6379 " in rollouts[0]["run"]
    assert rollouts[0]["run"].count("--labels=ray.io/market-type=spot") == 1
    assert "6380" not in result.text  # SkyPilot's own Ray


def test_notice_and_grace(rendered: RenderRecipe) -> None:
    _, trainer, rollout, _ = tasks_of(rendered(SKY, "--deploy.notice_s=30"))
    (reserved,), (spot,) = trainer["config"]["hooks"], rollout["config"]["hooks"]
    assert (reserved["events"], reserved["timeout"]) == (["preemption"], 120)
    assert (spot["events"], spot["timeout"]) == (["preemption"], 30)
    assert "DRAIN_TIMEOUT_S=28\n" in rollout["run"]  # two seconds before SIGKILL


def test_no_value_of_a_secret_is_rendered(rendered: RenderRecipe) -> None:
    for task in tasks_of(rendered(SKY, "--deploy.secrets.HF_TOKEN=hub/token"))[1:]:
        assert task["secrets"] == {"HF_TOKEN": None, "RAY_AUTH_TOKEN": None}


def test_several_clouds_find_the_trainer_by_a_bucket(rendered: RenderRecipe) -> None:
    clouds = '--deploy.sky.clouds=["aws/us-east-1", "gcp"]'
    group, trainer, rollout, _ = tasks_of(rendered(SKY, clouds, "--deploy.sky.bucket=s3://b"))
    assert "inter_connection" not in group  # SkyPilot then keeps the group in one region, without names
    for task in (trainer, rollout):
        assert task["resources"]["any_of"] == [{"infra": "aws/us-east-1"}, {"infra": "gcp"}]
        assert task["file_mounts"] == {"/tidemill-address": {"source": "s3://b", "mode": "MOUNT"}}
    assert "echo $address > /tidemill-address/small\n" in trainer["run"]
    assert '--address="$(cat /tidemill-address/small)" ' in rollout["run"]


def test_without_preemptible_machines_there_is_only_the_trainer(rendered: RenderRecipe) -> None:
    recipe = RECIPE.replace('kind = "synthetic"\nworkers = 2', 'kind = "ray"')
    group, trainer = tasks_of(rendered(SKY, "--pool.kind=static", "--pool.workers=0", recipe=recipe))
    assert "inter_connection" not in group
    assert trainer["name"] == "trainer"


@pytest.mark.parametrize(
    ("options", "mount", "volume"),
    [
        ("--deploy.models=gs://weights", {"/models": {"source": "gs://weights", "mode": "MOUNT"}}, None),
        ("--deploy.models=weights", None, {"/models": "weights"}),
    ],
)
def test_models_come_from_a_bucket_or_a_volume(
    rendered: RenderRecipe, options: str, mount: Document | None, volume: Document | None
) -> None:
    for task in tasks_of(rendered(SKY, options))[1:]:
        assert (task.get("file_mounts"), task.get("volumes")) == (mount, volume)


def test_remarks_say_what_is_lost_and_what_is_waited_for(rendered: RenderRecipe) -> None:
    notes = rendered(SKY, "--deploy.hours=4").notes
    assert "warning: without deploy.sky.volume the run is lost with the trainer's machine" in notes
    assert "SkyPilot starts the run when all 3 machines are there" in notes
    assert "deploy.hours is not used: SkyPilot has no time limit" in notes
    assert any("places them on Kubernetes" in each for each in notes)
    assert not any("warning" in each for each in rendered(SKY, "--deploy.sky.volume=disk").notes)


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (('--deploy.sky.clouds=["awz"]',), "clouds = awz: is not a cloud of SkyPilot", "did you mean aws?"),
        (('--deploy.sky.clouds=["aws"]',), "only on Kubernetes, not on aws", "deploy.sky.bucket"),
        (
            ('--deploy.sky.clouds=["k8s/a", "aws"]', "--deploy.sky.bucket=s3://b", "--deploy.sky.volume=v"),
            "sky.volume = v: SkyPilot has no volumes on aws",
            "Kubernetes contexts",
        ),
        (
            ('--deploy.sky.clouds=["gcp"]', "--deploy.sky.bucket=gs://b", "--deploy.models=weights"),
            "deploy.models = weights: SkyPilot has no volumes on gcp",
            "leave it out",
        ),
        (("--deploy.sky.bucket=b",), "is not the URL of a bucket", ""),
        (("--deploy.sky.max_hourly_cost=-1",), "max_hourly_cost", ""),
        (("--ray.trainer_gpus=1",), "deploy.accelerator: missing", "h100-80gb"),
        ((*GPUS, "--deploy.accelerator=h100-80g"), "no GPU 'h100-80g'", "did you mean h100-80gb?"),
        (
            (*GPUS, "--runtime=ray", "--trainer.shards=16", "--ray.trainer_gpus=1"),
            "the trainer needs 3 machines",
            "slurm",
        ),
        (("--deploy.sweep.seeds=[1,2]",), "deploy.sweep: is not rendered for sky", "gke"),
        (("--deploy.serve.model=/runs/a", "--deploy.serve.tokens=a/b"), "serve.model: is not rendered for sky", "gke"),
    ],
)
def test_bad_input(rendered: RenderRecipe, options: tuple[str, ...], message: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        rendered(SKY, *options)
    assert message in str(caught.value)
    assert hint in str(caught.value) + caught.value.hint


def test_a_stage_has_no_machine_of_its_own(rendered: RenderRecipe) -> None:
    stages = '[[stage]]\nname = "a"\nkind = "rl"\n[stage.deploy]\nhead_memory_gb = 9\n'
    with pytest.raises(UserError, match="sky runs all stages of a recipe in one job") as caught:
        rendered(SKY, recipe=RECIPE + stages)
    assert "osmo" in caught.value.hint


@pytest.mark.parametrize(
    ("accelerator", "name"),
    [("a100-80gb", "A100-80GB"), ("a100-40gb", "A100"), ("nvidia-h100-80gb", "H100"), ("l40s", "L40S")],
)
def test_gpus_have_the_names_of_skypilot(rendered: RenderRecipe, accelerator: str, name: str) -> None:
    _, trainer, *_ = tasks_of(rendered(SKY, "--ray.trainer_gpus=1", f"--deploy.accelerator={accelerator}"))
    assert trainer["resources"]["accelerators"] == {name: 1}


@pytest.mark.parametrize(
    "content", [b"a = '$HOME `x`'\n\\\n", b"no newline", b"a\r\n", b"\0\xff\n", "ä\n".encode(), b""]
)
def test_files_arrive_unchanged(tmp_path: Path, content: bytes) -> None:
    subprocess.run(["bash", "-ec", _written({"a": content}, Places(recipe=f"{tmp_path}/recipe"))], check=True)
    assert (tmp_path / "recipe/a").read_bytes() == content


def test_user_functions_travel_to_all_machines(rendered: RenderRecipe, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(samples):\n    return [1.0 for _ in samples]\n", encoding="utf-8")
    recipe = RECIPE + '[scoring]\nrewards = [{kind = "python", function = "mine.py:reward"}]\n'
    _, *tasks = tasks_of(rendered(SKY, recipe=recipe))
    assert all("cat > /tmp/tidemill/recipe/mine.py <<" in task["run"] for task in tasks)
    for task in tasks:
        subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True)


FAKE = """\
#!/bin/sh
echo "$@" >> calls
case "$2" in
  queue) cat queue.json; test ! -e fails || { cat fails >&2; exit 1; } ;;
  launch)
    for each in "$@"; do
      case "$each" in
        --secret-file=*) cat "${each#*=}" > secrets ;;
        *.yaml) cp "$each" launched.yaml ;;
      esac
    done
    cat > answer
    test ! -e refuses || { cat refuses >&2; exit 1; } ;;
esac
"""


def record(status: str, task: int, *, job: int = 7, name: str = "small") -> Document:
    names = ["trainer", "rollout-0", "rollout-1"]
    return {"job_id": job, "task_id": task, "job_name": name, "task_name": names[task], "status": status}


@pytest.fixture
def sky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`sky(RECORDS)` puts a program sky into PATH that reports these jobs and writes down what it is called with."""
    program = tmp_path / "bin/sky"
    program.parent.mkdir()
    program.write_text(FAKE, encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))

    def call(*records: Document) -> None:
        queue = "\x1b[2mStarting a local server.\x1b[0m\n" + json.dumps(records, indent=2)
        (tmp_path / "queue.json").write_text(queue, encoding="utf-8")

    call()
    return call


def test_apply_submits_the_file_and_keeps_secrets_out_of_it(
    rendered: RenderRecipe, sky: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = rendered(SKY, "--deploy.secrets.HF_TOKEN=hub/token")
    target = target_of(result.deploy)
    with pytest.raises(UserError, match="HF_TOKEN: is not set here"):
        target.apply(result)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert target.apply(result) == ["job trainer", "job rollout-0", "job rollout-1"]
    assert (tmp_path / "launched.yaml").read_text(encoding="utf-8") == result.text
    variable, token = (tmp_path / "secrets").read_text(encoding="utf-8").split("=")
    assert (variable, len(token.strip())) == ("RAY_AUTH_TOKEN", 64)
    call = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()[-1]
    assert call.startswith("jobs launch --yes --detach-run --secret-file=")
    assert "--secret=HF_TOKEN " in call
    assert "hf_secret" not in call + result.text
    assert token.strip() not in call + result.text


@pytest.mark.parametrize(("status", "is_there"), [("RUNNING", True), ("RECOVERING", True), ("FAILED_SETUP", False)])
def test_apply_does_not_submit_a_second_job_of_the_same_name(
    rendered: RenderRecipe, sky: Callable[..., None], status: str, is_there: bool
) -> None:
    sky(record(status, 0), record("SUCCEEDED", 0, job=6), record("RUNNING", 0, job=9, name="other"))
    result = rendered(SKY)
    if is_there:
        with pytest.raises(UserError, match="is there already"):
            target_of(result.deploy).apply(result)
    else:
        assert target_of(result.deploy).apply(result)


def test_status_logs_and_delete_are_of_the_newest_job(
    rendered: RenderRecipe, sky: Callable[..., None], tmp_path: Path
) -> None:
    sky(record("RUNNING", 1), record("RUNNING", 0), record("RECOVERING", 2), record("FAILED", 0, job=3))
    result = rendered(SKY)
    target = target_of(result.deploy)
    rows = [(row["name"], row["role"], row["state"].split(";")[0]) for row in target.status(result)]
    assert rows == [
        ("trainer", "trainer", "runs"),
        ("rollout-0", "rollout", "runs"),
        ("rollout-1", "rollout", "lost its machine or stopped after a checkpoint"),
    ]
    target.print_log(result, follow=False)
    assert target.delete(result, storage=False) == ["job trainer", "job rollout-0", "job rollout-1"]
    calls = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
    assert "jobs logs --no-follow 7 trainer" in calls
    assert calls[-1] == "jobs cancel --yes 7"


def test_there_is_no_job(rendered: RenderRecipe, sky: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "fails").write_text("sky.exceptions.ClusterNotUpError: No in-progress managed jobs.")
    result = rendered(SKY)
    target = target_of(result.deploy)
    assert target.status(result) == []
    assert target.delete(result, storage=False) == []
    with pytest.raises(UserError, match="there is no such job"):
        target.print_log(result, follow=True)


def test_what_is_not_possible_is_said(rendered: RenderRecipe, sky: Callable[..., None]) -> None:
    result = rendered(SKY)
    target = target_of(result.deploy)
    with pytest.raises(UserError, match="does not show what was submitted"):
        target.diff(result)
    with pytest.raises(UserError, match="volumes are not deleted here"):
        target.delete(result, storage=True)


@pytest.mark.parametrize(
    ("message", "refusals"),
    [
        ("Aborted!", []),
        ("sky.exceptions.NoCloudAccessError: Cloud access is not set up.", ["no cloud is set up"]),
        ("sky.exceptions.VolumeNotFoundError: Volume runs not found.", ["its volume is missing"]),
    ],
)
def test_check_asks_skypilot_and_answers_no(
    rendered: RenderRecipe, sky: Callable[..., None], tmp_path: Path, message: str, refusals: list[str]
) -> None:
    (tmp_path / "refuses").write_text(message, encoding="utf-8")
    result = rendered(SKY)
    said = target_of(result.deploy).refusals(result)
    assert [expected in actual for expected, actual in zip(refusals, said, strict=True)] == [True] * len(refusals)
    assert "--yes" not in (tmp_path / "calls").read_text(encoding="utf-8")
    assert (tmp_path / "answer").read_text(encoding="utf-8") == "n\n"


@pytest.mark.parametrize(
    ("infra", "lacks"), [("aws/us-east-1", ""), ("aws", ""), ("aws/us-west-2", "H100"), ("gcp", ""), ("lambda", "H100")]
)
def test_a_cloud_without_the_accelerator(
    rendered: RenderRecipe, sky: Callable[..., None], tmp_path: Path, infra: str, lacks: str
) -> None:
    head = "InstanceType,AcceleratorName,AcceleratorCount,Price,SpotPrice,Region\n"
    for cloud, row in {"aws": "p5.48xlarge,H100,8.0,55.04,,us-east-1\n", "lambda": "cpu,,,0.2,,us-east-1\n"}.items():
        file = tmp_path / ".sky/catalogs/v8" / cloud / "vms.csv"
        file.parent.mkdir(parents=True)
        file.write_text(head + row, encoding="utf-8")
    result = rendered(SKY, *GPUS, f'--deploy.sky.clouds=["{infra}"]', "--deploy.sky.bucket=s3://b")
    if lacks:
        with pytest.raises(UserError, match=f"{infra} has no machine with 8 {lacks}"):
            target_of(result.deploy).apply(result)
    else:
        assert target_of(result.deploy).apply(result)


def test_without_the_program(
    rendered: RenderRecipe, sky: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = rendered(SKY)
    with pytest.raises(UserError, match="sky is not installed, or not in PATH") as caught:
        target_of(result.deploy).status(result)
    assert "pip install" in caught.value.hint
