"""vLLM beyond the contract: its own noise kernel, many swaps, tied heads, and refusals. Run by `make test-vllm`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.contract.engine.engines import (
    ADAPTER,
    CONTEXT,
    HAS_VLLM,
    NO_ADAPTER,
    SLOTS,
    TOLERANCE,
    Contract,
    letters,
    open_contract,
)
from tests.engine_requests import Collected, Conversation, prompts, request
from tidemill.config.model import LoraConfig
from tidemill.core.errors import UserError
from tidemill.core.records import PolicyVersion, pack_tokens
from tidemill.models.weight_stream import WeightStream
from tidemill.rollout.engines.vllm import check_family
from tidemill.rollout.sampling import gumbel, noise_key
from tidemill.rollout.weight_sources import StreamedWeights

pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed; `make test-vllm` runs this")
PLACES = [(1, 0), (12345, 6), (2**62 + 98765, 130_000), (2**63 - 1, 4095)]
KERNEL = """
import importlib.util, sys, types
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import torch, triton, triton.language as tl

# vLLM hides Triton where it finds no device for it, so its file is loaded with the real one.
real = types.ModuleType("vllm.triton_utils")
real.tl, real.triton = tl, triton
sys.modules["vllm"] = types.ModuleType("vllm")
sys.modules["vllm.triton_utils"] = real
spec = importlib.util.spec_from_file_location("vllm_gumbel", sys.argv[2])
gumbel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gumbel)
uniform, log1p_neg = gumbel.murmur3_uniform32, gumbel._log1p_neg_stable

@triton.jit
def noise(out, seeds, positions, size: tl.constexpr):
    row, tokens = tl.program_id(0), tl.arange(0, size)
    u = uniform(tl.load(seeds + row), tl.load(positions + row), tokens)
    tl.store(out + row * size + tokens, -tl.log(-log1p_neg(u)))

seeds, positions = (torch.tensor(column) for column in zip(*eval(sys.argv[1])))
out = torch.empty(len(seeds), 4096)
noise[(len(seeds),)](out, seeds, positions, 4096)
sys.stdout.buffer.write(out.numpy().tobytes())
"""


def test_noise_is_that_of_vllms_own_kernel(tmp_path: Path) -> None:
    """Its Model Runner V2, which needs a GPU, draws with this kernel; here Triton interprets it."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    file = Path(spec.submodule_search_locations[0]) / "v1" / "worker" / "gpu" / "sample" / "gumbel.py"
    script = tmp_path / "kernel.py"  # Triton reads the source of a kernel from its file
    script.write_text(KERNEL)
    found = subprocess.run(
        [sys.executable, str(script), repr(PLACES), str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        check=False,
        timeout=200,
    )
    assert found.returncode == 0, found.stderr.decode()[-2000:]
    kernel = torch.from_numpy(np.frombuffer(found.stdout, np.float32).copy()).reshape(len(PLACES), 4096)
    ours = gumbel([noise_key(*place) for place in PLACES], 4096, torch.device("cpu"))
    assert float((kernel - ours).abs().max()) <= 5e-6


@pytest.fixture(scope="module", params=["tied", "untied", "tied-adapter"])
def opened(request: pytest.FixtureRequest) -> Contract:
    shape, *adapter = str(request.param).split("-")
    if adapter:  # vLLM keeps earlier adapters, too, so that one that is not replaced gives its own tokens
        return open_contract("vllm", shape, lora=ADAPTER, max_cpu_loras=4)
    return open_contract("vllm", shape, lora=NO_ADAPTER)


def test_twenty_swaps_under_load(opened: Contract) -> None:
    """Every sample that starts after a swap is of the new weights only."""
    collected = Collected()
    for seed in range(20):
        opened.load(seed)
        fresh = [request(prompt, index=seed, max_new_tokens=6) for prompt in prompts(3, seed=seed)]
        opened.engine.submit(fresh)
        opened.finish(collected)
        for one in fresh:
            tokens, logprobs = opened.expected(one, 6)
            assert collected.tokens[one.sample_id] == tokens
            assert collected.logprobs[one.sample_id] == pytest.approx(logprobs, abs=TOLERANCE)
        opened.engine.submit([request(prompt, index=100 + seed, max_new_tokens=20) for prompt in prompts(3)])
        collected.add(opened.engine.poll(0.0))  # these are running at the next swap
    opened.finish(collected)


@pytest.mark.parametrize("shape", ["tied", "untied", "qwen3_moe"])
def test_new_weights_are_copied_in_place(shape: str) -> None:
    """CUDA graphs read weights where they were when the graph was captured."""
    contract = open_contract("vllm", shape)
    engine: Any = contract.engine
    (model,) = engine._llm.apply_model(lambda loaded: loaded)

    def places() -> dict[str, int]:
        return {name: each.data_ptr() for name, each in model.named_parameters()}

    contract.load(1)
    before, embedding = places(), model.get_parameter("model.embed_tokens.weight").clone()
    contract.load(2)
    assert len(before) > 5
    assert places() == before
    assert not torch.equal(model.get_parameter("model.embed_tokens.weight"), embedding)


def test_without_packing_the_tied_head_again_its_weights_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    from tidemill.rollout.engines.vllm import rank

    contract = open_contract("vllm", "tied")
    contract.load(1)
    asked = [request(prompt) for prompt in prompts(4)]

    def right() -> bool:
        collected = contract.run(asked)
        return all(collected.tokens[one.sample_id] == contract.expected(one, 12)[0] for one in asked)

    assert right()
    monkeypatch.setattr(rank, "dispatch_cpu_unquantized_gemm", lambda *_, **__: None)
    contract.load(2)
    assert not right()


def test_the_prefix_cache_is_used_within_a_version_and_cleared_by_the_next() -> None:
    """vLLM on a CPU keeps blocks of 128 tokens."""
    contract = open_contract("vllm", "untied", context=200)
    (prompt,) = prompts(1, length=150)
    for seed in (1, 2):
        contract.load(seed)
        for index in range(2):
            one, before = request(prompt, index=index), contract.engine.status().prompt_tokens_reused
            assert contract.run([one]).tokens[one.sample_id] == contract.expected(one, 12)[0]
            assert (contract.engine.status().prompt_tokens_reused > before) is (index > 0)


def test_an_adapter_of_some_layers() -> None:
    """vLLM computes q, k and v in one layer, of which only q has an adapter here."""
    contract = open_contract("vllm", "untied", lora=LoraConfig(rank=9, targets=("q_proj", "down_proj")))
    contract.load(3)
    asked = [request(prompt) for prompt in prompts(4)]
    collected = contract.run(asked)
    assert [collected.tokens[one.sample_id] for one in asked] == [contract.expected(one, 12)[0] for one in asked]


def test_top_k_and_top_p_are_refused(opened: Contract) -> None:
    for changed in ({"top_k": 3}, {"top_p": 0.9}):
        with pytest.raises(UserError, match="top-k and top-p"):
            opened.engine.submit([request([2, 3], **changed)])


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma3"])
def test_families(family: str) -> None:
    """With windows of 8 tokens. Llama and Qwen3 are in the contract."""
    contract = open_contract("vllm", family)
    contract.load(3)
    check_family(contract.model.config.model_type)
    asked = [request(prompt, max_new_tokens=16) for prompt in prompts(3, length=14)]
    collected = contract.run(asked)
    for one in asked:
        tokens, logprobs = contract.expected(one, 16)
        assert collected.tokens[one.sample_id] == tokens
        assert collected.logprobs[one.sample_id] == pytest.approx(logprobs, abs=TOLERANCE)


def test_a_family_that_gives_other_tokens_is_refused() -> None:
    """When this fails because the tokens are right, add the family to `FAMILIES`."""
    contract = open_contract("vllm", "qwen3_moe")
    contract.load(3)
    one = request(prompts(1)[0])
    assert contract.run([one]).tokens[one.sample_id] != contract.expected(one, 12)[0]
    with pytest.raises(UserError, match="qwen3_moe"):
        check_family(contract.model.config.model_type)


def test_samples_that_vllm_preempts_for_lack_of_cache_continue(opened: Contract) -> None:
    contract = open_contract("vllm", "tied", num_gpu_blocks_override=3)
    contract.load(1)
    asked = [request(prompt, index=index, max_new_tokens=70) for prompt in prompts(2) for index in range(3)]
    collected = contract.run(asked)
    for one in asked:
        assert collected.tokens[one.sample_id] == contract.expected(one, 70)[0]


def test_a_turn_reuses_the_whole_blocks_of_earlier_turns() -> None:
    contract = open_contract("vllm", "tied", block_size=32)
    contract.load(1)
    one = Conversation(prompts(1, length=11)[0], turn_tokens=30)
    one.take(contract.run([one.request()]))
    one.observe([40, 41, 42])
    one.turn_tokens = 6
    expected, _ = contract.expected(one.request(), 6)
    one.take(contract.run([one.request()]))
    assert one.tokens[33:] == expected
    status = contract.engine.status()
    # The first turn has 40 computed tokens: one whole block of 32. The second starts with 44 tokens.
    assert (status.prompt_tokens_reused, status.prompt_tokens_computed) == (32, 11 + 44 - 32)


def test_an_error_of_vllm_is_raised_by_poll(opened: Contract, monkeypatch: pytest.MonkeyPatch) -> None:
    contract = open_contract("vllm", "tied")
    contract.load(1)
    contract.engine.submit([request(prompt) for prompt in prompts(2)])

    def broken() -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(contract.engine._llm, "step", broken)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="no kernel"):
        contract.engine.poll(1.0)  # the worker then counts as lost, and its samples continue elsewhere


def test_draws_of_a_vocabulary_of_150k_equal_those_of_the_embedded_engine() -> None:
    """Teacher-forced: both engines continue the same prefixes by one token."""
    engines = [open_contract(kind, "large_vocabulary") for kind in ("embedded", "vllm")]
    for contract in engines:
        contract.load(5)
    rng = np.random.default_rng(0)
    asked = [request(rng.integers(0, 151_936, 20).tolist(), index=index, max_new_tokens=1) for index in range(300)]
    embedded, vllm = (contract.run(asked) for contract in engines)
    different = [one for one in asked if embedded.tokens[one.sample_id] != vllm.tokens[one.sample_id]]
    assert len(different) <= len(asked) // 10_000
    for one in asked:
        assert embedded.logprobs[one.sample_id] == pytest.approx(vllm.logprobs[one.sample_id], abs=TOLERANCE)


class SleepingLLM:
    """An `LLMEngine` with the sleep mode of a GPU, which a CPU does not have: fails on any other order of calls."""

    ORDER = ("sleep 2", "wake ['weights']", "load_stream", "wake ['kv_cache']", "reset", "step")

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))
        self.done = 0

    def _next(self, call: str) -> None:
        assert call == self.ORDER[self.done], f"{call} instead of {self.ORDER[self.done]}"
        self.done += 1

    def sleep(self, level: int) -> None:
        self._next(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> bool:
        self._next(f"wake {tags}")
        return True

    def collective_rpc(self, method: str, args: tuple[WeightStream]) -> None:
        assert dict(args[0]).keys() == {"weight"}
        self._next(method)

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        self._next("reset")
        return reset_running_requests

    def add_request(self, *_: Any, **__: Any) -> None:
        pass

    def step(self) -> list[Any]:
        self._next("step")
        return []


async def test_a_colocated_vllm_sleeps_and_wakes_in_the_only_possible_order() -> None:
    from tidemill.rollout.engines.vllm.engine import VllmEngine, VllmSettings

    settings = VllmSettings(model="none", dtype="float32", slots=SLOTS, context=CONTEXT, sleeps=True)
    version = PolicyVersion(number=1, digest="1")
    engine = VllmEngine(settings, decode=letters, version=version, llm=(llm := SleepingLLM()))
    weights = StreamedWeights(
        engine, lambda _: iter([("learned", iter([("weight", torch.ones(3))]))]), probe_ids=pack_tokens([1, 2])
    )
    weights.sleep()
    weights.sleep()
    weights.swap(await weights.prepare(version))
    engine.load(version)
    engine.submit([request([1, 2, 3])])
    engine.poll(0.0)

    assert llm.done == len(SleepingLLM.ORDER)
