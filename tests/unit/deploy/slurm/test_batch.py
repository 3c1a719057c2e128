from __future__ import annotations

import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.unit.deploy.conftest import RenderRecipe
from tidemill.core.errors import UserError

RECIPE = """\
[run]
name = "small"
[model]
source = "char"
[pool]
kind = "synthetic"
workers = 2
[deploy]
target = "slurm"
image = "registry/tidemill@sha256:0"
[deploy.slurm]
runs = "/shared/my runs"
preemptible = "spot"
"""
# Sizes as those of Kubernetes, see tests/unit/deploy/test_render.py: 2 CPUs and 3 GiB, and 1 CPU and 2 GiB.
RESERVED = """\
#!/bin/bash
#SBATCH --job-name=small
#SBATCH --output=log
#SBATCH --nodes=1
#SBATCH --signal=TERM@120
#SBATCH --time=90
#SBATCH --partition=high
#SBATCH --qos=normal
#SBATCH --chdir="/shared/my runs/deploy/small"
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --mem=3G
#SBATCH --account=lab
#SBATCH --constraint=ib
# Rendered by `tidemill deploy`. Codes: 130 after a checkpoint, 143 after the notice to a worker.
srun --kill-on-bad-exit=0 --wait=60 --cpus-per-task=2 "${TIDEMILL_PYTHON:-python}" -m \
tidemill.runtime.cluster.launch_node head '--folder=/shared/my runs/deploy/small' --cpus=2 \
'--labels={"ray.io/market-type": "on-demand"}' --marker="$TIDEMILL_MARKER"
code=$?
if [ $code = 130 ] || [ $code = 143 ]; then
  scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
exit $code
"""
OPTIONS = ("reserved=high", "qos=normal", "account=lab", 'options=["--constraint=ib"]')


def slurm(*options: str) -> list[str]:
    return [f"--deploy.slurm.{option}" for option in options]


def test_the_reserved_job_is_as_written_by_hand(rendered: RenderRecipe) -> None:
    assert rendered(*slurm(*OPTIONS), "--deploy.hours=1.5", recipe=RECIPE).files["reserved.sbatch"] == RESERVED


def test_rollouts_are_an_array_of_the_preemptible_partition(rendered: RenderRecipe) -> None:
    script = rendered("--deploy.notice_s=30", "--deploy.hours=2", *slurm("qos=normal"), recipe=RECIPE).files[
        "rollouts.sbatch"
    ]
    lines = script.splitlines()
    for option in ("job-name=small-rollouts", "array=0-1", "partition=spot", "signal=TERM@30", "requeue", "mem=2G"):
        assert f"#SBATCH --{option}" in lines
    assert "--time" not in script and "--qos" not in script
    (srun,) = [shlex.split(line) for line in lines if line.startswith("srun ")]
    assert srun[srun.index("worker") : -1] == [
        "worker",
        "--grace-s=30",
        "--folder=/shared/my runs/deploy/small",
        "--cpus=1",
        '--labels={"ray.io/market-type": "spot"}',
    ]


def test_the_recipe_runs_in_the_shared_folder_on_the_cluster_of_its_job(rendered: RenderRecipe) -> None:
    result = rendered(recipe=RECIPE)
    assert list(result.files) == ["recipe.toml", "reserved.sbatch", "rollouts.sbatch"]
    tree = tomllib.loads(result.files["recipe.toml"])
    assert tree["run"]["dir"] == "/shared/my runs/small"
    assert (tree["runtime"], tree["ray"]["address"]) == ("ray", "auto")
    assert tree["pool"] == {"kind": "ray", "max_workers": 2}
    outside = rendered("--run.dir=/shared/my runs/../other", recipe=RECIPE).files["recipe.toml"]
    assert tomllib.loads(outside)["run"]["dir"] == "/shared/my runs/small"


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ([], '"${TIDEMILL_PYTHON:-python}"'),
        (["environment=/a b/env"], "'/a b/env/bin/python'"),
        (
            ["container=pyxis"],
            "--container-image=registry/tidemill@sha256:0 --container-mounts='/shared/my runs:/shared/my runs' python",
        ),
        (
            ["container=apptainer"],
            "apptainer exec --bind='/shared/my runs:/shared/my runs' docker://registry/tidemill@sha256:0 python",
        ),
    ],
)
def test_the_interpreter(rendered: RenderRecipe, options: list[str], start: str) -> None:
    files = rendered(*slurm(*options), recipe=RECIPE).files
    for name, cpus in (("reserved.sbatch", 2), ("rollouts.sbatch", 1)):
        assert f"srun --kill-on-bad-exit=0 --wait=60 --cpus-per-task={cpus} {start} -m tidemill.runtime" in files[name]


def test_gpus_are_asked_for_on_each_machine_and_given_to_ray(rendered: RenderRecipe) -> None:
    options = ["--ray.trainer_gpus=1", "--ray.worker_gpus=1"]
    files = rendered(*options, *slurm("container=apptainer"), recipe=RECIPE).files
    for name in ("reserved.sbatch", "rollouts.sbatch"):
        assert "\n#SBATCH --gpus-per-node=1\n" in files[name]
        assert " --gpus=1 " in files[name] and "apptainer exec --nv " in files[name]


def test_containers_see_the_folders_of_the_recipes_files(rendered: RenderRecipe, tmp_path: Path) -> None:
    (tmp_path / "functions").mkdir()
    (tmp_path / "functions" / "mine.py").touch()
    (tmp_path / "llama").mkdir()
    recipe = RECIPE.replace('"char"', '"./llama"')
    recipe += '[[scoring.rewards]]\nkind = "python"\nfunction = "functions/mine.py:right"\n'
    script = rendered(*slurm("container=pyxis", "runs=/shared"), recipe=recipe).files["rollouts.sbatch"]
    folders = ("/shared", tmp_path / "llama", tmp_path / "functions")
    (option,) = [each for each in shlex.split(script) if each.startswith("--container-mounts=")]
    assert sorted(option.partition("=")[2].split(",")) == sorted(f"{path}:{path}" for path in folders)


def test_bash_accepts_the_scripts(rendered: RenderRecipe) -> None:
    for script in [text for name, text in rendered(recipe=RECIPE).files.items() if name.endswith(".sbatch")]:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--deploy.slurm.preemptible="], "deploy.slurm.preemptible: missing, and the recipe has rollout workers"),
        (["--deploy.hours=0.09"], "deploy.hours = 0.09: is too short"),
        (["--deploy.slurm.runs=runs"], "is not an absolute path"),
        (["--run.dir=/shared/my runs/"], "run.dir: holds the files of all jobs"),
        (["--run.dir=/shared/my runs/deploy"], "run.dir: holds the files of all jobs"),
        (["--deploy.slurm.runs="], "slurm.runs is missing"),
        (["--deploy.slurm.container=pyxis", "--deploy.image="], "image is missing"),
    ],
)
def test_bad_input(rendered: RenderRecipe, options: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        rendered(*options, recipe=RECIPE)
    assert message in str(error.value)


def test_notes_name_what_only_the_cluster_can_keep(rendered: RenderRecipe) -> None:
    notes = rendered("--checkpoint.every_steps=0", recipe=RECIPE).notes
    assert any("only the end of a job writes a checkpoint" in note for note in notes)
    assert any("15 s between SIGTERM and SIGKILL" in note for note in notes)
    alone = rendered(*slurm("preemptible="), recipe=RECIPE.replace('[pool]\nkind = "synthetic"\nworkers = 2\n', ""))
    assert list(alone.files) == ["recipe.toml", "reserved.sbatch"]
