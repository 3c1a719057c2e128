"""Rendering: a recipe with [deploy] as documents. Pure: the same input gives the same bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tidemill.config.deploy import BUCKET, DeployConfig
from tidemill.config.pipeline import KINDS, load_recipe
from tidemill.config.schema import RunSpec
from tidemill.config.toml import tables_to_toml
from tidemill.core.errors import UserError
from tidemill.deploy.admin import admin_documents, admin_notes
from tidemill.deploy.cluster_recipe import ClusterRecipe, changes, on_cluster, spot_labels
from tidemill.deploy.documents import Rendered, rendered
from tidemill.deploy.pods import MODELS_FOLDER
from tidemill.deploy.rayjob import claim, config_map, disruption_budget, ray_job
from tidemill.deploy.recipe_files import with_files_on_cluster
from tidemill.deploy.sandboxes import sandbox_documents
from tidemill.deploy.serving import serving_documents, serving_notes
from tidemill.deploy.sizes import ModelsOf, sizes
from tidemill.deploy.sweep import job_set, sweep_notes, sweep_runs
from tidemill.hardware.process_memory import Models

GKE_DEFAULT_NOTICE_S = 15


def unknown_models(spec: RunSpec) -> Models | None:
    return None


def render(sources: Sequence[str], *, admin: bool = False, models_of: ModelsOf = unknown_models) -> Rendered:
    """The documents of a recipe, in the order in which they are applied.

    Args:
        sources: `@recipe.toml` and `--section.key value`.
        admin: the administrator's part instead: quotas, queues, monitoring.
        models_of: finds the shapes of the recipe's models, for the memory of pods.

    Raises:
        UserError: the recipe or [deploy] is invalid, or does not fit the machines.
    """
    recipe = load_recipe(sources)
    deploy = recipe.deploy
    if deploy.target == "none":
        hint = 'add a section [deploy] with target = "gke" or "kubernetes", and image'
        raise UserError("missing", where="deploy.target", hint=hint)
    ours = on_cluster(recipe, deploy)
    pods, specs = sizes(ours.stages, deploy, models_of), [spec for _, spec in ours.stages]
    runs = sweep_runs(deploy, ours.before)
    on_ray = not (runs or deploy.serve.model)
    # Runs of a sweep and gateways have one machine each, and take the recipe as it is.
    tree, files = with_files_on_cluster(ours.tree if on_ray else ours.before)
    machines = deploy.serve.replicas if deploy.serve.model else len(runs) or pods.reserved_machines
    spot_max = ours.spot_workers if deploy.spot_max is None else deploy.spot_max
    if admin:
        counts = {"reserved_pods": machines, "spot_max": spot_max if on_ray else 0, "heads": int(on_ray)}
        documents = admin_documents(deploy, ours.name, specs, pods, **counts)
        return rendered(documents, admin_notes(deploy, specs))
    documents = [claim(deploy, ours.name, machines=machines)] if deploy.storage_size else []
    documents.append(config_map(deploy, ours.name, tables_to_toml(tree), files))
    notes = [*changes(ours.before, tree), *pods.notes, *_remarks(ours, deploy, files)]
    if deploy.serve.model:
        documents += serving_documents(deploy, ours.name, tree, pods)
        return rendered(documents, [*notes, *serving_notes(deploy, ours.name)])
    with_sandbox = [spec for kind, spec in ours.stages if "sandbox" in KINDS[kind].sections]
    documents += sandbox_documents(deploy, ours.name, with_sandbox)
    if runs:
        documents.append(job_set(deploy, ours.name, runs, pods))
        notes += sweep_notes(deploy, runs)
    else:
        documents.append(disruption_budget(deploy, ours.name))
        documents.append(ray_job(deploy, ours.name, pods, spot_max=spot_max, spot_labels=spot_labels(ours.stages)))
    return rendered(documents, notes)


def _remarks(ours: ClusterRecipe, deploy: DeployConfig, files: dict[str, bytes]) -> Iterator[str]:
    if ours.name != ours.tree["run"].get("name", ours.name):
        yield f"the job is named {ours.name}"
    if "@sha256:" not in deploy.image:
        yield f"warning: deploy.image = {deploy.image} has no digest: pods that start later may get another program"
    if deploy.target == "gke" and deploy.notice_s > GKE_DEFAULT_NOTICE_S:
        yield (
            f"deploy.notice_s = {deploy.notice_s} needs GKE 1.35.0-gke.1171000 or newer; older versions give pods on "
            f"Spot VMs {GKE_DEFAULT_NOTICE_S} s"
        )
    if deploy.models.startswith(BUCKET) and not deploy.service_account:
        yield "deploy.service_account is not set: the bucket must allow the namespace's default account to read"
    if any(name.endswith(".py") for name in files):
        yield "of user functions only the named files travel; modules that they import must be in the image"
    for _, spec in ours.stages:
        vllm = spec.engine.kind == "vllm" and spec.engine.vllm.load_format == "dummy"
        if vllm and spec.model.source.startswith(f"{MODELS_FOLDER}/"):
            yield 'engine.vllm.load_format = "runai_streamer" would stream the first weights of workers from the bucket'
