from __future__ import annotations

from typing import Any

import pytest

from tidemill.config.deploy import DeployConfig
from tidemill.deploy.kubernetes.pods import pod_template


def pod(*, spot: bool, gpus: int = 0, target: str = "gke", **settings: Any) -> Any:
    deploy = DeployConfig.model_validate({"target": target, "image": "i@sha256:0", **settings})
    role = "spot" if spot else "head"
    return pod_template(deploy, role, job="a", spot=spot, cpus=1, memory_gib=2, gpus=gpus, recipe="r")["spec"]


def test_spot_pods_of_gke() -> None:
    spec = pod(spot=True, gpus=1, accelerator="nvidia-l4", notice_s=25)
    assert spec["nodeSelector"] == {
        "cloud.google.com/gke-spot": "true",
        "cloud.google.com/gke-accelerator": "nvidia-l4",
    }
    assert [each["key"] for each in spec["tolerations"]] == ["cloud.google.com/gke-spot", "nvidia.com/gpu"]
    assert spec["terminationGracePeriodSeconds"] == 25
    assert spec["containers"][0]["resources"]["limits"] == {"cpu": "1", "memory": "2Gi", "nvidia.com/gpu": "1"}
    assert [each["name"] for each in spec["volumes"]] == ["recipe"]  # the disk is the head's


def test_reserved_pods_keep_off_spot_nodes() -> None:
    spec = pod(spot=False, reserved_selector={"pool": "train"})
    assert spec["nodeSelector"] == {"pool": "train"} and "tolerations" not in spec
    terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    expression = {"key": "cloud.google.com/gke-spot", "operator": "NotIn", "values": ["true"]}
    assert terms == [{"matchExpressions": [expression]}]
    assert [each["name"] for each in spec["volumes"]] == ["recipe", "runs"]


def test_other_clusters_have_no_labels_of_gke() -> None:
    labels = {"example.com/lifecycle": "spot"}
    assert "cloud.google.com" not in str(pod(spot=True, gpus=1, target="kubernetes", spot_selector=labels))
    spec = pod(spot=True, target="kubernetes", spot_selector=labels)
    assert spec["nodeSelector"] == labels
    assert spec["tolerations"][0]["key"] == "example.com/lifecycle"


@pytest.mark.parametrize(
    ("target", "models", "source"),
    [
        ("kubernetes", "weights", {"persistentVolumeClaim": {"claimName": "weights", "readOnly": True}}),
        (
            "gke",
            "gs://bucket/",
            {
                "csi": {
                    "driver": "gcsfuse.csi.storage.gke.io",
                    "readOnly": True,
                    "volumeAttributes": {"bucketName": "bucket", "mountOptions": "implicit-dirs,uid=1000,gid=1000"},
                }
            },
        ),
    ],
)
def test_models_are_read_only(target: str, models: str, source: dict[str, Any]) -> None:
    spec = pod(spot=True, target=target, models=models)
    assert spec["volumes"][-1] == {"name": "models", **source}
    assert spec["containers"][0]["volumeMounts"][-1] == {"name": "models", "mountPath": "/models", "readOnly": True}


def test_secrets_are_named_and_the_account_is_set() -> None:
    spec = pod(spot=True, secrets={"HF_TOKEN": "hub/token"}, service_account="trainer")
    reference = {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert spec["containers"][0]["env"] == [{"name": "HF_TOKEN", "valueFrom": reference}]
    assert spec["serviceAccountName"] == "trainer"
