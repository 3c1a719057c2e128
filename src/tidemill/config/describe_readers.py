"""What `--dry-run` says of the frozen models beside the policy."""

from __future__ import annotations

from tidemill.config.schema import RunSpec
from tidemill.config.words import counted, number


def reader_topics(spec: RunSpec) -> list[tuple[str, str]]:
    """(topic, sentence) pairs; none where there is neither reward model nor reference."""
    placement, said = spec.placement, list[str]()
    if models := len(spec.scoring.model_folders):
        where = "on an actor each" if placement.reward_model == "actor" else "in the controller's process"
        said.append(f"{counted(models, 'reward model')} {where}")
    if spec.algorithm.kl_beta:
        where = "on an actor of its own" if placement.reference == "actor" else "beside the trainer"
        said.append(f"the reference {where}")
    if not said:
        return []
    words = " and ".join(said)
    if spec.reading.ahead:
        words += (
            f"; samples are read while they are generated, {counted(spec.reading.chunk_tokens, 'token')} at a time, "
            f"{number(spec.reading.cache_tokens)} kept"
        )
    return [("scoring", words)]


def reader_notes(spec: RunSpec) -> list[str]:
    """Settings of reading that will probably not do what was hoped."""
    reading, found = spec.reading, list[str]()
    if not reading.ahead or not (spec.scoring.model_folders or spec.algorithm.kl_beta):
        return found
    if reading.chunk_tokens > spec.sampling.max_new_tokens:
        found.append(
            f"no completion fills a chunk of reading.chunk_tokens = {reading.chunk_tokens}: only prompts are read ahead"
        )
    if spec.runtime == "inprocess" and not reading.own_thread:
        found.append(
            "one thread generates, learns and reads: with reading.own_thread = false it has hardly ever time to read "
            "ahead"
        )
    return found
