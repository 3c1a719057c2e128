from __future__ import annotations

from pathlib import Path

import pytest

from tests.crds import validate
from tests.unit.deploy.conftest import RECIPE, RenderRecipe, by_kind, documents_of, kinds
from tidemill.core.errors import UserError
from tidemill.deploy.documents import Document, Rendered
from tidemill.deploy.render import render

GKE = RECIPE.replace('"kubernetes"', '"gke"')
GPUS = (
    "--deploy.accelerator=nvidia-h100-80gb",
    "--runtime=ray",
    "--pool.kind=ray",
    "--pool.max_workers=4",
    "--ray.trainer_gpus=1",
    "--ray.worker_gpus=1",
)


def admin(*options: str, recipe: str = GKE) -> Rendered:
    Path("r.toml").write_text(recipe, encoding="utf-8")
    return render(["@r.toml", "--deploy.queue=team", *options], admin=True)


@pytest.fixture(autouse=True)
def folder(rendered: RenderRecipe) -> None:
    """The empty folder of `rendered`."""


def named(result: Rendered, kind: str) -> dict[str, Document]:
    return {each["metadata"]["name"]: each for each in documents_of(result) if each["kind"] == kind}


def test_quotas_are_those_of_the_pods() -> None:
    result = admin("--deploy.spot_max=3", "--deploy.head_memory_gb=8.6", "--deploy.worker_memory_gb=4.3")
    # 8.6 GB are 8.01 GiB: 9. One reserved pod of trainer and driver, in which KubeRay adds 1000m and 712Mi;
    # 3 preemptible pods of 5 GiB and one CPU.
    assert by_kind(result, "ClusterQueue")["spec"] == {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "default"}},
        "resourceGroups": [
            {
                "coveredResources": ["cpu", "memory"],
                "flavors": [
                    {
                        "name": "team-reserved",
                        "resources": [
                            {"name": "cpu", "nominalQuota": "3"},
                            {"name": "memory", "nominalQuota": "10Gi"},
                        ],
                    },
                    {
                        "name": "team-spot",
                        "resources": [
                            {"name": "cpu", "nominalQuota": "3"},
                            {"name": "memory", "nominalQuota": "15Gi"},
                        ],
                    },
                ],
            }
        ],
    }
    flavors = named(result, "ResourceFlavor")
    assert {name: each["spec"] for name, each in flavors.items()} == {
        "team-reserved": {},
        "team-spot": {"nodeLabels": {"cloud.google.com/gke-spot": "true"}},
    }
    queue = by_kind(result, "LocalQueue")
    assert (queue["metadata"]["namespace"], queue["spec"]) == ("default", {"clusterQueue": "team"})


def test_a_sweep_has_no_containers_of_kuberay() -> None:
    result = admin("--deploy.sweep.seeds=[1, 2]", "--deploy.head_memory_gb=8.6")
    ((flavor,),) = [group["flavors"] for group in by_kind(result, "ClusterQueue")["spec"]["resourceGroups"]]
    assert [each["nominalQuota"] for each in flavor["resources"]] == ["4", "18Gi"]


def test_flex_start_provisions_the_gpus_of_the_reserved_part_only() -> None:
    result = admin("--deploy.flex_start", *GPUS)
    strategy = by_kind(result, "ClusterQueue")["spec"]["admissionChecksStrategy"]
    assert strategy == {"admissionChecks": [{"name": "team-flex-start", "onFlavors": ["team-reserved"]}]}
    assert by_kind(result, "AdmissionCheck")["spec"] == {
        "controllerName": "kueue.x-k8s.io/provisioning-request",
        "parameters": {"apiGroup": "kueue.x-k8s.io", "kind": "ProvisioningRequestConfig", "name": "team-flex-start"},
    }
    config = by_kind(result, "ProvisioningRequestConfig")["spec"]
    assert config["provisioningClassName"] == "queued-provisioning.gke.io"
    assert config["managedResources"] == ["nvidia.com/gpu"]
    assert config["parameters"] == {"maxRunDurationSeconds": "604800"}


def test_monitoring_of_the_run_and_of_gpus() -> None:
    options = ("--deploy.metrics_token=metrics/token", "--telemetry.port=9300", *GPUS)
    result = admin(*options)
    monitors = named(result, "PodMonitoring")
    (endpoint,) = monitors["small-metrics"]["spec"]["endpoints"]
    assert (endpoint["port"], endpoint["path"]) == (9300, "/metrics")
    assert endpoint["authorization"] == {
        "type": "Bearer",
        "credentials": {"secret": {"name": "metrics", "key": "token"}},
    }
    assert monitors["tidemill-gpus"]["spec"]["selector"]["matchLabels"] == {"app": "nvidia-dcgm-exporter"}
    (rule,) = by_kind(result, "Role")["rules"]
    assert rule["resourceNames"] == ["metrics"]  # the collector reads no other Secret
    assert any("telemetry.host" in line for line in result.notes)


def test_the_priority_class_is_rendered_and_named_by_reserved_pods(rendered: RenderRecipe) -> None:
    assert by_kind(admin("--deploy.priority_class=train"), "PriorityClass")["value"] == 1000
    cluster = by_kind(rendered("--deploy.priority_class=train"), "RayJob")["spec"]["rayClusterSpec"]
    assert cluster["headGroupSpec"]["template"]["spec"]["priorityClassName"] == "train"
    assert "priorityClassName" not in cluster["workerGroupSpecs"][0]["template"]["spec"]


def test_deleting_a_job_leaves_the_administrators_part() -> None:
    for document in documents_of(admin("--deploy.flex_start", "--deploy.priority_class=high", *GPUS)):
        assert "app.kubernetes.io/instance" not in document["metadata"]["labels"]


def test_nothing_for_the_administrator() -> None:
    with pytest.raises(UserError, match="needs nothing of an administrator"):
        admin("--deploy.queue=", recipe=RECIPE)


def test_the_schemas_accept_it() -> None:
    options = ("--deploy.flex_start", "--deploy.metrics_token=a/b", "--telemetry.port=9300", *GPUS)
    result = admin(*options)
    validated = [document["kind"] for document in documents_of(result) if validate(document)]
    assert validated == [kind for kind in kinds(result) if kind not in ("Role", "RoleBinding")]
