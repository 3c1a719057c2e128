"""Rendering: a recipe with [deploy] as the files of a job. Pure: the same input gives the same bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tidemill.config.deploy import KUBERNETES, DeployConfig
from tidemill.config.pipeline import load_recipe
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.deploy.cluster_recipe import ClusterRecipe, on_cluster
from tidemill.deploy.documents import Rendered
from tidemill.deploy.sizes import ModelsOf, sizes
from tidemill.hardware.process_memory import Models


def unknown_models(spec: RunSpec) -> Models | None:
    return None


def render(sources: Sequence[str], *, admin: bool = False, models_of: ModelsOf = unknown_models) -> Rendered:
    """The files of a recipe, in the order in which they are applied.

    Args:
        sources: `@recipe.toml` and `--section.key value`.
        admin: the administrator's part of a Kubernetes cluster instead: quotas, queues, monitoring.
        models_of: finds the shapes of the recipe's models, for the memory of pods.

    Raises:
        UserError: the recipe or [deploy] is invalid, or does not fit the machines.
    """
    recipe = load_recipe(sources)
    deploy = recipe.deploy
    if deploy.target == "none":
        hint = 'add a section [deploy] with target = "gke", "kubernetes", "slurm", "sky" or "osmo", and image'
        raise UserError("missing", where="deploy.target", hint=hint)
    ours = on_cluster(recipe, deploy)
    if deploy.target not in KUBERNETES:
        _refuse_kubernetes_only(deploy, admin=admin)
    files, notes = _target_files(ours, deploy, models_of, admin=admin)
    if not admin:
        notes = [*notes, *_remarks(ours, deploy)]
    return Rendered(files=files, notes=notes, job=ours.name, deploy=deploy)


def _target_files(
    ours: ClusterRecipe, deploy: DeployConfig, models_of: ModelsOf, *, admin: bool
) -> tuple[dict[str, str], list[str]]:
    """The files of a job by name, and remarks. Loads the modules of its target only, so that rendering is quick."""
    if deploy.target == "osmo":  # each stage has a machine of its own size
        from tidemill.deploy.osmo.workflow import osmo_files

        return osmo_files(ours, deploy, models_of)
    machines = sizes(ours.stages, deploy, models_of)
    if deploy.target == "slurm":
        from tidemill.deploy.slurm.batch import slurm_files

        files, notes = slurm_files(ours, deploy, machines)
    elif deploy.target == "sky":
        from tidemill.deploy.sky.tasks import sky_files

        files, notes = sky_files(ours, deploy, machines)
    else:
        from tidemill.deploy.kubernetes.job import kubernetes_admin_files, kubernetes_files

        if admin:
            return kubernetes_admin_files(ours, deploy, machines)
        files, notes = kubernetes_files(ours, deploy, machines)
    return files, [*notes, *machines.notes]


def _refuse_kubernetes_only(deploy: DeployConfig, *, admin: bool) -> None:
    """Raises UserError: a part that only Kubernetes has is asked of another target."""
    sweep = deploy.sweep.seeds or deploy.sweep.overrides
    parts = {"--admin": admin, "deploy.sweep": sweep, "deploy.serve.model": deploy.serve.model}
    if where := next((name for name, is_set in parts.items() if is_set), ""):
        hint = 'leave it out, or set deploy.target to "gke" or "kubernetes"'
        raise UserError(f"is not rendered for {deploy.target}", where=where, hint=hint)


def _remarks(ours: ClusterRecipe, deploy: DeployConfig) -> Iterator[str]:
    if ours.name != ours.tree["run"].get("name", ours.name):
        yield f"the job is named {ours.name}"
    if deploy.image and "@sha256:" not in deploy.image:
        yield f"warning: deploy.image = {deploy.image} has no digest: pods that start later may get another program"
    for _, spec in ours.stages:
        vllm = spec.engine.kind == "vllm" and spec.engine.vllm.load_format == "dummy"
        if vllm and spec.model.source.startswith(f"{ours.places.models}/"):
            yield 'engine.vllm.load_format = "runai_streamer" would stream the first weights of workers from the bucket'
