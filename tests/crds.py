"""The schemas of custom resources, in `shared/data/crds` beside the project."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

jsonschema = pytest.importorskip("jsonschema")

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
INNER_FLAG = re.compile(r"(.*)\(\?i\)")
"""Go allows a flag inside an expression, Python at its start."""
HERE = Path(__file__).resolve()
FOLDER = next((up / "shared/data/crds" for up in HERE.parents if (up / "shared/data/crds").is_dir()), None)


@cache
def schema_of(api_version: str, kind: str) -> dict[str, Any] | None:
    """None if no file has it."""
    if FOLDER is None:
        pytest.skip("there is no folder shared/data/crds")
    group, _, name = api_version.partition("/")
    path = FOLDER / f"{group}_{kind.lower()}s.yaml"
    if not path.is_file():
        return None
    versions = yaml.load(path.read_bytes(), LOADER)["spec"]["versions"]
    (version,) = [each for each in versions if each["name"] == name]
    return dict(_closed(version["schema"]["openAPIV3Schema"]))


def _closed(schema: Any) -> Any:
    """The schema, in which unknown keys are errors, as for the API server with strict validation."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(pattern := schema.get("pattern"), str):
        closed["pattern"] = INNER_FLAG.sub(r"(?i)\1", pattern)
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    return closed


def validate(document: dict[str, Any]) -> bool:
    """Whether there is a schema of the document. Raises ValidationError: the document is invalid."""
    schema = schema_of(document["apiVersion"], document["kind"])
    for error in jsonschema.Draft202012Validator(schema).iter_errors(document) if schema else ():
        raise error
    return schema is not None
