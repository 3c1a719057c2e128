"""Invalid inputs of all stages are reported before the first stage runs."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.commands import run_here
from tests.config_issues import issues_of
from tests.model_folders import save_folder, small_tokenizer
from tests.model_shapes import HIDDEN, llama
from tests.pretend_stages import Quiet, Stages, pipeline
from tidemill.config.issues import ConfigError, ConfigIssue
from tidemill.config.task import DataConfig
from tidemill.data.examples import load_demonstrations
from tidemill.models.codec import load_codec
from tidemill.models.folder import DESCRIPTION
from tidemill.models.reward_model import HeadDescription
from tidemill.pipeline.execution import plan_pipeline, run_pipeline
from tidemill.pipeline.preflight import AnyCodec
from tidemill.pipeline.stage_plan import Choice

GOOD = '{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n{"prompt": "1+2=", "chosen": "3", "rejected": "2"}\n'
EQUAL = GOOD + '{"prompt": "2+2=", "chosen": "4", "rejected": "4"}\n'
NO_COMPLETION = '{"prompt": "1+1=", "completion": "2"}\n{"prompt": "1+2=", "answer": "3"}\n'
NUMBER = '{"prompt": "1+1=", "answer": "2"}\n\n{"prompt": 7, "answer": "3"}\n'
RECIPE = """\
[model]
source = "char"
[sampling]
max_new_tokens = 64
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
task = { kind = "file", path = "prompts.jsonl" }
scoring.rewards = [{ kind = "model", model = "stage:rm" }]
"""


def written(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def refused(folder: Path, text: str, *overrides: str) -> list[ConfigIssue]:
    """The issues of a pipeline, with keys relative to the folder; nothing was run or written."""
    stages = Stages()
    issues = issues_of(
        lambda: run_pipeline(pipeline(folder, text, *overrides), reporter=Quiet(), runners=stages.runners)
    )
    assert not stages.worked
    assert not (folder / "D").exists()
    return [replace(issue, key=issue.key.replace(f"{folder}/", "")) for issue in issues]


def places(issues: list[ConfigIssue]) -> list[tuple[str, str]]:
    return [(issue.key, issue.source) for issue in issues]


def test_issues_of_several_stages_are_reported_together(tmp_path: Path) -> None:
    written(tmp_path, shown=NO_COMPLETION, pairs=EQUAL, prompts=NUMBER)
    sft, rm, rl = refused(tmp_path, RECIPE)
    assert places([sft, rm, rl]) == [
        ("shown.jsonl, line 2", "stage sft"),
        ("pairs.jsonl, line 3", "stage rm"),
        ("prompts.jsonl, line 3", "stage rl"),
    ]
    assert "`completion`" in sft.what
    assert "'4'" in rm.what
    assert "`prompt`" in rl.what


def test_dry_run_reports_them_too(tmp_path: Path) -> None:
    written(tmp_path, shown=NO_COMPLETION.replace("answer", "completion"), pairs=EQUAL, prompts=NUMBER)
    (tmp_path / "r.toml").write_text(RECIPE, encoding="utf-8")
    ran = run_here("train", f"@{tmp_path / 'r.toml'}", f"--run.dir={tmp_path / 'D'}", "--dry-run")
    assert (ran.code, ran.out) == (2, "")
    assert "pairs.jsonl, line 3" in ran.err
    assert "prompts.jsonl, line 3" in ran.err


def test_dry_run_reports_rows_that_are_left_out_or_lack_values(tmp_path: Path) -> None:
    prompts = "".join(f'{{"prompt": "{n}+1=", "level": {n or "null"}}}\n' for n in (0, 1, 2, 2))
    shown = '{"prompt": "1+1=", "completion": "2"}\n' * 2 + '{"prompt": "1+2=", "completion": "3"}\n'
    written(tmp_path, shown=shown, pairs=GOOD, prompts=prompts)
    *found, few = plan_pipeline(pipeline(tmp_path, RECIPE)).remarks
    assert few.startswith("stage rl: warning: 1 held-out prompt can hardly tell models apart")
    assert found == [
        "stage sft: shown.jsonl (left out: 1 repeated)",
        "stage rl: data: 2 training rows, 1 held out; left out: 1 repeated; without a value: level in 1 of 4 rows",
    ]


def test_missing_files_of_all_stages_are_reported(tmp_path: Path) -> None:
    written(tmp_path, prompts=NUMBER)
    assert places(refused(tmp_path, RECIPE)) == [
        ("data.path: shown.jsonl", "stage sft"),
        ("data.path: pairs.jsonl", "stage rm"),
    ]


def test_rows_of_tables_are_checked_too(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in EQUAL.splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    written(tmp_path, shown=NO_COMPLETION.replace("answer", "completion"), prompts=NUMBER.replace("7", '"7"'))
    (issue,) = refused(tmp_path, RECIPE.replace("pairs.jsonl", "pairs.parquet"))
    assert issue.key.startswith("pairs.parquet, row 2")
    assert issue.source == "stage rm"


TURNS = (
    '{"prompt": "1+2=", "completion": [{"role": "assistant", "content": "2"}, {"role": "user", "content": "+1="}, '
    '{"role": "assistant", "content": "3"}]}\n'
)


def test_rows_with_several_turns_are_encoded_in_advance(tmp_path: Path) -> None:
    rows = {"pairs": GOOD, "prompts": NUMBER.replace("7", '"7"')}
    written(tmp_path, shown=NO_COMPLETION.splitlines()[0] + "\n" + TURNS, **rows)
    plan_pipeline(pipeline(tmp_path, RECIPE))
    tools = TURNS.replace('"prompt"', '"tools": [{"type": "function"}], "prompt"')
    written(tmp_path, shown=NO_COMPLETION.splitlines()[0] + "\n" + tools)
    (issue,) = refused(tmp_path, RECIPE)
    assert (issue.key, issue.source) == ("shown.jsonl, line 2", "stage sft")
    assert "no chat template" in issue.what
    written(tmp_path, shown=NO_COMPLETION.splitlines()[0] + "\n" + TURNS.replace("+1=", "+1é"))
    (issue,) = refused(tmp_path, RECIPE)
    assert "vocabulary lacks 'é'" in issue.what


def test_rows_with_several_turns_are_read_without_a_tokenizer(tmp_path: Path) -> None:
    written(tmp_path, shown=TURNS * 2)
    config = DataConfig(path=tmp_path / "shown.jsonl", held_out_fraction=0)
    codec = AnyCodec()
    load = partial(load_demonstrations, config, codec=codec, turn_formats=lambda _: codec, context_limit=9)
    (made,) = load(chat_template=True).train
    assert made.trained == ((0, 2), (3, 5))  # every text is a token, and every turn has an end


def test_only_stages_that_are_due_are_checked(tmp_path: Path) -> None:
    written(tmp_path, shown=NO_COMPLETION, pairs=EQUAL, prompts=NUMBER)
    plan_pipeline(pipeline(tmp_path, RECIPE), choice=Choice(only="first"))
    with pytest.raises(ConfigError, match="stage rm"):
        plan_pipeline(pipeline(tmp_path, RECIPE), choice=Choice(only="rm"))


def test_a_file_of_several_stages_is_reported_once(tmp_path: Path) -> None:
    again = RECIPE.replace('"rl"', '"again"', 1) + RECIPE[RECIPE.index('[[stage]]\nname = "rl"') :]
    written(tmp_path, shown='{"prompt": "a", "completion": "b"}\n' * 2, pairs=GOOD, prompts=NUMBER)
    (only,) = refused(tmp_path, again, "--data.held_out_fraction=0")
    assert only.source == "stage again"


def test_an_evaluation_file_is_checked_when_the_training_file_does_not_exist_yet(tmp_path: Path) -> None:
    made = '[[stage]]\nname = "made"\nkind = "pairs"\n'
    recipe = RECIPE.replace('[[stage]]\nname = "rm"', f'{made}[[stage]]\nname = "rm"')
    written(tmp_path, shown='{"prompt": "a", "completion": "b"}\n{"prompt": "b", "completion": "b"}\n', pairs=EQUAL)
    written(tmp_path, prompts=NUMBER.replace("7", '"7"'))
    other_way = recipe.replace('"pairs.jsonl"', '"stage:made"\ndata.held_out_path = "pairs.jsonl"')
    assert ("pairs.jsonl, line 3", "stage rm") in places(refused(tmp_path, other_way))
    recipe = recipe.replace('"pairs.jsonl"', '"pairs.jsonl"\ndata.held_out_path = "stage:made"')
    written(tmp_path, pairs=GOOD.splitlines()[0])  # one question is enough if none is held out
    plan_pipeline(pipeline(tmp_path, recipe))


@pytest.fixture
def scored_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe whose last stage is scored by the reward model in `reward`, which has the tokenizer of `policy`."""
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))
    for name in ("reward", "policy"):
        save_folder(llama(), tmp_path / name)
    digest = load_codec(tmp_path / "policy").vocabulary_digest
    described = HeadDescription(kind="reward_model", pooling="last_token", hidden_size=HIDDEN, vocabulary_digest=digest)
    (tmp_path / "reward" / DESCRIPTION).write_bytes(msgspec.json.encode(described))
    return (
        "[sampling]\nmax_new_tokens = 64\n"
        '[[stage]]\nname = "began"\nkind = "sft"\nmodel.source = "./policy"\ndata.path = "shown.jsonl"\n'
        '[[stage]]\nname = "measured"\nkind = "eval"\nmodel.source = "stage:began"\n'
        'scoring.rewards = [{ kind = "exact" }, { kind = "model", model = "./reward" }]\n'
    )


def other_tokenizer(folder: Path) -> None:
    tokenizer = small_tokenizer()
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(folder)


def issue_of(tmp_path: Path, text: str) -> ConfigIssue:
    written(tmp_path, shown=NO_COMPLETION.replace("answer", "completion"))
    (issue,) = refused(tmp_path, text)
    return issue


def test_a_reward_model_with_another_tokenizer_is_refused(scored_recipe: str, tmp_path: Path) -> None:
    other_tokenizer(tmp_path / "policy")
    issue = issue_of(tmp_path, scored_recipe)
    assert places([issue]) == [("scoring.rewards[1].model", "stage measured")]
    assert 'kind = "http"' in issue.hint


def test_a_reward_model_cannot_be_the_policy(scored_recipe: str, tmp_path: Path) -> None:
    issue = issue_of(tmp_path, scored_recipe.replace('"stage:began"', '"./reward"'))
    assert places([issue]) == [("reward", "stage measured")]


def test_a_folder_without_a_description_is_not_a_reward_model(scored_recipe: str, tmp_path: Path) -> None:
    (tmp_path / "reward" / DESCRIPTION).unlink()
    issue = issue_of(tmp_path, scored_recipe)
    assert places([issue]) == [("reward", "stage measured")]
    assert DESCRIPTION in issue.what


def test_a_reward_model_with_the_policys_or_an_unknown_tokenizer_is_accepted(
    scored_recipe: str, tmp_path: Path
) -> None:
    written(tmp_path, shown=NO_COMPLETION.replace("answer", "completion"))
    assert len(plan_pipeline(pipeline(tmp_path, scored_recipe)).due) == 2
    other_tokenizer(tmp_path / "policy")
    not_built = scored_recipe.replace('"./policy"', '"smollm2-135m"')  # its tokenizer is unknown before it is built
    assert len(plan_pipeline(pipeline(tmp_path, not_built)).due) == 2


def test_a_reward_model_that_a_stage_trains_from_a_model_with_another_tokenizer_is_refused(
    scored_recipe: str, tmp_path: Path
) -> None:
    written(tmp_path, pairs=GOOD)
    (tmp_path / "reward" / DESCRIPTION).unlink()
    rm = '[[stage]]\nname = "rm"\nkind = "reward_model"\nmodel.source = "./reward"\ndata.path = "pairs.jsonl"\n'
    text = scored_recipe.replace('[[stage]]\nname = "measured"', f'{rm}[[stage]]\nname = "measured"')
    text = text.replace('model = "./reward"', 'model = "stage:rm"')
    written(tmp_path, shown=NO_COMPLETION.replace("answer", "completion"))
    assert len(plan_pipeline(pipeline(tmp_path, text)).due) == 3
    other_tokenizer(tmp_path / "reward")
    assert issue_of(tmp_path, text).key == "scoring.rewards[1].model"


EARLIER = """\
[model]
source = "char"
char.alphabet = "0123456789+=\\n"
[sampling]
max_new_tokens = 64
[[stage]]
name = "a"
kind = "rl"
[[stage]]
name = "b"
"""
REWARD = "scoring.rewards = [{ kind ="
LATER = [  # kind, settings, key, part of the issue
    ("rl", 'model.source = "nofolder/xx"', "model.source", "nofolder/xx"),
    ("sft", 'model.source = "smolm"\ndata.path = "rows.jsonl"', "model.source", "smolm"),
    ("export", 'model.source = "./own"', "own", "config.json"),
    ("eval", 'eval.compare_with = "nofolder/xx"', "eval.compare_with", "nofolder/xx"),
    ("rl", 'trainer.device = "cuda"', "trainer.device", "GPU"),
    ("rl", 'model.lora = { rank = 2, targets = ["nope"] }', "model.lora.targets", "LlamaForCausalLM"),
    ("rl", 'critic.source = "./other"', "critic.source", "tokenizer"),
    ("rl", 'critic.source = "nofolder/xx"', "critic.source", "nofolder/xx"),
    ("eval", 'task = { kind = "reasoning_gym", name = "chain_summ" }', "task.name", "chain_summ"),
    ("eval", 'task.operators = "*"', "task", "'*'"),
    ("eval", 'task = { kind = "file", path = "asked.jsonl" }', "asked.jsonl, line 2", "vocabulary"),
    ("eval", "sampling.max_new_tokens = 505", "task", "prompt"),
    ("rl", f'{REWARD} "python", function = "nomod:score" }}]', "scoring.rewards.function", "nomod"),
    ("rl", f'{REWARD} "http", url = "https://h", auth_env = "NO_SUCH" }}]', "scoring.rewards.auth_env", "NO_SUCH"),
    ("sft", 'data.path = "rows.jsonl"', "data.path", "512"),
    ("sft", 'data.path = "talk.jsonl"', "talk.jsonl, line 1", "chat template"),
    ("export", 'export.path = "own"', "export.path", "export"),
]


@pytest.mark.parametrize(("kind", "settings", "key", "text"), LATER)
def test_a_later_stage_is_refused_before_an_earlier_one_runs(
    kind: str, settings: str, key: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_folder(llama(), tmp_path / "other")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine").touch()
    ask = '{"messages": [{"role": "user", "content": "1+%d"}], "completion": "2"}\n'
    written(
        tmp_path,
        # 3 + 600 characters, one token each, and the end token
        rows=json.dumps({"prompt": "1+1", "completion": "1" * 600}) + '\n{"prompt": "1+2", "completion": "3"}\n',
        talk=ask % 1 + ask % 2,
        asked='{"prompt": "1+1=", "answer": "2"}\n{"prompt": "a+1=", "answer": "2"}\n',
    )
    source = "" if "model.source" in settings else 'model.source = "stage:a"\n'
    critic = 'algorithm.advantage = "gae"\ncritic.kind = "own"\n' if "critic" in settings else ""
    (issue,) = refused(tmp_path, f'{EARLIER}kind = "{kind}"\n{source}{critic}{settings}\n')
    assert issue.key.startswith(key)
    assert issue.source == "stage b"
    assert text in issue.line


def test_a_stage_whose_model_is_not_built_yet_is_checked_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))
    later = EARLIER.replace('"b"', '"b"\nkind = "rl"\nmodel.source = "smollm2-135m"')
    plan_pipeline(pipeline(tmp_path, later))
    task = 'task = { kind = "reasoning_gym", name = "chain_summ" }\n'
    (issue,) = refused(tmp_path, later + task)
    assert places([issue]) == [("task.name", "stage b")]
    written(tmp_path, pairs=EQUAL)
    dpo = later.replace('kind = "rl"\nmodel', 'kind = "dpo"\ndata.path = "pairs.jsonl"\ndata.max_tokens = 2\nmodel')
    assert refused(tmp_path, dpo)[0].key == "pairs.jsonl, line 3"
    assert not list((tmp_path / "cache").glob("smollm2*"))
