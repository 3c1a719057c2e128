"""A sandbox connects to the hosts that its configuration names, and to nothing else."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from tests.sandboxes import close_launchers, need_bubblewrap
from tidemill.config.sandbox import SandboxConfig
from tidemill.sandbox import open_sandbox
from tidemill.sandbox.launcher import PROGRAM
from tidemill.sandbox.network import _pass_on, hosts_file, is_refused

CLIENT = """\
import errno, socket, sys
for address in sys.argv[1:]:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(b"hello")
            connection.shutdown(socket.SHUT_WR)
            print(connection.recv(100).decode() or "closed")
    except OSError as error:  # after a connection that is closed at once, either call may fail
        closed = error.errno in (errno.ENOTCONN, errno.ECONNRESET, errno.EPIPE)
        print("closed" if closed else type(error).__name__)
"""


# Opens connections that stay open, and counts those that are not closed at once.
MANY = """\
import socket, sys, time
opened = [socket.create_connection(("localhost", int(sys.argv[1])), timeout=20) for _ in range(12)]
time.sleep(0.5)
alive = 0
for each in opened:
    each.setblocking(False)
    try: alive += bool(each.recv(1))
    except BlockingIOError: alive += 1
    except OSError: pass
print(alive)
"""


@contextmanager
def echo_server() -> Iterator[int]:
    """Answers each connection with what it sends, in upper case."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(connection.recv(100).upper())

        threading.Thread(target=serve, daemon=True).start()
        yield port
        server.shutdown(socket.SHUT_RDWR)


def answers(network: tuple[str, ...], *addresses: str) -> list[str]:
    with closing(open_sandbox(SandboxConfig(network=network))) as sandbox:
        finished = sandbox.run(["python3", "-c", CLIENT, *addresses])
    assert finished.code == 0, finished.stderr
    return finished.stdout.decode().split()


def test_only_named_ports_answer() -> None:
    need_bubblewrap()
    with echo_server() as port, echo_server() as other:
        assert answers((f"localhost:{port}",), f"localhost:{port}", f"127.0.0.1:{port}", f"localhost:{other}") == [
            "HELLO",
            "HELLO",
            "ConnectionRefusedError",
        ]


def test_an_address_is_itself_inside() -> None:
    need_bubblewrap()
    with echo_server() as port:
        assert answers((f"127.0.0.1:{port}", "169.254.169.254:80", "unknown.invalid:443"), f"127.0.0.1:{port}") == [
            "HELLO"
        ]


def test_connections_beyond_the_limit_are_closed_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    need_bubblewrap()
    close_launchers()
    limited = PROGRAM.replace("main()", "from tidemill.sandbox import network; network.MOST_CONNECTIONS = 5; main()")
    monkeypatch.setattr("tidemill.sandbox.local.PROGRAM", limited)
    with echo_server() as port, closing(open_sandbox(SandboxConfig(network=(f"localhost:{port}",)))) as sandbox:
        finished = sandbox.run(["python3", "-c", MANY, str(port)])
    close_launchers()

    assert finished.stdout == b"5\n", finished.stderr


def test_metadata_and_unknown_hosts_close_at_once() -> None:
    need_bubblewrap()
    network = ("169.254.169.254:80", "unknown.invalid:443")

    assert answers(network, *network) == ["closed", "closed"]
    assert answers(network, "169.254.169.254:81", "100.100.100.200:80") == ["ConnectionRefusedError", "OSError"]


def test_every_command_has_its_own_listeners() -> None:
    need_bubblewrap()
    with echo_server() as port, closing(open_sandbox(SandboxConfig(network=(f"localhost:{port}",)))) as sandbox:
        for _ in range(3):
            assert sandbox.run(["python3", "-c", CLIENT, f"localhost:{port}"]).stdout == b"HELLO\n"


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "::ffff:169.254.169.254",
        "::169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "2002:a9fe:a9fe::1",
        "fe80::1%eth0",
        "fd00:ec2::254",
        "fd20:ce::254",
        "100.100.100.200",
    ],
)
def test_metadata_addresses_are_refused(address: str) -> None:
    assert is_refused(address)
    assert not is_refused("93.184.216.34")
    assert not is_refused("64:ff9b::5db8:d822")


def test_a_name_of_a_metadata_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    connected: list[Any] = []

    async def connect() -> bytes:
        async def named(*_: Any, **__: Any) -> list[Any]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("169.254.169.254", 80))]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", named)
        near, far = socket.socketpair()
        streams = await asyncio.open_connection(sock=near)

        async def record(*where: Any) -> Any:
            connected.append(where)
            raise OSError

        monkeypatch.setattr(asyncio, "open_connection", record)
        await _pass_on(*streams, "innocent.example", 80)
        far.setblocking(False)
        with far:
            return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(far, 1), 5)

    assert asyncio.run(connect()) == b""
    assert not connected


def test_host_names_have_loopback_addresses() -> None:
    assert hosts_file(("localhost:1", "pypi.org:443", "10.0.0.1:80", "pypi.org:80")) == (
        "127.0.0.1 localhost\n127.0.1.2 pypi.org\n"
    )
