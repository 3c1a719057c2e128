"""Agents of other frameworks train a model over HTTP: only their address, key and style of API are Tidemill's.

The frameworks are in an environment of their own (`locks/sdks.txt`); `make test-sdks` prepares it and runs these tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

import tidemill as tm
from tests.forked import REPOSITORY, Forked
from tests.integration.sdks.prices import PRICES, SYSTEM
from tests.integration.test_sessions import finished, free_port
from tests.model_folders import small_tokenizer
from tidemill.models.auto import quiet

PYTHON = REPOSITORY / ".venv-sdks" / "bin" / "python"
FOLDER = Path(__file__).resolve().parent
DEADLINE_S = 200.0
AGENTS = [
    (name, api) for name in ("openai_agent", "langgraph_agent", "openai_agents_agent") for api in ("chat", "responses")
]
TEMPLATE = (
    "{# <tool_call> #}"
    "{% if tools %}<|im_start|>tools{% for t in tools %}\n{{ t.function.name }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response>"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Renders the names of tools alone; the comment says in which form calls are written."""
TOOLS = [{"type": "function", "function": {"name": "price", "description": "Price of an item.", "parameters": {}}}]

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs the agents' frameworks; `make test-sdks` runs this"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A character model of printable ASCII with a chat template, untrained."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = small_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(mark, special=True) for mark in ("<|im_start|>", "<|im_end|>")]}
    )
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=True, pad_token_id=0,
        bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id, initializer_range=0.1,
    )  # fmt: skip
    with quiet():
        LlamaForCausalLM(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tool_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same after demonstrations of the tool."""
    folder = tmp_path_factory.mktemp("tool")
    rows = []
    for item, found in PRICES.items():
        call = f"<tool_call>\n{json.dumps({'name': 'price', 'arguments': {'item': item}})}\n</tool_call>"
        said = [
            ("system", SYSTEM),
            ("user", question(item)),
            ("assistant", call),
            ("tool", found),
            ("assistant", found),
        ]
        rows += [{"messages": [{"role": role, "content": text} for role, text in said], "tools": TOOLS}] * 4
    recipe = recipe_file(
        folder,
        model,
        rows,
        """\
[[stage]]
name = "sft"
kind = "sft"
[stage.data]
path = "rows.jsonl"
held_out_fraction = 0.25
[stage.supervised]
epochs = 200
minibatch_tokens = 2048
microbatch_tokens = 2048
evaluate_every_steps = 0
[stage.optimizer]
learning_rate = 3e-3
warmup_steps = 20
schedule = "linear"
[[stage]]
name = "out"
kind = "export"
[stage.model]
source = "stage:sft"
[stage.export]
path = "FOLDER"
""".replace("FOLDER", str(folder / "model")),
    )
    finished(Forked("train", f"@{recipe}", "--run.dir", str(folder / "run"), "--json"))
    return folder / "model"


def question(item: str) -> str:
    return f"Price of a {item}?"


def recipe_file(folder: Path, model: Path, rows: list[dict[str, Any]], more: str) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = folder / "recipe.toml"
    recipe.write_text(f'[model]\nsource = "{model}"\nchat_template = true\n[trainer]\nthreads = 1\n{more}')
    return recipe


def rl_recipe(folder: Path, model: Path, *, tokens: int, reward: str, temperature: float = 1.0) -> Path:
    return recipe_file(
        folder,
        model,
        [{"prompt": question(item), "answer": found} for item, found in PRICES.items()],
        f"""\
steps = 2
[task]
kind = "file"
path = "rows.jsonl"
held_out_fraction = 0.3
[scoring]
rewards = [{{ kind = {reward} }}]
[sampling]
max_new_tokens = {tokens}
temperature = {temperature}
[engine]
slots = 8
batch_invariant = true
context_tokens = 400
[batch]
prompts = 2
group_size = 4
[optimizer]
learning_rate = 1e-3
[eval]
every_steps = 0
prompts = 2
""",
    )


@contextmanager
def agents(folder: Path, name: str, api: str, port: int, *more: str, count: int = 2) -> Iterator[Path]:
    """Processes that run an agent until the run has ended; the block gets the file of what they print."""
    command = [str(PYTHON), str(FOLDER / f"{name}.py"), f"http://127.0.0.1:{port}", api, *more]
    path, env = folder / f"{name}-{api}.log", {**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}:{FOLDER}"}
    with path.open("w") as log:
        running = [subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env) for _ in range(count)]
        try:
            yield path
            until = time.monotonic() + DEADLINE_S
            for process in running:
                assert process.wait(max(1.0, until - time.monotonic())) == 0, path.read_text()
        finally:
            for process in running:
                process.kill()
                process.wait()


def trained(folder: Path, recipe: Path, name: str, api: str, *more: str) -> tuple[dict[str, Any], str]:
    """The summary of a run whose samples are agents' sessions, and what these printed."""
    port, run = free_port(), folder / f"{name}-{api}"
    options = ("--gateway.sessions=true", f"--gateway.port={port}", "--gateway.name=agents")
    with agents(folder, name, api, port, *more) as log:
        summary = finished(Forked("train", f"@{recipe}", "--run.dir", str(run), "--json", *options))
    return summary, log.read_text()


def test_agents_of_one_turn_in_each_framework_train_as_the_run_itself_does(tmp_path: Path, model: Path) -> None:
    recipe = rl_recipe(tmp_path, model, tokens=12, reward='"length", target_tokens = 3')
    native = finished(Forked("train", f"@{recipe}", "--run.dir", str(tmp_path / "native"), "--json"))
    digests = {(name, api): trained(tmp_path, recipe, name, api)[0]["weights_digest"] for name, api in AGENTS}

    assert set(digests.values()) == {native["weights_digest"]}, digests


@pytest.mark.parametrize(("name", "api"), AGENTS)
def test_an_agent_with_a_tool_trains_in_each_framework(tmp_path: Path, tool_model: Path, name: str, api: str) -> None:
    recipe = rl_recipe(tmp_path, tool_model, tokens=160, reward='"environment"', temperature=0.5)
    summary, said = trained(tmp_path, recipe, name, api, "tool")

    assert summary["steps"] == 2
    run = tm.Run(tmp_path / f"{name}-{api}")
    lines = [line for line in run.metrics if line["step"] > 0]
    assert [line["samples"] for line in lines] == [8, 8]
    assert "failed" not in said, said
    assert min(line["turns_mean"] for line in lines) > 1.5  # most call the tool, and answer
    assert max(line["reward_mean"] for line in lines) > 0.5
    assert max(line["env_branches"] for line in lines) <= 8  # the client's own words, and no second branch
