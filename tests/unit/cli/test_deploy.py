from __future__ import annotations

from pathlib import Path

from tests.unit.cli.conftest import Run

OPTIONS = ("--deploy.target=gke", "--deploy.image=registry/tidemill@sha256:0")


def test_documents_go_to_standard_output_and_changes_to_standard_error(run: Run) -> None:
    ran = run("deploy", "render", "spot-trace", *OPTIONS)
    assert ran.code == 0
    assert ran.out.count("\n---\n") == 2 and ran.out.startswith("apiVersion: v1\n")
    assert 'pool.kind = "ray" instead of "synthetic"\n' in ran.err


def test_json(run: Run) -> None:
    ran = run("deploy", "render", "@spot-trace", *OPTIONS, "--json")
    assert ran.err == ""
    assert list(ran.data) == ["files", "notes", "written"]
    assert 'ray.address = "auto"' in ran.data["notes"]


def test_a_folder(run: Run, tmp_path: Path) -> None:
    for _ in range(2):  # a second rendering replaces the first
        ran = run("deploy", "render", "spot-trace", *OPTIONS, "--out", "k8s")
        assert ran.code == 0
    assert len(ran.out.splitlines()) == len(list((tmp_path / "k8s").iterdir())) == 3
    ran = run("deploy", "render", "spot-trace", *OPTIONS, "--run.name=other", "--out", "k8s")
    assert ran.code == 2 and "documents of another rendering" in ran.err
    slurm = ["spot-trace", "--deploy.target=slurm", "--deploy.slurm.runs=/s", "--deploy.slurm.preemptible=spot"]
    assert run("deploy", "render", *slurm, "--out", "slurm").code == 0
    ran = run("deploy", "render", *slurm, "--pool.kind=static", "--pool.workers=0", "--out", "slurm")
    assert ran.code == 2 and "such as rollouts.sbatch" in ran.err


def test_errors(run: Run) -> None:
    assert run("deploy", "render").code == 2
    ran = run("deploy", "render", "nowhere.toml")
    assert ran.code == 2 and "no such file" in ran.err
    ran = run("kubectl")
    assert "write `tidemill deploy render @recipe.toml`" in ran.err
