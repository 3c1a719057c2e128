from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Run

IMAGE = f"registry/tidemill@sha256:{'0' * 64}"
OPTIONS = ("--deploy.target=gke", f"--deploy.image={IMAGE}")
BROKEN = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: A}\ndata: {}\n"


def test_a_recipe(run: Run) -> None:
    ran = run("deploy", "check", "spot-trace", *OPTIONS)
    assert ran.code == 0
    assert "no schema for ray.io/v1 RayJob" in ran.out  # without --crds
    assert ran.out.splitlines()[-1].startswith("3 files: 0 errors, ")


def test_a_folder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "k8s").mkdir()
    (tmp_path / "k8s" / "a.yaml").write_text(BROKEN)
    ran = run("deploy", "check", "k8s")
    assert ran.code == 1
    assert ran.out.startswith("error: ConfigMap/A: metadata.name: 'A' (1 characters) is not valid\n")
    ran = run("deploy", "check", "k8s/a.yaml", "--json")
    assert ran.code == 1
    assert [each["field"] for each in ran.data["findings"]] == ["metadata.name"]


def test_the_server(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.yaml").write_text(BROKEN.replace("A", "a"))
    kubectl = tmp_path / "bin" / "kubectl"
    monkeypatch.setenv("PATH", str(kubectl.parent))
    assert "kubectl is not installed" in run("deploy", "check", "a.yaml", "--server").err
    kubectl.parent.mkdir()
    kubectl.write_text('#!/bin/sh\ngrep -q "name: a" && echo "$@" >&2\nexit 1\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{kubectl.parent}:{os.defpath}")
    ran = run("deploy", "check", "a.yaml", "--server", "--json")
    assert ran.code == 1
    assert ran.data["refusals"] == [
        "apply --server-side --field-manager=tidemill --dry-run=server --request-timeout=30s --filename=-"
    ]
    kubectl.write_text('#!/bin/sh\ncat > /dev/null\necho "configmap/a created (server dry run)"\n')
    assert run("deploy", "check", "a.yaml", "--server").code == 0
