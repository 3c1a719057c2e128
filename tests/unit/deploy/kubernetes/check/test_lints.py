from __future__ import annotations

import copy
from typing import Any

import pytest

from tidemill.deploy.kubernetes.check.findings import Finding, closest, dotted
from tidemill.deploy.kubernetes.check.lints import document_findings, reference_findings

POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "p", "namespace": "a", "labels": {"role": "head"}},
    "spec": {
        "containers": [{"name": "c", "image": "i", "resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "2"}}}]
    },
}


def pod(**resources: Any) -> dict[str, Any]:
    document = copy.deepcopy(POD)
    document["spec"]["containers"][0]["resources"] = resources
    return document


def named(kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "metadata": {"name": name, "namespace": more.pop("namespace", "a")}, **more}


def test_a_pod_without_findings() -> None:
    assert [*document_findings(POD), *reference_findings(POD, [POD])] == []


@pytest.mark.parametrize(
    ("resources", "field", "hint"),
    [
        ({"limits": {"memory": "32GB"}}, "limits.memory", "cores as 4 or 500m; bytes as 32Gi or 512Mi"),
        ({"limits": {"memory": "512m"}}, "limits.memory", "did you mean 512Mi?"),
        ({"limits": {"cpu": 4000}}, "limits.cpu", "did you mean 4000m?"),
        ({"limits": {"gpu": 1}}, "limits.gpu", "did you mean nvidia.com/gpu?"),
        ({"limits": {"nvidia.com/gpus": 1}}, "limits[nvidia.com/gpus]", "did you mean nvidia.com/gpu?"),
        ({"limits": {"nvidia.com/gpu": "0.5"}}, "limits[nvidia.com/gpu]", "whole devices only"),
        ({"requests": {"nvidia.com/gpu": 1}}, "requests[nvidia.com/gpu]", "for devices both must be equal"),
        (
            {"requests": {"cpu": "1500m"}, "limits": {"cpu": 1}},
            "requests.cpu",
            "raise limits.cpu, or lower the request",
        ),
    ],
)
def test_resources(resources: dict[str, Any], field: str, hint: str) -> None:
    found = [(each.field, each.hint) for each in document_findings(pod(**resources))]
    assert found == [(f"spec.containers[0].resources.{field}", hint)]


@pytest.mark.parametrize(
    ("kind", "name", "is_valid"),
    [
        ("RayJob", "a" * 47, True),
        ("RayJob", "a" * 48, False),
        ("RayJob", "1a", False),
        ("ConfigMap", "1.a", True),
        ("ConfigMap", "a_b", False),
        ("ConfigMap", "", False),
    ],
)
def test_names(kind: str, name: str, is_valid: bool) -> None:
    assert [each.field for each in document_findings(named(kind, name))] == ([] if is_valid else ["metadata.name"])


def test_labels() -> None:
    document = named("ConfigMap", "c")
    document["metadata"] |= {"labels": {"a/b/c": "x", "d": "e f"}, "annotations": {"g": "h i"}}
    assert [each.field for each in document_findings(document)] == ["metadata.labels[a/b/c]", "metadata.labels.d"]


def test_a_config_map_may_hold_a_mebibyte() -> None:
    assert not list(document_findings(named("ConfigMap", "c", data={"a": "é" * 2**19})))
    (finding,) = document_findings(named("ConfigMap", "c", data={"a": "é" * 2**19 + "a"}))
    assert finding.field == "data"


def references(*others: dict[str, Any], **source: Any) -> list[tuple[str, str, bool]]:
    document = copy.deepcopy(POD)
    document["spec"]["volumes"] = [{"name": "v", **source}]
    found = reference_findings(document, [document, *others])
    return [(each.field, each.hint, each.warning) for each in found]


def test_references() -> None:
    field = "spec.volumes[0].configMap.name"
    source = {"configMap": {"name": "recipe"}}
    assert references(**source) == [(field, "it must exist: kubectl get configmap recipe", True)]
    assert references(configMap={"name": "recipe", "optional": True}) == []
    assert references(named("ConfigMap", "recipes"), **source) == [(field, "did you mean recipes?", False)]
    assert references(named("ConfigMap", "recipe"), **source) == []
    elsewhere = named("ConfigMap", "recipe", namespace="b")
    assert references(elsewhere, **source) == [("metadata.namespace", "use one namespace for all", False)]
    keyed = {"configMap": {"name": "recipe", "items": [{"key": "recipe.tml", "path": "r"}]}}
    recipe = named("ConfigMap", "recipe", data={"recipe.toml": ""})
    assert references(recipe, **keyed) == [("spec.volumes[0].configMap.items", "did you mean recipe.toml?", False)]


def test_a_pod_larger_than_the_quota_of_its_queue() -> None:
    document = pod(requests={"cpu": "4"}, limits={"cpu": "4"})
    document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "q"}
    queue = named("LocalQueue", "q", spec={"clusterQueue": "c"})

    def found(*quotas: int) -> list[str]:
        flavors = [{"name": str(quota), "resources": [{"name": "cpu", "nominalQuota": quota}]} for quota in quotas]
        cluster = named("ClusterQueue", "c", spec={"resourceGroups": [{"flavors": flavors}]})
        return [each.field for each in reference_findings(document, [document, queue, cluster])]

    assert found(3, 4) == []
    assert found(3, 3) == ["spec.containers[0].resources.requests.cpu"]


def test_selectors() -> None:
    def found(**labels: str) -> list[Finding]:
        budget = named("PodDisruptionBudget", "b", spec={"selector": {"matchLabels": labels}})
        return list(reference_findings(budget, [budget, POD]))

    assert found(role="head") == []
    (finding,) = found(role="heads")
    assert (finding.field, finding.hint) == ("spec.selector.matchLabels", "did you mean role: head?")


def test_a_selector_of_a_namespace_without_documents() -> None:
    exporter = named(
        "PodMonitoring", "g", namespace="gpu-operator", spec={"selector": {"matchLabels": {"app": "dcgm"}}}
    )
    assert list(reference_findings(exporter, [exporter, POD])) == []


def test_fields() -> None:
    assert dotted(("spec", "items", 0, "labels", "a/b.c")) == "spec.items[0].labels[a/b.c]"
    assert closest("Fast", ["slow", "fast"]) == "fast"
    assert closest("x", ["slow", "fast"]) == ""
