from __future__ import annotations

from tests.unit.deploy.conftest import RECIPE, RenderRecipe, by_kind


def test_a_queue_makes_the_job_elastic(rendered: RenderRecipe) -> None:
    metadata = by_kind(rendered("--deploy.queue=research"), "RayJob")["metadata"]
    assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert metadata["annotations"] == {"kueue.x-k8s.io/elastic-job": "true"}


def test_the_autoscaler_looks_every_second(rendered: RenderRecipe) -> None:
    options = by_kind(rendered(), "RayJob")["spec"]["rayClusterSpec"]["autoscalerOptions"]
    assert options["env"] == [{"name": "AUTOSCALER_UPDATE_INTERVAL_S", "value": "1"}]


def test_the_claim_is_rendered_with_a_size(rendered: RenderRecipe) -> None:
    claim = by_kind(rendered("--deploy.storage_size=100Gi"), "PersistentVolumeClaim")
    assert claim["metadata"]["name"] == "runs"
    assert claim["spec"] == {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "100Gi"}}}


def test_the_budget_protects_the_head(rendered: RenderRecipe) -> None:
    result = rendered()
    budget = by_kind(result, "PodDisruptionBudget")["spec"]
    selector = budget["selector"]["matchLabels"]
    assert budget["minAvailable"] == 1  # the only bound for pods whose owner has no scale
    cluster = by_kind(result, "RayJob")["spec"]["rayClusterSpec"]
    assert selector.items() <= cluster["headGroupSpec"]["template"]["metadata"]["labels"].items()
    assert not selector.items() <= cluster["workerGroupSpecs"][0]["template"]["metadata"]["labels"].items()


def test_a_run_without_a_pool_has_no_preemptible_group(rendered: RenderRecipe) -> None:
    recipe = RECIPE.replace('[pool]\nkind = "synthetic"\nworkers = 2\n', "")
    assert by_kind(rendered(recipe=recipe), "RayJob")["spec"]["rayClusterSpec"]["workerGroupSpecs"] == []
    (group,) = by_kind(rendered("--deploy.spot_max=3", recipe=recipe), "RayJob")["spec"]["rayClusterSpec"][
        "workerGroupSpecs"
    ]
    assert group["maxReplicas"] == 3


def test_the_group_has_the_labels_that_the_pool_selects(rendered: RenderRecipe) -> None:
    recipe = RECIPE.replace('kind = "synthetic"\nworkers = 2', 'kind = "ray"\nmax_workers = 4\nselector = {a = "b"}')
    recipe = f'runtime = "ray"\n{recipe}'
    (group,) = by_kind(rendered("--deploy.spot_max=9", recipe=recipe), "RayJob")["spec"]["rayClusterSpec"][
        "workerGroupSpecs"
    ]
    assert (group["labels"], group["minReplicas"], group["maxReplicas"]) == ({"a": "b"}, 0, 9)


def test_long_names_are_cut_and_get_a_hash(rendered: RenderRecipe) -> None:
    names = {by_kind(rendered(f"--run.name={'a' * 60}{end}"), "RayJob")["metadata"]["name"] for end in "bc"}
    assert len(names) == 2 and {len(name) for name in names} == {47}
