"""The recipe as it runs on the cluster, and the keys that change."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.config.deploy import BUCKET, DeployConfig
from tidemill.config.issues import COMMAND_LINE
from tidemill.config.keys import flattened
from tidemill.config.load import STAGES, Layer, Tree, compose
from tidemill.config.pipeline import KINDS, PipelineSpec, StageKind, StageSpec, compose_stages
from tidemill.config.pool import PoolConfig, RayPool, StaticPool, SyntheticPool
from tidemill.config.schema import RunSpec
from tidemill.config.toml import write_value
from tidemill.core.errors import UserError
from tidemill.deploy.documents import job_name
from tidemill.deploy.places import Places, places_of

MARKET = "ray.io/market-type"
SPOT = "spot"
SECRET_VALUE = re.compile(
    r"\b(hf_\w{16}|sk-[\w-]{16}|gh[pousr]_\w{20}|glpat-[\w-]{16}|xox[abp]-[\w-]{10}|AKIA[0-9A-Z]{16}|AIza[\w-]{30})"
    r"|hooks\.slack\.com/services/|-----BEGIN [A-Z ]*PRIVATE KEY"
)
"""Tokens of Hugging Face, OpenAI and Anthropic, GitHub, GitLab, Slack, AWS and Google; private keys. Sections refuse
URLs with passwords themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRecipe:
    """A recipe that runs on the cluster. Its input paths are still those of this machine."""

    name: str  # of the job
    tree: Tree  # the keys that are set
    stages: tuple[tuple[StageKind, RunSpec], ...]  # a run without stages is one of kind rl
    spot_max: int  # preemptible machines: deploy.spot_max, or the workers of the largest pool
    before: Tree  # the keys that the user set
    places: Places
    steps: tuple[StageSpec, ...]  # the stages as the user wrote them; a run without stages is one, named after the job


def on_cluster(recipe: RunSpec | PipelineSpec, deploy: DeployConfig) -> ClusterRecipe:
    """Change a recipe so that its machines are those of the cluster.

    Raises:
        UserError: a setting that the cluster does not allow.
    """
    name = job_name(recipe.run.name)
    before, places = _written(recipe), places_of(deploy, name)
    steps = recipe.stages if isinstance(recipe, PipelineSpec) else (StageSpec(name=name, kind="rl", spec=recipe),)
    refuse_secrets(before)
    if deploy.target != "osmo":
        _refuse_other_machines(steps, deploy)
    _check_directory(recipe.run.dir, places)
    tree = deepcopy(before)
    run = tree.setdefault("run", {})
    if not _is_below(str(recipe.run.dir), places.runs):
        run["dir"] = f"{places.runs}/{name}"
    for step, table in zip(steps, tree.get(STAGES, [tree]), strict=True):
        kind, spec = step.kind, step.spec
        if deploy.target == "osmo":
            _keep_on_one_machine(kind, table, spec)
            continue
        if "runtime" in KINDS[kind].sections:
            _check_nodes(spec, deploy)
            table["runtime"] = "ray"
            table["ray"] = {**table.get("ray", {}), "address": "auto"}
        if "pool" in KINDS[kind].sections:
            _to_ray_pool(table, spec.pool, deploy)
    stages = _checked(tree)
    workers = max((each.pool.max_workers for _, each in stages if isinstance(each.pool, RayPool)), default=0)
    spot_max = workers if deploy.spot_max is None else deploy.spot_max
    return ClusterRecipe(
        name=name, tree=tree, stages=stages, spot_max=spot_max, before=before, places=places, steps=steps
    )


def changes(before: Tree, after: Tree) -> Iterator[str]:
    """One line for each key that differs, in the order of the keys."""
    old, new = dict(_settings(before)), dict(_settings(after))
    for key in dict.fromkeys([*old, *new]):
        if key not in new:
            yield f"{key} is left out"
        elif key not in old:
            yield f"{key} = {write_value(new[key])}"
        elif old[key] != new[key]:
            yield f"{key} = {write_value(new[key])} instead of {write_value(old[key])}"


def _settings(tree: Tree) -> Iterator[tuple[str, Any]]:
    yield from flattened({name: value for name, value in tree.items() if name != STAGES}).items()
    for table in tree.get(STAGES, ()):
        yield from ((f"{STAGES}.{table['name']}.{key}", value) for key, value in flattened(table).items())


def _written(recipe: RunSpec | PipelineSpec) -> Tree:
    """The keys that the user set, without [deploy]."""
    if isinstance(recipe, RunSpec):
        return recipe.model_dump(mode="json", exclude_unset=True, exclude={"deploy"})
    tables = []
    for stage in recipe.stages:
        sections = stage.spec.model_dump(mode="json", exclude_unset=True, include=set(KINDS[stage.kind].sections))
        run = {key: value for key, value in sections.pop("run", {}).items() if key not in ("name", "dir")}
        tables.append({"name": stage.name, "kind": stage.kind, **({"run": run} if run else {}), **sections})
    return {"run": recipe.run.model_dump(mode="json", exclude_unset=True), STAGES: tables}


def _checked(tree: Tree) -> tuple[tuple[StageKind, RunSpec], ...]:
    """The stages of the changed recipe. Raises ConfigError: the changes contradict the rest of the recipe."""
    layer = Layer(name="the recipe on the cluster", tree=tree)
    if STAGES not in tree:
        return (("rl", compose([layer], purpose="train")),)
    pipeline = compose_stages([layer, Layer(name=COMMAND_LINE, tree={})])
    return tuple((stage.kind, stage.spec) for stage in pipeline.stages)


def refuse_secrets(value: Any, key: str = "") -> None:
    """Raises UserError: a text in a tree is the value of a secret. The message does not repeat it."""
    if isinstance(value, dict):
        for name, below in value.items():
            refuse_secrets(below, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for index, below in enumerate(value):
            refuse_secrets(below, f"{key}[{index}]")
    elif isinstance(value, str) and SECRET_VALUE.search(value):
        hint = 'put it into a Secret, and write [deploy.secrets] VARIABLE = "secret/key"'
        raise UserError("contains a secret, which every reader of the job would see", where=key, hint=hint)


def _is_below(path: str, folder: str) -> bool:
    path = posixpath.normpath(path)  # without ..
    return path == folder or path.startswith(f"{folder}/")


def _check_directory(directory: Path | None, places: Places) -> None:
    path = str(directory or "")
    if path.startswith((BUCKET, "gs:/")) or _is_below(path, places.models):
        what = "is on an object store (GCS FUSE), which cannot hold the run's journal, a database"
        hint = f"leave it out: runs are written to {places.runs}, on the storage"
        raise UserError(what, where="run.dir", hint=hint)


def _check_nodes(spec: RunSpec, deploy: DeployConfig) -> None:
    """Raises UserError: the trainer would run on preemptible nodes, or flex-start has nothing to provision."""
    if spec.ray.reserved_selector.get(MARKET) == SPOT:
        hint = f'leave it out, or set {{ "{MARKET}" = "on-demand" }}'
        raise UserError("places the trainer on preemptible nodes", where="ray.reserved_selector", hint=hint)
    if deploy.flex_start and not spec.ray.trainer_gpus:
        what = "provisions GPUs for the reserved part, which has none (preemptible nodes are not for flex-start)"
        raise UserError(what, where="deploy.flex_start", hint="set ray.trainer_gpus, or leave flex_start out")


def _refuse_other_machines(steps: Sequence[StageSpec], deploy: DeployConfig) -> None:
    """Raises UserError: a stage asks for another machine, and the target runs all stages in one job."""
    others = {"slurm", "sky", "osmo"} - {deploy.target}  # sections of other targets are ignored
    whole = deploy.model_dump(exclude=others)
    for step in steps:
        own = step.deploy.model_dump(exclude=others) if step.deploy else whole
        if key := next((key for key in own if own[key] != whole[key]), ""):
            what = f"gives the stage another machine, and {deploy.target} runs all stages of a recipe in one job"
            hint = 'leave it out, or set deploy.target = "osmo", which runs each stage as a task'
            raise UserError(what, where=f"{STAGES}.{step.name}.deploy.{key}", hint=hint)


def _keep_on_one_machine(kind: StageKind, table: Tree, spec: RunSpec) -> None:
    """Rollout workers run beside the trainer, where nothing evicts them; with GPUs on a Ray cluster of that machine."""
    workers = _workers(spec.pool)
    if "pool" in KINDS[kind].sections and not isinstance(spec.pool, StaticPool):
        table["pool"] = {"kind": "static", "workers": workers}
    on_gpus = spec.ray.trainer_gpus or (workers and spec.ray.worker_gpus)
    if "runtime" in KINDS[kind].sections and (on_gpus or spec.runtime == "ray"):
        table["runtime"] = "ray"
        table["ray"] = {**table.get("ray", {}), "address": "", "reserved_selector": {}}


def _workers(pool: PoolConfig) -> int:
    return pool.workers if isinstance(pool, StaticPool | SyntheticPool) else pool.max_workers


def _to_ray_pool(table: Tree, pool: PoolConfig, deploy: DeployConfig) -> None:
    """Replace simulated machines by those of the autoscaler. Raises UserError: there would be fewer than the pool's."""
    workers = _workers(pool)
    if deploy.spot_max is not None and deploy.spot_max < workers:
        what = f"is {deploy.spot_max}, fewer than the {workers} workers of the pool"
        key = "max_workers" if isinstance(pool, RayPool) else "workers"
        raise UserError(what, where="deploy.spot_max", hint=f"raise it to {workers}, or lower pool.{key}")
    if not isinstance(pool, RayPool) and (workers or deploy.spot_max):
        table["pool"] = {"kind": "ray", "max_workers": workers or deploy.spot_max}


def spot_labels(stages: Sequence[tuple[StageKind, RunSpec]]) -> dict[str, str]:
    """Ray labels of the preemptible group: those that the pools select."""
    labels: dict[str, str] = {}
    for _, spec in stages:
        if isinstance(spec.pool, RayPool):
            labels |= {key: value for key, value in spec.pool.selector.items() if not value.startswith(("!", "in("))}
    return labels or {MARKET: SPOT}
