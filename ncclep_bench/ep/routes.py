"""How this rank reaches the others, and which link kinds a configuration may name."""

from __future__ import annotations

from typing import NamedTuple

from ncclep_bench.errors import UsageError

LINK_KINDS = ("nvlink", "nvswitch", "pcie", "ib", "tcp", "shm")
"""What `EpConfig.topology` may name, joined by `_` ("nvlink_ib"), beside "auto" and "off"."""


class Route(NamedTuple):
    """One line of the route table; figures are None where nothing has been measured."""

    source: int
    target: int
    path: tuple[int, ...]
    link: str
    latency_ns: float | None = None
    bandwidth_gbps: float | None = None


class Topology(NamedTuple):
    """What was asked for and what was found.

    `unavailable`: link kinds that were named and that this backend does not have. `local`: ranks, this one among them,
    whose memory this rank has proved to reach; the others are sent messages. `routes`: from this rank to every other;
    all are direct, since nothing here relays.
    """

    requested: str
    unavailable: tuple[str, ...]
    local: tuple[int, ...]
    routes: tuple[Route, ...]


def named_links(topology: str) -> tuple[str, ...]:
    """The link kinds that `topology` names, none for "auto" and "off". Raises UsageError listing the known ones."""
    kinds = () if topology in ("auto", "off") else tuple(topology.split("_"))
    unknown = [kind for kind in kinds if kind not in LINK_KINDS]
    if unknown:
        raise UsageError(
            f"topology {topology!r} names {unknown[0]!r}",
            hint=f'allowed: "auto", "off", or link kinds joined by "_": {", ".join(LINK_KINDS)}',
        )
    return kinds


def direct_topology(topology: str, rank: int, size: int, local: tuple[int, ...]) -> Topology:
    """Direct routes from `rank`: shared memory to `local` ranks, messages to the others."""
    routes = tuple(
        Route(rank, peer, (rank, peer), "shm" if peer in local else "messages") for peer in range(size) if peer != rank
    )
    absent = tuple(kind for kind in named_links(topology) if kind != "shm")
    return Topology(topology, absent, local, routes)
