"""Runs probes in sandboxes as the user that it is started as.

run_probes.py BACKEND NAMES_AS_JSON: prints {name: what the probe printed} as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
from pathlib import Path

from tests.integration.sandbox.probes import PROBES
from tidemill.config.sandbox import SandboxConfig
from tidemill.sandbox import open_sandbox
from tidemill.sandbox.local import launcher

VARIABLE = "TIDEMILL_PROBED_SECRET"


def main() -> None:
    config = SandboxConfig(backend=sys.argv[1])
    os.environ[VARIABLE] = "x"
    folder = tempfile.mkdtemp(prefix="tidemill-secret-")
    secret = Path(folder) / "secret"
    secret.write_text("secret")
    Path(folder).chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as server:
        values = {
            "{secret}": str(secret),
            "{variable}": VARIABLE[::-1],  # the program itself must not contain it
            "{caller}": str(os.getpid()),
            "{port}": str(server.getsockname()[1]),
            "{address}": launcher(config.backend).address,  # type: ignore[arg-type]
        }
        found = {}
        for name in json.loads(sys.argv[2]):
            program = PROBES[name]
            for key, value in values.items():
                program = program.replace(key, value)
            with contextlib.closing(open_sandbox(config)) as sandbox:
                finished = sandbox.run(["python3", "-c", program], timeout_s=20)
            found[name] = finished.stdout.decode().strip() or finished.stderr.decode().strip().split("\n")[-1]
    secret.unlink()
    Path(folder).rmdir()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
