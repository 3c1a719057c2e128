"""The public names of `tidemill`, and what importing it loads."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tidemill
from tidemill.jobs.callbacks import METHODS

ADAPTERS = ("close_sandbox", "invoke", "tasks_for")
"""Methods of an environment that the adapters of other libraries override."""


def test_the_public_names() -> None:
    assert tidemill.__all__ == [
        "Callback", "Environment", "Run", "Sample", "Step", "TidemillError", "ToolEnvironment", "advantage",
        "demonstrations", "dpo", "evaluate", "export", "generate", "load_config", "loss", "loss_term", "pairs",
        "prompt_sampler", "reward", "reward_model", "rewards", "sft", "task", "tool", "train", "train_async",
        "watch",
    ]  # fmt: skip
    for name in tidemill.__all__:
        assert inspect.getdoc(getattr(tidemill, name)), name


def names_of(owner: object) -> list[str]:
    """What users find in a class or module that is defined here."""
    module = owner if inspect.ismodule(owner) else sys.modules[getattr(owner, "__module__", "")]
    return [
        name
        for name, value in vars(owner).items()
        if not name.startswith("_") and getattr(value, "__module__", module.__name__) == module.__name__
        if not inspect.ismodule(owner) or inspect.isfunction(value)
    ]


@pytest.mark.parametrize(
    ("page", "pattern", "names"),
    [
        ("how-to/own-functions.md", r"\b(tm|tidemill)\.{name}\b|`{name}`", tidemill.__all__),
        ("how-to/own-functions.md", r"\btm\.rewards\.{name}\(", names_of(tidemill.rewards)),
        ("how-to/own-functions.md", r"\brun\.{name}\b", [*names_of(tidemill.Run), "path", "stages"]),
        ("how-to/own-functions.md", r"`{name}`|`Callback\.{name}`", [*METHODS, "stop"]),
        ("how-to/agents.md", r"\b{name}\b", [each for each in names_of(tidemill.Environment) if each not in ADAPTERS]),
    ],
)
def test_the_docs_mention_every_public_name(page: str, pattern: str, names: list[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    assert len(names) > 4
    assert [name for name in names if not re.search(pattern.format(name=name), text)] == []


def test_public_functions_are_typed() -> None:
    stages = ("demonstrations", "dpo", "pairs", "reward_model", "sft")
    for name in ("evaluate", "generate", "load_config", "train", "train_async", *stages):
        signature = inspect.signature(getattr(tidemill, name))
        assert signature.return_annotation is not inspect.Signature.empty
        assert all(each.annotation is not each.empty for each in signature.parameters.values()), name


def test_importing_loads_no_tensor_library() -> None:
    script = """
import sys
import tidemill
tidemill.reward, tidemill.load_config, tidemill.sft, tidemill.rewards, tidemill.Run
print({"torch", "transformers"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(tidemill, "no_such_name")
    with pytest.raises(AttributeError, match=r"use tidemill\.sft"):
        getattr(tidemill, "SFTTrainer")  # noqa: B009
