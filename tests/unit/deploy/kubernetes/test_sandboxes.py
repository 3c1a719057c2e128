from __future__ import annotations

import pytest

from tests.crds import validate
from tests.unit.deploy.conftest import RECIPE, RenderRecipe, by_kind, documents_of, kinds
from tidemill.core.errors import UserError
from tidemill.deploy.kubernetes.sandboxes import server_url
from tidemill.deploy.render import render

AGENT = RECIPE + "[env]\nname = 'python'\nconcurrency = 8\n[batch]\nprompts = 4\ngroup_size = 4\n"
OURS = (
    "--sandbox.backend=http",
    f"--sandbox.url={server_url('small')}",
    "--deploy.secrets.TIDEMILL_SANDBOX_TOKEN=sandbox/token",
)


def test_a_stage_of_kind_sft_needs_no_sandbox() -> None:
    recipe = ("@python-tool", "--deploy.target=gke", "--deploy.image=i")
    assert "SandboxTemplate" not in kinds(render([*recipe, "--sandbox.backend=none"]))
    ours = ("--sandbox.backend=http", f"--sandbox.url={server_url('python-tool')}", *OURS[2:])
    assert "SandboxTemplate" in kinds(render([*recipe, *ours]))


def test_the_server_runs_under_gvisor_without_storage_or_rights(rendered: RenderRecipe) -> None:
    result = rendered(*OURS, "--sandbox.memory_mb=256", "--deploy.secrets.HF_TOKEN=hub/token", recipe=AGENT)
    template = by_kind(result, "SandboxTemplate")["spec"]
    pod = template["podTemplate"]["spec"]
    (container,) = pod["containers"]
    assert (pod["runtimeClassName"], pod["automountServiceAccountToken"], pod["volumes"]) == ("gvisor", False, [])
    assert [each["name"] for each in container["env"]] == ["TIDEMILL_TOKENS"]  # none of the run's secrets
    assert container["command"][4:7] == ["tidemill", "sandbox", "serve"]
    assert "--sandbox.memory_mb=256.0" in container["command"]
    # 8 calls of 256 MB at a time, 16 episodes with 64 MB of files each, and 1,024 MB: 4,096 MB.
    assert container["resources"]["limits"] == {"cpu": "2", "memory": "4Gi"}
    assert container["command"][container["command"].index("--most") + 1] == "16"
    assert template["networkPolicy"]["egress"] == []
    service = by_kind(result, "Service")
    assert service["metadata"]["name"] == "small-sandboxes"
    assert service["spec"]["selector"].items() <= template["podTemplate"]["metadata"]["labels"].items()
    assert by_kind(result, "SandboxWarmPool")["spec"] == {
        "replicas": 1,
        "sandboxTemplateRef": {"name": "small-sandboxes"},
    }


def test_a_network_opens_egress(rendered: RenderRecipe) -> None:
    result = rendered(*OURS, "--sandbox.network=pypi.org:443,a:1", recipe=AGENT)
    template = by_kind(result, "SandboxTemplate")["spec"]
    assert template["networkPolicy"]["egress"] == [{}]
    (container,) = template["podTemplate"]["spec"]["containers"]
    assert "--sandbox.network=pypi.org:443,a:1" in container["command"]


@pytest.mark.parametrize(
    ("recipe", "options", "where", "hint"),
    [
        (AGENT, (), "sandbox.backend", 'sandbox.url = "http://small-sandboxes:8600"'),
        (AGENT, ("--sandbox.backend=runsc",), "sandbox.backend", 'sandbox.backend = "http"'),
        (AGENT, OURS[:2], "deploy.secrets", 'TIDEMILL_SANDBOX_TOKEN = "secret/key"'),
        (AGENT.replace("'python'", "'mcp'"), OURS, "sandbox.backend", 'set it to "none"'),
    ],
)
def test_sandboxes_that_do_not_work_in_a_pod(
    rendered: RenderRecipe, recipe: str, options: tuple[str, ...], where: str, hint: str
) -> None:
    with pytest.raises(UserError) as refused:
        rendered(*options, recipe=recipe)
    assert refused.value.where == where
    assert hint in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        (RECIPE, ()),
        (AGENT, ("--sandbox.backend=none",)),
        (AGENT, ("--sandbox.backend=http", "--sandbox.url=http://elsewhere:1", OURS[2])),
    ],
)
def test_no_server_is_rendered(rendered: RenderRecipe, recipe: str, options: tuple[str, ...]) -> None:
    assert "SandboxTemplate" not in kinds(rendered(*options, recipe=recipe))


def test_the_schemas_accept_it(rendered: RenderRecipe) -> None:
    validated = [each["kind"] for each in documents_of(rendered(*OURS, recipe=AGENT)) if validate(each)]
    assert validated == ["SandboxTemplate", "SandboxWarmPool", "RayJob"]
