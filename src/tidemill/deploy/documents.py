"""What is rendered: documents as plain data, their text, and files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import yaml

from tidemill.config.deploy import DeployConfig

Document: TypeAlias = dict[str, Any]
LONGEST_NAME = 47
"""Characters of a RayJob's name: KubeRay appends to it, and Kubernetes allows 63."""
HASH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """The text of each file by name, in the order in which they are applied, and remarks for the user."""

    files: dict[str, str]
    notes: list[str] = field(default_factory=list)
    job: str = ""  # its name
    deploy: DeployConfig = field(default_factory=DeployConfig)

    @property
    def text(self) -> str:
        """All documents as one YAML stream."""
        return "---\n".join(self.files.values())


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and equal objects twice instead of as aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def to_yaml(document: Mapping[str, Any]) -> str:
    """The same bytes for equal documents; keys keep their order."""
    return yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def job_name(text: str, longest: int = LONGEST_NAME) -> str:
    """A text as a name that every target takes; a long one is cut and gets a hash of the whole."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "run"
    name = name if name[0].isalpha() else f"run-{name}"  # the names of Services begin with a letter
    if len(name) <= longest:
        return name
    digest = hashlib.sha256(text.encode()).hexdigest()[:HASH]
    return f"{name[: longest - HASH - 1].rstrip('-')}-{digest}"
