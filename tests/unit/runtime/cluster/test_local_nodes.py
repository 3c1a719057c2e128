"""Nodes of a local cluster, and selectors of nodes."""

from __future__ import annotations

from typing import Any

from tidemill.config.pool import RayConfig
from tidemill.config.schema import RunSpec
from tidemill.runtime.cluster.connection import NodeView, local_nodes, reserved_selector, selector_of


def _spec(**sections: Any) -> RunSpec:
    return RunSpec.model_validate({"runtime": "ray", **sections})


def _node(labels: dict[str, str], **free: float) -> NodeView:
    return NodeView(node_id="n", name="n", labels=labels, free=free)


def test_without_workers_there_is_one_node() -> None:
    (head,) = local_nodes(_spec(ray={"trainer_cpus": 2}))
    assert (head.name, head.cpus, head.labels) == ("reserved", 2, {})


def test_the_reserved_node_has_room_for_all_actors() -> None:
    placement = {"critic": "actor", "reference": "actor", "actor_cpus": 1.5, "actor_gpus": 1}
    algorithm = {"advantage": "gae", "kl_beta": 0.1}
    ray = {"trainer_cpus": 2, "trainer_gpus": 1}
    (head,) = local_nodes(_spec(placement=placement, ray=ray, algorithm=algorithm))
    assert (head.cpus, head.gpus) == (5.0, 3.0)  # 2 + 2 · 1.5 and 1 + 2 · 1
    rewards = [{"kind": "model", "model": name} for name in ("a", "b", "a")] + [{"kind": "exact"}]
    (head,) = local_nodes(_spec(placement={"reward_model": "actor"}, scoring={"rewards": rewards}))
    assert head.cpus == 3.0  # the trainer, a and b


def test_workers_are_spread_over_two_nodes_with_one_place_to_spare() -> None:
    _, *spot = local_nodes(_spec(pool={"kind": "static", "workers": 3}, ray={"worker_cpus": 0.5}))
    # 3 workers on 2 nodes: 2 places each and one for a worker that is slow to die, half a CPU each
    assert [node.cpus for node in spot] == [2, 2]  # three places of half a CPU each; Ray takes whole numbers only
    assert [node.labels for node in spot] == [{"ray.io/market-type": "spot"}] * 2


def test_a_worker_of_several_ranks_needs_their_resources_on_one_node() -> None:
    engine = {"kind": "vllm", "tensor_parallel": 4}
    ray = {"worker_cpus": 2, "worker_gpus": 1, "trainer_gpus": 1}
    placement = {"engine": "own"}
    pool = {"kind": "ray", "max_workers": 1}
    head, spot = local_nodes(_spec(engine=engine, ray=ray, pool=pool, placement=placement))
    assert (head.cpus, head.gpus) == (1 + 8, 1 + 4)
    assert (spot.cpus, spot.gpus) == (8, 4)


def test_the_pool_of_nodes_has_as_many_places_as_workers() -> None:
    pool = {"kind": "ray", "max_workers": 1, "selector": {"market": "spot", "disk": "!slow"}}
    _, spot = local_nodes(_spec(pool=pool))
    assert (spot.cpus, spot.labels) == (1, {"market": "spot"})


def test_no_two_nodes_see_the_same_gpu() -> None:
    nodes = local_nodes(_spec(pool={"kind": "static", "workers": 2}, ray={"trainer_gpus": 1, "worker_gpus": 0.5}))
    # one worker of half a GPU on each node rounds up to a whole GPU
    assert [node.visible_gpus for node in nodes] == ["0", "1", "2"]


def test_an_odd_number_of_workers_takes_no_gpu_more() -> None:
    nodes = local_nodes(_spec(pool={"kind": "static", "workers": 5}, ray={"trainer_gpus": 1, "worker_gpus": 1}))

    assert [node.gpus for node in nodes] == [1, 3, 2]


def test_the_trainer_stays_off_preemptible_nodes() -> None:
    preemptible = selector_of(_spec().pool)
    assert reserved_selector(RayConfig(), preemptible) == {"ray.io/market-type": "!spot"}
    assert reserved_selector(RayConfig(reserved_selector={"a": "b"}), preemptible) == {"a": "b"}
    assert reserved_selector(RayConfig(), {"kind": "!good"}) == {"kind": "good"}


def test_labels_match_selectors_as_in_ray() -> None:
    spot = _node({"market": "spot", "zone": "a"})
    assert spot.fits({"market": "spot", "zone": "in(a, b)"})
    assert not spot.fits({"market": "!spot"})
    assert not spot.fits({"zone": "!in(a, b)"})
    assert spot.fits({"disk": "!slow"})  # a missing label differs from any value
    assert not spot.fits({"disk": "slow"})


def test_places_are_limited_by_the_scarcest_resource() -> None:
    assert _node({}, CPU=7.0, GPU=2.0).places(2.0, 1.0) == 2
    assert _node({}, CPU=3.0, GPU=2.0).places(2.0, 1.0) == 1
    assert _node({}, CPU=0.3).places(0.1, 0.0) == 3  # 0.3 / 0.1 is a little less than 3
    assert _node({}, CPU=8.0).places(1.0, 1.0) == 0
