from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import Pretend, Run
from tidemill.cli.evaluate import samples_text
from tidemill.config.schema import RunSpec
from tidemill.models.model_source import ModelSource

Asked = list[tuple[RunSpec, Sequence[str]]]


@pytest.fixture
def asked(pretend: Pretend) -> Asked:
    calls: Asked = []

    def generate(
        spec: RunSpec,
        *,
        model: ModelSource | None,
        prompts: Sequence[str],
        raw: bool,
        progress: Callable[[str], None],
    ) -> list[dict[str, Any]]:
        calls.append((spec, prompts))
        return [{"prompt": prompt, "completion": "5\n", "finish": "stop"} for prompt in prompts]

    pretend("tidemill.jobs.model_evaluation", "generate", generate)
    return calls


def test_prompts_among_options(run: Run, asked: Asked) -> None:
    ran = run("generate", "2+3=", "--sampling.temperature", "0", "1+4=", "--engine.batch_invariant")
    assert ran.code == 0
    assert ran.out == "2+3=5\n\n---\n1+4=5\n\n"
    spec, prompts = asked[0]
    assert prompts == ["2+3=", "1+4="]
    assert (spec.sampling.temperature, spec.engine.batch_invariant) == (0.0, True)
    assert run("generate", "x", "--json").data == {"samples": [{"prompt": "x", "completion": "5\n", "finish": "stop"}]}


def test_a_prompt_from_standard_input(run: Run, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("--two\nlines\n"))
    run("generate", "-")
    assert asked[0][1] == ["--two\nlines"]


def test_messages_from_arguments_files_and_standard_input(
    run: Run, asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = [{"role": "user", "content": "2+2="}]
    text = json.dumps(chat)
    (tmp_path / "asked.jsonl").write_text(f'{text}\n"plain"\n{json.dumps({"messages": chat})}\n', encoding="utf-8")
    (tmp_path / "asked.json").write_text(text, encoding="utf-8")
    (tmp_path / "asked.txt").write_text("two\nlines\n", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{text}\n{text}\n"))
    for words in (["-"], ["--prompts=asked.jsonl"], ["--prompts=asked.json"], ["--prompts=asked.txt"], [text, "{"],
                  ["--raw", text]):  # fmt: skip
        assert run("generate", *words).code == 0
    assert [prompts for _, prompts in asked] == [
        [chat, chat], [chat, "plain", {"messages": chat}], [chat], ["two\nlines"], [chat, "{"], [text],
    ]  # fmt: skip
    assert "asked.jsonl: cannot be read" in run("generate", "--prompts=no/asked.jsonl").err


def test_without_a_prompt(run: Run, asked: Asked) -> None:
    ran = run("generate", "--sampling.top_k=5")
    assert (ran.code, asked) == (2, [])
    assert ran.err.startswith("error: no prompt given\n")


def test_dry_run(run: Run, asked: Asked) -> None:
    assert "temperature 1, top-k 5, at most 256 new tokens" in run("generate", "--dry-run", "--sampling.top_k=5").out


@pytest.mark.parametrize(("terminal", "text"), [(True, "a\\x1b[2J\nb"), (False, "a\x1b[2J\nb")])
def test_control_characters_are_escaped_on_a_terminal(
    terminal: bool, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    assert samples_text([{"prompt": "a", "completion": "\x1b[2J\nb"}]) == text
