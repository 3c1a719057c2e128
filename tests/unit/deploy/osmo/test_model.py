"""Workflows that OSMO accepts load, and others are refused. The first are written after its user guide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from tests.osmo_templates import filled
from tidemill.deploy.osmo.model import WorkflowFile

HERE = Path(__file__).resolve()
COOKBOOK = next(
    (found for up in HERE.parents if (found := up / "shared/data/samples/osmo-cookbook").is_dir()),
    None,
)
SERIAL = """\
workflow:
  name: serial
  pool: robots
  labels: {team: robotics}
  timeout: {exec_timeout: 8h, queue_timeout: 90m}
  resources:
    default: {cpu: 1, memory: 16Gi, storage: 1Gi, platform: ovx, nodesExcluded: [worker1]}
    gpu: {gpu: 8, memory: 400GiB, topology: [{key: rack, requirementType: preferred}]}
  tasks:
  - name: make
    image: ubuntu:24.04
    command: [sh, /tmp/run.sh]
    environment: {DEBUG: true, STEPS: 3}
    files:
    - path: /tmp/run.sh
      contents: echo made > {{output}}/file
    - {path: /tmp/data, contents: AAE=, base64: true}
    - {path: /tmp/train.py, localpath: train.py}
  - name: train
    image: ubuntu:24.04
    command: [python]
    args: [train.py, 4]
    resource: gpu
    inputs:
    - task: make
      regex: .*\\.txt$
    - task: other-workflow-3:make
    - url: s3://bucket/data
    outputs: [{url: gs://bucket/models}]
    credentials:
      hub: {HF_TOKEN: token}
      keys: /root/.keys
    volumeMounts: ["/opt:/home/opt"]
    exitActions: {COMPLETE: "0-1,4", RESCHEDULE: 130, FAIL: "3"}
    checkpoint:
    - {path: /tmp/models, url: s3://bucket/models, frequency: 30m, regex: .*.json}
"""
GROUPS = """\
workflow:
  name: pair
  groups:
  - name: both
    ignoreNonleadStatus: false
    tasks:
    - {name: server, image: a, command: [serve], lead: true}
    - {name: client, image: a, command: [ask, "{{host:server}}"]}
  - name: after
    barrier: false
    tasks:
    - {name: report, image: a, command: [report], inputs: [{task: client}]}
"""
TEMPLATE = """\
version: 2
workflow:
  name: {{ name }}
  tasks:
  {% for item in range(2) %}
  - name: task-{{ item }}
    image: a
    command: [run, "{{input:0}}"]
    inputs:
    - url: {{ source }}
  {% endfor %}

default-values:
  name: many
  source: s3://bucket/in
"""


def workflow(text: str) -> WorkflowFile:
    return WorkflowFile.model_validate(filled(text))


@pytest.mark.parametrize(("text", "tasks"), [(SERIAL, 2), (GROUPS, 3), (TEMPLATE, 2)])
def test_a_workflow_of_the_user_guide_loads(text: str, tasks: int) -> None:
    found = workflow(text).workflow
    assert len(found.tasks) + sum(len(group.tasks) for group in found.groups) == tasks


def test_numbers_and_booleans_of_yaml_are_texts() -> None:
    make, train = workflow(SERIAL).workflow.tasks
    assert make.environment == {"DEBUG": "True", "STEPS": "3"}
    assert train.args == ("train.py", "4")
    assert train.exitActions["RESCHEDULE"] == "130"


def test_a_template_has_the_values_that_are_given() -> None:
    first, _ = WorkflowFile.model_validate(filled(TEMPLATE, source="gs://other")).workflow.tasks
    assert (first.name, first.command[1]) == ("task-0", "{{input:0}}")
    assert first.inputs[0].model_dump()["url"] == "gs://other"


TASK = {"name": "t", "image": "a", "command": ["run"]}
FILE = {"path": "/tmp/a", "contents": "a"}
URL = "s3://bucket/a"


def task(**more: Any) -> dict[str, Any]:
    return {"name": "w", "tasks": [TASK | more]}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": (task(programme=["run"]), "Extra inputs"),
    "unknown section": ({**task(), "task": []}, "Extra inputs"),
    "no tasks": ({"name": "w"}, "tasks or groups"),
    "tasks and groups": ({**task(), "groups": [{"name": "g", "tasks": [TASK]}]}, "tasks or groups"),
    "a name that begins with a digit": ({**task(), "name": "1w"}, "pattern"),
    "OSMO's own name": (task(name="osmo_ctrl"), "osmo-ctrl"),
    "no command": (task(command=[]), "at least 1"),
    "no image": (task(image=""), "at least 1"),
    "equal names": ({"name": "w", "tasks": [TASK | {"name": "A_b"}, TASK | {"name": "a-b"}]}, "a-b"),
    "an input of a later task": (
        {"name": "w", "tasks": [TASK | {"inputs": [{"task": "u"}]}, TASK | {"name": "u"}]},
        "t needs u",
    ),
    "an input of a task of the same group": (
        {
            "name": "w",
            "groups": [
                {"name": "g", "tasks": [TASK | {"lead": True}, TASK | {"name": "u", "inputs": [{"task": "t"}]}]}
            ],
        },
        "u needs t",
    ),
    "two leaders": (
        {"name": "w", "groups": [{"name": "g", "tasks": [TASK | {"lead": True}, TASK | {"name": "u", "lead": True}]}]},
        "2 lead tasks",
    ),
    "no leader": ({"name": "w", "groups": [{"name": "g", "tasks": [TASK, TASK | {"name": "u"}]}]}, "0 lead tasks"),
    "an unknown resource": (task(resource="gpu"), "no resource gpu"),
    "a size without a number": ({**task(), "resources": {"default": {"memory": "much"}}}, "pattern"),
    "a size with another unit": ({**task(), "resources": {"default": {"memory": "16GB"}}}, "pattern"),
    "a fraction of a GPU": ({**task(), "resources": {"default": {"gpu": 0.5}}}, "integer"),
    "a label": ({**task(), "labels": {"a": "b c"}}, "pattern"),
    "an exit action": (task(exitActions={"RESTART": "1"}), "exitActions"),
    "exit codes in words": (task(exitActions={"FAIL": "all"}), "pattern"),
    "two actions for a code": (task(exitActions={"FAIL": "1-5", "RESCHEDULE": "4"}), "exit code 4"),
    "a duration of two units": (
        task(checkpoint=[{"path": "/a", "url": URL, "frequency": "1h5m"}]),
        "pattern",
    ),
    "a checkpoint without a store": (task(checkpoint=[{"path": "/a", "url": "/mnt/a", "frequency": "5m"}]), "pattern"),
    "no regular expression": (task(inputs=[{"url": URL, "regex": "("}]), "regular expression"),
    "a file without contents": (task(files=[{"path": "/tmp/a"}]), "contents or localpath"),
    "a file with both": (task(files=[FILE | {"localpath": "a"}]), "contents or localpath"),
    "two files at one place": (task(files=[FILE, FILE]), "/tmp/a"),
    "a file of OSMO": (task(files=[FILE | {"path": "/osmo/a"}]), "/osmo"),
    "an output of a task": (task(outputs=[{"task": "t"}]), "Field required"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_workflow_is_refused(name: str) -> None:
    document, words = WRONG[name]
    with pytest.raises(ValidationError, match=words):
        WorkflowFile.model_validate({"workflow": document})


def test_the_cookbook_of_osmo_loads() -> None:
    if COOKBOOK is None:
        pytest.skip("there is no folder shared/data/samples/osmo-cookbook (cookbook/ of OSMO's repository)")
    paths = sorted(COOKBOOK.rglob("*.yaml"))
    assert paths
    for path in paths:
        try:
            WorkflowFile.model_validate(filled(path.read_text(encoding="utf-8"), storage_url="s3://bucket/cookbook"))
        except (ValidationError, yaml.YAMLError) as error:
            pytest.fail(f"{path}: {error}")
