"""A gateway for a model: Deployment, Service, monitoring, and an InferencePool for several replicas."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.config.deploy import DeployConfig
from tidemill.config.load import STAGES, Tree
from tidemill.core.errors import UserError
from tidemill.deploy.documents import Document
from tidemill.deploy.kubernetes.monitoring import pod_monitoring
from tidemill.deploy.kubernetes.objects import job_labels, metadata, resource
from tidemill.deploy.kubernetes.pods import ROLE, TOKEN_FILE, TOKENS, pod_template, with_token_file
from tidemill.deploy.kubernetes.rayjob import recipe_name
from tidemill.deploy.kubernetes.sweep import as_options, one_machine
from tidemill.deploy.places import RECIPE_FOLDER, RUNS_FOLDER
from tidemill.deploy.recipe_files import RECIPE
from tidemill.deploy.sizes import Sizes

GATEWAY = "gateway"
PICKER_PORT = 9002
"""Port of the endpoint picker in llm-d's chart."""
START_S = 1800
"""Time to load the model, in seconds."""
PROBE_S = 10
PROBES = ("/health", "/ready")


def serving_documents(deploy: DeployConfig, job: str, tree: Tree, pods: Sizes) -> list[Document]:
    """Gateways for `deploy.serve.model`, each with an engine in its pod.

    Raises:
        UserError: the recipe has stages.
    """
    if STAGES in tree:
        hint = "name a recipe without stages"
        raise UserError("a gateway serves one model, and the recipe has stages", where="deploy.serve.model", hint=hint)
    serve, name, labels = deploy.serve, f"{job}-{GATEWAY}", {**job_labels(job), ROLE: GATEWAY}
    about = metadata(deploy, name, job=job)
    deployment = {
        "replicas": serve.replicas,
        "selector": {"matchLabels": labels},
        "template": _pod(deploy, job, tree, pods),
    }
    service = {"selector": labels, "ports": [{"name": "http", "port": serve.port, "targetPort": "http"}]}
    documents = [
        resource("apps/v1", "Deployment", about, spec=deployment),
        resource("v1", "Service", about, spec=service),
    ]
    if deploy.target == "gke":
        secret = deploy.metrics_token or serve.tokens
        documents.append(pod_monitoring(about, labels, "http", secret=secret))
    if serve.replicas > 1:
        pool = {
            "selector": {"matchLabels": labels},
            "targetPorts": [{"number": serve.port}],
            "endpointPickerRef": {"name": f"{name}-epp", "port": {"number": PICKER_PORT}},
        }
        documents.append(resource("inference.networking.k8s.io/v1", "InferencePool", about, spec=pool))
    return documents


def serving_notes(deploy: DeployConfig, job: str) -> Iterator[str]:
    """What the user must provide."""
    if deploy.serve.replicas == 1:
        return
    yield (
        f"the endpoint picker {job}-{GATEWAY}-epp is llm-d's, installed by its chart; it must send one "
        "of the gateways' keys to read queue lengths from their /metrics, which have no figure of the KV cache"
    )
    if deploy.serve.model.startswith(f"{RUNS_FOLDER}/"):
        yield f"{deploy.serve.replicas} gateways on several nodes: the claim {deploy.storage} must be ReadWriteMany"


def _pod(deploy: DeployConfig, job: str, tree: Tree, pods: Sizes) -> Document:
    serve = deploy.serve
    keys = {
        **one_machine(tree),
        "run.dir": "/tmp/serve",
        "gateway.host": "0.0.0.0",
        "gateway.port": str(serve.port),
        "gateway.token_file": TOKEN_FILE,
    }
    command = ["tidemill", "serve", f"@{RECIPE_FOLDER}/{RECIPE}", "--checkpoint", serve.model, *as_options(keys)]
    health, ready = ({"httpGet": {"path": path, "port": "http"}, "periodSeconds": PROBE_S} for path in PROBES)
    gpus = max(pods.spot.gpus, min(pods.reserved.gpus, 1))
    return pod_template(
        deploy.model_copy(update={"secrets": {**deploy.secrets, TOKENS: serve.tokens}}),
        GATEWAY,
        job=job,
        spot=False,
        cpus=pods.spot.cpus + 1,  # engine, gateway
        memory_gib=pods.spot.memory_gib,
        gpus=gpus,
        recipe=recipe_name(job),
        container={
            "command": with_token_file(command),
            "ports": [{"name": "http", "containerPort": serve.port}],
            "startupProbe": {**health, "failureThreshold": START_S // PROBE_S},
            "livenessProbe": health,
            "readinessProbe": ready,
        },
        restart="Always",
    )
