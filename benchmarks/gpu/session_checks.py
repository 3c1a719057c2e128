"""The checks of a GPU session, most valuable first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Check:
    """A function of `CheckRows` that runs in a process of its own.

    Attributes:
        needs_s: it is not started with less time left.
        limit_s: it is killed after that time.
    """

    name: str
    function: str  # MODULE:FUNCTION
    needs_s: float
    limit_s: float
    about: str
    kernels: bool = False  # of Triton, which its interpreter computes on a CPU


CHECKS = (
    Check(
        name="environment",
        function="benchmarks.gpu.checks.environment:environment",
        needs_s=10,
        limit_s=60,
        about="the device, versions of packages, and which are missing or outside the supported ranges",
    ),
    Check(
        name="noise",
        function="benchmarks.gpu.checks.noise:noise",
        needs_s=10,
        limit_s=60,
        about="sampling noise against NumPy and against the CPU; the same draws in other batches",
    ),
    Check(
        name="kernels",
        function="benchmarks.gpu.checks.kernels:kernels",
        needs_s=30,
        limit_s=90,
        about="draws, decoding and layers in Triton against torch: tokens, attention, bits in other batches, speed",
        kernels=True,
    ),
    Check(
        name="head-kernels",
        function="benchmarks.gpu.checks.kernels:head_kernels",
        needs_s=25,
        limit_s=90,
        about="statistics and gradient of the output layer in Triton against float64; share of the bandwidth",
        kernels=True,
    ),
    Check(
        name="static-engine",
        function="benchmarks.gpu.checks.static_engine:static_engine",
        needs_s=40,
        limit_s=120,
        about="the engine in static memory against the packed one; CUDA graphs on and off",
        kernels=True,
    ),
    Check(
        name="engine",
        function="benchmarks.gpu.checks.engine_agreement:engine_agreement",
        needs_s=100,
        limit_s=200,
        about="logprobs of the engine against transformers and the trainer; repeated runs and other batches",
    ),
    Check(
        name="small-trees",
        function="benchmarks.gpu.checks.tree_agreement:small_trees",
        needs_s=55,
        limit_s=120,
        about="logprobs and gradients of a tree of 580 nodes against transformers; repeated bits",
    ),
    Check(
        name="runs",
        function="benchmarks.gpu.checks.short_runs:two_equal_runs",
        needs_s=110,
        limit_s=220,
        about="a run of 10 steps, twice: equal weights, and the mismatch of engine and trainer",
    ),
    Check(
        name="matmul",
        function="benchmarks.gpu.checks.speed:matrix_products",
        needs_s=10,
        limit_s=40,
        about="peak rate and rounding of matrix products",
    ),
    Check(
        name="engine-speed",
        function="benchmarks.gpu.checks.speed:engine_speed",
        needs_s=60,
        limit_s=240,
        about="tokens per second of the embedded engine (share of the bandwidth), transformers and vLLM; weight swap",
    ),
    Check(
        name="training-speed",
        function="benchmarks.gpu.checks.speed:training_speed",
        needs_s=60,
        limit_s=150,
        about="seconds and MFU of a training step in token trees and padded; share of a digest",
    ),
    Check(
        name="weights",
        function="benchmarks.gpu.checks.weights:weights",
        needs_s=25,
        limit_s=60,
        about="digest, snapshot, binding and export of weights: equal to those on the CPU, and GB/s",
    ),
    Check(
        name="large-trees",
        function="benchmarks.gpu.checks.tree_agreement:large_trees",
        needs_s=55,
        limit_s=150,
        about="the same of 3,800 nodes, and of heads narrower than 16",
    ),
    Check(
        name="memory",
        function="benchmarks.gpu.checks.memory:memory",
        needs_s=45,
        limit_s=90,
        about="peak memory of training and of the engine's cache against the memory plan; the largest model that fits",
    ),
    Check(
        name="tree-attention",
        function="benchmarks.gpu.checks.speed:tree_attention_speed",
        needs_s=30,
        limit_s=120,
        about="FlexAttention against a dense mask by size of the tree: differences, repeated bits, time",
    ),
    Check(
        name="more-runs",
        function="benchmarks.gpu.checks.short_runs:other_runs",
        needs_s=90,
        limit_s=300,
        about="short runs that are resumed, with an adapter, with vLLM",
    ),
)
