"""`tidemill deploy check`: findings in Kubernetes documents, offline and by the API server."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.markup import escape

from tidemill.cli.output import Result
from tidemill.core.errors import DeadlineError, UserError
from tidemill.deploy.check.crds import Crds
from tidemill.deploy.check.documents import check
from tidemill.deploy.check.findings import Finding
from tidemill.deploy.documents import Document, to_yaml
from tidemill.deploy.kubectl import MANAGER

SERVER_DEADLINE_S = 120.0
REFUSED = 1
CrdsOption = Annotated[
    Path | None,
    Parameter(name="--crds", help="Folder or file with the cluster's CRDs: `kubectl get crds -o yaml > crds.yaml`."),
]
Server = Annotated[
    bool,
    Parameter(name="--server", negative=(), help="Also ask the cluster: `kubectl apply --dry-run=server`."),
]


def check_files(documents: Sequence[Document], crds: Crds, *, server: bool = False) -> Result:
    """Findings as the result of a command, with exit code 1 if something would be refused."""
    findings = check(documents, crds)
    refusals = server_refusals(documents) if server else []
    errors = [each for each in findings if not each.warning]
    lines = [_text(each) for each in findings] + [f"the cluster refuses: {each}" for each in refusals]
    warnings = len(findings) - len(errors)
    lines.append(f"{len(documents)} documents: {len(errors) + len(refusals)} errors, {warnings} warnings")
    data = {"findings": [asdict(each) for each in findings], "refusals": refusals, "documents": len(documents)}
    return Result(data=data, text=escape("\n".join(lines)), exit_code=REFUSED if errors or refusals else 0)


def _text(finding: Finding) -> str:
    return f"{'warning' if finding.warning else 'error'}: {finding}"


def server_refusals(documents: Sequence[Document]) -> list[str]:
    """What the API server of the current context says to a dry run.

    Raises:
        UserError: there is no kubectl.
        DeadlineError: the cluster does not answer.
    """
    if not shutil.which("kubectl"):
        raise UserError("there is no kubectl", where="--server", hint="install it, or check without --server")
    text = "---\n".join(to_yaml(each) for each in documents)
    as_apply = ["--server-side", f"--field-manager={MANAGER}"]  # without, a large ConfigMap exceeds an annotation
    command = ["kubectl", "apply", *as_apply, "--dry-run=server", "--request-timeout=30s", "-f", "-"]
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=SERVER_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        look_at = "`kubectl cluster-info`, which shows whether the cluster answers"
        raise DeadlineError("`kubectl apply --dry-run`", waited_s=SERVER_DEADLINE_S, look_at=look_at) from None
    refusals = [line.strip() for line in done.stderr.splitlines() if line.strip() and not line.startswith("Warning:")]
    return refusals if done.returncode else []
