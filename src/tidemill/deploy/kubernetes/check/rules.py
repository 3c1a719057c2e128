"""Applies rules.toml: what Kubernetes and its operators refuse although no schema says so."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import yaml
from packaging.version import InvalidVersion, Version

from tidemill.deploy.documents import Document
from tidemill.deploy.kubernetes.check.findings import Finding, Path, at, closest, did_you_mean, extra, finding, get

SPOT_KEYS = ("cloud.google.com/gke-spot", "cloud.google.com/gke-preemptible")
QUANTITY = re.compile(r"\+?(\d+\.?\d*|\.\d+)([eE][+-]?\d+|[KMGTPE]i|[numkMGTPE])?")
SCALES = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "": 1.0}
SCALES |= {letter: 1000.0**power for power, letter in enumerate("MGTPE", 2)}
SCALES |= {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", 1)}
# Lists inside a part, whose items are parts, too: (part, path of the list) -> name of the items.
ITEMS = {
    "JobSet": {"spec.replicatedJobs": "replicated"},
    "Service": {"spec.ports": "service_port"},
    "ClusterQueue": {"spec.resourceGroups": "quota", "spec.admissionChecksStrategy.admissionChecks": "check"},
    "quota": {"flavors": "flavor"},
    "cluster": {"workerGroupSpecs": "group"},
    "pod": {"containers": "container", "initContainers": "container", "volumes": "volume", "tolerations": "toleration"},
    "container": {"env": "env", "ports": "port", "volumeMounts": "mount"},
}
NAMED_AS = {"pod": "pod", "container": "box", "cluster": "cluster"}
CONDITION_ERRORS = (RuntimeError, LookupError, TypeError, ValueError, AttributeError)
"""A field is missing, or has a type that the schema refuses: the condition does not hold."""


def quantity(value: Any) -> float | None:
    """Of bytes, cores, pieces or seconds; None if Kubernetes cannot read it."""
    if not (match := QUANTITY.fullmatch(str(value))):
        return None
    suffix = match[2] or ""
    return float(match[1]) * SCALES[suffix] if suffix in SCALES else float(match[1] + suffix)


def is_spot(pod: Document) -> bool:
    return any(at(pod, "nodeSelector", key) == "true" for key in SPOT_KEYS)


def _variable(cluster: Document, name: str) -> str:
    """Of the first container of a cluster's head, which runs Ray."""
    env = at(cluster, "headGroupSpec", "template", "spec", "containers", 0, "env") or []
    return next((str(each.get("value", "")) for each in env if each.get("name") == name), "")


def _is_v2(cluster: Document) -> bool:
    variable = _variable(cluster, "RAY_enable_autoscaler_v2")
    return get(cluster, "autoscalerOptions.version") == "v2" or variable in ("1", "true")


def _is_older(version: str, least: str) -> bool:
    try:
        return Version(version) < Version(least)
    except InvalidVersion:
        return True


def _is_map(text: Any) -> bool:
    try:
        return isinstance(yaml.safe_load(str(text or "{}")), dict)
    except yaml.YAMLError:
        return False


def _get(value: Any, path: str, default: Any) -> Any:
    found = get(value, path)
    return default if found is None else found


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "get": _get,
    "quantity": quantity,
    "is_spot": is_spot,
    "is_v2": _is_v2,
    "is_map": _is_map,
    "older": _is_older,
    "variable": _variable,
    "queue": lambda document: at(document, "metadata", "labels", "kueue.x-k8s.io/queue-name") or "",
    "is_elastic": lambda document: at(document, "metadata", "annotations", "kueue.x-k8s.io/elastic-job") is not None,
    "market": lambda group: at(group, "labels", "ray.io/market-type") or "",
}


@cache
def table() -> Mapping[str, Any]:
    return tomllib.loads((resources.files(__package__) / "rules.toml").read_text(encoding="utf-8"))


@cache
def compiled(rule: str) -> Any:
    return extra("cel").compile(rule)


Part = tuple[str, Path, Any, dict[str, Any]]  # name, path, value, the larger parts around it


def parts(document: Document) -> Iterator[Part]:
    """Each part that rules apply to."""
    around = {"doc": document}
    yield "any", (), document, around
    yield from _nested(str(document.get("kind")), (), document, around)
    is_cluster = document.get("kind") == "RayCluster"
    path: Path = ("spec",) if is_cluster else ("spec", "rayClusterSpec")
    if cluster := at(document, *path):
        yield from _nested("cluster", path, cluster, around)
        if head := at(cluster, "headGroupSpec"):
            yield from _nested("group", (*path, "headGroupSpec"), head, around | {"cluster": cluster})
    for path, pod in pods(document):
        yield from _nested("pod", path, pod, around)


def _nested(part: str, path: Path, value: Any, around: dict[str, Any]) -> Iterator[Part]:
    yield part, path, value, around
    inside = around | ({NAMED_AS[part]: value} if part in NAMED_AS else {})
    for name, item in ITEMS.get(part, {}).items():
        where = (*path, *name.split("."))
        for index, each in enumerate(get(value, name) or ()):
            if isinstance(each, dict):
                yield from _nested(item, (*where, index), each, inside)


def pods(value: Any, path: Path = ()) -> Iterator[tuple[Path, Document]]:
    """Every pod spec in a document: what has containers."""
    if isinstance(value, dict) and isinstance(value.get("containers"), list):
        yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from pods(each, (*path, key))


def rule_findings(document: Document) -> Iterator[Finding]:
    for part, path, value, around in parts(document):
        contexts: dict[tuple[str, ...], Any] = {}  # by the larger parts in them
        for field, condition, what, hint in table().get(part, ()):
            mentioned = tuple(name for name in around if name in condition)
            if mentioned not in contexts:
                values = {"self": value, **{name: around[name] for name in mentioned}}
                contexts[mentioned] = extra("cel").Context(values, FUNCTIONS)
            if _holds(condition, contexts[mentioned]):
                name = field.rstrip("?")
                given = get(value, name)
                words = what.format(given if not isinstance(given, list) else ", ".join(map(str, given)))
                yield finding((*path, *name.split(".")), words, hint, warning=field.endswith("?"))
        yield from _name_findings(part, path, value)


def _holds(condition: str, context: Any) -> bool:
    program = compiled(condition)
    try:
        return program.execute(context) is True
    except CONDITION_ERRORS:
        return False


def _name_findings(part: str, path: Path, value: Any) -> Iterator[Finding]:
    rules = table()
    for place, names in rules["names"].items():
        owner, _, field = place.partition(" ")
        if owner == part and (given := get(value, field)) not in ("", None, *names):
            yield misspelt((*path, *field.split(".")), given, names)
    for place, names in rules["keys"].items():
        owner, _, field = place.partition(" ")
        for key, given in ((get(value, field) if owner == part else None) or {}).items():
            where = (*path, *field.split("."), key)
            allowed = at(rules["values"], place, key)
            if allowed and given not in allowed:
                yield misspelt(where, given, allowed)
            elif key not in names and (close := closest(key, names, 0.8)):
                yield finding(where, "nothing reads this key", f"did you mean {close}?")


def misspelt(path: Path, given: Any, names: Sequence[str]) -> Finding:
    return finding(path, f"{given!r} is not known", did_you_mean(given, names, f"one of {', '.join(names)}"))
