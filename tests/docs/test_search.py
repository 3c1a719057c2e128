"""The search of the site finds the right page, first or second."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.browser import opened
from tests.docs.conftest import Site
from tests.docs.test_site import titles

pytestmark = [pytest.mark.xdist_group("site"), pytest.mark.timeout(600)]
QUESTIONS = {
    "resume after kill": "how-to/pause-and-resume",
    "why is my reward always the same": "troubleshooting",
    "use my own environment": "how-to/agents",
    "vllm worker on spot": "how-to/vllm",
    "KL coefficient": "reference/configuration/algorithm",
    "out of memory": "how-to/memory",
    "how much will it cost": "how-to/plan",
    "num_generations": "coming-from/trl",
    "what is policy lag": "concepts/policy-lag",
    "eval pass@k": "how-to/evaluate",
    "reward hacking": "how-to/guards",
    "spot instance killed": "how-to/preemptible-workers",
    "lora": "how-to/models",
    "custom loss": "how-to/own-functions",
    "multi gpu": "how-to/gpu",
    "kubernetes": "clusters/kubernetes",
    "resume checkpoint": "how-to/pause-and-resume",
    "batch size memory": "how-to/memory",
    "tool calling agent": "how-to/agents",
    "tokens per second slow": "results/speed",
    "GRPO vs PPO": "how-to/algorithms|concepts/algorithms",
    "grace period notice": "concepts/eviction",
    "dpo preference pairs": "how-to/stages",
    "nan loss": "troubleshooting",
}
"""Of readers, with the page that answers them; `|` separates pages that do."""


@pytest.fixture(scope="module", params=["http", "file"])
def searching(request: pytest.FixtureRequest, site: Site, browser: Browser) -> Iterator[Page]:
    url = f"{site.url}/index.html" if request.param == "http" else site.file("index.html")
    with opened(browser, url) as page:
        yield page


@pytest.mark.parametrize(("question", "answers"), QUESTIONS.items())
def test_the_answer_is_first_or_second(question: str, answers: str, searching: Page) -> None:
    found = titles(searching, question)
    right = {f"{answer}.html" for answer in answers.split("|")}
    assert right & {*found[:2]}, found[:5]
