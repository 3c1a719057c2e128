"""Files of a run: its recipe is in a ConfigMap that its pod mounts, and its directory on a volume that outlives it."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.deploy.documents import Document
from tidemill.deploy.kubernetes.check.findings import Finding, Path, at, did_you_mean, finding
from tidemill.deploy.kubernetes.check.rules import pods
from tidemill.deploy.places import RUNS_FOLDER

FUSE = "gcsfuse.csi.storage.gke.io"
RUN_DIR = "--run.dir"
HEAD_POD = ("spec", "rayClusterSpec", "headGroupSpec", "template", "spec")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of a document, and the container that runs it."""

    path: Path
    words: Sequence[str]
    pod_path: Path
    pod: Mapping[str, Any]
    container: Mapping[str, Any]

    @property
    def recipe(self) -> str:
        """The recipe's file by its absolute path; empty if it is none."""
        return next((word[1:] for word in self.words if word.startswith("@/")), "")

    def mounted(self, file: str) -> tuple[str, Mapping[str, Any]] | None:
        """Where a file's volume is mounted, and the volume."""
        mounts = [each for each in self.container.get("volumeMounts") or () if _is_in(file, each.get("mountPath"))]
        if not mounts:
            return None
        mount = max(mounts, key=lambda each: len(each["mountPath"]))
        named = [each for each in self.pod.get("volumes") or () if each.get("name") == mount.get("name")]
        return mount["mountPath"], named[0] if named else {}

    def run_folder(self, documents: Sequence[Document]) -> str:
        """The absolute run directory that the command or its recipe sets, or the usual one."""
        folders = [word.partition("=")[2] for word in self.words if word.startswith(f"{RUN_DIR}=")]
        folders += [after for word, after in zip(self.words, self.words[1:], strict=False) if word == RUN_DIR]
        maps = [each.get("data") or {} for each in documents if each.get("kind") == "ConfigMap"]
        texts = [text for data in maps for name, text in data.items() if self.recipe.endswith(f"/{name}")]
        folders += [str(_run_dir(text)) for text in texts]
        return next((each for each in folders if each.startswith("/")), RUNS_FOLDER)


def commands(document: Document) -> Iterator[Command]:
    """The entrypoint of a RayJob, which its head runs, and the commands of containers."""
    entrypoint, head = at(document, "spec", "entrypoint"), at(document, *HEAD_POD)
    if isinstance(entrypoint, str) and at(head, "containers", 0):
        words = (
            entrypoint.split() if entrypoint.count("'") % 2 or entrypoint.count('"') % 2 else shlex.split(entrypoint)
        )
        container = head["containers"][0]
        yield Command(path=("spec", "entrypoint"), words=words, pod_path=HEAD_POD, pod=head, container=container)
    for path, pod in pods(document):
        for index, box in enumerate(pod["containers"]):
            if words := [str(each) for key in ("command", "args") for each in box.get(key) or ()]:
                where = (*path, "containers", index, "command" if box.get("command") else "args")
                yield Command(path=where, words=words, pod_path=path, pod=pod, container=box)


def run_findings(document: Document, documents: Sequence[Document]) -> Iterator[Finding]:
    """Of the runs that a document starts: a recipe that is not there, a directory that is lost, or on FUSE."""
    for command in commands(document):
        if "train" not in command.words:
            continue
        if file := command.recipe:
            yield from _recipe_findings(command, file, documents)
        folder = command.run_folder(documents)
        mounted = command.mounted(folder)
        if mounted is None or mounted[1].keys() <= {"name", "emptyDir"}:
            volume = "nothing" if mounted is None else "an emptyDir"
            what = f"{volume} is mounted at the run directory {folder}: the run is lost with its pod"
            hint = "mount the PersistentVolumeClaim for runs there, or correct run.dir"
            yield finding((*command.pod_path, "containers"), what, hint, warning=True)
    folders = {RUNS_FOLDER} | {each.run_folder(documents) for other in documents for each in commands(other)}
    for path, pod in pods(document):
        on_fuse = [volume.get("name") for volume in pod.get("volumes") or () if is_fuse(volume)]
        for index, box in enumerate(pod["containers"]):
            for number, mount in enumerate(box.get("volumeMounts") or ()):
                if mount.get("name") in on_fuse and any(_is_in(each, mount.get("mountPath")) for each in folders):
                    where = (*path, "containers", index, "volumeMounts", number, "name")
                    hint = "a PersistentVolumeClaim for runs; buckets suit models and exports"
                    yield finding(where, "the run directory on FUSE, which cannot hold its journal", hint)


def _recipe_findings(command: Command, file: str, documents: Sequence[Document]) -> Iterator[Finding]:
    mounted = command.mounted(file)
    if mounted is None:
        yield finding(command.path, f"{file}: nothing is mounted there", "mount the ConfigMap with the recipe")
        return
    folder, volume = mounted
    name, key = at(volume, "configMap", "name"), file.removeprefix(folder).strip("/")
    for each in documents:
        keys = [*(each.get("data") or {}), *(each.get("binaryData") or {})]
        is_source = each.get("kind") == "ConfigMap" and at(each, "metadata", "name") == name
        if is_source and key not in keys and not at(volume, "configMap", "items"):
            yield finding(command.path, f"ConfigMap {name} has no {key}", did_you_mean(key, keys, "add it", 0))


def is_fuse(volume: Mapping[str, Any]) -> bool:
    return bool(at(volume, "csi", "driver") == FUSE)


def _is_in(file: str, folder: Any) -> bool:
    return isinstance(folder, str) and f"{file}/".startswith(f"{folder.rstrip('/')}/")


def _run_dir(text: Any) -> Any:
    try:
        return at(tomllib.loads(str(text)), "run", "dir") or ""
    except tomllib.TOMLDecodeError:
        return ""
