"""Results name where they come from, and are told from those that are older than their code."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import origin, status
from benchmarks.origin import code_of


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a benchmark that imports a module inside a function, and its result."""
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "tidemill").mkdir()
    (tmp_path / "tidemill" / "__init__.py").touch()
    (tmp_path / "tidemill" / "used.py").write_text("import json\n")
    (tmp_path / "tidemill" / "other.py").write_text("")
    (tmp_path / "benchmarks" / "speed.py").write_text("def main():\n    from tidemill.used import json\n")
    (tmp_path / "benchmarks" / "markets").mkdir()
    (tmp_path / "benchmarks" / "markets" / "prices.py").write_text(
        'write_result("market_prices" if whole else "market_turns", figures)\nother("market_size")\n'
    )
    git(tmp_path, "init", "-q")
    commit_all(tmp_path)
    monkeypatch.setattr(origin, "ROOT", tmp_path)
    monkeypatch.setattr(origin, "PACKAGES", {name: tmp_path / name for name in ("benchmarks", "tidemill")})
    monkeypatch.setattr(origin, "_main_module", lambda: "benchmarks.speed")
    monkeypatch.setattr(origin, "_code", {})
    origin._imports.cache_clear()
    origin._written.cache_clear()
    origin._named.cache_clear()
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def commit_all(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "change")


def state(folder: Path) -> str:
    return status.state_of(folder / "benchmarks" / "results" / "speed.json")[0]


def write_result(folder: Path, name: str = "speed", **content: object) -> Path:
    path = folder / "benchmarks" / "results" / f"{name}.json"
    path.write_text(json.dumps({"benchmark": name, **content}))
    return path


def test_the_code_of_a_benchmark_is_all_that_it_imports(repository: Path) -> None:
    assert code_of("benchmarks.speed") == ["benchmarks/speed.py", "tidemill/__init__.py", "tidemill/used.py"]


def test_the_code_of_a_benchmark_has_the_recipes_and_files_that_it_names(repository: Path) -> None:
    (repository / "tidemill" / "recipes").mkdir()
    for name in ("sums.toml", "games.toml", "other.toml"):
        (repository / "tidemill" / "recipes" / name).touch()
    for name in ("reward.py", "unused.py"):
        (repository / "benchmarks" / name).touch()
    (repository / "benchmarks" / "speed.py").write_text('RECIPE, NAMES, CODE = "sums.toml", ["games"], "reward.py"\n')
    (repository / "tidemill" / "prices.toml").touch()
    (repository / "tidemill" / "__init__.py").write_text('PRICES = "prices.toml"\n')
    named = ["tidemill/recipes/games.toml", "tidemill/recipes/sums.toml"]
    assert code_of("benchmarks.speed") == ["benchmarks/reward.py", "benchmarks/speed.py", *named]


def test_a_result_is_current_until_its_code_changes(repository: Path) -> None:
    write_result(repository, origin=origin.origin())
    assert state(repository) == "current"
    (repository / "tidemill" / "other.py").write_text("x = 1\n")
    assert state(repository) == "current"
    (repository / "tidemill" / "used.py").write_text("import json, math\n")
    assert state(repository) == "1 file has changed since"
    commit_all(repository)
    assert state(repository) == "1 file has changed since"


def test_a_copy_without_a_repository_is_named_by_the_digest_of_its_code(repository: Path) -> None:
    shutil.rmtree(repository / ".git")
    found = origin.origin()
    assert (found["commit"], found["changed"]) == ("", [])
    path = write_result(repository, origin=found)
    (repository / "benchmarks" / "results" / "other.json").write_text("{}")
    assert status.state_of(path)[0] == "current"
    (repository / "tidemill" / "used.py").write_text("import json, math\n")
    assert status.state_of(path)[0] == "code has changed since"
    assert origin.origin()["source"] != found["source"]


def test_a_module_that_is_named_as_a_program_is_code(repository: Path) -> None:
    (repository / "benchmarks" / "side.py").write_text("from tidemill import other\n")
    (repository / "benchmarks" / "speed.py").write_text('PROGRAM = "benchmarks.side:main"\n')
    assert code_of("benchmarks.speed") == [
        "benchmarks/side.py",
        "benchmarks/speed.py",
        "tidemill/__init__.py",
        "tidemill/other.py",
    ]


def test_the_origin_is_the_code_with_which_the_command_started(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["speed"])
    origin.parsed(argparse.ArgumentParser())
    started = origin.origin()["commit"]
    (repository / "tidemill" / "used.py").write_text("import json, math\n")
    commit_all(repository)
    assert origin.origin()["commit"] == started


def test_changed_files_are_part_of_the_origin(repository: Path) -> None:
    (repository / "tidemill" / "used.py").write_text("import json, math\n")
    found = origin.origin()
    assert found["changed"] == ["tidemill/used.py"]
    write_result(repository, origin=found)
    assert state(repository) == "uncommitted when measured: 1; 1 file has changed since"


def test_an_older_result_counts_from_the_commit_that_wrote_it(repository: Path) -> None:
    write_result(repository)
    commit_all(repository)
    assert state(repository) == "current"
    (repository / "benchmarks" / "speed.py").write_text("from tidemill import other\n")
    origin._imports.cache_clear()
    assert state(repository) == "1 file has changed since"


def test_a_result_of_several_commands_has_the_state_of_the_part_that_changed_most(repository: Path) -> None:
    first = origin.origin() | {"command": "first"}
    (repository / "tidemill" / "used.py").write_text("import json, math\n")
    commit_all(repository)
    last = origin.origin() | {"command": "last"}
    for parts in ({"some": {"origin": first}}, {"runs": [{"origin": last}, {"origin": first}]}, {"origins": [first]}):
        path = write_result(repository, origin=last, **parts)
        state, _, command = status.state_of(path)
        assert (state, command) == ("1 file has changed since", "first")


def test_a_part_without_an_origin_has_that_of_its_file(repository: Path) -> None:
    path = write_result(repository)
    commit_all(repository)
    of_commit = origin.with_origin({"s": 1}, path, {})["origin"]
    assert (of_commit["commit"], of_commit["module"]) == (origin.origin()["commit"], "benchmarks.speed")
    assert origin.with_origin({"s": 1}, path, {"origin": {"commit": "a"}}) == {"s": 1, "origin": {"commit": "a"}}
    own = {"s": 1, "origin": {"commit": "b"}}
    assert origin.with_origin(own, path, {"origin": {"commit": "a"}}) == own


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("speed", "benchmarks.speed"),
        ("market_prices", "benchmarks.markets.prices"),
        ("market_turns", "benchmarks.markets.prices"),
    ],
)
def test_an_older_result_is_measured_again_by_the_benchmark_that_writes_its_name(
    repository: Path, name: str, module: str
) -> None:
    path = write_result(repository, name)
    commit_all(repository)
    state, _, command = status.state_of(path)
    assert (state, command) == ("current", f"python -m {module}")


def test_an_older_result_that_no_benchmark_writes_has_no_command(repository: Path) -> None:
    path = write_result(repository, "market_size")
    commit_all(repository)
    state, _, command = status.state_of(path)
    assert (state, command) == ("there is no benchmark of it", "")
