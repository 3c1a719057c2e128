"""Make data files from a task: demonstrations for SFT, and preference pairs from a model's own answers.

    python scripts/make_data.py demonstrations --out sft.jsonl @smollm2-addition
    python scripts/make_data.py pairs --out pairs.jsonl --samples 16 @smollm2-addition --run.seed 3

Prompts are the task's training prompts, or with --held-out (for `data.held_out_path`) those kept for evaluation.
Recipes and `--section.key value` are as for `tidemill train`. Beside the rows lies a .provenance.json: model, weights,
seed, configuration, counts. Learn from the rows with `data.end_token = false`: their completions are written with what
ended them, a stop string or an end token.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tidemill.cli.arguments import given_model, spec_for
from tidemill.cli.output import explain, note

MOST_PROMPTS = 1000


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options, items = arguments(argv)
    try:
        found = make(options, items)
    except BaseException as error:  # noqa: BLE001 (the one place where every error ends)
        failure = explain(error)
        note(failure.text)
        return failure.exit_code
    print(f"{found['rows']} {found['kind']} in {options.out}")
    return 0


def arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The options of this script, and the recipes and overrides among them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("kind", choices=("demonstrations", "pairs"))
    parser.add_argument("--out", type=Path, required=True, help="the JSONL file to write; must not be there yet")
    parser.add_argument("--held-out", action="store_true", help="of the held-out prompts, not the training ones")
    parser.add_argument("--prompts", type=positive, default=MOST_PROMPTS, help="at most so many (%(default)s)")
    parser.add_argument("--samples", type=positive, default=8, help="pairs: answers drawn of each prompt (%(default)s)")
    parser.add_argument(
        "--pairs-per-prompt", type=positive, default=4, help="pairs: of one prompt, at most (%(default)s)"
    )
    parser.add_argument("--checkpoint", help="pairs: a run directory or another model instead")
    return parser.parse_known_args(argv)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def make(options: argparse.Namespace, items: Sequence[str]) -> dict[str, Any]:
    """The provenance of what was written."""
    side: Literal["train", "held_out"] = "held_out" if options.held_out else "train"
    # Here, so that --help and a misspelt key need not wait for torch.
    from tidemill.jobs.batch_generation import make_demonstrations, make_pairs

    with given_model(options.checkpoint) as model:
        spec = spec_for(items, model, purpose="generate")
        if options.kind == "demonstrations":
            return make_demonstrations(spec, options.out, prompts=options.prompts, progress=note, split=side)
        return make_pairs(
            spec,
            options.out,
            prompts=options.prompts,
            samples_per_prompt=options.samples,
            pairs_per_prompt=options.pairs_per_prompt,
            progress=note,
            split=side,
            model=model,
        )


if __name__ == "__main__":
    sys.exit(main())
