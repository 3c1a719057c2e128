from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidemill.core.errors import UserError
from tidemill.deploy.kubernetes.check.crds import Crds, Loader

FOLDER = Path(__file__).parents[4] / "data" / "deploy" / "crds"
WIDGET: dict[str, Any] = {
    "apiVersion": "example.com/v1",
    "kind": "Widget",
    "metadata": {"name": "w"},
    "spec": {"size": 3},
}


def found(spec: dict[str, Any], **changes: Any) -> list[tuple[str, str]]:
    document = copy.deepcopy(WIDGET) | {"spec": {"size": 3} | spec} | changes
    return [(each.field, each.hint) for each in Crds.read(FOLDER).findings(document)]


@pytest.mark.parametrize(
    "spec",
    [
        {},  # `most` is required, and has a default
        {"most": None},  # a null of a field that is not nullable is dropped, then the default applies
        {"note": None},
        {"memory": 4},
        {"memory": "4Gi"},
        {"anything": {"a": {"b": [1]}}},
        {"embedded": {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"a": 1}}},
        {"items": [{"name": "a"}, {"name": "b", "active": True}]},
    ],
)
def test_accepted(spec: dict[str, Any]) -> None:
    assert found(spec) == []


@pytest.mark.parametrize(
    ("spec", "field", "hint"),
    [
        ({"sizes": 3}, "spec.sizes", "did you mean size?"),
        ({"size": "3"}, "spec.size", "a whole number, without quotes"),
        ({"size": -1}, "spec.size", "minimum: 0"),
        ({"size": 2**31, "most": 2**40}, "spec.size", "maximum: 2147483647"),
        ({"size": 11}, "spec", "the CRD's rule: self.size <= self.most"),
        ({"mode": "fast"}, "spec.mode", "did you mean Fast?"),
        ({"mode": "Medium"}, "spec.mode", "one of Fast, Slow"),
        ({"memory": "4GB"}, "spec.memory", "it must match ^[0-9]+([KMG]i)?$"),
        ({"link": True}, "spec.link", 'quote it: "true"'),
        ({"embedded": {"speck": {}}}, "spec.embedded.speck", "did you mean spec?"),
        ({"items": {"name": "a"}}, "spec.items", "a list: each item starts with `- `"),
        ({"items": [{"active": True}]}, "spec.items[0].name", "add name"),
        ({"items": [{"name": "a"}, {"name": "a"}]}, "spec.items[1].name", "each must be unique"),
    ],
)
def test_refused(spec: dict[str, Any], field: str, hint: str) -> None:
    assert (field, hint) in found(spec)


def test_metadata() -> None:
    assert found({}, metadata={"name": "w", "label": {}}) == [("metadata.label", "did you mean labels?")]


@pytest.mark.parametrize(
    ("version", "kind", "field", "hint"),
    [
        ("example.com/v2", "Widget", "apiVersion", "did you mean example.com/v1?"),
        ("example.com/v1", "Widgett", "kind", "did you mean Widget?"),
        ("apps/v1beta1", "Deployment", "apiVersion", "did you mean apps/v1?"),
        ("v1", "ConfigMaps", "kind", "did you mean ConfigMap?"),
        ("", "Widget", "apiVersion", "a document has apiVersion and kind"),
    ],
)
def test_kinds(version: str, kind: str, field: str, hint: str) -> None:
    (finding,) = Crds.read(FOLDER).findings(WIDGET | {"apiVersion": version, "kind": kind})
    assert (finding.field, finding.hint, finding.warning) == (field, hint, False)


def test_a_kind_without_a_schema_is_a_warning() -> None:
    (finding,) = Crds().findings(WIDGET)
    assert finding.warning and "--crds" in finding.hint


def test_core_kinds() -> None:
    claim = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": 1}, "dataa": {}}
    fields = {each.field: each.hint for each in Crds().findings(claim)}
    assert fields == {"data.a": 'quote it: "1"', "dataa": "did you mean data?"}


def test_the_output_of_kubectl(tmp_path: Path) -> None:
    definition = yaml.safe_load((FOLDER / "widgets.yaml").read_text())
    file = tmp_path / "crds.yaml"
    file.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": [definition]}))
    assert list(Crds.read(file).schemas) == [("example.com/v1", "Widget")]


@pytest.mark.parametrize("text", ["a: [", "a: 1", "- 1"])
def test_no_crds(tmp_path: Path, text: str) -> None:
    (tmp_path / "crds.yaml").write_text(text)
    with pytest.raises(UserError, match="--crds") as error:
        Crds.read(tmp_path)
    assert "kubectl get crds -o yaml" in str(error.value)


def test_yaml_as_kubernetes_reads_it() -> None:
    assert yaml.load("a: 2026-01-01", Loader) == {"a": "2026-01-01"}
    with pytest.raises(yaml.YAMLError, match="key 'a' stands twice"):
        yaml.load("a: 1\na: 2", Loader)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(UserError, match="needs the extra deploy") as error:
        found({})
    assert "pip install" in error.value.hint
