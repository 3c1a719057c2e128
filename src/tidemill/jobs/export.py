"""Export a model as a plain Hugging Face folder: weights, tokenizer, model card, provenance."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

import tidemill
from tidemill.config.model import EXPORT_DTYPE, ModelConfig
from tidemill.config.schema import ExportConfig, RunConfig, RunSpec
from tidemill.core.errors import UserError
from tidemill.core.formatting import compact, counted
from tidemill.core.records import Record
from tidemill.models.catalog import resolve
from tidemill.models.folder import refuse_reward_model
from tidemill.models.loading import load_model
from tidemill.models.model_source import ModelSource, locate
from tidemill.models.saving import export_merged, save_model
from tidemill.models.weights_digest import weights_digest
from tidemill.runtime.memory_check import check_memory
from tidemill.telemetry.jsonl import disk_error, encode
from tidemill.telemetry.manifest import git_state
from tidemill.telemetry.run_dir import PROMPTS, PromptFormat, read_json

PROVENANCE = "tidemill.json"
CARD = "README.md"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Exported(Record):
    """Size of an exported model."""

    parameters: int
    bytes: int


def export_model(
    spec: RunSpec,
    *,
    to: Path,
    dtype: str,
    digest: str,
    history: Sequence[str],
    prompts: PromptFormat | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Exported:
    """Write the configured model to a folder, which appears whole or not at all.

    Args:
        to: a new folder, or one written by an earlier export, which is replaced.
        digest: identifies the exported model; stored in the folder.
        history: how the model was trained, one line per stage, for the model card.
        prompts: how the run that trained it formatted prompts. Default: as the folder of the model says.

    Raises:
        UserError: the model cannot be loaded, or the folder holds something else or cannot be written.
    """
    refuse_foreign(to)
    check_memory(spec, "load", note=progress)
    source = resolve(spec.model, progress=progress)
    model = load_model(source, device=torch.device("cpu"), dtype=DTYPES[dtype])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    facts = {
        "tidemill": tidemill.__version__,
        "git": git_state(),
        "export": digest,
        "dtype": dtype,
        "parameters": parameters,
        "weights_digest": weights_digest(model),
        "history": list(history),
        PROMPTS: prompts or locate(spec.model.source).prompts,
    }
    partial = to.with_name(f".{to.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_model(model, partial, source=source)
        (partial / PROVENANCE).write_bytes(msgspec.json.format(encode(facts)) + b"\n")
        (partial / CARD).write_text(card(spec.run.name, to.name, facts), encoding="utf-8")
        size = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())
        if to.exists():
            shutil.rmtree(to)
        partial.rename(to)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise disk_error(error, to) from error
    return Exported(parameters=parameters, bytes=size)


def export_source(
    model: ModelSource,
    *,
    to: Path,
    dtype: str = EXPORT_DTYPE,
    config: ModelConfig | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Exported:
    """Write any model as a plain Hugging Face folder; an adapter is merged into its base first.

    Args:
        config: further settings of a name, such as its revision.

    Raises:
        UserError: as `export_model`; also if it is a reward model, whose head such a folder cannot have.
    """
    refuse_foreign(to)
    refuse_reward_model(model.source)
    merged = to.with_name(f".{to.name}.merged")
    try:
        named = model.merged_config(config or ModelConfig())
        if model.adapter is not None:
            shutil.rmtree(merged, ignore_errors=True)
            export_merged(model.adapter, merged, resolve_base=lambda base: resolve(base, progress=progress))
            named = ModelConfig(source=str(merged.resolve()))
        spec = RunSpec(run=RunConfig(name=to.name), model=named, export=ExportConfig.model_validate({"dtype": dtype}))
        return export_model(
            spec,
            to=to,
            dtype=dtype,
            digest=Path(model.source).name,
            history=training_history(model),
            prompts=model.prompts,
            progress=progress,
        )
    finally:
        shutil.rmtree(merged, ignore_errors=True)


def training_history(model: ModelSource) -> list[str]:
    """One line for each run that trained a model, the first run first, as far as their directories exist."""
    lines: list[str] = []
    trained: ModelSource | None = model
    while trained is not None and trained.run is not None:
        manifest = read_json(trained.run / "manifest.json")
        start = str(manifest.get("model", ""))
        steps = f"{counted(trained.step, 'step')} of " if trained.step is not None else ""
        line = f"{trained.run.name}: {steps}{manifest.get('kind', 'rl')}"
        try:
            trained = locate(start)
        except UserError:  # moved or deleted
            trained = None
        earlier = None if trained is None else trained.run
        lines.append(f"{line} from {earlier.name if earlier else start}")
    return lines[::-1]


def card(title: str, folder: str, facts: dict[str, Any]) -> str:
    """The model card: training history and how to load the model."""
    history = "\n".join(f"{number}. {line}" for number, line in enumerate(facts["history"], 1))
    commit = facts["git"].get("commit", "")
    made = f"Tidemill {facts['tidemill']}" + (f", commit {commit[:12]}" if commit else "")
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [tidemill]
---
# {title}

Post-trained with {made}: {compact(facts["parameters"])} parameters, weights in {facts["dtype"]}, digest
`{facts["weights_digest"]}`.

## Training history

{history or "Exported without training."}

## Loading it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
```

The licence and the intended use of its base model apply to this model, too.
"""


def refuse_foreign(to: Path) -> None:
    """Raises UserError: the folder exists and was not written by an export."""
    if to.exists() and "export" not in read_json(to / PROVENANCE):
        raise UserError(
            "this folder exists and was not written by an export",
            where=f"export.path = {to}",
            hint="name a new folder, or move this one away",
        )
