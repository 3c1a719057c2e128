"""The kubelet: each pod has its own network, process and mount namespaces, and its own writable layer over this root.

Of a pod's specification it reads environment, mounts of the recipe and of the runs, and the grace period. Containers
share the pod's processes and run as root. Images are not pulled: the programs of this machine run.
"""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tests.doubles.kubernetes.api import Object, Store

HOST = "10.9.0.1"
FIRST_ADDRESS = 10
STARTED_S = 10.0
T = TypeVar("T")
ACCOUNT = "var/run/secrets/kubernetes.io/serviceaccount"
START = f"""set -e
hostname "$(basename "$POD")"
mount -t tmpfs tmpfs "$POD"
mkdir -p "$POD/upper/{ACCOUNT}" "$POD/work" "$POD/root"
cp -r "$POD_FILES/." "$POD/upper/{ACCOUNT}"
mount -t overlay overlay -o "lowerdir=/,upperdir=$POD/upper,workdir=$POD/work" "$POD/root"
for each in proc sys dev; do mount --rbind /$each "$POD/root/$each"; done
mount -t proc proc "$POD/root/proc"
mount -t tmpfs tmpfs "$POD/root/dev/shm"
for each in $MOUNTS; do
  mkdir -p "$POD/root${{each#*:}}"
  mount --bind "${{each%%:*}}" "$POD/root${{each#*:}}"
done
exec chroot "$POD/root" "$@"
"""


@dataclass(slots=True, kw_only=True)
class Pod:
    name: str
    ip: str
    grace_s: float
    env: dict[str, str]
    init: int  # the process whose end ends the pod
    containers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    sigterm_s: float | None = None

    @property
    def ended(self) -> bool:
        return next(iter(self.containers.values())).poll() is not None


class Kubelet:
    def __init__(self, store: Store, env: Mapping[str, str]) -> None:
        self.store = store
        self.env = dict(env)
        self.pods: dict[str, Pod] = {}
        self._addresses = FIRST_ADDRESS
        (store.folder / "logs").mkdir()

    def start(self, name: str, template: Object, labels: Mapping[str, str], command: Sequence[str]) -> Pod:
        """Start a pod whose first container runs a command, in which `{ip}` is the pod's address."""
        spec = template["spec"]
        container = spec["containers"][0]
        self._addresses += 1
        ip = f"10.9.0.{self._addresses}"
        _network(name, ip, self._addresses)
        own = {each["name"]: each["value"] for each in container.get("env", ()) if "value" in each}
        env = {**self.env, **own, "RAY_CLOUD_INSTANCE_ID": name, "RAY_NODE_TYPE_NAME": labels["ray.io/group"]}
        folder = self.store.folder / "pods" / name
        folder.mkdir(parents=True)
        mounts = " ".join(f"{source}:{path}" for source, path in self._mounts(spec, container))
        script = {"POD": str(folder), "POD_FILES": str(self.store.folder / "account"), "MOUNTS": mounts}
        namespaces = ["ip", "netns", "exec", name, "unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child"]
        main = self._run(
            name,
            container["name"],
            [*namespaces, "sh", "-c", START, "sh", *(each.replace("{ip}", ip) for each in command)],
            env | script,
        )
        init = _child(main.pid)
        _wait(lambda: str(Path(f"/proc/{init}/root").readlink()) != "/", f"the mounts of {name}")
        pod = Pod(name=name, ip=ip, grace_s=spec["terminationGracePeriodSeconds"], env=env, init=init)
        pod.containers[container["name"]] = main
        self.pods[name] = pod
        metadata = {"name": name, "namespace": "default", "labels": {**template["metadata"]["labels"], **labels}}
        self.store.put("pods", {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": {}})
        self._set_status(pod, "Running")
        self.store.record("pod", name=name, ip=ip)
        return pod

    def sidecar(self, pod: Pod, container: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start another container of a pod, with its own command."""
        with self.store.lock:
            known = copy.deepcopy(self.store.objects["pods", pod.name])
            known["spec"]["containers"].append({"name": container})
            self.store.put("pods", known)
        enter = ["nsenter", "--target", str(pod.init), "--mount", "--uts", "--net", "--pid", "--root", "--wdns=/"]
        pod.containers[container] = self._run(pod.name, container, [*enter, *command], {**pod.env, **env})
        self._set_status(pod, "Running")

    def log(self, pod: str, container: str) -> str:
        return (self.store.folder / "logs" / f"{pod}.{container}.log").read_text()

    def look(self) -> None:
        """Signal pods that shall end, and report those that ended."""
        self._reap()
        for pod in list(self.pods.values()):
            known = self.store.objects.get(("pods", pod.name))
            deleted = known is not None and "deletionTimestamp" in known["metadata"]
            if deleted and pod.sigterm_s is None:
                pod.grace_s = known["metadata"].get("deletionGracePeriodSeconds", pod.grace_s) if known else 0.0
                pod.sigterm_s = time.monotonic()
                if pod.grace_s > 0:
                    self.store.record("sigterm", pod=pod.name)
                    self._signal(pod)
            if pod.ended:
                self._ended(pod, "by itself", deleted=deleted)
            elif pod.sigterm_s is not None and time.monotonic() > pod.sigterm_s + pod.grace_s:
                os.kill(pod.init, signal.SIGKILL)  # and with it all processes of the pod
                self._ended(pod, "SIGKILL", deleted=True)

    def _reap(self) -> None:
        """Reap processes that outlived their parent: a pod ends only after all of its processes are reaped."""
        ours = {container.pid for pod in self.pods.values() for container in pod.containers.values()}
        for pid in map(int, Path("/proc/1/task/1/children").read_text().split()):
            if pid not in ours:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _signal(self, pod: Pod) -> None:
        os.kill(pod.init, signal.SIGTERM)
        for sidecar in list(pod.containers.values())[1:]:
            if sidecar.poll() is None:
                os.kill(_child(sidecar.pid), signal.SIGTERM)

    def _ended(self, pod: Pod, how: str, *, deleted: bool) -> None:
        for container in pod.containers.values():
            container.wait(STARTED_S)
        del self.pods[pod.name]
        subprocess.run(["ip", "netns", "delete", pod.name], check=True, timeout=STARTED_S)
        after_s = None if pod.sigterm_s is None else time.monotonic() - pod.sigterm_s
        self.store.record("end", pod=pod.name, how=how, after_s=after_s)
        if deleted:
            self.store.remove(("pods", pod.name))
        else:
            self._set_status(pod, "Failed")

    def _set_status(self, pod: Pod, phase: str) -> None:
        state = {"running": {}} if phase == "Running" else {"terminated": {"exitCode": 1}}
        statuses = [{"name": name, "state": state} for name in pod.containers]
        status = {"phase": phase, "podIP": pod.ip, "containerStatuses": statuses}
        with self.store.lock:
            self.store.put("pods", {**self.store.objects["pods", pod.name], "status": status})

    def _mounts(self, spec: Object, container: Object) -> list[tuple[Path, str]]:
        volumes = {each["name"]: each for each in spec["volumes"]}
        mounts = []
        for mount in container["volumeMounts"]:
            volume = volumes[mount["name"]]
            if "configMap" in volume:
                source = self.store.folder / volume["configMap"]["name"]
                source.mkdir(exist_ok=True)
                for name, text in self.store.objects["configmaps", source.name]["data"].items():
                    (source / name).write_text(text)
            else:
                source = self.store.folder / volume["persistentVolumeClaim"]["claimName"]
                source.mkdir(exist_ok=True)
            mounts.append((source, mount["mountPath"]))
        return mounts

    def _run(self, pod: str, container: str, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with (self.store.folder / "logs" / f"{pod}.{container}.log").open("wb") as log:
            return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)


def _child(pid: int) -> int:
    """The only child of a process, which has just started it."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return int(_wait(lambda: children.read_text().split(), f"a child of {pid}")[0])


def _wait(result: Callable[[], T], what: str) -> T:
    end = time.monotonic() + STARTED_S
    while not (value := result()):
        if time.monotonic() > end:
            raise TimeoutError(f"waited {STARTED_S:g} s for {what}")
        time.sleep(0.005)
    return value


def host_network() -> None:
    # Without an address of its own, a bridge takes that of a port: after the end of that pod, the others reach nobody.
    _ip(
        "link set lo up",
        "link add br0 address 02:00:00:00:00:01 type bridge",
        f"addr add {HOST}/24 dev br0",
        "link set br0 up",
    )


def _network(pod: str, ip: str, number: int) -> None:
    _ip(
        f"netns add {pod}",
        f"link add v{number} type veth peer name eth0 netns {pod}",
        f"link set v{number} master br0 up",
    )
    inside = (f"addr add {ip}/24 dev eth0", "link set eth0 up", "link set lo up", f"route add default via {HOST}")
    _ip(*(f"-n {pod} {each}" for each in inside))


def _ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True, timeout=STARTED_S)
