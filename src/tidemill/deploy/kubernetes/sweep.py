"""A sweep: runs of one recipe with other seeds or keys, as a JobSet."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from tidemill.config.deploy import DeployConfig
from tidemill.config.load import STAGES, Layer, Tree, command_line, compose
from tidemill.config.toml import write_value
from tidemill.core.errors import UserError
from tidemill.deploy.documents import Document, job_name
from tidemill.deploy.kubernetes.objects import metadata, resource
from tidemill.deploy.kubernetes.pods import pod_template
from tidemill.deploy.kubernetes.rayjob import recipe_name
from tidemill.deploy.places import RECIPE_FOLDER, RUNS_FOLDER
from tidemill.deploy.recipe_files import RECIPE
from tidemill.deploy.sizes import Sizes

RETRIES = 20
"""Pods of a run after the first: each resumes it."""
LONGEST_NAME = 40
"""Characters of a JobSet's name: pods append those of run and index."""
INVALID_CODE = 2
FIXED = ("run.dir", "deploy.", "pool.", "ray.", "runtime")
"""Keys that a sweep sets itself."""


def one_machine(tree: Tree) -> dict[str, str]:
    """Keys with which a recipe runs in one pod, without other machines."""
    return {"pool.kind": "static", "pool.workers": "0", **({"ray.address": ""} if "ray" in tree else {})}


def as_options(keys: Mapping[str, str]) -> list[str]:
    return [f"--{key}={text}" for key, text in keys.items()]


def sweep_runs(deploy: DeployConfig, tree: Tree) -> list[list[str]]:
    """The options of each run; none without a sweep.

    Raises:
        UserError: the recipe has stages, or a key cannot be swept.
        ConfigError: a run would be invalid.
    """
    where = "deploy.sweep"
    if not deploy.sweep.seeds and not deploy.sweep.overrides:
        return []
    if STAGES in tree:
        raise UserError("a sweep has runs, and the recipe has stages", where=where, hint="sweep a recipe without them")
    seeds = [{"run.seed": seed} for seed in deploy.sweep.seeds] or [{}]
    runs = list[list[str]]()
    for seed, override in itertools.product(seeds, deploy.sweep.overrides or ({},)):
        values = {**override, **seed}
        for key in values:
            if key.startswith(FIXED):
                raise UserError("is set by the sweep itself", where=f"{where}.overrides: {key}", hint="leave it out")
        texts = {key: value if isinstance(value, str) else write_value(value) for key, value in values.items()}
        texts = one_machine(tree) | texts
        assignments = [(tuple(key.split(".")), text) for key, text in texts.items()]
        compose([Layer(name="the recipe", tree=tree), command_line(assignments)], purpose="train")
        runs.append(as_options(texts))
    return runs


def sweep_notes(deploy: DeployConfig, runs: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "each run of the sweep has one machine, and no preemptible one; when a run fails for good, JobSet ends all"
    if len(runs) > 1:
        yield f"{len(runs)} runs on several nodes: the claim {deploy.storage} must be ReadWriteMany (Filestore, Lustre)"


def job_set(deploy: DeployConfig, job: str, runs: Sequence[Sequence[str]], pods: Sizes) -> Document:
    """The JobSet; its run I is in /runs/JOB-I. Each run has one machine, and resumes after the loss of its pod.

    Raises:
        UserError: a run needs several machines.
    """
    if pods.reserved_machines > 1:
        hint = "lower trainer.shards, or start the runs one by one as recipes of their own"
        raise UserError("a run of a sweep has one machine", where="deploy.sweep", hint=hint)
    name = job_name(job, LONGEST_NAME)
    queued = {"labels": {"kueue.x-k8s.io/queue-name": deploy.queue}} if deploy.queue else {}
    jobs = [
        {"name": f"run-{index}", "replicas": 1, "template": _run(deploy, job, index, options, pods)}
        for index, options in enumerate(runs)
    ]
    spec = {"network": {"enableDNSHostnames": False}, "replicatedJobs": jobs}
    return resource("jobset.x-k8s.io/v1alpha2", "JobSet", metadata(deploy, name, job=job, **queued), spec=spec)


def _run(deploy: DeployConfig, job: str, index: int, options: Sequence[str], pods: Sizes) -> Document:
    directory = f"--run.dir={RUNS_FOLDER}/{job}-{index}"
    command = ["tidemill", "train", f"@{RECIPE_FOLDER}/{RECIPE}", directory, *options]
    size = pods.reserved
    template = pod_template(
        deploy,
        "run",
        job=job,
        spot=False,
        cpus=size.cpus,
        memory_gib=size.memory_gib,
        gpus=size.gpus,
        recipe=recipe_name(job),
        container={"command": command},
    )
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"containerName": "run", "operator": "In", "values": [INVALID_CODE]}},
    ]
    job_spec = {"parallelism": 1, "completions": 1, "backoffLimit": RETRIES, "podFailurePolicy": {"rules": rules}}
    return {"spec": {**job_spec, "template": template}}
