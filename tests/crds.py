"""The schemas of custom resources, in `shared/data/crds` beside the project."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

INNER_FLAG = re.compile(r"(.*)\(\?i\)")
"""Go allows a flag inside an expression, Python at its start."""
HERE = Path(__file__).resolve()
FOLDER = next((up / "shared/data/crds" for up in HERE.parents if (up / "shared/data/crds").is_dir()), None)


@cache
def schemas() -> dict[tuple[str, str], dict[str, Any]]:
    """By API version and kind."""
    if FOLDER is None:
        pytest.skip("there is no folder shared/data/crds")
    found = dict[tuple[str, str], dict[str, Any]]()
    for path in sorted(FOLDER.glob("*.yaml")):
        spec = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]
        for version in spec["versions"]:
            schema = version["schema"]["openAPIV3Schema"]
            found[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = _closed(schema)
    return found


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
    schema = schemas().get((document["apiVersion"], document["kind"]))
    if schema is not None:
        jsonschema.validate(document, schema)
    return schema is not None
