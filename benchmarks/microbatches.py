"""CPU time of a GRPO step by `batch.microbatch_tokens`: whether one size can be the default.

    python -m benchmarks.microbatches [--only CASE] [--rounds N]

8 prompts x 8 samples, fp32, one thread. Each size takes turns with the default on one core; both must do the same
work. Fails if a step with the default takes much more CPU time than with another size.

Writes results/microbatches.json.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median
from typing import Any

from benchmarks.additions import addition_prompts
from benchmarks.grpo_step import CASES, DEADLINE_S, GROUP_SIZE, PROMPTS, Case
from benchmarks.grpo_tidemill import tidemill_side
from benchmarks.measuring import exit_code, print_records, write_result
from benchmarks.models import char_model, quiet, smollm2
from benchmarks.origin import parsed
from benchmarks.subjects import check_different, check_signal
from benchmarks.turns import take_turns
from tidemill.config.learning import LEAST_MICROBATCH

SIZES = (512, 1024, 2048, 4096)
DEFAULT = LEAST_MICROBATCH  # on a CPU
ALLOWED = 1.1  # times the CPU time with another size
NAMES = ("SmolLM2-135M fp32, 64 new tokens", "character model 0.8M fp32, 72 new tokens")


def main() -> int:
    parser = argparse.ArgumentParser(description="CPU time of a GRPO step by the size of microbatches.")
    parser.add_argument("--only", default="", help="the cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=0, help="measured rounds of each case")
    options = parsed(parser)
    quiet()
    chosen = [case for case in CASES if case.name in NAMES and options.only in case.name]
    records = [_measured(case, options.rounds or case.rounds) for case in chosen]
    print_records("CPU seconds of a step by tokens of a microbatch, one thread", records)
    whole = not options.only and not options.rounds
    write_result("microbatches" if whole else "microbatches-partial", {"allowed": ALLOWED, "cases": records})
    return exit_code(records)


def _measured(case: Case, rounds: int) -> dict[str, Any]:
    print(case.name, file=sys.stderr, flush=True)
    settings = {
        "model": str(char_model() if case.small else smollm2()),
        "prompts": addition_prompts(PROMPTS),
        "group_size": GROUP_SIZE,
        "new_tokens": case.new_tokens,
        "bf16": case.bf16,
    }
    cpu_s: dict[str, float] = {}
    ratios: dict[str, float] = {}
    for size in (each for each in SIZES if each != DEFAULT):  # in pairs: more processes need too much memory
        sides = {
            str(tokens): (tidemill_side, {**settings, "batch": {"microbatch_tokens": tokens}})
            for tokens in (DEFAULT, size)
        }
        results = take_turns(sides, rounds=rounds, deadline_s=DEADLINE_S)
        for name, result in results.items():
            check_signal(f"{name} tokens", result)
            cpu_s[name] = median(turn.cpu_s for turn in result.turns)
        counts = {f"{name} tokens": result.turns[0].notes["microbatches"] for name, result in results.items()}
        check_different("number of microbatches", counts)
        turns = zip(*(result.turns for result in results.values()), strict=True)
        ratios[str(size)] = median(default.cpu_s / other.cpu_s for default, other in turns)
    return record_of(case.name, cpu_s, ratios)


def record_of(name: str, cpu_s: dict[str, float], ratios: dict[str, float]) -> dict[str, Any]:
    """CPU seconds of a step by size, and those of the default relative to each other size in the same minutes."""
    return {
        "case": name,
        **{f"{size} tokens, CPU s": each for size, each in cpu_s.items()},
        **{f"default / {size} tokens": each for size, each in ratios.items()},
        "reached": max(ratios.values()) <= ALLOWED,
    }


if __name__ == "__main__":
    sys.exit(main())
