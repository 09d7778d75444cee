"""RDMA ports: state, MTU, counters, GID tables, traffic classes, and which adapters are rails."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import TypeVar

from ncclep_bench.doctor.contract import Check, Trouble
from ncclep_bench.doctor.records import Counter as PortCounter
from ncclep_bench.doctor.records import Gid, Mtu, Port, PriorityFlow, TrafficClass
from ncclep_bench.doctor.settings import Setting, Settings, pattern_of, settings_of
from ncclep_bench.model.facts import Facts

FULL_MTU = 4096
LOSSES = frozenset(
    [
        "symbol_error",
        "link_error_recovery",
        "link_downed",
        "port_rcv_errors",
        "port_xmit_discards",
        "local_link_integrity_errors",
        "excessive_buffer_overrun_errors",
        "local_ack_timeout_err",
        "packet_seq_err",
        "out_of_sequence",
        "rnr_nak_retry_err",
        "roce_adp_retrans",
        "req_cqe_error",
        "resp_cqe_error",
        "VL15_dropped",
    ]
)
CEILINGS = frozenset({(1 << bits) - 1 for bits in (4, 8, 16, 32, 64)})

T = TypeVar("T", Port, Mtu)


def _settings(facts: Facts) -> Settings | None:
    return settings_of(facts) if facts.fact("job.settings").state == "value" else None


def _once(records: Sequence[T]) -> list[T]:
    """One record per port and place: a port that two tools describe counts once."""
    return list({(record.where, record.device, record.port): record for record in reversed(records)}.values())[::-1]


def _ports(facts: Facts) -> list[Port]:
    return _once(facts.read("rdma.ports", list[Port]))


def _on(port: Port) -> str:
    return f" on {port.host}" if port.host else ""


def _state(facts: Facts) -> Iterator[Trouble]:
    ports = _ports(facts)
    for port in ports:
        siblings = [
            other
            for other in ports
            if other is not port
            and other.where == port.where
            and (other.device == port.device or (port.adapter and other.adapter == port.adapter))
        ]
        evidence = (
            f"{port.at}: {port.name} state {port.state}, physical {port.physical or 'not told'}, "
            f"rate {port.rate_gbps if port.rate_gbps is not None else 'not told'}, LID {port.lid}, SM LID "
            f"{port.sm_lid}",
        )
        if port.state == "DOWN":
            reason = f", physical state {port.physical}" if port.physical else ""
            rate = (
                f"; its rate of {port.rate_gbps:g} Gb/s means nothing while it is down"
                if port.rate_gbps is not None
                else ""
            )
            beside = any(sibling.active for sibling in siblings)
            fix = (
                f"sudo ibportstate -D 0 {port.port} enable   # or: ip link set up; it was switched off"
                if port.physical.lower() == "disabled"
                else None
            )
            yield Trouble(
                f"{port.name}{_on(port)} is Down{reason}: no link to the switch, one rail less than the peers "
                f"have{rate}",
                evidence,
                fix,
                "info" if beside else "error",
            )
        elif port.state.startswith(("INIT", "ARMED")):
            yield Trouble(
                f"{port.name}{_on(port)} is {port.state}: no subnet manager has brought it up",
                evidence,
                "sudo sminfo   # start opensm or the switch's subnet manager",
            )
        elif port.active and port.link_layer.lower() == "infiniband" and (port.lid == 0 or port.sm_lid == 0):
            yield Trouble(
                f"{port.name}{_on(port)} is active without a subnet manager: LID {port.lid}, SM LID {port.sm_lid}",
                evidence,
                "sudo sminfo   # start opensm or the switch's subnet manager",
            )


def _mtus(facts: Facts) -> list[Mtu]:
    """MTUs that mean something: a port that is down shows a default."""
    return [mtu for mtu in _once(facts.read("rdma.mtu", list[Mtu])) if mtu.state in ("ACTIVE", "ACTIVE_DEFER")]


def _mtu_in_use(facts: Facts) -> Iterator[Trouble]:
    libraries = facts.get("libraries.nccl", list[dict[str, str | None]]) or []
    versions = {library.get("version") or "" for library in libraries}
    old = any(version and _version(version) <= (2, 30, 7) for version in versions)
    settings = _settings(facts)
    gin = settings.get("NCCL_GIN_TYPE") if settings else None
    for mtu in _mtus(facts):
        if mtu.max_bytes is None or mtu.active_bytes >= min(mtu.max_bytes, FULL_MTU):
            continue
        ethernet = mtu.link_layer.lower() == "ethernet"
        name = f"{mtu.device}:{mtu.port}" + (f" on {mtu.host}" if mtu.host else "")
        about = (
            "the MTU of its network interface is too small (1500 gives 1024); a mismatch against peers at 4096, "
            "and with NCCL up to 2.30.7 GIN GDAKI, which takes 4096 for granted, hangs here"
            if ethernet
            else "the switch or the partition limits it; peers at another MTU do not match"
        )
        yield Trouble(
            f"{name} runs at active_mtu {mtu.active_bytes} of {mtu.max_bytes}: {about}",
            (f"{mtu.at}: max_mtu {mtu.max_bytes}, active_mtu {mtu.active_bytes}", *((str(gin),) if gin else ())),
            "sudo ip link set dev NETDEV mtu 9000   # at least 4200, on switches too; until then export NCCL_GIN_TYPE=2"
            if ethernet
            else None,
            "error" if ethernet and old and gin and gin.number == 3 else None,
        )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


def _mtu_possible(facts: Facts) -> Iterator[Trouble]:
    for mtu in _mtus(facts):
        if mtu.max_bytes is not None and mtu.max_bytes < FULL_MTU:
            yield Trouble(
                f"{mtu.device}:{mtu.port} has a max_mtu of {mtu.max_bytes}: peers at 4096 will not match",
                (f"{mtu.at}: max_mtu {mtu.max_bytes}, active_mtu {mtu.active_bytes}",),
            )


def _mtu_alike(facts: Facts) -> Iterator[Trouble]:
    mtus = _mtus(facts)
    rails: dict[tuple[str, str, int], list[Mtu]] = defaultdict(list)
    for mtu in mtus:
        rails[mtu.link_layer.lower(), mtu.device, mtu.port].append(mtu)
    for (_, device, port), ends in rails.items():
        counts = Counter(mtu.active_bytes for mtu in ends)
        if len(counts) > 1:
            ends = sorted(ends, key=lambda mtu: counts[mtu.active_bytes])  # the odd ones first
            yield Trouble(
                f"{device}:{port} has another MTU on another host: "
                + ", ".join(f"{mtu.where} {mtu.active_bytes}" for mtu in ends[:8]),
                tuple(f"{mtu.at}: active_mtu {mtu.active_bytes}" for mtu in ends[:8]),
            )
    for where in {mtu.where for mtu in mtus}:
        for layer in ("infiniband", "ethernet"):
            here = [mtu for mtu in mtus if mtu.where == where and mtu.link_layer.lower() == layer]
            usual = Counter(mtu.active_bytes for mtu in here).most_common(1)
            odd = [mtu for mtu in here if mtu.active_bytes != usual[0][0]] if usual else []
            if odd:
                yield Trouble(
                    f"{', '.join(f'{m.device}:{m.port} {m.active_bytes}' for m in odd)} against {usual[0][0]} on "
                    f"the other rails",
                    tuple(f"{m.at}: active_mtu {m.active_bytes}" for m in odd),
                    verdict="warning",
                )


def _rails(facts: Facts) -> Iterator[Trouble]:
    ports = [port for port in _ports(facts) if port.rate_gbps and port.state in ("ACTIVE", "")]
    settings = _settings(facts)
    chosen = settings.get("NCCL_IB_HCA") if settings else None
    for where in dict.fromkeys(port.where for port in ports):
        here = [port for port in ports if port.where == where]
        fastest = max(port.rate_gbps or 0 for port in here)
        infiniband = [port for port in here if port.link_layer.lower() == "infiniband"]
        compute = [port for port in infiniband or here if port.rate_gbps == fastest] or infiniband
        # Beside InfiniBand every Ethernet port is something else; among themselves, those of half the speed or less.
        others = [
            port
            for port in here
            if port.link_layer.lower() == "ethernet" and (infiniband or 2 * (port.rate_gbps or 0) <= fastest)
        ]
        if not others:
            continue
        evidence = tuple(f"{p.at}: {p.name} {p.rate_gbps:g} Gb/s {p.link_layer}" for p in (*others, *compute[:1]))
        names = ", ".join(f"{p.device} ({p.rate_gbps:g} Gb/s Ethernet)" for p in others)
        picked = [port for port in others if chosen and _picks(chosen, port.device)]
        fix = f"export NCCL_IB_HCA=={','.join(dict.fromkeys(p.device for p in compute))}"
        if picked and chosen:
            yield Trouble(
                f"NCCL_IB_HCA selects {', '.join(p.device for p in picked)}, not a compute rail",
                (*evidence, str(chosen)),
                fix,
                "error",
            )
        else:
            yield Trouble(
                f"{names} is not a compute rail beside {compute[0].device} ({fastest:g} Gb/s InfiniBand): do not "
                f"select it",
                evidence,
                fix,
            )


def _picks(setting: Setting, device: str) -> bool:
    pattern = pattern_of(setting.value)
    matched = any(pattern.matches(name, [device]) for name in pattern.names)
    return matched != pattern.exclude


def _counters(facts: Facts) -> Iterator[Trouble]:
    readings: dict[tuple[str, str, int, str], list[PortCounter]] = defaultdict(list)
    for counter in facts.read("rdma.counters", list[PortCounter]):
        readings[counter.where, counter.device, counter.port, counter.counter].append(counter)
    # A counter that falls was cleared, or is of another host: then no other of this port tells anything either.
    fallen = {key[:3] for key, values in readings.items() if values[-1].value < values[0].value}
    for (where, device, port, name), values in readings.items():
        if name not in LOSSES:
            continue
        first, last = values[0], values[-1]
        on = f"{device}:{port}" + (f" on {last.host}" if last.host else "")
        if last.value > first.value and (where, device, port) not in fallen:
            yield Trouble(
                f"{name} of {on} rises: {first.value}, then {last.value}",
                tuple(f"{value.at}: {value.value}" for value in (first, last)),
                verdict="warning",
            )
        elif last.value in CEILINGS and last.value > 1:
            yield Trouble(
                f"{name} of {on} is saturated at {last.value}: past events; only a cleared counter or a delta tells "
                "whether they go on",
                (f"{last.at}: {last.value}",),
            )
        elif last.value > 0 and name in (
            "symbol_error",
            "link_error_recovery",
            "local_ack_timeout_err",
            "out_of_sequence",
        ):
            yield Trouble(f"{name} of {on} counted {last.value} since it was cleared", (f"{last.at}: {last.value}",))


def _gids(facts: Facts) -> Iterator[Trouble]:
    tables: dict[tuple[str, int], dict[str, list[Gid]]] = defaultdict(lambda: defaultdict(list))
    for gid in facts.read("rdma.gids", list[Gid]):
        tables[gid.device, gid.port][gid.host or gid.where].append(gid)
    settings = _settings(facts)
    forced = next(
        (
            s
            for n in ("NCCL", "NVSHMEM", "UCCL")
            if settings and (s := settings.get(f"{n}_IB_GID_INDEX")) and s.number >= 0
        ),
        None,
    )
    for (device, port), hosts in tables.items():
        usable = {host: sorted(gid.index for gid in gids if _routable(gid)) for host, gids in hosts.items()}
        roce = {host: found for host, found in usable.items() if any(g.kind != "IB" for g in hosts[host])}
        evidence = tuple(
            f"{gids[0].at}: {host}: RoCE v2 with IPv4 at index {', '.join(map(str, usable[host])) or 'none'}"
            for host, gids in hosts.items()
        )[:8]
        if forced and (lacking := [host for host, found in roce.items() if forced.number not in found]):
            yield Trouble(
                f"{device}:{port}: GID index {forced.number} is forced, and is no RoCE v2 IPv4 entry on "
                f"{', '.join(lacking[:8])}",
                (*evidence, str(forced)),
                f"unset {forced.name}",
                "error",
            )
        elif empty := [host for host, found in roce.items() if not found]:
            yield Trouble(f"{device}:{port} has no RoCE v2 IPv4 entry on {', '.join(empty[:8])}", evidence)
        elif len({tuple(found) for found in roce.values()}) > 1:
            counts = Counter(found[0] for found in roce.values())
            odd_first = sorted(roce.items(), key=lambda entry: counts[entry[1][0]])
            yield Trouble(
                f"{device}:{port}: the RoCE v2 GID index differs between nodes: "
                + ", ".join(f"{host} {found[0]}" for host, found in odd_first[:8]),
                evidence,
            )


def _routable(gid: Gid) -> bool:
    """RoCE v2 over IPv4: the address is mapped into ::ffff:0:0/96."""
    return gid.kind == "v2" and (gid.gid.startswith("0000:0000:0000:0000:0000:ffff:") or gid.gid.startswith("::ffff:"))


def _traffic_class(facts: Facts) -> Iterator[Trouble]:
    settings = _settings(facts)
    if settings and (settings.get("NCCL_GIN_IB_TC") or settings.get("NCCL_IB_TC")):
        return
    for found in facts.read("rdma.traffic_class", list[TrafficClass]):
        if found.value:
            yield Trouble(
                f"queue pairs of the host get traffic class {found.value} from the driver, those that GIN GDAKI "
                f"makes get "
                "class 0, which is lossy here, unless NCCL_GIN_IB_TC or NCCL_IB_TC is set: TRANSPORT_RETRY later on",
                (f"{found.at}: Global tclass={found.value} ({found.device})",),
                f"export NCCL_GIN_IB_TC={found.value}",
            )
            return


def _flow_control(facts: Facts) -> Iterator[Trouble]:
    for flow in facts.read("rdma.qos", list[PriorityFlow]):
        name = flow.netdev or "the interface"
        if not flow.enabled:
            yield Trouble(f"{name}: no priority is lossless (PFC is off for all)", (flow.at,))
        elif flow.trust == "pcp":
            yield Trouble(
                f"{name} trusts VLAN priorities (pcp), not DSCP: routed RoCE traffic is not in a lossless class",
                (f"{flow.at}: Priority trust state: pcp",),
                f"sudo mlnx_qos -i {flow.netdev or 'NETDEV'} --trust dscp",
            )


_GUIDE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"

CHECKS = (
    Check(
        code="IB002",
        title="Every port is up",
        severity="error",
        needs=("rdma.ports",),
        judge=_state,
        why="A rail that is missing on one node makes its peers wait or lets NCCL pair the wrong adapters.",
        by_hand="ibstat",
        remedy="ibstat; sudo mlxlink -d DEVICE   # cable, transceiver, switch port; compare with a peer",
        reference=f"{_GUIDE}; reports: leptonai/gpud#482, NVIDIA/nccl#905",
    ),
    Check(
        code="IB003",
        title="Ports use their full MTU",
        severity="warning",
        needs=("rdma.mtu",),
        judge=_mtu_in_use,
        why="Queue pairs agree on one path MTU. Ends with different ones lose or refuse what is longer, and some code "
        "takes 4096 for granted.",
        by_hand="ibv_devinfo | grep mtu; ip link",
        remedy="ibv_devinfo | grep -E 'hca_id|mtu'   # on every node; raise the switch's and the partition's MTU to "
        "4096",
        reference="reports: NVIDIA/nccl#1957, NVIDIA/nccl#1524",
    ),
    Check(
        code="IB004",
        title="Ports can use an MTU of 4096",
        severity="info",
        needs=("rdma.mtu",),
        judge=_mtu_possible,
        why="An adapter whose maximum is 2048 is right by itself and wrong beside peers at 4096.",
        by_hand="ibv_devinfo | grep max_mtu   # on every node",
        remedy="set the same MTU on every node, 2048 if this adapter must take part",
        reference="report: NVIDIA/nccl#1524",
    ),
    Check(
        code="IB005",
        title="The MTU is the same on every node and rail",
        severity="error",
        needs=("rdma.mtu",),
        judge=_mtu_alike,
        why="NCCL since 2.20 negotiates the MTU on one side only; a mismatch is a hang or a local access violation.",
        by_hand="ibv_devinfo | grep active_mtu   # on every node",
        remedy="set the same MTU on adapters and switches",
        reference="reports: NVIDIA/nccl#1524, NVIDIA/nccl#1710",
        joins=True,
    ),
    Check(
        code="IB006",
        title="Slow Ethernet ports are not taken for rails",
        severity="info",
        needs=("rdma.ports",),
        judge=_rails,
        why="Management, storage and cloud adapters are RDMA devices too; as a rail they slow every collective.",
        by_hand="ibstatus; echo $NCCL_IB_HCA",
        remedy="export NCCL_IB_HCA==mlx5_0",
        reference="reports: NVIDIA/nccl#302, NVIDIA/NVSentinel#1221",
    ),
    Check(
        code="IB007",
        title="Error counters of the ports stand still",
        severity="info",
        needs=("rdma.counters",),
        judge=_counters,
        why="Counters hold the past, and many stop at 255 or 65535; only a difference between two readings is an "
        "alarm.",
        by_hand="grep . /sys/class/infiniband/*/ports/*/{counters,hw_counters}/*   # twice",
        remedy="sudo perfquery -R   # clear, then read again after a run; cable or optics if they rise",
        reference="reports: leptonai/gpud#1247, facebookresearch/gcm#119",
    ),
    Check(
        code="IB008",
        title="RoCE v2 is at the same GID index everywhere",
        severity="warning",
        needs=("rdma.gids",),
        judge=_gids,
        why="A fixed index that another node lacks, or that means another protocol there, ends in 'error 12, vendor "
        "err "
        "129' at once. Since 2.21 NCCL finds the index by itself.",
        by_hand="show_gids   # on every node",
        remedy="unset NCCL_IB_GID_INDEX NVSHMEM_IB_GID_INDEX   # and restart the network where the entry is missing",
        reference=f"{_GUIDE}; reports: NVIDIA/nccl#426, openucx/ucx#7785",
        joins=True,
    ),
    Check(
        code="IB009",
        title="GIN uses the traffic class of the host",
        severity="warning",
        needs=("rdma.traffic_class",),
        judge=_traffic_class,
        why="The driver's override reaches queue pairs of the kernel's making only. Those that GIN GDAKI makes on the "
        "GPU keep class 0.",
        by_hand="cat /sys/class/infiniband/*/tc/1/traffic_class; echo $NCCL_GIN_IB_TC $NCCL_IB_TC",
        remedy="export NCCL_GIN_IB_TC=236   # the class that the override names",
        reference="report: NVIDIA/nccl#2383",
    ),
    Check(
        code="IB010",
        title="RoCE is lossless",
        severity="warning",
        needs=("rdma.qos",),
        judge=_flow_control,
        why="Without priority flow control a many-to-one phase of an all-to-all drops packets, and bandwidth "
        "collapses.",
        by_hand="mlnx_qos -i NETDEV",
        remedy="sudo mlnx_qos -i NETDEV --trust dscp --pfc 0,0,0,1,0,0,0,0   # as the switches have it, on every node",
        reference="reports: NVIDIA/nccl#378, NVIDIA/nccl#306, deepseek-ai/DeepEP#82",
    ),
)
