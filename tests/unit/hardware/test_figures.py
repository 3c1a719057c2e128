from __future__ import annotations

import msgspec
import pytest

from tests.formulas import check_figures
from tidemill.hardware.figures import Derivation


@pytest.mark.parametrize(
    ("formula", "inputs", "value"),
    [
        ("a + b * c ** 2 - 1", {"a": 1.0, "b": 2.0, "c": 3.0}, 18.0),  # 1 + 2 * 9 - 1
        ("ceil(a / b) + a // b", {"a": 7.0, "b": 2.0}, 7.0),  # 4 + 3
        ("max(a, b) / min(a, b)", {"a": 2.0, "b": 8.0}, 4.0),
        ("positive(a - b)", {"a": 0.1 + 0.2, "b": 0.3}, 0.0),  # 5.6e-17 is a rounding error
    ],
)
def test_a_figure_is_what_its_formula_gives(formula: str, inputs: dict[str, float], value: float) -> None:
    sheet = Derivation()
    assert sheet.compute("x", "s", formula=formula, source="here", **inputs) == value
    assert check_figures(sheet.figures) == 1
    (figure,) = sheet.figures
    with pytest.raises(AssertionError):
        check_figures([msgspec.structs.replace(figure, value=value + 1)])
    with pytest.raises(KeyError):
        check_figures([msgspec.structs.replace(figure, inputs={})])


def test_formulas_use_the_values_of_those_before_them() -> None:
    formulas = {"speed": ("m/s", "way / time", "here"), "later": ("m", "speed * 2 * time", "there")}
    sheet = Derivation()
    values = sheet.evaluate(formulas, label="run.{}", way=6.0, time=3.0, unused=1.0)
    assert (values["speed"], values["later"]) == (2.0, 12.0)
    assert [figure.name for figure in sheet.figures] == ["run.speed", "run.later"]
    assert sheet.figures[1].inputs == {"speed": 2.0, "time": 3.0}
    assert check_figures(sheet.figures) == 2
