from __future__ import annotations

import json
from pathlib import Path

import mujoco
import numpy as np
import pytest

from tidemill.core.errors import UserError
from tidemill.robots.engine import check_model
from tidemill.robots.parameters import apply_parameters, check_names, model_spec, nominal_value
from tidemill.robots.tasks import open_task

ARM = """
<mujoco>
  <worldbody>
    <body name="arm">
      <joint name="elbow" type="hinge" axis="0 1 0" damping="0.1"/>
      <geom name="bone" type="capsule" size="0.05 0.3" pos="0 0 0.3" density="500"/>
      <geom name="knob" type="sphere" size="0.1" pos="0.2 0 0.6" density="500"/>
      <body name="hand" pos="0 0 0.6"><geom name="palm" type="box" size="0.1 0.1 0.1" mass="1"/></body>
    </body>
  </worldbody>
  <actuator><position name="servo" joint="elbow" kp="20" kv="2"/></actuator>
</mujoco>
"""


def test_identified_parameters_replace_those_of_the_task(tmp_path: Path) -> None:
    """The same as the MJCF with these numbers."""
    values = {"mass:pole": 0.12, "length:pole": {"value": 0.7}, "damping:hinge": 0.004, "gain:slide": 1.1}
    (tmp_path / "parameters.json").write_text(json.dumps({"parameters": values}))
    task = open_task("swingup")
    found = check_model(task, tmp_path / "parameters.json")
    text = Path(task.model).read_text()
    for old, new in {"0 0 0.6": "0 0 0.7", 'mass="0.1"': 'mass="0.12"', 'damping="0.005"': 'damping="0.004"'}.items():
        assert old in text
        text = text.replace(old, new)
    edited = mujoco.MjModel.from_xml_string(text)
    for name in ("body_mass", "body_inertia", "body_ipos", "geom_size", "dof_damping"):
        np.testing.assert_allclose(getattr(found, name), getattr(edited, name), rtol=1e-12, atol=1e-15)
    assert found.actuator_gainprm[0, 0] == 1.1


def test_a_longer_body_has_the_same_mass_and_moves_what_is_attached() -> None:
    model = mujoco.MjModel.from_xml_string(ARM)
    assert nominal_value(model, "length:arm") == pytest.approx(0.6)
    longer = apply_parameters(model_spec(ARM), model, {"length:arm": 0.9, "gain:servo": 30.0})
    assert nominal_value(longer, "length:arm") == pytest.approx(0.9)
    assert longer.body("arm").mass == pytest.approx(model.body("arm").mass)
    assert longer.body("hand").pos.tolist() == pytest.approx([0, 0, 0.9])
    assert longer.geom("knob").pos.tolist() == pytest.approx([0.2, 0, 0.9])  # only along the arm
    assert longer.geom("knob").size[0] == pytest.approx(0.1)
    assert longer.actuator("servo").biasprm[1:3].tolist() == pytest.approx([-30, -3])  # stiffness and damping, too


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("mass:am", 'no body "am"', "did you mean arm?"),
        ("damping:elbo", 'no joint "elbo"', "did you mean elbow?"),
        ("friction:bones", 'no geom "bones"', "did you mean bone?"),
        ("gain:serve", 'no actuator "serve"', "did you mean servo?"),
        ("mas:arm", "mas:arm is not a parameter", "did you mean mass?"),
        ("colour", "colour is not a parameter", "mass:BODY, length:BODY"),
        ("mass:world", 'no body "world"', "one of arm, hand"),
    ],
)
def test_unknown_names_are_refused(name: str, message: str, hint: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        check_names([name], mujoco.MjModel.from_xml_string(ARM), where="identify.parameters")
    assert hint in raised.value.hint


def test_a_file_without_parameters_is_refused(tmp_path: Path) -> None:
    (tmp_path / "parameters.json").write_text('{"costs": [1]}')
    with pytest.raises(UserError, match="holds no parameters"):
        check_model(open_task("swingup"), tmp_path / "parameters.json")
