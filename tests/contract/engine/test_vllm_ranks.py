"""vLLM with several ranks: the tokens of one, and no step without all of them. Run by `make test-vllm`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pytest

from tests.contract.engine.engines import ADAPTER, HAS_VLLM, Contract, open_contract
from tests.contract.engine.test_contract import assert_expected
from tests.contract.engine.test_kept_cache import (
    test_running_samples_keep_keys_of_older_weights_and_new_ones_never_read_them as check_kept_cache,
)
from tests.engine_requests import Collected, prompts, request
from tidemill.core.errors import WorkerLost
from tidemill.core.records import GenerateRequest, SampleId, pack_tokens, unpack_tokens
from tidemill.hardware.engine_ranks import bytes_per_engine_rank
from tidemill.hardware.model_config import shape_of_config

pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed; `make test-vllm` runs this")
Open: TypeAlias = Callable[..., Contract]
ROOT = Path(__file__).resolve().parents[3]
NOTICED_S = 6.0
"""From the end of a rank to the error of the engine, on a busy machine; vLLM alone takes 9 s on an idle one."""


def ranks(contract: Contract) -> list[int]:
    """Their process ids; none of a single rank."""
    executor = contract.engine._llm.model_executor  # type: ignore[attr-defined]
    return [each.proc.pid for each in getattr(executor, "workers", ())]


def named_memory(pids: Sequence[int]) -> set[str]:
    """Files in shared memory that would stay if these processes were killed."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm/" in line]
    return {line.partition("/dev/shm/")[2] for line in lines if not line.endswith("(deleted)")}


def gone(pids: Sequence[int], within_s: float) -> bool:
    until = time.monotonic() + within_s
    while living := [pid for pid in pids if Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in status(pid)]:
        if time.monotonic() > until:
            return False
        time.sleep(0.02 * len(living))
    return True


def status(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/status").read_text()
    return "\nState:\tZ"


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens engines, and ends their ranks after the test."""
    engines: list[Contract] = []

    def open_one(shape: str, count: int, **settings: Any) -> Contract:
        engines.append(open_contract("vllm", shape, ranks=count, **settings))
        return engines[-1]

    yield open_one
    for contract in engines:
        pids = ranks(contract)
        contract.engine.release("learned")  # type: ignore[attr-defined]
        assert gone(pids, 1.0)


def load_by(contract: Contract, seed: int) -> list[Exception]:
    """Errors of a load."""
    try:
        contract.load(seed)
    except Exception as error:  # noqa: BLE001 - the caller compares it
        return [error]
    return []


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ("tied", 2),
        ("untied", 2),
        ("qwen2", 2),
        ("mistral", 2),
        ("gemma3", 2),
        ("large_vocabulary", 2),
        ("nine_heads", 3),
    ],
)
def test_tokens_and_logprobs_are_those_of_the_model(opened: Open, shape: str, count: int) -> None:
    """At three temperatures, and with new weights in the middle of samples. "tied", "untied" and others have one
    key-value head, which both ranks keep."""
    contract = opened(shape, count)
    contract.load(1)
    for temperature in (1.0, 0.7, 0.0):
        asked = [request(prompt, index=at, temperature=temperature) for at, prompt in enumerate(prompts(6, length=11))]
        assert_expected(contract, asked, contract.run(asked))
    running = [request(prompt, max_new_tokens=20, temperature=0.7) for prompt in prompts(3)]
    collected = Collected()
    contract.engine.submit(running)
    for _ in range(5):
        collected.add(contract.engine.poll(0.0))
    before = {one.sample_id: list(collected.tokens[one.sample_id]) for one in running}
    contract.load(2)
    contract.finish(collected)
    rest = [msgspec.structs.replace(one, prefix_ids=pack_tokens(before[one.sample_id])) for one in running]
    for one in rest:
        prefix = unpack_tokens(one.prefix_ids)
        assert collected.tokens[one.sample_id] == prefix + contract.expected(one, 20 - len(prefix))[0]


def test_a_sample_moves_between_one_rank_and_three(opened: Open) -> None:
    engines = [opened("nine_heads", count) for count in (1, 3)]
    for contract in engines:
        contract.load(1)
    asked = [request(prompt, max_new_tokens=24, temperature=0.9) for prompt in prompts(4)]
    parts: list[GenerateRequest] = asked
    tokens: dict[SampleId, list[int]] = {}
    for at in range(4):  # it moves every six tokens
        contract = engines[at % 2]
        collected = Collected(parts)
        contract.engine.submit(parts)
        while min(len(collected.tokens[one.sample_id]) for one in parts) < 6 * (at + 1):
            collected.add(contract.engine.poll(0.0))
        collected.add(contract.engine.abort([one.sample_id for one in parts]))
        tokens = dict(collected.tokens)
        parts = [msgspec.structs.replace(one, prefix_ids=pack_tokens(tokens[one.sample_id])) for one in asked]
    for one in asked:
        assert tokens[one.sample_id] == engines[0].expected(one, 24)[0]


@pytest.mark.parametrize("variant", ["untied", "tied-adapter"])
def test_running_samples_keep_their_caches(opened: Open, variant: str) -> None:
    shape, *adapter = variant.split("-")
    lora = {"lora": ADAPTER} if adapter else {}
    check_kept_cache(opened(shape, 2, context=200, keep_cache=True, **lora))


def bytes_held(worker: Any) -> int:
    """Bytes of the weights of a rank; on a CPU vLLM packs those of linear layers, which are then empty parameters."""
    held: dict[int, int] = {}  # a tied head and the embedding have one parameter
    for module in worker.model_runner.get_model().modules():
        for parameter in module.parameters(recurse=False):
            packed = 0 if parameter.numel() else module.output_size_per_partition * module.input_size_per_partition
            held[id(parameter)] = (parameter.numel() + packed) * parameter.element_size()
    return sum(held.values())


@pytest.mark.parametrize(("shape", "count"), [("nine_heads", 3), ("tied", 2)])
def test_the_plan_foretells_the_bytes_of_a_rank(opened: Open, shape: str, count: int) -> None:
    contract = opened(shape, count)
    contract.load(1)
    held = contract.engine._llm.collective_rpc(bytes_held)  # type: ignore[attr-defined]
    planned = bytes_per_engine_rank(shape_of_config(contract.model.config.to_dict(), source=shape), count, "fp32")
    assert held == [pytest.approx(planned, rel=0.05)] * count


def test_a_killed_rank_ends_the_engine_at_once(opened: Open) -> None:
    contract = opened("tied", 2)
    contract.load(1)
    contract.engine.submit([request(prompt, max_new_tokens=80) for prompt in prompts(3)])
    contract.engine.poll(0.0)
    pids = ranks(contract)
    assert not named_memory([os.getpid(), *pids])
    os.kill(pids[1], signal.SIGKILL)
    killed_s = time.monotonic()
    with pytest.raises(WorkerLost, match=r"rank 1 of 2 of vLLM ended \(exit code -9\)"):
        contract.engine.poll(60.0)
    assert time.monotonic() - killed_s < NOTICED_S
    assert gone(pids, NOTICED_S)


def test_nothing_is_generated_after_weights_that_not_all_ranks_loaded(opened: Open) -> None:
    """A rank is stopped, so that the other has the new weights, and is killed then."""
    contract = opened("tied", 2)
    contract.load(1)
    contract.engine.submit([request(prompt, max_new_tokens=80) for prompt in prompts(3)])
    contract.engine.poll(0.0)
    pids, errors = ranks(contract), list[Exception]()
    os.kill(pids[0], signal.SIGSTOP)
    loading = threading.Thread(target=lambda: errors.extend(load_by(contract, 2)))
    loading.start()
    time.sleep(1.0)
    assert loading.is_alive()
    os.kill(pids[0], signal.SIGKILL)
    loading.join(NOTICED_S)
    assert [repr(error) for error in errors] == ["WorkerLost('rank 0 of 2 of vLLM ended (exit code -9)')"]
    with pytest.raises(RuntimeError, match="not loaded whole"):
        contract.engine.poll(1.0)


def test_a_snapshot_that_is_gone_or_has_another_size_is_not_used(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    contract = opened("tied", 2)
    contract.load(1)
    contract.engine.submit([request(prompts(1)[0])])
    pids = ranks(contract)
    monkeypatch.setattr(Path, "write_bytes", lambda path, data: path.touch())
    with pytest.raises(RuntimeError, match="is not the snapshot learned 2"):
        contract.load(2)
    with pytest.raises(RuntimeError):
        contract.engine.poll(1.0)
    assert gone(pids, 1.0)


ACTOR = """
import sys, threading, time
from tests.contract.engine.engines import open_contract
from tests.engine_requests import prompts, request

def main():
    contract = open_contract("vllm", "tied", ranks=2)
    contract.load(1)
    contract.engine.submit([request(prompt, max_new_tokens=80) for prompt in prompts(3)])
    print(*[each.proc.pid for each in contract.engine._llm.model_executor.workers], file=sys.__stdout__, flush=True)
    while True:
        contract.engine.poll(0.1)

if __name__ == "__main__":
    main()
"""


def test_no_rank_outlives_its_worker_even_if_one_hangs(tmp_path: Path) -> None:
    script = tmp_path / "actor.py"
    script.write_text(ACTOR)
    errors, env = tmp_path / "errors.txt", os.environ | {"PYTHONPATH": str(ROOT)}
    with (
        errors.open("wb") as log,
        subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=log, env=env) as actor,
    ):
        assert actor.stdout is not None
        line = next((line for line in actor.stdout if line.split() and line.split()[0].isdigit()), b"")
        assert line, errors.read_text(encoding="utf-8")
        pids = [int(pid) for pid in line.split()]
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(0.5)
        actor.kill()
    assert gone(pids, 2.0)
