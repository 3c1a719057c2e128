"""A run as a job group of SkyPilot 0.14: a trainer on demand, and one job for each spot machine.

From SkyPilot's source:

- It recovers a job as a whole: with `num_nodes`, one lost machine would restart the others.
- It places a group in one region of one cloud, whose machines reach each other; several clouds are candidates.
- Jobs find each other by name (`trainer-0.GROUP`) only on Kubernetes. Elsewhere the trainer writes its address into a
  bucket that all machines mount.
- It recovers exit codes without a limit, so only 130 (stopped after a checkpoint); FAILOVER then keeps the machine.
- It signals no job before it takes the machine. On Kubernetes its preemption hook does; on virtual machines the
  workers ask the cloud's metadata. So there is nothing to launch Ray for: plain `ray start`.
- `file_mounts` of local files need more than one YAML file, and a variable holds 128 KiB at most: `run` writes the
  recipe and its files.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from base64 import encodebytes
from collections.abc import Iterator, Mapping

from tidemill.config.deploy import BUCKET, DeployConfig
from tidemill.config.keys import did_you_mean
from tidemill.config.toml import tables_to_toml
from tidemill.core.errors import UserError
from tidemill.deploy.cluster_recipe import ClusterRecipe, changes, spot_labels
from tidemill.deploy.documents import Document, to_yaml
from tidemill.deploy.places import SKY_FOLDER, Places
from tidemill.deploy.recipe_files import RECIPE, with_files_on_cluster
from tidemill.deploy.sizes import PodSize, Sizes
from tidemill.hardware.accelerator import accelerator

TRAINER, ROLLOUT = "trainer", "rollout"
TOKEN = "RAY_AUTH_TOKEN"
PORT = 6379
"""Of Ray's head. SkyPilot's own Ray has 6380, and the default port of the agent."""
ADDRESS_FOLDER = "/tidemill-address"
DRAIN_MARGIN_S = 2
RESERVED_GRACE_S = 120
"""Time for a checkpoint when Kubernetes takes the trainer's pod, in seconds."""
CLOUDS = re.compile(
    "kubernetes|k8s|aws|azure|gcp|ibm|lambda|scp|oci|runpod|vast|vsphere|cudo|fluidstack|paperspace|primeintellect|do|"
    "nebius|ssh|slurm|hyperbolic|seeweb|shadeform|yotta|mithril|verda"
)
NAMED = {"kubernetes", "k8s"}
"""Where jobs of a group find each other by name."""
WITH_VOLUMES = {*NAMED, "runpod"}
RAY = "--node-ip-address=$SKYPILOT_NODE_IPS --dashboard-agent-listen-port=52366 --disable-usage-stats"
HEAD = """\
mkdir -p {runs}
ray start --head --block --port={port} --include-dashboard=false {ray} &
ray=$!
address=$SKYPILOT_NODE_IPS:{port}
until ray health-check --address=$address 2> /dev/null; do kill -0 $ray || exit 1; sleep 1; done
{publish}RAY_ADDRESS=$address tidemill train @{recipe} &
echo $! > {folder}/pid
wait $!
code=$?
kill $ray
wait $ray
exit $code
"""
WORKER = """\
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S={drain_s}
rm -f {folder}/stop
until [ -e {folder}/stop ]; do
  ray start --block --address={address} {ray} &
  echo $! > {folder}/pid
  wait $!
  sleep 5
done
"""
STOP = """\
touch {folder}/stop
pid=$(cat {folder}/pid)
kill -TERM $pid
while kill -0 $pid 2> /dev/null; do sleep 0.2; done
"""


def sky_files(ours: ClusterRecipe, deploy: DeployConfig, sizes: Sizes) -> tuple[dict[str, str], list[str]]:
    """The job group as one YAML file, and remarks. Raises UserError: SkyPilot cannot run it."""
    _check(ours, deploy, sizes)
    tree, travelling = with_files_on_cluster(ours.tree, ours.places)
    head, worker = _scripts(ours, deploy, sizes)
    group: Document = {"name": ours.name, "execution": "parallel", "primary_tasks": [TRAINER]}
    if ours.spot_max and not deploy.sky.bucket:
        group["inter_connection"] = True
    recipe = {RECIPE: tables_to_toml(tree).encode(), **travelling.files}
    documents = [group, _task(TRAINER, ours.places, deploy, sizes.reserved, _written(recipe, ours.places) + head)]
    rollout = _written(travelling.files, ours.places) + worker
    documents += [
        _task(f"{ROLLOUT}-{index}", ours.places, deploy, sizes.spot, rollout) for index in range(ours.spot_max)
    ]
    text = "---\n".join(map(to_yaml, documents))
    return {f"{ours.name}.yaml": text}, [*changes(ours.before, tree), *_remarks(ours, deploy)]


def _check(ours: ClusterRecipe, deploy: DeployConfig, sizes: Sizes) -> None:
    sky = deploy.sky
    for infra in sky.clouds:
        if not CLOUDS.fullmatch(cloud := _cloud(infra)):
            names = CLOUDS.pattern.split("|")
            hint = did_you_mean(cloud, names) or f"SkyPilot knows {', '.join(names)}"
            raise UserError("is not a cloud of SkyPilot", where=f"deploy.sky.clouds = {infra}", hint=hint)
    if sizes.reserved_machines > 1:
        what = f"the trainer needs {sizes.reserved_machines} machines, and its job is one machine in SkyPilot"
        raise UserError(what, where="trainer.shards", hint='lower it, or set deploy.target to "slurm" or "kubernetes"')
    clouds = [_cloud(infra) for infra in sky.clouds]
    if ours.spot_max and not sky.bucket and (other := next((each for each in clouds if each not in NAMED), "")):
        what = f"jobs of a group find each other only on Kubernetes, not on {other}"
        raise UserError(what, where="deploy.sky.clouds", hint="set deploy.sky.bucket, or name Kubernetes contexts only")
    volumes = {"sky.volume": sky.volume, "models": "" if deploy.models.startswith(BUCKET) else deploy.models}
    for key, volume in volumes.items():
        if volume and (other := next((each for each in clouds if each not in WITH_VOLUMES), "")):
            hint = "leave it out, or name Kubernetes contexts only"
            raise UserError(f"SkyPilot has no volumes on {other}", where=f"deploy.{key} = {volume}", hint=hint)
    if sizes.reserved.gpus + sizes.spot.gpus and not deploy.accelerator:
        raise UserError("missing, and [ray] asks for GPUs", where="deploy.accelerator", hint="name it, as h100-80gb")


def _cloud(infra: str) -> str:
    return infra.partition("/")[0].lower()


def _sky_gpu(name: str) -> str:
    """SkyPilot's name of a GPU of the catalogue: h100-80gb is H100. It distinguishes two A100."""
    return name.upper() if name == "a100-80gb" else name.partition("-")[0].upper()


def _task(name: str, places: Places, deploy: DeployConfig, size: PodSize, script: str) -> Document:
    sky, reserved = deploy.sky, name == TRAINER
    resources: Document = {"cpus": f"{size.cpus}+", "memory": f"{size.memory_gib}+"}
    if size.gpus and (gpu := accelerator(deploy)):
        resources["accelerators"] = {_sky_gpu(gpu.name): size.gpus}
    resources |= {"use_spot": not reserved, "image_id": f"docker:{deploy.image}"}
    if sky.max_hourly_cost and not reserved:
        resources["max_hourly_cost"] = sky.max_hourly_cost
    resources["job_recovery"] = {"strategy": "FAILOVER", **({"recover_on_exit_codes": [130]} if reserved else {})}
    if sky.clouds:
        resources["any_of"] = [{"infra": infra} for infra in sky.clouds]
    mounts = {
        **({ADDRESS_FOLDER: sky.bucket} if sky.bucket else {}),
        **({places.models: deploy.models} if deploy.models.startswith(BUCKET) else {}),
    }
    volumes = {
        **({places.runs: sky.volume} if sky.volume and reserved else {}),
        **({places.models: deploy.models} if deploy.models and not deploy.models.startswith(BUCKET) else {}),
    }
    hook = {
        "run": STOP.format(folder=SKY_FOLDER),
        "events": ["preemption"],
        "timeout": RESERVED_GRACE_S if reserved else deploy.notice_s,
    }
    return {
        "name": name,
        "resources": resources,
        "secrets": dict.fromkeys(sorted({TOKEN, *deploy.secrets})),
        **({"file_mounts": {at: {"source": url, "mode": "MOUNT"} for at, url in mounts.items()}} if mounts else {}),
        **({"volumes": volumes} if volumes else {}),
        "config": {"hooks": [hook]},
        "run": script,
    }


def _scripts(ours: ClusterRecipe, deploy: DeployConfig, sizes: Sizes) -> tuple[str, str]:
    """What the trainer and a rollout machine run when their files are written."""
    file = f"{ADDRESS_FOLDER}/{ours.name}"
    head = HEAD.format(
        port=PORT,
        ray=_ray(sizes.reserved, {"ray.io/market-type": "on-demand"}),
        runs=ours.places.runs,
        publish=f"echo $address > {file}\n" if deploy.sky.bucket else "",
        recipe=f"{ours.places.recipe}/{RECIPE}",
        folder=SKY_FOLDER,
    )
    worker = WORKER.format(
        drain_s=deploy.notice_s - DRAIN_MARGIN_S,
        address=f'"$(cat {file})"' if deploy.sky.bucket else f"{TRAINER}-0.{ours.name}:{PORT}",
        ray=_ray(sizes.spot, spot_labels(ours.stages)),
        folder=SKY_FOLDER,
    )
    return head, worker


def _ray(size: PodSize, labels: Mapping[str, str]) -> str:
    named = shlex.quote(",".join(f"{key}={value}" for key, value in labels.items()))
    return f"{RAY} --num-cpus={size.cpus} --num-gpus={size.gpus} --labels={named}"


def _written(files: Mapping[str, bytes], places: Places) -> str:
    """Commands that write files; those that a here-document would change as base64."""
    commands = [f"export RAY_AUTH_MODE=token\nmkdir -p {places.recipe}\n"]
    for name, content in files.items():
        end = f"END-{hashlib.sha256(content).hexdigest()[:8]}"
        is_text = content.isascii() and content.endswith(b"\n") and not set(b"\r\0") & set(content)
        text, program = (content, "cat") if is_text else (encodebytes(content), "base64 -d")
        commands.append(f"{program} > {places.recipe}/{name} <<'{end}'\n{text.decode()}{end}\n")
    return "".join(commands)


def _remarks(ours: ClusterRecipe, deploy: DeployConfig) -> Iterator[str]:
    if not deploy.sky.volume:
        yield "warning: without deploy.sky.volume the run is lost with the trainer's machine"
    if ours.spot_max and not (deploy.sky.bucket or deploy.sky.clouds):
        yield "the jobs find each other by name, so SkyPilot places them on Kubernetes; deploy.sky.bucket allows others"
    if ours.spot_max:
        yield f"SkyPilot starts the run when all {1 + ours.spot_max} machines are there"
    if deploy.hours:
        yield "deploy.hours is not used: SkyPilot has no time limit"
