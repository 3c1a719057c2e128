"""The public names of `tidemill`, and what importing it loads."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import tidemill


def test_the_public_names() -> None:
    assert tidemill.__all__ == [
        "Callback", "Environment", "Run", "Sample", "Step", "TidemillError", "ToolEnvironment", "advantage",
        "demonstrations", "dpo", "evaluate", "export", "generate", "load_config", "loss", "loss_term", "pairs",
        "prompt_sampler", "reward", "reward_model", "rewards", "sft", "task", "tool", "train", "train_async",
    ]  # fmt: skip
    for name in tidemill.__all__:
        assert inspect.getdoc(getattr(tidemill, name)), name


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
