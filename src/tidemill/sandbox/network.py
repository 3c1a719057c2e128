"""The few addresses that a sandbox may connect to: listeners inside its network, passed on from outside.

A sandbox has a network of its own with nothing in it. For each "HOST:PORT" the launcher listens there, on HOST's
address if it is one, otherwise on a loopback address that the sandbox's /etc/hosts gives it. TCP only.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress

from tidemill.sandbox.bubblewrap import LIBC

METADATA = [
    ipaddress.ip_network(each)
    for each in (
        "169.254.0.0/16",
        "fe80::/10",
        "fd00:ec2::/32",
        "fd20:ce::/32",
        "fd00:42::/32",
        "100.100.100.200/32",
        "168.63.129.16/32",
        "192.0.0.192/32",
    )
]
"""Where clouds serve the credentials of a machine."""
EMBEDDING = [ipaddress.ip_network(each) for each in ("::/96", "64:ff9b::/96", "64:ff9b:1::/48")]
"""IPv6 addresses that end with the IPv4 address to which they lead."""
CLONE_NEWNET = 0x40000000
SIOCSIFADDR, IFNAMSIZ = 0x8916, 16
IP_FREEBIND = 15
CONNECT_S = 10.0
MOST_CONNECTIONS = 64
"""At a time, of a command; further ones are closed at once."""


def is_refused(address: str) -> bool:
    """Whether an address serves a cloud's metadata, or leads to an IPv4 address that does."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    places = [parsed]
    if isinstance(parsed, ipaddress.IPv6Address):
        places += filter(None, (parsed.ipv4_mapped, parsed.sixtofour))
        if any(parsed in network for network in EMBEDDING):
            places.append(ipaddress.IPv4Address(int(parsed) & 0xFFFF_FFFF))
    return any(place in network for place in places for network in METADATA)


def inside_addresses(network: Sequence[str]) -> dict[str, str]:
    """Host → its address inside the sandbox."""
    addresses: dict[str, str] = {}
    for host in (pair.rpartition(":")[0] for pair in network):
        if host == "localhost":
            addresses[host] = "127.0.0.1"
        elif host not in addresses:
            addresses[host] = f"127.0.1.{len(addresses) + 1}"
            with suppress(ValueError):
                addresses[host] = str(ipaddress.IPv4Address(host))
    return addresses


def hosts_file(network: Sequence[str]) -> str:
    addresses = {"localhost": "127.0.0.1", **inside_addresses(network)}
    lines = [f"{address} {host}" for host, address in addresses.items() if address != host]
    return "\n".join(lines) + "\n"


class Relay:
    """Passes connections of one command on to the hosts of its sandbox."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, pid: int, network: Sequence[str]) -> None:
        """Listen in the network of a process. Raises OSError."""
        addresses = inside_addresses(network)
        hosts = [(host, int(port)) for host, _, port in (pair.rpartition(":") for pair in network)]
        listeners = _listeners(pid, [(addresses[host], port) for host, port in hosts])
        for (host, port), listener in zip(hosts, listeners, strict=True):

            async def attend(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str = host, port: int = port
            ) -> None:
                if len(self._tasks) >= MOST_CONNECTIONS:
                    writer.close()
                    return
                task = asyncio.current_task()
                assert task is not None
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                await _pass_on(reader, writer, host, port)

            self._servers.append(await asyncio.start_server(attend, sock=listener))

    def close(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
    """Connect a stream to a host until one side closes. Refused hosts: closed at once."""
    far: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(CONNECT_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            allowed = [str(each[4][0]) for each in found if not is_refused(str(each[4][0]))]
            if not allowed:
                return
            far_reader, far = await asyncio.open_connection(allowed[0], port)
        await asyncio.gather(_copy(reader, far), _copy(far_reader, writer))
    except (OSError, TimeoutError):
        pass
    finally:
        writer.close()
        if far is not None:
            far.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    with suppress(OSError):
        writer.write_eof()


def _listeners(pid: int, pairs: Sequence[tuple[str, int]]) -> list[socket.socket]:
    """Listening sockets in the network of a process; a thread enters it, as a network belongs to a thread."""
    made: list[socket.socket] = []
    failed: list[OSError] = []

    def listen() -> None:
        try:
            network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
            try:
                if LIBC.setns(network, CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
            finally:
                os.close(network)
            for number, (address, port) in enumerate(pairs):
                made.append(socket.socket())
                made[-1].setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
                if not address.startswith("127."):
                    # Give the loopback interface one more address.
                    place = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))
                    request = struct.pack(f"{IFNAMSIZ}s16s8x", f"lo:{number}".encode(), place)
                    fcntl.ioctl(made[-1], SIOCSIFADDR, request)
                made[-1].bind((address, port))
                made[-1].listen()
                made[-1].setblocking(False)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    if failed:
        for each in made:
            each.close()
        raise failed[0]
    return made
