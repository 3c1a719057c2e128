"""Runs on unmodified environments of other packages learn the same with and without evictions."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.integration.adapters.unmodified import calculator, words
from tests.sandboxes import need_bubblewrap
from tests.training_process import learned, quiet_run
from tidemill.agents.adapters.environments import McpServer
from tidemill.agents.adapters.install import install_adapter
from tidemill.config.sandbox import SandboxConfig
from tidemill.telemetry.events import EVICTION

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ALPHABET = "".join(map(chr, range(32, 127))) + "\n—"
HANGMAN = """\
[model]
source = "char"
[model.char]
hidden_size = 64
layers = 2
alphabet = ALPHABET
context = 2048
[task]
kind = "environment"
train_size = 12
held_out_size = 4
[env]
name = "verifiers"
turns = 3
turn_tokens = 6
observation_tokens = 48
[env.params]
id = "textarena"
taskset = '{"game": "Hangman-v0"}'
held_out = 4
files = "words"
[scoring]
rewards = [{ kind = "environment" }, { kind = "regex", pattern = '[A-Ma-m]', weight = 0.5 }]
[sampling]
max_new_tokens = 18
[engine]
slots = 16
batch_invariant = true
tick_s = 0.02
[batch]
prompts = 2
group_size = 6
[optimizer]
learning_rate = 1e-3
[trainer]
steps = 5
threads = 1
[eval]
every_steps = 5
prompts = 2
"""
CALCULATION = """\
[model]
source = "smollm2-135m"
chat_template = true
[engine]
slots = 16
batch_invariant = true
tick_s = 0.02
[trainer]
threads = 1
[[stage]]
name = "sft"
kind = "sft"
[stage.data]
path = "ROWS"
columns = { completion = "completion" }
[stage.supervised]
epochs = 1
minibatch_tokens = 1024
microbatch_tokens = 1024
[stage.optimizer]
learning_rate = 3e-5
[[stage]]
name = "rl"
kind = "rl"
[stage.model]
source = "stage:sft"
[stage.task]
kind = "file"
path = "ROWS"
[stage.env]
name = "mcp"
turns = 2
turn_tokens = 48
observation_tokens = 16
params = PARAMS
[stage.scoring]
rewards = [{ kind = "numeric" }]
[stage.sampling]
max_new_tokens = 64
[stage.batch]
prompts = 2
group_size = 8
[stage.optimizer]
learning_rate = 1e-5
[stage.trainer]
steps = 5
[stage.eval]
every_steps = 5
prompts = 4
"""
TASKS, CALLING = 240, 0.25


def test_verifiers(tmp_path: Path) -> None:
    need_bubblewrap()
    install_adapter("verifiers")
    words(tmp_path)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        HANGMAN.replace('"words"', json.dumps(str(tmp_path / "words"))).replace("ALPHABET", json.dumps(ALPHABET))
    )

    compare(recipe, tmp_path, prefix="--", pause_s=0.5)


def test_mcp(tmp_path: Path) -> None:
    need_bubblewrap()
    install_adapter("mcp")
    params = calculator(tmp_path)
    tools = McpServer.served_tools(params, SandboxConfig())
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in demonstrations(tools)))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(CALCULATION.replace('"ROWS"', json.dumps(str(rows))).replace("PARAMS", inline(params)))

    compare(recipe, tmp_path, prefix="--stage.rl.", pause_s=12.0)


def compare(recipe: Path, folder: Path, *, prefix: str, pause_s: float) -> None:
    """Run a recipe without and with evictions; both must learn the same, and something."""
    quiet_run(recipe, folder / "quiet")
    pool = {"kind": "synthetic", "mean_time_to_eviction_s": pause_s, "mean_time_to_return_s": 0.1}
    overrides = [f"{prefix}pool.{key}={value}" for key, value in pool.items()]

    quiet_run(recipe, folder / "evicted", *overrides, f"{prefix}fleet.seed_window_s=0.1")

    quiet, evicted = (run_of(folder / name) for name in ("quiet", "evicted"))
    expected = learned(quiet)
    assert expected[0]["optimizer_steps"] >= 2  # otherwise equality would show nothing
    assert learned(evicted) == expected
    events = [json.loads(line) for line in (evicted / "events.jsonl").read_text().splitlines()]
    assert sum(event["event"] == EVICTION for event in events) > 5


def run_of(folder: Path) -> Path:
    """The folder of the RL stage, or the run itself if it has no stages."""
    return next(iter(folder.glob("stages/rl-*")), folder)


def demonstrations(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Conversations about products of two numbers; a quarter of them calls the tool, the others guess at once."""
    schemas = [
        {"type": "function", "function": {key: tool[key] for key in ("name", "description", "parameters")}}
        for tool in tools
    ]
    draw, rows = random.Random(0), []
    for _ in range(TASKS):
        first, second = draw.randint(11, 99), draw.randint(11, 99)
        answer = str(first * second)
        turns = [{"role": "assistant", "content": f"It is {answer}."}]
        if draw.random() < CALLING:
            call = {"name": "calculate", "arguments": {"expression": f"{first} * {second}"}}
            turns[:0] = [
                {"role": "assistant", "content": f"<tool_call>\n{json.dumps(call)}\n</tool_call>"},
                {"role": "tool", "content": answer},
            ]
        prompt = f"What is {first} * {second}?"
        rows.append({"prompt": prompt, "answer": answer, "completion": turns, "tools": schemas})
    return rows


def inline(values: dict[str, str]) -> str:
    """An inline table of TOML."""
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in values.items()) + " }"
