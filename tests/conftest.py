"""Fixtures and checks for all tests: one thread, no network, a separate cache, no process left alive.

`TIDEMILL_CACHE` points to an empty folder of the test session. A test that needs the converted SmolLM2 (about 17 s to
make) asks for `shared_cache`, a folder that survives sessions: `.cache/tidemill` in the repository, or
`TIDEMILL_TEST_CACHE`.
"""

from __future__ import annotations

import os
import sys

# Before torch is imported: with more threads, concurrent processes slow each other down by an order of magnitude.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_MODE": "offline"}
os.environ |= {"TOKENIZERS_PARALLELISM": "false"}

import gc
import multiprocessing
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.nodeid import NodeId
from hypothesis import settings

from tests.forked import kill_forks, stop_fork_servers
from tests.rotation import DAY

# The same examples every time. `pytest tests/property --hypothesis-profile=explore` draws new ones, and more.
settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=25)
settings.register_profile("explore", max_examples=1000, deadline=None)
settings.load_profile("fixed")

REPOSITORY = Path(__file__).resolve().parent.parent
# Inherited by every process that a test starts, also by orphans and pytest's workers.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["TIDEMILL_TEST_SESSION"] = uuid.uuid4().hex
SESSION_MARK = f"TIDEMILL_TEST_SESSION={os.environ['TIDEMILL_TEST_SESSION']}"
EXIT_GRACE_S = 3.0

# Tests of the packages with a coverage limit. Tracing the others would cost minutes, and reaches no other lines.
TRACED = [
    REPOSITORY / "tests" / name
    for name in (
        *("unit/algos", "unit/config", "unit/controller", "unit/core"),
        *("property/algos", "property/config", "property/test_fleet_faults.py", "property/test_ledger_machine.py"),
        *("unit/cli/test_failure.py", "integration/test_first_hour.py"),  # core.errors, algos.user_functions
    )
]

_left_behind = pytest.StashKey[list[str]]()


def pytest_configure() -> None:
    """Python handles SIGINT where it was ignored by the parent (`nohup make test &`), as tests and their children need.

    The children of a process that ignores a signal ignore it, too.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--chaos-rounds", type=int, default=1, help="factor on the number of faults that tests/chaos injects"
    )


def pytest_report_header() -> str:
    return f"day: {DAY} (TIDEMILL_TEST_DAY={DAY} repeats what this day has of the cases that change from day to day)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("loadgroup", False):  # in a worker of pytest-xdist
        for item in items:
            if (group := item.get_closest_marker("xdist_group")) is not None:
                _show_group(item, group.args[0])
    if config.pluginmanager.hasplugin("_cov"):
        for item in items:
            if not any(item.path.is_relative_to(path) for path in TRACED):
                item.add_marker("no_cover")


def _show_group(item: pytest.Item, group: str) -> None:
    """One worker gets all that end in `@group`. pytest-xdist 3.8 writes this where pytest 9.2 does not read it."""
    if not item.nodeid.endswith(f"@{group}"):
        item._id = NodeId.parse(f"{item.nodeid}@{group}")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Imported modules and thousands of tests stay; a full collection in a test need not look at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def chaos_rounds(request: pytest.FixtureRequest) -> int:
    """Factor on the amount of work of a test in tests/chaos."""
    return int(request.config.getoption("--chaos-rounds"))


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty model cache for the session, so that tests do not depend on the machine's cache."""
    cache = tmp_path_factory.mktemp("tidemill-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDEMILL_CACHE", str(cache))
        yield cache


@pytest.fixture
def shared_cache(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model cache shared by test sessions; for tests that need the converted SmolLM2."""
    cache = Path(os.environ.get("TIDEMILL_TEST_CACHE") or REPOSITORY / ".cache" / "tidemill")
    cache.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("TIDEMILL_CACHE", str(cache))
    return cache


@pytest.fixture(autouse=True)
def no_fork_left() -> Iterator[None]:
    """Kill processes of a test that failed, so that they do not disturb the next one."""
    yield
    kill_forks()


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Reset the number of threads after a test; never imports torch."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.hookimpl(trylast=True)  # after pytest's workers have ended
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session if a process started by a test is still alive, and kill that process."""
    stop_fork_servers()
    if (ranks := sys.modules.get("tests.rank_processes")) is not None:
        ranks.stop_rank_server()
    if (sandboxes := sys.modules.get("tidemill.sandbox.local")) is not None:
        for launcher in sandboxes._launchers.values():
            launcher.close()
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # the main session checks all processes
    deadline = time.monotonic() + EXIT_GRACE_S
    while (alive := _marked_processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    if not alive:
        return
    session.config.stash[_left_behind] = [f"{pid}: {command}" for pid, command in alive.items()]
    session.exitstatus = pytest.ExitCode.TESTS_FAILED
    for pid in alive:
        os.kill(pid, signal.SIGKILL)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(_left_behind, []):
        terminalreporter.write_line(f"FAILED: a test left a process alive (killed now): {line}", red=True)


def _marked_processes() -> dict[int, str]:
    """Command lines of live processes started by tests, by process id."""
    if not Path("/proc/self/environ").exists():
        return {child.pid: child.name for child in multiprocessing.active_children() if child.pid is not None}
    alive: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            marked = SESSION_MARK.encode() in (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # ended, or of another user
            continue
        # multiprocessing stops its own tracker when the interpreter exits; an empty command line is a zombie.
        if marked and command and "multiprocessing.resource_tracker" not in command:
            alive[int(folder.name)] = command
    return alive
