"""Models and data sets of the Hugging Face Hub in place of a path, web addresses, which are none, and servers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BeforeValidator

from tidemill.config.base import is_beyond_loopback

HUB = "hub:"
"""Prefix of a path that names a data set of the Hugging Face Hub. The name of a model may have it, too."""
WEB_ADDRESS = re.compile(r"(^|/)((https?|hf|s3|gs|ftp):/|(www\.)?(huggingface\.co|hf\.co)/)")
"""Also as the end of an absolute path, in which `https://` has become `https:/`."""
HUB_PAGE = re.compile(
    r"(?:^|/)(?:hf:/+|(?:www\.)?(?:huggingface\.co|hf\.co)/)(?:(?:datasets|models|spaces)/)?"
    r"(?P<name>(?!(?:datasets|models|spaces)/)[\w.-]+/[\w.-]+)"
    r"(?:/(?:tree|blob|resolve|raw)/(?!main\b)(?P<revision>[^/?#]+))?"
)
NEEDS = "download it: files, folders and names of the hub (hub:OWNER/NAME) are read"


def address_hint(given: str | Path, *, of_model: bool = False) -> str:
    """What to write instead of a web address; empty if it is none, or if something exists at that path."""
    text = str(given)
    if not WEB_ADDRESS.search(text) or Path(text).exists():
        return ""
    if (page := HUB_PAGE.search(text)) is None:
        return NEEDS
    name, revision = f"{HUB}{page['name']}", page["revision"]
    if not revision:
        return f"write {name}"
    return f'write {name}, and model.revision = "{revision}"' if of_model else f"write {name}@{revision}"


def _data_path(given: Any) -> Any:
    if isinstance(given, (str, Path)) and (hint := address_hint(given)):
        raise ValueError(f"is a web address; {hint}")
    return given


def _folder(given: Any) -> Any:
    if isinstance(given, str) and address_hint(given):
        raise ValueError("is a web address; download it, and name its folder")
    return given


def _model_name(given: Any) -> Any:
    """A text without the prefix of the hub."""
    if not isinstance(given, str):
        return given
    if hint := address_hint(given, of_model=True):
        raise ValueError(f"is a web address; {hint}")
    return given.removeprefix(HUB)


DataPath = Annotated[Path, BeforeValidator(_data_path)]
OptionalDataPath = Annotated[Path | None, BeforeValidator(_data_path)]
FolderText = Annotated[str, BeforeValidator(_folder)]
ModelName = Annotated[str, BeforeValidator(_model_name)]
OptionalModelName = Annotated[str | None, BeforeValidator(_model_name)]

ENVIRONMENT_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def server_url_issues(url: str, auth_env: str, *, needed_by: str) -> Iterator[str]:
    """Issues of the URL of a server, and of the name of the variable with the credentials for it.

    A URL with an "@" may contain a password and is not repeated.
    """
    if auth_env and not ENVIRONMENT_VARIABLE.fullmatch(auth_env):
        yield "auth_env is not the name of an environment variable; put the secret into a variable and name it here"
    if "@" in re.split("[/?#]", url.partition("://")[2])[0]:
        yield "url contains credentials, which would be logged; leave them out and use auth_env"
        return
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port is not a number
        valid = False
    if not valid:
        given = "the given url" if "@" in url else f'"{url}"'
        yield f'{needed_by} needs a url with a host, and {given} has none; set url = "http://host:port/path"'
    elif auth_env and parts.scheme == "http" and is_beyond_loopback(parts.hostname or ""):
        yield f"auth_env would send a secret to {url} without encryption; use https:// or a loopback address"
