"""Predicted completion lengths compared with windows of lengths, on synthetic data.

    python -m benchmarks.length_prediction [--seeds 5]

Windows predict by the last 16 lengths of the prompt, or the last 1,024 of all, as Tidemill did before. Both see the
same samples: whole groups one after another, as in training, each predicted before it is observed ("new": all its
tokens, "started": what remains after 200 to 4,000), and 64 groups that start at once, whose samples are observed when
they end ("at once": what remains of unfinished ones). The error is the mean absolute one, lowest for the median. The
loss is that of an exponential distribution with the predicted mean, lowest for the true mean. Both predict means.

What it is for: 64 groups, whose prompts were seen in one epoch before, are generated on 64 and 128 slots of one speed.
The time until the last sample ends, in tokens of one slot: in the order of the batch, with the longest expected sample
first, and with the longest first (all lengths known).
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import sys
import time
from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, Protocol

from benchmarks.measuring import exit_code, write_result
from benchmarks.origin import parsed
from tidemill.controller.length_model import LengthModel

SEEDS = 5
LIMIT = 16384
PROMPTS, GROUP, TOGETHER = 256, 8, 64
EPOCHS = (1, 6)
SLOTS = (64, 128)
HAVE = (200, 600, 1500, 4000)
LOSS_MARGIN = 0.005
"""Nats by which the model may be worse where windows know as much as there is to know."""
Group = tuple[str, int, list[int]]  # prompt, its tokens, lengths


class Predictor(Protocol):
    def observe(self, prompt_id: str, prompt_tokens: int, lengths: Sequence[int]) -> None: ...

    def expected(self, prompt_id: str, prompt_tokens: int, limit: int) -> float: ...

    def expected_remaining(self, prompt_id: str, prompt_tokens: int, have: int, limit: int) -> float: ...


class Window:
    """The latest lengths, in the order of observing and sorted."""

    def __init__(self, size: int) -> None:
        self.newest = deque[int](maxlen=size)
        self.ascending: list[int] = []

    def add(self, length: int) -> None:
        if len(self.newest) == self.newest.maxlen:
            del self.ascending[bisect_right(self.ascending, self.newest[0]) - 1]
        self.newest.append(length)
        insort(self.ascending, length)


class Windows:
    """The mean of a window, and the mean excess of its longer lengths if there are four."""

    def __init__(self) -> None:
        self._prompts = defaultdict[str, Window](lambda: Window(16))
        self._all = Window(1024)

    def observe(self, prompt_id: str, prompt_tokens: int, lengths: Sequence[int]) -> None:
        for length in lengths:
            self._prompts[prompt_id].add(length)
            self._all.add(length)

    def expected(self, prompt_id: str, prompt_tokens: int, limit: int) -> float:
        window = self._prompts.get(prompt_id, self._all)
        return fmean(window.newest) if window.newest else limit / 2

    def expected_remaining(self, prompt_id: str, prompt_tokens: int, have: int, limit: int) -> float:
        for window in (self._prompts[prompt_id], self._all) if prompt_id in self._prompts else (self._all,):
            longer = window.ascending[bisect_right(window.ascending, have) :]
            if len(longer) >= 4:
                return max(min(fmean(longer) - have, limit - have), 1.0)
        expected = self.expected(prompt_id, prompt_tokens, limit)
        return max(expected - have if expected > have else (limit - have) / 2, 1.0)


PREDICTORS: dict[str, Callable[[], Predictor]] = {"windows": Windows, "model": LengthModel}


def log_normal(share: float, epoch: int, tokens: int, effect: float, noise: float) -> float:
    return 600 * math.exp(0.8 * (math.sqrt(share) * effect + math.sqrt(1 - share) * noise))


LENGTHS: dict[str, Callable[[int, int, float, float, random.Random], float]] = {
    "geometric": lambda epoch, tokens, effect, noise, rng: rng.expovariate(1 / 800),
    "log-normal": lambda *known: log_normal(0.0, *known[:4]),
    "correlated within prompts, 0.3": lambda *known: log_normal(0.3, *known[:4]),
    "correlated within prompts, 0.7": lambda *known: log_normal(0.7, *known[:4]),
    "dependent on prompt length": lambda epoch, tokens, effect, noise, rng: (
        600 * (tokens / 245) ** 0.6 * math.exp(0.6 * noise)
    ),
    "growing by 1.5 per epoch": lambda *known: 0.5 * 1.5 ** known[0] * log_normal(0.3, *known[:4]),
    "80 or 3,000 tokens": lambda epoch, tokens, effect, noise, rng: rng.choice((80, 3000)) * math.exp(0.2 * noise),
}
OUTSIDE = "80 or 3,000 tokens"
"""A case that the model does not fit; it has no aim."""


def drawn(name: str, seed: int, epochs: int) -> list[Group]:
    """Every prompt once per epoch, in random order."""
    rng = random.Random(f"{name} {seed}")
    prompts = [(f"p{at}", round(math.exp(rng.gauss(5.5, 0.8))) + 1, rng.gauss(0, 1)) for at in range(PROMPTS)]
    groups = list[Group]()
    for epoch in range(epochs):
        for prompt_id, tokens, effect in rng.sample(prompts, PROMPTS):
            lengths = [LENGTHS[name](epoch, tokens, effect, rng.gauss(0, 1), rng) for _ in range(GROUP)]
            groups.append((prompt_id, tokens, [min(max(math.ceil(length), 1), LIMIT) for length in lengths]))
    return groups


class Score:
    def __init__(self) -> None:
        self._errors, self._losses, self._ordered = list[float](), list[float](), list[float]()

    def add(self, predictions: Sequence[tuple[float, float]]) -> None:
        """Add (predicted, true) tokens, of one pair or one sample."""
        for predicted, true in predictions:
            self._errors.append(abs(predicted - true))
            self._losses.append(math.log(predicted) + true / predicted)
        if len(predictions) == 2 and predictions[0][1] != predictions[1][1]:
            (one, true_one), (other, true_other) = predictions
            self._ordered.append(0.5 if one == other else float((one > other) == (true_one > true_other)))

    @property
    def means(self) -> dict[str, float]:
        figures = {"error_tokens": fmean(self._errors), "loss_nats": fmean(self._losses)}
        return figures | ({"ordered": fmean(self._ordered)} if self._ordered else {})


def whole_groups(predictor: Predictor, groups: Sequence[Group]) -> dict[str, dict[str, float]]:
    new, started = Score(), Score()
    last = (0.0, 0.0)
    for prompt_id, tokens, lengths in groups:
        expected = predictor.expected(prompt_id, tokens, LIMIT)
        if last[0]:
            new.add([last, (expected, lengths[0])])
        last = (expected, lengths[0])
        new_of_group = [(expected, length) for length in lengths[1:]]
        for each in new_of_group:
            new.add([each])
        for have in HAVE:
            remaining = predictor.expected_remaining(prompt_id, tokens, have, LIMIT)
            for length in lengths:
                if length > have:
                    started.add([(remaining, length - have)])
        predictor.observe(prompt_id, tokens, lengths)
    return {"new": new.means, "started": started.means}


def at_once(predictor: Predictor, groups: Sequence[Group]) -> dict[str, dict[str, float]]:
    """At every 16th end of a sample, four pairs of unfinished samples."""
    rng, score = random.Random(0), Score()
    for first in range(0, len(groups), TOGETHER):
        samples = sorted(
            (length, at, prompt_id, tokens)
            for at, (prompt_id, tokens, lengths) in enumerate(groups[first : first + TOGETHER])
            for length in lengths
        )
        have = 0
        for ended, (length, _, prompt_id, tokens) in enumerate(samples):
            left = [sample for sample in samples[ended:] if sample[0] > have]
            if ended % 16 == 0 and len(left) >= 2:
                for _ in range(4):
                    pair = rng.sample(left, 2)
                    score.add(
                        [(predictor.expected_remaining(each[2], each[3], have, LIMIT), each[0] - have) for each in pair]
                    )
            predictor.observe(prompt_id, tokens, [length])
            have = length
    return {"at once": score.means}


def measured(name: str, epochs: int, seeds: int) -> list[dict[str, Any]]:
    """One record per kind of prediction: figures of both predictors, means over seeds."""
    scores: dict[str, list[dict[str, dict[str, float]]]] = {}
    for which, make in PREDICTORS.items():
        data = [drawn(name, seed, epochs) for seed in range(seeds)]
        scores[which] = [whole_groups(make(), groups) | at_once(make(), groups) for groups in data]
    records = []
    for kind in ("new", "started", "at once"):
        record: dict[str, Any] = {"lengths": name, "epochs": epochs, "predicted": kind}
        for figure in scores["model"][0][kind]:
            for which in PREDICTORS:
                record[f"{figure}, {which}"] = round(fmean(score[kind][figure] for score in scores[which]), 3)
        if name != OUTSIDE:
            record["reached"] = record["loss_nats, model"] <= record["loss_nats, windows"] + LOSS_MARGIN
        records.append(record)
    return records


def makespan(groups: Sequence[Group], slots: int, predictor: Predictor | None = None, *, known: bool = False) -> float:
    """Of list scheduling: in order, or longest expected first by a predictor that observes each sample when it ends."""
    waiting = [(at, length) for at, group in enumerate(groups) for length in group[2]]
    if known:
        waiting.sort(key=lambda sample: -sample[1])
    running: list[tuple[int, int, int]] = []  # (end, group, length)
    now = 0
    while waiting:
        if len(running) == slots:
            now, group, length = heapq.heappop(running)
            if predictor is not None:
                predictor.observe(groups[group][0], groups[group][1], [length])
        chosen = 0
        if predictor is not None:
            heads = {group: place for place, (group, _) in reversed(list(enumerate(waiting)))}
            expected = {group: predictor.expected_remaining(*groups[group][:2], 0, LIMIT) for group in heads}
            chosen = heads[max(heads, key=lambda group: (expected[group], -group))]
        group, length = waiting.pop(chosen)
        heapq.heappush(running, (now + length, group, length))
    return float(max(running)[0])


def scheduled(name: str, seeds: int) -> list[dict[str, Any]]:
    """One record per number of slots: makespans, means over the batches of an epoch and seeds."""
    records = []
    for slots in SLOTS:
        times: dict[str, list[float]] = {"in order": [], **{which: [] for which in PREDICTORS}, "known": []}
        for seed in range(seeds):
            groups = drawn(name, seed, 2)
            for first in range(PROMPTS, 2 * PROMPTS, TOGETHER):
                batch = groups[first : first + TOGETHER]
                times["in order"].append(makespan(batch, slots))
                times["known"].append(makespan(batch, slots, known=True))
            for which, make in PREDICTORS.items():
                predictor = make()
                for group in groups[:PROMPTS]:
                    predictor.observe(*group)
                for first in range(PROMPTS, 2 * PROMPTS, TOGETHER):
                    times[which].append(makespan(groups[first : first + TOGETHER], slots, predictor))
        records.append(
            {"lengths": name, "slots": slots, **{order: round(fmean(each)) for order, each in times.items()}}
        )
    return records


def cost_us() -> dict[str, float]:
    """Of the model: microseconds to observe a sample, and to predict the rest of one."""
    groups, model = drawn("log-normal", 0, 6), LengthModel()
    started_s = time.process_time()
    for group in groups:
        model.observe(*group)
    observed_s = time.process_time() - started_s
    started_s = time.process_time()
    for prompt_id, tokens, lengths in groups:
        for length in lengths:
            model.expected_remaining(prompt_id, tokens, length // 2, LIMIT)
    predicted_s = time.process_time() - started_s
    samples = len(groups) * GROUP
    return {
        "observe": round(1e6 * observed_s / samples, 2),
        "expected_remaining": round(1e6 * predicted_s / samples, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    seeds = parsed(parser).seeds
    records = [record for name in LENGTHS for epochs in EPOCHS for record in measured(name, epochs, seeds)]
    schedules = [record for name in LENGTHS for record in scheduled(name, seeds)]
    for record in [*records, *schedules]:
        print(*(f"{value:.3f}" if isinstance(value, float) else value for value in record.values()), sep="  ")
    content = {
        "seeds": seeds,
        "limit": LIMIT,
        "loss_margin_nats": LOSS_MARGIN,
        "cost_us": cost_us(),
        "records": records,
    }
    print(content["cost_us"])
    write_result("length_prediction", content)
    return exit_code(content)


if __name__ == "__main__":
    sys.exit(main())
