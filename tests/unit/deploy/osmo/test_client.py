"""Commands to `osmo` and what its answers mean; a script stands for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.deploy.conftest import RenderRecipe
from tidemill.core.errors import UserError
from tidemill.deploy.documents import Rendered
from tidemill.deploy.osmo.client import OsmoService
from tidemill.deploy.targets import target_of

Answers = Callable[..., Path]
SUBMITTED = json.dumps({"name": "small-8", "overview": "https://osmo/small-8"})
TASKS = {
    "status": "RUNNING",
    "groups": [
        {"tasks": [{"name": "sft", "status": "COMPLETED", "exit_code": 0}]},
        {"tasks": [{"name": "rl", "status": "FAILED_PREEMPTED", "exit_code": 3006}]},
    ],
}


def workflows(*found: tuple[str, str]) -> str:
    return json.dumps({"workflows": [{"name": name, "status": status} for name, status in found]})


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """`answers(submit="text", code=1)`: an osmo that prints this for a verb. Returns the file with its commands."""

    def install(*, code: int = 0, **verbs: str) -> Path:
        folder, commands = tmp_path / "answers", tmp_path / "commands"
        folder.mkdir(exist_ok=True)
        for verb, text in verbs.items():
            (folder / verb).write_text(text, encoding="utf-8")
        program = tmp_path / "bin" / "osmo"
        program.parent.mkdir(exist_ok=True)
        copy = f'case "$2" in submit|validate) /bin/cp "$3" {tmp_path}/sent;; esac'
        answer = f'[ ! -f "{folder}/$2" ] || /bin/cat "{folder}/$2"'
        program.write_text("\n".join(["#!/bin/sh", f'echo "$@" >> {commands}', copy, answer, f"exit {code}", ""]))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent))
        return commands

    return install


@pytest.fixture
def job(rendered: RenderRecipe) -> Rendered:
    return rendered("--deploy.target=osmo", "--deploy.osmo.url=s3://bucket/runs", "--deploy.osmo.pool=robots")


def service(job: Rendered) -> OsmoService:
    target = target_of(job.deploy)
    assert isinstance(target, OsmoService)
    return target


def test_apply_submits_the_workflow_to_the_pool(answers: Answers, job: Rendered, tmp_path: Path) -> None:
    commands = answers(list=workflows(("small-7", "COMPLETED")), submit=SUBMITTED)
    assert service(job).apply(job) == ["workflow/small-8 submitted: https://osmo/small-8"]
    asked, submitted = commands.read_text().splitlines()
    assert asked == "workflow list --name small --count 50 --order desc --format-type json"
    assert submitted.startswith("workflow submit /")
    assert submitted.endswith("/small.yaml --format-type json --pool robots")
    assert (tmp_path / "sent").read_text() == job.text


def test_apply_passes_the_priority_on(answers: Answers, rendered: RenderRecipe) -> None:
    commands = answers(list=workflows(), submit=SUBMITTED)
    low = rendered("--deploy.target=osmo", "--deploy.priority_class=low")
    service(low).apply(low)
    assert commands.read_text().splitlines()[1].endswith("--format-type json --priority LOW")


def test_a_job_is_not_submitted_twice(answers: Answers, job: Rendered) -> None:
    commands = answers(list=workflows(("small-7", "WAITING")))
    with pytest.raises(UserError, match="small-7 of this job has not ended"):
        service(job).apply(job)
    assert "submit" not in commands.read_text()


def test_workflows_of_other_jobs_are_others(answers: Answers, job: Rendered) -> None:
    answers(list=workflows(("small-model-9", "RUNNING"), ("my-small-3", "RUNNING"), ("small-b", "RUNNING")))
    assert service(job).status(job) == []


def test_diff_compares_with_the_newest_workflow_as_it_was_submitted(answers: Answers, job: Rendered) -> None:
    found = workflows(("small-8", "RUNNING"), ("small-7", "FAILED"))
    commands = answers(list=found, spec=job.text + "\n")
    assert service(job).diff(job) == ""
    assert commands.read_text().splitlines()[1] == "workflow spec small-8 --template"
    answers(list=found, spec=job.text.replace("pool: robots", "pool: others"))
    lines = service(job).diff(job).splitlines()
    assert lines[:2] == ["--- small-8", "+++ small.yaml"]
    assert [line for line in lines[2:] if line[0] in "+-"] == ["-  pool: others", "+  pool: robots"]
    answers(list=workflows())
    assert service(job).diff(job).splitlines()[:2] == ["--- nothing", "+++ small.yaml"]


def test_status_in_plain_words(answers: Answers, job: Rendered) -> None:
    answers(list=workflows(("small-8", "RUNNING")), query=json.dumps(TASKS))
    rows = [tuple(row.values()) for row in service(job).status(job)]
    assert rows == [
        ("workflow", "small-8", "job", "running"),
        ("task", "sft", "stage", "completed"),
        ("task", "rl", "stage", "failed: preempted (exit code 3006)"),
    ]


@pytest.mark.parametrize(("follow", "more"), [(True, ""), (False, " -n 1000")])
def test_the_log(answers: Answers, job: Rendered, capfd: pytest.CaptureFixture[str], follow: bool, more: str) -> None:
    commands = answers(list=workflows(("small-8", "RUNNING")), logs="step 1\n")
    service(job).print_log(job, follow=follow)
    assert commands.read_text().splitlines()[1] == f"workflow logs small-8{more}"
    assert capfd.readouterr().out == "step 1\n"


def test_there_is_no_log_of_a_job_that_was_not_submitted(answers: Answers, job: Rendered) -> None:
    answers(list=workflows())
    with pytest.raises(UserError, match="no workflow of small"):
        service(job).print_log(job, follow=True)


@pytest.mark.parametrize(("storage", "more"), [(False, []), (True, ["s3://bucket/runs/small/ deleted"])])
def test_delete_cancels_what_is_alive(answers: Answers, job: Rendered, storage: bool, more: list[str]) -> None:
    commands = answers(list=workflows(("small-8", "PENDING"), ("small-7", "FAILED")))
    assert service(job).delete(job, storage=storage) == ["workflow/small-8 cancelled", *more]
    assert "workflow cancel small-8" in commands.read_text().splitlines()
    assert ("data delete s3://bucket/runs/small/" in commands.read_text()) == storage


def test_check_asks_osmo(answers: Answers, job: Rendered, tmp_path: Path) -> None:
    answers(validate="ok\n")
    assert service(job).refusals(job) == []
    assert (tmp_path / "sent").read_text() == job.text
    answers(validate="Resource sft: too many GPUs\n", code=1)
    assert service(job).refusals(job) == ["Resource sft: too many GPUs"]


def test_without_osmo_the_error_says_so(job: Rendered, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="osmo is not installed, or not in PATH"):
        service(job).apply(job)


def test_an_expired_login_has_a_hint(answers: Answers, job: Rendered) -> None:
    answers(list="Unauthorized: the token has expired", code=1)
    with pytest.raises(UserError, match="does not know this user") as caught:
        service(job).status(job)
    assert caught.value.hint == "run `osmo login URL`"
