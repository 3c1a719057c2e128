"""Names, labels, quantities and references: what Kubernetes refuses inside a document or between several."""

from __future__ import annotations

import re
import tomllib
from base64 import b64decode
from collections.abc import Iterator, Sequence
from typing import Any

from tidemill.deploy.documents import LONGEST_NAME, Document
from tidemill.deploy.kubernetes.check.findings import Finding, Path, at, closest, did_you_mean, finding, get
from tidemill.deploy.kubernetes.check.rules import parts, pods, quantity
from tidemill.deploy.kubernetes.check.run_files import is_fuse, run_findings

DOMAIN = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
LETTER_FIRST = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LONGEST = {"RayJob": LONGEST_NAME, "RayCluster": 53, "Service": 63, "JobSet": 63}
LABEL_KEY = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?")
RESOURCES = ("cpu", "memory", "ephemeral-storage", "nvidia.com/gpu", "google.com/tpu", "amd.com/gpu")
LONGEST_CONFIG_MAP = 2**20  # bytes
# Where one document names another: part, path of the name, kind.
NAMES = (
    ("LocalQueue", "spec.clusterQueue", "ClusterQueue"),
    ("any", "metadata.labels.kueue.x-k8s.io/queue-name", "LocalQueue"),
    ("volume", "configMap.name", "ConfigMap"),
    ("volume", "secret.secretName", "Secret"),
    ("volume", "persistentVolumeClaim.claimName", "PersistentVolumeClaim"),
    ("env", "valueFrom.secretKeyRef.name", "Secret"),
    ("env", "valueFrom.configMapKeyRef.name", "ConfigMap"),
    ("pod", "priorityClassName", "PriorityClass"),
    ("flavor", "name", "ResourceFlavor"),
    ("check", "name", "AdmissionCheck"),
    ("AdmissionCheck", "spec.parameters.name", "ProvisioningRequestConfig"),
    ("SandboxWarmPool", "spec.sandboxTemplateRef.name", "SandboxTemplate"),
)
USER_KINDS = ("ConfigMap", "Secret", "PersistentVolumeClaim")
SELECTORS = {"Service": "spec.selector"} | dict.fromkeys(
    ("PodDisruptionBudget", "PodMonitoring", "InferencePool", "Deployment"), "spec.selector.matchLabels"
)


def document_findings(document: Document) -> Iterator[Finding]:
    """Of one document: its name, labels and quantities."""
    kind, name = str(document.get("kind")), at(document, "metadata", "name")
    if not name and not at(document, "metadata", "generateName"):
        yield finding(("metadata", "name"), "missing", "add a name")
    longest, first = LONGEST.get(kind, 253), LETTER_FIRST if kind in LONGEST else DOMAIN
    if name and (not first.fullmatch(str(name)) or len(str(name)) > longest):
        hint = f"{'a letter, then ' if kind in LONGEST else ''}lower-case letters, digits and -; at most {longest}"
        yield finding(("metadata", "name"), f"{name!r} ({len(str(name))} characters) is not valid", hint)
    size = sum(len(str(text).encode()) for text in (document.get("data") or {}).values())
    if kind == "ConfigMap" and size > LONGEST_CONFIG_MAP:
        yield finding(("data",), f"{size} bytes, more than 1 MiB", "put large files on the storage")
    yield from _data_findings(kind, document.get("data") or {})
    yield from _label_findings(document, ())
    for part, path, value, _ in parts(document):
        if part == "container":
            yield from _resource_findings((*path, "resources"), value.get("resources") or {})


def _data_findings(kind: str, data: Document) -> Iterator[Finding]:
    for name, text in data.items():
        if kind == "ConfigMap" and name.endswith(".toml"):
            try:
                tomllib.loads(str(text))
            except tomllib.TOMLDecodeError as error:
                yield finding(("data", name), f"not TOML: {error}", "render it again")
        elif kind == "Secret":
            try:
                b64decode(str(text), validate=True)
            except ValueError:
                yield finding(("data", name), "not base64", "move it to stringData, or encode it")


def _label_findings(value: Any, path: Path) -> Iterator[Finding]:
    if path[-1:] in (("labels",), ("annotations",), ("matchLabels",)) and isinstance(value, dict):
        for key, text in value.items():
            if not LABEL_KEY.fullmatch(str(key)):
                yield finding((*path, key), "the key is not valid", "DOMAIN/NAME; the name has at most 63 characters")
            elif path[-1] != "annotations" and not LABEL_VALUE.fullmatch(str(text)):
                yield finding((*path, key), f"{text!r} is not valid", "at most 63 letters, digits, -, _ and .")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        if key not in ("data", "stringData"):
            yield from _label_findings(each, (*path, key))


def _resource_findings(path: Path, resources: Document) -> Iterator[Finding]:
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for group, values in (("limits", limits), ("requests", requests)):
        for name, value in values.items():
            where, amount = (*path, group, name), quantity(value)
            if amount is None:
                yield finding(where, f"{value!r} is no quantity", "cores as 4 or 500m; bytes as 32Gi or 512Mi")
            elif name == "cpu" and amount >= 1000:
                yield finding(where, f"{amount:g} cores", f"did you mean {value}m?")
            elif "/" in name and not amount.is_integer():
                yield finding(where, f"{value} devices", "whole devices only")
            elif name == "memory" and amount < 2**20:
                unit = "Mi" if str(value).endswith("m") else "Gi"
                yield finding(where, f"{amount:g} bytes", f"did you mean {str(value).rstrip('m')}{unit}?")
            elif name not in RESOURCES and not name.startswith("hugepages-"):
                close = closest(
                    "nvidia.com/" + name if name.startswith("gpu") else name, RESOURCES, 0.93 if "/" in name else 0.6
                )
                if close or "/" not in name:
                    hint = f"did you mean {close}?" if close else f"one of {', '.join(RESOURCES)}"
                    yield finding(where, "no resource of a node", hint)
    for name, value in requests.items():
        asked, limit = quantity(value), quantity(limits.get(name, ""))
        if "/" in name and asked != limit:
            yield finding((*path, "requests", name), f"{value} is not the limit", "for devices both must be equal")
        elif asked is not None and limit is not None and asked > limit:
            hint = f"raise limits.{name}, or lower the request"
            yield finding((*path, "requests", name), f"{value} is above the limit {limits[name]}", hint)


def reference_findings(document: Document, documents: Sequence[Document]) -> Iterator[Finding]:
    """Between documents: double names, names that nothing defines, selectors that select nothing, files of runs."""
    same = [each for each in documents if _identity(each) == _identity(document)]
    if len(same) > 1 and same[-1] is document and at(document, "metadata", "name"):
        yield finding(("metadata", "name"), "another document has this kind and name", "rename one of them")
    yield from _selector_findings(document, documents)
    yield from run_findings(document, documents)
    yield from _quota_findings(document, documents)
    for part, path, value, around in parts(document):
        for owner, where, kind in NAMES:
            if owner == part and (name := at(value, *_split(where))):
                yield from _missing(document, documents, (*path, *_split(where)), kind, name, value)
        if part == "volume" and is_fuse(value):
            owner_path = next(each for each, pod in pods(document) if pod is around["pod"])[:-1]
            if at(document, *owner_path, "metadata", "annotations", "gke-gcsfuse/volumes") != "true":
                where_path = (*owner_path, "metadata", "annotations", "gke-gcsfuse/volumes")
                yield finding(where_path, "missing: the mount would hang", 'add gke-gcsfuse/volumes: "true"')


def _split(path: str) -> list[str]:
    first, _, label = path.partition("labels.")
    return [*first.split(".")[:-1], "labels", label] if label else path.split(".")


def _identity(document: Document) -> tuple[Any, ...]:
    return document.get("kind"), at(document, "metadata", "namespace"), at(document, "metadata", "name")


def _quota_findings(document: Document, documents: Sequence[Document]) -> Iterator[Finding]:
    """Pods that no flavor of their queue has room for."""
    queue = at(document, "metadata", "labels", "kueue.x-k8s.io/queue-name")
    local = [each for each in documents if each.get("kind") == "LocalQueue" and at(each, "metadata", "name") == queue]
    name = get(local[0], "spec.clusterQueue") if local else None
    quotas: dict[str, float] = {}
    for each in documents:
        if name and each.get("kind") == "ClusterQueue" and at(each, "metadata", "name") == name:
            for part, _, value, _ in parts(each):
                for row in (value.get("resources") or ()) if part == "flavor" else ():
                    most = quantity(row.get("nominalQuota", "")) or 0.0
                    quotas[row.get("name")] = max(quotas.get(row.get("name"), 0.0), most)
    for part, path, value, _ in parts(document):
        for resource, asked in (
            (at(value, "resources", "requests") or {}) if part == "container" and quotas else {}
        ).items():
            if (quantity(asked) or 0.0) > quotas.get(resource, 0.0):
                what = f"{asked}, more than any flavor of the ClusterQueue {name} has: never admitted"
                yield finding(
                    (*path, "resources", "requests", resource), what, "raise nominalQuota, or lower the request"
                )


def _missing(
    document: Document, documents: Sequence[Document], path: Path, kind: str, name: Any, part: Document
) -> Iterator[Finding]:
    """A warning if no document defines a name; an error if one is similar, in another namespace, or lacks the key."""
    known = {at(each, "metadata", "name"): each for each in documents if each.get("kind") == kind}
    source = at(part, "valueFrom", path[-2]) or at(part, path[-2]) or {}
    if source.get("optional"):
        return
    if name not in known:
        if known or kind in USER_KINDS:
            hint = did_you_mean(name, known, f"it must exist: kubectl get {kind.lower()} {name}", 0.8)
            what = f"no document defines {kind} {name}"
            yield finding(path, what, hint, warning=not closest(str(name), known, 0.8))
        return
    if not _together(document, known[name]):
        what = f"not that of {kind} {name}: {at(known[name], 'metadata', 'namespace')}"
        yield finding(("metadata", "namespace"), what, "use one namespace for all")
    keys = [*(known[name].get("data") or {}), *(known[name].get("stringData") or {})]
    for key in [source.get("key"), *(each.get("key") for each in source.get("items") or ())]:
        if key and kind in ("ConfigMap", "Secret") and key not in keys:
            where = (*path[:-1], "items" if "items" in source else "key")
            yield finding(where, f"{kind} {name} has no key {key}", did_you_mean(key, keys, "add it", 0))


def _together(one: Document, other: Document) -> bool:
    """Whether two documents may be in the same namespace; those without one are in that of the user's context."""
    spaces = {at(one, "metadata", "namespace"), at(other, "metadata", "namespace")} - {None}
    return len(spaces) < 2


def _selector_findings(document: Document, documents: Sequence[Document]) -> Iterator[Finding]:
    kind = str(document.get("kind"))
    path = SELECTORS.get(kind, "")
    wanted = get(document, path) if path else None
    owners = [document] if kind == "Deployment" else documents
    rows = [(each, pod, _pod_labels(each, where)) for each in owners for where, pod in pods(each)]
    if not wanted or not rows:
        return
    selected = [(each, pod) for each, pod, labels in rows if wanted.items() <= labels.items()]
    if not selected:
        if not any(_together(document, each) for each, _, _ in rows):  # it selects others, such as GPU exporters
            return
        known = {f"{key}: {value}" for _, _, labels in rows for key, value in labels.items()}
        lacking = next((pair for key, value in wanted.items() if (pair := f"{key}: {value}") not in known), "")
        hint = did_you_mean(lacking, known, "use labels of a pod template")
        yield finding(tuple(path.split(".")), f"selects no pod of these documents: {lacking}", hint)
    elif not any(_together(document, each) for each, _ in selected):
        hint = "a selector selects in its own namespace"
        yield finding(("metadata", "namespace"), "the selected pods are in another", hint)
    ports = [at(port, "name") for _, pod in selected for box in pod["containers"] for port in box.get("ports") or ()]
    for index, port in enumerate(get(document, "spec.ports") or () if kind == "Service" and selected else ()):
        if isinstance(target := port.get("targetPort"), str) and target not in ports:
            hint = f"named ports of the pods: {', '.join(filter(None, ports)) or 'none'}"
            yield finding(("spec", "ports", index, "targetPort"), f"no port {target}", hint)


def _pod_labels(document: Document, path: Path) -> dict[str, Any]:
    """Labels of a pod template, and those that KubeRay and JobSet add."""
    labels = dict(at(document, *path[:-1], "metadata", "labels") or {})
    if "rayClusterSpec" in path or document.get("kind") == "RayCluster":
        labels |= {"ray.io/node-type": "head" if "headGroupSpec" in path else "worker", "ray.io/is-ray-node": "yes"}
    if document.get("kind") == "JobSet":
        labels["jobset.sigs.k8s.io/jobset-name"] = at(document, "metadata", "name")
    return labels
