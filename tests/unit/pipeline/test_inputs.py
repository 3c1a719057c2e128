"""Inputs that a later stage could not use are told before the first one runs."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.commands import run_here
from tests.model_folders import save_folder, small_tokenizer
from tests.model_shapes import HIDDEN, llama
from tests.pretend_stages import Quiet, Stages, pipeline
from tidemill.config.issues import ConfigError
from tidemill.models.codec import load_codec
from tidemill.models.folder import DESCRIPTION
from tidemill.models.reward_model import HeadDescription
from tidemill.pipeline.execution import plan_pipeline, run_pipeline
from tidemill.pipeline.stage_plan import Choice

GOOD = '{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n{"prompt": "1+2=", "chosen": "3", "rejected": "2"}\n'
EQUAL = GOOD + '{"prompt": "2+2=", "chosen": "4", "rejected": "4"}\n'
NO_COMPLETION = '{"prompt": "1+1=", "completion": "2"}\n{"prompt": "1+2=", "answer": "3"}\n'
NUMBER = '{"prompt": "1+1=", "answer": "2"}\n\n{"prompt": 7, "answer": "3"}\n'
RECIPE = """\
[model]
source = "char"
[[stage]]
name = "first"
kind = "export"
[[stage]]
name = "sft"
kind = "sft"
data.path = "shown.jsonl"
[[stage]]
name = "rm"
kind = "reward_model"
data.path = "pairs.jsonl"
[[stage]]
name = "rl"
kind = "rl"
model.source = "stage:sft"
task = { kind = "jsonl", path = "prompts.jsonl" }
scoring.rewards = [{ kind = "model", model = "stage:rm" }]
"""


def written(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def told(folder: Path, text: str, *overrides: str) -> list[str]:
    """The lines of what is refused, without the folder; nothing was run, made or written."""
    stages = Stages()
    with pytest.raises(ConfigError) as caught:
        run_pipeline(pipeline(folder, text, *overrides), teller=Quiet(), runners=stages.runners)
    assert not stages.worked
    assert not (folder / "D").exists()
    return [fault.line.replace(f"{folder}/", "") for fault in caught.value.faults]


def test_faults_of_several_stages_are_told_together(tmp_path: Path) -> None:
    written(tmp_path, shown=NO_COMPLETION, pairs=EQUAL, prompts=NUMBER)
    sft, rm, rl = told(tmp_path, RECIPE)
    assert sft.startswith("shown.jsonl, line 2: `completion` must be there (stage sft); a row looks like ")
    assert rm == (
        "pairs.jsonl, line 3: `chosen` and `rejected` are the same, '4' (stage rm); "
        "leave the row out: a pair of equal sides says nothing"
    )
    assert rl.startswith("prompts.jsonl, line 3: `prompt` must be a text that is not empty (stage rl); ")


def test_dry_run_tells_them_too(tmp_path: Path) -> None:
    written(tmp_path, shown=NO_COMPLETION.replace("answer", "completion"), pairs=EQUAL, prompts=NUMBER)
    (tmp_path / "r.toml").write_text(RECIPE, encoding="utf-8")
    ran = run_here("train", f"@{tmp_path / 'r.toml'}", f"--run.dir={tmp_path / 'D'}", "--dry-run")
    assert (ran.code, ran.out) == (2, "")
    assert "pairs.jsonl, line 3" in ran.err
    assert "prompts.jsonl, line 3" in ran.err


def test_what_is_missing_is_told_of_all_stages(tmp_path: Path) -> None:
    written(tmp_path, prompts=NUMBER)
    assert told(tmp_path, RECIPE) == [
        "data.path: shown.jsonl: no such file or folder (stage sft); correct the path",
        "data.path: pairs.jsonl: no such file or folder (stage rm); correct the path",
    ]


def test_rows_of_tables_are_looked_at_too(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in EQUAL.splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    written(tmp_path, shown=NO_COMPLETION.replace("answer", "completion"), prompts=NUMBER.replace("7", '"7"'))
    (line,) = told(tmp_path, RECIPE.replace("pairs.jsonl", "pairs.parquet"))
    assert line.startswith("pairs.parquet, row 2 (from 0): `chosen` and `rejected` are the same, '4' (stage rm); ")


def test_only_stages_that_are_due_are_looked_at(tmp_path: Path) -> None:
    written(tmp_path, shown=NO_COMPLETION, pairs=EQUAL, prompts=NUMBER)
    plan_pipeline(pipeline(tmp_path, RECIPE), choice=Choice(only="first"))
    with pytest.raises(ConfigError, match="stage rm"):
        plan_pipeline(pipeline(tmp_path, RECIPE), choice=Choice(only="rm"))


def test_a_file_of_several_stages_is_read_and_told_once(tmp_path: Path) -> None:
    again = RECIPE.replace('"rl"', '"again"', 1) + RECIPE[RECIPE.index('[[stage]]\nname = "rl"') :]
    written(tmp_path, shown='{"prompt": "a", "completion": "b"}\n' * 2, pairs=GOOD, prompts=NUMBER)
    (only,) = told(tmp_path, again, "--data.held_out_fraction=0")
    assert "(stage again)" in only


def test_an_evaluation_file_is_looked_at_where_the_other_is_still_to_be_made(tmp_path: Path) -> None:
    made = '[[stage]]\nname = "made"\nkind = "pairs"\n'
    recipe = RECIPE.replace('[[stage]]\nname = "rm"', f'{made}[[stage]]\nname = "rm"')
    written(tmp_path, shown='{"prompt": "a", "completion": "b"}\n{"prompt": "b", "completion": "b"}\n', pairs=EQUAL)
    written(tmp_path, prompts=NUMBER.replace("7", '"7"'))
    other_way = recipe.replace('"pairs.jsonl"', '"stage:made"\ndata.held_out_path = "pairs.jsonl"')
    assert "pairs.jsonl, line 3" in "\n".join(told(tmp_path, other_way))
    recipe = recipe.replace('"pairs.jsonl"', '"pairs.jsonl"\ndata.held_out_path = "stage:made"')
    written(tmp_path, pairs=GOOD.splitlines()[0])  # one question is enough, where none is to be kept of it
    plan_pipeline(pipeline(tmp_path, recipe))


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe whose only stage is rewarded by the folder `reward`, without a head, made for the folder `policy`."""
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))
    for name in ("reward", "policy"):
        save_folder(llama(), tmp_path / name)
    digest = load_codec(tmp_path / "policy").vocabulary_digest
    described = HeadDescription(kind="reward_model", pooling="last_token", hidden_size=HIDDEN, vocabulary_digest=digest)
    (tmp_path / "reward" / DESCRIPTION).write_bytes(msgspec.json.encode(described))
    return (
        '[[stage]]\nname = "began"\nkind = "sft"\nmodel.source = "./policy"\ndata.path = "shown.jsonl"\n'
        '[[stage]]\nname = "measured"\nkind = "eval"\nmodel.source = "stage:began"\n'
        'scoring.rewards = [{ kind = "exact" }, { kind = "model", model = "./reward" }]\n'
    )


def other_tokenizer(folder: Path) -> None:
    tokenizer = small_tokenizer()
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(folder)


def lines(tmp_path: Path, text: str) -> list[str]:
    written(tmp_path, shown=NO_COMPLETION.replace("answer", "completion"))
    return told(tmp_path, text)


def test_a_reward_model_with_another_tokenizer(judged: str, tmp_path: Path) -> None:
    other_tokenizer(tmp_path / "policy")
    (line,) = lines(tmp_path, judged)
    assert line.startswith("scoring.rewards[1].model: the reward model has another tokenizer than the policy")
    assert "(stage measured)" in line
    assert 'kind = "http"' in line


def test_a_reward_model_in_the_place_of_what_writes(judged: str, tmp_path: Path) -> None:
    (line,) = lines(tmp_path, judged.replace('"stage:began"', '"./reward"'))
    assert line.startswith("reward: the folder holds a reward model")
    assert "(stage measured)" in line


def test_a_folder_that_is_no_reward_model(judged: str, tmp_path: Path) -> None:
    (tmp_path / "reward" / DESCRIPTION).unlink()
    (line,) = lines(tmp_path, judged)
    assert line.startswith("reward: the folder is no reward model: it has no tidemill.json (stage measured); ")


def test_the_policys_own_tokenizer_is_none_to_complain_of(judged: str, tmp_path: Path) -> None:
    written(tmp_path, shown=NO_COMPLETION.replace("answer", "completion"))
    assert len(plan_pipeline(pipeline(tmp_path, judged)).due) == 2
    other_tokenizer(tmp_path / "policy")
    not_built = judged.replace('"./policy"', '"smollm2-135m"')  # nobody knows its tokenizer yet
    assert len(plan_pipeline(pipeline(tmp_path, not_built)).due) == 2


def test_a_reward_model_that_a_stage_makes_of_a_model_with_another_tokenizer(judged: str, tmp_path: Path) -> None:
    written(tmp_path, pairs=GOOD)
    (tmp_path / "reward" / DESCRIPTION).unlink()
    rm = '[[stage]]\nname = "rm"\nkind = "reward_model"\nmodel.source = "./reward"\ndata.path = "pairs.jsonl"\n'
    text = judged.replace('[[stage]]\nname = "measured"', f'{rm}[[stage]]\nname = "measured"')
    text = text.replace('model = "./reward"', 'model = "stage:rm"')
    written(tmp_path, shown=NO_COMPLETION.replace("answer", "completion"))
    assert len(plan_pipeline(pipeline(tmp_path, text)).due) == 3
    other_tokenizer(tmp_path / "reward")
    (line,) = lines(tmp_path, text)
    assert line.startswith("scoring.rewards[1].model: the reward model has another tokenizer than the policy")


EARLIER = """\
[model]
source = "char"
char.alphabet = "0123456789+=\\n"
[[stage]]
name = "a"
kind = "rl"
[[stage]]
name = "b"
"""
REWARD = "scoring.rewards = [{ kind ="
LATER = [
    ("rl", 'model.source = "nofolder/xx"', "model.source: nofolder/xx is neither a local folder nor in the cache"),
    ("sft", 'model.source = "smolm"\ndata.path = "rows.jsonl"', "model.source: 'smolm' is not a known model"),
    ("export", 'model.source = "./own"', "own: the folder has no config.json"),
    ("eval", 'eval.compare_with = "nofolder/xx"', "eval.compare_with: nofolder/xx is neither a local folder nor in "),
    ("rl", 'trainer.device = "cuda"', "trainer.device: torch finds no GPU"),
    ("rl", 'model.lora = { rank = 2, targets = ["nope"] }', "model.lora.targets: LlamaForCausalLM has no linear layer"),
    ("rl", 'critic.source = "./other"', "critic.source: the critic (other) has another tokenizer than the policy"),
    ("rl", 'critic.source = "nofolder/xx"', "critic.source: nofolder/xx is neither a local folder nor in the cache"),
    ("eval", 'task = { kind = "reasoning_gym", name = "chain_summ" }', "task.name: reasoning-gym has no generator"),
    ("eval", 'task.operators = "*"', "task: the model's vocabulary cannot express '*'"),
    ("eval", 'task = { kind = "jsonl", path = "asked.jsonl" }', "asked.jsonl, line 2: the model's vocabulary cannot "),
    ("eval", "sampling.max_new_tokens = 250", "task: the prompt starting '"),
    ("rl", f'{REWARD} "python", function = "nomod:score" }}]', "scoring.rewards.function: cannot import nomod"),
    ("rl", f'{REWARD} "http", url = "https://h", auth_env = "NO_SUCH" }}]', "scoring.rewards.auth_env"),
    ("sft", 'data.path = "rows.jsonl"', "data.path: 1 row is longer than 256 tokens with prompt and completion: rows."),
    ("sft", 'data.path = "talk.jsonl"', "talk.jsonl, line 2: the model has no chat template"),
    ("export", 'export.path = "own"', "this folder exists and was not written by an export"),
]


@pytest.mark.parametrize(("kind", "settings", "fault"), LATER)
def test_a_later_stage_is_refused_before_an_earlier_one_runs(
    kind: str, settings: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_folder(llama(), tmp_path / "other")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine").touch()
    ask = '{"messages": [{"role": "user", "content": "1+%d"}], "completion": "2"}\n'
    written(
        tmp_path,
        # 3 + 300 characters, a token each, and the one that ends it
        rows=json.dumps({"prompt": "1+1", "completion": "1" * 300}) + '\n{"prompt": "1+2", "completion": "3"}\n',
        talk=ask % 1 + ask % 2,
        asked='{"prompt": "1+1=", "answer": "2"}\n{"prompt": "a+1=", "answer": "2"}\n',
    )
    source = "" if "model.source" in settings else 'model.source = "stage:a"\n'
    critic = 'algorithm.advantage = "gae"\ncritic.kind = "own"\n' if "critic" in settings else ""
    (line,) = told(tmp_path, f'{EARLIER}kind = "{kind}"\n{source}{critic}{settings}\n')
    assert fault in line
    assert "(stage b)" in line


def test_of_a_model_that_is_not_built_yet_all_else_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))
    later = EARLIER.replace('"b"', '"b"\nkind = "rl"\nmodel.source = "smollm2-135m"')
    plan_pipeline(pipeline(tmp_path, later))
    task = 'task = { kind = "reasoning_gym", name = "chain_summ" }\n'
    (line,) = told(tmp_path, later + task)
    assert "has no generator 'chain_summ' (stage b)" in line
    written(tmp_path, pairs=EQUAL)
    dpo = later.replace('kind = "rl"\nmodel', 'kind = "dpo"\ndata.path = "pairs.jsonl"\ndata.max_tokens = 2\nmodel')
    assert "pairs.jsonl, line 3" in told(tmp_path, dpo)[0]
    assert not list((tmp_path / "cache").glob("smollm2*"))
