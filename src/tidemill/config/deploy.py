"""`[deploy]`: where a recipe runs as a job."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from tidemill.config.addresses import ENVIRONMENT_VARIABLE
from tidemill.config.base import Config, Seed

LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
"""A name of Kubernetes (RFC 1123), of at most 63 characters."""
SECRET_KEY = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9._-]+")
BUCKET = "gs://"
QUANTITY = re.compile(r"[1-9]\d*(Mi|Gi|Ti|M|G|T)")
GKE_NOTICE_S = 120
"""Longest grace that GKE gives pods on Spot VMs, from 1.35.0-gke.1171000; 15 s by default (GKE's documentation)."""
KUBERNETES = ("gke", "kubernetes")
"""Targets that are Kubernetes clusters."""
SPOT_NODES = {"cloud.google.com/gke-spot", "cloud.google.com/gke-preemptible"}
FLEX_START_NODES = "cloud.google.com/gke-flex-start"
Override: TypeAlias = dict[str, bool | int | float | str]
Port = Annotated[int, Field(ge=1, le=65535)]


class SweepConfig(Config):
    seeds: tuple[Seed, ...] = ()
    """One run for each of these values of run.seed."""
    overrides: tuple[Override, ...] = ()
    """One run for each of these tables of dotted keys, such as {"optimizer.learning_rate" = 1e-5}; with seeds, one for
    each pair."""


class ServeConfig(Config):
    model: str = ""
    """Model that the gateway serves: a checkpoint below /runs, a folder below /models, or as model.source. Empty: the
    recipe is trained."""
    replicas: int = Field(1, ge=1)
    """Number of gateways, each with an engine."""
    port: Port = 8000
    """Port of the gateway and its Service."""
    tokens: str = ""
    """Secret with the file of the gateway's tokens, as "secret/key"."""

    def issues(self) -> Iterator[str]:
        if self.model and not SECRET_KEY.fullmatch(self.tokens):
            yield 'tokens must name an existing Secret as "secret/key": a gateway in a cluster needs tokens; set tokens'


class SlurmConfig(Config):
    runs: str = ""
    """Folder of the file system that all nodes share, by its absolute path: run directories, scripts and logs."""
    reserved: str = ""
    """Partition of the reserved job. Empty: the cluster's default."""
    preemptible: str = ""
    """Partition of the rollout workers, whose jobs Slurm may preempt and requeue."""
    account: str = ""
    """Account that the jobs are charged to. Empty: the user's default."""
    qos: str = ""
    """Quality of service of the reserved job. Empty: the account's default."""
    container: Literal["none", "pyxis", "apptainer"] = "none"
    """Runs deploy.image by Pyxis or Apptainer. none: the programs of `environment`."""
    environment: str = ""
    """Virtual environment with Tidemill on the shared file system. Empty: the PATH of `tidemill deploy apply`."""
    options: tuple[str, ...] = ()
    """Further options of sbatch for both jobs, such as "--constraint=ib"."""

    def issues(self) -> Iterator[str]:
        if self.runs and not self.runs.startswith("/"):
            yield f"runs = {self.runs!r} is not an absolute path; name a folder that all nodes share"
        if self.environment and not self.environment.startswith("/"):
            yield f"environment = {self.environment!r} is not an absolute path; name a folder that all nodes share"


class SkyConfig(Config):
    clouds: tuple[str, ...] = ()
    """Where machines may be, as SkyPilot's infra: "gcp", "aws/us-east-1", "kubernetes/CONTEXT". SkyPilot chooses one of
    them for the job. Empty: wherever is cheapest."""
    max_hourly_cost: float = Field(0.0, ge=0)
    """Highest price of a preemptible machine, in dollars per hour; 0: none."""
    volume: str = ""
    """Volume of SkyPilot for run directories, mounted at /runs of the trainer (on Kubernetes). Empty: the trainer's own
    disk, which is lost with it."""
    bucket: str = ""
    """Bucket in which rollout workers find the trainer's address, such as s3://NAME. Empty: they find it by name, which
    SkyPilot gives on Kubernetes only."""

    def issues(self) -> Iterator[str]:
        if self.bucket and "://" not in self.bucket:
            yield f"bucket = {self.bucket!r} is not the URL of a bucket; write it as s3://NAME or gs://NAME"


class OsmoConfig(Config):
    pool: str = ""
    """Pool of OSMO. Empty: that of the user's profile."""
    platform: str = ""
    """Platform of the pool, a kind of machine. Empty: the pool's default."""
    url: str = ""
    """Where stages keep checkpoints while they run, such as s3://bucket/folder. Empty: nowhere; a rescheduled stage
    starts again."""

    def issues(self) -> Iterator[str]:
        if self.url and "://" not in self.url:
            yield f"url = {self.url!r} is not the URL of a bucket; write it as s3://NAME/FOLDER"


class DeployConfig(Config):
    """Read by `tidemill deploy`, and `accelerator` also by the memory plan."""

    target: Literal["none", "gke", "kubernetes", "slurm", "sky", "osmo"] = "none"
    """gke: Google Kubernetes Engine. kubernetes: another cluster, with the operator KubeRay. slurm: a Slurm cluster.
    sky: clouds, by SkyPilot. osmo: NVIDIA OSMO. Settings of other targets are ignored."""
    image: str = ""
    """Container image with Tidemill, best with its digest: registry/name@sha256:..."""
    namespace: str = "default"
    """Namespace of everything that is rendered."""
    accelerator: str = ""
    """GPU of pods that have one: on GKE the value of the label gke-accelerator, such as nvidia-h100-80gb; elsewhere a
    name of `tidemill plan catalog`, which serves only to check that the model fits, also of runs that are not deployed,
    and to choose engine.tensor_parallel. Empty: no GPU, or an unknown one."""
    storage: str = "runs"
    """PersistentVolumeClaim for run directories, mounted at /runs on reserved pods. Not an object store: the journal
    is a database."""
    storage_size: str = ""
    """Size of that claim, such as 100Gi, if it shall be rendered, too. Empty: it exists."""
    models: str = ""
    """Models, mounted read-only at /models: a bucket as gs://NAME (GKE, by GCS FUSE), or the name of a
    PersistentVolumeClaim."""
    queue: str = ""
    """LocalQueue of Kueue. Empty: pods are scheduled without a queue."""
    spot_max: int | None = Field(None, ge=0)
    """Maximum number of preemptible pods. Default: the workers of [pool]."""
    idle_s: int = Field(60, ge=1)
    """Time after which the autoscaler removes an idle preemptible pod, in seconds."""
    flex_start: bool = False
    """GKE: the queue provisions the reserved part with flex-start (Dynamic Workload Scheduler)."""
    service_account: str = ""
    """Kubernetes service account of the pods, on GKE with Workload Identity for the bucket."""
    notice_s: int = Field(15, ge=5)
    """Time from an eviction's SIGTERM to SIGKILL on preemptible nodes, in seconds. GKE: 15, up to 120 from 1.35."""
    spot_selector: dict[str, str] = {}
    """Labels of preemptible nodes; their taints of the same names are tolerated. GKE's own are added."""
    reserved_selector: dict[str, str] = {}
    """Labels of reserved nodes."""
    head_memory_gb: float = Field(0.0, ge=0)
    """Memory of the reserved pod, in GB; 0: as the memory planner estimates."""
    worker_memory_gb: float = Field(0.0, ge=0)
    """Memory of a preemptible pod, in GB; 0: as the memory planner estimates."""
    secrets: dict[str, str] = {}
    """Environment variables from existing Secrets: VARIABLE = "secret/key". The values stay in the cluster."""
    priority_class: str = ""
    """PriorityClass of reserved pods; `tidemill deploy render --admin` writes it. Empty: none."""
    metrics_token: str = ""
    """GKE: Secret with the token that reads /metrics of the run or the gateways for Managed Prometheus, as
    "secret/key"."""
    hours: float = Field(0.0, ge=0)
    """Time limit of the reserved job, in hours; before it the run ends with a checkpoint and is queued again. 0: that
    of the platform."""
    sweep: SweepConfig = SweepConfig()
    """Kubernetes: several runs of the recipe, as a JobSet."""
    serve: ServeConfig = ServeConfig()
    """Kubernetes: a gateway instead of training."""
    slurm: SlurmConfig = SlurmConfig()
    sky: SkyConfig = SkyConfig()
    osmo: OsmoConfig = OsmoConfig()

    def issues(self) -> Iterator[str]:
        if self.target == "none":
            return
        if self.target == "slurm" and not self.slurm.runs:
            yield "slurm.runs is missing; name a folder that all nodes share, by its absolute path"
        if not self.image and (self.target != "slurm" or self.slurm.container != "none"):
            yield "image is missing; name the container image with Tidemill, as registry/name@sha256:..."
        for key in ("namespace", "queue", "service_account", "priority_class"):
            if (name := getattr(self, key)) and not _is_label(name):
                yield f"{key} = {name!r} is not a name of Kubernetes; use up to 63 of a-z, 0-9 and -"
        yield from self._storage_issues()
        yield from self._node_issues()
        if self.metrics_token and not SECRET_KEY.fullmatch(self.metrics_token):
            yield 'metrics_token is not the name of a Secret; write "secret/key", never a value'
        for variable, source in self.secrets.items():
            if not ENVIRONMENT_VARIABLE.fullmatch(variable):
                yield f"secrets: {variable!r} is not the name of an environment variable; use A-Z, 0-9 and _"
            if not SECRET_KEY.fullmatch(source):  # perhaps a secret's value, which the message must not repeat
                yield f'secrets.{variable} is not the name of a Secret; write "secret/key", never a value'

    def _storage_issues(self) -> Iterator[str]:
        if not _is_label(self.storage):
            why = " (GCS FUSE cannot hold the journal, a database)" if self.storage.startswith(BUCKET) else ""
            yield (
                f"storage = {self.storage!r} is not the name of a PersistentVolumeClaim{why}; name one on a disk, "
                "Filestore or Lustre"
            )
        if self.storage_size and not QUANTITY.fullmatch(self.storage_size):
            yield f"storage_size = {self.storage_size!r} is not a size; write it as 100Gi"
        if not self.models:
            return
        if self.models.startswith(BUCKET):
            if self.target == "kubernetes":
                yield f'models = {self.models!r} needs target = "gke"; elsewhere name a PersistentVolumeClaim'
            elif "/" in self.models.removeprefix(BUCKET).rstrip("/"):
                yield f"models = {self.models!r} names a folder; name the bucket, and the folder in model.source"
        elif not _is_label(self.models):
            yield f"models = {self.models!r} is neither gs://BUCKET nor the name of a PersistentVolumeClaim; name one"
        elif self.models == self.storage:
            yield "models and storage are the same claim; name models on it as /runs/..., and leave models out"

    def _node_issues(self) -> Iterator[str]:
        if self.target == "gke" and self.notice_s > GKE_NOTICE_S:
            yield (
                f"notice_s = {self.notice_s} is more than GKE gives pods on Spot VMs; set it to 15, or up to "
                f"{GKE_NOTICE_S} with GKE 1.35 or newer"
            )
        if spot := SPOT_NODES & self.reserved_selector.keys():
            yield (
                f"reserved_selector has {min(spot)}: the trainer must not be preempted; leave it out, preemptible "
                "pods get it"
            )
        if FLEX_START_NODES in self.spot_selector:
            yield "spot_selector has flex-start nodes, which are not preempted; set flex_start for the reserved part"
        if self.flex_start and (self.target == "kubernetes" or not self.queue):
            yield 'flex_start needs target = "gke" and a queue; set both, or leave flex_start out'


def _is_label(name: str) -> bool:
    return len(name) <= 63 and LABEL.fullmatch(name) is not None
