"""`tidemill deploy check`: findings in Kubernetes documents, and what a target refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.markup import escape

from tidemill.cli.arguments import Items
from tidemill.cli.deploy_command import Admin, rendered_recipe
from tidemill.cli.output import Json, Result
from tidemill.config.deploy import KUBERNETES
from tidemill.deploy.documents import Document
from tidemill.deploy.kubernetes.check.crds import Crds
from tidemill.deploy.kubernetes.check.documents import check, parsed, read_documents
from tidemill.deploy.kubernetes.check.findings import Finding
from tidemill.deploy.kubernetes.kubectl import server_refusals
from tidemill.deploy.targets import target_of

REFUSED = 1
CrdsOption = Annotated[
    Path | None,
    Parameter(name="--crds", help="Folder or file with the cluster's CRDs: `kubectl get crds -o yaml > crds.yaml`."),
]
Server = Annotated[
    bool,
    Parameter(name="--server", negative=(), help="Also ask the target, as `kubectl apply --dry-run=server` does."),
]


def check_command(
    *items: Items, crds: CrdsOption = None, server: Server = False, admin: Admin = False, json: Json = False
) -> Result:
    """Check the documents of a recipe, or those of a folder or YAML file; exit code 1 if a cluster would refuse them.

    Without --crds, the fields of custom resources such as RayJob are not checked, only their rules.
    """
    first = Path(items[0]) if items else Path()
    if items and (first.is_dir() or first.suffix in (".yaml", ".yml")):
        documents = read_documents(first)
        return check_files(documents, known_crds(crds), server_refusals(documents) if server else [])
    rendered = rendered_recipe(items, admin=admin)
    refusals = target_of(rendered.deploy).refusals(rendered) if server else []
    documents = parsed(rendered.text, "recipe") if rendered.deploy.target in KUBERNETES else []
    return check_files(documents, known_crds(crds), refusals, files=len(rendered.files))


def known_crds(path: Path | None) -> Crds:
    """Those of --crds. Raises UserError: the path holds none."""
    return Crds.read(path) if path else Crds()


def check_files(documents: Sequence[Document], crds: Crds, refusals: Sequence[str], *, files: int = 0) -> Result:
    """Findings as the result of a command, with exit code 1 if something would be refused.

    Args:
        documents: of Kubernetes; other targets have none, and their files are valid once they are rendered.
        refusals: of the target.
        files: number of files; 0: that of the documents.
    """
    findings = check(documents, crds) if documents else []
    errors = [each for each in findings if not each.warning]
    lines = [_text(each) for each in findings] + [f"the target refuses: {each}" for each in refusals]
    warnings = len(findings) - len(errors)
    lines.append(f"{files or len(documents)} files: {len(errors) + len(refusals)} errors, {warnings} warnings")
    data = {
        "findings": [asdict(each) for each in findings],
        "refusals": list(refusals),
        "files": files or len(documents),
    }
    return Result(data=data, text=escape("\n".join(lines)), exit_code=REFUSED if errors or refusals else 0)


def _text(finding: Finding) -> str:
    return f"{'warning' if finding.warning else 'error'}: {finding}"
