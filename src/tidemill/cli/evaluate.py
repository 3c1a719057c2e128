"""`tidemill eval`, `generate`, `serve` and `report`: evaluate a model, generate with it, write a run's report."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tidemill.cli.arguments import Checkpoint, Items, given_model, row_remarks, spec_for
from tidemill.cli.arguments import dry_run as show_dry_run
from tidemill.cli.output import DryRun, Json, Result, note, printable
from tidemill.config.issues import refuse_without_task
from tidemill.config.load import split_arguments
from tidemill.core.errors import UserError
from tidemill.core.formatting import interval
from tidemill.core.packages import install_command
from tidemill.data.given_prompts import as_written, read_question_file
from tidemill.models.checkpoint_manifest import refuse_damaged
from tidemill.models.model_source import ModelSource, is_run
from tidemill.models.prompt_format import formatted_as_trained

LONGEST_PATH = 200  # characters
OPTION = re.compile(r"-[A-Za-z][\w-]*")
Compare = Annotated[
    str | None,
    Parameter(
        name="--compare",
        help="Evaluate another model on the same prompts and compare; named as for --checkpoint.",
    ),
]


def evaluate(
    *items: Items,
    checkpoint: Checkpoint = None,
    compare: Compare = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> Result:
    """Evaluate a model or a checkpoint on the task's held-out prompts and on `eval.sets`: mean reward and accuracy of
    greedy completions, lengths, diversity; with `--eval.samples_per_prompt N` also pass@k."""
    with given_model(checkpoint) as model, compared(compare) as other:
        spec = spec_for(items, model, purpose="eval")
        if model is None and not split_arguments(items).recipes:
            refuse_without_task(spec, "tidemill eval")
        if model is not None and not split_arguments(items).recipes:
            spec = formatted_as_trained(spec, model, note=note)
        if dry_run:
            from tidemill.runtime.memory_check import memory_remarks

            remarks = [*memory_remarks(spec, "eval", folder=model.folder if model else None), *row_remarks(spec)]
            return show_dry_run(spec, purpose="eval", notes=remarks)
        from tidemill.jobs.model_evaluation import evaluate as run

        found = run(spec, model=model, compare=other, progress=note)
    return Result(data=found, text=figures(found))


@contextmanager
def compared(name: str | None) -> Iterator[ModelSource | None]:
    """Yield the other model. Reports damage at once, because it is loaded only after the first evaluation."""
    with given_model(name, option="--compare") as found:
        if found is not None and found.folder is not None:
            refuse_damaged(found.folder)
        yield found


def figures(found: dict[str, Any]) -> str:
    """One figure per line; completions are only in `--json`."""
    lines = _lines(found)
    width = max((len(name) for name, _ in lines), default=0)
    return "\n".join(f"{name:<{width}}  {words}".rstrip() for name, words in lines)


OF_THE_MODEL = ("model", "weights_digest")
"""Equal for every set, and printed once."""


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    lines = list[tuple[str, str]]()
    for name, value in found.items():
        if name == "drawn":
            lines += _drawn(value)
        elif name == "scores":
            lines += [(f"score {scorer}", _with_interval(score)) for scorer, score in value.items()]
        elif name == "compared_with":
            lines += _compared(value)
        elif name == "sets":
            for of_set, figures_of_set in value.items():
                lines.append((f"set {of_set}", ""))
                lines += [(f"  {each}", text) for each, text in _lines(figures_of_set) if each not in OF_THE_MODEL]
        elif value is not None and f"{name}_interval" in found:
            low, high = found[f"{name}_interval"] or (None, None)
            lines.append((name, _with_interval({"value": value, "low": low, "high": high})))
        else:
            lines += _plain(name, value)
    return lines


def _plain(name: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, dict) and "low" in value:
        return [(name, _with_interval(value))]
    if isinstance(value, dict):
        return [(name, ", ".join(f"{part} {_number(each)}" for part, each in value.items()))]
    return [(name, _number(value))] if isinstance(value, (str, int, float)) else []


def _drawn(drawn: dict[str, Any]) -> list[tuple[str, str]]:
    rest = {name: value for name, value in drawn.items() if name not in ("samples_per_prompt", "pass_at")}
    return [
        ("drawn", f"{drawn['samples_per_prompt']} samples per prompt"),
        *((f"  pass@{k}", _with_interval(figure)) for k, figure in drawn["pass_at"].items()),
        *(line for name, value in rest.items() for line in _plain(f"  {name}", value)),
    ]


def _compared(other: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [("compared_with", f"{other['model']}, weights {other['weights_digest']}")]
    for name, figure in other["figures"].items():
        means = f"{_number(figure['other'])} -> {_number(figure['this'])}"
        counts = f"higher on {figure['higher']} of {figure['n']}, lower on {figure['lower']}"
        change = _with_interval(figure["difference"], sign="+")
        lines.append((f"  {name}", f"{means}, {change}; {counts}, p = {figure['p_value']:.2g}"))
    return lines


def _with_interval(figure: dict[str, Any], *, sign: str = "") -> str:
    value = f"{figure['value']:{sign}.4g}"
    if figure["low"] is None or figure["high"] is None:
        return f"{value} ({interval(None)})"
    return f"{value} (95 %: {figure['low']:{sign}.3g} to {figure['high']:{sign}.3g})"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


Words = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,
        help="Prompts (`-` reads standard input; messages as JSON), `@recipe.toml` and `--section.key value`.",
    ),
]


PromptFile = Annotated[
    Path | None,
    Parameter(
        name="--prompts",
        help="A file with prompts: .jsonl (a text, messages or a row per line), .json, or one text.",
    ),
]


def generate(
    *items: Words,
    checkpoint: Checkpoint = None,
    prompts: PromptFile = None,
    raw: Annotated[bool, Parameter(name="--raw", negative="", help="Send texts as written.")] = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> Result:
    """Generate completions with a model: `tidemill generate "2+3=" --sampling.temperature 0`. A prompt is a text, or
    messages in JSON. A text is formatted as in the run that trained the model: in its chat template, after its system
    prompt."""
    given = split_arguments(items)
    if any(path == ("prompt",) for path, _ in given.assignments):
        hint = 'a prompt is an argument without an option: tidemill generate "2+3="'
        raise UserError("unknown option", where="--prompt", hint=hint)
    with given_model(checkpoint) as model:
        spec = spec_for(given.items, model, purpose="generate")
        if dry_run:
            from tidemill.runtime.memory_check import memory_remarks

            remarks = memory_remarks(spec, "generate", folder=model.folder if model else None)
            return show_dry_run(spec, purpose="generate", notes=remarks)
        asked = read_prompts(given.rest, raw=raw, needed=prompts is None)
        if prompts is not None:
            asked += read_question_file(prompts)
        from tidemill.jobs.model_evaluation import generate as run

        samples = run(spec, model=model, prompts=asked, raw=raw, progress=note)
    return Result(data={"samples": samples}, text=samples_text(samples))


def read_prompts(words: Sequence[str], *, raw: bool = False, needed: bool = True) -> list[Any]:
    """The prompts, text or messages; `-` is replaced by standard input without its last newline.

    Args:
        raw: what looks like messages is text, too.

    Raises:
        UserError: no prompt given, or an option or a model in place of one.
    """
    for word in () if raw else words:
        if OPTION.fullmatch(word):
            hint = (
                "options begin with two dashes; `tidemill generate --help` lists them, and --raw takes it as a prompt"
            )
            raise UserError("unknown option", where=word, hint=hint)
        if 0 < len(word) < LONGEST_PATH and ((Path(word) / "config.json").is_file() or is_run(Path(word))):
            raise UserError("is a model, not a prompt", where=word, hint=f"write --checkpoint {word}")
    if not words and needed:
        raise UserError("no prompt given", hint='write tidemill generate "your prompt", or - to read standard input')
    texts = [sys.stdin.read().removesuffix("\n") if word == "-" else word for word in words]
    return texts if raw else [prompt for text in texts for prompt in as_written(text)]


def samples_text(samples: Sequence[Mapping[str, Any]]) -> str:
    """Prompt and completion concatenated, samples separated by a rule. A chat is shown by its messages. On a terminal
    control characters are escaped."""
    texts = [_shown(sample) for sample in samples]
    if sys.stdout.isatty():
        texts = [printable(text) for text in texts]
    return "\n---\n".join(texts)


def _shown(sample: Mapping[str, Any]) -> str:
    prompt, completion = sample.get("prompt", ""), sample.get("completion", "")
    if sample.get("format") != "chat":
        return f"{prompt}{completion}"
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    turns = [*messages, {"role": "assistant", "content": completion}]
    return "\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)


def serve(*items: Items, checkpoint: Checkpoint = None, dry_run: DryRun = False, json: Json = False) -> Result:
    """Serve a model or a checkpoint at /v1/chat/completions, /v1/completions and /v1/responses, on this machine or on
    the workers of [pool]. Ctrl-C ends it when the requests that are being answered are finished."""
    with given_model(checkpoint) as model:
        from tidemill.jobs.serving import serving_spec

        template_given = any(key == ("model", "chat_template") for key, _ in split_arguments(items).assignments)
        spec = serving_spec(spec_for(items, model, purpose="read"), model, template_given=template_given)
        if dry_run:
            from tidemill.runtime.memory_check import memory_remarks

            return show_dry_run(spec, purpose="generate", notes=memory_remarks(spec, "serve"))
        try:
            from tidemill.jobs.gateway import run_gateway
        except ImportError as error:
            what = f"the gateway needs starlette and uvicorn ({error})"
            raise UserError(what, where="tidemill serve", hint=install_command("gateway")) from error
        served = asyncio.run(run_gateway(spec, progress=note))
    return Result(data=served, text=f"{served['requests']} requests were answered")


def report(
    *run_dirs: Annotated[Path, Parameter(name="RUN_DIR")],
    output: Annotated[
        Path, Parameter(name="--output", help="File of a comparison; the report of one run is in its directory.")
    ] = Path("comparison.html"),
    json: Json = False,
) -> Result:
    """Write report.html of a run: curves, histograms and samples on one page. Runs may be in progress.

    Of two to eight runs: a page that compares them, with curves over steps, tokens, seconds or dollars, final figures,
    differences on the same held-out prompts, and what differs in their configurations.

    Parameters
    ----------
    run_dirs
        Directories given to `tidemill train` as --run.dir.
    """
    from tidemill.pipeline.pipeline_page import write_page
    from tidemill.pipeline.state import PipelineFolder
    from tidemill.telemetry.report import write_report
    from tidemill.telemetry.report.compare import write_comparison
    from tidemill.telemetry.run_data import RunData
    from tidemill.telemetry.run_dir import RunDirectory

    if not run_dirs:
        raise UserError("no run given", hint="write tidemill report RUN_DIR, or several to compare them")
    if len(run_dirs) > 1:
        path = write_comparison(run_dirs, output)
    else:
        pipeline = PipelineFolder(run_dirs[0])
        path = write_page(pipeline) if pipeline.state.is_file() else write_report(run_dirs[0])
    damage = {run_dir: RunData.load(RunDirectory(run_dir)).damage for run_dir in run_dirs}
    notes = [f"{run_dir}: {note}" if run_dirs[1:] else note for run_dir, found in damage.items() for note in found]
    text = "\n".join([str(path), *(f"• {note}; left out" for note in notes)])
    return Result(data={"report": str(path), "notes": notes}, text=text)
