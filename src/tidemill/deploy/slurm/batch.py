"""Batch scripts of a job: a reserved one with head and trainer, and an array of preemptible rollout workers.

Slurm sends SIGTERM to every process of a job and requeues a job only when it is preempted or loses a node. So each
script starts Ray through `launch_node`, and requeues itself after the exit codes of a checkpoint and a drained node.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tidemill.config.deploy import DeployConfig
from tidemill.config.toml import tables_to_toml
from tidemill.core.errors import UserError
from tidemill.deploy.cluster_recipe import MARKET, ClusterRecipe, changes, spot_labels
from tidemill.deploy.recipe_files import RECIPE, with_files_on_cluster
from tidemill.deploy.sizes import PodSize, Sizes

RESERVED, ROLLOUTS = "reserved.sbatch", "rollouts.sbatch"
LOG, ROLLOUTS_LOG = "log", "log-rollouts-%a"
CHECKPOINT_S = 120
"""From SIGTERM to the time limit of the reserved job, in seconds: time for a checkpoint."""
SHORTEST_HOURS = 0.1
"""Slurm may signal a minute early, and Ray, the models and the first step take some minutes."""
WAIT_S = 60
"""From the end of one machine of the reserved job to SIGKILL of the others, in seconds."""
MARKER, PYTHON = "TIDEMILL_MARKER", "TIDEMILL_PYTHON"
"""Environment variables that `tidemill deploy apply` sets."""
SCRIPT = """\
#!/bin/bash
{options}
# Rendered by `tidemill deploy`. Codes: 130 after a checkpoint, 143 after the notice to a worker.
{srun}
code=$?
if [ $code = 130 ] || [ $code = 143 ]; then
  scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
exit $code
"""


def slurm_files(ours: ClusterRecipe, deploy: DeployConfig, sizes: Sizes) -> tuple[dict[str, str], list[str]]:
    """The recipe and the batch scripts, and remarks.

    Raises:
        UserError: there is no partition for the rollouts, or the time limit is too short.
    """
    slurm = deploy.slurm
    if ours.spot_max and not slurm.preemptible:
        hint = "name a partition whose jobs Slurm may preempt and requeue (`sinfo -s` lists them), or set spot_max = 0"
        raise UserError("missing, and the recipe has rollout workers", where="deploy.slurm.preemptible", hint=hint)
    if 0 < deploy.hours < SHORTEST_HOURS:
        hint = f"set it to {SHORTEST_HOURS:g} or more, or leave it out"
        what = f"is too short for a start, a step and the {CHECKPOINT_S} s that are left for a checkpoint"
        raise UserError(what, where=f"deploy.hours = {deploy.hours:g}", hint=hint)
    tree, travelling = with_files_on_cluster(ours.tree, ours.places)  # the nodes share the files
    mounts = [slurm.runs, *(str(path) for path in travelling.shared)]
    if Path(ours.places.recipe).is_relative_to(tree["run"]["dir"]):
        hint = f"leave it out, or name another folder below {ours.places.runs}"
        raise UserError("holds the files of all jobs", where="run.dir", hint=hint)
    limit = [f"--time={math.ceil(deploy.hours * 60)}"] if deploy.hours else []
    reserved = [
        f"--job-name={ours.name}",
        f"--output={LOG}",
        f"--nodes={sizes.reserved_machines}",
        f"--signal=TERM@{CHECKPOINT_S}",
        *limit,
        *_chosen({"partition": slurm.reserved, "qos": slurm.qos}),
    ]
    files = {RECIPE: tables_to_toml(tree)}
    files[RESERVED] = _script(ours, deploy, sizes.reserved, mounts, reserved, ["head"], {MARKET: "on-demand"})
    if ours.spot_max:
        rollouts = [
            f"--job-name={ours.name}-rollouts",
            f"--output={ROLLOUTS_LOG}",
            "--nodes=1",
            f"--array=0-{ours.spot_max - 1}",
            f"--signal=TERM@{deploy.notice_s}",
            *_chosen({"partition": slurm.preemptible}),
        ]
        role = ["worker", f"--grace-s={deploy.notice_s}"]
        files[ROLLOUTS] = _script(ours, deploy, sizes.spot, mounts, rollouts, role, spot_labels(ours.stages))
    return files, [*changes(ours.before, tree), *_remarks(ours, deploy)]


def _script(
    ours: ClusterRecipe,
    deploy: DeployConfig,
    size: PodSize,
    mounts: Sequence[str],
    options: Sequence[str],
    role: Sequence[str],
    labels: Mapping[str, str],
) -> str:
    folder = ours.places.recipe
    every = [
        *options,
        f"--chdir={folder}",
        "--open-mode=append",
        "--requeue",
        "--ntasks-per-node=1",
        f"--cpus-per-task={size.cpus}",
        f"--mem={size.memory_gib}G",
        *([f"--gpus-per-node={size.gpus}"] if size.gpus else []),
        *_chosen({"account": deploy.slurm.account}),
        *deploy.slurm.options,
    ]
    gpus = [f"--gpus={size.gpus}"] if size.gpus else []
    node = [*role, f"--folder={folder}", f"--cpus={size.cpus}", *gpus, f"--labels={json.dumps(labels)}"]
    python = _python(deploy, size, mounts)
    program = f'-m tidemill.runtime.cluster.launch_node {shlex.join(node)} --marker="${MARKER}"'
    # The other machines of the trainer end by themselves after the head, whose code is to be that of the step.
    srun = f"srun --kill-on-bad-exit=0 --wait={WAIT_S} --cpus-per-task={size.cpus}"
    return SCRIPT.format(
        options="\n".join(f"#SBATCH {_quoted(each)}" for each in every), srun=f"{srun} {python} {program}"
    )


def _python(deploy: DeployConfig, size: PodSize, mounts: Sequence[str]) -> str:
    """The interpreter in a container, a virtual environment, or the one of `tidemill deploy apply`."""
    slurm = deploy.slurm
    places = shlex.quote(",".join(f"{path}:{path}" for path in dict.fromkeys(mounts)))
    if slurm.container == "pyxis":
        return f"--container-image={shlex.quote(deploy.image)} --container-mounts={places} python"
    if slurm.container == "apptainer":
        image = deploy.image if deploy.image.startswith("/") else f"docker://{deploy.image}"
        gpus = "--nv " if size.gpus else ""
        return f"apptainer exec {gpus}--bind={places} {shlex.quote(image)} python"
    return shlex.quote(f"{slurm.environment}/bin/python") if slurm.environment else f'"${{{PYTHON}:-python}}"'


def _chosen(options: Mapping[str, str]) -> Iterator[str]:
    yield from (f"--{name}={value}" for name, value in options.items() if value)


def _quoted(option: str) -> str:
    """An option as sbatch reads it in a script, where quotes hold a value with spaces together."""
    name, _, value = option.partition("=")
    return f'{name}="{value}"' if " " in value else option


def _remarks(ours: ClusterRecipe, deploy: DeployConfig) -> Iterator[str]:
    if any(spec.checkpoint.every_steps == 0 for _, spec in ours.stages):
        yield "checkpoint.every_steps = 0: only the end of a job writes a checkpoint, and a lost node loses all steps"
    if ours.spot_max:
        yield (
            f"Slurm must give the jobs of partition {deploy.slurm.preemptible} {deploy.notice_s} s between SIGTERM and "
            "SIGKILL (GraceTime), as deploy.notice_s says"
        )
