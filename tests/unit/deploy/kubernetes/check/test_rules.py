from __future__ import annotations

from typing import Any

import pytest

from benchmarks.planted_deploy_faults import DOCUMENTS
from tidemill.deploy.kubernetes.check.documents import read_documents
from tidemill.deploy.kubernetes.check.rules import (
    FUNCTIONS,
    ITEMS,
    compiled,
    is_spot,
    parts,
    quantity,
    rule_findings,
    table,
)

PLACES = {"any", "cluster", "group", "pod", *(item for items in ITEMS.values() for item in items.values())}
KINDS = {"RayJob", "JobSet", "ClusterQueue", "AdmissionCheck", "ProvisioningRequestConfig", "SandboxTemplate",
         "PodDisruptionBudget", "PersistentVolumeClaim", "Deployment", "Job", "Service"}  # fmt: skip


def test_every_condition_compiles_and_knows_its_functions() -> None:
    builtin = {
        "has",
        "size",
        "matches",
        "contains",
        "startsWith",
        "endsWith",
        "type",
        "exists",
        "all",
        "filter",
        "map",
        "string",
    }
    for part, rows in table().items():
        for _, condition, what, hint in rows if isinstance(rows, list) else ():
            named = {
                name for name in compiled(condition).functions() if name.isidentifier() and not name.startswith("_")
            }
            assert named <= builtin | set(FUNCTIONS), (part, condition)
            assert what and hint


def test_every_rule_names_a_part() -> None:
    named = {part.split(" ")[0] for group in ("names", "keys", "values") for part in table()[group]}
    assert named | {part for part, rows in table().items() if isinstance(rows, list)} <= PLACES | KINDS


def test_parts() -> None:
    (job,) = [each for each in read_documents(DOCUMENTS) if each["kind"] == "RayJob"]
    names = [name for name, *_ in parts(job)]
    assert names[:3] == ["any", "RayJob", "cluster"]
    # Head and one group; two pods with one container each; 2 + 2 variables; 3 + 1 mounts.
    assert [names.count(name) for name in ("group", "pod", "container", "env", "mount")] == [2, 2, 2, 4, 4]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("32Gi", 32 * 2**30),
        ("500m", 0.5),
        (4, 4.0),
        ("1e3", 1000.0),
        ("2k", 2000.0),
        ("32GB", None),
        ("", None),
        ("4 Gi", None),
    ],
)
def test_quantities(text: object, value: float | None) -> None:
    assert quantity(text) == value


def test_spot_nodes() -> None:
    assert is_spot({"nodeSelector": {"cloud.google.com/gke-spot": "true"}})
    assert not is_spot({}) and not is_spot({"nodeSelector": {"cloud.google.com/gke-spot": "false"}})


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"kind": "Service", "spec": {"ports": [{"port": 80}, {"port": 81}]}}, "spec.ports"),
        ({"kind": "Deployment", "spec": {"strategy": {"type": "Recreate", "rollingUpdate": {}}}},
         "spec.strategy.rollingUpdate"),
        ({"kind": "ClusterQueue", "spec": {"resourceGroups": []}}, "spec.namespaceSelector"),
        ({"kind": "PersistentVolumeClaim",
          "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "100GB"}}}},
         "spec.resources.requests.storage"),
        ({"kind": "RayJob", "metadata": {"annotations": {"kueue.x-k8s.io/queue-name": "team"}}},
         "metadata.annotations"),
        ({"kind": "Job", "spec": {"completionMode": "indexed"}}, "spec.completionMode"),
        ({"kind": "Pod", "spec": {"serviceAccountName": "me@project", "containers": []}}, "spec.serviceAccountName"),
        ({"kind": "Pod", "spec": {"containers": [{"image": "a@sha256:" + 64 * "0",
                                                  "livenessProbe": {"tcpSocket": {}, "exec": {}}}]}},
         "spec.containers[0].livenessProbe"),
    ],
)  # fmt: skip
def test_what_no_schema_refuses(document: dict[str, Any], field: str) -> None:
    assert field in {each.field for each in rule_findings(document)}
