"""Programs are graded by their values: no other behaviour passes a test, and none makes a sample invalid."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.sandboxes import need_bubblewrap
from tidemill.config.sandbox import SandboxConfig
from tidemill.config.task import RewardConfig
from tidemill.core.errors import UserError
from tidemill.core.records import Prompt, SampleId
from tidemill.scoring import code_tests
from tidemill.scoring.batch_rewards import RewardInput
from tidemill.scoring.code_tests import CodeTests

ADD = [{"function": "add", "arguments": [a, b], "result": a + b} for a, b in ((1, 2), (30, 40), (-5, 5))]
DOUBLE = [{"input": "3\n", "output": "6\n"}, {"input": "50\n", "output": "100\n"}]
SANDBOX = SandboxConfig(memory_mb=128, cpu_s=2.0, wall_s=4.0)


def sample_of(completion: str, tests: list[dict[str, Any]], text: str = "") -> RewardInput:
    prompt = Prompt(prompt_id="p", token_ids=b"", text=text, answer="", metadata={"tests": tests})
    sample_id = SampleId(run_seed=0, purpose="train", prompt_id="p", epoch=0, index=0)
    return RewardInput(prompt=prompt, completion=completion, completion_tokens=1, sample_id=sample_id)


def graded(program: str, tests: list[dict[str, Any]], **settings: Any) -> float:
    need_bubblewrap()
    return CodeTests(RewardConfig(kind="tests", **settings), SANDBOX)(sample_of(program, tests))


RIGHT: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "function": ("def add(a, b):\n    return a + b\n", ADD),
    "function that prints": ("def add(a, b):\n    print('adding')\n    return a + b\n", ADD),
    "last block": ("First:\n```python\nx\n```\nBetter:\n```python\ndef add(a, b): return a + b\n```\nDone.", ADD),
    "program": ("print(int(input()) * 2)", DOUBLE),
    "trailing spaces": ("print(int(input()) * 2, '  ')", DOUBLE),
    "float": ("def third(): return 1 / 3", [{"function": "third", "result": 0.333333333}]),
    "structure": (
        "def made(): return {'a': [1, 2.0, None, 'x']}",
        [{"function": "made", "result": {"a": [1, 2.0, None, "x"]}}],
    ),
}

WRONG: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "nothing": ("", ADD),
    "syntax error": ("def add(a, b:", ADD),
    "wrong value": ("def add(a, b): return a - b", ADD),
    "true is not one": ("def one(): return True", [{"function": "one", "result": 1}]),
    "exit at once": ("import sys; sys.exit(0)", ADD),
    "exit without clean-up": ("import os; os._exit(0)", ADD),
    "print and exit": ("import os\nprint(3, flush=True); os._exit(0)", ADD),
    "print at the exit": ("import atexit\natexit.register(print, 3)\ndef add(a, b): return 0", ADD),
    "equal to everything": (
        "class Same(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Same(3)",
        ADD,
    ),
    "replace json": ("import json\njson.dumps = lambda value: '3'\ndef add(a, b): return 0", ADD),
    "replace equality": ("import builtins\nbuiltins.print = lambda *x: None\ndef add(a, b): return 0", ADD),
    "read the tests": ("import sys, os\nfor each in os.listdir('/work'): print(open(each).read())\n", ADD),
    "search the frames": (
        "import sys\ndef add(a, b):\n    frame = sys._getframe()\n    while frame:\n        if 'result' in str(frame.f_locals.get('given', '')): return eval(str(frame.f_locals['given']['result']))\n        frame = frame.f_back\n    return 0",
        ADD,
    ),
    "search memory": (
        "import gc\ndef add(a, b):\n    return next((o['result'] for o in gc.get_objects() if isinstance(o, dict) and 'result' in o), 0)",
        ADD,
    ),
    "start-up file": (
        "open('/work/sitecustomize.py', 'w').write('print(3)')\nopen('/work/json.py', 'w').write('dumps = lambda x: 3')\ndef add(a, b): return 0",
        ADD,
    ),
    "path file": (
        "import os\nopen(os.path.dirname(os.__file__) + '/x.pth', 'w').write('import os')\ndef add(a, b): return 0",
        ADD,
    ),
    "test configuration": (
        "open('/work/conftest.py', 'w').write('import os; os._exit(0)')\ndef add(a, b): return 0",
        ADD,
    ),
    "kill the parent": ("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(-1, signal.SIGKILL)", ADD),
    "close the output": ("import os\nos.close(1)\ndef add(a, b): return a + b", ADD),
    "loop": ("while True: pass", ADD),
    "sleep": ("import time; time.sleep(100)", ADD),
    "memory": ("x = bytearray(1 << 30)\ndef add(a, b): return a + b", ADD),
    "output": ("def add(a, b):\n    print('x' * (3 << 20))\n    return a + b", ADD),
    "deep result": ("def add(a, b):\n    x = []\n    for _ in range(900): x = [x]\n    return x", ADD),
    "not a number": ("def add(a, b): return float('nan')", ADD),
    "input is not enough": ("print(6)", DOUBLE),
    "fork bomb": ("import os\nwhile True: os.fork()", ADD),
    "raise exit": ("def add(a, b): raise SystemExit(0)", ADD),
    "a number that is no float": ("def third(): return 10 ** 400", [{"function": "third", "result": 0.333}]),
    "folder instead of the program": (
        "import os\nos.remove('program.py'); os.mkdir('program.py'); print(int(input()) * 2)",
        DOUBLE,
    ),
    "closed folder": ("import os\nprint(int(input()) * 3)\nos.chmod('/work', 0)", DOUBLE),
    "files up to the limit": (
        "print(int(input()) * 3)\nfor each in range(10000): open(f'/work/{each}', 'w').close()",
        DOUBLE,
    ),
    "stop": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", ADD),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_passes(name: str) -> None:
    assert graded(*RIGHT[name]) == 1.0


@pytest.mark.parametrize("name", WRONG)
def test_a_program_that_only_seems_right_gets_nothing(name: str) -> None:
    # Those that do nothing else are not waited for as long.
    assert graded(*WRONG[name], timeout_s=1.0 if name in ("loop", "sleep", "stop") else 3.0) == 0.0


def test_a_share_of_the_tests_counts_if_wanted() -> None:
    tests = [*ADD, {"function": "add", "arguments": [1, 1], "result": 3}]

    assert graded(RIGHT["function"][0], tests) == 0.0
    assert graded(RIGHT["function"][0], tests, partial=True) == 0.75


@pytest.mark.parametrize("after", ["os.chmod('/work', 0)", "os.remove('program.py'); os.mkdir('program.py')"])
def test_a_program_that_spoils_its_folder_fails_the_other_tests(after: str) -> None:
    """They are failures, never a sample without a reward."""
    program = f"import os\nprint(int(input()) * 2)\n{after}"

    assert 0 < graded(program, DOUBLE, partial=True) <= 1


def test_the_time_of_a_sample_is_limited_over_all_tests() -> None:
    began = time.monotonic()

    assert (
        graded("import time\ntime.sleep(1)\nprint(int(input()) * 2)", DOUBLE * 10, timeout_s=1.5, partial=True) <= 0.1
    )
    assert time.monotonic() - began < 6


def test_the_program_may_continue_the_prompt() -> None:
    need_bubblewrap()
    sample = sample_of(" a + b\n", ADD, "def add(a, b):\n    return")

    assert CodeTests(RewardConfig(kind="tests", with_prompt=True), SANDBOX)(sample) == 1.0


@pytest.mark.parametrize(
    "tests",
    [
        None,
        [],
        [{}],
        [{"function": "f"}],
        [{"input": "1"}],
        [{"function": "f", "output": "1"}],
        [{"functoin": "f"}],
        "text",
    ],
)
def test_malformed_tests_are_refused(tests: object) -> None:
    with pytest.raises(UserError, match="tests"):
        code_tests.tests_of({} if tests is None else {"tests": tests})
