"""One real environment of each package, in the package's own Python environment."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.adapters.unmodified import calculator, words
from tests.sandboxes import need_bubblewrap
from tidemill.agents.adapters import environments
from tidemill.agents.adapters.environments import (
    AdapterEnvironment,
    Gymnasium,
    McpServer,
    OpenEnv,
    SkyRLGym,
    TextArena,
    Verifiers,
)
from tidemill.agents.adapters.install import adapter_python, install_adapter
from tidemill.agents.environment import AgentMistake, Step
from tidemill.config.sandbox import SandboxConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HANGMAN = {"id": "textarena", "taskset": json.dumps({"game": "Hangman-v0"})}


@pytest.fixture(autouse=True)
def _programs() -> Iterator[None]:
    yield
    while environments._connections:
        environments._connections.popitem()[1].close()


def played(environment: AdapterEnvironment, actions: list[str], task: dict[str, Any], seed: int = 3) -> list[Any]:
    """The first message, then the answer to each action: a step, or the text of a mistake."""
    answers: list[Any] = [environment.reset(task, seed)]
    for action in actions:
        try:
            answers.append(environment.step(action))
        except AgentMistake as mistake:
            answers.append(str(mistake))
    environment.close()
    return answers


def test_gymnasium() -> None:
    install_adapter("gymnasium")
    lake = Gymnasium("FrozenLake-v1", json.dumps({"is_slippery": False}), actions="left,down,right,up")

    first, down, mistake, *_, last = played(lake, ["go down", "jump", *["down", "right", "right", "down", "right"]], {})

    assert first == "[S]FFF\nFHFH\nFFFH\nHFFG\nActions: left, down, right, up\n"
    assert "[F]HFH" in down.text
    assert mistake == "write one of: left, down, right, up"
    assert (last.reward, last.done) == (1.0, True)


def test_textarena() -> None:
    install_adapter("textarena")
    first, *steps = played(TextArena("GuessTheNumber-v0"), [f"[{number}]" for number in range(1, 8)], {})

    assert "Guess The Number" in first
    assert "higher" in steps[0].text
    assert "[1]" not in steps[0].text
    assert played(TextArena("GuessTheNumber-v0"), ["[1]"], {})[0] == first


def test_skyrl_gym() -> None:
    install_adapter("skyrl-gym")
    task = {"prompt": "What is 2 + 2?", "answer": "4"}

    first, wrong, right = played(SkyRLGym("gsm8k_multi_turn"), ["#### 5", "#### 4"], task)

    assert first == task["prompt"]
    assert (wrong.reward, wrong.done) == (pytest.approx(0.04), False)  # 0.2 for the form, over five turns
    assert right == Step(text="", reward=1.0, done=True)


def test_openenv(tmp_path: Path) -> None:
    need_bubblewrap()
    install_adapter("openenv")
    openenv = Path(adapter_python("openenv", "")).parent
    made = subprocess.run(
        [openenv / "python", "-m", "openenv.cli", "init", "echo_env"], cwd=tmp_path, capture_output=True, check=False
    )
    assert made.returncode == 0, made.stderr
    command = "python -m uvicorn echo_env.server.app:app --host 127.0.0.1 --port {port}"
    echo = OpenEnv(command=command, files=str(tmp_path), observation="echoed_message")

    first, answer = played(echo, ["hello"], {})

    assert "ready" in first
    assert answer == Step(text="hello", reward=0.5)


def test_mcp(tmp_path: Path) -> None:
    need_bubblewrap()
    install_adapter("mcp")
    params = calculator(tmp_path)

    (tool,) = McpServer.served_tools(params, SandboxConfig())
    server = McpServer(**params)
    server.reset({"prompt": "What is 12 * 34?"}, 1)

    assert tool["name"] == "calculate"
    assert tool["idempotent"]  # nothing outside the sandbox can change
    (networked,) = McpServer.served_tools(params, SandboxConfig(network=("localhost:9",)))
    assert not networked["idempotent"]
    assert server.invoke("calculate", {"expression": "12 * 34"}) == "408"
    with pytest.raises(AgentMistake, match="Unknown identifier: foo"):
        server.invoke("calculate", {"expression": "foo"})
    with pytest.raises(AgentMistake, match="Field required"):
        server.invoke("calculate", {})
    server.close()


def test_verifiers(tmp_path: Path) -> None:
    need_bubblewrap()
    install_adapter("verifiers")
    params: dict[str, Any] = {**HANGMAN, "held_out": 5, "files": words(tmp_path)}

    assert Verifiers.tasks_for(params, "held_out", 2) == [{"index": 0}, {"index": 1}]
    assert Verifiers.tasks_for(params, "train", 2) == [{"index": 5}, {"index": 6}]
    letters = [f"[{letter}]" for letter in "EAORTILSNUHCPMDGBWK"]
    first, *steps = played(Verifiers(**params), letters[:3], {"index": 0})

    assert "Hangman" in first
    assert any(letter in step.text for step, letter in zip(steps, "EAO", strict=True))
    assert played(Verifiers(**params), letters[:3], {"index": 0}) == [first, *steps]
