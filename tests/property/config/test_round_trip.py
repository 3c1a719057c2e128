"""Whatever a run is configured as, its written form reads back as the same run."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tidemill.config.algorithm import CORRECTION_LIMITS, PRESETS
from tidemill.config.load import differences, from_toml
from tidemill.config.schema import RunSpec
from tidemill.config.toml import to_toml

TEXTS = st.text(max_size=20)  # control characters, quotes and line ends included; TOML has no lone surrogates
NAMES = TEXTS.filter(bool)
FOLDERS = st.text("aZ9-_é '\"", min_size=1, max_size=20).filter(lambda name: name == name.strip())
NUMBERS = st.floats(min_value=1e-300, max_value=1e300)


def optional(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


REWARDS = st.one_of(
    st.fixed_dictionaries({"kind": st.sampled_from(["exact", "numeric", "random"]), "weight": NUMBERS}),
    st.fixed_dictionaries({"kind": st.just("length"), "target_tokens": st.integers(1, 100)}),
    st.fixed_dictionaries({"kind": st.just("regex"), "pattern": st.sampled_from([r"\d+", 'a"b', "\n", "'", "é"])}),
)
TASKS = st.one_of(
    st.fixed_dictionaries({"kind": st.just("arithmetic"), "operators": st.sampled_from(["+", "-*", "+-*"])}),
    st.fixed_dictionaries({"kind": st.just("file"), "path": TEXTS.filter(lambda text: "\0" not in text)}),
    st.fixed_dictionaries(
        {
            "kind": st.just("reasoning_gym"),
            "name": TEXTS,
            "params": st.dictionaries(
                TEXTS, st.booleans() | st.integers(-(2**63), 2**63 - 1) | NUMBERS | TEXTS, max_size=4
            ),
        }
    ),
)
RUNS = st.fixed_dictionaries(
    {
        "run": st.fixed_dictionaries({"name": FOLDERS, "seed": st.integers(0, 2**64 - 1)}),
        "task": TASKS,
        "scoring": st.fixed_dictionaries({"rewards": st.lists(REWARDS, min_size=1, max_size=3)}),
        "sampling": st.fixed_dictionaries({"temperature": NUMBERS, "stop": st.lists(NAMES, max_size=3)}),
        "algorithm": st.fixed_dictionaries(
            {"name": st.sampled_from(list(PRESETS)), "kl_stop": optional(NUMBERS)},
            optional={
                "kl_in": st.sampled_from(["loss", "reward"]),
                "correction": st.fixed_dictionaries({"kind": st.sampled_from(list(CORRECTION_LIMITS))}),
            },
        ),
        "optimizer": st.fixed_dictionaries({"learning_rate": NUMBERS}),
        "engine": st.fixed_dictionaries({"batch_invariant": st.booleans()}),
    }
)


@given(RUNS)
def test_records_round_trip(values: dict[str, Any]) -> None:
    spec = RunSpec.model_validate(values)
    again = from_toml(to_toml(spec))
    assert again == spec
    assert differences(spec, again) == []
