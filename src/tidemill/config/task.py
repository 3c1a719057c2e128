"""Where prompts come from, and what completions are rewarded for."""

from __future__ import annotations

import re
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from tidemill.config.base import Config, refuse
from tidemill.config.supervised import DataFormat


class ArithmeticTask(Config):
    kind: Literal["arithmetic"] = "arithmetic"
    operators: str = "+"
    """Any of + - * ; one is drawn per prompt."""
    digits: int = Field(1, ge=1, le=6)
    """Largest number of digits of an operand."""
    largest: int | None = Field(None, ge=9, le=99)
    """Largest operand, for a difficulty between one and two digits; none takes all numbers of so many digits."""
    shots: int = Field(2, ge=0, le=16)
    """Worked examples before the question, the same for every prompt."""
    held_out_fraction: float = Field(0.25, gt=0, lt=1)
    """Share of the problems kept for evaluation; a + b and b + a always fall on the same side."""

    @model_validator(mode="after")
    def _possible(self) -> ArithmeticTask:
        faults = []
        if not self.operators:
            faults.append('operators is empty; name at least one of + - *, for example "+"')
        if unknown := "".join(sorted(set(self.operators) - set("+-*"))):
            faults.append(
                f"operators = {self.operators!r} holds {unknown!r}; only + - * are known, written without spaces"
            )
        if self.largest is not None and len(str(self.largest)) != self.digits:
            faults.append(
                f"largest = {self.largest} is not a number of digits = {self.digits} digits; set digits = "
                f"{len(str(self.largest))}"
            )
        return refuse(faults, self)

    @property
    def operands(self) -> int:
        """How many numbers an operand may be, from 0 on."""
        return 10**self.digits if self.largest is None else self.largest + 1


class ReasoningGymTask(Config):
    kind: Literal["reasoning_gym"]
    name: str
    """A reasoning-gym generator, for example `simple_equations`."""
    params: dict[str, bool | int | float | str] = {}
    """Passed to the generator."""
    train_size: int = Field(1000, ge=1)
    """Training prompts per epoch."""
    held_out_size: int = Field(100, ge=1)
    """Evaluation prompts, none of which is a training prompt."""
    system_prompt: str = ""
    """Put before every question."""


class PromptFiles(Config):
    kind: str
    path: Path
    """Prompts with their answers, one a row: `prompt` or `messages` (role and content each), and `answer`; the rest is
    metadata."""
    held_out_path: Path | None = None
    """Evaluation prompts; by default a share of `path`, chosen by content hash."""
    held_out_fraction: float = Field(0.1, gt=0, lt=1)
    """Share kept for evaluation when there is no held_out_path."""


class FileTask(PromptFiles):
    kind: Literal["file"]
    format: DataFormat = "auto"
    """auto: a folder is one that `datasets` saved (save_to_disk), *.parquet is Parquet, any other file JSON lines."""


class JsonlTask(PromptFiles):
    """`file` for JSON lines, whatever the file's name ends with."""

    kind: Literal["jsonl"]

    @property
    def format(self) -> DataFormat:
        return "jsonl"


TaskConfig = Annotated[ArithmeticTask | ReasoningGymTask | FileTask | JsonlTask, Field(discriminator="kind")]


ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
HEADER_NAME = re.compile(r"[A-Za-z0-9-]+")
PYTHON_FUNCTION = re.compile(r"([A-Za-z_][\w.]*|.+\.py):[A-Za-z_]\w*")


class RewardConfig(Config):
    kind: Literal["exact", "numeric", "math_verify", "regex", "length", "task", "random", "python", "model", "http"]
    """`task` is the task's own checker (reasoning-gym); `random` is a control; `python` is `function` below; `model` is
    a reward model in this process; `http` asks a server."""
    weight: float = 1.0
    """The sample's reward is the weighted sum of all rewards."""
    pattern: str = ""
    """regex: the expression searched for in the completion."""
    target_tokens: int = Field(0, ge=0)
    """length: completion length that scores 1, falling off linearly to 0 at twice that or at none."""
    function: str = ""
    """python: `package.module:function` or `path/file.py:function`, taking (prompt, completion, answer, metadata).
    A finished stage is repeated when that file changes; what it imports in turn is not looked at."""
    model: str = ""
    """model: the folder of a reward model with the policy's tokenizer, for example what a reward_model stage gave."""
    url: str = ""
    """http: where {"samples": [{"id", "prompt", "completion", "answer", "metadata"}, ...]} is posted as JSON, and
    answered with {"scores": [...]}: a number each, or null where there is none. Credentials do not belong here: see
    auth_env."""
    auth_env: str = ""
    """http: name of an environment variable whose value, such as `Bearer …`, is sent with every request as
    `auth_header`. Only the name is stored; the process that trains must have the variable."""
    auth_header: str = "authorization"
    """http: the header that carries it."""
    batch: int = Field(64, ge=1)
    """model, http: samples scored together, at most. With 1 a reward model's score does not depend on what else was
    finished just then, not even in its last bit; nor does it where the model reads sample by sample ([reading])."""
    timeout_s: float = Field(0.0, ge=0)
    """model, http: a sample without a score for so long is invalid, waiting and retries included; 0 takes 60 s for http
    and 600 s for model, which waits for its turn between training steps."""
    retries: int = Field(2, ge=0)
    """http: how often a request that failed or timed out is sent again."""

    @property
    def longest_wait_s(self) -> float:
        """For kinds that score several samples at once."""
        return self.timeout_s or (600.0 if self.kind == "model" else 60.0)

    @model_validator(mode="after")
    def _complete(self) -> RewardConfig:
        faults = []
        if self.kind == "regex" and not self.pattern:
            faults.append('kind = "regex" needs a pattern; set pattern to the expression to search for')
        if self.kind == "length" and not self.target_tokens:
            faults.append('kind = "length" needs target_tokens; set it to the completion length that scores 1')
        if self.kind == "python" and not self.function:
            faults.append(
                'kind = "python" needs a function; set function = "package.module:function" or "file.py:function"'
            )
        if self.kind == "model" and not self.model:
            faults.append('kind = "model" needs a model; set model to the folder of a reward model')
        if self.kind == "http":
            faults += _url_faults(self.url)
        owners = {
            "pattern": "regex",
            "target_tokens": "length",
            "function": "python",
            "model": "model",
            "url": "http",
            "auth_env": "http",
        }
        for name, kind in owners.items():
            if getattr(self, name) and self.kind != kind:
                faults.append(
                    f'{name} is only for kind = "{kind}", and kind is "{self.kind}"; change kind or leave {name} out'
                )
        if self.function and not PYTHON_FUNCTION.fullmatch(self.function):
            faults.append(
                f'function = "{self.function}" names no function; write "package.module:function" or "file.py:function"'
            )
        try:
            re.compile(self.pattern)
        except re.error as error:
            faults.append(f"pattern {self.pattern!r} is not a regular expression ({error}); correct it")
        return refuse(faults, self)

    @model_validator(mode="after")
    def _keeps_its_secret(self) -> RewardConfig:
        faults = []
        if self.auth_env and not ENVIRONMENT_NAME.fullmatch(self.auth_env):
            faults.append(
                "auth_env is no variable's name; put the secret into a variable, and the variable's name here"
            )
        if not HEADER_NAME.fullmatch(self.auth_header):
            faults.append(f"auth_header = {self.auth_header!r} is no header's name; write for example x-api-key")
        if self.auth_env and self.url.startswith("http://") and not _is_loopback(self.url):
            faults.append(
                f"auth_env sends a secret, and {self.url} is not encrypted; use https:// or a loopback address"
            )
        return refuse(faults, self)


class ScoringConfig(Config):
    rewards: tuple[RewardConfig, ...] = Field((RewardConfig(kind="exact"),), min_length=1)
    """Summed, each with its weight."""
    timeout_s: float = Field(10.0, gt=0)
    """A reward that takes longer is invalid for that sample."""
    concurrency: int = Field(8, ge=1)
    """Samples scored at once."""
    truncated: Literal["trained", "masked"] = "trained"
    """What a completion cut by max_new_tokens counts: like any other, or left out of loss and statistics."""

    @property
    def model_folders(self) -> tuple[Path, ...]:
        """Of reward models, each once."""
        return tuple(dict.fromkeys(Path(each.model).expanduser() for each in self.rewards if each.kind == "model"))


def _url_faults(url: str) -> list[str]:
    """What is wrong with a server's address. One with an "@" may hold a password and is not repeated."""
    if "@" in re.split("[/?#]", url.partition("://")[2])[0]:
        return ["url has credentials, which the logs would keep; leave them out and use auth_env"]
    try:
        parts = urlsplit(url)
        complete = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port is no number
        complete = False
    if complete:
        return []
    given = "this one" if "@" in url else f'"{url}"'
    return [f'kind = "http" needs a url with a host, and {given} is not; set url = "http://host:port/path"']


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
