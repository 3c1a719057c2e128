"""Stages read no key that is missing from their digest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pretend_stages import pipeline
from tidemill.config.base import Config
from tidemill.config.keys import belongs_to, neutral_keys
from tidemill.config.pipeline import KINDS, StageSpec
from tidemill.pipeline.job import Job
from tidemill.pipeline.stage_kinds import RUNNERS

# An untrained model is almost never right: here a completion with one of these digits is.
TOP = """\
[model]
source = "char"
[scoring]
rewards = [{ kind = "regex", pattern = "[0-4]" }]
[sampling]
max_new_tokens = 5
"""
MANNER = {
    *(
        "run.dir",
        "run.name",
        "run.check_memory",
        "trainer.threads",
        "engine.tick_s",
        "scoring.concurrency",
        "scoring.timeout_s",
    ),
    *("trainer.activation_checkpointing", "trainer.shards", "trainer.offload"),
}
"""Keys of location, name and resources: read, without effect on the result."""


def keys(section: Config, prefix: str = "") -> Iterator[tuple[tuple[type[Config], str], str]]:
    """(class and field, dotted key) of all keys below a section."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Config):
            yield from keys(value, f"{prefix}{name}.")
        else:
            yield (type(section), name), f"{prefix}{name}"


@pytest.mark.parametrize(
    ("kind", "settings", "read"),
    [
        ("demonstrations", "data_generation.prompts = 4", {"data_generation.split", "sampling.stop", "task.digits"}),
        (
            "pairs",
            "data_generation.prompts = 20",
            {"data_generation.pairs_per_prompt", "sampling.temperature", "engine.slots"},
        ),
        ("eval", "eval.prompts = 4\neval.samples_per_prompt = 2", {"eval.pass_at", "sampling.temperature"}),
        ("export", "", {"export.dtype", "model.source"}),
    ],
)
def test_a_stage_digest_depends_only_on_the_keys_it_reads(
    tmp_path: Path,
    session_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    settings: str,
    read: set[str],
) -> None:
    top = TOP if kind in ("pairs", "eval") else '[model]\nsource = "char"\n'
    threads = "trainer.threads = 1\n" if kind in ("pairs", "eval") else ""
    text = f'{top}[[stage]]\nname = "a"\nkind = "{kind}"\n{threads}{settings}\n'
    (stage,) = pipeline(tmp_path, text).stages
    seen = _seen(stage, tmp_path / "run", monkeypatch)
    assert read <= seen, "the recorder of reads works"
    used = KINDS[stage.kind].sections
    overlooked = {key for key in seen if key.split(".")[0] in used and belongs_to(key, neutral_keys(stage.kind))}
    assert overlooked <= MANNER


def _seen(stage: StageSpec, directory: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The keys that running a stage reads."""
    directory.mkdir()
    spec = stage.spec.model_copy(update={"run": stage.spec.run.model_copy(update={"dir": directory})})
    names, seen = dict(keys(spec)), set[str]()

    def remember(self: Config, name: str) -> Any:
        if key := names.get((type(self), name)):
            seen.add(key)
        return object.__getattribute__(self, name)

    with monkeypatch.context() as watched:
        watched.setattr(Config, "__getattribute__", remember)
        job = Job(name="a", kind=stage.kind, digest="d", spec=spec, earlier=[], progress=lambda _: None)
        RUNNERS[stage.kind](job)
    return seen
