"""The protocol between an environment and the program of another package: results, mistakes, faults, lost programs."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.sandboxes import need_bubblewrap
from tidemill.agents.adapters import connection, install
from tidemill.agents.adapters.connection import Connection
from tidemill.agents.adapters.install import PROGRAMS, adapter_python
from tidemill.agents.environment import AgentMistake, ProgramLostError
from tidemill.config.sandbox import SandboxConfig
from tidemill.core.errors import UserError

FAKE = Path(__file__).parent / "programs" / "serve_fake.py"
TASK = {"prompt": "go"}


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of which `fake` is one."""
    shutil.copytree(PROGRAMS, tmp_path / "programs")
    shutil.copy(FAKE, tmp_path / "programs")
    monkeypatch.setattr(connection, "PROGRAMS", tmp_path / "programs")
    monkeypatch.setattr(connection, "CLOSE_S", 1.0)


@pytest.fixture
def opened(programs: None) -> Iterator[Connection]:
    found = Connection("fake", {}, python=sys.executable)
    yield found
    found.close()


def test_episodes_are_played_to_their_ends(opened: Connection) -> None:
    assert opened.call("reset", episode=1, task=TASK, seed=5).startswith("go 0.")
    ends = [opened.call("step", episode=1, action="x") for _ in range(3)]

    assert [text.split()[0] for text, _, _ in ends] == ["1", "2", "3"]
    assert [(reward, done) for _, reward, done in ends] == [(0.5, False), (0.5, False), (0.5, True)]
    opened.call("close", episode=1)


def test_an_episode_has_its_own_global_random_numbers(opened: Connection) -> None:
    def played(episode: int, *, beside: bool) -> list[str]:
        texts = [opened.call("reset", episode=episode, task=TASK, seed=9)]
        for _ in range(2):
            if beside:
                opened.call("reset", episode=99, task=TASK, seed=3)
                opened.call("step", episode=99, action="x")
            texts.append(opened.call("step", episode=episode, action="x")[0])
        return texts

    assert played(1, beside=True) == played(2, beside=False)


def test_mistakes_are_the_agents_and_faults_are_not(opened: Connection) -> None:
    opened.call("reset", episode=1, task=TASK, seed=5)

    with pytest.raises(AgentMistake, match=r"^not like this$"):
        opened.call("step", episode=1, action="mistake")
    with pytest.raises(AgentMistake, match=r"^ValueError: bad$"):
        opened.call("step", episode=1, action="raise")
    with pytest.raises(UserError, match="the game is broken"):
        opened.call("step", episode=1, action="fault")
    assert opened.call("step", episode=1, action="x")[0].startswith("1 ")


def test_texts_of_any_kind_and_length_are_answers(opened: Connection) -> None:
    opened.call("reset", episode=1, task=TASK, seed=5)

    assert opened.call("step", episode=1, action="unclean") == ["a\0b\0", 0.5, True]
    text = opened.call("step", episode=1, action="long")[0]
    assert len(text) == (1 << 25) + len("\n[266445568 characters cut]\n")
    for action, said in {"unclean mistake": "^a\0$", "silent": "^Silent: its __str__ raised OSError$"}.items():
        with pytest.raises(AgentMistake, match=said):
            opened.call("step", episode=1, action=action)
    with pytest.raises(UserError, match="object"):  # not the agent's
        opened.call("step", episode=1, action="object")


def test_a_program_that_ends_is_lost(opened: Connection) -> None:
    opened.call("reset", episode=1, task=TASK, seed=5)

    with pytest.raises(ProgramLostError, match="ended"):
        opened.call("step", episode=1, action="die")
    with pytest.raises(ProgramLostError):
        opened.call("step", episode=1, action="x")


def test_a_program_without_its_server_is_lost_and_says_so(opened: Connection) -> None:
    opened.call("reset", episode=1, task=TASK, seed=5)

    with pytest.raises(ProgramLostError, match="the server has ended"):
        opened.call("step", episode=1, action="server ends")


def test_what_a_program_starts_reaches_neither_its_messages_nor_its_memory(programs: None) -> None:
    need_bubblewrap()
    opened = Connection("fake", {}, python=sys.executable, sandbox=SandboxConfig())
    opened.call("reset", episode=1, task=TASK, seed=5)

    assert opened.call("step", episode=1, action="cheat")[0] == ""
    opened.close()


@pytest.mark.parametrize("answer", [[1], {"id": "1"}, {"value": 1}, 5])
def test_a_malformed_answer_loses_the_program(programs: None, tmp_path: Path, answer: object) -> None:
    (tmp_path / "programs" / "serve_fake.py").write_text(
        "import os, msgspec\n"
        "from multiprocessing.connection import Connection\n"
        "from adapter_program import _send\n"
        "sink = Connection(1, readable=False)\n"
        "_send(sink, {'id': 0, 'value': {}})\n"
        f"_send(sink, {answer!r})\n"
        "os.read(0, 1000); os.read(0, 1000)\n"
    )
    opened = Connection("fake", {}, python=sys.executable)

    with pytest.raises(ProgramLostError, match="wrong"):
        opened.call("step", episode=1, action="x")
    opened.close()


def test_a_call_without_an_answer_has_a_deadline(opened: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CALL_S", 0.3)
    opened.call("reset", episode=1, task=TASK, seed=5)

    with pytest.raises(ProgramLostError, match="no answer"):
        opened.call("step", episode=1, action="hang")


def test_calls_of_several_threads_run_at_the_same_time(opened: Connection) -> None:
    began_s = time.monotonic()
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: opened.call("call", episode=1, tool="t", arguments={"s": 0.5}), range(8)))

    assert answers == ["t 0.5"] * 8
    assert time.monotonic() - began_s < 3


@pytest.mark.parametrize(("start", "message"), [("fails", "ValueError: no such game"), ("ends", "it ended early")])
def test_a_program_that_does_not_start_says_why(programs: None, start: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Connection("fake", {"start": start}, python=sys.executable)


def test_a_program_that_never_answers_is_ended(programs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "programs" / "serve_fake.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setattr(connection, "TELL_S", 0.2)
    monkeypatch.setattr(connection, "START_S", 0.5)

    with pytest.raises(UserError, match=r"no answer within 0\.5 s"):
        Connection("fake", {}, python=sys.executable)


def test_a_program_in_a_sandbox_gets_its_files_and_variables(
    programs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_bubblewrap()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "note").write_text("hello")
    monkeypatch.setenv("TIDEMILL_SECRET", "forwarded")
    (tmp_path / "programs" / "serve_fake.py").write_text(
        "import os\nfrom adapter_program import *\n"
        "class Seen(EnvironmentAdapter):\n"
        "    async def describe(self):\n"
        "        return {'note': open('note').read(), 'variable': os.environ['TIDEMILL_SECRET'],"
        " 'files': sorted(os.listdir('/mnt'))}\n"
        "serve(Seen)\n"
    )
    params = {"files": str(tmp_path / "files"), "forward": "TIDEMILL_SECRET"}

    opened = Connection("fake", params, python=sys.executable, sandbox=SandboxConfig())

    assert opened.description == {"note": "hello", "variable": "forwarded", "files": ["programs", "python"]}
    opened.close()


def test_missing_things_are_named(programs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "REQUIREMENTS", tmp_path)
    (tmp_path / "gymnasium.txt").write_text("another==1.0\n")

    with pytest.raises(UserError, match=r"not installed") as raised:
        adapter_python("gymnasium", "")
    assert "tidemill env install gymnasium" in str(raised.value)
    with pytest.raises(UserError, match="nowhere does not exist"):
        adapter_python("gymnasium", "nowhere")
    with pytest.raises(UserError, match="is not a folder"):
        Connection("fake", {"files": "nowhere"}, python=sys.executable)
    with pytest.raises(UserError, match="TIDEMILL_UNSET is not set"):
        Connection("fake", {"forward": "TIDEMILL_UNSET"}, python=sys.executable)
