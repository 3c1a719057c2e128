"""Mistakes of a first hour, from Python and on the command line: each ends with one error that says what is wrong,
where, and what to do."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pytest
import torch

import tidemill
from tests.commands import run_here
from tidemill.config.issues import ConfigError
from tidemill.core.errors import GuardStop, UserError

tm: Any = tidemill  # mypy would find most of the mistakes
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
SMALL: dict[str, Any] = {
    "model.char.layers": 1,
    "model.char.hidden_size": 16,
    "model.char.heads": 2,
    "batch.prompts": 2,
    "batch.group_size": 2,
    "trainer.steps": 1,
    "trainer.threads": 1,
    "eval.prompts": 2,
    "sampling.max_new_tokens": 2,
}
FEW = [f"--{key}={value}" for key, value in SMALL.items()]
CHAT = [{"messages": [{"role": "user", "content": f"{a}+2?"}], "answer": "4"} for a in range(9)]
KTO = [{"prompt": f"{a}+2=", "completion": "4", "label": a == 0} for a in range(9)]
CHAR = {key: value for key, value in SMALL.items() if key.startswith("model.")} | {"model.source": "char"}
CONVERSATIONS = [{"messages": [*row["messages"], {"role": "assistant", "content": "4"}]} for row in CHAT]
PAGES = "https://huggingface.co/"
ANSWERS = [{"prompt": row["prompt"], "completion": row["answer"]} for row in ROWS]
SFT = CHAR | {"trainer.threads": 1, "trainer.steps": 1}
PREFERENCES = [{"prompt": f"{a}+2=", "chosen": "4", "rejected": "5"} for a in range(9)]


def train(**given: Any) -> Any:
    """`tm.train` on the character model; `overrides` are added to the small run's."""
    overrides = SMALL | given.pop("overrides", {})
    arguments = {"data": ROWS, "rewards": [tm.rewards.regex(r"\d")], "overrides": overrides, "run_dir": "run"} | given
    return tm.train("char-addition", **arguments)


def digits(completion: str) -> float:
    return sum(map(str.isdigit, completion)) / 2


def advantage(result: Any) -> Callable[[], Any]:
    """A run whose advantage returns `result`, or what it makes of the rewards."""

    def own(rewards: torch.Tensor) -> Any:
        return result(rewards) if callable(result) else result

    return lambda: train(advantage=own)


def loss_term(result: Callable[..., Any]) -> Callable[[], Any]:
    def own(logprobs: torch.Tensor) -> Any:
        return result(logprobs)

    return lambda: train(loss_terms=[own])


def loss(result: Callable[..., Any]) -> Callable[[], Any]:
    def own(logprobs: torch.Tensor) -> Any:
        return result(logprobs)

    return lambda: train(loss=own)


def sampler(result: Any) -> Callable[[], Any]:
    def own(count: int) -> Any:
        return result

    return lambda: train(prompt_sampler=own)


def task(result: Any) -> Callable[[], Any]:
    def own() -> Any:
        return result() if callable(result) else result

    return lambda: train(data=None, task=own)


def rewarded(result: Any, **options: Any) -> Callable[[], Any]:
    @tm.reward(process=False, **options)
    def own(completion: str) -> Any:
        return result

    return lambda: train(rewards=[own])


def callback(**methods: Any) -> Callable[[], Any]:
    return lambda: train(callbacks=[type("Watch", (tm.Callback,), methods)()])


def environment(**methods: Any) -> Callable[[], Any]:
    def reset(self: Any, task: Any, seed: int) -> str:
        return "1+1="

    def step(self: Any, action: str) -> Any:
        return tm.Step(done=True)

    members = {"reset": reset, "step": step, "stop": ("\n",)} | methods
    made = type("Mine", (tm.Environment,), members)
    settings = {"task.train_size": 8, "engine.context_tokens": 0}
    return lambda: train(data=None, rewards=None, environment=made, overrides=settings)


def broken() -> Iterator[dict[str, str]]:
    yield {"prompt": "1+1=", "answer": "2"}
    raise OSError("the disk is gone")


def file(name: str, text: str) -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


def empty_folder() -> Path:
    Path("empty").mkdir()
    return Path("empty")


async def awaited(self: Any, step: int, metrics: Any) -> None:
    pass


class Saved:
    """Like a model of transformers without output embeddings, and like a tokenizer."""

    def save_pretrained(self, folder: Path) -> None: ...


OWN_ROWS = "--task.kind file --task.path rows.jsonl"


class Mistake(NamedTuple):
    """Python code, or words after `tidemill`, and what its error contains."""

    made: Callable[[], Any] | str
    says: tuple[str, ...]


MISTAKES = {
    # arguments as in TRL
    "nothing": Mistake(tm.train, ("tidemill.train", "data=")),
    "only run_dir": Mistake(lambda: tm.train(run_dir="new"), ("new", "data=")),
    "only a model": Mistake(lambda: tm.train(model="char"), ("tidemill.train", "data=")),
    "no rows, no task": Mistake(lambda: tm.train(rewards=[digits], run_dir="new"), ("data=",)),
    "reward_funcs": Mistake(lambda: tm.train("char-addition", reward_funcs=[digits]), ("reward_funcs", "rewards=")),
    "train_dataset": Mistake(lambda: tm.train(model="char", train_dataset=ROWS), ("train_dataset", "data=")),
    "eval_dataset": Mistake(lambda: train(eval_dataset=ROWS), ("eval_dataset", "eval_data=")),
    "args": Mistake(lambda: train(args={"learning_rate": 1e-5}), ("args", "overrides=")),
    "learning_rate": Mistake(lambda: train(learning_rate=1e-5), ("learning_rate", "optimizer.learning_rate")),
    "num_generations": Mistake(lambda: train(num_generations=8), ("num_generations", "batch.group_size")),
    "max_steps": Mistake(lambda: train(max_steps=8), ("max_steps", "trainer.steps")),
    "temperature": Mistake(lambda: train(temperature=0.9), ("sampling.temperature",)),
    "output_dir": Mistake(lambda: train(output_dir="out"), ("output_dir", "run_dir=")),
    "processing_class": Mistake(lambda: train(processing_class=None), ("processing_class", "tokenizer=")),
    "peft_config": Mistake(lambda: train(peft_config=None), ("peft_config", "lora")),
    "misspelt argument": Mistake(lambda: train(callback=[]), ("callback", "did you mean callbacks")),
    "a dotted argument": Mistake(lambda: train(**{"trainer.steps": 3}), ("overrides=",)),
    "rows in place": Mistake(lambda: tm.train(ROWS), ("recipe", "data=")),
    "a model in place": Mistake(lambda: tm.train("Qwen/Qwen2.5-0.5B", data=ROWS), ("Qwen/Qwen2.5-0.5B", "model=")),
    "a data file in place": Mistake(lambda: tm.train(file("r.jsonl", "{}")), ("r.jsonl", "data=")),
    "two in place": Mistake(lambda: tm.train("char-addition", ROWS), ("tidemill.train", "data=")),
    "evaluate, misspelt": Mistake(lambda: tm.evaluate("char-addition", reward=[digits]), ("did you mean rewards",)),
    "evaluate nothing": Mistake(lambda: tm.evaluate(model="char"), ("data=",)),
    "evaluate, eval_dataset": Mistake(
        lambda: tm.evaluate("char-addition", eval_dataset=ROWS), ("eval_dataset", "did you mean data=")
    ),
    "evaluate, a run in place": Mistake(
        lambda: tm.evaluate(str(Path(file("config.toml", "")).resolve().parent)), ("recipe", "did you mean model=")
    ),
    "generate without a model": Mistake(lambda: tm.generate("1+1="), ("model", "a run")),
    "export, misspelt": Mistake(lambda: tm.export("char", "out", dtpe="bf16"), ("did you mean dtype",)),
    "generate nothing": Mistake(lambda: tm.generate(model="char"), ("prompts",)),
    "generate, temperature": Mistake(
        lambda: tm.generate("1+1=", model="char", temperature=0), ("sampling.temperature",)
    ),
    "generate, max_new_tokens": Mistake(
        lambda: tm.generate("1+1=", model="char", max_new_tokens=3), ('overrides={"sampling.max_new_tokens": 3}',)
    ),
    "generate, misspelt": Mistake(lambda: tm.generate(promptz="1+1=", model="char"), ("did you mean prompts",)),
    "export without a folder": Mistake(lambda: tm.export("char"), ("tidemill.export", "folder")),
    "export, another argument": Mistake(lambda: tm.export("char", to="x"), ("no argument to", 'folder="exported"')),
    "load_config, misspelt": Mistake(lambda: tm.load_config("char-addition", override={}), ("did you mean overrides",)),
    "decorator, misspelt": Mistake(lambda: tm.reward(batched=True), ("batched", "batch")),
    "tool, misspelt": Mistake(lambda: tm.tool(idempotant=True), ("did you mean idempotent",)),
    "built-in reward, misspelt": Mistake(lambda: tm.rewards.exact(wieght=1), ("rewards.exact", "weight")),
    "built-in reward, missing": Mistake(tm.rewards.regex, ("pattern",)),
    "Run without a path": Mistake(tm.Run, ("path",)),
    # types
    "overrides is a list": Mistake(
        lambda: tm.train("char-addition", overrides=["trainer.steps=3"]), ("overrides", "dict")
    ),
    "override, unknown key": Mistake(lambda: train(overrides={"trainer.stepz": 1}), ("trainer.stepz", "trainer.steps")),
    "override, wrong type": Mistake(lambda: train(overrides={"trainer.steps": "many"}), ("trainer.steps", "integer")),
    "override, nested dict": Mistake(lambda: train(overrides={"trainer": {"stepz": 1}}), ("trainer.stepz",)),
    "override, TRL's word": Mistake(lambda: train(overrides={"num_generations": 8}), ("num_generations", "group_size")),
    "override, an object": Mistake(lambda: train(overrides={"trainer.steps": object()}), ("trainer.steps",)),
    "run_dir is a number": Mistake(lambda: train(run_dir=3), ("run_dir", "3")),
    "override and argument": Mistake(
        lambda: train(model="char", overrides={"model.source": "smollm2-135m"}), ("model.source", "char", "leave one")
    ),
    "evaluate, override and argument": Mistake(
        lambda: tm.evaluate(model="char", data=ROWS, overrides={"model": {"source": "smollm2-135m"}}),
        ("model.source", "leave one"),
    ),
    "sft, another section of data": Mistake(
        lambda: tm.sft(model="char", data=CONVERSATIONS, overrides={"data": {"batch_size": 4}}),
        ("data.batch_size", "supervised.minibatch_tokens"),
    ),
    "sft, other rows without a run_dir": Mistake(
        lambda: [tm.sft(data=rows, overrides=SFT) for rows in (ANSWERS, ANSWERS[1:])],
        ("data: the rows have changed", "choose another run_dir, such as runs/sft-2"),
    ),
    "sft, other settings without a run_dir": Mistake(
        lambda: [tm.sft(data=ANSWERS, overrides=SFT | {"run": {"seed": seed}}) for seed in (0, 1)],
        ("run.seed", "choose another run_dir, such as runs/sft-2"),
    ),
    "evaluate, a model in place": Mistake(lambda: tm.evaluate("char"), ("char", 'did you mean model="char"?')),
    "train, a web address in place": Mistake(lambda: tm.train(f"{PAGES}Qwen/Qwen3-0.6B"), ("hub:Qwen/Qwen3-0.6B",)),
    "model, a web address": Mistake(
        lambda: tm.generate("1+1=", model=f"{PAGES}Qwen/Qwen3-0.6B"), ("model", "write hub:Qwen/Qwen3-0.6B")
    ),
    "data, a web address": Mistake(
        lambda: train(data=f"{PAGES}datasets/openai/gsm8k"), ("data", "write hub:openai/gsm8k")
    ),
    "eval_sets, a web address": Mistake(
        lambda: train(eval_sets={"math": f"{PAGES}datasets/openai/gsm8k"}),
        ("eval_sets, math", "write hub:openai/gsm8k"),
    ),
    "sft, run_dir is a number": Mistake(lambda: tm.sft(data=KTO, run_dir=3), ("run_dir", "3")),
    "run_dir is a file": Mistake(lambda: train(run_dir=file("taken", "")), ("taken",)),
    "callbacks, a class": Mistake(lambda: train(callbacks=[tm.Callback]), ("callbacks", "instance")),
    "callbacks, a function": Mistake(lambda: train(callbacks=[print]), ("callbacks", "tidemill.Callback")),
    "two of TRL's arguments": Mistake(
        lambda: tm.train(reward_funcs=[digits], train_dataset=ROWS), ("did you mean rewards=[right], data=rows?",)
    ),
    "columns with other names": Mistake(
        lambda: tm.sft(model="char", data=[{"question": "2+2=", "answer": "4"}], run_dir="new"),
        ('columns={"prompt": "question"}',),
    ),
    "another run in run_dir": Mistake(
        lambda: (train(), train(overrides={"run.seed": 1})), ("run.seed", "choose another run_dir, such as run-2")
    ),
    "messages for a model without a template": Mistake(
        lambda: tm.sft(model="char", data=CONVERSATIONS, run_dir="new"), ("template", "instruction-tuned", "texts")
    ),
    "columns is a list": Mistake(lambda: train(columns=["q"]), ("columns", "dict")),
    "columns, unknown": Mistake(lambda: train(columns={"promptt": "q"}), ("columns", "prompt")),
    "task_params without task": Mistake(lambda: train(task_params={"n": 3}), ("task_params", "task")),
    "environment_params alone": Mistake(
        lambda: train(environment_params={"n": 3}), ("environment_params", "environment")
    ),
    "data and task": Mistake(lambda: train(task=lambda: ROWS), ("data and task", "task")),
    "eval_data alone": Mistake(lambda: tm.train("char-addition", eval_data=ROWS, run_dir="n"), ("eval_data", "data")),
    # models
    "model, unknown name": Mistake(lambda: train(model="smolm2-135m"), ("smolm2-135m", "smollm2-135m")),
    "model, no folder": Mistake(lambda: train(model=Path("nowhere")), ("nowhere",)),
    "model, empty folder": Mistake(lambda: train(model=empty_folder()), ("empty", "Hugging Face")),
    "model, a number": Mistake(lambda: train(model=7), ("model", "int")),
    "model, a class": Mistake(lambda: train(model=torch.nn.Linear), ("model",)),
    "model, a module": Mistake(lambda: train(model=torch.nn.Linear(2, 2)), ("model", "Linear")),
    "model, a tokenizer alone": Mistake(lambda: train(tokenizer=object()), ("tokenizer", "model")),
    "model, a tokenizer's name": Mistake(
        lambda: train(model=Saved(), tokenizer="gpt2"), ("tokenizer", "AutoTokenizer.from_pretrained")
    ),
    "model, a classifier": Mistake(lambda: train(model=Saved(), tokenizer=Saved()), ("Saved", "AutoModelForCausalLM")),
    "generate, no run there": Mistake(lambda: tm.generate("1+1=", model=tm.Run("nowhere")), ("nowhere", "run")),
    "generate, a number": Mistake(lambda: tm.generate(3, model="char"), ("prompts", "3")),
    "generate, an empty list": Mistake(lambda: tm.generate([], model="char"), ("prompts",)),
    "generate, strange characters": Mistake(lambda: tm.generate("héllo", model="char"), ("é", "alphabet")),
    # data
    "no such file": Mistake(lambda: train(data="nowhere.jsonl"), ("nowhere.jsonl", "task.path")),
    "a data set of the hub": Mistake(lambda: train(data="openai/gsm8k"), ("data", "hub:openai/gsm8k")),
    "all splits": Mistake(
        lambda: train(data=datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS))), ("data", 'dataset["train"]')
    ),
    "a data frame": Mistake(
        lambda: train(data=datasets.Dataset.from_list(ROWS).to_pandas()), ("DataFrame", 'to_dict("records")')
    ),
    "files without weights": Mistake(lambda: train(data=["a.jsonl", "b.jsonl"]), ("data[0]", '(1, "a.jsonl")')),
    "NaN in a column": Mistake(lambda: train(data=[{"prompt": "1", "x": float("nan")}] * 8), ("column x", "nan")),
    "an undesired completion": Mistake(
        lambda: tm.sft(data=KTO, overrides=CHAR), ("data[1]", "`label` is false", "KTO")
    ),
    "unpaired preferences": Mistake(
        lambda: tm.dpo(data=KTO, overrides=CHAR), ("data[0]", "`chosen`", "whose label is true")
    ),
    "an empty file": Mistake(lambda: train(data=file("e.jsonl", "")), ("e.jsonl", "no rows")),
    "broken JSON": Mistake(lambda: train(data=file("b.jsonl", '{"prompt": "1"\n')), ("b.jsonl", "line 1")),
    "a JSON list": Mistake(lambda: train(data=file("l.jsonl", json.dumps(ROWS))), ("l.jsonl",)),
    "a CSV file": Mistake(lambda: train(data=file("r.csv", "prompt,answer\n1+1=,2\n")), ("r.csv", ".jsonl")),
    "other columns": Mistake(lambda: train(data=[{"question": "1", "label": "2"}] * 8), ("prompt", "columns")),
    "no answer": Mistake(lambda: train(data=[{"prompt": f"{a}+1="} for a in range(9)], rewards=["exact"]), ("answer",)),
    "rows are texts": Mistake(lambda: train(data=["1+1="] * 8), ("data[0]", "str")),
    "a dict of columns": Mistake(lambda: train(data={"prompt": ["1+1="], "answer": ["2"]}), ("data", "rows")),
    "no rows": Mistake(lambda: train(data=[]), ("data", "rows")),
    "one row": Mistake(lambda: train(data=ROWS[:1]), ("rows",)),
    "rows of arrays": Mistake(lambda: train(data=[{"prompt": "1", "x": np.zeros(2)}] * 8), ("data[0]", "JSON")),
    "rows that fail": Mistake(lambda: train(data=broken()), ("data", "OSError", "the disk is gone")),
    "a prompt is a number": Mistake(lambda: train(data=[{"prompt": 3, "answer": "1"}] * 8), ("prompt", "row")),
    "messages without role": Mistake(lambda: train(data=[{"messages": [{"content": "1"}]}] * 8), ("role", "row")),
    "messages is a text": Mistake(lambda: train(data=[{"messages": "1+1="}] * 8), ("messages", "row")),
    "chat without template": Mistake(lambda: train(data=CHAT), ("template", "model.chat_template")),
    "preference rows": Mistake(lambda: train(data=PREFERENCES, rewards=["exact"]), ("answer",)),
    "characters of another alphabet": Mistake(
        lambda: train(data=[{"prompt": "ß", "answer": "1"}] * 8), ("ß", "alphabet")
    ),
    # rewards
    "reward, unknown name": Mistake(lambda: train(rewards=["exakt"]), ("exakt", "exact")),
    "reward, a number": Mistake(lambda: train(rewards=[0.5]), ("rewards", "0.5", "function")),
    "reward, TRL's signature": Mistake(
        lambda: train(rewards=[lambda prompts, completions: [0.0]]), ("prompts", "prompt", "@tm.reward(batch=True)")
    ),
    "reward, unknown argument": Mistake(
        lambda: train(rewards=[lambda completion, ground_truth: 0.0]), ("ground_truth",)
    ),
    "reward, TRL's token ids": Mistake(
        lambda: train(rewards=[lambda completion_ids: 0.0]), ("did you mean token_ids",)
    ),
    "reward, TRL's solution": Mistake(
        lambda: train(rewards=[lambda completion, solution: 0.0]), ("test_first_hour.py:", "did you mean answer")
    ),
    "reward, a class": Mistake(lambda: train(rewards=[Saved]), ("Saved", "instance")),
    "reward, a built-in one not called": Mistake(lambda: train(rewards=[tm.rewards.exact]), ("call it", "exact(")),
    "reward, of Python": Mistake(lambda: train(rewards=[len]), ("len", "def len(completion, answer)")),
    "rewards, a dict": Mistake(lambda: train(rewards={"digits": digits}), ("rewards", "list", "dict")),
    "reward, none": Mistake(lambda: train(rewards=[]), ("rewards",)),
    "reward, no such file": Mistake(lambda: train(rewards=["nowhere.py:right"]), ("nowhere.py",)),
    "reward, no such function": Mistake(lambda: train(rewards=[file("own.py", "") + ":right"]), ("own.py", "right")),
    "reward, a pair": Mistake(lambda: train(rewards=[(0.5, digits)]), ("rewards", "weight")),
    "reward, text": Mistake(rewarded("good"), ("own", "test_first_hour.py:", "'good'", "number")),
    "reward, a list": Mistake(
        rewarded([1.0]), ("own", "[1.0]", "number; functions of lists are @tm.reward(batch=True)")
    ),
    "reward, NaN": Mistake(rewarded(float("nan")), ("own", "nan", "finite")),
    "reward, a batch too short": Mistake(rewarded([1.0], batch=True), ("own", "1")),
    "reward, a batch as a number": Mistake(rewarded(1.0, batch=True), ("own", "one reward per sample")),
    "reward, raises": Mistake(
        lambda: train(rewards=[lambda completion: 1 / 0]), ("ZeroDivisionError", "test_first_hour.py")
    ),
    # values of other functions
    "advantage, a number": Mistake(advantage(0.5), ("own", "test_first_hour.py:", "0.5", "one number per sample")),
    "advantage, a scalar tensor": Mistake(advantage(lambda r: r.mean()), ("own", "test_first_hour.py:", "scalar")),
    "advantage, numpy scalar": Mistake(advantage(lambda r: np.mean(r.numpy())), ("own", "float64")),
    "advantage, numpy 0-d": Mistake(advantage(lambda r: np.array(1.0)), ("own", "scalar")),
    "advantage, too short": Mistake(advantage(lambda r: r[:1]), ("own", "1", "2 samples")),
    "advantage, a column": Mistake(advantage(lambda r: r[:, None].repeat(1, 9)), ("own", "shape")),
    "advantage, NaN": Mistake(advantage(lambda r: r / 0 * 0), ("own", "finite")),
    "advantage, None": Mistake(advantage(None), ("own", "None", "return")),
    "advantage, texts": Mistake(advantage(["a", "b"]), ("own", "'a'")),
    "advantage, lists": Mistake(advantage([[0.5] * 9] * 2), ("own", "shape [9]")),
    "advantage, a dict": Mistake(advantage({"advantages": 1}), ("own", "dict")),
    "advantage, complex": Mistake(advantage(lambda r: r * 1j), ("own", "complex")),
    "advantage, raises": Mistake(advantage(lambda r: r.nope), ("own", "AttributeError", "test_first_hour.py:")),
    "advantage, unknown argument": Mistake(lambda: train(advantage=lambda scores: scores), ("scores",)),
    "advantage, unknown scope": Mistake(lambda: tm.advantage(scope="all"), ("scope", "group")),
    "advantage, unknown name": Mistake(lambda: train(advantage="gropo"), ("gropo", "grpo")),
    "loss term, a mean": Mistake(loss_term(lambda p: p.mean()), ("own", "test_first_hour.py:", "loss per token")),
    "loss term, None": Mistake(loss_term(lambda p: None), ("own", "None")),
    "loss term, detached": Mistake(loss_term(lambda p: p.detach()), ("own", "gradient")),
    "loss term, NaN": Mistake(loss_term(lambda p: p * float("nan")), ("own", "finite")),
    "loss, numpy": Mistake(loss(lambda p: p.detach().numpy()), ("own", "ndarray")),
    "loss, too short": Mistake(loss(lambda p: p[:1]), ("own", "per token")),
    "loss term, not a pair": Mistake(lambda: train(loss_terms=[("confident", 0.1)]), ("loss_terms", "weight")),
    "loss terms, a pair alone": Mistake(lambda: train(loss_terms=(0.1, digits)), ("loss_terms", "[(0.1,")),
    "loss terms, a function": Mistake(lambda: train(loss_terms=digits), ("completion", "logprobs")),
    "sampler, None": Mistake(sampler(None), ("own", "test_first_hour.py:", "None", "row numbers")),
    "sampler, rows": Mistake(sampler([{"prompt": "1"}, {"prompt": "2"}]), ("own", "row numbers")),
    "sampler, equal": Mistake(sampler([1, 1]), ("own", "[1, 1]", "different")),
    "sampler, fractions": Mistake(sampler([0.5, 1.5]), ("own", "0.5")),
    "task, None": Mistake(task(None), ("own", "test_first_hour.py:", "None", "rows")),
    "task, a text": Mistake(task("rows"), ("own", "str", "rows")),
    "task, texts": Mistake(task(["1+1="]), ("own", "row 0", "str")),
    "task, other splits": Mistake(task({"training": ROWS, "test": ROWS}), ("own", "training", "train")),
    "task, raises": Mistake(task(lambda: 1 / 0), ("own", "ZeroDivisionError")),
    "task, raises later": Mistake(task(broken), ("own", "OSError")),
    "task, wrong parameters": Mistake(lambda: train(data=None, task=lambda n: ROWS, task_params={"m": 1}), ("m",)),
    "callback, on_steps": Mistake(callback(on_steps=lambda *_: None), ("on_steps", "did you mean on_step?")),
    "callback, on_step_end": Mistake(callback(on_step_end=lambda *_, **__: None), ("on_step_end", "on_step")),
    "callback, on_log": Mistake(callback(on_log=lambda *_, **__: None), ("on_log", "on_step")),
    "callback, on_train_begin": Mistake(callback(on_train_begin=lambda *_: None), ("on_train_begin", "on_step")),
    "callback, other arguments": Mistake(
        callback(on_step=lambda self, args, state, control: None), ("on_step", "metrics")
    ),
    "callback, async": Mistake(callback(on_step=awaited), ("on_step", "async")),
    "environment, a function": Mistake(
        lambda: train(data=None, environment=digits), ("environment", "tidemill.Environment")
    ),
    "environment, an instance": Mistake(
        lambda: train(data=None, environment=tm.Environment()), ("environment", "class")
    ),
    "environment, step returns text": Mistake(environment(step=lambda self, action: "no"), ("Mine.step", "Step")),
    "environment, step is misspelt": Mistake(
        environment(step=tm.Environment.step, steps=lambda self, action: 1), ("step",)
    ),
    "environment, reset returns None": Mistake(
        environment(reset=lambda self, task, seed: None), ("Mine.reset", "None")
    ),
    "environment, other arguments": Mistake(environment(step=lambda self, text: tm.Step()), ("Mine.step", "action")),
    "environment, gym's reset": Mistake(environment(reset=lambda self: "1"), ("Mine.reset", "task")),
    # the command line
    "no verb": Mistake("@char-addition", ("tidemill train",)),
    "misspelt verb": Mistake("trian @char-addition", ("trian", "train")),
    "train without a recipe": Mistake("train", ("recipe",)),
    "train with a model only": Mistake("train --model.source=char --run.dir=new", ("recipe",)),
    "no @": Mistake("train char-addition", ("@char-addition",)),
    "unknown recipe": Mistake("train @char-adition", ("@char-adition", "char-addition")),
    "TRL's option": Mistake("train @char-addition --num_generations 8", ("num_generations", "batch.group_size")),
    "an option with dashes": Mistake("train @char-addition --learning-rate=1", ("learning", "optimizer.learning_rate")),
    "misspelt key": Mistake("train @char-addition --trainer.stepz=3", ("trainer.stepz", "trainer.steps")),
    "key without a value": Mistake("train @char-addition --trainer.steps", ("trainer.steps", "value")),
    "key of wrong type": Mistake("train @char-addition --trainer.steps=many", ("trainer.steps", "integer")),
    "key out of range": Mistake("train @char-addition --batch.prompts=0", ("batch.prompts", ">= 1")),
    "value with a space": Mistake("train @char-addition --trainer.steps = 3", ("=", "--section.key=value")),
    "dry run, misspelt": Mistake("train @char-addition --dryrun", ("dryrun", "--dry-run")),
    "recipe, broken TOML": Mistake("train @broken.toml", ("broken.toml:1", "not valid TOML")),
    "recipe is a JSONL file": Mistake("train @rows.jsonl", ("rows.jsonl",)),
    "recipe, unknown section": Mistake("train @section.toml", ("section.toml:1", "trainers", "trainer?")),
    "two verbs": Mistake("train eval @char-addition", ("eval",)),
    "eval of nothing": Mistake("eval --checkpoint nowhere", ("nowhere",)),
    "generate without a prompt": Mistake("generate @char-addition", ("prompt",)),
    "report of nothing": Mistake("report nowhere", ("nowhere",)),
    "export of nothing": Mistake("export nowhere out", ("nowhere",)),
    "unknown recipe shown": Mistake("recipe show grppo", ("grppo",)),
    "serve, unknown model": Mistake("serve --model.source=smolm2-135m", ("smolm2-135m",)),
    "config search without a word": Mistake("config search", ("config search",)),
    "only, without stages": Mistake("train @char-addition --only=sft", ("--only", "stages")),
    "no GPU": Mistake("train @char-addition --trainer.device=cuda", ("trainer.device", "GPU")),
    # the command line: words of similar programs, recipes, data files, folders
    "TRL's verb": Mistake("grpo --model_name_or_path char", ("grpo", "tidemill train @recipe.toml")),
    "verb, continue": Mistake("continue runs/mine", ("continue", "tidemill resume RUN_DIRECTORY")),
    "verb, kill": Mistake("kill runs/mine", ("kill", "tidemill stop RUN_DIRECTORY")),
    "resume without a run": Mistake("resume runs/mine", ("runs/mine", "no run there", "--run.dir")),
    "pause, no time": Mistake("pause runs/mine --hold=soon", ("--hold", "10m")),
    "verb, chat": Mistake("chat runs/mine", ("chat", "tidemill generate")),
    "verb, compare": Mistake("compare runs/a runs/b", ("compare", "--compare")),
    "verb, version": Mistake("version", ("tidemill --version",)),
    "verb, a recipe": Mistake("char-addition", ("tidemill train @char-addition",)),
    "verb, an option": Mistake("--config mine.toml", ("--config", "tidemill train @recipe.toml")),
    "recipe as an option": Mistake("train --config mine.toml", ("--config", "@mine.toml")),
    "recipe after a short option": Mistake("train -c mine.toml", ("-c", "two dashes")),
    "recipe after a space": Mistake("train @", ("@", "without a space")),
    "recipe, YAML": Mistake("train @mine.yaml", ("@mine.yaml", "TOML")),
    "recipe, None": Mistake("train @none.toml", ("none.toml:1", "quote text")),
    "recipe, a key twice": Mistake("train @twice.toml", ("twice.toml:3", "once")),
    "recipe, UTF-16": Mistake("train @utf16.toml", ("utf16.toml", "UTF-8")),
    "recipe, rows for supervised stages": Mistake("train @data.toml", ("data.path", "data.toml:2", "task.path")),
    "recipe, a run": Mistake("train @old", ("old", "--run.dir old")),
    "one dash": Mistake("train @char-addition -trainer.steps 3", ("-trainer.steps", "--trainer.steps")),
    "Hydra's plus": Mistake("train @char-addition +trainer.steps=3", ("+trainer.steps=3", "--trainer.steps=3")),
    "underscore for a dot": Mistake("train @char-addition --trainer_steps 3", ("trainer_steps", "trainer.steps?")),
    "--model": Mistake("train @char-addition --model char", ("model", "model.source")),
    "--dataset": Mistake("train @char-addition --dataset rows.jsonl", ("dataset", "task.path")),
    "--data": Mistake("train @char-addition --data rows.jsonl", ("data", "task.path")),
    "--port": Mistake("generate 1+1= --port 3", ("port", "gateway.port of `tidemill serve`")),
    "eval of a model's name": Mistake("eval char", ("char", "--checkpoint char")),
    "train, a web address": Mistake(f"train {PAGES}Qwen/Qwen3-0.6B", ("hub:Qwen/Qwen3-0.6B", "--model.source")),
    "eval, a web address": Mistake(f"eval --checkpoint {PAGES}Qwen/Qwen3-0.6B", ("write hub:Qwen/Qwen3-0.6B",)),
    "--resume": Mistake("train @char-addition --resume", ("--resume", "run.dir")),
    "a name in capitals": Mistake("train @char-addition --algorithm.name GRPO", ("algorithm.name", "mean grpo?")),
    "yes": Mistake("train @char-addition --engine.batch_invariant yes", ("engine.batch_invariant", "write true")),
    "device gpu": Mistake("train @char-addition --trainer.device gpu", ("trainer.device", "cuda?")),
    "a reward by name": Mistake("train @char-addition --scoring.rewards exact", ('[{ kind = "exact" }]',)),
    "a reward function by name": Mistake(
        "train @char-addition --scoring.rewards my.py:score", ('{ kind = "python", function = "my.py:score" }',)
    ),
    "rewards as JSON": Mistake(
        """train @char-addition --scoring.rewards '[{"kind": "exact"}]'""", ("scoring.rewards", "JSON")
    ),
    "columns the wrong way": Mistake(
        f"train @char-addition {OWN_ROWS} --task.columns '{{question = \"prompt\"}}'", ("task.columns", "on the left")
    ),
    "data, compressed": Mistake(
        "train @char-addition --task.kind file --task.path packed.jsonl.gz", ("packed.jsonl.gz", "unpack")
    ),
    "data, a JSON array": Mistake(
        "train @char-addition --task.kind file --task.path list.json", ("list.json", "line 1", "array")
    ),
    "data, misspelt": Mistake(f"train @char-addition {OWN_ROWS.replace('rows', 'rosw')}", ("rosw", "rows.jsonl?")),
    "data, of the hub": Mistake(
        "train @char-addition --task.kind file --task.path openai/gsm8k", ("gsm8k", "hub:openai/gsm8k")
    ),
    "data, a pattern": Mistake("train @char-addition --task.kind file --task.path no*", ("no*", "task.sources")),
    "model, a pointer of Git LFS": Mistake("train @char-addition --model.source ./lfs", ("lfs", "git lfs pull")),
    "model, GGUF in a folder": Mistake("train @char-addition --model.source ./gguf", ("gguf", "safetensors")),
    "merge of nothing": Mistake("model merge runs/nowhere out", ("runs/nowhere", "no such folder")),
    "resume, misspelt": Mistake("train --run.dir olt", ("olt", "did you mean old?")),
    "resume, no config.toml": Mistake("train --run.dir lfs", ("lfs", "config.toml", "@recipe.toml")),
    "eval of no task": Mistake("eval", ("tidemill eval", "recipe")),
    "eval of a run directory": Mistake("eval --run.dir old", ("old", "--checkpoint old")),
    "eval of a run without an option": Mistake("eval old", ("old", "--checkpoint old")),
    "generate with a run as prompt": Mistake("generate old 1+1=", ("old", "--checkpoint old")),
    "generate --prompt": Mistake("generate --prompt 1+1=", ("--prompt", "argument")),
    "generate -n": Mistake("generate 1+1= -n 3", ("-n", "two dashes")),
    "report, misspelt": Mistake("report olt", ("olt", "did you mean old?")),
    "plan of a recipe": Mistake("plan @char-addition", ("tidemill plan run @char-addition",)),
    "a missing run among those to compare": Mistake("report old new", ("new", "no run there", "--run.dir")),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file("broken.toml", "[trainer\nsteps = 1\n")
    file("section.toml", "[trainers]\nsteps = 1\n")
    file("rows.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS))
    file("packed.jsonl.gz", "")
    file("list.json", json.dumps(ROWS, indent=1))
    file("mine.toml", "")
    file("mine.yaml", "model:\n  source: char\n")
    file("none.toml", "trainer.steps = None\n")
    file("twice.toml", "[trainer]\nsteps = 1\nsteps = 2\n")
    file("data.toml", '[data]\npath = "rows.jsonl"\n')
    Path("utf16.toml").write_bytes("[run]\n".encode("utf-16"))
    for name in ("old", "lfs", "gguf"):
        Path(name).mkdir()
    file("old/config.toml", "")
    file("gguf/model.gguf", "GGUF")
    file("lfs/config.json", '{"model_type": "llama"}')
    file("lfs/tokenizer.json", "{}")
    file("lfs/model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_has_one_error_with_what_where_and_a_hint(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, says = MISTAKES[name]
    if isinstance(made, str):
        words = shlex.split(made)
        ran = run_here(*words[:2], *(FEW if words[:2] == ["train", "@char-addition"] else ()), *words[2:])
        assert ran.code == 2, ran.out + ran.err
        _, *errors = re.split(r"^error: ", ran.err, flags=re.MULTILINE)
        assert len(errors) == 1, ran.err
        text = errors[0]
        assert "Traceback" not in ran.err
    else:
        monkeypatch.setattr("tidemill.telemetry.report.write_report", lambda *_: None)  # half the time of a short run
        with pytest.raises(tm.TidemillError) as caught:
            made()
        error = caught.value
        text = str(error)
        assert error.__cause__ is None
        assert error.__suppress_context__
        assert isinstance(error, (UserError, GuardStop))
        if isinstance(error, GuardStop):  # rewards that fail make samples invalid, and a run without any stops
            where, hint = text.splitlines()[0], text.splitlines()[1]
        else:
            where, hint = error.where, error.hint
        if isinstance(error, ConfigError):
            issue = error.issues[0]
            where, hint = issue.key, issue.hint or issue.what[issue.what.index("needs ") :]
        assert where
        assert hint
    assert "bug in Tidemill" not in text
    assert "internal error" not in text
    assert text.count("\n") <= 2
    for part in says:
        assert part in text, text


def bad_advantage(rewards: torch.Tensor) -> Any:
    return 0.5


@tm.reward(process=False)
def bad_reward(completion: str) -> Any:
    raise KeyError(completion)


@tm.reward(process=False)
def good_reward(completion: str) -> float:
    return digits(completion)


CORRECTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another function": ({"advantage": bad_advantage}, {"advantage": lambda rewards: rewards}),
    "none": ({"advantage": bad_advantage}, {}),
    "other rows and settings": ({"advantage": bad_advantage}, {"data": ROWS[5:], "overrides": {"batch.prompts": 4}}),
    "a reward that always raised": ({"rewards": [bad_reward], "overrides": {"trainer.steps": 4}}, {}),
}


@pytest.mark.parametrize("name", CORRECTED)
def test_a_corrected_call_starts_the_run_again_if_nothing_was_learned(name: str) -> None:
    wrong, right = CORRECTED[name]
    with pytest.raises(tm.TidemillError):
        tm.train(**arguments(wrong))
    run, new = tm.train(**arguments(right)), tm.train(**arguments(right) | {"run_dir": "new"})
    assert run.finished
    assert (run.weights_digest, run.config.algorithm) == (new.weights_digest, new.config.algorithm)
    assert [line["step"] for line in run.metrics] == [line["step"] for line in new.metrics]


def arguments(given: dict[str, Any]) -> dict[str, Any]:
    overrides = CHAR | SMALL | {"engine.batch_invariant": True} | given.get("overrides", {})
    return {"data": ROWS, "rewards": [good_reward], "run_dir": "run"} | given | {"overrides": overrides}


def test_a_run_that_has_learned_is_not_started_again() -> None:
    tm.train(**arguments({}))
    with pytest.raises(tm.TidemillError, match="with another configuration"):
        tm.train(**arguments({"advantage": bad_advantage}))
    assert tm.train(**arguments({})).finished
