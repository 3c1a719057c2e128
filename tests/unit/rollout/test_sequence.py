"""A sample inside an engine, with turns."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import msgspec
import pytest

from tests.engine_requests import request
from tidemill.core.records import PolicyVersion, unpack_tokens
from tidemill.rollout.sequence import Sequence

VERSION = PolicyVersion(number=3, digest="third")
PROMPT = [20, 21, 22]


def text(token_ids: Seq[int]) -> str:
    """Token 0 is "a"."""
    return "".join(chr(ord("a") + token) for token in token_ids)


def sequence(prefix: str = "", *, context: int = 40, strings: tuple[str, ...] = (), **fields: Any) -> Sequence:
    one = request(PROMPT, prefix=[ord(letter) - ord("a") for letter in prefix], stop_strings=strings)
    return Sequence(msgspec.structs.replace(one, **fields), context)


def generate(subject: Sequence, letters: str) -> str | None:
    for letter in letters:
        assert subject.finish is None
        subject.append(ord(letter) - ord("a"), -1.0, text)
    return subject.finish


def test_a_stop_string_of_prompt_or_observation_does_not_end_a_turn() -> None:
    assert generate(sequence(strings=("uvw",)), "a") is None  # the prompt is "uvw"
    observed = sequence("abxyz", observations=((2, 5),), strings=("xyz",))
    assert generate(observed, "pq") is None
    assert generate(observed, "xyz") == "stop"


@pytest.mark.parametrize(("prefix", "turn"), [("abx", "yz"), ("abxy", "z")])
def test_a_stop_string_begins_in_the_turn_not_before(prefix: str, turn: str) -> None:
    after = sequence(prefix, observations=((2, len(prefix)),), strings=("xyz",))
    assert generate(after, turn + "pq") is None
    interrupted = sequence(prefix, observations=((0, 2),), strings=("xyz",))  # the turn began at "x"
    assert generate(interrupted, turn) == "stop"


def test_the_limit_counts_from_the_prompt() -> None:
    subject = sequence("abcdef", observations=((4, 6),), limit=8)  # max_new_tokens is 12
    assert subject.room == 2
    assert generate(subject, "gh") == "length"
    assert sequence("abcdef", observations=((4, 6),)).room == 6
    assert sequence("abcdef", observations=((4, 6),), limit=50, context=11).room == 2  # 3 + 6 tokens are known


def test_deltas_start_after_offset_and_prefix() -> None:
    subject = sequence("abc", observations=((1, 3),), offset=10)
    generate(subject, "de")
    first = subject.flush(VERSION)
    generate(subject, "f")
    second = subject.flush(VERSION)
    assert first is not None and second is not None
    assert (first.start, unpack_tokens(first.token_ids)) == (13, [3, 4])
    assert (second.start, unpack_tokens(second.token_ids)) == (15, [5])
    assert subject.flush(VERSION) is None


def test_each_branch_has_its_noise() -> None:
    assert sequence().seed == sequence(branch=0, offset=5).seed != sequence(branch=1).seed


def test_span_end_is_that_of_the_span_of_the_next_token() -> None:
    subject = sequence("abcdef", observations=((1, 2), (4, 6)))  # tokens: 0-2 prompt, 4 and 7-8 observed
    ends = {}
    for subject.computed in range(9):
        ends[subject.computed] = subject.span_end
    assert ends == {0: 3, 1: 3, 2: 3, 3: 0, 4: 5, 5: 0, 6: 0, 7: 9, 8: 9}
    subject.computed = 9
    assert subject.span_end == 0
