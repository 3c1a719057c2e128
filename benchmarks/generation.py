"""Generation: the embedded engine and `transformers.generate`, in four shapes.

    python -m benchmarks.generation [--model FOLDER] [--quick]

Both sides generate the same number of tokens from the same prompts. In addition, our logprobs are compared with the
stock model's over the same tokens and must agree to 1e-4.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.generation_hf import transformers_side
from benchmarks.generation_tidemill import check_logprobs, tidemill_side
from benchmarks.measuring import Comparison, compare, report
from benchmarks.models import char_model, quiet, smollm2
from benchmarks.origin import parsed
from benchmarks.turns import take_turns
from benchmarks.workload import Workload, demo_shape, even_shape, long_tail

LARGEST_DIFFERENCE = 1e-4
DEADLINE_S = 1800.0
SMOLLM2_VOCABULARY = 49152


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--model", default="", help="a local folder instead of SmolLM2")
    parser.add_argument("--quick", action="store_true", help="tiny shapes on a character model: checks the benchmark")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    options = parsed(parser)
    quiet()
    model = options.model or str(char_model() if options.quick else smollm2())
    workloads = [
        item for item in (quick_workloads() if options.quick else full_workloads()) if options.only in item.case
    ]
    comparisons = [_compare(model, workload) for workload in workloads]
    partial = "-quick" if options.quick else "-partial" if options.only or options.model else ""
    reached = report(
        f"generation{partial}", comparisons, theirs="transformers.generate", notes={"model": Path(model).name}
    )
    agree = all(item.details["largest_logprob_difference"] <= LARGEST_DIFFERENCE for item in comparisons)
    if not agree:
        print(f"logprobs differ by more than {LARGEST_DIFFERENCE:g}", file=sys.stderr)
    return 0 if agree and reached else 1


def full_workloads() -> list[Workload]:
    even = {"vocabulary": SMOLLM2_VOCABULARY, "rounds": 3}
    return [
        demo_shape(rounds=5),
        even_shape(prompts=4, group_size=8, target=1.3, **even),
        even_shape(prompts=32, group_size=1, target=1.0, **even),
        long_tail(samples=256, group_size=8, slots=32, vocabulary=SMOLLM2_VOCABULARY, rounds=1),
    ]


def quick_workloads() -> list[Workload]:
    even = even_shape(prompts=2, group_size=2, target=None, vocabulary=40, rounds=1)
    tail = long_tail(samples=8, group_size=2, slots=4, vocabulary=40, rounds=1)
    tail = replace(tail, lengths=tuple(min(length, 20) for length in tail.lengths), target=None)
    return [replace(demo_shape(rounds=1), target=None), replace(even, lengths=(8,) * 4), tail]


def _compare(model: str, workload: Workload) -> Comparison:
    print(workload.case, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        completions = Path(folder) / "completions.json"
        settings = {"model": model, "workload": workload, "completions": str(completions)}
        sides = {"tidemill": (tidemill_side, settings), "transformers": (transformers_side, settings)}
        results = take_turns(sides, rounds=workload.rounds, deadline_s=DEADLINE_S, warm_up=False)
        agreement = check_logprobs(model, completions)
    ours, theirs = results["tidemill"], results["transformers"]
    tokens = sum(workload.lengths)
    comparison = compare(
        workload.case,
        ours,
        theirs,
        target=workload.target,
        prompt_tokens_computed=int(ours.turns[0].notes["prompt_tokens_computed"]),
        largest_logprob_difference=agreement.largest_difference,
        logprobs_checked=agreement.tokens,
    )
    rates = (
        f"ours {tokens / comparison.ours_cpu_s:.0f}, theirs {tokens / comparison.theirs_cpu_s:.0f} tokens/s of CPU time"
    )
    print(f"  {rates}; logprobs agree to {agreement.largest_difference:.1e}", file=sys.stderr, flush=True)
    return comparison


if __name__ == "__main__":
    sys.exit(main())
