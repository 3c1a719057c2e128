"""Workflow files of OSMO as data, with the values of their `default-values` as in `osmo workflow submit`."""

from __future__ import annotations

import re
from typing import Any

import jinja2
import yaml

SECTION = re.compile(r"^(?=[a-zA-Z][a-zA-Z0-9_-]*:)", re.MULTILINE)
TOKEN = re.compile(r"\{\{\s*(input:\d+|output|workflow_id|host:[\w-]+)\s*\}\}")
"""OSMO's own, which stay as they are."""


def filled(text: str, **given: str) -> Any:
    """The file as data, without `default-values`; `given` as `--set` gives variables."""
    sections = {part.partition(":")[0]: part for part in SECTION.split(text)}
    values = yaml.safe_load(sections.pop("default-values", "default-values: {}"))["default-values"] or {}
    quoted = TOKEN.sub(lambda found: "{{ '" + found[0].replace("'", "") + "' }}", "".join(sections.values()))
    rendered = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False).from_string(quoted)
    return yaml.safe_load(rendered.render(**values | given))
