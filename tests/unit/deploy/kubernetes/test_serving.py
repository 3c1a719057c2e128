from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.crds import validate
from tests.unit.deploy.conftest import RECIPE, RenderRecipe, by_kind, kinds
from tidemill.core.errors import UserError
from tidemill.deploy.kubernetes.pods import with_token_file

SERVE = RECIPE.replace('"kubernetes"', '"gke"') + "[deploy.serve]\nmodel = '/runs/small'\ntokens = 'gateway/keys'\n"


def test_the_gateway_and_its_probes(rendered: RenderRecipe) -> None:
    result = rendered(recipe=SERVE)
    pod = by_kind(result, "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][4:8] == ["tidemill", "serve", "@/etc/tidemill/recipe.toml", "--checkpoint"]
    assert container["command"][8:] == [
        "/runs/small",
        "--pool.kind=static",
        "--pool.workers=0",
        "--run.dir=/tmp/serve",
        "--gateway.host=0.0.0.0",
        "--gateway.port=8000",
        "--gateway.token_file=/tmp/tokens",
    ]
    probes = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert probes == {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready"}
    assert pod["restartPolicy"] == "Always"
    assert by_kind(result, "Service")["spec"]["ports"] == [{"name": "http", "port": 8000, "targetPort": "http"}]
    assert kinds(result) == ["ConfigMap", "Deployment", "Service", "PodMonitoring"]


@pytest.mark.parametrize(
    ("options", "secret"),
    [((), {"name": "gateway", "key": "keys"}), (("--deploy.metrics_token=m/t",), {"name": "m", "key": "t"})],
)
def test_metrics_are_read_with_a_key(rendered: RenderRecipe, options: tuple[str, ...], secret: dict[str, str]) -> None:
    monitor = by_kind(rendered(*options, recipe=SERVE), "PodMonitoring")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] == "http"
    assert endpoint["authorization"]["credentials"]["secret"] == secret
    assert validate(monitor)


def test_replicas_form_an_inference_pool(rendered: RenderRecipe) -> None:
    result = rendered("--deploy.serve.replicas=3", recipe=SERVE)
    deployment = by_kind(result, "Deployment")["spec"]
    pool = by_kind(result, "InferencePool")
    assert (deployment["replicas"], pool["apiVersion"]) == (3, "inference.networking.k8s.io/v1")
    assert pool["spec"]["selector"] == deployment["selector"]
    assert pool["spec"]["targetPorts"] == [{"number": 8000}]
    assert pool["spec"]["endpointPickerRef"] == {"name": "small-gateway-epp", "port": {"number": 9002}}
    assert any("no figure of the KV cache" in line for line in result.notes)


def test_a_recipe_with_stages_is_refused(rendered: RenderRecipe) -> None:
    stages = "[[stage]]\nname = 'one'\nkind = 'rl'\n"
    recipe = SERVE.replace('[pool]\nkind = "synthetic"\nworkers = 2\n', "") + stages
    with pytest.raises(UserError, match="the recipe has stages"):
        rendered(recipe=recipe)


def test_the_token_file_is_private(tmp_path: Path) -> None:
    command = with_token_file(["cat", "/tmp/tokens"])
    command[2] = command[2].replace("/tmp/tokens", str(tmp_path / "tokens"))
    command[-1] = str(tmp_path / "tokens")
    done = subprocess.run(
        command, env={"TIDEMILL_TOKENS": "one\ntwo", "PATH": "/usr/bin:/bin"}, capture_output=True, check=True
    )
    assert done.stdout == b"one\ntwo\n"
    assert (tmp_path / "tokens").stat().st_mode & 0o777 == 0o600
