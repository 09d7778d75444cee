"""What really fits through the path between two hosts: UDP probes that may not be fragmented, and who answers them.

Sizes are those of IP packets. Linux only; needs no root. Of IPv6, link-local addresses are left out: every link has the
same network of them, so that they do not tell which interfaces are joined.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import re
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from typing import NamedTuple

import msgspec

LOCAL_BRIDGES = re.compile(r"docker|br-|virbr|veth|cni|cali|flannel|lxc|lxd|podman|kube|tunl|dummy")
"""Names of interfaces that join containers of one host, and have the same addresses on every host."""

_TRIES = 2
_WAIT_S = 0.15
_LAST_WAIT_S = 0.5
_PMTUDISC_PROBE = 3  # Linux names that Python does not know, here and below
# What sending may say of a packet that did not get through, or of one before it.
_LOST = (errno.EMSGSIZE, errno.ECONNREFUSED, errno.ENOBUFS)
_PACKET_INFO = struct.Struct("16sI")
_SIX_ADDRESSES = FilePath("/proc/net/if_inet6")
_SIX_GLOBAL_SCOPE = 0x00
_SIX_UNUSABLE = 0x08 | 0x20 | 0x40  # the address is another's too, is deprecated, or may still turn out to be
_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFMTU, _SIOCGIFNETMASK = 0x8913, 0x8915, 0x8921, 0x891B
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_PROBE = struct.Struct("!16sI")


class Interface(msgspec.Struct, frozen=True, array_like=True):
    """A network interface with one of its addresses and the network of that."""

    device: str
    address: str
    network: str
    mtu_bytes: int

    @property
    def six(self) -> bool:
        return ":" in self.address


class Path(NamedTuple):
    """From which interface to which one; `source` is None where routing chooses it, as the two share no network."""

    source: Interface | None
    target: Interface


class Fit(msgspec.Struct, frozen=True):
    """What passed a path: the largest size tried, the largest that arrived (0: none), and what a router said fits."""

    tried_bytes: int
    passed_bytes: int
    told_bytes: int | None = None


class _Family(NamedTuple):
    """What differs between IPv4 and IPv6: size of its header with UDP's, the packet that every host takes, options, and
    how it tells what became of a packet."""

    family: socket.AddressFamily
    header_bytes: int
    smallest_bytes: int
    options: tuple[tuple[int, int, int], ...]
    told_as: tuple[int, int]
    origin: int


_FOUR = _Family(
    socket.AF_INET,
    28,
    576,
    ((socket.IPPROTO_IP, 10, _PMTUDISC_PROBE), (socket.IPPROTO_IP, 11, 1)),  # IP_MTU_DISCOVER, IP_RECVERR
    (socket.IPPROTO_IP, 11),
    2,
)
_SIX = _Family(
    socket.AF_INET6,
    48,
    1280,
    (
        (socket.IPPROTO_IPV6, 23, _PMTUDISC_PROBE),  # IPV6_MTU_DISCOVER
        (socket.IPPROTO_IPV6, socket.IPV6_DONTFRAG, 1),
        (socket.IPPROTO_IPV6, 25, 1),  # IPV6_RECVERR
    ),
    (socket.IPPROTO_IPV6, 25),
    3,
)


def _family_of(address: str) -> _Family:
    return _SIX if ":" in address else _FOUR


def interfaces(
    wanted: Callable[[str], bool] = lambda name: not LOCAL_BRIDGES.match(name), *, six_first: bool = False
) -> list[Interface]:
    """Interfaces that are up, have an address, lead out of this host and are `wanted` (default: no bridges that
    containers of one host share): each with its IPv4 address, or IPv6 where it has no other or `six_first`."""
    found: dict[str, Interface] = {}
    for interface in sorted(_addresses(), key=lambda found: found.six != six_first):
        if wanted(interface.device):
            found.setdefault(interface.device, interface)
    return [found[name] for _, name in socket.if_nameindex() if name in found]


def source_towards(address: str) -> Interface | None:
    """The interface of this host from which routing sends to `address`."""
    with socket.socket(_family_of(address).family, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect((address, 9))
        except OSError:
            return None
        return _source_of(asked)


def _source_of(connected: socket.socket) -> Interface | None:
    address = connected.getsockname()[0]
    return next((found for found in _addresses() if found.address == address), None)


def _addresses() -> Iterator[Interface]:
    try:
        lines = _SIX_ADDRESSES.read_text().splitlines()
    except OSError:
        lines = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:

        def ask(request: int, name: str) -> bytes:
            return fcntl.ioctl(asked, request, struct.pack("256s", os.fsencode(name)[:15]))[16:24]

        leading = {}
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it is gone again, or has no IPv4 address
                (flags,) = struct.unpack_from("H", ask(_SIOCGIFFLAGS, name))
                if not flags & _IFF_UP or flags & _IFF_LOOPBACK:
                    continue
                (leading[name],) = struct.unpack_from("i", ask(_SIOCGIFMTU, name))
                address, mask = (
                    socket.inet_ntoa(ask(request, name)[4:8]) for request in (_SIOCGIFADDR, _SIOCGIFNETMASK)
                )
                yield Interface(name, address, _network(address, mask), leading[name])
    for digits, _, length, scope, flags, name in (line.split() for line in lines):
        if name in leading and int(scope, 16) == _SIX_GLOBAL_SCOPE and not int(flags, 16) & _SIX_UNUSABLE:
            address = str(ipaddress.IPv6Address(int(digits, 16)))
            yield Interface(name, address, _network(address, int(length, 16)), leading[name])


def _network(address: str, mask: str | int) -> str:
    return str(ipaddress.ip_network(f"{address}/{mask}", strict=False))


def paths(ours: list[Interface], theirs: list[Interface]) -> list[Path]:
    """Paths between two hosts: one per network that both are on, else one to their first interface as routed."""
    shared = [
        Path(own, other)
        for own in ours
        for other in theirs
        # Both have the address: a network that each host has to itself.
        if own.network == other.network and own.address != other.address
    ]
    known, families = {own.address for own in ours}, {own.six for own in ours}
    return shared or [Path(None, other) for other in theirs if other.address not in known and other.six in families][:1]


class Responder:
    """Answers probes at a UDP port of all addresses of this host, until it is closed; `key` tells it from others."""

    def __init__(self) -> None:
        self.key = secrets.token_bytes(16)
        both = socket.has_dualstack_ipv6()
        self._socket = socket.socket(socket.AF_INET6 if both else socket.AF_INET, socket.SOCK_DGRAM)
        if both:
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
        self._socket.bind(("", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering. May be called twice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # which wakes the thread, though there is no connection
        self._thread.join(1.0)
        self._socket.close()

    def __enter__(self) -> Responder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> None:
        while True:
            try:
                data, ancillary, _, sender = self._socket.recvmsg(1 << 16, 256)
            except OSError:
                return
            if not sender:
                return
            if len(data) >= _PROBE.size and data[:16] == self.key:
                # From the address that was asked: of several, the kernel might choose another one.
                asked = [
                    (level, kind, _PACKET_INFO.pack(_PACKET_INFO.unpack(info)[0], 0))
                    for level, kind, info in ancillary
                    if (level, kind) == (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO)
                ]
                with contextlib.suppress(OSError):
                    self._socket.sendmsg([data[: _PROBE.size]], asked, 0, sender)


def probe(path: Path, port: int, key: bytes, *, deadline_s: float) -> Fit:
    """Find the largest packet that reaches the responder at `path.target`, up to the smaller MTU of the two ends.

    A healthy path takes one round trip, one that drops packets about 3 s. Small answers come back, so this tells of one
    direction. Raises TimeoutError when the search is not done by the deadline, OSError when there is no way there.
    """
    end = time.monotonic() + deadline_s
    family = _family_of(path.target.address)
    with socket.socket(family.family, socket.SOCK_DGRAM) as sender:
        for option in family.options:
            sender.setsockopt(*option)
        if path.source is not None:
            sender.bind((path.source.address, 0))
        sender.connect((path.target.address, port))
        own = path.source or _source_of(sender)
        limit = min(own.mtu_bytes if own else path.target.mtu_bytes, path.target.mtu_bytes)
        return _Search(sender, family, key, end).largest(limit)


class _Search:
    def __init__(self, sender: socket.socket, family: _Family, key: bytes, end: float) -> None:
        self.sender, self.family, self.key, self.end = sender, family, key, end
        self.told: int | None = None
        self.serial = 0

    def largest(self, limit: int) -> Fit:
        if self.passes(limit):
            return Fit(limit, limit)
        low = self.family.smallest_bytes
        if limit <= low or not self.passes(low):
            return Fit(limit, 0, self.told)
        high = limit
        while high - low > 1:
            middle = self.told if self.told and low < self.told < high else (low + high) // 2
            if self.passes(middle):
                low = middle
            else:
                high = middle
        # A busy machine may answer late, and a packet may get lost once.
        if self.passes(limit, tries=1, wait_s=_LAST_WAIT_S):
            return Fit(limit, limit)
        return Fit(limit, low, self.told)

    def passes(self, size: int, tries: int = _TRIES, wait_s: float = _WAIT_S) -> bool:
        for _ in range(tries):
            if time.monotonic() > self.end:
                raise TimeoutError(errno.ETIMEDOUT, "the search for the path's MTU was not done in time")
            self.serial += 1
            answer = _PROBE.pack(self.key, self.serial)
            try:
                self.sender.send(answer.ljust(size - self.family.header_bytes, b"\0"))
            except OSError as error:
                if error.errno not in _LOST:
                    raise
                if not any(self.errors()) and error.errno == errno.EMSGSIZE:
                    return False  # this host's own interface takes no such packet
                time.sleep(_WAIT_S / 10)
                continue
            if self.answered(answer, wait_s):
                return True
        return False

    def answered(self, wanted: bytes, wait_s: float) -> bool:
        end = time.monotonic() + wait_s
        waiting = select.poll()
        waiting.register(self.sender, select.POLLIN)
        while (left := end - time.monotonic()) > 0:
            for _, events in waiting.poll(left * 1000):
                if events & select.POLLERR and any(self.errors()):
                    return False
                if events & select.POLLIN:
                    with contextlib.suppress(OSError):
                        if self.sender.recv(1 << 16, socket.MSG_DONTWAIT) == wanted:
                            return True
        return False

    def errors(self) -> Iterator[bool]:
        """Take what ICMP has said; True for each message."""
        while True:
            try:
                _, ancillary, _, _ = self.sender.recvmsg(64, 512, socket.MSG_ERRQUEUE | socket.MSG_DONTWAIT)
            except OSError:
                return
            for level, kind, data in ancillary:
                if (level, kind) == self.family.told_as:
                    number, origin, _, _, _, info, _ = struct.unpack_from("IBBBBII", data)
                    if number == errno.EMSGSIZE and origin == self.family.origin and info:
                        self.told = info
                    yield origin == self.family.origin
