"""What keeps a commit from being released; `make release` itself takes minutes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import yaml

from scripts import release
from scripts.release import ReleaseError
from tests.processes import command_lines, process_ids, session_of

CHANGES = (
    "# Changelog\n\n## [0.2.0] - unreleased\n\n### Training\n- It trains.\n\n## [0.1.0] - 2026-01-31\n- It starts.\n"
)
CITATION = "cff-version: 1.2.0\ntitle: Tidemill\nlicense: Apache-2.0\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clean repository whose next version is 0.2.0."""
    root = tmp_path / "checkout"
    (root / "src" / "tidemill").mkdir(parents=True)
    (root / "src" / "tidemill" / "__init__.py").write_text('__version__ = "0.2.0"\n')
    (root / "CHANGELOG.md").write_text(CHANGES)
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "-c", "user.name=A", "-c", "user.email=a@example.org", "commit", "-qm", "First")
    return root


def git(root: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=root, check=True, timeout=30)


def wheel_with(folder: Path, *lines: str, readme: str = "# Tidemill\n", kind: str = "text/markdown") -> Path:
    path = folder / "tidemill-0.2.0-py3-none-any.whl"
    metadata = ["Metadata-Version: 2.4", *lines, f"Description-Content-Type: {kind}", "", readme]
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tidemill-0.2.0.dist-info/METADATA", "\n".join(metadata))
        wheel.writestr(
            "tidemill-0.2.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tidemill-0.2.0.dist-info/RECORD", "")
    return path


class TestSources:
    def test_a_clean_tree_has_a_version(self, checkout: Path) -> None:
        assert release.check_sources(checkout) == "0.2.0"

    @pytest.mark.parametrize("name", ["CHANGELOG.md", "new.txt"])
    def test_a_changed_or_new_file_is_named(self, checkout: Path, name: str) -> None:
        with (checkout / name).open("a") as file:
            file.write("changed\n")
        with pytest.raises(ReleaseError, match=f"not clean: commit or remove {name}"):
            release.check_sources(checkout)

    def test_a_tagged_version_is_refused(self, checkout: Path) -> None:
        git(checkout, "tag", "v0.2.0")
        with pytest.raises(ReleaseError, match=r"has the tag v0\.2\.0: raise __version__"):
            release.check_sources(checkout)

    def test_all_problems_are_listed(self, checkout: Path) -> None:
        (checkout / "CHANGELOG.md").write_text(CHANGES.replace("0.2.0", "0.3.0"))
        git(checkout, "tag", "v0.2.0")
        with pytest.raises(ReleaseError) as raised:
            release.check_sources(checkout)
        for problem in ("not clean", "has the tag", "no section `## [0.2.0]"):
            assert problem in str(raised.value)

    @pytest.mark.parametrize(
        ("version", "date"),
        [
            ("0.2.0", "unreleased"),
            ("0.1.0", "2026-01-31"),
            ("0.3.0", ""),  # no section
            ("0.1", ""),  # the beginning of another version
        ],
    )
    def test_the_date_of_a_version(self, checkout: Path, version: str, date: str) -> None:
        assert release.release_date(checkout, version) == date

    @pytest.mark.parametrize("heading", ["## [0.2.0] - unreleased\n\n", "## [0.2.0]\n- It trains.\n\n"])
    def test_a_section_without_entries_or_date_does_not_count(self, checkout: Path, heading: str) -> None:
        (checkout / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}## [0.1.0] - 2026-01-31\n- It starts.\n")
        assert release.release_date(checkout, "0.2.0") == ""


class TestArchives:
    NAMED = ("Name: tidemill", "Version: 0.2.0", "License-Expression: Apache-2.0")

    @pytest.mark.parametrize(
        ("metadata", "citation", "message"),
        [
            (NAMED, CITATION, ""),
            (NAMED, CITATION + "version: 0.2.0\n", ""),
            (NAMED, CITATION + "version: 0.1.0\n", "CITATION.cff has version 0.1.0"),
            (NAMED, CITATION.replace("Apache-2.0", "MIT"), "License-Expression is Apache-2.0, not MIT"),
            (("Name: tidemill", "Version: 0.1.9", NAMED[2]), CITATION, "Version is 0.1.9, not 0.2.0"),
        ],
    )
    def test_metadata_and_citation_agree(
        self, tmp_path: Path, metadata: tuple[str, ...], citation: str, message: str
    ) -> None:
        (tmp_path / "CITATION.cff").write_text(citation)
        wheel = wheel_with(tmp_path, *metadata)
        if not message:
            release.check_metadata(wheel, "0.2.0", citation=tmp_path / "CITATION.cff")
            return
        with pytest.raises(ReleaseError, match=message):
            release.check_metadata(wheel, "0.2.0", citation=tmp_path / "CITATION.cff")

    def test_a_readme_that_an_index_shows(self, tmp_path: Path) -> None:
        release.check_pages_of_index(wheel_with(tmp_path, *self.NAMED))

    @pytest.mark.parametrize(("readme", "kind"), [("", "text/markdown"), ("Title\n==\n\n.. nothing::\n", "text/x-rst")])
    def test_a_readme_that_an_index_cannot_show(self, tmp_path: Path, readme: str, kind: str) -> None:
        with pytest.raises(ReleaseError, match="twine check --strict"):
            release.check_pages_of_index(wheel_with(tmp_path, *self.NAMED, readme=readme, kind=kind))

    def test_a_broken_installation_is_named(self) -> None:
        findings = [{"topic": "packages", "status": "ok"}, {"topic": "smollm2", "status": "missing"}]
        with pytest.raises(ReleaseError, match="smollm2 not ok"):
            release.check_doctor(json.dumps({"findings": findings}))


class TestCommands:
    def test_the_output_of_a_failed_command_is_shown(self, tmp_path: Path) -> None:
        command = (sys.executable, "-c", "import sys; print('half'); sys.exit('no space left')")
        with pytest.raises(ReleaseError, match=r"failed:\nhalf\nno space left"):
            release.called(*command, cwd=tmp_path, deadline_s=30.0)

    def test_a_command_that_hangs_is_killed_with_its_children(self, tmp_path: Path) -> None:
        command = ("/bin/sh", "-c", "echo $$ > pid; sleep 60 & sleep 60")
        started = time.monotonic()
        with pytest.raises(ReleaseError, match=r"has not ended after 0\.5 s"):
            release.called(*command, cwd=tmp_path, deadline_s=0.5)
        leader = int((tmp_path / "pid").read_text())
        while command_lines(pid for pid in process_ids() if session_of(pid) == leader):
            assert time.monotonic() - started < 30
            time.sleep(0.05)

    def test_variables_of_another_environment_are_left_out(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTHONPATH", "/elsewhere")
        monkeypatch.setenv("TIDEMILL_CACHE", "/elsewhere")
        variables = release.clean_environment(tmp_path)
        assert "/elsewhere" not in variables.values()
        assert variables["TIDEMILL_CACHE"] == str(tmp_path / "cache")


class TestCitation:
    """CITATION.cff by the rules of version 1.2.0 of the Citation File Format."""

    KEYS = {
        "cff-version",
        "message",
        "type",
        "title",
        "abstract",
        "authors",
        "license",
        "keywords",
    }  # all optional but four
    ENTITY = {"name", "website", "alias", "date-start", "date-end", "orcid"}

    def test_it_has_the_keys_of_the_format(self) -> None:
        cited = yaml.safe_load((release.ROOT / "CITATION.cff").read_text())
        assert {"cff-version", "message", "title", "authors"} <= set(cited) <= self.KEYS
        assert (cited["cff-version"], cited["type"]) == ("1.2.0", "software")
        assert cited["authors"]
        assert all("name" in author and set(author) <= self.ENTITY for author in cited["authors"])
        assert len(set(cited["keywords"])) == len(cited["keywords"])

    def test_the_version_is_in_one_place(self) -> None:
        version = release.VERSION.findall((release.ROOT / "src" / "tidemill" / "__init__.py").read_text())
        assert len(version) == 1
        named = [
            name for name in ("CITATION.cff", "pyproject.toml", "Dockerfile") if f"{version[0]}\n" in text_of(name)
        ]
        assert named == []


def text_of(name: str) -> str:
    return (release.ROOT / name).read_text(encoding="utf-8")
