"""Every form of a model in every command: the same weights, or one error; and the prompts of a run that was trained on
chats."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import tidemill as tm
from tests.model_folders import small_tokenizer
from tidemill.cli.app import main
from tidemill.config.load import load_spec
from tidemill.jobs.serving import serving_spec
from tidemill.models.catalog import resolve
from tidemill.models.loading import load_model
from tidemill.models.model_source import locate
from tidemill.models.weights_digest import weights_digest

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] or (m.role == 'system' and not "
    "loop.first) %}{{ raise_exception('no role ' + m.role + ' here') }}{% endif %}[{{ m.role }}] {{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
SYSTEM = "Be brief."
ROWS = [
    {"messages": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)} for a in range(4) for b in (2, 4, 6)
]
SMALL: dict[str, Any] = {
    "task.system_prompt": SYSTEM,
    "batch.prompts": 2,
    "batch.group_size": 2,
    "trainer.steps": 2,
    "trainer.threads": 1,
    "eval.prompts": 2,
    "eval.every_steps": 0,
    "checkpoint.every_steps": 1,
    "sampling.max_new_tokens": 2,
}
CHAT = [{"role": "user", "content": "3+4="}]


def chat_model() -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    tokenizer = small_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return LlamaForCausalLM(config), tokenizer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tm.Run:
    """Two steps on rows of messages."""
    model, tokenizer = chat_model()
    folder = tmp_path_factory.mktemp("models") / "run"
    return tm.train(model=model, tokenizer=tokenizer, data=ROWS, rewards=["exact"], overrides=SMALL, run_dir=folder)


@pytest.fixture(scope="module")
def exported(run: tm.Run) -> Path:
    return tm.export(run, run.path.parent / "exported")


def pipeline_of(run: tm.Run, folder: Path) -> Path:
    """A pipeline's directory whose last stage that trained is the run."""
    stages = [("sft", "sft-1"), ("rl", "rl-1"), ("eval", "eval-1"), ("later", "later-1")]
    for _, name in stages[:3]:
        (folder / "stages" / name).mkdir(parents=True)
        shutil.copy(run.path / "config.toml", folder / "stages" / name)
    shutil.copytree(run.path, folder / "stages" / "rl-1", dirs_exist_ok=True)
    state = {"stages": [{"name": name, "folder": f"stages/{stage}"} for name, stage in stages]}
    (folder / "pipeline.json").write_text(json.dumps(state))
    (folder / "config.toml").write_text("")
    return folder


Form = Callable[[tm.Run, Path, Path], Any]
FORMS: dict[str, Form] = {
    "Run": lambda run, exported, tmp: run,
    "run directory as text": lambda run, exported, tmp: str(run.path),
    "run directory as Path": lambda run, exported, tmp: run.path,
    "folder of checkpoints": lambda run, exported, tmp: str(run.path / "checkpoints"),
    "checkpoint": lambda run, exported, tmp: str(run.path / "checkpoints" / "step_2"),
    "pipeline": lambda run, exported, tmp: str(pipeline_of(run, tmp / "pipeline")),
    "Run of a pipeline": lambda run, exported, tmp: tm.Run(pipeline_of(run, tmp / "pipeline")),
    "exported folder": lambda run, exported, tmp: exported,
    "transformers model": lambda run, exported, tmp: AutoModelForCausalLM.from_pretrained(exported),
}
QUICK = {"eval.prompts": 2, "sampling.max_new_tokens": 2, "trainer.threads": 1}


def start_digest(run: tm.Run) -> str:
    manifest = json.loads((run.path / "manifest.json").read_text())
    return str(manifest["model_digest"])


SLOW = ("run directory as Path", "folder of checkpoints", "Run of a pipeline")


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=pytest.mark.slow) if form in SLOW else form for form in FORMS]
)
def test_every_form_has_the_same_weights_in_every_command(
    form: str, run: tm.Run, exported: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = FORMS[form](run, exported, tmp_path)
    tokenizer: dict[str, Any] = {}
    if form == "transformers model":
        tokenizer = {"tokenizer": AutoTokenizer.from_pretrained(exported)}
    wanted = run.weights_digest
    found = tm.evaluate(model=given, data=ROWS[:2], rewards=["exact"], overrides=QUICK, **tokenizer)
    assert found["weights_digest"] == wanted
    (sample,) = tm.generate([CHAT], model=given, overrides=QUICK, **tokenizer)
    (known,) = tm.generate([CHAT], model=run, overrides=QUICK)
    assert sample["logprob"] == known["logprob"] or form == "transformers model"  # which has no run's system prompt
    folder = tm.export(given, tmp_path / "copy", **tokenizer)
    assert json.loads((folder / "tidemill.json").read_text())["weights_digest"] == wanted
    trained = tm.train(
        model=given, data=ROWS, rewards=["exact"], overrides=SMALL | {"trainer.steps": 1}, run_dir=tmp_path / "next",
        **tokenizer,
    )  # fmt: skip
    assert start_digest(trained) == wanted
    if isinstance(given, (str, Path)):  # the command line takes text
        spec = serving_spec(load_spec([], purpose="read"), locate(str(given)))
        served = load_model(resolve(spec.model, progress=print), device=torch.device("cpu"))
        assert weights_digest(served) == wanted and spec.model.chat_template
        words = ["--checkpoint", str(given), "--trainer.threads=1", "--sampling.max_new_tokens=2", "--json"]
        assert main(["generate", "3+4=", *words]) == 0
        assert json.loads(capfd.readouterr().out.splitlines()[-1])["samples"][0]["logprob"] == known["logprob"]


def test_a_run_that_started_from_a_run_resumes_from_its_checkpoint(run: tm.Run, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(run.path, source)

    def train(steps: int, model: Any) -> tm.Run:
        overrides = SMALL | {"trainer.steps": steps}
        return tm.train(model=model, data=ROWS, rewards=["exact"], overrides=overrides, run_dir=tmp_path / "b")

    first = train(1, source)
    assert first.config.model.source == str(source / "checkpoints" / "step_2")
    shutil.copytree(source / "checkpoints" / "step_2", source / "checkpoints" / "step_3")  # the source goes on
    assert train(2, tm.Run(source)).config.model.source == first.config.model.source
    shutil.rmtree(source / "checkpoints" / "step_2")
    with pytest.raises(tm.TidemillError, match=r"step_2: this checkpoint was deleted(?s:.*)the newest is .*step_3"):
        train(3, tm.Run(source))


def test_a_text_is_formatted_as_the_rows_of_the_run(run: tm.Run, exported: Path) -> None:
    evaluated = tm.evaluate(run, overrides={"eval.prompts": 1})["samples"][0]["prompt"]
    text = evaluated.split("[user] ")[1].split("\n")[0]
    for model in (run, exported):
        (sample,) = tm.generate(text, model=model, overrides=QUICK)
        assert (sample["format"], sample["sent"]) == ("chat", evaluated)
    own, plain, raw = (
        tm.generate([[{"role": "system", "content": "x"}, *CHAT]], model=run)[0],
        tm.generate(CHAT, model=exported, overrides=QUICK)[0],
        tm.generate("3+4=", model=run, raw=True)[0],
    )
    assert own["sent"].startswith("[system] x\n[user] 3+4=") and SYSTEM not in own["sent"]
    assert plain["sent"] == f"[system] {SYSTEM}\n[user] 3+4=\n[assistant] " and plain["prompt"] == CHAT
    assert (raw["format"], raw["sent"]) == ("text", "3+4=")


def test_new_rows_are_evaluated_in_the_format_of_the_run(run: tm.Run, exported: Path) -> None:
    rows = [{"prompt": "3+4=", "answer": "7"}, {"messages": CHAT, "answer": "7"}]
    for model in (run, exported):
        (sample,) = tm.generate("3+4=", model=model, overrides=QUICK)
        for row in rows:
            found = tm.evaluate(model=model, data=[row], rewards=["exact"], overrides=QUICK)
            assert [each["prompt"] for each in found["samples"]] == [sample["sent"]]


def test_the_command_line_decides_about_the_template_that_is_served(
    run: tm.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, chat in ([], True), (["--model.chat_template=false"], False):
        assert main(["serve", "--checkpoint", str(run.path), *words, "--dry-run", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["config"]["model"]["chat_template"] is chat


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ([[{"role": "tool", "content": "a"}]], r"prompts\[0\]: .*no role tool here"),
        ([CHAT, [*CHAT, {"role": "assistant", "content": "7"}]], r"prompts\[1\]: the last message is the assistant's"),
        ([{"content": "a"}], r"prompts\[0\]: expected text or messages"),
        ([{"role": "user", "content": 3}], r"prompts\[0\]: the message's content is not a text"),
        ([], "prompts: no prompt given"),
        (3, "prompts: expected text or messages, found 3"),
    ],
)
def test_prompts_that_cannot_be_sent(prompts: Any, says: str, run: tm.Run) -> None:
    with pytest.raises(tm.TidemillError, match=says):
        tm.generate(prompts, model=run)


def test_messages_need_a_template() -> None:
    with pytest.raises(tm.TidemillError, match="the model has no chat template for messages"):
        tm.generate(CHAT, model="char", overrides=QUICK)
    with pytest.raises(tm.TidemillError, match="cannot be sent as written"):
        tm.generate(CHAT, model="char", raw=True)


def test_a_supervised_run_is_evaluated_after_its_system_prompt(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = chat_model()
    shown = [{"messages": [*row["messages"], {"role": "assistant", "content": row["answer"]}]} for row in ROWS]
    settings = {"data.system_prompt": SYSTEM, "trainer.steps": 1, "trainer.threads": 1}
    run = tm.sft(model=model, tokenizer=tokenizer, data=shown, overrides=settings, run_dir=tmp_path / "sft")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "3+{a}=", "answer": "{3 + a}"}}\n' for a in range(4)))
    task = {"kind": "file", "path": str(rows), "held_out_fraction": 1.0}
    given = {f"task.{key}": value for key, value in task.items()} | QUICK
    options = [f"--{key}={value}" for key, value in given.items()]
    capfd.readouterr()
    assert main(["eval", "--checkpoint", str(run.path), *options, "--json"]) == 0
    by_command = json.loads(capfd.readouterr().out)
    by_task = tm.evaluate(model=run, overrides={"task": task, **QUICK})
    by_rows = tm.evaluate(run, data=rows, overrides=QUICK)
    for found in (by_command, by_task, by_rows):
        prompts = [sample["prompt"] for sample in found["samples"]]
        assert prompts and all(text.startswith(f"[system] {SYSTEM}\n[user] 3+") for text in prompts)
    (sample,) = tm.generate("3+0=", model=run, overrides=QUICK)
    assert sample["sent"] in [sample["prompt"] for sample in by_rows["samples"]]


@pytest.mark.parametrize("chat", [False, True])
def test_a_run_says_that_its_prompts_lack_the_template_the_model_was_trained_with(
    chat: bool, run: tm.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in (2, 4, 6)]
    settings = SMALL | {"task.system_prompt": "", "trainer.steps": 1, "model.chat_template": chat}
    tm.train(model=run, data=rows, rewards=["exact"], overrides=settings, run_dir=tmp_path / "run")
    assert ("the model was trained with its chat template" in capsys.readouterr().err) is not chat
