from __future__ import annotations

import numpy as np
import torch

from benchmarks.control import SimulationEnv, spec_of
from tidemill.core.chunks import ChunkKey, ChunkRequest
from tidemill.models.actor import arrays_of
from tidemill.robots.policy_arrays import unpack
from tidemill.robots.setup import build, describe, setup_of
from tidemill.trainer.control import ControlNetworks


def test_both_sides_have_the_same_simulation() -> None:
    spec = spec_of("swingup", 3, robot={"task": "swingup", "worlds": 64})
    weights = arrays_of(ControlNetworks(describe(spec), spec.control, seed=0).actors)
    request = ChunkRequest(key=ChunkKey(3, "train", 0, 0), steps=20)
    chunk = unpack(build(setup_of(spec)).run(weights, request).experience)
    env = SimulationEnv(spec)
    np.testing.assert_array_equal(env.get_observations()["policy"], chunk["obs/policy"][:, 0])
    for at in range(20):
        observed, rewards, ended, extras = env.step(torch.from_numpy(chunk["actions"][:, at]))
        np.testing.assert_array_equal(observed["policy"], chunk["obs/policy"][:, at + 1])
        np.testing.assert_array_equal(rewards, chunk["rewards"][:, at])
        np.testing.assert_array_equal(ended, chunk["terminated"][:, at] | chunk["truncated"][:, at])
        np.testing.assert_array_equal(extras["time_outs"], chunk["truncated"][:, at])
    np.testing.assert_array_equal(np.concatenate(env.returns), chunk["episode/return"])
