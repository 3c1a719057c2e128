"""Table of generalised advantages. They are linear in rewards and values, so the table has the advantages that
`algos.returns.gae` gives for a single reward or value of 1, and a page adds up the shares of those that it shows."""

from __future__ import annotations

from typing import Any

import torch

from scripts.site.explorations.rounding import row
from tidemill.algos.returns import gae

STEPS = 4
GAMMAS = (0.9, 0.95, 0.99, 1.0)
LAMBDAS = (0.0, 0.5, 0.8, 0.9, 0.95, 1.0)
ENDS = ("terminated", "truncated")
EXAMPLE: dict[str, Any] = {
    "rewards": [0.0, 0.0, 0.0, 1.0],
    "values": [0.5, 0.6, 0.7, 0.8],
    "next": 0.5,
    "gamma": 0.99,
    "lambda": 0.95,
    "end": "terminated",
}


def advantages(rewards: list[float], values: list[float], after: float, *, gamma: float, lam: float, end: str) -> Any:
    """float64 [T]. `after` is the value of the state after the last step, which a terminated episode ignores."""
    last = torch.zeros(len(rewards), dtype=torch.bool)
    last[-1] = True
    values_T = torch.tensor([*values, after], dtype=torch.float64)
    return gae(
        torch.tensor(rewards, dtype=torch.float64),
        values_T[:-1],
        values_T[1:],
        terminated_T=last & (end == "terminated"),
        truncated_T=last & (end == "truncated"),
        gamma=gamma,
        lam=lam,
    )


def table() -> dict[str, Any]:
    """`shares` [end][gamma][lambda][input][t]; inputs: rewards, values, and the value after the last step."""
    ones = torch.eye(2 * STEPS + 1, dtype=torch.float64).tolist()
    shares = [
        [
            [
                [
                    row(advantages(one[:STEPS], one[STEPS:-1], one[-1], gamma=gamma, lam=lam, end=end).tolist(), 12)
                    for one in ones
                ]
                for lam in LAMBDAS
            ]
            for gamma in GAMMAS
        ]
        for end in ENDS
    ]
    example = advantages(
        EXAMPLE["rewards"],
        EXAMPLE["values"],
        EXAMPLE["next"],
        gamma=EXAMPLE["gamma"],
        lam=EXAMPLE["lambda"],
        end=EXAMPLE["end"],
    )
    return {
        "gammas": list(GAMMAS),
        "lambdas": list(LAMBDAS),
        "ends": list(ENDS),
        "example": EXAMPLE | {"advantages": row(example.tolist())},
        "shares": shares,
    }
