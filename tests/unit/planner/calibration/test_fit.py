from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planted import observed, planted, spec_of
from tidemill.planner.calibration.fit import fit, fit_by_simulation
from tidemill.planner.calibration.run_observations import Observed

COST = st.floats(1e-4, 0.05)


@given(COST, st.floats(1e-4, 0.01), COST, st.floats(1e-5, 1e-3))
@settings(max_examples=12)
def test_a_planted_profile_is_found_again(pass_s: float, row_s: float, step_s: float, token_s: float) -> None:
    spec = spec_of()
    right = planted(spec, engine_pass_s=pass_s, engine_row_s=row_s, train_step_s=step_s, train_token_s=token_s)
    found = fit(observed(spec, right))
    for name, value in {"engine_pass_s": pass_s, "train_token_s": token_s, "train_step_s": step_s}.items():
        assert found[name] == pytest.approx(value, rel=0.02, abs=1e-6), name
    # A token is drawn of every row: what is a row's and what is a token's is told by the samples just begun alone.
    assert found["engine_row_s"] + found["engine_drawn_s"] == pytest.approx(row_s, rel=0.05)
    assert found["controller_sample_s"] == pytest.approx(right["controller_sample_s"])
    assert found["packed_prompt_tokens"] == pytest.approx(right["packed_prompt_tokens"])
    assert found.residuals["engine"] < 1e-3


def test_the_time_of_a_message_is_fitted_by_simulation() -> None:
    spec = spec_of()
    right = planted(spec, call_s=0.01)
    seen = observed(spec, right)
    fitted = fit(seen)
    assert fitted["call_s"] == 0.0
    found = fit_by_simulation(msgspec.structs.replace(fitted, lengths=right.lengths), seen)
    assert found["call_s"] == pytest.approx(0.01, rel=0.1)
    assert found.simulated_step_s == pytest.approx(found.step_s.value, rel=0.01)


def test_boots_on_shared_cores_are_separated_from_others() -> None:
    pool = {"kind": "static", "workers": 2}
    spec = spec_of(steps=8, runtime="ray", pool=pool)
    right = planted(spec, boot_s=1.0, publish_s=0.01, pull_s=0.01)
    seen = observed(spec, right)
    # Three processes, the trainer's among them, on two cores: a boot took longer than a second.
    assert min(seen.boots_s) > 1.2
    assert fit_by_simulation(fit(seen), seen)["boot_s"] == pytest.approx(1.0, rel=0.1)


def test_costs_that_a_run_cannot_determine_are_noted() -> None:
    spec = spec_of()
    notes = " ".join(fit(observed(spec, planted(spec))).notes)
    assert "no preemptible worker joined" in notes
    assert "training's time: the square of the tokens" in notes


def on_a_busy_machine(seen: Observed) -> Observed:
    """Engines and trainer waited for a processor for as long as they had one."""
    for event in seen.events:
        for row in event.get("work", ()):
            row["busy_s"] += row["cpu_s"]
    for line in seen.metrics:
        assert isinstance(line.values, dict)
        line.values["time_step_s"] += line.values["time_train_s"]
        line.values["time_train_s"] *= 2
    return seen


def test_a_step_is_reported_in_wall_time_and_its_cpu_time_apart() -> None:
    spec = spec_of()
    seen = on_a_busy_machine(observed(spec, planted(spec)))
    found = fit(seen)
    usual = [line.values for line in seen.usual]
    steps = {line.step for line in seen.usual}
    engine_s = sum(row["cpu_s"] for event in seen.named("decode") if event["step"] in steps for row in event["work"])
    cpu_s = engine_s + sum(values["cpu_train_s"] + values["cpu_controller_s"] for values in usual)
    assert found.step_s.value == pytest.approx(sum(values["time_step_s"] for values in usual) / len(usual))
    assert found.step_cpu_s.value == pytest.approx(cpu_s / len(usual))
    assert found.step_cpu_s.value < found.step_s.value


def test_on_a_machine_that_others_used_waiting_for_a_processor_is_no_part_of_a_step() -> None:
    spec = spec_of()
    quiet = observed(spec, planted(spec))
    alone = quiet.step_s
    noisy = on_a_busy_machine(observed(spec, planted(spec)))
    assert quiet.quiet and not noisy.quiet
    assert any("50 %" in note for note in fit(noisy).notes)
    waited = [
        sum(row["cpu_s"] for event in noisy.named("decode") for row in event["work"] if event["step"] == line.step
            and event["purpose"] == "train")
        for line in noisy.usual
    ]  # fmt: skip
    assert noisy.unhindered_step_s() == pytest.approx([one - other for one, other in zip(alone, waited, strict=True)])
