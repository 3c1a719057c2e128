"""Prompts, rewards, and the data of supervised stages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat

from tidemill.config.addresses import DataPath, FolderText, OptionalDataPath, server_url_issues
from tidemill.config.base import NEUTRAL, TRAINING_ONLY, Config, NameOrFunction, Neutral
from tidemill.extensions.registry import PATH, installed


class ArithmeticTask(Config):
    kind: Literal["arithmetic"] = "arithmetic"
    operators: str = "+"
    """Any of + - * ; one is drawn for each prompt."""
    digits: int = Field(1, ge=1, le=6)
    """Maximum number of digits of an operand."""
    largest: int | None = Field(None, ge=9, le=99)
    """Largest operand, for a difficulty between one and two digits; none: all numbers of `digits` digits."""
    shots: int = Field(2, ge=0, le=16)
    """Number of worked examples before the question, the same for every prompt."""
    held_out_fraction: float = Field(0.25, gt=0, lt=1)
    """Fraction of the problems held out for evaluation. a + b and b + a are always in the same split."""

    def issues(self) -> Iterator[str]:
        if not self.operators:
            yield 'operators is empty; name at least one of + - *, for example "+"'
        if unknown := "".join(sorted(set(self.operators) - set("+-*"))):
            yield f"operators = {self.operators!r} contains {unknown!r}; use only + - *, without spaces"
        if self.largest is not None and len(str(self.largest)) != self.digits:
            digits = len(str(self.largest))
            yield f"largest = {self.largest} does not have digits = {self.digits} digits; set digits = {digits}"

    @property
    def operands(self) -> int:
        """Number of possible operands: 0, 1, …, operands - 1."""
        return 10**self.digits if self.largest is None else self.largest + 1


class ReasoningGymTask(Config):
    kind: Literal["reasoning_gym"]
    name: str
    """Name of a reasoning-gym generator, for example `simple_equations`."""
    params: dict[str, bool | int | float | str] = {}
    """Parameters of the generator."""
    train_size: int = Field(1000, ge=1)
    """Number of training prompts per epoch."""
    held_out_size: int = Field(100, ge=1)
    """Number of evaluation prompts, all different from the training prompts."""
    system_prompt: str = ""
    """Text before every question."""


Column = Literal["prompt", "messages", "answer", "tools", "completion", "chosen", "rejected", "margin", "text"]


class SourceConfig(Config):
    path: DataPath
    """A file, a folder or a hub data set, as task.path."""
    weight: float = Field(1.0, ge=0)
    """Its share of the training examples, relative to the other weights."""
    columns: dict[Column, str] = {}
    """Names of its columns, as task.columns, which it replaces."""


class RowsConfig(Config):
    """Keys of the two sections that name data files."""

    path: Path | None
    sources: tuple[SourceConfig, ...] = ()
    """Several files instead of path, each with its weight."""
    columns: dict[Column, str]
    system_prompt: str = ""
    """Text before every question, as a message of the role system; a row that starts with a system message keeps its
    own."""
    held_out_path: Path | None
    held_out_fraction: float
    index_above_mb: Annotated[float, NEUTRAL] = Field(256.0, ge=0)
    """Larger files stay on disk: an index in the cache folder finds their rows, and a resumed run does not read them
    again. In megabytes."""

    def issues(self) -> Iterator[str]:
        if self.sources and self.path is not None:
            yield "path and sources are both set; leave one of them out"
        if self.sources and not any(source.weight for source in self.sources):
            yield "the weights of sources sum to zero; give at least one source a weight above 0"
        if self.held_out_path is not None and not self.all_sources:
            yield "held_out_path is set without path; set path to the training rows"

    @property
    def all_sources(self) -> tuple[SourceConfig, ...]:
        """The sources of the training rows: `sources`, or `path` alone."""
        return self.sources or (() if self.path is None else (SourceConfig(path=self.path),))

    @property
    def description(self) -> str:
        """Names of the files: `math.jsonl + code.jsonl`."""
        return " + ".join(source.path.name for source in self.all_sources)


class FileTask(RowsConfig):
    kind: Literal["file"]
    path: OptionalDataPath = None
    """Prompts, one per row: JSON Lines, Parquet (*.parquet), a folder written by save_to_disk of `datasets`, or a hub
    data set, hub:OWNER/NAME[@REVISION][/SUBSET][#SPLIT]. A row has `prompt` (a text, or messages with role and content)
    or `messages`, and may have `answer` and `tools`; other fields are metadata."""
    columns: dict[Column, str] = {}
    """Names of the file's columns where they differ: { prompt = "question", answer = "solution" }."""
    max_prompt_tokens: int = Field(0, ge=0)
    """Rows with longer prompts are left out and counted; 0: a prompt that does not fit the context is an error."""
    held_out_path: OptionalDataPath = None
    """File with the evaluation prompts; none: a fraction of the prompts, selected by content hash."""
    held_out_fraction: float = Field(0.1, gt=0, le=1)
    """Fraction of the prompts held out for evaluation when held_out_path is not set. 1: evaluate the training prompts
    themselves."""

    def issues(self) -> Iterator[str]:
        yield from super().issues()
        if not self.all_sources:
            yield 'kind = "file" needs path; set it to a file with prompts'


class PythonTask(Config):
    kind: Literal["python"]
    function: Annotated[str, NameOrFunction("task")]
    """`path/file.py:function`, `package.module:function` or the name of an entry point. It returns rows as in a data
    file, or a table with `train` and `held_out` rows."""
    params: dict[str, bool | int | float | str] = {}
    """Arguments of the function."""
    held_out_fraction: float = Field(0.1, gt=0, lt=1)
    """Fraction of the prompts held out for evaluation if the function returns one list."""


class EnvironmentTask(Config):
    kind: Literal["environment"]
    train_size: int = Field(1000, ge=1)
    """Number of training tasks that the environment is asked for."""
    held_out_size: int = Field(100, ge=1)
    """Number of evaluation tasks."""


class ServedTask(Config):
    kind: Literal["served"]
    """Prompts come from the clients of `tidemill serve`, which sets this itself."""


TaskConfig = Annotated[
    ArithmeticTask | ReasoningGymTask | FileTask | PythonTask | EnvironmentTask | ServedTask,
    Field(discriminator="kind"),
]

HEADER_NAME = re.compile(r"[A-Za-z0-9-]+")
REWARD_KEYS = {
    "pattern": ("regex",),
    "target_tokens": ("length",),
    "function": ("python",),
    "weights": ("python",),
    "model": ("model",),
    "url": ("http", "judge"),
    "auth_env": ("http", "judge"),
    "judge_model": ("judge",),
    "rubric": ("judge",),
    "both_orders": ("judge",),
    "most_calls": ("judge",),
    "most_usd": ("judge",),
    "usd_per_million_tokens": ("judge",),
    "with_prompt": ("tests",),
    "partial": ("tests",),
}
"""Keys of a reward that not every kind has."""
REWARD_NEEDS = {
    "pattern": "a pattern; set pattern to the expression to search for",
    "target_tokens": "target_tokens; set it to the completion length that scores 1",
    "function": 'a function; set function = "package.module:function" or "file.py:function"',
    "model": "a model; set model to the folder of a reward model",
    "judge_model": "a judge_model; set it to the name that the server of the judge knows it by",
}


class RewardConfig(Config):
    kind: Literal[
        "exact",
        "numeric",
        "math_verify",
        "regex",
        "length",
        "task",
        "environment",
        "tests",
        "random",
        "python",
        "model",
        "http",
        "judge",
        "people",
    ]
    """exact, numeric, math_verify: compare with the answer. regex: search for `pattern`. length: score the completion's
    length. task: the score of reasoning_gym, in the sandbox. environment: the sum of an agent's rewards; the
    others read the text of the last turn. tests: run the completion, a Python program, in the sandbox against the tests
    of its row. random: a control. python: `function`. model: a reward model.
    http: a server. judge: a language model that grades completions. people: only with role gold; the verdicts that
    `tidemill check` asks for."""
    weight: float = 1.0
    """Weight in the sample's reward, which is the weighted sum of the rewards that apply to the sample."""
    correct_at: float | None = Field(None, exclude_if=lambda value: value is None)
    """Score from which a sample counts as correct, for accuracy and pass@k. Default: 1 for exact, numeric, math_verify,
    regex, task and tests; what the decorator of a function declares; else the reward does not tell."""
    name: str = ""
    """Name in metrics, samples and charts. Default: the kind, or the name of the function."""
    role: Literal["reward", "gold"] = "reward"
    """gold: a second opinion with weight 0 that is only measured; its failures do not make a sample invalid."""
    weights: dict[str, float] = {}
    """python: factors of the named numbers that the function returns as a table. Default: their plain sum."""
    pattern: str = ""
    """regex: regular expression to search for in the completion."""
    target_tokens: int = Field(0, ge=0)
    """length: completion length with score 1; the score decreases linearly to 0 at length 0 and at twice the target."""
    function: str = ""
    """python: `package.module:function`, `path/file.py:function` or the name of an entry point. The function takes any
    of prompt, messages, completion, token_ids, answer, metadata, step, seed and the columns of the data, and returns a
    number, a table of named numbers, or None if it does not apply to the sample. A required `answer` makes samples of
    rows without one invalid. A run is not resumed, and a finished
    stage runs again, when that file changes; modules that the file imports are not tracked."""
    model: FolderText = ""
    """model: folder or run directory of a reward model with the policy's tokenizer, for example the output of a
    reward_model stage."""
    url: str = ""
    """http: URL to which {"samples": [{"id", "prompt", "completion", "answer", "metadata"}, ...]} is posted as JSON.
    The answer is null if the row has none. The response is {"scores": [...]}: a number for each sample, or null. Put
    credentials into auth_env, not here. judge: the base URL of an API like OpenAI's, for example
    https://api.example.com/v1, or of `tidemill serve`."""
    auth_env: str = ""
    """http, judge: name of an environment variable with the credentials, such as `Bearer …` (judge: or the key alone),
    sent as `auth_header`. Only the name is stored; the training process must have the variable."""
    auth_header: str = "authorization"
    """http, judge: header that carries the credentials."""
    batch: int = Field(64, ge=1)
    """model, http, python with batch=True: maximum number of samples per forward pass, request or call. With 1, or with
    [reading], the score of a sample is bit-identical whatever other samples are scored. judge: maximum number of
    calls at the same time."""
    judge_model: str = Field("", exclude_if=lambda value: not value)
    """judge: the model's name at `url`."""
    rubric: str = Field("", exclude_if=lambda value: not value)
    """judge: what a good response is. Default: correct, complete and clear."""
    both_orders: bool = Field(False, exclude_if=lambda value: not value)
    """judge: compare the completion with the answer of its row, each as the first and as the second: 1 if it is better
    in both orders, 0 if it is worse in both, 0.5 if the orders disagree. Rows without an answer are graded. Otherwise
    the score is a grade from 0 to 10, divided by 10."""
    most_calls: Annotated[int, NEUTRAL] = Field(0, ge=0, exclude_if=lambda value: not value)
    """judge: maximum number of calls of a run, all its sessions together; samples after that have no score. 0: no
    limit."""
    most_usd: Annotated[float, NEUTRAL] = Field(0.0, ge=0, exclude_if=lambda value: not value)
    """judge: maximum cost of a run's calls, in dollars; needs usd_per_million_tokens. 0: no limit."""
    usd_per_million_tokens: Annotated[tuple[NonNegativeFloat, NonNegativeFloat] | None, NEUTRAL] = Field(
        None, exclude_if=lambda value: value is None
    )
    """judge: price of a million tokens of input and of output, in dollars: [0.15, 0.6]."""
    with_prompt: bool = False
    """tests: the program is the prompt followed by the completion; otherwise it is the completion's last fenced block,
    or all of it."""
    partial: bool = False
    """tests: the score is the share of tests passed; otherwise 1 if all are, else 0."""
    timeout_s: float = Field(0.0, ge=0)
    """tests: time of all tests of a sample, in seconds; 0: 10 s. A test that it does not suffice for is failed.
    model, http, judge: a sample without a score after this many seconds, queueing and retries included, is invalid.
    0: 60 s for http, 120 s for judge, 600 s for model, which waits between training steps."""
    retries: int = Field(2, ge=0)
    """http, judge: how often a failed request is sent again."""

    @property
    def longest_wait_s(self) -> float:
        """`timeout_s`, or its default for this kind, in seconds."""
        return self.timeout_s or {"model": 600.0, "judge": 120.0, "tests": 10.0}.get(self.kind, 60.0)

    def issues(self) -> Iterator[str]:
        for key, needed in REWARD_NEEDS.items():
            if self.kind in REWARD_KEYS[key] and not getattr(self, key):
                yield f'kind = "{self.kind}" needs {needed}'
        if self.kind in REWARD_KEYS["url"]:
            yield from server_url_issues(self.url, self.auth_env, needed_by=f'kind = "{self.kind}"')
        if self.kind == "people" and self.role != "gold":
            yield 'kind = "people" cannot be trained on; set role = "gold" and weight = 0'
        if self.role == "gold" and self.weight:
            yield f'role = "gold" is only measured, and weight is {self.weight:g}; set weight = 0'
        for name, kinds in REWARD_KEYS.items():
            if self.kind not in kinds and getattr(self, name) not in ("", 0, {}, None):
                only = " or ".join(f'"{kind}"' for kind in kinds)
                yield f'{name} is only for kind = {only}, and kind is "{self.kind}"; change kind or leave {name} out'
        if self.most_usd and self.usd_per_million_tokens is None:
            yield (
                "most_usd needs the prices of the judge; set usd_per_million_tokens = [INPUT, OUTPUT], or limit calls "
                "with most_calls"
            )
        if self.function and not PATH.fullmatch(self.function) and self.function not in installed("reward"):
            yield (
                f'function = "{self.function}" does not name a function; write "package.module:function" or '
                '"file.py:function"'
            )
        try:
            re.compile(self.pattern)
        except re.error as error:
            yield f"pattern {self.pattern!r} is not a valid regular expression ({error}); correct it"
        if not HEADER_NAME.fullmatch(self.auth_header):
            yield f"auth_header = {self.auth_header!r} is not a header name; write for example x-api-key"


class ScoringConfig(Config):
    rewards: tuple[RewardConfig, ...] = Field((RewardConfig(kind="exact"),), min_length=1)
    """The rewards; a sample's reward is their weighted sum."""
    timeout_s: Annotated[float, NEUTRAL] = Field(10.0, gt=0)
    """A reward that takes longer is invalid for that sample, in seconds."""
    concurrency: Annotated[int, NEUTRAL] = Field(8, ge=1)
    """Maximum number of samples scored at the same time."""
    truncated: Annotated[Literal["trained", "masked"], TRAINING_ONLY] = "trained"
    """Completions cut off by max_new_tokens or the context length. trained: treated like any other. masked: excluded
    from loss and statistics. Episodes that end at env.turns, env.calls or env.seconds are not cut."""

    @property
    def model_folders(self) -> tuple[Path, ...]:
        """The folders of the reward models, each once."""
        return tuple(dict.fromkeys(Path(each.model).expanduser() for each in self.rewards if each.kind == "model"))


class DataConfig(RowsConfig):
    path: OptionalDataPath = None
    """Demonstrations (`completion`) or preference pairs (`chosen`, `rejected`, optionally `margin`), one per row, each
    with `prompt` or `messages`; formats as for task.path. Lists of messages with several turns of the assistant are
    conversations, of which all turns are learned. A `text` alone is learned whole. Pairs may contain their prompt: then
    it is the common start of both sides. Required by sft, reward_model and dpo stages."""
    columns: dict[Column, str] = {}
    """Names of the file's columns where they differ: { prompt = "question", completion = "solution" }."""
    held_out_path: OptionalDataPath = None
    """File with the evaluation rows; none: a fraction of the rows, selected by content hash."""
    held_out_fraction: float = Field(0.1, ge=0, lt=1)
    """Fraction of the prompts held out for evaluation when held_out_path is not set; 0: no evaluation."""
    max_tokens: int = Field(0, ge=0)
    """Maximum length of prompt plus completion, in tokens; 0: the model's limit."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """Rows longer than max_tokens. refuse: an error. drop: skipped and counted."""
    end_token: bool = True
    """Append the model's end-of-turn token to every completion. Set false where completions end with a stop string
    (`sampling.stop`, or the task's), so that data and samples end alike."""
    seed: int | None = Field(None, ge=0)
    """Seed of the order of the rows; none: run.seed."""


class DataGenerationConfig(Config):
    prompts: int = Field(1000, ge=1)
    """Stages of kind demonstrations and pairs: maximum number of prompts to generate rows from."""
    split: Literal["train", "held_out"] = "train"
    """The task's training or evaluation prompts. Use rows of held_out as data.held_out_path."""
    samples_per_prompt: Annotated[int, Neutral(("demonstrations",))] = Field(8, ge=2)
    """pairs: number of samples per prompt."""
    pairs_per_prompt: Annotated[int, Neutral(("demonstrations",))] = Field(4, ge=1)
    """pairs: maximum number of pairs per prompt."""
