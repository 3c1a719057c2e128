"""Memory of one rank and of each of two (FSDP2, gloo) while SmolLM2 trains two steps, and what the forecast says.

    python -m benchmarks.shards

Each rank is a process with one thread. Reported: bytes of weights, gradients and moments of a rank, from the tensors;
its peak resident memory above what it had after its imports; and the forecast of the tensors by `plan run`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.measuring import print_records, write_result
from benchmarks.origin import parsed
from benchmarks.stopping import interruptible
from benchmarks.subjects import check_equal
from benchmarks.turns import ONE_THREAD

STATE_AIM, RSS_AIM, FORECAST_AIM = 0.51, 0.65, 0.05
DEADLINE_S = 900.0
GROUPS, GROUP_SIZE, PROMPT_TOKENS, NEW_TOKENS, MICROBATCH_TOKENS = 8, 4, 20, 16, 256


def main() -> int:
    parsed(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    os.environ |= ONE_THREAD
    ranks = {size: _measured(size) for size in (1, 2)}
    check_ranks(ranks)
    alone, shard = (_largest(ranks[size]) for size in (1, 2))
    forecast = _forecast(2)
    figures = {
        "state_bytes_of_one_process": alone["state_bytes"],
        "state_bytes_of_a_rank": shard["state_bytes"],
        "state_ratio": shard["state_bytes"] / alone["state_bytes"],
        "peak_rss_of_one_process": alone["peak_rss_bytes"],
        "peak_rss_of_a_rank": shard["peak_rss_bytes"],
        "rss_ratio": shard["peak_rss_bytes"] / alone["peak_rss_bytes"],
        "forecast_state_bytes": forecast,
        "forecast_error": forecast / shard["state_bytes"] - 1,
    }
    aims = {
        "state": figures["state_ratio"] <= STATE_AIM,
        "peak_rss": figures["rss_ratio"] <= RSS_AIM,
        "forecast": abs(figures["forecast_error"]) <= FORECAST_AIM,
    }
    print_records("SmolLM2 on two ranks", [figures | {f"{name}_reached": reached for name, reached in aims.items()}])
    write_result("shards", {"figures": figures, "reached": aims})
    return 0 if all(aims.values()) else 1


def check_ranks(ranks: Mapping[int, Sequence[Mapping[str, float]]]) -> None:
    """As many processes as said must have trained together, on the same tokens, and hold the whole state among them.

    Args:
        ranks: figures of each rank, by the number of ranks.

    Raises:
        RuntimeError: otherwise.
    """
    for size, found in ranks.items():
        joined = [rank["ranks"] for rank in found]
        if joined != [size] * size:
            raise RuntimeError(f"ranks joined groups of {joined}, expected {size} of {size}")
    check_equal("trained tokens", {f"{size} ranks": found[0]["tokens_trained"] for size, found in ranks.items()})
    held, whole = (sum(rank["state_bytes"] for rank in found) for found in (ranks[2], ranks[1]))
    if held < whole:
        raise RuntimeError(f"the ranks hold {held:.0f} of {whole:.0f} bytes of the state")


def _largest(ranks: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def _measured(size: int) -> list[dict[str, float]]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for index in range(size):
            ours, theirs = context.Pipe()
            arguments = (Path(folder) / "meeting", size, index, theirs)
            processes.append(context.Process(target=_rank, args=arguments, daemon=True))
            processes[-1].start()
            pipes.append(ours)
        try:
            return [_received(pipe) for pipe in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _received(pipe: Connection) -> Any:
    if not pipe.poll(DEADLINE_S):
        raise RuntimeError(f"a rank was silent for {DEADLINE_S:.0f} s")
    return pipe.recv()


def _rank(meeting: Path, size: int, index: int, pipe: Connection) -> None:
    import numpy as np
    import torch

    from benchmarks.models import quiet, smollm2
    from tidemill.config.schema import RunSpec
    from tidemill.core.records import Group, Reward, SampleId, Segment, Trajectory, pack_logprobs, pack_tokens
    from tidemill.models.loading import load_model
    from tidemill.models.ranks import ONE_RANK, Ranks, local_rows
    from tidemill.models.tree_forward import TreeForward
    from tidemill.runtime.compute import ComputeThread
    from tidemill.trainer.policy import PolicyTrainer
    from tidemill.trainer.sharding import join_ranks, shard

    torch.set_num_threads(1)
    quiet()
    device = torch.device("cpu")
    ranks: Ranks = ONE_RANK
    if size > 1:
        ranks = join_ranks(meeting, size=size, index=index, device=device, timeout_s=DEADLINE_S, one_machine=True)
    imported = _resident_bytes()
    forward = TreeForward(load_model(smollm2(), device=device))
    shard(forward, ranks)
    batch = {"prompts": GROUPS, "group_size": GROUP_SIZE, "microbatch_tokens": MICROBATCH_TOKENS}
    spec = RunSpec.model_validate({"batch": batch, "optimizer": {"learning_rate": 1e-6}})
    trainer = PolicyTrainer(forward, spec, compute=ComputeThread(), source=smollm2(), ranks=ranks)
    rng, gradients, tokens = np.random.default_rng(0), 0, 0.0
    step_optimizer = trainer.optimizer.step

    def step(*arguments: Any) -> Any:
        nonlocal gradients
        held = (parameter.grad for parameter in forward.parameters())
        gradients = sum(local_rows(gradient)[0].nbytes for gradient in held if gradient is not None)
        return step_optimizer(*arguments)

    trainer.optimizer.step = step  # type: ignore[method-assign,assignment]

    def sample(prompt: list[int], at: int) -> Trajectory:
        tokens = [*prompt, *rng.integers(0, 49_152, NEW_TOKENS).tolist()]
        spans = (("prompt", 0, PROMPT_TOKENS, False), ("action", PROMPT_TOKENS, len(tokens), True))
        return Trajectory(
            sample_id=SampleId(run_seed=0, purpose="train", prompt_id=str(prompt[:4]), epoch=0, index=at),
            token_ids=pack_tokens(tokens),
            segments=tuple(Segment(role=r, start=a, end=b, trained=t) for r, a, b, t in spans),  # type: ignore[arg-type]
            rollout_logprobs=pack_logprobs([-5.0] * NEW_TOKENS),
            versions=(),
            finish="length",
            reward=Reward(value=float(rng.random())),
        )

    for number in (1, 2):
        for position in range(GROUPS):
            prompt = rng.integers(0, 49_152, PROMPT_TOKENS).tolist()
            samples = tuple(sample(prompt, at) for at in range(GROUP_SIZE))
            trainer.add_group(Group(position=position, prompt_id=samples[0].sample_id.prompt_id, trajectories=samples))
        tokens += trainer.finish_batch(number).values["tokens_trained"]
    weights = sum(local_rows(parameter)[0].nbytes for parameter in forward.parameters())
    states = (value for state in trainer.optimizer.state.values() for value in state.values())
    moments = sum(local_rows(value)[0].nbytes for value in states)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    state_bytes = weights + gradients + moments
    figures = {"state_bytes": state_bytes, "peak_rss_bytes": peak - imported}
    pipe.send(figures | {"ranks": ranks.size, "tokens_trained": tokens})
    ranks.barrier()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _forecast(shards: int) -> float:
    """Bytes of the policy's weights, gradients and moments on one rank, as `tidemill plan run` forecasts them."""
    from benchmarks.models import smollm2
    from tidemill.config.schema import RunSpec
    from tidemill.hardware.figures import Derivation
    from tidemill.hardware.model_config import read_shape
    from tidemill.hardware.process_memory import trained_states

    spec = RunSpec.model_validate({"runtime": "ray", "trainer": {"shards": shards}})
    return trained_states("policy", spec, read_shape(smollm2()), Derivation(), base_elsewhere=False).total


if __name__ == "__main__":
    sys.exit(interruptible(main))
