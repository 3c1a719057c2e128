from __future__ import annotations

import msgspec
import pytest

from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.hardware.engine_ranks import (
    Device,
    bytes_per_engine_rank,
    cache_bytes_per_rank,
    fewest_ranks,
    padded_vocabulary,
    rank_memory,
    undivided,
)
from tidemill.hardware.model_config import hub_shape
from tidemill.hardware.model_shape import ModelShape
from tidemill.models.shapes import SMOLLM2_SHAPE


def listed(name: str) -> ModelShape:
    shape = hub_shape(name)
    assert shape is not None
    return shape


LLAMA, QWEN = listed("meta-llama/Llama-3.1-70B-Instruct"), listed("Qwen/Qwen3-8B")
H100 = Device(title="H100", memory_bytes=80e9, count=8)
TINY = ModelShape(
    parameters=2 * 100 * 16 + 2 * (16 * 16 * 2 + 2 * 16 * 8 + 3 * 16 * 32 + 2 * 16) + 16,
    layers=2,
    hidden=16,
    heads=4,
    kv_heads=2,
    head_dim=4,
    intermediate=32,
    vocab=100,
)


def spec_of(**engine: object) -> RunSpec:
    """vLLM with a completion of 4,096 tokens."""
    engine = {"kind": "vllm", "tensor_parallel": 0, **engine}
    return RunSpec.model_validate(
        {"runtime": "ray", "ray": {"worker_gpus": 1}, "sampling": {"max_new_tokens": 4096}, "engine": engine}
    )


def test_the_bytes_of_a_rank_by_hand() -> None:
    # One rank: 100 tokens are padded to 128, twice; a layer has 2 * 256 of queries and output, 256 of keys and values,
    # 1536 of MLP, 32 of norms.
    assert padded_vocabulary(100) == 128
    assert bytes_per_engine_rank(TINY, 1) == 2 * (2 * 128 * 16 + 2 * (512 + 256 + 1536 + 32) + 16)
    # Two ranks: all but the norms is halved.
    assert bytes_per_engine_rank(TINY, 2) == 2 * (2 * 64 * 16 + 2 * (256 + 128 + 768 + 32) + 16)
    # Four ranks share two heads of keys and values: each has a whole one.
    assert bytes_per_engine_rank(TINY, 4) == 2 * (2 * 32 * 16 + 2 * (128 + 128 + 384 + 32) + 16)
    assert bytes_per_engine_rank(TINY, 4, "fp32") == 2 * bytes_per_engine_rank(TINY, 4)
    # Keys and values of 10 tokens: 2 layers * 2 * 1 head * 4 * 2 bytes each
    assert cache_bytes_per_rank(TINY, 2, 10) == cache_bytes_per_rank(TINY, 4, 10) == 10 * 32


def test_tied_weights_are_held_once() -> None:
    tied = msgspec.structs.replace(TINY, tied=True, parameters=TINY.parameters - 100 * 16)
    assert bytes_per_engine_rank(TINY, 2) - bytes_per_engine_rank(tied, 2) == 2 * 64 * 16


def test_a_rank_of_70b() -> None:
    # 70,553,706,496 parameters in bf16, 161 norms of 8192 whole: (141.107e9 - 2.6e6) / 4 + 2.6e6
    assert LLAMA.parameters == 70_553_706_496
    assert bytes_per_engine_rank(LLAMA, 4) == pytest.approx(141.107412992e9 / 4 + 0.75 * 2 * 161 * 8192)
    # 16 ranks have one of 8 heads of keys and values each: 2 * 80 * 8192 * 128 * 8 of them are held twice
    doubled = 2 * 8 * 2 * 80 * 8192 * 128 / 16
    assert bytes_per_engine_rank(LLAMA, 16) == pytest.approx(
        141.107412992e9 / 16 + 15 / 16 * 2 * 161 * 8192 + doubled, rel=1e-9
    )
    assert QWEN.parameters == 8_190_735_360


@pytest.mark.parametrize(
    ("shape", "ranks", "says"),
    [
        (SMOLLM2_SHAPE, 2, "2 does not divide its 9 attention heads"),
        (SMOLLM2_SHAPE, 3, ""),
        (SMOLLM2_SHAPE, 9, "9 does not divide its vocabulary of 49,152, padded to 49,152"),
        (LLAMA, 8, ""),
        (LLAMA, 16, ""),
        (LLAMA, 3, "3 does not divide its 64 attention heads"),
        (msgspec.structs.replace(LLAMA, heads=48, kv_heads=4), 6, "neither divides its 4 heads"),
        (msgspec.structs.replace(SMOLLM2_SHAPE, vocab=150_000), 3, "150,000, padded to 150,016"),
        (msgspec.structs.replace(SMOLLM2_SHAPE, intermediate=1000), 3, "the width 1,000 of its MLP"),
    ],
)
def test_what_cannot_be_divided(shape: ModelShape, ranks: int, says: str) -> None:
    assert says in undivided(shape, ranks)
    assert bool(undivided(shape, ranks)) == bool(says)


def test_the_fewest_ranks_that_fit() -> None:
    # 64 slots of 4,096 tokens: 262,144 tokens * 81,920 bytes = 21.5 GB of cache on each of 4 ranks, 35.3 GB of weights
    # and 2 GB: 58.8 of 72. On two ranks 70.6 + 42.9 + 2 = 115.5.
    ranks, why = fewest_ranks(spec_of(), LLAMA, H100)
    assert ranks == 4
    assert why == (
        "the fewest that fit: weights 35.3 GB + cache 21.5 GB + workspace 2 GB = 58.8 GB of 72 GB (90 % of H100) on "
        "each"
    )
    assert fewest_ranks(spec_of(), QWEN, H100)[0] == 1
    assert fewest_ranks(spec_of(context_tokens=8192), LLAMA, H100)[0] == 8
    # 9 heads: one rank, or three, each with 2.0 GB of 6.0 GB of cache
    small = Device(title="small", memory_bytes=4.7e9, count=8)
    assert fewest_ranks(spec_of(), SMOLLM2_SHAPE, small)[0] == 3
    full = spec_of()
    full = full.model_copy(update={"trainer": full.trainer.model_copy(update={"precision": "fp32"})})
    assert rank_memory(full, LLAMA, 4).weights == 2 * rank_memory(spec_of(), LLAMA, 4).weights
    assert rank_memory(full, LLAMA, 4).cache == 2 * rank_memory(spec_of(), LLAMA, 4).cache


def test_none_fits() -> None:
    with pytest.raises(UserError, match="no number of ranks up to 8") as caught:
        fewest_ranks(spec_of(slots=1024), LLAMA, H100)
    assert caught.value.where == "engine.tensor_parallel"
    assert "with 8 each needs weights 17.6 GB + cache 172 GB + workspace 2 GB = 191 GB of 72 GB" in caught.value.what
    assert "1,024 slots of 4,096 tokens" in caught.value.hint
