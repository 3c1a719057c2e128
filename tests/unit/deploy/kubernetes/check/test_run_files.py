from __future__ import annotations

from typing import Any

from tidemill.deploy.kubernetes.check.lints import reference_findings

RECIPE = {
    "kind": "ConfigMap",
    "metadata": {"name": "recipe"},
    "data": {"recipe.toml": '[run]\nname = "a"\ndir = "/data/a"\n'},
}
CLAIM = {"kind": "PersistentVolumeClaim", "metadata": {"name": "runs"}}
FUSE = {"csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": {"bucketName": "b"}}}
DISK = {"persistentVolumeClaim": {"claimName": "runs"}}
FILES = {"configMap": {"name": "recipe"}}


def found(command: str, **mounted: Any) -> list[tuple[str, str]]:
    """Fields and words of the findings in a head that runs a command and has volumes mounted at /NAME."""
    volumes = [{"name": name, **source} for name, source in mounted.items()]
    mounts = [{"name": name, "mountPath": f"/{name}"} for name in mounted]
    template = {
        "metadata": {"annotations": {"gke-gcsfuse/volumes": "true"}},
        "spec": {"containers": [{"name": "head", "volumeMounts": mounts}], "volumes": volumes},
    }
    spec = {"entrypoint": command, "rayClusterSpec": {"headGroupSpec": {"template": template}}}
    job = {"kind": "RayJob", "metadata": {"name": "job"}, "spec": spec}
    return [(each.field, each.what) for each in reference_findings(job, [job, RECIPE, CLAIM])]


def test_the_recipe_of_a_command() -> None:
    assert found("tidemill train @/recipe/recipe.toml", recipe=FILES, data=DISK) == []
    (missing,) = found("tidemill train @/recipe/other.toml", recipe=FILES, runs=DISK)
    assert missing == ("spec.entrypoint", "ConfigMap recipe has no other.toml")
    (unmounted,) = found("tidemill train @/etc/recipe.toml", recipe=FILES, data=DISK)
    assert unmounted == ("spec.entrypoint", "/etc/recipe.toml: nothing is mounted there")


def test_a_run_directory_that_is_lost_with_its_pod() -> None:
    ((field, what),) = found("tidemill train @/recipe/recipe.toml", recipe=FILES, runs=DISK)
    assert field.endswith("spec.containers") and "nothing is mounted at the run directory /data/a" in what
    assert found("tidemill train @/recipe/recipe.toml --run.dir=/runs/b", recipe=FILES, runs=DISK) == []
    assert "emptyDir" in found("tidemill train @char-addition", runs={"emptyDir": {}})[0][1]
    assert found("python evaluate.py") == []  # no training


def test_the_run_directory_on_a_bucket() -> None:
    assert found("tidemill train @char-addition", runs=DISK, models=FUSE) == []
    for command in ("tidemill train @char-addition --run.dir /models/a", "tidemill train @/recipe/recipe.toml"):
        folder = "models" if "models" in command else "data"
        ((field, what),) = found(command, recipe=FILES, **{folder: FUSE})
        assert field.endswith("volumeMounts[1].name") and "FUSE" in what
