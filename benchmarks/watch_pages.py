"""The pages of `tidemill watch` in Chromium, and what watching costs a run.

    python -m benchmarks.watch_pages

- *first paint* of a run of 2,000 steps, with a server that has just started and with one that knows the run;
- *step to screen*: from the line of a step in metrics.jsonl until the page shows its number;
- *size* of the page with its scripts and styles, compressed with gzip;
- *a long run* of 10^6 metric values and 10^5 samples: time of each part of the page, of a server that has read the run,
  and the server's memory after all of them;
- *cost*: CPU time of a short run with a server and an open page, relative to one without, in turns; both must end with
  the same weights and the same rewards.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
from playwright.sync_api import Browser, Error, Page, sync_playwright

from benchmarks.measuring import exit_code, write_result
from benchmarks.origin import parsed
from benchmarks.watch import write_run
from tidemill.telemetry.jsonl import JsonlWriter
from tidemill.telemetry.report.sections import SECTIONS
from tidemill.telemetry.run_list import run_key
from tidemill.telemetry.run_reader import RunReader

STEPS, WORKERS, SAMPLES = 2_000, 4, 8
PAINTS, NEW_STEPS, ROUNDS = 5, 20, 5
FIRST_PAINT_S, STEP_TO_SCREEN_S, PAGE_BYTES, PART_S, MEMORY_BYTES, COST = 1.0, 1.5, 200_000, 0.3, 150e6, 0.01
"""Targets."""
LONG_STEPS, LONG_SAMPLES, ASKED = 20_000, 5, 5
START_S, SHOWN_S, POLL_S = 30.0, 30.0, 0.5
KILOBYTE, MEGABYTE = 1e3, 1e6
TRAIN = (
    "train", "@char-addition", "--trainer.steps", "12", "--telemetry.live", "false", "--eval.every_steps", "0",
    "--engine.batch_invariant", "true",
)  # fmt: skip
SAME = ("reward_mean", "entropy", "loss", "grad_norm", "completion_tokens_mean")
"""Metrics that do not depend on the time."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parsed(parser)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        root = Path(folder)
        write_run(root / "run", steps=STEPS, workers=WORKERS, samples=SAMPLES)
        write_run(root / "long", steps=LONG_STEPS, workers=WORKERS, samples=LONG_SAMPLES)
        content = {**shown(browser, root / "run"), **long_run(root / "long"), **cost(browser, root)}
        browser.close()
    reached = {
        "first_paint_s": content["first_paint_s"] < FIRST_PAINT_S,
        "step_to_screen_s": content["step_to_screen_s"] < STEP_TO_SCREEN_S,
        "page_bytes": content["page_bytes"] <= PAGE_BYTES,
        "part_s": max(content["parts_s"].values()) < PART_S,
        "memory_bytes": content["memory_bytes"] < MEMORY_BYTES,
        "cost": content["cost"] < COST,
    }
    content |= {"reached_each": reached, "reached": all(reached.values())}
    print(
        f"first paint {content['first_paint_s']:.2f} s (a server that has just started: "
        f"{content['first_paint_cold_s']:.2f} s), step to screen {content['step_to_screen_s']:.2f} s "
        f"(longest {content['step_to_screen_max_s']:.2f} s), {content['page_bytes'] / KILOBYTE:.0f} kB; long run: "
        f"slowest part {max(content['parts_s'].values()):.2f} s, {content['memory_bytes'] / MEGABYTE:.0f} MB; "
        f"watched run {content['cost']:+.2%} CPU time ({content['cost_low']:+.2%} to {content['cost_high']:+.2%})"
    )
    print(f"written: {write_result('watch_pages', content)}")
    return exit_code(content)


class Server(NamedTuple):
    url: str
    pid: int


@contextmanager
def watched(path: Path) -> Iterator[Server]:
    """A server of its own process."""
    command = [sys.executable, "-m", "tidemill", "watch", str(path), "--wait", "--no-open", "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        line = server.stderr.readline()
        found = re.search(r"http://\S+", line)
        if found is None:
            raise RuntimeError(f"the server did not start: {line}")
        yield Server(found[0].rstrip("/"), server.pid)
    finally:
        server.terminate()
        server.wait(START_S)


def shown(browser: Browser, path: Path) -> dict[str, Any]:
    """Times and sizes of the page of a long run."""
    address = f"run/{run_key(path, path)}/"
    with watched(path) as server:
        url = server.url
        paints = [first_paint(browser, f"{url}/{address}") for _ in range(PAINTS + 1)]
        context = browser.new_context()
        page = context.new_page()
        sizes = list[int]()
        page.on("response", lambda answer: sizes.append(_compressed(answer)))
        page.goto(f"{url}/{address}")
        page.wait_for_selector("#badge[data-state=live]")
        page.wait_for_selector("#overview .uplot")
        page_bytes = sum(sizes)
        delays = [step_to_screen(page, path, STEPS + number) for number in range(1, NEW_STEPS + 1)]
        context.close()
    return {
        "first_paint_cold_s": paints[0],
        "first_paint_s": statistics.median(paints[1:]),
        "step_to_screen_s": statistics.median(delays),
        "step_to_screen_max_s": max(delays),
        "page_bytes": page_bytes,
    }


def _compressed(answer: Any) -> int:
    """Of a part of the page; data of the run do not count."""
    kind = answer.headers.get("content-type", "")
    counted = kind.startswith(("text/html", "text/css", "text/javascript"))
    return len(gzip.compress(answer.body())) if counted else 0


def first_paint(browser: Browser, url: str) -> float:
    """Seconds from the request to the first content, with an empty cache."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(url)
    entry = "performance.getEntriesByName('first-contentful-paint')[0]"
    wait_for(page, f"{entry} !== undefined")
    painted_ms = page.evaluate(f"{entry}.startTime")
    context.close()
    return float(painted_ms) / 1e3


def step_to_screen(page: Page, path: Path, step: int) -> float:
    reader = RunReader(path)
    reader.refresh()
    line = reader.data.metrics[-1]
    last = {**line._asdict(), **line.values}
    del last["values"]
    writer = JsonlWriter(reader.data.run.metrics)
    started_s = time.monotonic()
    writer.write(last | {"step": step})
    wait_for(page, f"document.querySelector('#run').textContent.includes('step {step} ')")
    shown_s = time.monotonic() - started_s
    writer.close()
    return shown_s


def long_run(path: Path) -> dict[str, Any]:
    """Time of each part of the page of a long run, and the server's memory."""
    parts = [*(f"section/{name}" for name in SECTIONS), "charts.json", "fleet.json", "samples?longest=2&page=3"]
    with watched(path) as server, httpx2.Client(timeout=SHOWN_S, trust_env=False) as client:
        times = dict[str, float]()
        for part in parts:
            taken = [_answer_s(client, f"{server.url}/run/{run_key(path, path)}/{part}") for _ in range(ASKED + 1)]
            times[part] = statistics.median(taken[1:])
        status = Path(f"/proc/{server.pid}/status").read_text(encoding="utf-8")
        kilobytes = int(re.search(r"VmRSS:\s+(\d+)", status)[1])  # type: ignore[index]
    return {"parts_s": times, "memory_bytes": 1024 * kilobytes}


def _answer_s(client: httpx2.Client, url: str) -> float:
    started_s = time.monotonic()
    client.get(url).raise_for_status()
    return time.monotonic() - started_s


def wait_for(page: Page, condition: str) -> None:
    """Playwright's own way needs `eval` in the page, which its content security policy forbids."""
    ends_s = time.monotonic() + SHOWN_S
    while not page.evaluate(condition):
        if time.monotonic() > ends_s:
            raise RuntimeError(f"not within {SHOWN_S:g} s: {condition}")


def cost(browser: Browser, root: Path) -> dict[str, Any]:
    """CPU time of a watched run relative to one that is not, in turns."""
    ratios, results = list[float](), set[str]()
    for number in range(ROUNDS):
        seconds = dict[bool, float]()
        for is_watched in (False, True) if number % 2 else (True, False):
            path = root / f"cost-{number}-{is_watched}"
            seconds[is_watched] = _watched_run(browser, path) if is_watched else _run(path)
            results.add(_result(path))
        ratios.append(seconds[True] / seconds[False] - 1)
    if len(results) != 1:
        raise RuntimeError("the runs did not learn the same")
    return {"rounds": ROUNDS, "cost": statistics.median(ratios), "cost_low": min(ratios), "cost_high": max(ratios)}


def _watched_run(browser: Browser, path: Path) -> float:
    with watched(path) as server:
        context = browser.new_context()
        page = context.new_page()
        page.goto(server.url)
        used_s = _run(path, page)
        context.close()
        return used_s


def _run(path: Path, page: Page | None = None) -> float:
    """CPU seconds of a run. Its page, if there is one, is opened as soon as there is a run."""
    command = [sys.executable, "-m", "tidemill", *TRAIN, "--run.dir", str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment)
    ended = 0
    while not ended:
        ended, status, used = os.wait4(run.pid, os.WNOHANG)
        if page is None:
            time.sleep(POLL_S)
            continue
        with suppress(Error):  # the page is just going to another address
            if not page.query_selector("#badge[data-state=live]"):
                page.reload()
        page.wait_for_timeout(1e3 * POLL_S)  # Playwright handles messages of the page only while it is called
    run.returncode = status
    if status:
        raise RuntimeError(f"the run ended with status {status}")
    return used.ru_utime + used.ru_stime


def _result(path: Path) -> str:
    """What the run has learned."""
    digest = json.loads((path / "summary.json").read_bytes())["weights_digest"]
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_bytes().splitlines()]
    return json.dumps([digest, *({name: line.get(name) for name in SAME} for line in lines)])


if __name__ == "__main__":
    sys.exit(main())
