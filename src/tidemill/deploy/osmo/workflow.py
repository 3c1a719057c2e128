"""A recipe as a workflow of OSMO: each stage is a task, and the folders of finished stages travel between tasks.

Rollout workers run inside the task of their stage. OSMO could reschedule them alone, as tasks of a group beside its
lead, but it preempts by the priority of the whole workflow: they would cost as much and be lost together.
"""

from __future__ import annotations

import shlex
from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from tidemill.config.deploy import BUCKET, DeployConfig
from tidemill.config.keys import dotted
from tidemill.config.load import STAGES, Tree
from tidemill.config.pipeline import StageSpec
from tidemill.config.toml import tables_to_toml
from tidemill.core.errors import UserError
from tidemill.deploy.cluster_recipe import ClusterRecipe, changes
from tidemill.deploy.documents import job_name, to_yaml
from tidemill.deploy.osmo.model import (
    Checkpoint,
    File,
    Resource,
    Task,
    TaskInput,
    Timeout,
    UrlData,
    Workflow,
    WorkflowFile,
)
from tidemill.deploy.places import MODELS_FOLDER, RUNS_FOLDER
from tidemill.deploy.recipe_files import RECIPE, with_files_on_cluster
from tidemill.deploy.sizes import ModelsOf, Sizes, sizes

SCRIPT = "stage.sh"
CHECKPOINT_EVERY = "10m"
"""Between two uploads of a stage's folder."""
RESCHEDULED = "130,3001,3006"
"""Stopped after a checkpoint; OSMO's codes of a lost node and of a preemption."""
GUARD_STOPPED = "3"
DIGEST_CHARS = 10
"""Of the digest in the name of a stage's folder."""
NOT_UPLOADED = r"(?!(.*/)?(ledger\.sqlite|stage\.json$|\.))"
"""Files of a running stage: its journal, of which a copy during a write would be damaged (the stage resumes from its
checkpoint); the mark of a finished stage, before whose output a node may be lost; hidden files, which vanish."""
TEMPLATE_MARKS = ("{{", "{%", "{#", "default-values")
"""OSMO would read a file with one of these as a template."""


def osmo_files(ours: ClusterRecipe, deploy: DeployConfig, models_of: ModelsOf) -> tuple[dict[str, str], list[str]]:
    """The workflow, and remarks.

    Raises:
        UserError: a stage does not fit one machine, or needs a file that its task would not have.
    """
    for step in ours.steps:
        _refuse_other_storage(step, deploy)
    tree, travelling = with_files_on_cluster(_with_models(ours.tree, ours.places.models), ours.places)
    recipe = {RECIPE: tables_to_toml(tree).encode(), **travelling.files}
    files = tuple(_file(f"{ours.places.recipe}/{name}", content) for name, content in recipe.items())
    deploys = _stage_deploys(ours, deploy)
    machines = [_sizes(ours, at, own, models_of) for at, own in enumerate(deploys)]
    resources = {
        job_name(step.name): _resource(ours, at, own, size)
        for at, (step, own, size) in enumerate(zip(ours.steps, deploys, machines, strict=True))
    }
    try:
        tasks = tuple(_task(ours, at, own, files) for at, own in enumerate(deploys))
        timeout = Timeout(exec_timeout=f"{round(60 * deploy.hours)}m" if deploy.hours else None)
        workflow = Workflow(name=ours.name, pool=deploy.osmo.pool, timeout=timeout, resources=resources, tasks=tasks)
    except ValidationError as error:
        first = error.errors()[0]
        where = dotted(tuple(first["loc"])) or "workflow of OSMO"
        raise UserError(first["msg"], where=where, hint="rename the stages, or correct deploy.osmo") from error
    document = WorkflowFile(workflow=workflow).model_dump(mode="json", exclude_defaults=True)
    notes = [*changes(ours.before, tree), *(note for size in machines for note in size.notes)]
    return {f"{ours.name}.yaml": to_yaml(document)}, list(
        dict.fromkeys([*notes, *_remarks(ours, deploys, travelling.files)])
    )


def _stage_deploys(ours: ClusterRecipe, deploy: DeployConfig) -> list[DeployConfig]:
    """[deploy] of each stage. The GPU of the whole job is left out where a stage uses none and others do."""
    gpus = [bool(spec.ray.trainer_gpus or spec.ray.worker_gpus) for _, spec in ours.stages]
    deploys = [step.deploy or deploy for step in ours.steps]
    return [
        own.model_copy(update={"accelerator": ""})
        if any(gpus) and not uses and own.accelerator == deploy.accelerator
        else own
        for own, uses in zip(deploys, gpus, strict=True)
    ]


def _sizes(ours: ClusterRecipe, at: int, deploy: DeployConfig, models_of: ModelsOf) -> Sizes:
    try:
        return sizes([ours.stages[at]], deploy, models_of)
    except UserError as error:
        raise UserError(error.what, where=f"stage {ours.steps[at].name}, {error.where}", hint=error.hint) from error


def _resource(ours: ClusterRecipe, at: int, deploy: DeployConfig, size: Sizes) -> Resource:
    """The machine of a stage with its rollout workers. Raises UserError: it would be several."""
    _, spec = ours.stages[at]
    if size.reserved_machines > 1:
        what = f"takes {size.reserved_machines} machines, and a task of OSMO is one machine"
        hint = 'lower trainer.shards or ray.trainer_gpus, or set deploy.target to "kubernetes" or "slurm"'
        raise UserError(what, where=f"stage {ours.steps[at].name}", hint=hint)
    workers = spec.pool.workers if spec.pool.kind == "static" else 0
    return Resource(
        cpu=size.reserved.cpus + workers * size.spot.cpus,
        memory=f"{size.reserved.memory_gib + workers * size.spot.memory_gib}Gi",
        storage=deploy.storage_size or None,
        gpu=size.reserved.gpus + workers * size.spot.gpus or None,
        platform=deploy.osmo.platform or None,
    )


def _task(ours: ClusterRecipe, at: int, deploy: DeployConfig, files: tuple[File, ...]) -> Task:
    """The task of a stage: it gets the folders of the stages before it, and leaves its own as its output."""
    step, run = ours.steps[at], str(ours.tree["run"]["dir"])
    has_stages = STAGES in ours.tree
    # What the script copies and OSMO uploads: folders of stages, or that of the run.
    folder = f"{run}/stages" if has_stages else run
    kept = f"{deploy.osmo.url.rstrip('/')}/{ours.name}/{step.name}" if deploy.osmo.url else ""
    needed = _needed(ours.steps, step)
    models = _models(step)
    inputs: list[TaskInput | UrlData] = [TaskInput(task=job_name(name)) for name in needed]
    inputs += [UrlData(url=f"{deploy.models.rstrip('/')}/{name}") for name in models]
    inputs += [UrlData(url=f"{kept}/{folder.rpartition('/')[2]}")] if kept else []
    own = f"{step.name}-{'[0-9a-f]' * DIGEST_CHARS}"
    quoted = shlex.quote(folder)
    lines = ["set -e", f"mkdir -p {quoted} {ours.places.models}"]
    lines += [f"ln -sfn {{{{input:{index}}}}}/* {quoted}/" for index in range(len(needed))]
    lines += [
        f"ln -sfn {{{{input:{index}}}}} {ours.places.models}/{name}" for index, name in enumerate(models, len(needed))
    ]
    lines += [f"cp -R {{{{input:{len(inputs) - 1}}}}}/. {quoted}/"] if kept else []
    lines.append(f"tidemill train @{ours.places.recipe}/{RECIPE}" + (f" --only {step.name}" if has_stages else ""))
    lines.append(f"cp -R {quoted}/{own if has_stages else '.'} {{{{output}}}}/")
    script = File(path=f"{ours.places.recipe}/{SCRIPT}", contents="\n".join(lines) + "\n")
    uploaded = f"(.*/)?{step.name}-[0-9a-f]{{{DIGEST_CHARS}}}/.*" if has_stages else ".*"
    return Task(
        name=job_name(step.name),
        image=deploy.image,
        command=("sh",),
        args=(script.path,),
        credentials=_credentials(deploy),
        inputs=tuple(inputs),
        files=(*files, script),
        resource=job_name(step.name),
        exitActions={"FAIL": GUARD_STOPPED, "RESCHEDULE": RESCHEDULED},
        checkpoint=(Checkpoint(path=folder, url=kept, frequency=CHECKPOINT_EVERY, regex=NOT_UPLOADED + uploaded),)
        if kept
        else (),
    )


def _needed(steps: Sequence[StageSpec], step: StageSpec) -> list[str]:
    """The stages that a stage depends on, directly or not, in their order: its digest and reports name all of them."""
    needs = {each.name: each.needs for each in steps}
    found = set(step.needs)
    while more := {name for each in found for name in needs[each]} - found:
        found |= more
    return [name for name in needs if name in found]


def _models(step: StageSpec) -> list[str]:
    """The folders of deploy.models that a stage reads."""
    values = [value for _, value in step.sources() if value.startswith(f"{MODELS_FOLDER}/")]
    return list(dict.fromkeys(value.split("/")[2] for value in values))


def _refuse_other_storage(step: StageSpec, deploy: DeployConfig) -> None:
    """Raises UserError: the stage names a file of a storage that its task does not have."""
    for location, value in step.sources():
        where = f"stage {step.name}, {dotted(location)} = {value}"
        if value.startswith(f"{RUNS_FOLDER}/"):
            what = "lies on the storage of other jobs, which a task of OSMO does not have"
            hint = (
                'write "stage:NAME" for the output of a stage of this recipe, or copy it to the bucket of deploy.models'
            )
            raise UserError(what, where=where, hint=f"{hint} and write {MODELS_FOLDER}/...")
        if value.startswith(f"{MODELS_FOLDER}/") and not deploy.models.startswith(BUCKET):
            what = "lies on deploy.models, which is no bucket: a task of OSMO has no claims of Kubernetes"
            raise UserError(what, where=where, hint=f'set deploy.models = "{BUCKET}BUCKET"')


def _with_models(value: Any, folder: str) -> Any:
    """A tree with the models in another folder."""
    if isinstance(value, dict):
        return {name: _with_models(below, folder) for name, below in value.items()}
    if isinstance(value, list):
        return [_with_models(below, folder) for below in value]
    is_model = isinstance(value, str) and value.startswith(f"{MODELS_FOLDER}/")
    return folder + value.removeprefix(MODELS_FOLDER) if is_model else value


def _file(path: str, content: bytes) -> File:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = ""
    if text and not any(mark in text for mark in TEMPLATE_MARKS):
        return File(path=path, contents=text)
    return File(path=path, contents=b64encode(content).decode(), base64=True)


def _credentials(deploy: DeployConfig) -> dict[str, str | dict[str, str]]:
    """The variables of each credential."""
    found: dict[str, dict[str, str]] = {}
    for variable, source in sorted(deploy.secrets.items()):
        name, _, key = source.partition("/")
        found.setdefault(name, {})[variable] = key
    return dict(found)


def _remarks(ours: ClusterRecipe, deploys: Sequence[DeployConfig], files: Tree) -> Iterator[str]:
    for step, (_, spec) in zip(ours.steps, ours.stages, strict=True):
        if spec.pool.kind == "static" and spec.pool.workers:
            yield f"stage {step.name}: its {spec.pool.workers} rollout workers run in its task"
    if unkept := [step.name for step, deploy in zip(ours.steps, deploys, strict=True) if not deploy.osmo.url]:
        yield f"deploy.osmo.url is not set: {', '.join(unkept)} starts again when OSMO reschedules it"
    if any(deploy.hours for deploy in deploys):
        yield "deploy.hours: OSMO stops a stage then, and counts its reschedules; `tidemill deploy apply` resumes it"
    if any(name.endswith(".py") for name in files):
        yield "of user functions only the named files travel; modules that they import must be in the image"
