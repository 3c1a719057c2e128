"""One section [deploy] for all targets."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from tests.unit.deploy.conftest import RenderRecipe
from tidemill.config.deploy import KUBERNETES, DeployConfig
from tidemill.core.errors import UserError
from tidemill.deploy.render import render
from tidemill.deploy.targets import TARGETS, target_of

DEPLOY = """\
[deploy]
target = "gke"
image = "registry/tidemill@sha256:0"
storage = "runs"
storage_size = "50Gi"
spot_max = 2
notice_s = 15
hours = 12
[deploy.secrets]
HF_TOKEN = "hub/token"
[deploy.slurm]
runs = "/shared/runs"
preemptible = "spot"
[deploy.sky]
clouds = ["kubernetes"]
volume = "runs"
[deploy.osmo]
platform = "cpu"
"""
FILES = {
    "gke": ["configmap", "persistentvolumeclaim", "poddisruptionbudget", "rayjob"],
    "kubernetes": ["configmap", "persistentvolumeclaim", "poddisruptionbudget", "rayjob"],
    "slurm": ["recipe.toml", "reserved.sbatch", "rollouts.sbatch"],
    "sky": ["spot-trace.yaml"],
    "osmo": ["spot-trace.yaml"],
}


@pytest.mark.parametrize("target", FILES)
def test_the_same_20_lines_render_the_demo(target: str, tmp_path: Path) -> None:
    assert len(DEPLOY.splitlines()) <= 20
    (tmp_path / "deploy.toml").write_text(DEPLOY, encoding="utf-8")
    sources = ["@spot-trace", f"@{tmp_path / 'deploy.toml'}", f"--deploy.target={target}"]
    first, again = (render(sources) for _ in range(2))
    assert first.files == again.files
    words = [name.split("-")[1] if target in KUBERNETES else name for name in first.files]
    assert sorted(words) == FILES[target]
    assert first.job == "spot-trace"


def test_every_target_is_rendered() -> None:
    assert (
        set(FILES)
        == {*KUBERNETES, *TARGETS}
        == set(get_args(DeployConfig.model_fields["target"].annotation)) - {"none"}
    )


@pytest.mark.parametrize("target", TARGETS)
def test_parts_of_kubernetes_are_refused_elsewhere(rendered: RenderRecipe, target: str) -> None:
    for options in (["--deploy.sweep.seeds=[1, 2]"], ["--deploy.serve.model=/runs/a", "--deploy.serve.tokens=a/b"]):
        with pytest.raises(UserError, match=f"is not rendered for {target}"):
            rendered(*options, recipe=DEPLOY.replace("gke", target))


def test_a_context_is_of_kubectl(rendered: RenderRecipe) -> None:
    deploy = rendered(recipe=DEPLOY.replace("gke", "sky")).deploy
    with pytest.raises(UserError, match="is of kubectl"):
        target_of(deploy, context="far")
