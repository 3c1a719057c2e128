"""One GRPO optimizer step and TRL's `GRPOTrainer`: 8 prompts x 8 samples x 3 to 256 tokens, no KL term, one thread.

    python -m benchmarks.grpo_step [--only CASE] [--rounds N] [--quick]

A step includes generation, rewards (random: every group has signal, or the benchmark fails), advantages, forward,
backward, optimizer and, on our side, the run directory. SmolLM2 and a character model of 0.8M parameters; fp32, and
SmolLM2 also in bf16. Prompts of 18 tokens, or chats of 200. Most of the difference is due to shared prompts, which TRL
computes for every sample: it is large for short completions and small for long ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.additions import NEW_TOKENS, addition_prompts, chat_prompts, unrelated_prompts
from benchmarks.grpo_tidemill import tidemill_side
from benchmarks.grpo_trl import trl_side
from benchmarks.measuring import Comparison, compare, report
from benchmarks.models import char_model, quiet, smollm2
from benchmarks.origin import parsed
from benchmarks.subjects import check_signal
from benchmarks.turns import take_turns

DEADLINE_S = 3600.0
PROMPTS, GROUP_SIZE = 8, 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """TRL's microbatch, in samples, is the fastest of those tried for the model."""

    name: str
    small: bool
    bf16: bool
    target: float | None
    rounds: int
    trl_microbatch: int
    prompts: Callable[[int], list[str]] = addition_prompts
    new_tokens: int = NEW_TOKENS


CASES = (
    Case(name="SmolLM2-135M fp32", small=False, bf16=False, target=4.0, rounds=4, trl_microbatch=16),
    Case(name="SmolLM2-135M bf16", small=False, bf16=True, target=None, rounds=2, trl_microbatch=16),
    Case(
        name="SmolLM2-135M fp32, nothing in common between prompts",
        small=False,
        bf16=False,
        target=None,
        rounds=2,
        trl_microbatch=16,
        prompts=unrelated_prompts,
    ),
    Case(
        name="SmolLM2-135M fp32, 64 new tokens",
        small=False,
        bf16=False,
        target=1.5,
        rounds=2,
        trl_microbatch=16,
        new_tokens=64,
    ),
    Case(
        name="SmolLM2-135M bf16, 64 new tokens",
        small=False,
        bf16=True,
        target=None,
        rounds=2,
        trl_microbatch=16,
        new_tokens=64,
    ),
    Case(
        name="SmolLM2-135M fp32, chats of 200 tokens, 64 new tokens",
        small=False,
        bf16=False,
        target=None,
        rounds=1,
        trl_microbatch=16,
        prompts=chat_prompts,
        new_tokens=64,
    ),
    Case(
        name="SmolLM2-135M fp32, 256 new tokens",
        small=False,
        bf16=False,
        target=None,
        rounds=1,
        trl_microbatch=8,
        new_tokens=256,
    ),
    Case(name="character model 0.8M fp32", small=True, bf16=False, target=2.0, rounds=20, trl_microbatch=64),
    Case(
        name="character model 0.8M fp32, 72 new tokens",
        small=True,
        bf16=False,
        target=2.0,
        rounds=10,
        trl_microbatch=32,
        new_tokens=72,
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description="One GRPO optimizer step against TRL.")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=0, help="measured rounds of each case")
    parser.add_argument("--quick", action="store_true", help="two rounds on the character model: checks the benchmark")
    options = parsed(parser)
    quiet()
    chosen = [case for case in CASES if options.only in case.name and (case.small or not options.quick)]
    rounds = 2 if options.quick else options.rounds
    comparisons = [_compare(case, rounds or case.rounds) for case in chosen]
    partial = "-quick" if options.quick else "-partial" if options.only or options.rounds else ""
    return 0 if report(f"grpo_step{partial}", comparisons, theirs="TRL") else 1


def _compare(case: Case, rounds: int) -> Comparison:
    print(case.name, file=sys.stderr, flush=True)
    model: Path = char_model() if case.small else smollm2()
    settings = {
        "model": str(model),
        "prompts": case.prompts(PROMPTS),
        "group_size": GROUP_SIZE,
        "new_tokens": case.new_tokens,
        "bf16": case.bf16,
        "microbatch": case.trl_microbatch,
    }
    sides = {"tidemill": (tidemill_side, settings), "TRL": (trl_side, settings)}
    results = take_turns(sides, rounds=rounds, deadline_s=DEADLINE_S)
    for side, result in results.items():
        check_signal(side, result)
    ours = results["tidemill"]
    return compare(
        case.name,
        ours,
        results["TRL"],
        target=case.target,
        tokens_packed=int(ours.turns[0].notes["tokens_packed"]),
        groups_without_signal=int(sum(turn.notes["groups_without_signal"] for turn in ours.turns)),
    )


if __name__ == "__main__":
    sys.exit(main())
