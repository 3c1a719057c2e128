"""Supervised training without a run directory: random examples, and telemetry that records steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tests.model_shapes import VOCABULARY, llama
from tidemill.config.schema import RunSpec
from tidemill.core.records import Demonstration, PreferencePair, StepMetrics, pack_tokens
from tidemill.models.attention import use_packed_attention
from tidemill.models.tree_forward import TreeForward
from tidemill.telemetry.recorder import NullTelemetry
from tidemill.trainer.checkpoint_store import CheckpointStore
from tidemill.trainer.supervised_loop import FitContext


class RecordedSteps(NullTelemetry):
    """Records steps and events."""

    def __init__(self) -> None:
        super().__init__(lambda _: None)
        self.steps: list[StepMetrics] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def step(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)

    def event(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))

    def curve(self, name: str) -> list[float]:
        return [line.values[name] for line in self.steps if name in line.values]


def supervised_spec(**sections: dict[str, Any]) -> RunSpec:
    base: dict[str, dict[str, Any]] = {
        "supervised": {"minibatch_tokens": 120, "microbatch_tokens": 60, "evaluate_every_steps": 2},
        "optimizer": {"learning_rate": 3e-3},
        "checkpoint": {"every_steps": 2},
    }
    names = {*base, *sections}
    return RunSpec.model_validate({name: {**base.get(name, {}), **sections.get(name, {})} for name in names})


def fit_context(
    folder: Path,
    *,
    model: PreTrainedModel | None = None,
    source: Path | None = None,
    autocast: torch.dtype | None = None,
    **options: Any,
) -> FitContext:
    """A context in `folder`, by default with the small Llama model."""
    model = model if model is not None else llama()
    use_packed_attention(model)
    forward = options.pop("forward", None) or TreeForward(model, autocast=autocast)
    (folder / "source").mkdir(parents=True, exist_ok=True)
    options = {"telemetry": RecordedSteps(), **options}
    return FitContext(
        forward=forward,
        source=source or folder / "source",
        directory=folder,
        checkpoints=CheckpointStore(folder / "checkpoints", keep_last=2),
        **options,
    )


def stop_after(calls: int) -> Callable[[], bool]:
    """Returns False for the first `calls` calls, then True."""
    left = iter([False] * calls)
    return lambda: next(left, True)


def demonstrations(count: int, seed: int = 0) -> list[Demonstration]:
    """A common header, prompts of 3 tokens, completions of 1 to 6 that repeat the prompt's last token and end."""
    rng = np.random.default_rng(seed)
    header, made = [60, 61, 62, 63], []
    for number in range(count):
        prompt = rng.integers(2, VOCABULARY, 3).tolist()
        completion = [prompt[-1]] * int(rng.integers(1, 6)) + [1]
        made.append(
            Demonstration(
                id=f"d{number}", prompt_ids=pack_tokens([*header, *prompt]), completion_ids=pack_tokens(completion)
            )
        )
    return made


def pairs(count: int, seed: int = 0, *, margin: float = 0.0) -> list[PreferencePair]:
    """Chosen completions repeat the prompt's last token, rejected ones are random; both are 1 to 5 tokens long."""
    rng = np.random.default_rng(seed)
    header, made = [60, 61, 62, 63], []
    for number in range(count):
        prompt = rng.integers(2, VOCABULARY, 3).tolist()
        chosen = [prompt[-1]] * int(rng.integers(1, 5)) + [1]
        rejected = [*rng.integers(2, VOCABULARY, int(rng.integers(1, 5))).tolist(), 1]
        made.append(
            PreferencePair(
                id=f"p{number}",
                prompt_ids=pack_tokens([*header, *prompt]),
                chosen_ids=pack_tokens(chosen),
                rejected_ids=pack_tokens(rejected),
                margin=margin * number,
            )
        )
    return made
