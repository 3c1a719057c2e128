"""`tidemill generate`: try prompts on a model or a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from cyclopts import Parameter

from tidemill.cli.arguments import Checkpoint, model_folder, spec_for
from tidemill.cli.arguments import dry_run as show_dry_run
from tidemill.cli.output import note
from tidemill.cli.result import DryRun, Json, Result
from tidemill.config.layers import split_arguments
from tidemill.core.errors import UserError

Words = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,
        help="Prompts (`-` reads one from standard input), `@recipe.toml` and `--section.key value`.",
    ),
]


def generate(*items: Words, checkpoint: Checkpoint = None, dry_run: DryRun = False, json: Json = False) -> Result:
    """Try prompts on a model or a checkpoint: `tidemill generate "2+3=" --sampling.temperature 0`."""
    given = split_arguments(items)
    with model_folder(checkpoint) as folder:
        spec = spec_for(given.items, checkpoint, purpose="generate")
        if dry_run:
            return show_dry_run(spec, purpose="generate")
        prompts = read_prompts(given.rest)
        from tidemill.runtime.generate import generate as run

        samples = run(spec, model_folder=folder, prompts=prompts, progress=note)
    return Result(data={"samples": samples}, text=samples_text(samples))


def read_prompts(words: Sequence[str]) -> list[str]:
    """The prompts themselves; `-` is replaced by standard input, without its last newline.

    Raises:
        UserError: there is none.
    """
    if not words:
        raise UserError("no prompt given", cure='write tidemill generate "your prompt", or - to read standard input')
    return [sys.stdin.read().removesuffix("\n") if word == "-" else word for word in words]


def samples_text(samples: Sequence[Mapping[str, Any]]) -> str:
    """Prompt and completion run together, as the model sees them; a rule between several."""
    texts = [f"{sample.get('prompt', '')}{sample.get('completion', '')}" for sample in samples]
    return "\n---\n".join(texts)
