"""Wall time of episodes whose environment takes a second per turn, with the embedded engine.

64 episodes of four turns, 32 tokens a turn, eight slots. Compared with the larger of two bounds: the same episodes with
an environment that answers at once, and one episode alone. The control holds a slot during the call: eight episodes at
a time, so that every episode has a slot from its start to its end.
"""

from __future__ import annotations

import io
import json
import string
from pathlib import Path
from statistics import median

from benchmarks.agent_faults import ENVIRONMENTS
from tidemill.config.model import CharModelConfig
from tidemill.config.schema import RunSpec
from tidemill.core.records import Record
from tidemill.jobs.train import train
from tidemill.models.builtin import build_char_model
from tidemill.telemetry.metrics import read_metrics

EPISODES, TURNS, TURN_TOKENS, SLOTS, CALL_S = 64, 4, 32, 8, 1.0
MOST, CONTROL_LEAST = 1.15, 3.0


class Waited(Record):
    """Seconds of 64 episodes."""

    wall_s: float
    engine_s: float  # the environment answers at once
    critical_s: float  # one episode alone
    control_s: float  # a slot is held during the call
    tokens_per_turn: float

    @property
    def ratio(self) -> float:
        return self.wall_s / max(self.engine_s, self.critical_s)

    @property
    def control_ratio(self) -> float:
        return self.control_s / max(self.engine_s, self.critical_s)


def waited(folder: Path, *, rounds: int) -> Waited:
    """Medians of `rounds` evaluations each; the control is the sum of the evaluations of eight episodes."""
    model = _endless_model(folder / "model")
    wall = _evaluations(folder / "wall", model, episodes=EPISODES, seconds=CALL_S, rounds=rounds)
    engine = _evaluations(folder / "engine", model, episodes=EPISODES, seconds=0.0, rounds=rounds)
    alone = _evaluations(folder / "alone", model, episodes=1, seconds=CALL_S, rounds=rounds)
    held = _evaluations(folder / "held", model, episodes=SLOTS, seconds=CALL_S, rounds=EPISODES // SLOTS)
    samples = (folder / "wall" / "samples" / "step_000000.eval-held_out.jsonl").read_text().splitlines()
    lengths = [turn["end"] - turn["start"] for line in samples for turn in json.loads(line)["turns"]]
    return Waited(
        wall_s=median(wall),
        engine_s=median(engine),
        critical_s=median(alone),
        control_s=sum(held),
        tokens_per_turn=sum(lengths) / len(lengths),
    )


def check_waited(found: Waited) -> None:
    """Raises RuntimeError: turns were shorter than all sides assume, or the environment answered at once."""
    if found.tokens_per_turn != TURN_TOKENS:
        raise RuntimeError(f"turns have {found.tokens_per_turn:g} tokens, expected {TURN_TOKENS}")
    if found.critical_s < (TURNS - 1) * CALL_S:
        raise RuntimeError(f"an episode took {found.critical_s:g} s: its environment did not wait {CALL_S:g} s a turn")


def _endless_model(folder: Path) -> Path:
    """A character model of 13M parameters without an end token."""
    folder.mkdir()
    build_char_model(CharModelConfig(alphabet=string.digits + "-", hidden_size=512, layers=4, context=256), folder)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        kept = json.loads((folder / name).read_text())
        kept.pop("eos_token_id", None), kept.pop("eos_token", None)
        (folder / name).write_text(json.dumps(kept))
    return folder


def _evaluations(directory: Path, model: Path, *, episodes: int, seconds: float, rounds: int) -> list[float]:
    """Seconds of `rounds` evaluations of one run, after a first one that starts the environments' processes."""
    tables = {
        "run": {"dir": directory},
        "model": {"source": str(model)},
        "task": {"kind": "environment", "train_size": 8, "held_out_size": episodes},
        "env": {
            "name": f"{ENVIRONMENTS}:Waiting",
            "params": {"seconds": seconds},
            "turns": TURNS,
            "turn_tokens": TURN_TOKENS,
            "observation_tokens": 8,
            "concurrency": episodes,
            "self_test": 0,
        },
        "scoring": {"rewards": [{"kind": "environment"}]},
        "sampling": {"max_new_tokens": TURNS * TURN_TOKENS},
        "engine": {"slots": SLOTS},
        "batch": {"prompts": 1, "group_size": 2},
        "optimizer": {"learning_rate": 1e-9},
        "trainer": {"steps": rounds, "threads": 1},
        "eval": {"every_steps": 1, "prompts": episodes},
        "checkpoint": {"every_steps": 0},
    }
    train(RunSpec.model_validate(tables), telemetry_stream=io.StringIO())
    lines = [line for line in read_metrics(directory / "metrics.jsonl") if line.step > 0]
    return [line.values["time_eval_s"] for line in lines]
