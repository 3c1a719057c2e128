"""What `model.source` may be, and the listing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.model_folders import save_folder
from tests.model_shapes import llama
from tidemill.config.model import CharModelConfig, ModelConfig
from tidemill.core.errors import UserError
from tidemill.models import hub
from tidemill.models.catalog import SMOLLM2, listing, present, resolve, resolve_shell
from tidemill.models.folder import check_folder

SMALL = CharModelConfig(alphabet="01+=\n", hidden_size=32, layers=1, heads=2, context=16)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "cached_models", list)
    return tmp_path / "cache"


def silent(line: str) -> None:
    raise AssertionError(f"nothing to tell, but: {line}")


def told(source: str, revision: str | None = None) -> UserError:
    with pytest.raises(UserError) as caught:
        resolve(ModelConfig(source=source, revision=revision), progress=silent)
    return caught.value


def test_char_is_built_once_per_configuration(cache: Path) -> None:
    config = ModelConfig(source="char", char=SMALL)
    folder = resolve(config, progress=silent)
    assert check_folder(folder) == folder and folder.parent == cache
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve(config, progress=silent) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    other = resolve(ModelConfig(source="char", char=SMALL.model_copy(update={"seed": 1})), progress=silent)
    assert other != folder


def test_a_model_is_present_without_build_or_download(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(source="char", char=SMALL)
    assert present(config) is None
    assert not cache.exists()
    folder = resolve(config, progress=silent)
    assert present(config) == folder
    assert present(ModelConfig(source=SMOLLM2)) is None
    (tmp_path / "mine").mkdir()
    assert present(ModelConfig(source=str(tmp_path / "mine"))) == tmp_path / "mine"
    (tmp_path / "mine" / "adapter_config.json").write_text("{}")
    assert present(ModelConfig(source=str(tmp_path / "mine"))) is None  # it would have to be merged
    monkeypatch.setattr(hub, "cached", lambda name, revision: Path(f"{name}@{revision}"))
    assert present(ModelConfig(source="org/name", revision="v1")) == Path("org/name@v1")


def test_a_local_folder_is_used_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    folder = save_folder(llama(), tmp_path / "mine")
    assert resolve(ModelConfig(source=str(folder)), progress=silent) == folder
    monkeypatch.chdir(tmp_path)
    assert resolve(ModelConfig(source="./mine"), progress=silent) == Path("mine")
    assert resolve(ModelConfig(source="mine"), progress=silent) == Path("mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve(ModelConfig(source="~/mine"), progress=silent) == folder
    assert not cache.exists()


def test_a_folder_named_like_a_hub_id_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_folder(llama(), tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert resolve(ModelConfig(source="org/name"), progress=silent) == Path("org/name")


@pytest.mark.parametrize("source", ["./nowhere", "/no/where", "../no/where", "a/b/c"])
def test_a_path_that_is_not_there(source: str) -> None:
    assert told(source).what == "there is no such folder"


@pytest.mark.parametrize(
    ("source", "near"),
    [("smollm2-135", SMOLLM2), ("smolm2_135m", SMOLLM2), ("SmolLM2-135M", SMOLLM2), ("chars", "char")],
)
def test_an_unknown_name_gets_a_suggestion(source: str, near: str) -> None:
    error = told(source)
    assert error.where == "model.source"
    assert error.hint.startswith(f"did you mean {near}? ")


def test_a_name_like_no_other_gets_the_choices() -> None:
    error = told("xyzzy")
    assert "did you mean" not in error.hint
    assert SMOLLM2 in error.hint and "char" in error.hint and "organisation/name" in error.hint


def test_only_hub_ids_have_revisions(tmp_path: Path) -> None:
    folder = save_folder(llama(), tmp_path / "mine")
    assert told(str(folder), revision="main").where == "model.revision"


def test_a_hub_model_is_fetched_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_folder(llama(), tmp_path / "snapshot")
    asked: list[tuple[str, str | None]] = []

    def fetch(hub_id: str, revision: str | None, *, progress: object, weights: bool) -> Path:
        asked.append((hub_id, revision))
        return folder

    monkeypatch.setattr(hub, "fetch", fetch)
    assert resolve(ModelConfig(source="org/name", revision="v1"), progress=silent) == folder
    assert asked == [("org/name", "v1")]
    (folder / "model.safetensors").unlink()
    assert "no model.safetensors" in told("org/name").what
    assert resolve_shell(ModelConfig(source="org/name"), progress=silent) == folder


def test_a_similar_hub_id_gets_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(hub_id: str, revision: str | None, *, progress: object, weights: bool) -> Path:
        raise UserError("not reachable", hint="give a local folder")

    monkeypatch.setattr(hub, "fetch", fetch)
    error = told("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert error.hint == "did you mean smollm2-135m? give a local folder"
    assert told("org/other").hint == "give a local folder"


def test_the_listing_shows_cached_models(cache: Path) -> None:
    smollm2, char = listing()
    assert (smollm2.name, smollm2.parameters, smollm2.cached, smollm2.size_bytes) == (SMOLLM2, 134_515_008, False, 0)
    assert (char.name, char.parameters, char.cached) == ("char", 809_984, False)
    folder = resolve(ModelConfig(source="char"), progress=silent)
    char = listing()[1]
    assert char.cached and char.path == str(folder)
    assert char.size_bytes == sum(path.stat().st_size for path in folder.iterdir()) > 4 * 809_984


def test_the_listing_shows_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = save_folder(llama(), tmp_path / "whole")
    cut = save_folder(llama(), tmp_path / "cut")
    (cut / "model.safetensors").write_bytes(b"short")
    monkeypatch.setattr(hub, "cached_models", lambda: [("org/cut", cut, 5), ("org/whole", whole, 280_000)])
    _, _, first, second = listing()
    assert (first.name, first.cached, first.parameters) == ("org/cut", False, None)
    assert (second.name, second.cached, second.size_bytes) == ("org/whole", True, 280_000)
    assert second.parameters == sum(parameter.numel() for parameter in llama().parameters())


def test_the_listing_loads_no_tensor_library() -> None:
    code = "import sys; from tidemill.models.catalog import listing; listing(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
