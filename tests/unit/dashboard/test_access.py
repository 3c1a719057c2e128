"""Attacks on the pages, each with the answer that it must get; none leaves a trace in the folder."""

from __future__ import annotations

import asyncio
import html
import json
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx2
import pytest

from tests.unit.dashboard.served import make_run, open_run, page_of, pages, raw, tokens
from tidemill.core.errors import UserError
from tidemill.dashboard.serve import watch

SECRET = "the-secret-of-another-file"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run in progress, another run, and files that no page may show."""
    root = tmp_path_factory.mktemp("runs")
    open_run(root / "one")
    make_run(root / "two", steps=1)
    (root / "secret.txt").write_text(SECRET, encoding="utf-8")
    (root.parent / "secret.txt").write_text(SECRET, encoding="utf-8")
    (root / "link").symlink_to("/", target_is_directory=True)
    (root / "loop").symlink_to(root, target_is_directory=True)
    return root


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[httpx2.Client]:
    with pages(root) as client:
        yield client


def written(root: Path) -> set[Path]:
    return {path for name in ("control", "checks") for path in root.glob(f"*/{name}/*")}


PATHS = [
    "/../secret.txt", "/..%2fsecret.txt", "/%2e%2e/secret.txt", "/run/../secret.txt", "/run/..%2f..%2fsecret.txt/",
    "/run/%2e%2e%2fsecret.txt/", "/run/../../etc/passwd", "/run/link/etc/passwd", "/run/two/secret.txt", "/run/two/",
    "/run//etc/passwd", "//etc/passwd", "/assets/../app.py", "/assets/..%2fapp.py", "/assets/%2e%2e%5capp.py",
    "/assets//etc/passwd", "/assets/run.html.j2", "/assets/page.js%00.css", "/assets/page.js/..", "/KEY/../secret.txt",
    "/KEY/section/..%2f..%2fsecret", "/KEY/section/setup%00", "/KEY/section/__class__", "/KEY/config.toml",
    "/KEY/ledger.sqlite",
    "/run/0000000000000000/", "/run/%00/", "/run/é/", "/run/" + "a" * 4000 + "/", "/events?run=../one",
    "/events?run=",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_no_path_reaches_a_file(root: Path, client: httpx2.Client, path: str) -> None:
    target = path.replace("/KEY/", page_of(root, "two")).encode()
    answer = raw(client, b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert answer.split(b" ")[1] in (b"404", b"400"), answer[:100]
    assert SECRET.encode() not in answer and b"root:" not in answer


HOSTS = {
    "another site's name": "Host: evil.example",
    "a name below ours": "Host: localhost.evil.example",
    "a name with our address in it": "Host: 127.0.0.1.nip.io:PORT",
    "a port after another name": "Host: evil.example:PORT",
    "user information": "Host: localhost@evil.example",
    "none": "X: y",
    "empty": "Host:",
    "two": "Host: localhost\r\nHost: evil.example",
    "broken": "Host: [::1",
    "the machine's other address": "Host: 192.168.0.1",
}


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_only_names_of_this_machine_are_served(client: httpx2.Client, host: str) -> None:
    lines = f"GET / HTTP/1.1\r\n{host}\r\nConnection: close\r\n\r\n".replace("PORT", str(client.base_url.port))
    answer = raw(client, lines.encode())
    absolute = raw(client, b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert (client.get("/", headers={"host": "[::1]:1234"})).status_code == 200
    assert answer.split(b" ")[1] in (b"403", b"400"), answer[:100]
    assert absolute.split(b" ")[1] == b"404"


ACTIONS: dict[str, tuple[Mapping[str, str], object, int]] = {
    "another site": ({"origin": "https://evil.example"}, {"action": "stop"}, 403),
    "no site": ({"origin": "null"}, {"action": "stop"}, 403),
    "another port": ({"origin": "http://127.0.0.1:3000"}, {"action": "stop"}, 403),
    "our port under another name": ({"origin": "http://localhost:PORT"}, {"action": "stop"}, 403),
    "an extension": ({"origin": "chrome-extension://127.0.0.1:PORT"}, {"action": "stop"}, 403),
    "a broken origin": ({"origin": "http://[127.0.0.1"}, {"action": "stop"}, 403),
    "cross-site without origin": ({"sec-fetch-site": "cross-site"}, {"action": "stop"}, 403),
    "same-site without origin": ({"sec-fetch-site": "same-site"}, {"action": "stop"}, 403),
    "a navigation": ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, {"action": "stop"}, 403),
    "a form": ({"content-type": "application/x-www-form-urlencoded"}, "action=stop", 415),
    "plain text": ({"content-type": "text/plain"}, '{"action": "stop"}', 415),
    "no content type": ({"content-type": ""}, '{"action": "stop"}', 415),
    "compressed": ({"content-encoding": "gzip"}, {"action": "stop"}, 415),
    "a large body": ({}, {"action": "stop", "x": "y" * 100_000}, 413),
    "a missing action": ({}, {}, 400),
    "an unknown action": ({}, {"action": "rm -rf"}, 400),
    "an action of another type": ({}, {"action": ["stop"]}, 400),
    "an unknown field": ({}, {"action": "stop", "run_id": "another"}, 400),
    "a negative time": ({}, {"action": "pause", "hold_s": -1}, 400),
    "an endless time": ({}, '{"action": "pause", "hold_s": 1e300}', 400),
    "no number": ({}, '{"action": "pause", "hold_s": NaN}', 400),
    "no object": ({}, [], 400),
    "deep": ({}, "[" * 4000, 400),
    "not UTF-8": ({}, b'{"action": "\xff"}', 400),
    "no JSON": ({}, "", 400),
}  # fmt: skip


@pytest.mark.parametrize(("headers", "body", "status"), ACTIONS.values(), ids=ACTIONS)
def test_requests_to_a_run_that_are_refused(
    root: Path, client: httpx2.Client, headers: Mapping[str, str], body: object, status: int
) -> None:
    sent = JSON | {name: value.replace("PORT", str(client.base_url.port)) for name, value in headers.items()}
    content = body if isinstance(body, (str, bytes)) else json.dumps(body)
    answer = client.post(page_of(root, "one") + "control", content=content, headers=sent)
    assert answer.status_code == status, answer.text
    assert not written(root)


def test_a_refusal_arrives_although_its_body_comes_later(root: Path, client: httpx2.Client) -> None:
    """A connection that is closed while a body arrives is reset, and the client loses the answer."""
    port = int(client.base_url.port or 0)
    head = f"POST {page_of(root, 'one')}control HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Length: 20000\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(head.encode() + b"Origin: https://evil.example\r\n\r\n")
        for _ in range(2):
            time.sleep(0.1)
            connection.sendall(b"x" * 10_000)
        assert connection.recv(100).split(b" ")[1] == b"403"


VERDICTS = {
    "an unknown sample": ([1, "p", 0, "00"], 1.0, 404),
    "a path": ([1, "../../secret", 0, "00"], 1.0, 404),
    "a part of a sample": ([1, "p"], 1.0, 400),
    "no sample": (None, 1.0, 400),
    "above 1": ([1, "p", 0, "00"], 1.5, 400),
    "infinite": ([1, "p", 0, "00"], "1e999", 400),
    "text": ([1, "p", 0, "00"], '"good"', 400),
    "true": ([1, "p", 0, "00"], "true", 400),
}


@pytest.mark.parametrize(("sample", "score", "status"), VERDICTS.values(), ids=VERDICTS)
def test_verdicts_that_are_refused(
    root: Path, client: httpx2.Client, sample: object, score: object, status: int
) -> None:
    content = f'{{"sample": {json.dumps(sample)}, "score": {score}}}'
    answer = client.post(page_of(root, "two") + "verdict", content=content, headers=JSON)
    assert answer.status_code == status, answer.text
    assert not written(root)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "POST", "HEAD"])
def test_only_some_methods_exist(root: Path, client: httpx2.Client, method: str) -> None:
    for path in ("/", page_of(root, "one"), "/assets/page.js", "/metrics"):
        answer = raw(client, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert answer.split(b" ")[1] in (b"405", b"400", b"404") or (method == "HEAD" and b" 200 " in answer)
        assert b"access-control-allow" not in answer.lower()


def test_tokens_have_rights(root: Path, tmp_path: Path) -> None:
    with pages(root, token_file=tokens(tmp_path / "tokens")) as client:
        page = page_of(root, "one")

        def status(token: bytes, *, acting: bool = False, query: str = "") -> int:
            headers = {b"authorization": b"Bearer " + token}
            if acting:
                headers |= {b"content-type": b"application/json"}
                return client.post(f"{page}control", content='{"action": "checkpoint"}', headers=headers).status_code
            return client.get(f"{page}section/setup{query}", headers=headers).status_code

        assert [status(token) for token in (b"reader-token", b"actor-token")] == [200, 200]
        wrong = [b"-", b"reader", b"reader-tokenx", b"read reader-token", "é".encode(), b"\xff", b"x" * 5000]
        assert [status(token) for token in wrong] == [401] * len(wrong)
        assert status(b"wrong", query="?token=reader-token&access_token=reader-token") == 401
        assert status(b"reader-token", acting=True) == 403
        assert not written(root)
        foreign = client.post(
            page + "control", content='{"action": "stop"}',
            headers={**JSON, "authorization": "Bearer actor-token", "origin": "https://evil.example"},
        )  # fmt: skip
        assert foreign.status_code == 403
        assert [(client.get(path)).status_code for path in ("/", "/metrics", "/events", page)] == [401] * 4
        assert client.get("/assets/page.js").status_code == 200
        for host in ("x/assets/", "x/assets/?", "x/assets/#", "/assets/", "x@y/assets/page.js?"):
            assert client.get("/metrics", headers={"host": host}).status_code in (400, 401), host
        door = client.get(page, headers={"accept": "text/html"})
        assert (door.status_code, "door.js" in door.text, "smollm2" in door.text) == (401, True, False)
        named = client.get("/metrics", headers={"host": "gpu-1:8300", "authorization": "Bearer reader-token"})
        assert named.status_code == 200
        (tmp_path / "tokens").write_text("read another-token\n", encoding="utf-8")
        assert [status(token) for token in (b"reader-token", b"another-token")] == [401, 200]


@pytest.mark.parametrize("text", ["token\n", "write token\n", "read a b\n", "read\n"])
def test_token_files_that_are_refused(root: Path, tmp_path: Path, text: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(text, encoding="utf-8")
    file.chmod(0o600)
    with pytest.raises(UserError, match="no right and key"), pages(root, token_file=file):
        pass


def test_beyond_this_machine_tokens_are_needed(root: Path) -> None:
    for host in ("0.0.0.0", "::", "192.168.0.1", "example.com"):
        with pytest.raises(UserError, match="open to other machines without tokens"):
            asyncio.run(watch(root, host=host, port=0, token_file=None, wait=False, show=print))


FLOODS = {
    "many headers": b"".join(b"X-%d: y\r\n" % at for at in range(20_000)),
    "a long header": b"X: " + b"y" * 300_000 + b"\r\n",
    "a folded header": b"X: y\r\n z: injected\r\n",
    "a header without a name": b": y\r\n",
    "two lengths": b"Content-Length: 1\r\nContent-Length: 2\r\n",
    "length and chunks": b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
    "line breaks": b"X: y\r\rHost: evil.example\r\n",
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_headers_that_are_no_headers(root: Path, client: httpx2.Client, flood: bytes) -> None:
    path = (page_of(root, "one") + "control").encode()
    answer = raw(client, b"POST " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + flood + b"\r\n{}")
    assert not answer or answer.split(b" ")[1][:1] == b"4", answer[:100]
    assert (client.get("/")).status_code == 200
    assert not written(root)


def test_a_slow_body_has_a_deadline(root: Path, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.dashboard.app.BODY_S", 0.2)
    head = f"POST {page_of(root, 'one')}control HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    began_s = time.monotonic()
    answer = raw(client, head.encode() + b"Content-Length: 30\r\n\r\n{")
    assert b" 408 " in answer and time.monotonic() - began_s < 1


def test_every_answer_has_the_headers_of_a_page_that_trusts_nobody(root: Path, client: httpx2.Client) -> None:
    page = page_of(root, "one")
    for path in ("/", page, f"{page}charts.json", "/assets/page.js", "/nowhere", "/metrics", f"{page}check"):
        answer = client.get(path)
        policy = answer.headers["content-security-policy"]
        scripts = policy.partition("script-src ")[2].partition(";")[0]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert scripts == "'self'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert path.startswith("/assets") or answer.headers["cache-control"] == "no-store"
        if "html" in answer.headers["content-type"]:
            assert "<script>" not in answer.text and " onclick" not in answer.text


def test_what_a_link_names_is_not_written(tmp_path: Path) -> None:
    run, recorder = open_run(tmp_path / "runs/one")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("control", "checks"):
        (run.path / name).symlink_to(elsewhere, target_is_directory=True)
    with pages(tmp_path / "runs") as client:
        page = page_of(tmp_path / "runs", "one")
        asked = client.post(page + "control", json={"action": "stop"})
        sample = json.loads(_attribute((client.get(page + "check")).text, "data-sample"))
        judged = client.post(page + "verdict", json={"sample": sample, "score": 1})
    assert (asked.status_code, judged.status_code) == (409, 409)
    assert not list(elsewhere.iterdir())
    recorder.close()
    recorder.run.close()


def _attribute(page: str, name: str) -> str:
    return html.unescape(page.partition(f'{name}="')[2].partition('"')[0])
