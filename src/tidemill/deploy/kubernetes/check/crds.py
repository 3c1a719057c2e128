"""Schemas of kinds: a cluster's CRDs for custom resources, kubernetes-validate for core kinds.

As the API server in strict mode: nulls are dropped and defaults applied, then unknown fields, types and bounds, keys of
lists, and those CEL rules that do not compare with an older object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path as FilePath
from typing import Any

import yaml

from tidemill.core.errors import UserError
from tidemill.deploy.documents import Document
from tidemill.deploy.kubernetes.check.findings import Finding, Path, at, closest, did_you_mean, extra, finding
from tidemill.deploy.kubernetes.check.rules import CONDITION_ERRORS, compiled, misspelt

Schema = Mapping[str, Any]
KUBERNETES = "1.37.0"
EXPORT = "kubectl get crds -o yaml > crds.yaml"
METADATA = "https://kubernetes.io/api/_definitions.json#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
CORE_VERSIONS = ("v1", "apps/v1", "batch/v1", "policy/v1", "scheduling.k8s.io/v1", "rbac.authorization.k8s.io/v1")
HINTS = {
    "string": 'quote it: "{}"',
    "array": "a list: each item starts with `- `",
    "object": "a map: lines `key: value`",
    "boolean": "true or false, without quotes",
    "integer": "a whole number, without quotes",
}


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc] # not every build has the C loader
    """YAML as Kubernetes reads it: dates are strings, and a key stands once."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in rows if not tag.endswith(":timestamp")]
        for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value]
        if twice := next((key for key, _ in node.value if keys.count(key.value) > 1 and key.value != "<<"), None):
            raise yaml.constructor.ConstructorError(None, None, f"key {twice.value!r} stands twice", twice.start_mark)
        return super().construct_mapping(node, deep)


class Crds:
    """Schemas of custom resources, by apiVersion and kind."""

    def __init__(self, definitions: Sequence[Document] = ()) -> None:
        """Of CustomResourceDefinitions and Lists of them; other documents are skipped."""
        self.schemas: dict[tuple[str, str], Schema] = {}
        self._strict: dict[tuple[str, str], Schema] = {}
        for crd in (item for each in definitions for item in each.get("items") or [each]):
            for version in at(crd, "spec", "versions") or () if crd.get("kind") == "CustomResourceDefinition" else ():
                key = (f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"])
                self.schemas[key] = at(version, "schema", "openAPIV3Schema") or {}

    @classmethod
    def read(cls, path: FilePath) -> Crds:
        """Of the YAML files of a folder, or of the output of `kubectl get crds -o yaml`.

        Raises:
            UserError: the path holds no CRD or no YAML.
        """
        try:
            files = sorted(path.glob("*.y*ml")) if path.is_dir() else [path]
            read = [each for file in files for each in yaml.load_all(file.read_text(encoding="utf-8"), Loader)]
            crds = cls([each for each in read if isinstance(each, dict)])
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UserError(f"cannot read CRDs: {error}", where="--crds", hint=f"write them with `{EXPORT}`") from None
        if not crds.schemas:
            raise UserError(f"{path} holds no CRD", where="--crds", hint=f"write them with `{EXPORT}`")
        return crds

    def findings(self, document: Document) -> Iterator[Finding]:
        """Whatever the schema of the document's kind refuses."""
        version, kind = str(document.get("apiVersion") or ""), str(document.get("kind") or "")
        if not version or not kind:
            yield finding(("kind" if version else "apiVersion",), "missing", "a document has apiVersion and kind")
        elif schema := self.schemas.get((version, kind)):
            completed = with_defaults(schema, document)
            if (version, kind) not in self._strict:
                self._strict[version, kind] = _strict(schema, root=True)
            yield from _schema_findings(self._strict[version, kind], completed)
            yield from _list_and_rule_findings(schema, completed, ())
        elif core := _core_schema(version, kind):
            yield from _schema_findings(core, document)
        else:
            yield self._unknown_kind(version, kind)

    def _unknown_kind(self, version: str, kind: str) -> Finding:
        versions = [known for known, name in self.schemas if name == kind]
        versions += [each for each in CORE_VERSIONS if _core_schema(each, kind)]
        if versions:
            return finding(
                ("apiVersion",), f"{version} has no {kind}", f"did you mean {closest(version, versions, 0)}?"
            )
        kinds = [name for known, name in self.schemas if known == version]
        if close := closest(kind, kinds or [each for each in _core_kinds() if _core_schema(version, each)], 0.8):
            return finding(("kind",), f"{version} has no {kind}", f"did you mean {close}?")
        hint = f"if a CRD defines it: `{EXPORT}`, and name the file with --crds"
        return finding(("kind",), f"no schema for {version} {kind}; only lints apply", hint, warning=True)


def with_defaults(schema: Schema, value: Any) -> Any:
    """The value with the schema's defaults, and without nulls that it does not allow."""
    if isinstance(value, list):
        return [with_defaults(schema.get("items", {}), each) for each in value]
    if not isinstance(value, dict):
        return value
    other = schema.get("additionalProperties")
    known = schema.get("properties", {})
    inner = {key: known.get(key, other if isinstance(other, dict) else {}) for key in {*value, *known}}
    kept = {key: each for key, each in value.items() if each is not None or inner[key].get("nullable", not inner[key])}
    given = {key: each["default"] for key, each in known.items() if "default" in each} | kept
    return {key: with_defaults(inner[key], each) for key, each in given.items()}


def _strict(schema: Any, *, root: bool = False) -> Any:
    """The JSON schema of a structural schema: unknown fields are errors."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]} | {key: schema[key] for key in ("pattern",) if key in schema}
    out = {key: each for key, each in schema.items() if not key.startswith("x-") and key not in ("default", "nullable")}
    if schema.get("nullable") and "type" in schema:
        out["type"] = [schema["type"], "null"]
    if "properties" in schema:
        out["properties"] = {key: _strict(each) for key, each in schema["properties"].items()}
        if root or schema.get("x-kubernetes-embedded-resource"):
            out["properties"] |= {"apiVersion": {}, "kind": {}, "metadata": {"$ref": METADATA}}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            out.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if isinstance(out.get(key), dict):
            out[key] = _strict(out[key])
    if "pattern" in out:  # Go allows the flag anywhere
        out["pattern"] = re.sub(r"^(.*)\(\?i\)", r"(?i)\1", out["pattern"])
    if out.get("format") == "int32":
        out = {"minimum": -(2**31), "maximum": 2**31 - 1} | out
    return out


@cache
def _registry() -> Any:
    """With the definitions that the schemas of core kinds refer to."""
    contents = json.loads((_core_folder() / "_definitions.json").read_text(encoding="utf-8"))
    referencing = extra("referencing")
    return referencing.Resource.from_contents(contents) @ referencing.Registry()


def _core_folder() -> Any:
    return resources.files(extra("kubernetes_validate")) / f"kubernetes-json-schema/v{KUBERNETES}-local-strict"


@cache
def _core_schema(version: str, kind: str) -> Schema | None:
    """The JSON schema of a core kind; None if Kubernetes has no such kind."""
    group, _, name = version.rpartition("/")
    file = _core_folder() / f"{kind.lower()}-{'-'.join(filter(None, [group.split('.')[0], name]))}.json"
    if not re.fullmatch(r"[\w./-]+", version + kind) or not file.is_file():
        return None
    schema: Schema = json.loads(file.read_text(encoding="utf-8"))
    return schema if kind in (at(schema, "properties", "kind", "enum") or ()) else None


@cache
def _core_kinds() -> list[str]:
    definitions = json.loads((_core_folder() / "_definitions.json").read_text(encoding="utf-8"))["$defs"]
    return [name.rpartition(".")[2] for name, each in definitions.items() if "kind" in each.get("properties", {})]


def _schema_findings(schema: Schema, value: Any) -> Iterator[Finding]:
    validator = extra("jsonschema").Draft202012Validator(schema, registry=_registry())
    for error in validator.iter_errors(value):
        path, given, wanted = tuple(error.absolute_path), error.instance, error.validator_value
        if error.validator == "additionalProperties":
            known = error.schema.get("properties", {})
            for key in set(given) - set(known):
                others = ", ".join(sorted(set(known) - set(given))[:12])
                yield finding((*path, key), "unknown field", did_you_mean(key, known, f"known: {others}"))
        elif error.validator == "required":
            for key in set(wanted) - set(given):
                yield finding((*path, key), "missing", f"add {key}")
        elif error.validator == "type":
            hint = HINTS.get(wanted if isinstance(wanted, str) else wanted[0], f"a value of type {wanted}")
            hint = "one value, not a list or map" if isinstance(given, list | dict) and "{" in hint else hint
            yield finding(
                path, f"{json.dumps(given, default=str)[:60]} has the wrong type", hint.format(json.dumps(given))
            )
        elif error.validator == "enum":
            yield misspelt(path, given, [str(each) for each in wanted])
        elif error.validator == "pattern":
            hint = "a quantity such as 500m, 4 or 32Gi" if "KMGTPE" in wanted else f"it must match {wanted}"
            yield finding(path, f"{given!r} is not valid", hint)
        else:
            yield finding(path, error.message[:160], f"{error.validator}: {json.dumps(wanted)[:160]}")


def _list_and_rule_findings(schema: Schema, value: Any, path: Path) -> Iterator[Finding]:
    """Items of a list with the same key, and the CEL rules of a CRD."""
    for rule in schema.get("x-kubernetes-validations", ()) if value is not None else ():
        if "oldSelf" not in rule["rule"] and _refuses(rule["rule"], value):
            words = " ".join(rule.get("message", rule["rule"]).split())
            yield finding(path, words, f"the CRD's rule: {' '.join(rule['rule'].split())}")
    if isinstance(value, dict):
        other = schema.get("additionalProperties")
        for key, each in value.items():
            inner = schema.get("properties", {}).get(key, other)
            if isinstance(inner, dict):
                yield from _list_and_rule_findings(inner, each, (*path, key))
    elif isinstance(value, list):
        names = schema.get("x-kubernetes-list-map-keys", ())
        keys = [tuple(at(each, name) for name in names) if names else each for each in value]
        for index, each in enumerate(value):
            yield from _list_and_rule_findings(schema.get("items", {}), each, (*path, index))
            if (names or schema.get("x-kubernetes-list-type") == "set") and keys[index] in keys[:index]:
                yield finding((*path, index, *names[:1]), "stands twice in this list", "each must be unique")


def _refuses(rule: str, value: Any) -> bool:
    """Rules with a function that only Kubernetes has, such as isURL, refuse nothing here."""
    try:
        return compiled(rule).execute({"self": value}) is False
    except CONDITION_ERRORS:
        return False
