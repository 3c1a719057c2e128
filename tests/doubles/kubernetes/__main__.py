"""Runs the cluster in the namespaces that `Kubernetes` made: API server, operator and kubelet in one process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.doubles.kubernetes.api import Server, Store
from tests.doubles.kubernetes.kubelet import HOST, Kubelet, host_network
from tests.doubles.kubernetes.operator import API_PORT, Operator, ray_environment

INTERVAL_S = 0.1


def main(folder: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True, timeout=10)  # names of network namespaces
    host_network()
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    names = ("-subj", f"/CN={HOST}", "-addext", f"subjectAltName=IP:{HOST}")
    made = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names)
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=30)
    account = folder / "account"
    account.mkdir()
    shutil.copy(certificate, account / "ca.crt")
    (account / "token").write_text("autoscaler")
    (account / "namespace").write_text("default")
    store = Store(folder)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    kubelet = Kubelet(store, ray_environment({**os.environ, "PATH": path}))
    operator = Operator(store, kubelet)
    server = Server((HOST, API_PORT), store, certificate, key)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (folder / "ready").touch()
    while True:
        operator.look()
        kubelet.look()
        time.sleep(INTERVAL_S)


main(Path(sys.argv[1]))
