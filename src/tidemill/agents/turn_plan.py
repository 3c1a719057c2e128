"""The calls that a turn asks for, the faults that end an episode, and the length of observations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from tidemill.agents.environment import Environment, ToolEnvironment
from tidemill.agents.instances import CallOutcome
from tidemill.agents.tools import FINISH, MistakeError, Tool, tools_of
from tidemill.config.agent import EnvConfig
from tidemill.config.sandbox import SandboxConfig
from tidemill.core.errors import UserError
from tidemill.core.protocols import TurnFormat
from tidemill.core.records import Call, Prompt, Record, ToolRequest, Turn

SCORE = "score"
MISTAKE = "error"
"""A mistake for a model whose vocabulary lacks characters of the whole message."""
SHORTEST = 8
"""Tokens that each of several results may have at least."""


class FaultError(Exception):
    """A fault of the environment or the infrastructure: the episode is left out of its group.

    Args:
        name: of the method that caused it; faults of one method are reported once.
        counted: towards `env.max_environment_errors`; not if the run was interrupted, or if an agent can cause it.
    """

    def __init__(self, text: str, name: str = "", *, counted: bool = True) -> None:
        self.name, self.counted = name or text, counted
        super().__init__(text)


class PlannedCall(Record):
    """One call of a turn."""

    index: int
    name: str  # of a tool, or "step" or "score"
    arguments: str  # JSON, checked
    timeout_s: float
    limit: int  # tokens of its result
    given: str = ""  # arguments as generated
    idempotent: bool = True
    mistake: str = ""  # why it is not made


def task_of(prompt: Prompt) -> dict[str, Any]:
    """The row of a prompt: `metadata["task"]`, or else its columns with `prompt` and `answer`."""
    task = prompt.metadata.get("task")
    if isinstance(task, dict):
        return task
    return {**prompt.metadata, "prompt": first_text(prompt), "answer": prompt.answer}


def first_text(prompt: Prompt) -> str:
    return prompt.messages[-1].content if prompt.messages else prompt.text


def task_seed(task: dict[str, Any]) -> int:
    """The row's `seed`, or a 63-bit hash of the row."""
    if isinstance(seed := task.get("seed"), int):
        return seed
    content = json.dumps(task, sort_keys=True, default=repr).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


class TurnPlanner:
    """Plans the calls of turns, and turns what they returned into the texts that the model sees.

    Raises:
        UserError: a tool of the class is wrong.
    """

    def __init__(
        self,
        environment: type[Environment],
        config: EnvConfig,
        format: TurnFormat,  # noqa: A002
        sandbox: SandboxConfig = SandboxConfig(),  # noqa: B008 -- frozen
    ) -> None:
        self._environment, self._config, self._format = environment, config, format
        with_tools = environment if issubclass(environment, ToolEnvironment) else None
        self.uses_tools = with_tools is not None
        self.tools: dict[str, Tool] = tools_of(environment, config.params, sandbox)
        self.scores = with_tools is not None and with_tools.score is not ToolEnvironment.score
        self._stateful = with_tools is None or with_tools.stateful
        self._finish = with_tools is not None and with_tools.offer_finish
        self.lacking: set[str] = set()  # characters of observations that the model's vocabulary lacks

    def calls(self, turn: Turn) -> list[PlannedCall]:
        """The calls that a turn asks for. The built-in `finish` is one of them."""
        if not self.uses_tools:
            return [self.step(turn.text)]
        return self._calls(self._format.parse(turn.text).calls)

    def earlier_calls(self, turn: Turn) -> list[tuple[PlannedCall, CallOutcome]]:
        """Calls that restore the state after an earlier turn, and what they returned then. A call whose deadline fired
        has left no trace: its process was killed."""
        if not self._stateful:
            return []
        if not self.uses_tools:
            if turn.timeouts:
                return []
            step = self.step(turn.text)
            return [(step, CallOutcome(index=0, text=turn.observation, reward=turn.reward))]
        planned = self._calls([ToolRequest(name=call.name, arguments=call.arguments) for call in turn.calls])
        pairs = [(each, self.recorded(each, call)) for each, call in zip(planned, turn.calls, strict=True)]
        return [(each, outcome) for each, outcome in pairs if self.restores(each, outcome)]

    def restores(self, planned: PlannedCall, outcome: CallOutcome) -> bool:
        """Whether a finished call is repeated to restore the state."""
        return planned.idempotent and not planned.mistake and outcome.error != "late" and not self.finishes(planned)

    def step(self, text: str) -> PlannedCall:
        return PlannedCall(
            index=0,
            name="step",
            arguments=json.dumps({"action": text}),
            idempotent=self._environment.idempotent,
            timeout_s=self._config.call_timeout_s,
            limit=self._config.observation_tokens,
        )

    def score(self, index: int, answer: str) -> PlannedCall:
        return PlannedCall(
            index=index,
            name=SCORE,
            arguments=json.dumps({"answer": answer}),
            timeout_s=self._config.call_timeout_s,
            limit=self._config.observation_tokens,
        )

    def answer(self, planned: list[PlannedCall], turn: Turn) -> str | None:
        """The final answer of an agent with tools, without thinking; None if the turn is not the last one."""
        if not planned:  # nothing was called
            return self._format.parse(turn.text).text if self.uses_tools else None
        finishing = [each for each in planned if self.finishes(each)]
        return str(json.loads(finishing[0].arguments)["answer"]) if finishing else None

    def finishes(self, planned: PlannedCall) -> bool:
        return self._finish and planned.name == FINISH and not planned.mistake

    def settle(self, planned: PlannedCall, outcome: CallOutcome) -> CallOutcome:
        """With the text that the model sees, cleaned and cut. A score stays as it is, also one that failed.

        Raises:
            FaultError: the method returned a wrong result.
        """
        name = f"{self._environment.__name__}.{planned.name}"
        if planned.name == SCORE:
            return outcome
        if outcome.error == "invalid":
            raise FaultError(outcome.text, name)
        head, tail, reward = outcome.text, outcome.tail, outcome.reward
        cleaned = outcome.cleaned
        if outcome.error:  # an agent must not gain by an exception
            reward = min(0.0, self._environment.lowest_reward)
            head = f"error: {head}"
            if not self._expresses(head + tail):
                head, tail = MISTAKE if self._expresses(MISTAKE) else "", ""
        elif not self._expresses(head + tail):
            head, tail, cleaned = self._known(head), self._known(tail), True
        text, cut = self._shortened(head, tail, outcome.cut, planned.limit)
        return msgspec.structs.replace(outcome, text=text, tail="", cut=cut, cleaned=cleaned, reward=reward)

    def record(self, planned: PlannedCall, outcome: CallOutcome, call_id: str) -> Call:
        result = outcome.text if self.uses_tools else msgspec.json.encode(outcome).decode()
        return Call(
            call_id=call_id,
            name=planned.name,
            arguments=planned.given or planned.arguments,
            result=result,
            error=bool(outcome.error),
            late=outcome.error == "late",
        )

    def recorded(self, planned: PlannedCall, call: Call) -> CallOutcome:
        """What a call in the journal returned."""
        if not self.uses_tools:
            return msgspec.json.decode(call.result, type=CallOutcome)
        error: Literal["", "raised", "late"] = "late" if call.late else "raised" if call.error else ""
        return CallOutcome(index=planned.index, text=call.result, error=error)

    def _calls(self, requests: Sequence[ToolRequest]) -> list[PlannedCall]:
        """The calls of one turn, whose results share the observation."""
        limit = max(SHORTEST, self._config.observation_tokens // max(len(requests), 1))
        return [self._call(index, request, limit) for index, request in enumerate(requests)]

    def _call(self, index: int, request: ToolRequest, limit: int) -> PlannedCall:
        mistake, arguments = request.error, ""
        tool = self.tools.get(request.name)
        if not mistake and tool is None:
            mistake = f"there is no tool {request.name}; the tools are {', '.join(self.tools)}"
        elif not mistake and tool is not None:
            try:
                arguments = tool.check(request.arguments)
            except MistakeError as error:
                mistake = str(error)
        options = tool.options if tool is not None else None
        return PlannedCall(
            index=index,
            name=request.name,
            arguments=arguments,
            given=request.arguments,
            idempotent=options is None or options.idempotent,
            timeout_s=(options and options.timeout_s) or self._config.call_timeout_s,
            limit=limit,
            mistake=mistake,
        )

    def _expresses(self, text: str) -> bool:
        """Whether the model's vocabulary can express a text."""
        try:
            self._format.encode_text(text)
        except UserError:
            return False
        return True

    def _known(self, text: str) -> str:
        """A text without the characters that the model's vocabulary lacks."""
        lacking = {character for character in set(text) if not self._expresses(character)}
        self.lacking |= lacking
        return "".join(character for character in text if character not in lacking)

    def _shortened(self, head: str, tail: str, cut: int, limit: int) -> tuple[str, int]:
        """At most `limit` tokens of a text that may lack `cut` characters between its head and tail; and the number of
        characters that it lacks then. The middle of a longer text is replaced by the number of tokens or characters
        cut."""
        ids = self._format.encode_text(head + tail)
        if not cut and len(ids) <= limit:
            return head, 0
        first, last = (self._format.encode_text(head), self._format.encode_text(tail)) if cut else (ids, ids)
        characters = len(head) + cut + len(tail)
        keep = limit
        while keep > 0:
            start = self._format.decode(first[: (keep + 1) // 2])
            end = self._format.decode(last[max(0, len(last) - keep // 2) :])
            lacks = max(1, characters - len(start) - len(end))
            middle = f"\n[{lacks} characters cut]\n" if cut else f"\n[{len(ids) - keep} tokens cut]\n"
            shortened = start + (middle if self._expresses(middle) else "") + end
            excess = len(self._format.encode_text(shortened)) - limit
            if excess <= 0:
                return shortened, lacks
            keep -= excess
        shortened = self._format.decode(first[:limit])
        return shortened, characters - len(shortened)
