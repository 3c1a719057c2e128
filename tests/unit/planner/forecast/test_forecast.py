from __future__ import annotations

import pytest

from tests.formulas import check_figures
from tests.planted import planted, spec_of
from tidemill.cli.plan_options import models_of, shape_of_model
from tidemill.hardware.figures import Derivation
from tidemill.planner.forecast.forecast import (
    derive,
    forecast_recipe,
    memory_on_this_machine,
    simulated_steps,
    uncertain,
)


def test_equal_arguments_make_equal_forecasts_and_numbers_are_drawn_within_their_errors() -> None:
    spec = spec_of(4)
    profile = planted(spec)
    assert forecast_recipe(spec, profile, seeds=2) == forecast_recipe(spec, profile, seeds=2)
    assert uncertain(profile, 0) is profile
    one = profile.numbers["engine_pass_s"]
    assert uncertain(profile, 3).numbers["engine_pass_s"] == one  # it has no error


def test_a_forecast_adds_up_and_derives_its_numbers() -> None:
    spec = spec_of(
        12, eval={"every_steps": 4, "prompts": 4}, checkpoint={"every_steps": 5}, fleet={"reserved_usd_per_hour": 36.0}
    )
    profile = planted(spec)
    found = forecast_recipe(spec, profile, seeds=2, most_samples=48)
    assert simulated_steps(spec, 48) == len(found.step_s) == 6
    assert found.of_step(9) == found.usual_step_s
    # Checkpoints after 5, 10 and the end; evaluations before, after 4 and 8, and at the end.
    assert found.outside_steps_s["checkpoints"] == pytest.approx(3 * 0.5)
    assert found.cost_usd == pytest.approx(0.01 * found.total_s.mean, rel=0.01)
    in_steps = sum(step.mean for step in found.step_s) + 6 * found.usual_step_s.mean
    assert found.total_s.mean == pytest.approx(2.0 + in_steps + 1.5 + found.outside_steps_s["evaluation"])
    assert sum(found.split_s.values()) == pytest.approx(found.usual_step_s.mean, rel=0.01)
    assert any("6 of 12 steps" in note for note in found.notes)
    sheet = Derivation()
    derive(found, sheet)
    char = spec_of(model={"source": "char"})
    memory_on_this_machine(char, models_of(char), profile, sheet)
    assert check_figures(sheet.figures) == 11


def test_a_character_model_has_the_parameters_that_it_is_built_with() -> None:
    shape = shape_of_model(spec_of(model={"source": "char"}).model)
    inner = shape.intermediate
    per_layer = 4 * shape.hidden**2 + 3 * shape.hidden * inner + 2 * shape.hidden
    assert shape.parameters == shape.vocab * shape.hidden + shape.layers * per_layer + shape.hidden


def test_a_forecast_includes_drawn_samples_and_every_set() -> None:
    drawn = {"every_steps": 0, "prompts": 4, "samples_per_prompt": 1}
    sets = [{"name": "math", "path": "math.jsonl"}]
    specs = [spec_of(2, eval=each) for each in ({"every_steps": 0, "prompts": 4}, drawn, drawn | {"sets": sets})]
    greedy, both, with_set = (
        forecast_recipe(spec, planted(spec), seeds=1).outside_steps_s["evaluation"] for spec in specs
    )
    # Completions of equal lengths on average: twice and four times as many.
    assert 1.5 < both / greedy < 2.5
    assert 1.6 < with_set / both < 2.4
