"""The longest gap between two decoding steps of a worker with and without a pull.

As in any worker, the engine runs on one thread and fetching, applying and verifying on another.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.additions import unrelated_prompts
from benchmarks.subjects import check_counts
from tidemill.config.schema import RunSpec
from tidemill.core.protocols import LoopClock
from tidemill.core.records import GenerateRequest, Lease, Loaded, PolicyVersion, SampleId, SamplingParams, pack_tokens
from tidemill.rollout.engines.embedded import EmbeddedEngine
from tidemill.rollout.worker import EngineWorker
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.local import InProcessHost
from tidemill.runtime.model_bundle import ModelBundle, load_model_bundle
from tidemill.runtime.publishers import ModelPublisher
from tidemill.weights.snapshot import MemoryTransport
from tidemill.weights.store import WeightStore

SAMPLES = 16
NEW_TOKENS = 2000  # more than a round decodes
WARM_UP_STEPS = 10  # among them those that compute the prompts
WINDOW_STEPS = 40
DEADLINE_S = 300.0
LEARNING_RATE = 1e-6
LEASE = Lease(lease_id="lease", worker_id="worker", kind="preemptible", price_usd_per_hour=0.0, start_s=0.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    precision: str
    zero_copy: bool  # else like between machines: reads are copied, so that deltas pay


CASES = (
    Case(name="fp32, whole, in one process", precision="fp32", zero_copy=True),
    Case(name="bf16, delta, copied", precision="bf16", zero_copy=False),
)


@dataclass(frozen=True, kw_only=True)
class Pause:
    """One case; medians over the rounds, seconds. A step decodes one token of each sample."""

    case: str
    rounds: int
    samples: int
    step_s: float
    longest_gap_quiet_s: float  # between two steps of a window without a pull
    longest_gap_pulling_s: float  # while a version was fetched and verified
    pull_s: float
    swap_s: float  # the swap and the probe, between two steps
    longest_gap_swap_s: float  # those, and recomputing the caches of all running samples under the new weights
    pulled_nbytes: int
    full: bool


def pause(case: Case, model: Path, *, rounds: int) -> Pause:
    """Generate while a version is pulled and swapped in, `rounds` times."""
    spec = RunSpec.model_validate(
        {
            "model": {"source": str(model)},
            "sampling": {"max_new_tokens": NEW_TOKENS},
            "engine": {"slots": SAMPLES},
            "trainer": {"threads": 1, "precision": case.precision, "device": "cpu"},
        }
    )
    return asyncio.run(_pause(case, load_model_bundle(spec, progress=lambda _: None), rounds))


async def _pause(case: Case, parts: ModelBundle, rounds: int) -> Pause:
    prompts = [parts.codec.encode(text) for text in unrelated_prompts(SAMPLES)]
    async with AsyncExitStack() as stack:
        trainer, engine, weights = (ComputeThread(name) for name in ("trainer", "engine", "weights"))
        for thread in (trainer, engine, weights):
            stack.push_async_callback(thread.close)
        store = WeightStore(MemoryTransport(zero_copy=case.zero_copy), compute=trainer)
        stack.push_async_callback(store.close)
        publisher = ModelPublisher(
            parts.model,
            store,
            compute=trainer,
            rollout_model=parts.rollout_model,
            probe_ids=pack_tokens(prompts[0]),
        )
        host = InProcessHost(
            parts,
            store,
            compute=engine,
            weights_compute=weights,
            clock=LoopClock(),
            prompt_tokens=max(map(len, prompts)),
        )
        stack.push_async_callback(host.close)
        steps = Steps(stack)
        worker = await host.start(LEASE)
        measured = [await _round(worker, publisher, parts.model, prompts, steps, number) for number in range(rounds)]
    loads = [one.loaded for one in measured]
    return Pause(
        case=case.name,
        rounds=rounds,
        samples=SAMPLES,
        step_s=statistics.median(gap for one in measured for gap in one.quiet),
        longest_gap_quiet_s=statistics.median(max(one.quiet) for one in measured),
        longest_gap_pulling_s=statistics.median(max(one.pulling, default=0.0) for one in measured),
        longest_gap_swap_s=statistics.median(max(one.swapping) for one in measured),
        pull_s=statistics.median(loaded.pull_s for loaded in loads),
        swap_s=statistics.median(loaded.swap_s for loaded in loads),
        pulled_nbytes=loads[-1].nbytes,
        full=loads[-1].full,
    )


def check_pause(case: Case, found: Pause) -> None:
    """Raises RuntimeError: a snapshot was pulled instead of a delta or vice versa, or nothing was decoded meanwhile."""
    if found.full != case.zero_copy:
        raise RuntimeError(f"{case.name}: pulled a {'whole snapshot' if found.full else 'delta'}")
    if found.pull_s > 1.5 * found.step_s:  # else no step need end during the pull
        check_counts(case.name, steps_while_pulling=found.longest_gap_pulling_s)


@dataclass(frozen=True, kw_only=True)
class Round:
    """Gaps between steps, seconds."""

    quiet: list[float]
    pulling: list[float]
    swapping: list[float]
    loaded: Loaded


async def _round(
    worker: EngineWorker,
    publisher: ModelPublisher,
    model: PreTrainedModel,
    prompts: list[list[int]],
    steps: Steps,
    number: int,
) -> Round:
    """A quiet window, and one with a pull."""
    before, after = (PolicyVersion(number=2 * number + at, digest="") for at in (0, 1))
    await publisher.publish(before)
    await worker.load(before)
    _learn(model)
    await publisher.publish(after)
    requests = [_request(prompt, index) for index, prompt in enumerate(prompts)]
    await worker.submit(requests)
    while not (report := await worker.next_report(60.0)) or not report.deltas:
        pass  # prompts are being computed
    draining = asyncio.create_task(_drain(worker))
    await steps.more(WARM_UP_STEPS)
    began = time.perf_counter()
    await steps.more(WINDOW_STEPS)
    asked = time.perf_counter()
    loaded = await worker.load(after)
    await steps.more(WINDOW_STEPS)
    await worker.abort([request.sample_id for request in requests])
    draining.cancel()
    pulled = asked + loaded.pull_s
    return Round(
        quiet=steps.gaps(began, asked),
        pulling=steps.gaps(asked, pulled),
        swapping=steps.gaps(pulled, math.inf),
        loaded=loaded,
    )


class Steps:
    """End times of decoding steps of any engine."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.times: list[float] = []
        step: Callable[[EmbeddedEngine], None] = EmbeddedEngine._step

        def timed(engine: EmbeddedEngine) -> None:
            step(engine)
            self.times.append(time.perf_counter())

        EmbeddedEngine._step = timed  # type: ignore[method-assign,assignment]
        stack.callback(setattr, EmbeddedEngine, "_step", step)

    async def more(self, count: int) -> None:
        """Wait for `count` more steps."""
        enough = len(self.times) + count
        async with asyncio.timeout(DEADLINE_S):
            while len(self.times) < enough:  # noqa: ASYNC110 - steps are made on another thread
                await asyncio.sleep(0.05)

    def gaps(self, after: float, until: float) -> list[float]:
        """Gaps between steps that ended within a time span."""
        times = np.array(self.times)
        gaps: list[float] = np.diff(times)[(times[1:] > after) & (times[1:] <= until)].tolist()
        return gaps


def _learn(model: PreTrainedModel) -> None:
    """Like an early step of Adam: every weight moves by up to the learning rate."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter) * 2 - 1, alpha=LEARNING_RATE)


async def _drain(worker: EngineWorker) -> None:
    while True:
        await worker.next_report(60.0)


def _request(prompt: list[int], index: int) -> GenerateRequest:
    return GenerateRequest(
        sample_id=SampleId(run_seed=0, purpose="pause", prompt_id=str(index), epoch=0, index=0),
        lease_id="lease",
        attempt=0,
        prompt_ids=pack_tokens(prompt),
        sampling=SamplingParams(max_new_tokens=NEW_TOKENS),
    )
