from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmarks.planted_deploy_faults import DOCUMENTS, KNOWN, SHARED, found, put
from tests.rotation import daily
from tidemill.core.errors import UserError
from tidemill.deploy.kubernetes.check.crds import Crds, Loader
from tidemill.deploy.kubernetes.check.documents import check, parsed, read_documents

needs_shared = pytest.mark.skipif(not (SHARED / "crds").is_dir(), reason="no CRDs and samples on this machine")
# Found by the schemas of CRDs only.
BY_SCHEMA = {
    "misspelt key of the cluster", "misspelt key of the job", "misspelt key of a pod", "misspelt key of a container",
    "replicas in quotes", "unknown autoscaler version", "unknown upscaling mode", "label without quotes",
    "annotation true without quotes", "start parameter without quotes", "containers as a map", "wrong apiVersion",
    "queue without quota", "job set with two equal jobs", "no containers", "unknown authentication",
}  # fmt: skip


@pytest.mark.parametrize("third", daily(range(3), 1))
def test_planted_defects_without_crds(third: int) -> None:
    documents, crds = read_documents(DOCUMENTS), Crds()
    before = check(documents, crds)
    assert [each for each in before if not each.warning] == []
    known = [(name, mutate) for name, mutate in KNOWN[third::3] if name not in BY_SCHEMA]
    assert [name for name, mutate in known if not found(documents, mutate, crds, before)] == []


@needs_shared
@pytest.mark.parametrize("third", daily(range(3), 1))
def test_planted_defects_with_crds(third: int) -> None:
    documents, crds = read_documents(DOCUMENTS), Crds.read(SHARED / "crds")
    before = check(documents, crds)
    assert [each for each in before if not each.warning] == []
    assert [name for name, mutate in KNOWN[third::3] if not found(documents, mutate, crds, before)] == []


@needs_shared
def test_no_false_alarm_in_documents_of_kuberay_and_kueue() -> None:
    crds, checked, errors = Crds.read(SHARED / "crds"), 0, []
    for file in sorted((SHARED / "samples").rglob("*.yaml")):
        try:
            read = list(yaml.load_all(file.read_text(), Loader))
        except yaml.YAMLError:  # a template
            continue
        documents = [each for each in read if isinstance(each, dict) and each.get("kind")]
        ours = [each for each in documents if (each.get("apiVersion"), each["kind"]) in crds.schemas]
        checked += len(ours)
        titles = {f"{each['kind']}/{each['metadata']['name']}" for each in ours if "name" in each["metadata"]}
        errors += [
            f"{file.name}: {each}" for each in check(documents, crds) if not each.warning and each.document in titles
        ]
    assert (checked, errors) == (141, [])


def test_one_finding_for_a_field_and_warnings_last() -> None:
    documents = read_documents(DOCUMENTS)
    put("RayJob", "spec.backoffLimit", -1)(documents)
    findings = check(documents, Crds())
    assert len({(each.document, each.field) for each in findings}) == len(findings)
    assert [each.warning for each in findings] == sorted(each.warning for each in findings)
    assert str(findings[0]).startswith("RayJob/spot: spec.backoffLimit: negative\n  ")


@pytest.mark.parametrize(("version", "warnings"), [("v1beta1", 1), ("v1beta2", 0)])
def test_a_kueue_that_is_too_old_for_an_elastic_job(version: str, warnings: int) -> None:
    names = {"group": "kueue.x-k8s.io", "names": {"kind": "LocalQueue"}, "versions": [{"name": version}]}
    job = {"kind": "RayJob", "metadata": {"name": "a", "annotations": {"kueue.x-k8s.io/elastic-job": "true"}}}
    found = check([job], Crds([{"kind": "CustomResourceDefinition", "spec": names}]))
    assert len([each for each in found if "Kueue is older than 0.15" in each.what and each.warning]) == warnings


def test_values_of_a_wrong_type_end_no_check() -> None:
    documents = read_documents(DOCUMENTS)
    for kind, field in (
        ("RayJob", "spec.rayClusterSpec.workerGroupSpecs[0].template.spec.volumes"),
        ("Service", "spec"),
    ):
        put(kind, field, 3)(documents)
    assert {"Service/gateway"} <= {each.document for each in check(documents, Crds()) if not each.warning}


def test_reading(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text("kind: B\n---\n---\nkind: List\nitems: [{kind: C}, {kind: D}]\n")
    (tmp_path / "a.yml").write_text("kind: A")
    assert [each["kind"] for each in read_documents(tmp_path)] == ["A", "B", "C", "D"]


@pytest.mark.parametrize(
    ("text", "words"), [("a: [", "while parsing"), ("- a", "a list, not a map"), ("a: 1\na: 2", "twice")]
)
def test_texts_that_are_no_documents(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parsed(text, "here")


def test_no_documents(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.yaml"):
        with pytest.raises(UserError):
            read_documents(path)
