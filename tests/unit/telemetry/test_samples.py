from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from tests.fabricated_run import decode, make_prompt, make_trajectory
from tests.trajectories import agent_trajectory, trajectory
from tidemill.core.records import (
    Call,
    PolicyVersion,
    Reward,
    SampleUpdate,
    Segment,
    SourceRun,
    Turn,
    VersionRun,
    pack_logprobs,
    pack_tokens,
)
from tidemill.telemetry.sample_files import TokenTexts, chosen, read_samples, sample_line, write_samples

PROMPT = make_prompt("1 + 1 =", "2")


def test_a_text_is_cut_at_token_borders() -> None:
    pieces = {1: "12", 2: " +", 3: "é", 9: ""}
    texts = TokenTexts(lambda ids: pieces[ids[0]])
    assert texts.split([1, 2, 3, 9], "12 +é") == ["12", " +", "é", ""]


def test_a_leading_space_decoded_only_inside_a_text_belongs_to_its_token() -> None:
    texts = TokenTexts(lambda ids: {1: "Hello", 2: "world"}[ids[0]])
    assert texts.split([1, 2], "Hello world") == ["Hello", " world"]


def test_a_character_of_several_tokens_belongs_to_the_first() -> None:
    texts = TokenTexts(lambda ids: {1: "a", 2: "\ufffd", 3: "\ufffd", 4: "b"}[ids[0]])
    assert texts.split([1, 2, 3, 4, 2, 3], "a🙂b🙂") == ["a", "🙂", "", "b", "🙂", ""]


def test_tokens_that_do_not_match_the_text_keep_their_own_texts() -> None:
    texts = TokenTexts(lambda ids: {1: "a", 2: "b"}[ids[0]])
    assert texts.split([1, 2], "something else") == ["a", "b"]
    assert texts.split([1, 2], "ab and more") == ["a", "b"]


def test_each_token_is_decoded_once() -> None:
    calls: list[int] = []

    def counted(ids: Sequence[int]) -> str:
        calls.append(ids[0])
        return "x"

    texts = TokenTexts(counted)
    texts.split([1, 1, 2], "xxx")
    texts.split([2, 1], "xx")
    assert calls == [1, 2]


def test_a_sample_of_a_row_without_an_answer_is_read_again(tmp_path: Path) -> None:
    prompt = msgspec.structs.replace(make_prompt("1"), answer=None)
    write_samples(tmp_path / "step_000001.jsonl", [sample_line(1, make_trajectory(prompt, "2"), prompt, None)])
    (sample,) = read_samples(tmp_path / "step_000001.jsonl")
    assert sample.answer is None


def test_a_samples_line_has_all_fields(tmp_path: Path) -> None:
    prompt = make_prompt("1 + 1 =", "2")
    reward = Reward(value=0.5, components={"exact": 1.0, "length": 0.0})
    trajectory = make_trajectory(prompt, " 2\n", logprobs=[-0.1, -0.25, -3.0], reward=reward, index=3, version=6)
    line = sample_line(7, trajectory, prompt, TokenTexts(decode))
    assert line == {
        "step": 7,
        "purpose": "train",
        "prompt_id": "p-1 + 1 =",
        "epoch": 0,
        "index": 3,
        "prompt": "1 + 1 =",
        "completion": " 2\n",
        "answer": "2",
        "token_ids": [1, 4, 0],
        "tokens": [" ", "2", "\n"],
        "logprobs": [-0.1, -0.25, -3.0],
        "reward": 0.5,
        "components": {"exact": 1.0, "length": 0.0},
        "valid": True,
        "reason": "",
        "finish": "stop",
        "weight": 1.0,
        "versions": [[6, "d0", 0, 3]],
        "sources": [],
        "advantage": None,
    }
    path = tmp_path / "step_000007.jsonl"
    write_samples(path, [line, line])
    first, second = read_samples(path)
    assert first == second
    assert (first.completion, first.tokens, first.logprobs) == (" 2\n", (" ", "2", "\n"), (-0.1, -0.25, -3.0))
    assert (first.reward, first.valid, first.length, first.components) == (0.5, True, 3, {"exact": 1.0, "length": 0.0})


def test_tokens_the_model_did_not_generate_have_no_logprob(tmp_path: Path) -> None:
    prompt = make_prompt("1")
    trajectory = msgspec.structs.replace(
        make_trajectory(prompt, ""),
        token_ids=pack_tokens([3, 4, 5, 6, 7]),
        segments=(
            Segment(role="prompt", start=0, end=1, trained=False),
            Segment(role="action", start=1, end=2, trained=True),
            Segment(role="observation", start=2, end=4, trained=False),
            Segment(role="action", start=4, end=5, trained=True),
        ),
        rollout_logprobs=pack_logprobs([-0.5, -2.0]),
    )
    line = sample_line(1, trajectory, prompt, None)
    assert line["logprobs"] == [-0.5, None, None, -2.0]
    assert (line["reward"], line["valid"], line["reason"], line["tokens"]) == (None, False, "not scored", [])
    path = tmp_path / "step_000001.jsonl"
    write_samples(path, [line])
    assert read_samples(path)[0].length == 2
    without = sample_line(1, msgspec.structs.replace(trajectory, rollout_logprobs=b""), prompt, None)
    assert without["logprobs"] == []


@pytest.mark.parametrize(
    ("count", "limit", "expected"),
    [(4, 0, [0, 1, 2, 3]), (4, 9, [0, 1, 2, 3]), (64, 8, [0, 8, 16, 24, 32, 40, 48, 56]), (5, 2, [0, 2]), (0, 3, [])],
)
def test_a_limit_takes_samples_evenly(count: int, limit: int, expected: list[int]) -> None:
    assert chosen(count, limit) == expected


def test_damaged_lines_are_skipped_and_missing_fields_have_defaults(tmp_path: Path) -> None:
    path = tmp_path / "step_000001.jsonl"
    path.write_text('{"step":1,"prompt":3}\n{"step":2,"logprobs":[null,-1]}\n{"reward":"?"}\n{"ste')
    (sample,) = read_samples(path)
    assert (sample.step, sample.prompt, sample.tokens, sample.logprobs) == (2, "", (), (None, -1.0))
    assert (sample.reward, sample.components, sample.valid) == (None, {}, False)


def test_a_turn_names_the_workers_and_versions_that_generated_it(tmp_path: Path) -> None:
    call = Call(call_id="1", name="add", arguments="{}", result="3")
    turns = (
        Turn(start=0, end=3, text="abc", observation="3", observation_end=4, reward=0.5, calls=(call,)),
        Turn(start=4, end=6, text="de", reward=1.0),
    )
    old, new = (PolicyVersion(number=number, digest="x") for number in (3, 4))
    agent = agent_trajectory(
        [1],
        [("action", [2, 3, 4]), ("observation", [5]), ("action", [6, 7])],
        [0.5, 1.0],
        turns=turns,
        episode_end="done",
        versions=(VersionRun(version=old, start=0, end=2), VersionRun(version=new, start=2, end=6)),
        sources=(SourceRun(source="vllm/spot-1", start=0, end=3), SourceRun(source="embedded/local", start=3, end=6)),
    )
    write_samples(tmp_path / "s.jsonl", [sample_line(1, agent, PROMPT, None)])
    (sample,) = read_samples(tmp_path / "s.jsonl")
    # Tokens 0-1 are of version 3, token 2 of version 4, both of spot-1; tokens 4-5 of version 4 and the local engine.
    assert [[(part.start, part.end, part.worker, part.version) for part in turn.segments] for turn in sample.turns] == [
        [(0, 2, "vllm/spot-1", 3), (2, 3, "vllm/spot-1", 4)],
        [(4, 6, "embedded/local", 4)],
    ]
    assert sample.turns[0].calls == (call,)
    assert [turn.reward for turn in sample.turns] == [0.5, 1.0]
    assert (sample.episode_end, sample.length) == ("done", 5)
    assert sample.transcript.splitlines() == [
        f"[prompt] {PROMPT.text}",
        "[turn 1, spot-1 v3, spot-1 v4, reward 0.5] abc",
        "[add({})] 3",
        "[turn 2, local v4, reward 1] de",
        "[end] done, reward 1.5",
    ]
    left_out = msgspec.structs.replace(sample, fault="the service is gone", episode_end="fault", valid=False)
    assert left_out.transcript.splitlines()[-1] == "[end] fault, the service is gone"


def test_a_single_completion_has_no_keys_of_turns() -> None:
    assert not {"turns", "episode_end", "fault"} & sample_line(1, trajectory([1], [2], 1.0), PROMPT, None).keys()


def test_a_line_names_who_made_each_token_and_what_the_update_computed(tmp_path: Path) -> None:
    old, new = (PolicyVersion(number=number, digest="x") for number in (3, 4))
    update = SampleUpdate(
        sample_id=trajectory([1], [2], 1.0).sample_id,
        advantage=0.5,
        token_advantages=pack_logprobs([0.25, 0.5, 0.75]),
        signal=True,
        trainer_logprobs=pack_logprobs([-0.5, -1.0, -1.5]),
        entropies=pack_logprobs([1.0, 2.0, 3.0]),
    )
    agent = agent_trajectory(
        [1],
        [("action", [2, 3]), ("observation", [5]), ("action", [6])],
        [0.5, 0.5],
        versions=(VersionRun(version=old, start=0, end=1), VersionRun(version=new, start=1, end=4)),
        sources=(
            SourceRun(source="vllm/spot-1", lease="l-7", start=0, end=3),
            SourceRun(source="embedded/local", lease="local", start=3, end=4),
        ),
    )
    line = sample_line(1, msgspec.structs.replace(agent, update=update), PROMPT, None)
    # Version 3 made token 0, version 4 the others; token 2 is an observation, which nothing is trained on.
    sources = [["vllm/spot-1", "l-7", 3, 0, 1], ["vllm/spot-1", "l-7", 4, 1, 3], ["embedded/local", "local", 4, 3, 4]]
    assert line["sources"] == sources
    assert (line["advantage"], line["signal"]) == (0.5, True)
    assert line["token_advantages"] == [0.25, 0.5, None, 0.75]
    assert line["trainer_logprobs"] == [-0.5, -1.0, None, -1.5]
    assert line["entropies"] == [1.0, 2.0, None, 3.0]
    write_samples(tmp_path / "s.jsonl", [line])
    (sample,) = read_samples(tmp_path / "s.jsonl")
    assert [each.name for each in sample.segments] == ["spot-1 v3", "spot-1 v4", "local v4"]
    assert sample.trainer_logprobs == (-0.5, -1.0, None, -1.5)
    untrained = sample_line(1, agent, PROMPT, None)
    assert untrained["advantage"] is None
    assert not {"signal", "token_advantages", "trainer_logprobs", "entropies"} & untrained.keys()
