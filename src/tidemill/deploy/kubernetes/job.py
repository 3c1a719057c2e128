"""All documents of a job on Kubernetes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tidemill.config.deploy import BUCKET, DeployConfig
from tidemill.config.pipeline import KINDS
from tidemill.config.toml import tables_to_toml
from tidemill.deploy.cluster_recipe import ClusterRecipe, changes, spot_labels
from tidemill.deploy.kubernetes.admin import admin_documents, admin_notes
from tidemill.deploy.kubernetes.objects import files_of
from tidemill.deploy.kubernetes.rayjob import claim, config_map, disruption_budget, ray_job
from tidemill.deploy.kubernetes.sandboxes import sandbox_documents
from tidemill.deploy.kubernetes.serving import serving_documents, serving_notes
from tidemill.deploy.kubernetes.sweep import job_set, sweep_notes, sweep_runs
from tidemill.deploy.recipe_files import with_files_on_cluster
from tidemill.deploy.sizes import Sizes

GKE_DEFAULT_NOTICE_S = 15


def kubernetes_files(ours: ClusterRecipe, deploy: DeployConfig, pods: Sizes) -> tuple[dict[str, str], list[str]]:
    """The documents of training, a sweep or a gateway, and remarks. Raises UserError: see `render`."""
    runs, machines, spot_max = _parts(ours, deploy, pods)
    # Runs of a sweep and gateways have one machine each, and take the recipe as it is.
    tree, travelling = with_files_on_cluster(ours.before if runs or deploy.serve.model else ours.tree, ours.places)
    documents = [claim(deploy, ours.name, machines=machines)] if deploy.storage_size else []
    documents.append(config_map(deploy, ours.name, tables_to_toml(tree), travelling.files))
    notes = [*changes(ours.before, tree), *_remarks(deploy, travelling.files)]
    if deploy.serve.model:
        documents += serving_documents(deploy, ours.name, tree, pods)
        return files_of(documents), [*notes, *serving_notes(deploy, ours.name)]
    with_sandbox = [spec for kind, spec in ours.stages if "sandbox" in KINDS[kind].sections]
    documents += sandbox_documents(deploy, ours.name, with_sandbox)
    if runs:
        documents.append(job_set(deploy, ours.name, runs, pods))
        notes += sweep_notes(deploy, runs)
    else:
        documents.append(disruption_budget(deploy, ours.name))
        documents.append(ray_job(deploy, ours.name, pods, spot_max=spot_max, spot_labels=spot_labels(ours.stages)))
    return files_of(documents), notes


def kubernetes_admin_files(ours: ClusterRecipe, deploy: DeployConfig, pods: Sizes) -> tuple[dict[str, str], list[str]]:
    """The administrator's part, and remarks. Raises UserError: the recipe needs nothing of an administrator."""
    specs = [spec for _, spec in ours.stages]
    runs, machines, spot_max = _parts(ours, deploy, pods)
    counts = {"reserved_pods": machines, "spot_max": spot_max, "heads": int(not (runs or deploy.serve.model))}
    documents = admin_documents(deploy, ours.name, specs, pods, **counts)
    return files_of(documents), list(admin_notes(deploy, specs))


def _parts(ours: ClusterRecipe, deploy: DeployConfig, pods: Sizes) -> tuple[list[list[str]], int, int]:
    """The options of a sweep's runs, the number of reserved pods, and the maximum number of preemptible ones."""
    runs = sweep_runs(deploy, ours.before)
    if deploy.serve.model:
        return runs, deploy.serve.replicas, 0
    return (runs, len(runs), 0) if runs else (runs, pods.reserved_machines, ours.spot_max)


def _remarks(deploy: DeployConfig, files: Iterable[str]) -> Iterator[str]:
    if deploy.target == "gke" and deploy.notice_s > GKE_DEFAULT_NOTICE_S:
        yield (
            f"deploy.notice_s = {deploy.notice_s} needs GKE 1.35.0-gke.1171000 or newer; older versions give pods on "
            f"Spot VMs {GKE_DEFAULT_NOTICE_S} s"
        )
    if deploy.models.startswith(BUCKET) and not deploy.service_account:
        yield "deploy.service_account is not set: the bucket must allow the namespace's default account to read"
    if any(name.endswith(".py") for name in files):
        yield "of user functions only the named files travel; modules that they import must be in the image"
