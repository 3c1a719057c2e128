"""The API server: objects in memory, served over TLS as kubectl and Ray's autoscaler ask for them.

Server-side apply knows one manager: fields that its last apply had and the new one lacks are removed. Objects are not
checked against a schema.
"""

from __future__ import annotations

import copy
import http.server
import json
import re
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

KINDS = {
    "pods": ("v1", "Pod"),
    "configmaps": ("v1", "ConfigMap"),
    "persistentvolumeclaims": ("v1", "PersistentVolumeClaim"),
    "poddisruptionbudgets": ("policy/v1", "PodDisruptionBudget"),
    "rayjobs": ("ray.io/v1", "RayJob"),
    "rayclusters": ("ray.io/v1", "RayCluster"),
}
OWNED_ELSEWHERE = ("pods", "rayjobs", "rayclusters")
"""Kubelet and operator remove these when nothing of them runs any more."""
GROUPS = ("policy", "ray.io")
VERBS = ["create", "delete", "get", "list", "patch", "watch"]
OBJECT = re.compile(r"/apis?/(?:[^/]+/)?v1/namespaces/([^/]+)/(\w+)(?:/([^/]+))?(/log)?$")
NOBODY = "nobody"
"""The token of a user without permissions."""
WATCH_S = 60.0
HANDSHAKE_S = 10.0
Object = dict[str, Any]


class Store:
    """All objects, and a log of what happened to them."""

    def __init__(self, folder: Path) -> None:
        self.lock = threading.RLock()
        self.folder = folder
        self.objects: dict[tuple[str, str], Object] = {}
        self._applied: dict[tuple[str, str], Object] = {}
        self.version = 0
        self._log = (folder / "events.jsonl").open("a")

    def record(self, event: str, **fields: Any) -> None:
        with self.lock:
            self._log.write(json.dumps({"event": event, "unix_s": time.time(), **fields}) + "\n")
            self._log.flush()

    def put(self, plural: str, new: Object) -> Object:
        """Store an object under a new version, unless nothing changed."""
        with self.lock:
            key = plural, new["metadata"]["name"]
            if self.objects.get(key) != new:
                self.version += 1
                now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
                new["metadata"] = {"uid": f"uid-{self.version}", "creationTimestamp": now} | new["metadata"]
                new["metadata"]["resourceVersion"] = str(self.version)
                self.objects[key] = new
            return new

    def apply(self, key: tuple[str, str], wanted: Object, *, dry: bool) -> Object:
        with self.lock:
            old = copy.deepcopy(self.objects.get(key, {}))
            new = _without_removed(_merged(old, wanted), self._applied.get(key, {}), wanted)
            if not dry:
                self._applied[key] = copy.deepcopy(wanted)
            return new if dry else self.put(key[0], new)

    def patch(self, key: tuple[str, str], operations: list[Object]) -> Object:
        """JSON Patch of fields, as the autoscaler sends it."""
        with self.lock:
            new = copy.deepcopy(self.objects[key])
            for operation in operations:
                *path, last = operation["path"].strip("/").split("/")
                at: Any = new
                for name in path:
                    at = at[int(name)] if isinstance(at, list) else at.setdefault(name, {})
                if operation["op"] != "test":
                    at[last] = operation["value"]
                self.record("patch", object="/".join(key), path=operation["path"], value=operation.get("value"))
            return self.put(key[0], new)

    def delete(self, key: tuple[str, str], grace_s: float | None = None) -> None:
        with self.lock:
            if key[0] in OWNED_ELSEWHERE:
                metadata = self.objects[key]["metadata"]
                metadata.setdefault("deletionTimestamp", "2026-01-01T00:00:00Z")
                if grace_s is not None:
                    metadata["deletionGracePeriodSeconds"] = grace_s
            else:
                self.remove(key)

    def remove(self, key: tuple[str, str]) -> None:
        with self.lock:
            self.objects.pop(key, None)
            self._applied.pop(key, None)

    def select(self, plural: str, query: Mapping[str, list[str]]) -> Iterator[Object]:
        """Objects of a kind with the labels, and the name, that a query asks for."""
        labels = [pair.split("=") for pair in query.get("labelSelector", [""])[0].split(",") if pair]
        name = query.get("fieldSelector", [""])[0].removeprefix("metadata.name=")
        for (kind, each), found in list(self.objects.items()):
            its = found["metadata"].get("labels", {})
            if kind == plural and name in ("", each) and all(its.get(pair[0]) == pair[-1] for pair in labels):
                yield found


def _merged(old: Object, new: Mapping[str, Any]) -> Object:
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(old.get(key), dict):
            _merged(old[key], value)
        else:
            old[key] = copy.deepcopy(value)
    return old


def _without_removed(merged: Object, before: Mapping[str, Any], now: Mapping[str, Any]) -> Object:
    for key, value in before.items():
        if key not in now:
            merged.pop(key, None)
        elif isinstance(value, dict) and isinstance(now[key], dict):
            _without_removed(merged[key], value, now[key])
    return merged


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], store: Store, certificate: Path, key: Path) -> None:
        super().__init__(address, Handler)
        self.store = store
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        """The handshake takes place in the request's thread, so that a client that ends meanwhile delays nobody."""
        self.request.settimeout(HANDSHAKE_S)
        self.request.do_handshake()
        self.request.settimeout(None)
        super().setup()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name in http.server)
        """Requests are not logged."""

    def do_GET(self) -> None:
        if self.path.split("?")[0] in DISCOVERY:
            self._send(DISCOVERY[self.path.split("?")[0]])
            return
        plural, key, query, is_log = self._target()
        if not plural:
            return
        if is_log:
            self._stream(self._log_lines(key[1], query))
        elif "watch" in query:
            self._stream(self._deletions(plural, query))
        elif key[1]:
            self._send(self.server.store.objects[key])
        else:
            version, kind = KINDS[plural]
            store = self.server.store
            items = list(store.select(plural, query))
            metadata = {"resourceVersion": str(store.version)}
            self._send({"kind": f"{kind}List", "apiVersion": version, "metadata": metadata, "items": items})

    def do_PATCH(self) -> None:
        body = yaml.safe_load(self.rfile.read(int(self.headers["Content-Length"])))
        applies = "apply" in self.headers["Content-Type"]
        plural, key, query, _ = self._target(may_be_new=applies)
        if plural:
            store, dry = self.server.store, "dryRun" in query
            status = 200 if key in store.objects else 201
            self._send(store.apply(key, body, dry=dry) if applies else store.patch(key, body), status)

    def do_DELETE(self) -> None:
        options = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        plural, key, query, _ = self._target()
        if plural:
            grace = query.get("gracePeriodSeconds", [options.get("gracePeriodSeconds")])[0]
            self.server.store.delete(key, None if grace is None else float(grace))
            self._send({"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def _target(self, *, may_be_new: bool = False) -> tuple[str, tuple[str, str], dict[str, list[str]], bool]:
        """Kind, key and query of a request; no kind: an error was sent."""
        url = urlsplit(self.path)
        match = OBJECT.match(url.path)
        plural, name = (match[2], match[3] or "") if match else ("", "")
        if self.headers["Authorization"] == f"Bearer {NOBODY}":
            what = f'{plural} is forbidden: User "{NOBODY}" cannot use resource "{plural}" in the namespace "default"'
            self._refuse(403, "Forbidden", what)
            plural = ""
        elif plural not in KINDS or (name and not may_be_new and (plural, name) not in self.server.store.objects):
            self._refuse(404, "NotFound", f'{plural} "{name}" not found')
            plural = ""
        return plural, (plural, name), parse_qs(url.query), bool(match and match[4])

    def _refuse(self, code: int, reason: str, message: str) -> None:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
        self._send(status | {"reason": reason, "code": code, "message": message}, code)

    def _send(self, content: Object, code: int = 200) -> None:
        with self.server.store.lock:
            text = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _stream(self, parts: Iterator[bytes]) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for part in parts:
            self.wfile.write(part)
            self.wfile.flush()

    def _deletions(self, plural: str, query: Mapping[str, list[str]]) -> Iterator[bytes]:
        store, end = self.server.store, time.monotonic() + WATCH_S
        watched = list(store.select(plural, query))
        while watched and time.monotonic() < end:
            for gone in [each for each in watched if (plural, each["metadata"]["name"]) not in store.objects]:
                watched.remove(gone)
                yield json.dumps({"type": "DELETED", "object": gone}).encode() + b"\n"
            time.sleep(0.05)

    def _log_lines(self, pod: str, query: Mapping[str, list[str]]) -> Iterator[bytes]:
        path = self.server.store.folder / "logs" / f"{pod}.{query['container'][0]}.log"
        with path.open("rb") as log:
            while ("pods", pod) in self.server.store.objects and "follow" in query:
                yield log.read()
                time.sleep(0.1)
            yield log.read()


def _discovery() -> Iterator[tuple[str, Object]]:
    yield "/version", {"major": "1", "minor": "37", "gitVersion": "v1.37.0"}
    yield "/api", {"kind": "APIVersions", "versions": ["v1"]}
    versions = {group: {"groupVersion": f"{group}/v1", "version": "v1"} for group in GROUPS}
    groups = [{"name": each, "versions": [its], "preferredVersion": its} for each, its in versions.items()]
    yield "/apis", {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    paths = {version: f"{'apis' if '/' in version else 'api'}/{version}" for version, _ in KINDS.values()}
    yield "/openapi/v3", {"paths": {path: {"serverRelativeURL": f"/openapi/v3/{path}"} for path in paths.values()}}
    for version, path in paths.items():
        kinds = [(plural, kind) for plural, (its, kind) in KINDS.items() if its == version]
        resources = [
            {"name": plural, "singularName": "", "namespaced": True, "kind": kind, "verbs": VERBS}
            for plural, kind in kinds
        ]
        what = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version}
        yield f"/{path}", what | {"resources": resources}
        group = version.rpartition("/")[0]
        # kubectl leaves the check of fields to a server whose PATCH has this parameter.
        operations = {
            f"/{path}/namespaces/{{namespace}}/{plural}/{{name}}": {
                "patch": {
                    "parameters": [{"name": "fieldValidation", "in": "query"}],
                    "x-kubernetes-group-version-kind": {"group": group, "version": "v1", "kind": kind},
                    "responses": {},
                }
            }
            for plural, kind in kinds
        }
        info = {"title": "Kubernetes", "version": "v1"}
        yield f"/openapi/v3/{path}", {"openapi": "3.0.0", "info": info, "paths": operations}


DISCOVERY = dict(_discovery())
