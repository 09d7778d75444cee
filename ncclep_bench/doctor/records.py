"""What recorded output tells: the shapes that parsers write into facts and checks read out of them."""

from __future__ import annotations

from typing import Any

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing read; `at` is file and line, `host` the machine where the text names one."""

    at: str
    host: str = ""

    @property
    def where(self) -> str:
        """The host, or else the file: what tells two machines apart."""
        return self.host or self.at.rpartition(":")[0]


class Gpu(Record, frozen=True, kw_only=True):
    """One GPU as nvidia-smi -q describes it: `fields` are "section/key" → value, in lower case."""

    gpu: str
    fields: dict[str, str]


class Link(Record, frozen=True, kw_only=True):
    """One NVLink of a GPU: `state` is up, down, disabled or unsupported; the rest is empty where not told."""

    gpu: str
    link: int
    state: str
    model: str = ""
    version: int | None = None
    remote: str = ""


class LinkErrors(Record, frozen=True, kw_only=True):
    """One NVLink error counter."""

    gpu: str
    link: int
    counter: str
    value: int


class LinkErrorRate(Record, frozen=True, kw_only=True):
    """The share of bits (effective) or symbols of an NVLink that were wrong after error correction."""

    gpu: str
    link: int
    kind: str
    rate: float


class Topology(Record, frozen=True, kw_only=True):
    """The matrix of `nvidia-smi topo -m`: `paths[row][column]`, and what NIC0… are called."""

    paths: dict[str, dict[str, str]]
    names: dict[str, str] = {}


class PeerStatus(Record, frozen=True, kw_only=True):
    """Whether `gpu` may read, write, … memory of `peer`, as `nvidia-smi topo -p2p` abbreviates it: OK, CNS, GNS, …"""

    gpu: str
    peer: str
    capability: str
    status: str


class Process(Record, frozen=True, kw_only=True):
    """A process that holds memory of a GPU."""

    gpu: str
    pid: int
    name: str
    used_mib: int


class Unreadable(Record, frozen=True, kw_only=True):
    """A device that a command could not read, in the words of the command."""

    device: str
    said: str


class Port(Record, frozen=True, kw_only=True):
    """One port of an RDMA device; those with the same `adapter` sit on one board. None or empty: not told."""

    device: str
    port: int
    state: str = ""
    physical: str = ""
    rate_gbps: float | None = None
    link_layer: str = ""
    lid: int | None = None
    sm_lid: int | None = None
    board: str = ""
    adapter: str = ""

    @property
    def name(self) -> str:
        return f"{self.device}:{self.port}"

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"


class Mtu(Record, frozen=True, kw_only=True):
    """The path MTU of a port, in bytes; `state` and `link_layer` as of Port."""

    device: str
    port: int
    max_bytes: int | None = None
    active_bytes: int
    state: str = ""
    link_layer: str = ""


class Counter(Record, frozen=True, kw_only=True):
    """One counter of a port."""

    device: str
    port: int
    counter: str
    value: int


class Gid(Record, frozen=True, kw_only=True):
    """One entry of a GID table: `kind` is IB, v1 or v2."""

    device: str
    port: int
    index: int
    gid: str
    kind: str
    netdev: str = ""


class TrafficClass(Record, frozen=True, kw_only=True):
    """The traffic class that the kernel gives to queue pairs of host programs."""

    device: str
    value: int


class PriorityFlow(Record, frozen=True, kw_only=True):
    """Which priorities of an interface are lossless, which DSCP leads to which priority, and which mark is trusted."""

    netdev: str
    enabled: list[int]
    priority_of_dscp: dict[str, int] = {}
    trust: str = ""


class NetDevice(Record, frozen=True, kw_only=True):
    """A network interface with its MTU, flags and IPv4 networks (address/prefix)."""

    name: str
    mtu_bytes: int
    up: bool
    networks: list[str] = []


class Route(Record, frozen=True, kw_only=True):
    """An IPv4 route: packets to `network` leave by `device`, to a gateway where there is one."""

    device: str
    network: str
    gateway: str = ""


class SourceRule(Record, frozen=True, kw_only=True):
    """Packets from `source` (address or network) have a route table of their own."""

    source: str
    table: str


class PciDevice(Record, frozen=True, kw_only=True):
    """A PCI device as sysfs describes it: identifiers in hexadecimal, links as text, empty where not told."""

    address: str
    vendor: str
    device: str
    class_code: str
    numa_node: int | None = None
    current_link_speed: str = ""
    max_link_speed: str = ""
    current_link_width: str = ""
    max_link_width: str = ""


class Acs(Record, frozen=True, kw_only=True):
    """Access control of a PCI device: the flags that are on."""

    device: str
    title: str
    on: list[str]
    virtual: bool = False


class Module(Record, frozen=True, kw_only=True):
    """A loaded kernel module and the modules that use it."""

    name: str
    used_by: list[str]


class RasReport(Record, frozen=True, kw_only=True):
    """One answer of NCCL's RAS: the states of its communicators, and how far each rank is where the answer tells.

    `missing`: ranks or processes that RAS does not reach, and what it says of them.
    """

    states: list[str]
    errors: list[str]
    progress: dict[str, int] = {}
    missing: dict[str, str] = {}


class RankProcess(Record, frozen=True, kw_only=True):
    """A rank of a running job, looked at twice: `states` are letters of /proc, and X where the process is gone.

    Between the looks it used `cpu_s` of processor time and came to `meetings` meetings of this product's host backend
    (None: it has none, or may not be looked at). `waits_in`, `waits_for`, `waits_s`: the meeting in which it stood at
    both looks, the ranks that were not there, and how long. `wchan` and `syscall` are empty unless the same twice.
    """

    pid: int
    rank: int
    ranks: int | None = None
    local_ranks: int | None = None
    command: str = ""
    states: list[str]
    cpu_s: float = 0.0
    wchan: str = ""
    syscall: str = ""
    meetings: int | None = None
    waits_in: str = ""
    waits_for: list[int] = []
    waits_s: float = 0.0


class Stack(Record, frozen=True, kw_only=True):
    """Where a rank is in its program, the innermost call first."""

    rank: int
    frames: list[str]


class Drift(Record, frozen=True, kw_only=True):
    """A thing that is not as in a baseline of so many machines; `now` None: it is gone, `healthy` empty: it is new."""

    item: str
    healthy: list[str]
    now: str | None = None
    machines: int = 1


class Event(Record, frozen=True, kw_only=True):
    """A line that a signature knows: an `effect` follows from another fault; `time` orders events of one clock."""

    kind: str
    text: str
    rank: int | None = None
    time: str = ""
    effect: bool = False
    fields: dict[str, str] = {}


class PathMtu(Record, frozen=True, kw_only=True):
    """What passed from `host` to `peer` when packets of up to `tried_bytes` were sent that may not be fragmented.

    `passed_bytes` is the largest that arrived, 0 for none, `told_bytes` what a router on the way said would fit.
    """

    device: str
    address: str
    mtu_bytes: int
    peer: str
    peer_device: str
    peer_address: str
    peer_mtu_bytes: int
    tried_bytes: int
    passed_bytes: int
    told_bytes: int | None = None
    error: str = ""


class Answer(msgspec.Struct, frozen=True):
    """Whether a rank has answered the others within `seconds`, and what it is doing, or could not do."""

    answered: bool
    pid: int | None = None
    seconds: float = 0.0
    doing: str = ""


class ClockOffset(msgspec.Struct, frozen=True):
    """How much a rank's clock is before rank 0's, within `uncertain_s`."""

    offset_s: float
    uncertain_s: float


class Told(Record, frozen=True, kw_only=True):
    """What one rank says of a fact that all ranks have."""

    rank: int | None = None
    value: Any

    @property
    def who(self) -> str:
        return (f"rank {self.rank}" if self.rank is not None else "") + (f" on {self.host}" if self.host else "")
