"""Documents of Kubernetes as plain data, and their text."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
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

    @property
    def text(self) -> str:
        """All documents as one YAML stream."""
        return "---\n".join(self.files.values())


def rendered(documents: Iterable[Document], notes: Iterable[str] = ()) -> Rendered:
    """One file for each document, as `01-configmap-NAME.yaml`."""
    files = {
        f"{index:02d}-{document['kind'].lower()}-{document['metadata']['name']}.yaml": to_yaml(document)
        for index, document in enumerate(documents, 1)
    }
    return Rendered(files=files, notes=list(notes))


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


def metadata(deploy: DeployConfig, name: str, *, job: str, **more: Any) -> Document:
    """Metadata with the labels that everything of a job has.

    Args:
        job: name of the job, whose documents `tidemill deploy` finds by the label.
        more: further fields; `labels` are added to those of the job.
    """
    labels = {**job_labels(job), **more.pop("labels", {})}
    return {"name": name, "namespace": deploy.namespace, "labels": labels, **more}


def resource(api: str, kind: str, about: Document, **fields: Any) -> Document:
    return {"apiVersion": api, "kind": kind, "metadata": about, **fields}


def job_labels(job: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "tidemill", "app.kubernetes.io/instance": job}


def kubernetes_name(text: str, longest: int = LONGEST_NAME) -> str:
    """A text as a name of Kubernetes; a long one is cut and gets a hash of the whole."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "run"
    name = name if name[0].isalpha() else f"run-{name}"  # the names of Services begin with a letter
    if len(name) <= longest:
        return name
    digest = hashlib.sha256(text.encode()).hexdigest()[:HASH]
    return f"{name[: longest - HASH - 1].rstrip('-')}-{digest}"
