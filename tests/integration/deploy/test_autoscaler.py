"""A rendered recipe under Ray's autoscaler and kubectl, through a reclaimed pod, to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster_runs import GRACE_S, KEPT, SHUT_DOWN, ClusterRun, document, items, kept_cluster, kubernetes
from tests.doubles.kubernetes import Kubernetes, unavailable
from tidemill.cli.app import main
from tidemill.deploy.kubectl import Kubectl

# Targets of an idle machine are 3 s, 1 s and 15 s (benchmarks/cluster.py); tests share theirs.
PATCH_S, NOTICE_S, SCALE_DOWN_S = 15.0, 5.0, 45.0
START_S = 90.0
STEPS = 30


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Kubernetes]:
    (tmp_path / "try").mkdir()
    if why := unavailable(tmp_path / "try"):
        pytest.skip(why)
    with kubernetes(tmp_path / "cluster") as started:
        yield started


@pytest.mark.timeout(300)
def test_a_run_survives_a_reclaimed_pod(
    cluster: Kubernetes,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> None:
    rendered = document(tmp_path, trainer__steps=STEPS)
    kubectl, run = Kubectl(), ClusterRun(cluster)
    assert len(kubectl.apply(kept_cluster(rendered))) == 3
    assert kubectl.diff(kept_cluster(rendered)) == ""
    figures = run.through_a_reclaimed_pod(start_s=START_S, end_s=120.0)
    for name, value in figures.items():
        record_property(name, value)  # in the report of pytest --junit-xml
    assert figures["patch_s"] <= PATCH_S
    assert figures["notice_s"] <= NOTICE_S and figures["notice_grace_s"] <= GRACE_S
    assert (figures["noticed"], figures["tokens_lost"]) == (True, 0)
    assert figures["replicas_0_after_idle_s"] <= SCALE_DOWN_S

    recipe = items(tmp_path, trainer__steps=STEPS)
    capfd.readouterr()
    assert main(["deploy", "diff", *recipe]) == 0
    changed = [
        line for line in capfd.readouterr().out.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert changed == [f"-  {KEPT}", f"+  {SHUT_DOWN}"]

    assert main(["deploy", "apply", *recipe]) == 0
    cluster.wait(lambda: not run.cluster.kubectl("get", "rayclusters", "-o", "name"), "the cluster's end", 2 * GRACE_S)
    capfd.readouterr()
    assert main(["deploy", "status", *recipe]) == 0
    assert capfd.readouterr().out == "RayJob spot-trace: has ended\n"

    assert main(["deploy", "delete", *recipe]) == 0
    assert set(cluster.kubectl("get", "rayjobs,configmaps,poddisruptionbudgets,pods", "-o", "name")) == set()
    assert not [line for line in cluster.processes().values() if "ray" in line]
