from __future__ import annotations

import mujoco
import numpy as np

from tidemill.robots.simulation import random_of
from tidemill.robots.task import EpisodeRandom, Worlds

MODEL = """
<mujoco>
  <worldbody>
    <body><freejoint name="root"/><geom size="0.1"/>
      <body><joint name="a" type="hinge"/><geom size="0.1"/>
        <body><joint name="b" type="ball"/><geom size="0.1"/>
          <body><joint name="c" type="slide"/><geom size="0.1"/><site name="tip"/></body>
        </body>
      </body>
    </body>
  </worldbody>
  <sensor>
    <jointpos joint="c"/>
    <framepos name="tip" objtype="site" objname="tip"/>
  </sensor>
</mujoco>
"""


def test_joints_and_sensors_are_read_by_name() -> None:
    model = mujoco.MjModel.from_xml_string(MODEL)
    qpos, qvel = np.arange(26.0).reshape(2, 13), np.arange(22.0).reshape(2, 11)
    zeros = np.zeros((2, 0))
    worlds = Worlds(
        model=model,
        qpos=qpos,
        qvel=qvel,
        sensors=np.arange(8.0).reshape(2, 4),
        actions=zeros,
        previous_actions=zeros,
        steps=np.zeros(2, dtype=np.int64),
    )
    assert worlds.position("root")[1].tolist() == [13, 14, 15, 16, 17, 18, 19]
    assert worlds.velocity("root")[1].tolist() == [11, 12, 13, 14, 15, 16]
    assert worlds.position("b")[0].tolist() == [8, 9, 10, 11]
    assert worlds.velocity("b")[0].tolist() == [7, 8, 9]
    assert worlds.positions(("c", "a"))[0].tolist() == [12, 7]
    assert worlds.velocities(("c", "a"))[0].tolist() == [10, 6]
    assert worlds.sensor("tip")[1].tolist() == [5, 6, 7]


def test_random_numbers_of_an_episode_do_not_depend_on_other_episodes() -> None:
    both = EpisodeRandom([random_of(0, "a"), random_of(0, "b")])
    alone = EpisodeRandom([random_of(0, "b")])
    np.testing.assert_array_equal(both.uniform([0, 1], [1, 2], 2)[1:], alone.uniform([0, 1], [1, 2], 2))
    np.testing.assert_array_equal(both.normal(3)[1:], alone.normal(3))
