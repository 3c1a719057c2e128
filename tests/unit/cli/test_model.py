from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Run
from tidemill.config.model import EXPORT_DTYPE, CharModelConfig, ModelConfig
from tidemill.config.schema import ExportConfig, RunSpec
from tidemill.models.catalog import ModelEntry, resolve

ENTRIES = [
    ModelEntry(
        name="smollm2-135m", origin="a wheel", parameters=134_515_008, cached=True, path="/c/s", size_bytes=542_000_000
    ),
    ModelEntry(name="o/n[1]", origin="hub", parameters=None, cached=False, path="/c/n", size_bytes=0),
]


def test_list(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.cli.model_commands.listing", lambda: ENTRIES)
    ran = run("model", "list")
    assert [line.split() for line in ran.out.splitlines()] == [
        ["model", "parameters", "cached", "from"],
        ["smollm2-135m", "134.5", "M", "542", "MB", "a", "wheel"],
        ["o/n[1]", "unknown", "no", "hub"],
    ]
    assert run("model", "list", "--json").data["models"][0]["path"] == "/c/s"


def test_get(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ModelConfig] = []

    def resolve(config: ModelConfig, *, progress: Callable[[str], None]) -> Path:
        asked.append(config)
        progress("fetching")
        return Path("/cache/x")

    monkeypatch.setattr("tidemill.cli.model_commands.resolve", resolve)
    ran = run("model", "get", "char", "--model.char.layers", "2")
    assert (ran.code, ran.out, ran.err) == (0, "/cache/x\n", "fetching\n")
    assert run("model", "get", "o/n", "--model.revision=v1", "--json").data == {"name": "o/n", "path": "/cache/x"}
    assert (asked[0].source, asked[0].char.layers) == ("char", 2)
    assert (asked[1].source, asked[1].revision) == ("o/n", "v1")


def test_the_name_comes_first(run: Run) -> None:
    assert run("model", "get", "--model.char.layers", "2").code == 2
    assert run("model", "get", "@recipe.toml").err.startswith("error: @recipe.toml: expected the model's name first")


def test_unknown_models_are_the_users_error(run: Run) -> None:
    ran = run("model", "get", "smollm2-135n")
    assert ran.code == 2
    assert "did you mean smollm2-135m?" in ran.err


def test_alone_it_shows_its_help(run: Run) -> None:
    assert "Usage: tidemill model COMMAND" in run("model").out


def test_export_keeps_the_weights_unless_another_type_is_chosen(run: Run, tmp_path: Path) -> None:
    model = resolve(ModelConfig(source="char", char=CharModelConfig(hidden_size=32, layers=1)), progress=print)
    exported = {
        name: run("export", str(model), str(tmp_path / name), *args, "--json").data["bytes"]
        for name, args in (("default", ()), ("fp32", ("--dtype", "fp32")), ("bfloat16", ("--dtype", "bfloat16")))
    }
    facts = {name: json.loads((tmp_path / name / "tidemill.json").read_text(encoding="utf-8")) for name in exported}
    assert {name: fact["dtype"] for name, fact in facts.items()} == {
        "default": "fp32",
        "fp32": "fp32",
        "bfloat16": "bf16",
    }
    assert facts["default"]["weights_digest"] == facts["fp32"]["weights_digest"] != facts["bfloat16"]["weights_digest"]
    assert exported["bfloat16"] < exported["default"]
    assert RunSpec().export.dtype == EXPORT_DTYPE == "fp32"
    assert ExportConfig.model_validate({"dtype": "bfloat16"}).dtype == "bf16"
