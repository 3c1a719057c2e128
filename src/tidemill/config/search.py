"""Search among the configuration keys: every word must match, in a key, its values, its text or its other names."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

from tidemill.config.foreign_names import ForeignName, foreign_names
from tidemill.config.keys import Key, all_keys

SYNONYMS = {
    "run.dir": "output directory resume",
    "run.seed": "random",
    "model.source": "policy checkpoint name path",
    "model.lora": "peft adapter",
    "task.path": "dataset data prompts",
    "task.system_prompt": "instruction",
    "data.path": "dataset sft dpo demonstrations pairs",
    "data.max_tokens": "seq len sequence length max context truncation",
    "env": "agent tools multi-turn",
    "scoring.rewards": "reward function verifier",
    "scoring.rewards[].function": "custom reward verifier",
    "scoring.truncated": "overlong length mask",
    "sampling.max_new_tokens": "seq len sequence length max completion response",
    "sampling.stop": "eos end",
    "engine.kind": "vllm sglang inference server backend",
    "engine.context_tokens": "seq len sequence length max context window model",
    "engine.slots": "concurrency batch size",
    "pool": "spot preemptible",
    "pool.workers": "gpus engines replicas",
    "placement.engine": "colocate server sleep",
    "placement.reference": "ref policy model offload",
    "placement.critic": "value model",
    "weights.transport": "sync broadcast nccl",
    "batch.prompts": "batch size",
    "batch.group_size": "n samples per prompt rollouts completions generations",
    "batch.minibatches": "mini batch size optimizer steps",
    "batch.epochs": "ppo iterations",
    "batch.microbatch_tokens": "micro batch size gradient accumulation oom memory",
    "schedule.max_policy_lag": "staleness async off-policy asynchronous",
    "schedule.unfinished": "partial rollout",
    "algorithm.advantage": "gae grpo rloo estimator std baseline",
    "algorithm.clip_low": "epsilon lower ratio",
    "algorithm.clip_high": "epsilon upper higher ratio dapo",
    "algorithm.correction.kind": "importance sampling mismatch tis",
    "algorithm.dynamic_sampling": "filter zero advantage std",
    "algorithm.entropy_bonus": "coefficient coef",
    "algorithm.kl_beta": "kl penalty coefficient coef ref policy model",
    "algorithm.kl_target": "adaptive controller",
    "algorithm.lam": "gae lambda",
    "algorithm.normalize": "loss aggregation length bias",
    "algorithm.whiten": "normalize advantages",
    "supervised": "sft fine-tuning",
    "preference": "dpo",
    "preference.loss": "dpo ipo",
    "reward_model": "rm bradley-terry",
    "optimizer": "adam adamw",
    "optimizer.learning_rate": "lr",
    "optimizer.schedule": "scheduler decay",
    "optimizer.max_grad_norm": "gradient clipping clip",
    "critic": "value function ppo gae",
    "critic.learning_rate": "lr",
    "trainer.steps": "iterations epochs number length",
    "trainer.hours": "time limit budget",
    "trainer.precision": "dtype mixed amp half",
    "trainer.device": "gpu",
    "trainer.shards": "fsdp ddp zero distributed multi-gpu gpus",
    "trainer.offload": "cpu memory oom",
    "trainer.activation_checkpointing": "gradient recompute memory oom",
    "eval.every_steps": "evaluation frequency interval validation",
    "eval.samples_per_prompt": "pass@k",
    "checkpoint.every_steps": "save frequency interval",
    "telemetry.sinks": "logging logger weights biases",
    "export.dtype": "fp32 save precision",
}
"""Words of the field for a key, or for every key of a section, which neither its name nor its text contains."""
WORD = re.compile(r"[a-z0-9@]+")
IGNORED = frozenset(WORD.findall("a an and do for get how i in is my number of on or set the to what where which with"))
MIN_PREFIX = 3
MIN_TEXT_PREFIX = 4
MAX_ENDING = 4  # of an inflected word: clip, clipping
COMPLETE = 2  # added for a key whose whole name, of several words, the query contains
NAMED = 50  # score of a key that is the counterpart of a name in the query

Field = tuple[frozenset[str], int, int, int]
"""Words, the score of an equal one, that of a similar one, and the length from which a prefix is similar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a query matches, best first."""

    keys: Sequence[Key]
    names: Sequence[ForeignName]  # of other frameworks
    is_name: bool  # the query is a name of another framework


def search(query: Sequence[str]) -> SearchResult:
    """The keys that every word of the query matches, and the names of other frameworks that contain all of them.

    A name of another framework (`num_generations`, `rollout.n`) has only its counterparts.
    """
    words = query_words(query)
    names = [name for name in foreign_names() if all(_matches(word, _words_of(name.name)) for word in words)]
    names.sort(key=lambda name: (not _is_whole(name, words), len(_words_of(name.shown))))  # the closest ones first
    whole = [name for name in names if _is_whole(name, words)]
    is_name = len(query) == 1 and (len(words) > 1 or any(name.name == words[0] for name in whole))
    counterparts = {key for name in whole for key in name.ours} if is_name else set()
    if counterparts and len(words) > 1:
        found = [key for key in all_keys() if key.dotted in counterparts]
        return SearchResult(keys=found, names=whole, is_name=True)
    scored = [(key, _score(key, words) + NAMED * (key.dotted in counterparts)) for key in all_keys()]
    ranked = sorted((pair for pair in scored if pair[1]), key=lambda pair: -pair[1])
    return SearchResult(keys=[key for key, _ in ranked], names=whole or names, is_name=is_name and bool(whole))


def query_words(query: Sequence[str]) -> list[str]:
    """The words of a query, in lower case: `rollout.n`, `--num_generations` and `kl-penalty` have several."""
    words = [word for text in query for word in WORD.findall(text.lower())]
    return [word for word in words if word not in IGNORED] or words


def suggestion(query: Sequence[str]) -> str:
    """A hint for a query without a result: similar words, or how many keys each word matches alone."""
    words = query_words(query)
    counts = {word: len(search([word]).keys) for word in words}
    unknown = [word for word, count in counts.items() if not count]
    texts = [key.dotted for key in all_keys()] + [name.name for name in foreign_names()] + list(SYNONYMS.values())
    vocabulary = sorted(_words_of(" ".join(texts)))
    close = {word: difflib.get_close_matches(word, vocabulary, 1, 0.7) for word in unknown}
    if unknown and all(close.values()):
        corrected = " ".join(close[word][0] if word in close else word for word in words)
        return f"did you mean `tidemill config search {corrected}`?"
    alone = [f"{word} ({count})" for word, count in counts.items() if count]
    if alone:
        return f"leave words out; alone, these match keys: {', '.join(alone)}"
    return "`tidemill train --help-all` lists every key"


def _is_whole(name: ForeignName, words: Sequence[str]) -> bool:
    """Whether the query is the name, or the end of it after a dot."""
    parts = [WORD.findall(part) for part in name.name.lower().split(".")]
    return any([*chain.from_iterable(parts[start:])] == [*words] for start in range(len(parts)))


def _matches(word: str, words: Iterable[str]) -> bool:
    return word in words or any(_is_similar(word, other, MIN_PREFIX) for other in words)


def _is_similar(word: str, other: str, min_prefix: int) -> bool:
    begins = len(word) >= min_prefix and other.startswith(word)
    inflected = len(other) >= MIN_TEXT_PREFIX and word.startswith(other) and len(word) - len(other) <= MAX_ENDING
    return begins or inflected


def _score(key: Key, words: Sequence[str]) -> int:
    """0 if a word does not match."""
    scores = [max(_field_score(word, field) for field in _fields()[key.dotted, key.variant]) for word in words]
    name = _words_of(key.path[-1])
    return sum(scores) + COMPLETE * (len(name) > 1 and name <= set(words)) if all(scores) else 0


def _field_score(word: str, field: Field) -> int:
    words, equal, similar, min_prefix = field
    if word in words:
        return equal
    return similar if any(_is_similar(word, other, min_prefix) for other in words) else 0


def _words_of(text: str) -> frozenset[str]:
    return frozenset(WORD.findall(text.lower()))


@cache
def _fields() -> dict[tuple[str, str], tuple[Field, ...]]:
    """By key and variant: where a word may match, with the scores. The name counts most, the text least."""
    other_names = defaultdict[str, list[str]](list)  # those that other frameworks have for a key
    for name in foreign_names():
        for dotted in name.ours:
            other_names[dotted].append(name.name)
    return {(key.dotted, key.variant): _fields_of(key, other_names[key.dotted]) for key in all_keys()}


def _fields_of(key: Key, other_names: Sequence[str]) -> tuple[Field, ...]:
    sections = [".".join(key.path[:depth]) for depth in range(1, len(key.path))]
    return (
        (_words_of(key.path[-1]), 10, 7, MIN_PREFIX),
        (_words_of(" ".join(key.path[:-1])), 5, 4, MIN_PREFIX),
        (_words_of(SYNONYMS.get(key.dotted, "")), 5, 3, MIN_PREFIX),
        (_words_of(" ".join(other_names)), 4, 2, MIN_PREFIX),
        (_words_of(" ".join(SYNONYMS.get(section, "") for section in sections)), 3, 2, MIN_PREFIX),
        (_words_of(key.accepts), 3, 2, MIN_TEXT_PREFIX),
        (_words_of(key.doc), 2, 1, MIN_TEXT_PREFIX),
    )
