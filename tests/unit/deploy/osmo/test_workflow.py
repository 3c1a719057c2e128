from __future__ import annotations

import re
import tomllib
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.deploy.conftest import RenderRecipe
from tidemill.core.errors import UserError
from tidemill.deploy.documents import Rendered
from tidemill.deploy.osmo.model import WorkflowFile
from tidemill.deploy.osmo.workflow import DIGEST_CHARS, NOT_UPLOADED
from tidemill.deploy.recipe_files import RECIPE
from tidemill.pipeline.stage_plan import SHORT_DIGEST_CHARS

ROWS = '{"prompt": "1+1=", "completion": "2"}\n'
STAGES = """\
[run]
name = "Two kinds"
[model]
source = "char"
[data]
path = "rows.jsonl"
[deploy]
target = "osmo"
image = "registry/tidemill@sha256:0"
accelerator = "l4"
[deploy.osmo]
pool = "robots"
platform = "sim"
url = "s3://bucket/runs/"
[deploy.secrets]
HF_TOKEN = "hub/token"
WANDB_API_KEY = "loggers/wandb"
WANDB_USER = "loggers/user"

[[stage]]
name = "sft"
kind = "sft"
[stage.ray]
trainer_gpus = 1

[[stage]]
name = "rl"
kind = "rl"
[stage.model]
source = "stage:sft"
[stage.pool]
kind = "synthetic"
workers = 2
[stage.ray]
trainer_gpus = 2
worker_gpus = 1
[stage.deploy]
accelerator = "h100-80gb"
storage_size = "200Gi"
osmo.platform = "dgx"

[[stage]]
name = "out"
kind = "export"
[stage.model]
source = "stage:rl"
[stage.deploy]
head_memory_gb = 8
osmo.platform = "cpu"
"""
RUN = "/tmp/tidemill/runs/two-kinds"


@pytest.fixture(autouse=True)
def rows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(ROWS, encoding="utf-8")


def workflow_of(result: Rendered) -> dict[str, Any]:
    """The one document, which the model of OSMO's specification accepts."""
    (text,) = result.files.values()
    document = yaml.safe_load(text)
    WorkflowFile.model_validate(document)
    found: dict[str, Any] = document["workflow"]
    return found


def tasks_of(result: Rendered) -> dict[str, dict[str, Any]]:
    return {task["name"]: task for task in workflow_of(result)["tasks"]}


def file_of(task: dict[str, Any], name: str) -> str:
    return str(next(file["contents"] for file in task["files"] if file["path"] == f"/etc/tidemill/{name}"))


def test_each_stage_is_a_task_on_its_own_kind_of_machine(rendered: RenderRecipe) -> None:
    result = rendered(recipe=STAGES)
    workflow = workflow_of(result)
    assert (workflow["name"], workflow["pool"]) == ("two-kinds", "robots")
    assert [(task["name"], task["resource"]) for task in workflow["tasks"]] == [(n, n) for n in ("sft", "rl", "out")]
    # 1 CPU of the trainer and 1 of the driver; for rl also 1 CPU and 1 GPU of each of 2 workers. Memory of the head and
    # of workers: as in tests/unit/deploy/test_render.py, with libraries for GPUs.
    resources = workflow["resources"]
    assert {name: (r["cpu"], r.get("gpu"), r["platform"]) for name, r in resources.items()} == {
        "sft": (2, 1, "sim"),
        "rl": (4, 4, "dgx"),
        "out": (2, None, "cpu"),
    }
    assert [r.get("storage") for r in resources.values()] == [None, "200Gi", None]
    assert resources["out"]["memory"] == "8Gi"  # 8 GB are 7.45 GiB


def test_folders_of_stages_go_from_task_to_task(rendered: RenderRecipe) -> None:
    sft, rl, out = tasks_of(rendered(recipe=STAGES)).values()
    kept = "s3://bucket/runs/two-kinds"
    assert sft["inputs"] == [{"url": f"{kept}/sft/stages"}]
    assert rl["inputs"] == [{"task": "sft"}, {"url": f"{kept}/rl/stages"}]
    assert out["inputs"] == [{"task": "sft"}, {"task": "rl"}, {"url": f"{kept}/out/stages"}]
    assert file_of(out, "stage.sh").splitlines() == [
        "set -e",
        f"mkdir -p {RUN}/stages /tmp/tidemill/models",
        f"ln -sfn {{{{input:0}}}}/* {RUN}/stages/",
        f"ln -sfn {{{{input:1}}}}/* {RUN}/stages/",
        f"cp -R {{{{input:2}}}}/. {RUN}/stages/",
        "tidemill train @/etc/tidemill/recipe.toml --only out",
        f"cp -R {RUN}/stages/out-{'[0-9a-f]' * 10} {{{{output}}}}/",
    ]
    assert (sft["command"], sft["args"]) == (["sh"], ["/etc/tidemill/stage.sh"])


def test_the_glob_of_a_stage_has_the_length_of_its_digest() -> None:
    assert DIGEST_CHARS == SHORT_DIGEST_CHARS


def test_exit_codes_and_checkpoints(rendered: RenderRecipe) -> None:
    rl = tasks_of(rendered(recipe=STAGES))["rl"]
    assert rl["exitActions"] == {"FAIL": "3", "RESCHEDULE": "130,3001,3006"}
    (checkpoint,) = rl["checkpoint"]
    assert (checkpoint["path"], checkpoint["url"]) == (f"{RUN}/stages", "s3://bucket/runs/two-kinds/rl")
    assert checkpoint["frequency"] == "10m"


@pytest.mark.parametrize(
    ("path", "is_uploaded"),
    [
        ("stages/rl-0123456789/checkpoints/step_4/model.safetensors", True),
        ("rl-0123456789/manifest.json", True),
        (f"{RUN}/stages/rl-0123456789/metrics.jsonl", True),
        ("stages/rl-0123456789/ledger.sqlite", False),
        ("stages/rl-0123456789/ledger.sqlite-wal", False),
        ("stages/rl-0123456789/stage.json", False),
        ("stages/rl-0123456789/checkpoints/.step_8.partial/model.safetensors", False),
        ("stages/sft-0123456789/manifest.json", False),
        ("stages/my-rl-0123456789/manifest.json", False),
    ],
)
def test_what_is_kept_of_a_running_stage(rendered: RenderRecipe, path: str, is_uploaded: bool) -> None:
    (checkpoint,) = tasks_of(rendered(recipe=STAGES))["rl"]["checkpoint"]
    assert bool(re.match(checkpoint["regex"], path)) == is_uploaded


@pytest.mark.parametrize(("name", "is_uploaded"), [("small/metrics.jsonl", True), ("small/ledger.sqlite", False)])
def test_what_is_kept_of_a_run_without_stages(name: str, is_uploaded: bool) -> None:
    assert bool(re.match(f"{NOT_UPLOADED}.*", name)) == is_uploaded


def test_secrets_are_credentials(rendered: RenderRecipe) -> None:
    credentials = {"hub": {"HF_TOKEN": "token"}, "loggers": {"WANDB_API_KEY": "wandb", "WANDB_USER": "user"}}
    assert all(task["credentials"] == credentials for task in tasks_of(rendered(recipe=STAGES)).values())


def test_the_recipe_and_its_files_travel(rendered: RenderRecipe) -> None:
    sft = tasks_of(rendered(recipe=STAGES))["sft"]
    recipe = tomllib.loads(file_of(sft, RECIPE))
    assert recipe["run"]["dir"] == RUN
    assert "deploy" not in recipe
    assert recipe["stage"][0]["data"]["path"] == "/etc/tidemill/rows.jsonl"
    assert file_of(sft, "rows.jsonl") == ROWS


@pytest.mark.parametrize("content", [b'{"prompt": "{{a}}", "completion": "b"}\n', b"\xff\xfe\x00"])
def test_files_that_a_template_would_change_are_encoded(rendered: RenderRecipe, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    sft = tasks_of(rendered(recipe=STAGES))["sft"]
    (file,) = [file for file in sft["files"] if file["path"].endswith("rows.jsonl")]
    assert file["base64"] is True
    assert b64decode(file["contents"]) == content


def test_rollouts_run_beside_their_trainer(rendered: RenderRecipe) -> None:
    result = rendered(recipe=STAGES)
    rl = tomllib.loads(file_of(tasks_of(result)["rl"], RECIPE))["stage"][1]
    assert rl["pool"] == {"kind": "static", "workers": 2}
    assert (rl["runtime"], rl["ray"]["address"]) == ("ray", "")  # a Ray cluster of the machine, for its GPUs
    assert "stage rl: its 2 rollout workers run in its task" in result.notes
    assert 'stage.rl.pool.kind = "static" instead of "synthetic"' in result.notes


def test_a_run_without_stages_is_one_task(rendered: RenderRecipe) -> None:
    result = rendered("--deploy.target=osmo", "--deploy.hours=1.5", "--deploy.osmo.url=gs://b")
    workflow = workflow_of(result)
    assert workflow["timeout"] == {"exec_timeout": "90m"}
    (task,) = workflow["tasks"]
    assert task["inputs"] == [{"url": "gs://b/small/small/small"}]
    assert file_of(task, "stage.sh").splitlines()[-3:] == [
        "cp -R {{input:0}}/. /tmp/tidemill/runs/small/",
        "tidemill train @/etc/tidemill/recipe.toml",
        "cp -R /tmp/tidemill/runs/small/. {{output}}/",
    ]


def test_without_a_store_a_rescheduled_stage_starts_again(rendered: RenderRecipe) -> None:
    result = rendered("--deploy.target=osmo")
    (task,) = workflow_of(result)["tasks"]
    assert not {"inputs", "checkpoint"} & task.keys()
    assert [note for note in result.notes if "starts again when OSMO reschedules it" in note]


def test_models_of_a_bucket_are_inputs_of_their_stages(rendered: RenderRecipe) -> None:
    options = ("--deploy.models=gs://weights", "--stage.sft.model.source=/models/llama/base")
    tasks = tasks_of(rendered(*options, recipe=STAGES))
    assert tasks["sft"]["inputs"][0] == {"url": "gs://weights/llama"}
    assert "ln -sfn {{input:0}} /tmp/tidemill/models/llama" in file_of(tasks["sft"], "stage.sh")
    assert not [each for each in tasks["rl"]["inputs"] if each.get("url", "").startswith("gs://weights")]
    recipe = tomllib.loads(file_of(tasks["sft"], RECIPE))
    assert recipe["stage"][0]["model"]["source"] == "/tmp/tidemill/models/llama/base"


def test_the_gpu_of_the_job_is_no_demand_of_a_stage_without_gpus(rendered: RenderRecipe) -> None:
    with pytest.raises(UserError, match="no pod asks for a GPU"):
        rendered("--deploy.target=osmo", "--deploy.accelerator=l4")
    assert "gpu" not in workflow_of(rendered(recipe=STAGES))["resources"]["out"]


REFUSED = [
    (("--stage.sft.model.source=/runs/other/stages/sft-0/model",), "storage of other jobs", 'write "stage:NAME"'),
    (("--stage.sft.model.source=/models/llama",), "no bucket", 'set deploy.models = "gs://BUCKET"'),
    (("--stage.rl.ray.trainer_gpus=16",), "2 machines", "lower trainer.shards"),
    (("--deploy.osmo.url=/mnt/runs",), "not the URL of a bucket", ""),
    (("--deploy.osmo.url=ftp://runs",), "match pattern", "deploy.osmo"),
    (("--deploy.serve.model=a", "--deploy.serve.tokens=a/b"), "not rendered for osmo", "leave it out"),
    (("--stage.rl.deploy.accelerator=h1000",), "stage rl, deploy.accelerator: .*h1000", ""),
]


@pytest.mark.parametrize(("options", "what", "hint"), REFUSED, ids=[what for _, what, _ in REFUSED])
def test_what_osmo_cannot_run_is_refused(
    rendered: RenderRecipe, options: tuple[str, ...], what: str, hint: str
) -> None:
    with pytest.raises(UserError, match=what) as caught:
        rendered(*options, recipe=STAGES)
    assert hint in caught.value.hint


def test_stages_whose_names_osmo_takes_for_one_are_refused(rendered: RenderRecipe) -> None:
    again = STAGES.replace('name = "out"', 'name = "SFT"')
    with pytest.raises(UserError, match="the name sft") as caught:
        rendered(recipe=again)
    assert "rename the stages" in caught.value.hint


@pytest.mark.parametrize("target", ["gke", "kubernetes", "slurm", "sky"])
def test_other_targets_refuse_a_machine_for_one_stage(rendered: RenderRecipe, target: str) -> None:
    recipe = STAGES.replace('"osmo"', f'"{target}"').replace(
        "[deploy.osmo]", '[deploy.slurm]\nruns = "/s"\n[deploy.osmo]'
    )
    recipe = recipe.replace('accelerator = "l4"\n', "").replace('accelerator = "h100-80gb"\n', "")
    with pytest.raises(UserError, match="gives the stage another machine") as caught:
        rendered(recipe=recipe)
    assert caught.value.where == "stage.rl.deploy.storage_size"
    assert 'set deploy.target = "osmo"' in caught.value.hint


def test_other_targets_ignore_the_platform_of_a_stage(rendered: RenderRecipe) -> None:
    one = STAGES[: STAGES.index('[[stage]]\nname = "rl"')] + '[stage.deploy]\nosmo.platform = "dgx"\n'
    rendered("--deploy.target=kubernetes", recipe=one)
