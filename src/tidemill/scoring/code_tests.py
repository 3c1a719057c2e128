"""The reward of programs: hidden tests, which are run in a sandbox and compared outside.

Only the inputs of a test enter the sandbox. Whatever the program does there (exits early, writes other files, prints
what it likes), it passes a test only by the right value.
"""

from __future__ import annotations

import json
import math
import re
import time
from contextlib import closing
from typing import Any

import msgspec

from tidemill.config.sandbox import SandboxConfig
from tidemill.config.task import RewardConfig
from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.sandbox import Sandbox, SandboxError, SandboxLostError, open_sandbox
from tidemill.scoring.batch_rewards import RewardInput

COLUMN = "tests"
ATTEMPTS = 2
"""At a sample whose sandbox fails."""
GRACE_S = 60.0
"""To start and end sandboxes, beyond the time of the tests."""
FENCE = re.compile(r"^[ \t]*```(python|py)?[ \t]*$", re.MULTILINE)
RELATIVE_TOLERANCE = 1e-6
# Reads the program and a call from standard input; its value is the last line of the output.
CALL = """\
import json, sys
given = json.load(sys.stdin)
names = {"__name__": "program"}
exec(compile(given["program"], "program.py", "exec"), names)
value = names[given["function"]](*given["arguments"])
print()
print(json.dumps(value))
"""


class CodeTest(Record, forbid_unknown_fields=True):
    """Of a program: its output for an input. Of a function: its result for arguments."""

    input: str = ""
    output: str | None = None
    function: str = ""
    arguments: list[Any] = []
    result: Any = msgspec.UNSET


class CodeTests:
    """Scores a sample by the tests in its row: 1 if it passes all, or the share that it passes."""

    def __init__(self, config: RewardConfig, sandbox: SandboxConfig) -> None:
        self._config, self._sandbox = config, sandbox

    def __call__(self, sample: RewardInput) -> float:
        """Raises SandboxLostError: no sandbox could be started; UserError: the row's tests are malformed."""
        tests = tests_of(sample.prompt.metadata)
        program = program_of(sample, with_prompt=self._config.with_prompt)
        for attempt in range(ATTEMPTS):
            try:
                with closing(open_sandbox(self._sandbox)) as sandbox:
                    passed, end_s = 0, time.monotonic() + self._config.longest_wait_s
                    for test in tests:
                        left_s = end_s - time.monotonic()
                        if left_s > 0 and _passes(sandbox, program, test, left_s):
                            passed += 1
                        elif not self._config.partial:  # one failure decides
                            break
                break
            except SandboxLostError:
                if attempt == ATTEMPTS - 1:
                    raise
        return passed / len(tests) if self._config.partial else float(passed == len(tests))


def tests_of(metadata: dict[str, Any]) -> list[CodeTest]:
    """The tests of a row.

    Raises:
        UserError: it has none, or they are malformed.
    """
    hint = 'give [{"input": ..., "output": ...}] or [{"function": ..., "arguments": [...], "result": ...}]'
    try:
        tests = msgspec.convert(metadata.get(COLUMN, []), list[CodeTest])
    except msgspec.ValidationError as error:
        raise UserError(f"{COLUMN} of a row: {error}", where="task", hint=hint) from None
    if not tests or not all(
        (each.output is None) == bool(each.function) == (each.result is not msgspec.UNSET) for each in tests
    ):
        raise UserError(f"a row has no {COLUMN}, or incomplete ones", where="task", hint=hint)
    return tests


def program_of(sample: RewardInput, *, with_prompt: bool) -> str:
    """The program of a completion: after the prompt, or its last fenced block, or all of it."""
    if with_prompt:
        return sample.prompt.text + sample.completion
    block, start = sample.completion, -1
    for fence in FENCE.finditer(sample.completion):  # not one pattern for a block, which takes quadratic time
        if start < 0:
            start = fence.end() + 1
        elif not fence[1]:
            block, start = sample.completion[start : fence.start()], -1
    return block


def _passes(sandbox: Sandbox, program: str, test: CodeTest, timeout_s: float) -> bool:
    """Whether a program passes in a sandbox in which it has run before; raises SandboxLostError."""
    try:
        if test.output is not None:
            sandbox.write("program.py", program.encode(errors="replace"))
            finished = sandbox.run(["python3", "-I", "program.py"], stdin=test.input.encode(), timeout_s=timeout_s)
            return finished.code == 0 and _lines(finished.stdout.decode(errors="replace")) == _lines(test.output)
        call = {"program": program, "function": test.function, "arguments": test.arguments}
        finished = sandbox.run(["python3", "-I", "-c", CALL], stdin=json.dumps(call).encode(), timeout_s=timeout_s)
    except SandboxLostError:
        raise
    except SandboxError:  # by what the program did to its files
        return False
    last = finished.stdout.decode(errors="replace").rstrip("\n").rpartition("\n")[2]
    try:
        return finished.code == 0 and _equal(json.loads(last), test.result)
    except (ValueError, RecursionError, OverflowError):
        return False


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _equal(found: Any, expected: Any) -> bool:
    """Equality of JSON values; floats within a relative tolerance."""
    if isinstance(expected, bool) or isinstance(found, bool):
        return found is expected
    if isinstance(expected, float) or isinstance(found, float):
        numbers = isinstance(found, int | float) and isinstance(expected, int | float)
        return numbers and math.isclose(found, expected, rel_tol=RELATIVE_TOLERANCE)
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(_equal, found, expected))
    if isinstance(expected, dict):
        same = isinstance(found, dict) and found.keys() == expected.keys()
        return same and all(_equal(found[key], value) for key, value in expected.items())
    return bool(found == expected)
