"""The issues of invalid configurations, for assertions on their fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from tidemill.config.base import Config
from tidemill.config.issues import ConfigError, ConfigIssue, split_hint


def issues_of(load: Callable[[], Any]) -> list[ConfigIssue]:
    """The issues that loading a configuration raises."""
    with pytest.raises(ConfigError) as caught:
        load()
    assert caught.value.exit_code == 2
    assert str(caught.value) == "\n".join(issue.line for issue in caught.value.issues)
    return list(caught.value.issues)


def section_issues(section: type[Config], **fields: Any) -> list[ConfigIssue]:
    """The issues that a section's own checks raise for these values."""
    with pytest.raises(ValidationError) as caught:
        section.model_validate(fields)
    texts = [str(details["ctx"]["error"]) for details in caught.value.errors() if details["type"] == "value_error"]
    return [split_hint(line) for text in texts for line in text.splitlines()]


def section_issue(section: type[Config], **fields: Any) -> ConfigIssue:
    """The only issue of these values."""
    (issue,) = section_issues(section, **fields)
    return issue
