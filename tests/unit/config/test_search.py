from __future__ import annotations

import pytest

from tidemill.config.search import search, suggestion


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("kl", ["algorithm.kl_beta"]),
        ("kl penalty", ["algorithm.kl_beta", "algorithm.kl_in"]),
        ("KL-penalty coefficient", ["algorithm.kl_beta"]),
        ("lr", ["optimizer.learning_rate", "critic.learning_rate"]),
        ("learning rate", ["optimizer.learning_rate", "critic.learning_rate"]),
        ("beta", ["algorithm.kl_beta", "preference.beta"]),
        ("vllm", ["engine.kind", "engine.vllm.memory_fraction"]),
        ("ref policy", ["placement.reference", "algorithm.kl_beta"]),
        ("gae", ["algorithm.advantage", "algorithm.lam"]),
        ("clip higher", ["algorithm.clip_high"]),
        ("seq len", ["data.max_tokens", "sampling.max_new_tokens", "engine.context_tokens"]),
        ("offload", ["trainer.offload"]),
        ("gradient clipping", ["optimizer.max_grad_norm", "critic.max_grad_norm"]),
        ("the number of group samples", ["batch.group_size"]),
        ("curriculum", ["batch.sampler"]),
        # A name of another framework has its counterparts, and nothing that only shares words with it.
        ("num_generations", ["batch.group_size"]),
        ("--per-device-train-batch-size", ["batch.prompts", "supervised.minibatch_tokens"]),
        ("rollout.n", ["batch.group_size"]),
        ("max_completion_length", ["sampling.max_new_tokens"]),
    ],
)
def test_the_best_keys_come_first(query: str, first: list[str]) -> None:
    found = [key.dotted for key in search(query.split()).keys]
    assert found[: len(first)] == first


def test_every_word_has_to_match() -> None:
    whole, kl, clip = (search(query.split()).keys for query in ("kl clipping", "kl", "clipping"))
    assert whole
    assert {key.dotted for key in whole} <= {key.dotted for key in kl} & {key.dotted for key in clip}


def test_names_of_other_frameworks() -> None:
    named = search(["num_generations"])
    assert named.is_name
    assert [(name.framework, name.ours) for name in named.names] == [("TRL", ("batch.group_size",))]
    assert [key.dotted for key in named.keys] == ["batch.group_size"]
    words = search(["vllm"])
    assert not words.is_name
    assert {"use_vllm", "vllm_mode"} <= {name.name for name in words.names}
    without_key = search(["neftune_noise_alpha"])
    assert not without_key.keys
    assert without_key.names[0].note == "embeddings get no noise"


@pytest.mark.parametrize(
    ("query", "hint"),
    [
        ("kl penelty", "did you mean `tidemill config search kl penalty`?"),
        ("temprature", "did you mean `tidemill config search temperature`?"),
        ("kl banana", "leave words out; alone, these match keys: kl ("),
        ("zzzz", "`tidemill train --help-all` lists every key"),
    ],
)
def test_suggestions_where_nothing_matches(query: str, hint: str) -> None:
    found = search(query.split())
    assert (found.keys, found.names) == ([], [])
    assert suggestion(query.split()).startswith(hint)
