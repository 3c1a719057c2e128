"""The documents of files, and all findings in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from tidemill.core.errors import UserError
from tidemill.deploy.documents import Document
from tidemill.deploy.kubernetes.check.crds import Crds, Loader
from tidemill.deploy.kubernetes.check.findings import Finding, at, finding, title
from tidemill.deploy.kubernetes.check.lints import document_findings, reference_findings
from tidemill.deploy.kubernetes.check.rules import rule_findings

KUEUE, ELASTIC = "kueue.x-k8s.io/", "kueue.x-k8s.io/elastic-job"


def read_documents(path: Path) -> list[Document]:
    """Of a YAML file, or of all in a folder in the order of their names; items of Lists are documents.

    Raises:
        UserError: no file, no YAML, or a document that is not a map.
    """
    files = sorted(path.glob("*.y*ml")) if path.is_dir() else [path]
    try:
        documents = [each for file in files for each in parsed(file.read_text(encoding="utf-8"), str(file))]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(str(error), where=str(path), hint="name a folder of YAML files, or one file") from None
    if not documents:
        raise UserError("no document", where=str(path), hint="`tidemill deploy render RECIPE --out FOLDER` writes them")
    return documents


def parsed(text: str, where: str) -> list[Document]:
    """The documents of a YAML stream. Raises UserError: no YAML, or a document that is not a map."""
    try:
        read = [each for each in yaml.load_all(text, Loader) if each is not None]
    except yaml.YAMLError as error:
        raise UserError(" ".join(str(error).split()), where=where, hint="Kubernetes reads no such file") from None
    if other := next((each for each in read if not isinstance(each, dict)), None):
        raise UserError(f"a {type(other).__name__}, not a map", where=where, hint="start with apiVersion and kind")
    return [item for each in read for item in (each["items"] if each.get("kind") == "List" else [each])]


def check(documents: Sequence[Document], crds: Crds) -> list[Finding]:
    """What the API server or an operator would refuse, then warnings; the first finding of each field.

    Raises:
        UserError: the extra `deploy` is not installed.
    """
    found: dict[tuple[str, str], Finding] = {}
    for document in documents:
        for each in _findings_of(document, documents, crds):
            found.setdefault((title(document), each.field), replace(each, document=title(document)))
    return sorted(found.values(), key=lambda each: each.warning)


def _findings_of(document: Document, documents: Sequence[Document], crds: Crds) -> Iterator[Finding]:
    refused = list(crds.findings(document))
    yield from refused
    yield from _kueue_findings(document, crds)
    for lints in (document_findings(document), rule_findings(document), reference_findings(document, documents)):
        try:
            yield from lints
        except (AttributeError, KeyError, TypeError):  # a value of a wrong type
            if not refused:
                raise


def _kueue_findings(document: Document, crds: Crds) -> Iterator[Finding]:
    """A warning if the CRDs are of a Kueue that is too old for an elastic RayJob."""
    versions = {version for version, _ in crds.schemas if version.startswith(KUEUE)}
    if versions and f"{KUEUE}v1beta2" not in versions and at(document, "metadata", "annotations", ELASTIC):
        what = "the cluster's Kueue is older than 0.15, and may refuse a job with an autoscaler"
        hint = "it needs 0.14.7, 0.15.2 or newer with the gate ElasticJobsViaWorkloadSlices, which 0.18 sets"
        yield finding(("metadata", "annotations", ELASTIC), what, hint, warning=True)
