"""What rank 0 asks the other ranks of a job, and what they answer: facts, clocks, and what fits through the network."""

from __future__ import annotations

import os
import socket
import time
import zlib
from collections.abc import Callable, Generator, Sequence

import msgspec

from ncclep_bench.doctor.answers import answering, doing_of
from ncclep_bench.doctor.records import Answer, ClockOffset, PathMtu
from ncclep_bench.doctor.settings import Settings, pattern_of, settings_of
from ncclep_bench.model.facts import Facts, facts_from_json, told
from ncclep_bench.runtime.neighbours import neighbours
from ncclep_bench.runtime.path_mtu import Interface, Responder, interfaces, paths, probe, source_towards
from ncclep_bench.runtime.path_mtu import Path as NetworkPath
from ncclep_bench.runtime.processes import process_state
from ncclep_bench.runtime.world import Post

_PROBE_S = 6.0
_PIECE_BYTES = 900
_MAX_INTERFACES = 8
_CLOCK_READINGS = 3


class _Hello(msgspec.Struct, array_like=True):
    """How a rank introduces itself to rank 0; `stack` is the same for ranks that share a network stack."""

    host: str
    pid: int
    stack: str
    port: int
    key: bytes
    interfaces: list[Interface]
    pieces: int


class Ask(msgspec.Struct):
    """What rank 0 wants of another rank."""

    what: str
    serial: int = 0
    number: int = 0
    ranks: list[int] = []
    path: NetworkPath | None = None
    port: int = 0
    key: bytes = b""


class Reply(msgspec.Struct):
    """The answer, with the question's serial number; 0 for the introduction, which nobody has asked for."""

    serial: int
    data: bytes


_Talk = Generator[Ask | None, bytes, None]


class Own:
    """What this rank answers to rank 0's questions; rank 0 puts them to itself as well."""

    def __init__(self, facts: Facts, responder: Responder) -> None:
        packed = zlib.compress(msgspec.json.encode(facts))
        self._pieces = [packed[at : at + _PIECE_BYTES] for at in range(0, len(packed), _PIECE_BYTES)]
        boot, namespaces = (facts.fact(f"host.{name}").value for name in ("boot_id", "namespaces"))
        self.hello = _Hello(
            facts.host,
            os.getpid(),
            f"{boot} {namespaces['net'] if namespaces else ''}",
            responder.port,
            responder.key,
            _used_interfaces(facts)[:_MAX_INTERFACES],
            len(self._pieces),
        )
        self._answers: dict[str, Callable[[Ask], bytes]] = {
            "facts": lambda ask: self._pieces[ask.number],
            "clock": lambda ask: msgspec.msgpack.encode(time.time()),
            "probe": _probed,
            "neighbours": _seen_here,
        }

    def answer(self, ask: Ask) -> bytes:
        return self._answers[ask.what](ask)


def _used_interfaces(facts: Facts) -> list[Interface]:
    """Those that NCCL_SOCKET_IFNAME picks, else all that lead out of the host; of the family that NCCL would use."""
    settings = settings_of(facts) if facts.fact("job.settings").state == "value" else Settings([])
    family, chosen = settings.get("NCCL_SOCKET_FAMILY"), settings.get("NCCL_SOCKET_IFNAME")
    six_first = family is not None and family.value == "AF_INET6"
    if chosen is None:
        return interfaces(six_first=six_first)
    pattern = pattern_of(chosen.value)
    return interfaces(
        lambda name: pattern.exclude != any(pattern.matches(entry, [name]) for entry in pattern.names),
        six_first=six_first,
    )


def _probed(ask: Ask) -> bytes:
    assert ask.path is not None
    source = ask.path.source or source_towards(ask.path.target.address)
    try:
        fit = probe(ask.path, ask.port, ask.key, deadline_s=_PROBE_S)
    except OSError as error:
        said = error.strerror or type(error).__name__
        return msgspec.msgpack.encode(_Probed(source, 0, 0, None, said))
    return msgspec.msgpack.encode(_Probed(source, fit.tried_bytes, fit.passed_bytes, fit.told_bytes))


class _Probed(msgspec.Struct):
    source: Interface | None
    tried_bytes: int
    passed_bytes: int
    told_bytes: int | None
    error: str = ""


def _seen_here(ask: Ask) -> bytes:
    """Pid and state of those ranks that run on this host."""
    seen = [(n.rank, n.pid, doing_of(process_state(n.pid))) for n in neighbours() if n.rank in ask.ranks]
    return msgspec.msgpack.encode((socket.gethostname(), seen))


def _path_mtu(own: _Hello, peer: _Hello, path: NetworkPath, found: _Probed) -> PathMtu:
    return PathMtu(
        at=f"probe from {own.host} to {path.target.address}",
        host=own.host,
        device=found.source.device if found.source else "",
        address=found.source.address if found.source else "",
        mtu_bytes=found.source.mtu_bytes if found.source else 0,
        peer=peer.host,
        peer_device=path.target.device,
        peer_address=path.target.address,
        peer_mtu_bytes=path.target.mtu_bytes,
        tried_bytes=found.tried_bytes,
        passed_bytes=found.passed_bytes,
        told_bytes=found.told_bytes,
        error=found.error,
    )


class Interviews:
    """Rank 0's talks with the other ranks, side by side: a question each, then the next one when it is answered."""

    def __init__(self, post: Post, own: Own) -> None:
        self._post, self._own = post, own
        self._hellos: dict[int, _Hello] = {0: own.hello}
        self._facts: dict[int, Facts] = {}
        self._clocks: dict[int, ClockOffset] = {}
        self._paths: dict[int, list[PathMtu]] = {}
        self._unprobed: dict[int, list[tuple[_Hello, NetworkPath]]] = {}
        self._answers: dict[int, Answer] = {}
        self._hosts: dict[int, str] = {}
        self._serial = 0
        self._talks: dict[int, _Talk] = {}
        self._awaited: dict[int, int] = {}
        self._of_own: Ask | None = None
        for rank in range(1, post.size):
            self._begin(rank, self._introduction(rank))
        self._take_facts(0, b"".join(own.answer(Ask("facts", number=n)) for n in range(own.hello.pieces)))

    def run(self, until: float) -> None:
        """Go on with all talks until they are at their end, or it is `until` on time.monotonic's clock."""
        while self._talks and time.monotonic() < until:
            ask, self._of_own = self._of_own, None
            if ask is not None:
                self._heard(0, ask.serial, self._own.answer(ask))
            message = self._post.receive() if ask is not None else self._post.wait(until)
            if message is not None:
                reply = msgspec.msgpack.decode(message[1], type=Reply)
                self._heard(message[0], reply.serial, reply.data)

    def probe(self, until: float) -> None:
        """Begin the probes of the paths between all hosts that have answered, by the first rank of each."""
        leaders = self._first_of_each_host()
        for at, rank in enumerate(leaders):
            others = leaders[at + 1 :] + leaders[:at]  # so that not all begin with the same one
            if others:
                self._begin(rank, self._probing(rank, others, until))

    def silent(self) -> list[int]:
        """Ranks whose facts have not come."""
        return [rank for rank in range(self._post.size) if rank not in self._facts]

    def name_the_silent(self, until: float) -> None:
        """Ask one rank of each host what it sees of the ranks that are silent."""
        silent = self.silent()
        if not silent:
            return
        self._talks.clear()
        self._awaited.clear()
        for rank in self._first_of_each_host():
            self._begin(rank, self._looking(silent[:16]))
        self.run(until)

    def _first_of_each_host(self) -> list[int]:
        first: dict[str, int] = {}
        for rank in sorted(self._facts):
            first.setdefault(self._hellos[rank].stack, rank)
        return list(first.values())

    def tell_all(self, ask: Ask) -> None:
        """Send what needs no answer."""
        for rank in self._facts:
            if rank:
                self._post.send(rank, msgspec.msgpack.encode(ask))

    def documents(self, seconds: float) -> list[Facts]:
        """The facts of all ranks by number; those of a silent one only say that it is silent."""
        return [self._document(rank, seconds) for rank in range(self._post.size)]

    def _document(self, rank: int, seconds: float) -> Facts:
        facts = self._facts.get(rank)
        if facts is None:
            hello = self._hellos.get(rank)
            doing = "has not sent its facts" if hello else "has no process on the hosts that answer"
            known = Answer(False, hello.pid if hello else None, doing=doing)
            answer = msgspec.structs.replace(self._answers.get(rank, known), seconds=round(seconds, 1))
            host = hello.host if hello else self._hosts.get(rank, "")
            return answering(Facts(host=host, rank=rank, sections={}), answer)
        if clock := self._clocks.get(rank):
            facts = facts.having({"host.clock": told("time of day, asked by rank 0", clock)})
        measured = self._paths.get(rank, [])
        if left := self._unprobed.get(rank):
            late = f"the deadline came before this and {len(left) - 1} more paths were probed"
            peer, path = left[0]
            measured = [*measured, _path_mtu(self._hellos[rank], peer, path, _Probed(path.source, 0, 0, None, late))]
        if measured:
            facts = facts.having({"network.path_mtu": told("UDP probes that may not be fragmented", measured)})
        return facts

    # ---- talks ----

    def _begin(self, rank: int, talk: _Talk) -> None:
        self._talks[rank] = talk
        self._put(rank, next(talk, None))

    def _put(self, rank: int, ask: Ask | None) -> None:
        if ask is None:
            self._awaited[rank] = 0
            return
        self._serial += 1
        ask.serial = self._awaited[rank] = self._serial
        if rank == 0:
            self._of_own = ask
        else:
            self._post.send(rank, msgspec.msgpack.encode(ask))

    def _heard(self, rank: int, serial: int, data: bytes) -> None:
        if self._awaited.get(rank) != serial:
            return  # the answer to a question that nobody asks any more
        try:
            self._put(rank, self._talks[rank].send(data))
        except StopIteration:
            del self._talks[rank], self._awaited[rank]

    def _introduction(self, rank: int) -> _Talk:
        hello = msgspec.msgpack.decode((yield None), type=_Hello)
        self._hellos[rank] = hello
        readings = []
        for _ in range(_CLOCK_READINGS):
            before = time.time()
            theirs = msgspec.msgpack.decode((yield Ask("clock")), type=float)
            after = time.time()
            readings.append(ClockOffset(theirs - (before + after) / 2, (after - before) / 2))
        self._clocks[rank] = min(readings, key=lambda reading: reading.uncertain_s)
        packed = b""
        for number in range(hello.pieces):
            packed += yield Ask("facts", number=number)
        self._take_facts(rank, packed)

    def _take_facts(self, rank: int, packed: bytes) -> None:
        facts = facts_from_json(zlib.decompress(packed), file=f"rank {rank}")
        self._facts[rank] = msgspec.structs.replace(facts, rank=rank)

    def _probing(self, rank: int, others: Sequence[int], until: float) -> _Talk:
        own = self._hellos[rank]
        planned = [
            (self._hellos[other], path)
            for other in others
            for path in paths(own.interfaces, self._hellos[other].interfaces)
        ]
        # What the deadline leaves out must not look healthy.
        self._unprobed[rank] = planned
        while planned and time.monotonic() < until - _PROBE_S / 2:
            peer, path = planned[0]
            data = yield Ask("probe", path=path, port=peer.port, key=peer.key)
            found = msgspec.msgpack.decode(data, type=_Probed)
            self._paths.setdefault(rank, []).append(_path_mtu(own, peer, path, found))
            del planned[0]

    def _looking(self, silent: list[int]) -> _Talk:
        data = yield Ask("neighbours", ranks=silent)
        host, seen = msgspec.msgpack.decode(data, type=tuple[str, list[tuple[int, int, str]]])
        for rank, pid, doing in seen:
            self._answers[rank] = Answer(False, pid, doing=doing)
            self._hosts[rank] = host
