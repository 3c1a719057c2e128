"""Where code of the model runs: a server of sandboxes (`tidemill sandbox serve`) under gVisor."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tidemill.config.deploy import DeployConfig
from tidemill.config.sandbox import SandboxConfig
from tidemill.config.schema import RunSpec
from tidemill.config.task import ReasoningGymTask
from tidemill.core.errors import UserError
from tidemill.deploy.documents import Document
from tidemill.deploy.kubernetes.objects import job_labels, metadata, resource
from tidemill.deploy.kubernetes.pods import ROLE, TOKEN_FILE, TOKENS, pod_template, with_token_file
from tidemill.deploy.kubernetes.sweep import as_options

PORT = 8600
SANDBOX = "sandbox"
GVISOR = "gvisor"
"""RuntimeClass of GKE Sandbox, and the usual name elsewhere."""
API = "extensions.agents.x-k8s.io/v1beta1"
PROGRAM_ENVIRONMENTS = ("mcp", "openenv", "skyrl-gym", "verifiers")
LIMITS = ("memory_mb", "processes", "cpu_s", "wall_s", "scratch_mb", "scratch_files", "output_kb")
SERVER_MB = 1024
CALLS_PER_CPU = 4


def server_url(job: str) -> str:
    """Address of the job's own server of sandboxes."""
    return f"http://{job}-sandboxes:{PORT}"


def sandbox_documents(deploy: DeployConfig, job: str, specs: Sequence[RunSpec]) -> list[Document]:
    """Template, one warm sandbox pod and its Service; nothing if no code of the model runs, or on another server.

    Raises:
        UserError: sandboxes do not work in an ordinary pod, or the server's token is missing.
    """
    needing = [spec for spec in specs if _runs_model_code(spec)]
    for spec in needing:
        _check(spec, deploy, job)
    served = [spec for spec in needing if spec.sandbox.backend == "http" and spec.sandbox.url == server_url(job)]
    if not served:
        return []
    spec = served[-1]
    name, labels = f"{job}-sandboxes", {**job_labels(job), ROLE: SANDBOX}
    about = metadata(deploy, name, job=job)
    clients = [{"podSelector": {"matchLabels": job_labels(job)}}]
    policy = {
        "ingress": [{"from": clients, "ports": [{"protocol": "TCP", "port": PORT}]}],
        "egress": [] if spec.sandbox.network == "none" else [{}],
    }
    template = {"podTemplate": _pod(deploy, job, spec), "networkPolicy": policy}
    pool = {"replicas": 1, "sandboxTemplateRef": {"name": name}}
    service = {"selector": labels, "ports": [{"name": "http", "port": PORT, "targetPort": "http"}]}
    return [
        resource(API, "SandboxTemplate", about, spec=template),
        resource(API, "SandboxWarmPool", about, spec=pool),
        resource("v1", "Service", about, spec=service),
    ]


def _runs_model_code(spec: RunSpec) -> bool:
    """Whether the recipe needs a sandbox. An environment of the user does if the recipe has a section [sandbox]."""
    tests = any(reward.kind == "tests" for reward in (*spec.scoring.rewards, *spec.eval.rewards))
    of_user = spec.env.enabled and "sandbox" in spec.model_fields_set
    return tests or of_user or spec.env.name == "python" or _runs_programs(spec)


def _runs_programs(spec: RunSpec) -> bool:
    """Whether programs stay in a sandbox, which must then be one of the same machine."""
    kinds = {reward.kind for reward in (*spec.scoring.rewards, *spec.eval.rewards)}
    scores = isinstance(spec.task, ReasoningGymTask) and "task" in kinds
    return scores or spec.env.name in PROGRAM_ENVIRONMENTS


def _check(spec: RunSpec, deploy: DeployConfig, job: str) -> None:
    """Raises UserError: see `sandbox_documents`."""
    backend, variable, where = spec.sandbox.backend, spec.sandbox.token_env, "sandbox.backend"
    if _runs_programs(spec) and backend != "none":
        what = "programs that stay in a sandbox need one in their own pod, and pods have no user namespaces"
        hint = 'set it to "none" if their code may do what the pod may, or run the recipe outside of a cluster'
        raise UserError(what, where=where, hint=hint)
    if backend in ("bwrap", "runsc"):
        hint = (
            f'set sandbox.backend = "http", sandbox.url = "{server_url(job)}" (a server under gVisor, which is then '
            f'rendered, too), and deploy.secrets.{variable} = "secret/key" with its token'
        )
        raise UserError(f'"{backend}" does not work in a pod, which has no user namespaces', where=where, hint=hint)
    if backend == "http" and variable not in deploy.secrets:
        hint = f'write [deploy.secrets] {variable} = "secret/key"'
        raise UserError("the token of the server of sandboxes is missing", where="deploy.secrets", hint=hint)


def _pod(deploy: DeployConfig, job: str, spec: RunSpec) -> Document:
    """The server's pod, without storage, models, secrets but its token, and rights."""
    config, calls = spec.sandbox, spec.env.concurrency
    most = max(spec.batch.prompts * spec.batch.group_size, calls)  # an episode keeps its sandbox
    memory_mb = calls * config.memory_mb + most * config.scratch_mb + SERVER_MB
    bare = deploy.model_copy(
        update={"secrets": {TOKENS: deploy.secrets[config.token_env]}, "models": "", "service_account": ""}
    )
    template = pod_template(
        bare,
        SANDBOX,
        job=job,
        spot=False,
        cpus=math.ceil(calls / CALLS_PER_CPU),
        memory_gib=math.ceil(memory_mb / 1024),
        container={
            "command": with_token_file(_command(config, most)),
            "ports": [{"name": "http", "containerPort": PORT}],
            "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}},
            "volumeMounts": [],
        },
        restart="Always",
    )
    template["spec"] |= {"runtimeClassName": GVISOR, "automountServiceAccountToken": False, "volumes": []}
    return template


def _command(config: SandboxConfig, most: int) -> list[str]:
    texts = {f"sandbox.{key}": str(getattr(config, key)) for key in LIMITS}
    texts["sandbox.network"] = config.network if config.network == "none" else ",".join(config.network)
    place = ["--host", "0.0.0.0", "--port", str(PORT), "--token-file", TOKEN_FILE, "--most", str(most)]
    return ["tidemill", "sandbox", "serve", *place, *as_options({"sandbox.backend": "bwrap", **texts})]
