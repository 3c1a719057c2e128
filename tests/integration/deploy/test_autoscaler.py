"""A rendered recipe under Ray's autoscaler and kubectl, through a reclaimed pod, to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.cluster import kills, resume
from tests.cluster_runs import GRACE_S, KEPT, SHUT_DOWN, ClusterRun, items, kept_cluster, kubernetes
from tests.doubles.kubernetes import Kubernetes, unavailable
from tidemill.cli.app import main
from tidemill.core.errors import UserError
from tidemill.deploy.kubernetes.kubectl import Kubectl
from tidemill.deploy.render import render

# Targets of an idle machine are 3 s, 1 s and 15 s (benchmarks/cluster.py); tests share theirs.
PATCH_S, NOTICE_S, SCALE_DOWN_S = 15.0, 5.0, 45.0
START_S, END_S = 90.0, 120.0
STEPS = 24


@pytest.fixture
def namespaces(tmp_path: Path) -> None:
    (tmp_path / "try").mkdir()
    if why := unavailable(tmp_path / "try"):
        pytest.skip(why)


@pytest.fixture
def cluster(namespaces: None, tmp_path: Path) -> Iterator[Kubernetes]:
    with kubernetes(tmp_path / "cluster") as started:
        yield started


@pytest.mark.timeout(300)
@pytest.mark.slow  # it needs a quiet machine for its bounds
def test_a_run_survives_a_reclaimed_pod(
    cluster: Kubernetes,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    record_testsuite_property: Callable[[str, object], None],
) -> None:
    recipe = items(tmp_path, trainer__steps=STEPS, deploy__storage_size="1Gi")
    kept, run = kept_cluster(render(recipe)), ClusterRun(cluster)
    assert len(Kubectl().apply(kept)) == 4
    assert Kubectl().diff(kept) == ""
    figures = run.through_a_reclaimed_pod(start_s=START_S, end_s=END_S)
    for name, value in figures.items():
        record_testsuite_property(name, value)  # in the report of pytest --junit-xml
    assert figures["patch_s"] <= PATCH_S
    assert figures["notice_s"] <= NOTICE_S and figures["notice_grace_s"] <= GRACE_S
    assert (figures["noticed"], figures["tokens_lost"]) == (True, 0)
    assert figures["replicas_0_after_idle_s"] <= SCALE_DOWN_S

    def deploy(*words: str) -> str:
        """Standard output of a verb."""
        capfd.readouterr()
        assert main(["deploy", *words]) == 0
        return capfd.readouterr().out

    assert f"step {STEPS}/{STEPS}" in deploy("logs", *recipe, "--once")
    states = deploy("status", *recipe).splitlines()
    assert [line.split()[0] for line in states] == ["RayJob", "RayCluster", "Pod"]
    assert states[0].endswith("has ended") and states[2].endswith("runs")
    assert main(["deploy", "status", *recipe, "--context=nobody"]) == UserError.exit_code
    assert "refuses it to this user" in capfd.readouterr().err

    changed = [line for line in deploy("diff", *recipe).splitlines() if line.startswith(("-  ", "+  "))]
    assert changed == [f"-  {KEPT}", f"+  {SHUT_DOWN}"]
    deploy("apply", *recipe)
    cluster.wait(lambda: not cluster.kubectl("get", "rayclusters,pods", "-o", "name"), "the cluster's end", END_S)
    deploy("delete", *recipe)
    kinds = "rayjobs,configmaps,poddisruptionbudgets,persistentvolumeclaims"
    assert cluster.kubectl("get", kinds, "-o", "name") == "persistentvolumeclaim/runs\n"
    deploy("delete", *recipe, "--storage")
    assert cluster.kubectl("get", kinds, "-o", "name") == ""
    assert not [line for line in cluster.processes().values() if "ray" in line]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_killed_pods_lose_no_token(namespaces: None, tmp_path: Path) -> None:
    figures = kills(tmp_path, 20, controls=3)
    assert figures["without_loss"] == figures["kills"] == 20
    assert figures["control_tokens_lost"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_lost_heads_trainers_and_drivers_are_resumed(namespaces: None, tmp_path: Path) -> None:
    figures = resume(tmp_path)
    assert figures["same_weights_reached"] and figures["resumed_reached"]
    assert figures["log_followed_reached"] and figures["no_orphan_reached"]
