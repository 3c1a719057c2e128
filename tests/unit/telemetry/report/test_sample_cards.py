from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from tests.fabricated_run import FabricatedRun
from tidemill.core.records import Call
from tidemill.telemetry.report.sample_cards import (
    LEGEND,
    SampleWindow,
    answer_pairs,
    before_and_after,
    best_and_worst,
    colour,
    level,
    report_samples,
    sample_card,
    verdict,
)
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.telemetry.sample_files import Sample, SampleSegment, SampleTurn


@pytest.mark.parametrize(
    ("probability", "expected"),
    [(1.0, 0), (0.95, 0), (0.94, 1), (0.8, 1), (0.5, 2), (0.2, 3), (0.05, 4), (0.049, 5), (1e-9, 5)],
)
def test_levels_follow_the_legend(probability: float, expected: int) -> None:
    assert level(math.log(probability) + 1e-12) == expected
    assert 0 <= expected < len(LEGEND)


def sample(
    text: str = "ab", reward: float | None = 1.0, prompt: str = "p", logprob: float = -0.1, **more: object
) -> Sample:
    fields = {
        "tokens": tuple(text),
        "logprobs": (logprob,) * len(text),
        "token_ids": tuple(range(len(text))),
        "valid": True,
    } | more
    return Sample(step=1, prompt=prompt, prompt_id=prompt, completion=text, reward=reward, **fields)  # type: ignore[arg-type]


def test_tokens_are_coloured_one_by_one() -> None:
    tokens = colour(sample("a\n", tokens=("a", "\n", ""), logprobs=(-0.01, -5.0, None)))
    assert [(token.text, token.level) for token in tokens] == [("a", 0), ("↵\n", 5)]
    assert tokens[0].title == "'a'  p 99 %, logprob -0.010"


def test_an_end_token_is_shown_as_a_sign() -> None:
    tokens = colour(sample("a", tokens=("a", ""), logprobs=(-0.01, -0.5)))
    assert [token.text for token in tokens] == ["a", "∎"]


@pytest.mark.parametrize("tokens", [(), ("x", "y")])
def test_without_fitting_tokens_the_completion_is_one_piece(tokens: tuple[str, ...]) -> None:
    (token,) = colour(sample("ab", tokens=tokens))
    assert (token.text, token.level) == ("ab", None)


def test_a_sample_without_logprobs_is_shown_uncoloured() -> None:
    assert [token.level for token in colour(sample("ab", logprobs=()))] == [None, None]
    assert sample_card(sample("ab", logprobs=())).logprob == "-"


def test_very_long_completions_are_shortened() -> None:
    card = sample_card(sample("x" * 1000))
    assert (len(card.tokens), card.left_out, card.sample.length) == (800, 200, 1000)


def test_the_worst_are_invalid_samples_and_confident_mistakes() -> None:
    unsure = sample(reward=0.0, prompt="unsure", logprob=-3.0)
    sure = sample(reward=0.0, prompt="sure", logprob=-0.1)
    right = sample(reward=1.0, prompt="right")
    broken = sample(reward=0.0, prompt="broken", valid=False, reason="raised")
    best, worst = best_and_worst(SampleWindow(steps=(1,), samples=(unsure, right, sure, broken)))
    assert [card.prompt.text for card in worst] == ["broken", "sure", "unsure"]
    assert [card.prompt.text for card in best] == ["right", "sure", "unsure"]


def test_each_prompt_is_shown_once_and_equal_rewards_have_no_worst() -> None:
    best, worst = best_and_worst(SampleWindow(samples=(sample(), sample(logprob=-2.0), sample(prompt="q"))))
    assert [card.prompt.text for card in best] == ["p", "q"] and worst == []
    assert best_and_worst(SampleWindow()) == ([], [])


@pytest.mark.parametrize(
    ("one", "kind", "share"),
    [
        (sample(reward=1.0, correct=True), "correct", None),
        (sample(reward=0.9, correct=False), "wrong", None),  # partial reward of a wrong answer
        (sample(reward=0.5), "scored", 75.0),  # (0.5 - -1) / (1 - -1)
        (sample(reward=-1.0), "scored", 0.0),
        (sample(reward=0.0, valid=False), "invalid", None),
        (sample(reward=None), "invalid", None),
    ],
)
def test_a_verdict_claims_correctness_only_where_the_reward_tells_it(
    one: Sample, kind: str, share: float | None
) -> None:
    found = verdict(one, -1.0, 1.0)
    assert (found.kind, found.share) == (kind, share)


def test_the_legend_names_the_ends_of_the_scale_of_the_pairs() -> None:
    first, last = window(sample("a", 0.25, "p")), window(sample("b", 1.5, "p"))
    table = before_and_after(first, last)
    assert (table.kinds, table.lowest, table.highest) == ({"scored"}, "0.25", "1.5")
    equal = before_and_after(first, first)
    assert (equal.lowest, equal.pairs[0].after_verdict.share) == ("", None)


def test_tokens_of_markers_are_muted() -> None:
    texts = ("<tool_", "call>", "{}", "</tool_call>", "<x>")
    card = sample_card(sample("".join(texts), tokens=texts, logprobs=(-0.1,) * 5))
    assert [token.mark for token in card.tokens] == [True, True, False, True, False]


def window(*samples: Sample) -> SampleWindow:
    return SampleWindow(samples=samples)


def test_held_out_prompts_with_changed_rewards_come_first() -> None:
    first = (sample("a", 1.0, "shots\n1 + 1"), sample("b", 0.0, "shots\n2 + 2"), sample("c", 1.0, "shots\n3 + 3"))
    last = (sample("d", 1.0, "shots\n1 + 1"), sample("e", 1.0, "shots\n2 + 2"), sample("f", 0.0, "shots\n3 + 3"))
    found = before_and_after(window(*first), window(*last, sample("g", 1.0, "shots\nnew")))
    assert [(pair.prompt.text, pair.before.completion, pair.after.completion) for pair in found.pairs] == [
        ("2 + 2", "b", "e"),
        ("3 + 3", "c", "f"),
        ("1 + 1", "a", "d"),
    ]
    assert found.remark == "1 of 3 gained reward, 1 lost"
    assert found.shared is not None and found.shared.text == "shots\n"


def test_prompts_with_nothing_in_common_stay_whole() -> None:
    first = (sample("a", 1.0, "x\ny"), sample("b", 0.0, "z\ny"))
    assert {pair.prompt.text for pair in before_and_after(window(*first), window(*first)).pairs} == {"x\ny", "z\ny"}
    only = window(sample("a", 1.0, "x\ny"))
    assert before_and_after(only, only).pairs[0].prompt.text == "x\ny"


def test_the_first_and_the_last_steps_make_the_windows(tmp_path: Path) -> None:
    found = report_samples(FabricatedRun(tmp_path).make())
    assert found.first.steps == (1, 2, 3) and found.last.steps == (18, 19, 20)
    assert found.evaluated_first.steps == (0,) and found.evaluated_last.steps == (20,)
    assert len(found.first.samples) == 3 * 64


@pytest.mark.parametrize(
    ("steps", "first", "last"), [(1, (1,), ()), (2, (1,), (2,)), (3, (1,), (3,)), (4, (1, 2), (3, 4))]
)
def test_windows_do_not_overlap(tmp_path: Path, steps: int, first: tuple[int, ...], last: tuple[int, ...]) -> None:
    run = RunDirectory(tmp_path)
    run.samples.mkdir()
    for step in range(1, steps + 1):
        (run.samples / f"step_{step:06d}.jsonl").write_text(f'{{"step":{step}}}\n')
    found = report_samples(run)
    assert (found.first.steps, found.last.steps) == (first, last)


def agent(*turns: SampleTurn, tokens: tuple[str, ...] = (), episode_end: str = "done") -> Sample:
    """A sample whose tokens are single characters; observations have no logprob."""
    generated = {at for turn in turns for at in range(turn.start, turn.end)}
    logprobs = tuple(-0.1 if at in generated else None for at in range(len(tokens)))
    return sample("".join(tokens), tokens=tokens, logprobs=logprobs, turns=turns, episode_end=episode_end)


def test_a_turn_is_coloured_and_cut_where_its_worker_changed() -> None:
    spot, local = (SampleSegment(start=0, end=2, worker="vllm/spot-3", version=4),), "embedded/local"
    first = SampleTurn(
        start=0, end=3, text="abc", observation="xy", reward=0.5, finish="length", timeouts=1,
        segments=(*spot, SampleSegment(start=2, end=3, worker=local, version=5)),
    )  # fmt: skip
    last = SampleTurn(start=5, end=6, text="d", segments=(SampleSegment(start=5, end=6, worker=local, version=5),))
    card = sample_card(agent(first, last, tokens=tuple("abcxyd"), episode_end="turns"))
    shown = [
        [(part.author, "".join(token.text for token in part.tokens)) for part in turn.parts] for turn in card.turns
    ]
    assert shown == [[("spot-3 v4", "ab"), ("local v5", "c")], [("local v5", "d")]]
    assert {token.level for turn in card.turns for part in turn.parts for token in part.tokens} == {1}
    assert [(turn.remark, turn.observation, turn.reward) for turn in card.turns] == [
        ("cut at its token limit, 1 timeout", "xy", "0.5"),
        ("", "", "0"),
    ]
    assert card.finish == "env.turns"


def test_a_completion_names_who_made_its_tokens() -> None:
    sources = (("vllm/spot-3", "l-1", 4, 0, 2), ("embedded/local", "local", 5, 2, 3))
    one = msgspec.structs.replace(sample("abc"), sources=sources)
    shown = [(part.author, "".join(token.text for token in part.tokens)) for part in sample_card(one).parts]
    assert shown == [("spot-3 v4", "ab"), ("local v5", "c")]
    unknown = sample_card(msgspec.structs.replace(one, tokens=()))  # the tokens do not match the text
    assert [(part.author, part.tokens[0].text) for part in unknown.parts] == [("spot-3 v4, local v5", "abc")]
    assert [part.author for part in sample_card(sample("abc")).parts] == [""]
    assert len(sample_card(sample("x" * 1000), whole=True).tokens) == 1000


def test_results_of_calls_replace_the_observation() -> None:
    call = Call(call_id="c", name="add", arguments="{}", result="x" * 700, error=True)
    turn = SampleTurn(start=0, end=1, text="a", observation="the same", calls=(call,))
    (card,) = sample_card(agent(turn, tokens=("a",))).turns
    assert (card.observation, card.reward) == ("", "")  # no turn of the episode has a reward
    assert (card.calls[0].error, len(card.calls[0].result)) == (True, 700)


def test_a_turn_without_known_tokens_is_one_piece() -> None:
    parts = (
        SampleSegment(start=0, end=1, worker="e/w", version=1),
        SampleSegment(start=1, end=2, worker="e/v", version=1),
    )
    (card,) = sample_card(agent(SampleTurn(start=0, end=2, text="ab", segments=parts))).turns
    assert [(part.author, part.tokens[0].text) for part in card.parts] == [("w v1, v v1", "ab")]


def test_the_tokens_shown_are_shared_by_the_turns() -> None:
    turns = [SampleTurn(start=at, end=at + 500, text="a" * 500) for at in (0, 500)]
    card = sample_card(agent(*turns, tokens=("a",) * 1000))
    assert [(len(turn.parts[0].tokens), turn.left_out) for turn in card.turns] == [(400, 100), (400, 100)]


def test_agents_are_compared_turn_by_turn() -> None:
    before, after = (agent(SampleTurn(start=0, end=1, text=text), tokens=(text,)) for text in "ab")
    (pair,) = before_and_after(window(before), window(after)).pairs
    assert [turn.text for turn in (*pair.before.turns, *pair.after.turns)] == ["a", "b"]
    line = {"prompt": "p", "completion": "a", "answer": "", "reward": 0.5, "correct": None}
    (pair,) = answer_pairs({"samples": [{**line, "turns": [{"start": 0, "end": 1, "text": "a"}]}]}).pairs
    assert [turn.text for turn in pair.after.turns] == ["a"]
