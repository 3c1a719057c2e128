from __future__ import annotations

from tidemill.config.issues import shown


def test_the_credentials_of_a_url_are_not_shown() -> None:
    assert shown({"url": "http://me:hush@host/score"}) == '{"url": "http://...@host/score"}'
    assert shown("https://host/a@b") == '"https://host/a@b"'
