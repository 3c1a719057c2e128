"""Prompts, plans, tokens and reports for tests, and a fake model whose output is a function of its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from tidemill.controller.in_flight import InFlight, SamplingPlan, plan_groups
from tidemill.core.records import (
    Completion,
    Finish,
    GenerateRequest,
    LogprobBuffer,
    Message,
    PolicyVersion,
    Prompt,
    SampleId,
    SamplingParams,
    TokenDelta,
    WorkerReport,
    WorkerStatus,
    pack_logprobs,
    pack_tokens,
    unpack_tokens,
)

VOCABULARY = 50
MAX_NEW = 12
V3 = PolicyVersion(number=3, digest="a")
V3_AGAIN = PolicyVersion(number=3, digest="b")  # recomputed after a restart, slightly different


def digest_of(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=6).hexdigest()


def number(*parts: object) -> int:
    return int(digest_of(*parts), 16)


def make_prompt(name: str) -> Prompt:
    return Prompt(prompt_id=name, token_ids=pack_tokens(list(name.encode())), text=name, answer="7")


def make_id(name: str = "p0", index: int = 0) -> SampleId:
    return SampleId(run_seed=0, purpose="train", prompt_id=name, epoch=0, index=index)


def make_delta(**changes: Any) -> TokenDelta:
    tokens = changes.pop("tokens", [1, 2])
    fields: dict[str, Any] = {
        "sample_id": make_id(),
        "lease_id": "lease",
        "attempt": 1,
        "start": 0,
        "token_ids": pack_tokens(tokens),
        "logprobs": pack_logprobs([-1.0] * len(tokens)),
        "version": V3,
    }
    return TokenDelta(**{**fields, **changes})


SAMPLING = SamplingParams(max_new_tokens=8)
PROMPTS = [(0, make_prompt("p0")), (0, make_prompt("p1")), (1, make_prompt("p0"))]


def make_report(*deltas: TokenDelta) -> WorkerReport:
    status = WorkerStatus(worker_id="w", version=3, running=0, queued=0, free_slots=1, tokens_per_s=0.0, engine="fake")
    return WorkerReport(lease_id="lease", deltas=deltas, status=status)


GROUPS = plan_groups(PROMPTS, first_position=9, from_version=3)
"""Groups of step 4: three groups of two samples."""
FIRST = 18
"""The ordinal of their first sample."""


def make_plan(group_size: int = 2, seed: int = 0, *, exact: bool = True) -> SamplingPlan:
    return SamplingPlan(purpose="train", run_seed=seed, group_size=group_size, sampling=SAMPLING, exact_version=exact)


def make_prompts() -> list[Prompt]:
    return [prompt for _, prompt in PROMPTS]


def make_in_flight(**changes: Any) -> InFlight:
    in_flight = InFlight(make_plan(**changes), version_number=3)
    in_flight.open(GROUPS, make_prompts())
    return in_flight


def prompt_of(position: int) -> tuple[int, Prompt]:
    """The (epoch, prompt) at a position."""
    epoch, prompt = PROMPTS[position % 3]
    return epoch + 2 * (position // 3 - 3), prompt


def completion(sample_id: SampleId, version: PolicyVersion, limit: int = MAX_NEW) -> tuple[list[int], Finish]:
    """The fake model's completion, a function of sample and weights."""
    length = 1 + number("length", sample_id.key, version.digest) % (limit + limit // 3)
    tokens = [number(sample_id.key, version.digest, at) % VOCABULARY for at in range(min(length, limit))]
    return tokens, "stop" if length <= limit else "length"


def turn_completion(request: GenerateRequest, version: PolicyVersion) -> tuple[list[int], Finish]:
    """The prefix, and the rest of the fake model's current turn: a function of context, branch and weights."""
    known = unpack_tokens(request.prefix_ids)
    turn = [*unpack_tokens(request.prompt_ids), *known[: request.turn_start]]
    key = number(request.sample_id.key, request.branch, turn, version.digest)
    most = request.limit - request.turn_start
    length = 1 + key % 7
    drawn = [number(key, at) % VOCABULARY for at in range(min(length, most))]
    return [*known[: request.turn_start], *drawn], "stop" if length <= most else "length"


def logprob(token: int) -> float:
    return -token / 16  # exact in float32


def logprobs_of(completion: Completion, version: PolicyVersion) -> LogprobBuffer:
    """The fake trainer's logprobs of a completion."""
    return pack_logprobs(
        logprob(number(version.digest, at, token) % VOCABULARY)
        for at, token in enumerate(unpack_tokens(completion.token_ids))
    )


class FakeCodec:
    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def encode_chat(
        self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()
    ) -> tuple[str, list[int]]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return (0,)


class FakePrompts:
    """An endless prompt source."""

    def __init__(self, prompts: int, held_out: int = 4) -> None:
        self.prompts, self._held_out = prompts, held_out

    def train_batch(self, step: int) -> Sequence[tuple[int, Prompt]]:
        return [(step // 3, make_prompt(f"q{(step * 7 + at) % 23}")) for at in range(self.prompts)]

    def held_out(self, limit: int | None = None) -> Sequence[Prompt]:
        return [make_prompt(f"h{at}") for at in range(self._held_out)][:limit]
