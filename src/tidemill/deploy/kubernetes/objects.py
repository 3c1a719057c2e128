"""Objects of Kubernetes as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tidemill.config.deploy import DeployConfig
from tidemill.deploy.documents import Document, to_yaml


def files_of(documents: Iterable[Document]) -> dict[str, str]:
    """One file for each document, as `01-configmap-NAME.yaml`."""
    return {
        f"{index:02d}-{document['kind'].lower()}-{document['metadata']['name']}.yaml": to_yaml(document)
        for index, document in enumerate(documents, 1)
    }


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
