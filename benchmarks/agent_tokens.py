"""Whether a trainer learns from the tokens that the engines computed, each after the same context.

A random model with SmolLM2's tokenizer writes turns of random tokens, most of which decoding and encoding would change,
and an environment answers with random texts, while workers are evicted. Every drawn token is noted in the engine with
the digest of everything before it, and compared with the tree that the trainer builds.
"""

from __future__ import annotations

import hashlib
import io
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.agent_faults import ENVIRONMENTS, EVICTED
from benchmarks.models import smollm2
from benchmarks.subjects import check_counts
from tidemill.config.load import load_spec
from tidemill.core.records import GenerateRequest, Record, SampleId, TokenDelta, unpack_tokens
from tidemill.jobs.train import train
from tidemill.rollout.engines.embedded.engine import EmbeddedEngine
from tidemill.telemetry.events import EVICTION, read_events
from tidemill.trainer.packing import Microbatch, WeightedSample, pack, trained_positions

RECIPE = f"""\
[task]
kind = "environment"
train_size = 400
held_out_size = 8
[env]
name = "{ENVIRONMENTS}:Scribble"
turns = 5
turn_tokens = 6
observation_tokens = 12
self_test = 0
[scoring]
rewards = [{{ kind = "environment" }}]
[sampling]
max_new_tokens = 24
[engine]
slots = 64
[batch]
prompts = 32
group_size = 8
[optimizer]
learning_rate = 1e-4
[trainer]
threads = 1
[checkpoint]
every_steps = 0
[eval]
every_steps = 0
prompts = 2
"""


class ComparedTokens(Record):
    """Trained tokens against drawn ones."""

    trajectories: int
    turns: int
    tokens: int  # trained
    differing: int  # other ids, or another context
    reencoded_differently: int  # turns whose ids decoding and encoding would change
    evictions: int


@dataclass
class Notes:
    """What engines drew and what the trainer got: (token, digest of its context) by sample and completion position."""

    contexts: dict[SampleId, list[int]] = field(default_factory=dict)
    drawn: dict[SampleId, dict[int, tuple[int, bytes]]] = field(default_factory=dict)
    trained: dict[SampleId, dict[int, tuple[int, bytes]]] = field(default_factory=dict)
    turns: list[list[int]] = field(default_factory=list)

    def requested(self, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:
            context = unpack_tokens(request.prompt_ids + request.prefix_ids)
            self.contexts[request.sample_id] = list(context)

    def polled(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            context, drawn = self.contexts[delta.sample_id], self.drawn.setdefault(delta.sample_id, {})
            for at, token in enumerate(unpack_tokens(delta.token_ids), delta.start):
                drawn[at] = token, _digest(context)
                context.append(token)

    def packed(self, samples: Sequence[WeightedSample], microbatch: Microbatch) -> None:
        tree, paths = microbatch.tree, iter(microbatch.tree.paths)
        nodes = microbatch.head_nodes[microbatch.head_rows].tolist()
        order = np.argsort(microbatch.samples.buffer_T.numpy())  # type: ignore[union-attr]
        in_order = iter([(nodes[at], int(microbatch.targets[at])) for at in order])
        for sample in samples:
            trajectory = sample.trajectory
            for turn in trajectory.turns:
                self.turns.append(list(unpack_tokens(trajectory.completion_ids))[turn.start : turn.end])
            trained = self.trained.setdefault(trajectory.sample_id, {})
            path = next(paths)
            for at in trained_positions(trajectory).tolist():
                node, target = next(in_order)
                index = int(np.flatnonzero(path == node)[0])
                trained[at] = target, _digest(tree.token_ids[path[: index + 1]].tolist())


def compared_tokens(folder: Path, *, steps: int) -> ComparedTokens:
    """Train for some steps of 256 trajectories, with evictions."""
    recipe, run = folder / "recipe.toml", folder / "run"
    recipe.write_text(RECIPE)
    arguments = (f"@{recipe}", f"--model.source={_model(folder / 'model')}", f"--run.dir={run}", *EVICTED)
    with _noted() as notes:
        train(load_spec((*arguments, f"--trainer.steps={steps}"), purpose="train"), telemetry_stream=io.StringIO())
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    differing = sum(
        notes.drawn.get(sample_id, {}).get(at) != found
        for sample_id, trained in notes.trained.items()
        for at, found in trained.items()
    )
    return ComparedTokens(
        trajectories=len(notes.trained),
        turns=len(notes.turns),
        tokens=sum(map(len, notes.trained.values())),
        differing=differing,
        reencoded_differently=sum(
            tokenizer.encode(tokenizer.decode(turn), add_special_tokens=False) != turn for turn in notes.turns
        ),
        evictions=sum(event["event"] == EVICTION for event in read_events(run / "events.jsonl")),
    )


def check_tokens(found: ComparedTokens) -> None:
    """Raises RuntimeError: no machine was evicted, or encoding the decoded turns again would change no token."""
    check_counts(
        "episodes of random turns",
        tokens=found.tokens,
        evictions=found.evictions,
        turns_reencoded_differently=found.reencoded_differently,
    )


@contextmanager
def _noted() -> Iterator[Notes]:
    """Note what every engine and the trainer does in the block."""
    notes, submit, poll, abort = Notes(), EmbeddedEngine.submit, EmbeddedEngine.poll, EmbeddedEngine.abort

    def submitting(engine: EmbeddedEngine, requests: Sequence[GenerateRequest]) -> None:
        notes.requested(requests)
        submit(engine, requests)

    def polling(engine: EmbeddedEngine, deadline_s: float) -> list[TokenDelta]:
        deltas = poll(engine, deadline_s)
        notes.polled(deltas)
        return deltas

    def aborting(engine: EmbeddedEngine, sample_ids: Sequence[SampleId]) -> list[TokenDelta]:
        deltas = abort(engine, sample_ids)
        notes.polled(deltas)
        return deltas

    def packing(samples: Sequence[WeightedSample], *more: Any, **named: Any) -> Microbatch:
        microbatch = pack(samples, *more, **named)
        notes.packed(samples, microbatch)
        return microbatch

    with (
        patch.object(EmbeddedEngine, "submit", submitting),
        patch.object(EmbeddedEngine, "poll", polling),
        patch.object(EmbeddedEngine, "abort", aborting),
        patch("tidemill.trainer.policy.pack", packing),
    ):
        yield notes


def _model(folder: Path) -> Path:
    """A random model of one layer with SmolLM2's tokenizer."""
    torch.manual_seed(0)
    source = smollm2()
    tokenizer = AutoTokenizer.from_pretrained(source)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=256, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    for path in source.glob("*token*"):
        shutil.copy(path, folder)
    return folder


def _digest(token_ids: list[int]) -> bytes:
    return hashlib.blake2b(np.asarray(token_ids, np.int32).tobytes(), digest_size=8).digest()
