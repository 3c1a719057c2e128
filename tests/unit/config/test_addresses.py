from __future__ import annotations

from pathlib import Path

import pytest

from tests.config_issues import issues_of
from tidemill.config.addresses import address_hint
from tidemill.config.load import load_spec, override_tree

GSM8K = "https://huggingface.co/datasets/openai/gsm8k"
FILE = ["--task.kind=file"]


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("https://huggingface.co/Qwen/Qwen2.5-0.5B", "write hub:Qwen/Qwen2.5-0.5B"),
        ("https://huggingface.co/Qwen/Qwen2.5-0.5B/", "write hub:Qwen/Qwen2.5-0.5B"),
        ("http://hf.co/Qwen/Qwen2.5-0.5B/tree/main", "write hub:Qwen/Qwen2.5-0.5B"),
        ("huggingface.co/Qwen/Qwen2.5-0.5B?library=x", "write hub:Qwen/Qwen2.5-0.5B"),
        (GSM8K, "write hub:openai/gsm8k"),
        (f"{GSM8K}/tree/main/main", "write hub:openai/gsm8k"),
        (f"{GSM8K}/viewer/main/train", "write hub:openai/gsm8k"),
        (f"{GSM8K}/resolve/v2/rows.jsonl", "write hub:openai/gsm8k@v2"),
        ("hf://datasets/openai/gsm8k", "write hub:openai/gsm8k"),
        (Path("/home") / GSM8K, "write hub:openai/gsm8k"),
        ("https://example.com/rows.jsonl", "download it"),
        ("s3://bucket/rows.jsonl", "download it"),
        ("hub:openai/gsm8k", ""),
        ("openai/gsm8k", ""),
        ("/data/rows.jsonl", ""),
    ],
)
def test_what_to_write_instead_of_a_web_address(given: str | Path, hint: str) -> None:
    assert address_hint(given).startswith(hint)
    assert bool(hint) == bool(address_hint(given))


@pytest.mark.parametrize(
    ("key", "more"),
    [
        ("model.source", []),
        ("critic.source", ["--critic.kind=own"]),
        ("eval.compare_with", []),
        ("task.path", FILE),
        ("task.held_out_path", [*FILE, "--task.path=rows.jsonl"]),
        ("data.path", []),
        ("data.held_out_path", ["--data.path=rows.jsonl"]),
    ],
)
def test_a_web_address_is_refused_where_it_is_given(key: str, more: list[str]) -> None:
    (issue,) = issues_of(lambda: load_spec([*more, f"--{key}={GSM8K}/tree/main"], purpose="read"))
    assert (issue.key, issue.what, issue.hint) == (key, "is a web address", "write hub:openai/gsm8k")
    assert issue.source == "command line"


@pytest.mark.parametrize(("key", "more"), [("task.sources", FILE), ("data.sources", []), ("eval.sets", [])])
def test_a_web_address_is_refused_in_a_table(key: str, more: list[str]) -> None:
    name = 'name = "a", ' if key == "eval.sets" else ""
    (issue,) = issues_of(lambda: load_spec([*more, f'--{key}=[{{ {name}path = "{GSM8K}" }}]'], purpose="read"))
    assert (issue.key, issue.hint) == (f"{key}[0].path", "write hub:openai/gsm8k")


def test_a_model_may_have_the_prefix_of_the_hub() -> None:
    assert load_spec(["--model.source=hub:Qwen/Qwen2.5-0.5B"], purpose="read").model.source == "Qwen/Qwen2.5-0.5B"


def test_a_data_set_of_the_hub_stays_as_it_is() -> None:
    assert override_tree({"task.path": "hub:openai/gsm8k"}) == {"task": {"path": "hub:openai/gsm8k"}}
