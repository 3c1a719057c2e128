"""Arguments that are Python objects: saved in the run directory, or turned into configuration."""

from __future__ import annotations

import filecmp
import json
import re
import shutil
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from tidemill.agents.environment import Environment, ToolEnvironment
from tidemill.api import rewards as builtin_rewards
from tidemill.api.rewards import Reward
from tidemill.api.rewards import function as user_reward
from tidemill.api.rewards import model as reward_model
from tidemill.api.run import Run
from tidemill.config.addresses import HUB, address_hint
from tidemill.config.keys import did_you_mean, flattened
from tidemill.config.load import Tree, merge, override_tree
from tidemill.config.schema import SET_NAME
from tidemill.config.task import Column, RewardConfig
from tidemill.core.errors import UserError, exception_text
from tidemill.core.folders import another_directory
from tidemill.data.row_files import GIVEN_AS
from tidemill.extensions.registry import Extension, Kind, given_function
from tidemill.extensions.results import shown
from tidemill.models.folder import weight_files
from tidemill.models.model_source import checked, exact_source, given_as, locate
from tidemill.telemetry.jsonl import disk_error, write_atomically, write_json
from tidemill.telemetry.run_dir import RunDirectory, read_json

COLUMNS = get_args(Column)
OWNER_NAME = re.compile(r"[\w-]+/[\w-]+")
"""A data set of the hub without `hub:`."""
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
INPUTS = "inputs"
"""Folder of a run directory with the rows and the model that were given as objects."""
ROW_HINT = 'a row looks like {"prompt": "2+2=", "answer": "4"}'


@dataclass(slots=True)
class Inputs:
    """What the arguments of `tidemill.train` add to a configuration.

    Args:
        folder: where objects are saved: `RUN/inputs`.
        kept: the run has begun, so that saved objects must not change.
        shape: an example of a row, for the hints.

    Attributes:
        overrides: the arguments as settings, by dotted key or section.
        implied: dotted keys among them that no argument states, so that the caller's overrides may set them.
    """

    folder: Path
    kept: bool
    shape: str = ROW_HINT
    overrides: dict[str, Any] = field(default_factory=dict)
    implied: set[str] = field(default_factory=set)
    extensions: list[Extension] = field(default_factory=list)

    def add(
        self,
        *,
        model: Any = None,
        tokenizer: Any = None,
        data: Any = None,
        eval_data: Any = None,
        eval_sets: Any = None,
        columns: Mapping[str, str] | None = None,
        rewards: Sequence[Any] | None = None,
        task: Callable[..., Any] | str | None = None,
        task_params: Mapping[str, Any] | None = None,
        environment: Any = None,
        environment_params: Mapping[str, Any] | None = None,
        advantage: Callable[..., Any] | str | None = None,
        loss: Callable[..., Any] | str | None = None,
        loss_terms: Sequence[Any] = (),
        prompt_sampler: Callable[..., Any] | str | None = None,
        section: Literal["task", "data"] = "task",
    ) -> None:
        """The arguments of `tidemill.train` and of the stages. Raises UserError: one is invalid."""
        self.add_model(model, tokenizer)
        self.add_data(data, eval_data, columns, section=section)
        self.add_eval_sets(eval_sets)
        self.add_task(task, task_params)
        self.add_environment(environment, environment_params)
        self.add_rewards(rewards)
        self.add_function("algorithm.advantage", "advantage", advantage)
        self.add_function("algorithm.loss", "loss", loss)
        self.add_function("batch.sampler", "prompt_sampler", prompt_sampler)
        self.add_loss_terms(loss_terms)
        kind = self.overrides.get("task", {}).get("kind")
        for name, params, unused in (
            ("task", task_params, kind != "python"),
            ("environment", environment_params, "env.name" not in self.overrides),
        ):
            if params is not None and unused:
                raise UserError(f"is given without {name}", where=f"{name}_params", hint=f"give {name}= too")

    def add_data(
        self,
        data: Any,
        held_out: Any,
        columns: Mapping[str, str] | None,
        *,
        section: Literal["task", "data"] = "task",
    ) -> None:
        """Rows, a `datasets.Dataset`, a path, a `Run` that made rows, or (weight, data) pairs: as the task of kind
        "file", or as the examples of a supervised stage."""
        if data is None:
            if held_out is not None:
                raise UserError("is given without data", where="eval_data", hint="give data too")
            return
        # Examples have no kind, whose change would remove the files of a recipe.
        task: dict[str, Any] = {"kind": "file"} if section == "task" else {"held_out_path": None}
        if isinstance(data, (list, tuple)) and data and all(isinstance(each, tuple) for each in data):
            wrong = next((number for number, pair in enumerate(data) if not _is_pair(pair)), None)
            if wrong is not None:
                hint = 'for example data=[(2, "math.jsonl"), (1, rows)]'
                raise UserError("expected a (weight, data) pair", where=f"data[{wrong}]", hint=hint)
            task["sources"] = [
                {
                    "weight": weight,
                    "path": self._data_path(each, f"data[{number}]", f"train_{number}", rows=f"data[{number}][1]"),
                }
                for number, (weight, each) in enumerate(data)
            ]
            task["path"] = None
        else:
            task["path"] = self._data_path(data, "data", "train")
            task["sources"] = []
        self.implied |= {f"{section}.{key}" for key, value in task.items() if not value} | {f"{section}.held_out_path"}
        if held_out is not None:
            task["held_out_path"] = self._data_path(held_out, "eval_data", "held_out")
            self.implied.discard(f"{section}.held_out_path")
        if columns is not None:
            task["columns"] = _columns(columns)
        self.overrides[section] = task

    def add_eval_sets(self, sets: Any) -> None:
        """Rows or paths by name, as `eval.sets`."""
        if sets is None:
            return
        if not isinstance(sets, Mapping):
            what, hint = f"expected a dict, found {type(sets).__name__}", 'for example eval_sets={"math": rows}'
            raise UserError(what, where="eval_sets", hint=hint)
        if wrong := [name for name in sets if not isinstance(name, str) or not SET_NAME.fullmatch(name)]:
            hint = "use letters, digits, - and _"
            raise UserError(f"{wrong[0]!r} is not a folder name", where="eval_sets", hint=hint)
        save = partial(self._data_path, addable=True)
        self.overrides["eval.sets"] = [
            {"name": name, "path": save(rows, f"eval_sets, {name}", f"eval-{name}", rows=f'eval_sets["{name}"]')}
            for name, rows in sets.items()
        ]

    def add_model(self, model: Any, tokenizer: Any) -> None:
        """Any of the forms of `models.model_source`, as `model.source`."""
        if model is None and tokenizer is not None:
            raise UserError("is given without model", where="tokenizer", hint="give the transformers model too")
        if model is not None:
            self.overrides["model.source"] = self.model_source(model, tokenizer)

    def model_source(self, model: Any, tokenizer: Any) -> str:
        """A name, or the path of one folder; a `transformers` model is saved first.

        Raises:
            UserError: there is no such model, or it is none.
        """
        if isinstance(model, Run):
            model = model.path
        if isinstance(model, (str, Path)):
            if tokenizer is not None:
                hint = "leave it out; the model's folder has its tokenizer"
                raise UserError("is only for a transformers model", where="tokenizer", hint=hint)
            return self._located(model)
        if hasattr(model, "merge_and_unload"):
            hint = "give model.merge_and_unload(), or the folder of a checkpoint"
            raise UserError("a peft model is an adapter with its base", where="model", hint=hint)
        if hasattr(model, "save_pretrained"):
            if not hasattr(tokenizer, "save_pretrained"):
                hint = "give tokenizer=AutoTokenizer.from_pretrained(...)"
                raise UserError("a transformers model needs its tokenizer", where="tokenizer", hint=hint)
            if not hasattr(model, "get_output_embeddings") or model.get_output_embeddings() is None:
                what = f"{type(model).__name__} is no causal language model: it has no output embeddings"
                raise UserError(what, where="model", hint="load it with AutoModelForCausalLM")
            return str(self._saved_model(model, tokenizer))
        what = f"expected a name, a folder or a transformers model (or a run), found {type(model).__name__}"
        raise UserError(what, where="model", hint='for example model="smollm2-135m"')

    def _located(self, model: str | Path) -> str:
        stored = RunDirectory(self.folder.parent).read_settings().get("model", {}) if self.kept else {}
        given = str(model.expanduser().absolute()) if isinstance(model, Path) else model.strip()
        try:
            source = exact_source(given, earlier=stored.get("source"))
            checked(locate(source))
        except UserError as error:
            raise given_as("model", model, error) from None
        return source

    def add_rewards(self, rewards: Sequence[Any] | None) -> None:
        """Functions, names and results of `tidemill.rewards`."""
        if rewards is None:
            return
        if isinstance(rewards, (str, Reward, Run, RewardConfig)) or callable(rewards):
            rewards = [rewards]
        if not isinstance(rewards, (list, tuple)):
            what = f"needs a list, was given {type(rewards).__name__}"
            hint = "for example rewards=[right, tidemill.rewards.exact(weight=0.5)]"
            raise UserError(what, where="rewards", hint=hint)
        made = [_as_reward(each) for each in rewards]
        self.extensions += [each.extension for each in made if each.extension is not None]
        self.overrides["scoring.rewards"] = [each.settings for each in made]
        self.implied.discard("scoring.rewards")

    def add_function(self, key: str, kind: Kind, given: Callable[..., Any] | str | None) -> None:
        """A function, or the text that names one, as the value of a key."""
        if given is not None:
            self.overrides[key] = given if isinstance(given, str) else self._reference(kind, given)

    def add_loss_terms(self, terms: Sequence[Any]) -> None:
        """Functions, or (weight, function) pairs."""
        if not terms:
            return
        given = terms if isinstance(terms, (list, tuple)) else [terms]
        pairs = [_weighted(each, f"loss_terms[{at}]") for at, each in enumerate(given)]
        self.overrides["algorithm.loss_terms"] = [
            {"function": given if isinstance(given, str) else self._reference("loss_term", given), "weight": weight}
            for weight, given in pairs
        ]

    def add_task(self, task: Callable[..., Any] | str | None, params: Mapping[str, Any] | None) -> None:
        """A function that returns rows, as the task of kind "python"."""
        if task is not None:
            if "task" in self.overrides:
                raise UserError("data and task are both given", where="task", hint="leave one of them out")
            ref = task if isinstance(task, str) else self._reference("task", task)
            self.overrides["task"] = {"kind": "python", "function": ref, "params": dict(params or {})}

    def add_environment(self, environment: Any, params: Mapping[str, Any] | None) -> None:
        """A class, or the text that names one. Without rows it makes the tasks and gives the rewards; a class with a
        `score` gives the rewards of rows, too."""
        if isinstance(environment, Environment):
            what = f"needs a class, was given an instance of {type(environment).__name__}"
            hint = f"give {type(environment).__name__} itself; its arguments are environment_params"
            raise UserError(what, where="environment", hint=hint)
        self.add_function("env.name", "environment", environment)
        if environment is not None:
            self.overrides["env.params"] = dict(params or {})
            if "task" not in self.overrides:
                self.overrides |= {"task": {"kind": "environment"}, "scoring.rewards": [{"kind": "environment"}]}
            elif getattr(environment, "score", ToolEnvironment.score) is not ToolEnvironment.score:
                self.overrides["scoring.rewards"] = [{"kind": "environment"}]
            self.implied.add("scoring.rewards")

    def imply(self, key: str, value: Any) -> None:
        """Set a key that no argument states."""
        self.overrides[key] = value
        self.implied.add(key)

    def with_overrides(self, given: Tree) -> Tree:
        """What the arguments add, with the caller's overrides on top.

        Raises:
            UserError: an override contradicts an argument.
        """
        own = override_tree(self.overrides)
        refuse_conflicts(own, given, implied=self.implied)
        return merge(own, given)

    def _reference(self, kind: Kind, given: Callable[..., Any]) -> str:
        extension = given_function(given, kind, where=kind)
        self.extensions.append(extension)
        return extension.ref

    def _data_path(self, data: Any, where: str, name: str, *, addable: bool = False, rows: str = "") -> str:
        """Save rows; a run that has begun must have saved the same, unless they are new and `addable`.

        Args:
            where: names the data in errors.
            rows: names the list of rows, if it is only a part of the argument.
        """
        if isinstance(data, (str, Path)) and RunDirectory(Path(data).expanduser()).exists:
            data = Run(Path(data).expanduser())
        if isinstance(data, Run):
            return str(data.rows_file.absolute())
        if isinstance(data, (str, Path)) and (hint := address_hint(data)):
            raise UserError(f"{data} is a web address", where=where, hint=hint)
        if isinstance(data, str) and OWNER_NAME.fullmatch(data) and not Path(data).exists():
            hint = f'"{HUB}{data}" is a data set of the Hugging Face hub'
            raise UserError(f"there is no file {data}", where=where, hint=hint)
        if isinstance(data, (str, Path)):
            return str(data) if str(data).startswith(HUB) else str(Path(data).expanduser().absolute())
        path, rows = self.folder / f"{name}.jsonl", rows or where
        listed = enumerate(self._rows(data, where))
        content = b"".join(self._json_line(row, f"{rows}[{index}]") for index, row in listed)
        if not content:
            raise UserError("has no rows", where=where, hint=self.shape)
        if self.kept and (path.is_file() or not addable):
            if not path.is_file() or path.read_bytes() != content:
                hint = f"give the rows of its first session, or {another_directory(self.folder.parent)}"
                raise UserError("the rows have changed since this run started", where=where, hint=hint)
            return str(path.absolute())
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (FileNotFoundError, PermissionError) as error:
            raise disk_error(error, path.parent) from error
        write_atomically(path, content)
        write_json(path.parent / GIVEN_AS, {**read_json(path.parent / GIVEN_AS), path.name: rows})
        return str(path.absolute())

    def _saved_model(self, model: Any, tokenizer: Any) -> Path:
        folder, partial = self.folder / "model", self.folder / ".model.partial"
        if self.kept and not folder.is_dir():
            raise UserError("the run has no saved model", where="model", hint="resume without model=")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            model.save_pretrained(partial, safe_serialization=True)
            if self.kept:
                names = sorted(file.name for file in weight_files(partial))
                if filecmp.cmpfiles(folder, partial, names, shallow=False)[0] != names:
                    hint = f"give the model of its first session, or {another_directory(self.folder.parent)}"
                    raise UserError("the model has changed since this run started", where="model", hint=hint)
                return folder.absolute()
            tokenizer.save_pretrained(partial)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        except UserError:
            raise
        except OSError as error:
            raise disk_error(error, folder) from error
        except Exception as error:  # of another library, for weights that are not in memory
            hint = "load its weights into memory, or give the folder of the model"
            raise UserError(f"cannot be saved: {exception_text(error)}", where="model", hint=hint) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return folder.absolute()

    def _rows(self, data: Any, where: str) -> Iterable[Any]:
        if isinstance(data, Mapping) or not isinstance(data, Iterable):
            what, hint = f"expected rows, a datasets.Dataset or a path, found {type(data).__name__}", self.shape
            if hasattr(data, "keys"):
                what += f" with {', '.join(map(str, data))}"
                splits = [str(name) for name in data if hasattr(data[name], "column_names")]
                hint = f'give one of them: {where}=dataset["{splits[0]}"]' if splits else hint
            raise UserError(what, where=where, hint=hint)
        if hasattr(data, "to_dict") and hasattr(data, "iterrows"):
            hint = f'give its rows: {where}=frame.to_dict("records")'
            raise UserError(f"expected rows, found a {type(data).__name__}", where=where, hint=hint)
        try:
            yield from data
        except Exception as error:
            what = f"reading the rows raised {exception_text(error)}"
            raise UserError(what, where=where, hint=self.shape) from error

    def _json_line(self, row: Any, where: str) -> bytes:
        if not isinstance(row, Mapping):
            several = hasattr(row, "column_names") or (isinstance(row, str) and row.endswith(DATA_SUFFIXES))
            hint = 'for example data=[(1, "a.jsonl"), (1, "b.jsonl")], with their weights' if several else self.shape
            raise UserError(f"expected a dict, found {type(row).__name__}", where=where, hint=hint)
        try:
            return _json(dict(row)) + b"\n"
        except (TypeError, ValueError) as error:
            column, value = next(((name, value) for name, value in row.items() if not _is_json(value)), ("", row))
            what = f"{shown(value)} cannot be written as JSON ({error})"
            hint = "convert it to text or a number of Python, give None where there is no value, or remove the column"
            raise UserError(what, where=f"{where}, column {column}" if column else where, hint=hint) from None


def refuse_conflicts(own: Tree, given: Tree, *, implied: Container[str] = ()) -> None:
    """
    Args:
        own: what the arguments set.
        given: overrides.
        implied: dotted keys of `own` that overrides may set.

    Raises:
        UserError: an override contradicts an argument.
    """
    stated = {key: value for key, value in flattened(own).items() if key not in implied}
    for key, value in flattened(given).items():
        if _as_json(stated.get(key, value)) != _as_json(value):
            what = f"is set to {value!r:.60}, and an argument sets it to {stated[key]!r:.60}"
            raise UserError(what, where=f"overrides, {key}", hint="leave one of them out")


def _as_json(value: Any) -> str:
    """For comparisons: a path is equal to its text, and a tuple to a list."""
    return json.dumps(value, default=str)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def _is_json(value: Any) -> bool:
    try:
        _json(value)
    except (TypeError, ValueError):
        return False
    return True


def _as_reward(given: Any) -> Reward:
    name = getattr(given, "__name__", "")
    if name and getattr(builtin_rewards, name, None) is given:
        what, hint = f"tidemill.rewards.{name} makes a reward, and is none", f"call it: tidemill.rewards.{name}(...)"
        raise UserError(what, where="rewards", hint=hint)
    if isinstance(given, (tuple, list)):
        what = f"expected a function or a name, found a {type(given).__name__}"
        hint = "give a weight as tidemill.rewards.function(right, weight=0.5)"
        raise UserError(what, where="rewards", hint=hint)
    if isinstance(given, Reward):
        return given
    if isinstance(given, Run):
        return reward_model(given)
    if isinstance(given, RewardConfig):
        return Reward(settings=given.model_dump(mode="json"))
    if isinstance(given, Mapping):
        return Reward(settings=dict(given))
    if isinstance(given, str) and ":" not in given:
        return Reward(settings={"kind": given})
    return user_reward(given)


def _weighted(term: Any, where: str) -> tuple[float, Any]:
    """A function as a pair with its weight."""
    if callable(term) or isinstance(term, str):
        return 1.0, term
    if not _is_pair(term):
        hint = "for example loss_terms=[(0.1, confident)]"
        raise UserError("expected a function or a (weight, function) pair", where=where, hint=hint)
    return term[0], term[1]


def _columns(columns: Any) -> dict[str, str]:
    if isinstance(columns, Mapping):
        wrong = next((name for name in columns if name not in COLUMNS), None)
        if wrong is None and all(isinstance(column, str) for column in columns.values()):
            return dict(columns)
        hint = did_you_mean(str(wrong), COLUMNS) if wrong is not None else ""
        what = f"{wrong!r} is not the name of a column here" if wrong is not None else "needs names of columns"
    else:
        what, hint = f"needs a dict, was given {type(columns).__name__}", ""
    example = 'for example columns={"prompt": "question"}: the prompts are in the column "question"'
    raise UserError(what, where="columns", hint=f"{hint} {example}".strip())


def _is_pair(given: Any) -> bool:
    """Whether it is a number with something else."""
    pair = given if isinstance(given, (tuple, list)) and len(given) == 2 else (None, None)
    return isinstance(pair[0], (int, float)) and not isinstance(pair[0], bool)
