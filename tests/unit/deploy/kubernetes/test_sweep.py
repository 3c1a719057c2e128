from __future__ import annotations

import pytest

from tests.crds import validate
from tests.unit.deploy.conftest import RECIPE, RenderRecipe, by_kind, kinds, recipe_of
from tidemill.core.errors import UserError
from tidemill.deploy.documents import Document, Rendered

SWEEP = """\
[deploy.sweep]
seeds = [1, 2]
overrides = [{ "optimizer.learning_rate" = 1e-5 }, { "algorithm.name" = "rloo" }]
"""


def commands(result: Rendered) -> list[list[str]]:
    return [container(job)["command"] for job in by_kind(result, "JobSet")["spec"]["replicatedJobs"]]


def container(job: Document) -> Document:
    (found,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_one_replicated_job_for_each_pair_of_seed_and_override(rendered: RenderRecipe) -> None:
    result = rendered("--deploy.queue=team", recipe=RECIPE + SWEEP)
    job_set = by_kind(result, "JobSet")
    start = ["tidemill", "train", "@/etc/tidemill/recipe.toml"]
    alone = ["--pool.kind=static", "--pool.workers=0"]
    assert job_set["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert [job["name"] for job in job_set["spec"]["replicatedJobs"]] == ["run-0", "run-1", "run-2", "run-3"]
    assert commands(result) == [
        [*start, "--run.dir=/runs/small-0", *alone, "--optimizer.learning_rate=1e-05", "--run.seed=1"],
        [*start, "--run.dir=/runs/small-1", *alone, "--algorithm.name=rloo", "--run.seed=1"],
        [*start, "--run.dir=/runs/small-2", *alone, "--optimizer.learning_rate=1e-05", "--run.seed=2"],
        [*start, "--run.dir=/runs/small-3", *alone, "--algorithm.name=rloo", "--run.seed=2"],
    ]
    assert "RayJob" not in kinds(result)
    assert 'runtime = "ray"' not in recipe_of(result)
    assert any("4 runs on several nodes" in line for line in result.notes)


def test_a_lost_pod_resumes_and_an_invalid_recipe_does_not(rendered: RenderRecipe) -> None:
    job_set = by_kind(rendered("--deploy.sweep.seeds=[1]"), "JobSet")
    (job,) = job_set["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["backoffLimit"] == 20
    assert [rule["action"] for rule in spec["podFailurePolicy"]["rules"]] == ["Ignore", "FailJob"]
    assert spec["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [2]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # a podFailurePolicy needs it


def test_runs_have_shared_memory(rendered: RenderRecipe) -> None:
    (job,) = by_kind(rendered("--deploy.sweep.seeds=[1]"), "JobSet")["spec"]["replicatedJobs"]
    volumes = job["template"]["spec"]["template"]["spec"]["volumes"]
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory"}} in volumes
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container(job)["volumeMounts"]


def test_a_local_ray_cluster_replaces_the_address(rendered: RenderRecipe) -> None:
    recipe = 'runtime = "ray"\n' + RECIPE + "[ray]\naddress = 'auto'\n[deploy.sweep]\nseeds = [1]\n"
    (command,) = commands(rendered(recipe=recipe))
    assert "--ray.address=" in command


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (['--deploy.sweep.overrides=[{"run.dir" = "x"}]'], "run.dir: is set by the sweep"),
        (['--deploy.sweep.overrides=[{"optimiser.learning_rate" = 1}]'], "optimi"),
        (['--deploy.sweep.overrides=[{"trainer.steps" = -1}]'], "trainer.steps"),
    ],
)
def test_runs_that_are_refused(rendered: RenderRecipe, options: list[str], error: str) -> None:
    with pytest.raises(UserError, match=error):
        rendered(*options)


def test_the_schema_accepts_it(rendered: RenderRecipe) -> None:
    assert validate(by_kind(rendered("--deploy.queue=team", recipe=RECIPE + SWEEP), "JobSet"))


def test_names_of_pods_fit(rendered: RenderRecipe) -> None:
    name = by_kind(rendered(f"--run.name={'a' * 60}", "--deploy.sweep.seeds=[1]"), "JobSet")["metadata"]["name"]
    assert len(f"{name}-run-999-0-0-abcde") <= 63
