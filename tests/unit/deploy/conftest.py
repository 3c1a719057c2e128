"""Recipes with [deploy] in an empty folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidemill.deploy.documents import Document, Rendered
from tidemill.deploy.render import render
from tidemill.runtime.memory_check import known_models

RECIPE = """\
[run]
name = "small"
[model]
source = "char"
[pool]
kind = "synthetic"
workers = 2
[deploy]
target = "kubernetes"
image = "registry/tidemill@sha256:0"
"""
RenderRecipe = Callable[..., Rendered]


@pytest.fixture
def rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RenderRecipe:
    """`rendered("--deploy.queue=a", recipe=TEXT)`."""
    monkeypatch.chdir(tmp_path)

    def call(*options: str, recipe: str = RECIPE) -> Rendered:
        (tmp_path / "r.toml").write_text(recipe, encoding="utf-8")
        return render(["@r.toml", *options], models_of=lambda spec: known_models(spec, None, fetch=False))

    return call


def by_kind(result: Rendered, kind: str) -> Document:
    """The document of a kind, of which there is one."""
    documents = [yaml.safe_load(text) for text in result.files.values()]
    (document,) = [each for each in documents if each["kind"] == kind]
    found: dict[str, Any] = document
    return found


def recipe_of(result: Rendered) -> str:
    return str(by_kind(result, "ConfigMap")["data"]["recipe.toml"])
