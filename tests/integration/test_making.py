"""Data files made by a model and its task, as the script makes them, and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.make_data import main
from tests.conftest import REPOSITORY
from tidemill.config.load import load_spec
from tidemill.config.task import DataConfig
from tidemill.core.records import unpack_tokens
from tidemill.envs.text import build_task
from tidemill.envs.text.data import load_demonstrations, load_pairs
from tidemill.models.catalog import resolve
from tidemill.models.codec import TextCodec, load_codec
from tidemill.runtime.batch_generation import BatchGenerator, CachedCompletions
from tidemill.runtime.data_generation import make_pairs

RECIPE = f"@{REPOSITORY / 'recipes' / 'char-addition.toml'}"
# An untrained model is hardly ever right: here a completion that begins with a digit is.
JUDGED = (RECIPE, "--trainer.threads=1", "--scoring.rewards=[{kind='regex', pattern='^[0-9]'}]", "--run.seed=5")


@pytest.fixture
def codec(session_cache: Path) -> TextCodec:
    return load_codec(resolve(load_spec([RECIPE]).model, progress=lambda _: None))


def held_out(codec: TextCodec) -> set[bytes]:
    spec = load_spec([RECIPE])
    task = build_task(spec.task, codec=codec, batch_prompts=8, seed=0, chat_template=False)
    return {prompt.token_ids for prompt in task.source.held_out()}


def test_demonstrations(tmp_path: Path, codec: TextCodec, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sft.jsonl"
    assert main(["demonstrations", "--out", str(path), RECIPE]) == 0
    assert "80 demonstrations in" in capsys.readouterr().out
    config = DataConfig(path=path, held_out_fraction=0, end_token=False)
    made = load_demonstrations(config, codec=codec, context_limit=256, chat_template=False)
    texts = [codec.decode(unpack_tokens(each.prompt_ids + each.completion_ids)) for each in made.train]
    assert all(eval(text.split("=")[0]) == int(text.split("=")[1]) for text in texts)
    assert all(text.endswith("\n") for text in texts)
    assert len(texts) == 80
    assert not {each.prompt_ids for each in made.train} & held_out(codec)


def test_demonstrations_to_evaluate_on(tmp_path: Path, codec: TextCodec) -> None:
    path, kept = tmp_path / "sft.jsonl", tmp_path / "held_out.jsonl"
    assert main(["demonstrations", "--out", str(path), RECIPE]) == 0
    assert main(["demonstrations", "--held-out", "--out", str(kept), RECIPE]) == 0
    made = load_demonstrations(
        DataConfig(path=path, held_out_path=kept), codec=codec, context_limit=256, chat_template=False
    )
    assert {each.prompt_ids for each in made.held_out} == held_out(codec)
    assert (len(made.train), len(made.held_out)) == (80, 20)


def test_pairs_are_the_same_again(tmp_path: Path, codec: TextCodec) -> None:
    paths = [tmp_path / name for name in ("one.jsonl", "other.jsonl")]
    for path in paths:
        asked = ("--samples", "6", "--prompts", "40", "--pairs-per-prompt", "2")
        assert main(["pairs", "--out", str(path), *asked, *JUDGED]) == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()
    rows = [json.loads(line) for line in paths[0].read_text().splitlines()]
    assert all(row["chosen"][0].isdigit() and row["chosen"].endswith(("\n", "<eos>")) for row in rows)
    assert all(not row["rejected"][0].isdigit() for row in rows)
    made = load_pairs(DataConfig(path=paths[0], end_token=False), codec=codec, context_limit=256, chat_template=False)
    assert len(made.train) + len(made.held_out) == len(rows)
    assert not {each.prompt_ids for each in (*made.train, *made.held_out)} & held_out(codec)
    # Every side is what the model wrote, token by token: it ended where a stop string, an end token or the limit of
    # three tokens ended it.
    ends = {codec.encode_completion("\n")[0], *codec.stop_token_ids}
    sides = [unpack_tokens(side) for pair in made.train for side in (pair.chosen_ids, pair.rejected_ids)]
    assert all(side[-1] in ends or len(side) == 3 for side in sides)
    assert not any(token in ends for side in sides for token in side[:-1])
    said = json.loads((tmp_path / "one.provenance.json").read_text())
    assert (said["rows"], said["seed"], said["prompts"], said["samples_per_prompt"]) == (len(rows), 5, 40, 6)
    assert said["weights_digest"] and said["config"]["task"]["kind"] == "arithmetic"
    asked_of = {row["prompt_id"] for row in rows}
    assert len(asked_of) <= 40 - said["prompts_never_right"] - said["prompts_always_right"]


def test_pairs_go_on_from_the_prompts_that_were_answered(
    tmp_path: Path, session_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, kept = load_spec(JUDGED, purpose="generate"), tmp_path / "answers.jsonl"
    asked: list[str] = []
    draw = BatchGenerator._draw

    async def counted(self: BatchGenerator, key: str, *rest: Any) -> CachedCompletions:
        asked.append(key)
        return await draw(self, key, *rest)

    def make(name: str) -> bytes:
        path = tmp_path / name
        make_pairs(
            spec,
            path,
            prompts=30,
            samples_per_prompt=6,
            pairs_per_prompt=2,
            progress=lambda _: None,
            answers=kept,
        )
        return path.read_bytes()

    monkeypatch.setattr(BatchGenerator, "_draw", counted)
    monkeypatch.setattr("tidemill.runtime.batch_generation.SAMPLES_AT_ONCE", 60)  # ten prompts
    whole = make("whole.jsonl")
    lines = kept.read_bytes().splitlines(keepends=True)
    assert len(asked) == len(lines) == 3
    kept.write_bytes(lines[0] + lines[1][:100])  # killed in the middle of a line
    assert make("resumed.jsonl") == whole
    assert asked[3:] == asked[1:3]


def test_a_file_that_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("precious")
    assert main(["demonstrations", "--out", str(path), RECIPE]) == 2
    assert "the file is there already" in capsys.readouterr().err
    assert path.read_text() == "precious"


def test_without_a_pair_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pairs.jsonl"
    assert main(["pairs", "--out", str(path), "--samples", "1", "--prompts", "8", *JUDGED]) == 2
    said = capsys.readouterr().err
    assert "none of 8 prompts was answered both right and wrong in 1 samples" in said
    assert "draw more samples" in said
    assert list(tmp_path.iterdir()) == []


def test_pairs_need_a_reward_that_is_right_or_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "judge.py").write_text("def score(prompt, completion, answer, metadata):\n    return 0.9\n")
    graded = f"--scoring.rewards=[{{kind='python', function='{tmp_path}/judge.py:score'}}]"
    out = tmp_path / "pairs.jsonl"
    assert main(["pairs", "--out", str(out), "--samples", "2", "--prompts", "4", RECIPE, graded]) == 2
    assert "this reward is graded" in capsys.readouterr().err
    assert not out.exists()


def test_a_misspelt_key_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pairs", "--out", str(tmp_path / "x"), RECIPE, "--task.digts=2"]) == 2
    assert "did you mean task.digits?" in capsys.readouterr().err
