"""Where folders lie on the machines of a target."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.config.deploy import DeployConfig

RUNS_FOLDER = "/runs"
RECIPE_FOLDER = "/etc/tidemill"
MODELS_FOLDER = "/models"
SKY_FOLDER = "/tmp/tidemill"
"""Jobs of SkyPilot need not be root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Folders by their absolute paths."""

    runs: str = RUNS_FOLDER  # run directories, on a disk that outlives their machine
    recipe: str = RECIPE_FOLDER  # the recipe and the files that it names
    models: str = MODELS_FOLDER
    shares_files: bool = False  # the machines see the files of this one, so that none travels
    keeps_runs: bool = True  # `runs` is on a disk that other jobs see, too


def places_of(deploy: DeployConfig, job: str) -> Places:
    """The folders of a target. Nodes of Slurm share a file system with the machine that submits."""
    if deploy.target == "slurm":
        runs = deploy.slurm.runs.rstrip("/")
        return Places(runs=runs, recipe=f"{runs}/deploy/{job}", shares_files=True)
    if deploy.target == "sky":
        runs = RUNS_FOLDER if deploy.sky.volume else f"{SKY_FOLDER}/runs"
        return Places(runs=runs, recipe=f"{SKY_FOLDER}/recipe")
    if deploy.target == "osmo":  # folders that the image's user may create
        return Places(runs="/tmp/tidemill/runs", models="/tmp/tidemill/models", keeps_runs=False)
    return Places()
