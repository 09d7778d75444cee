"""What logs say of adapters, their connections and the networks between hosts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ncclep_bench.doctor.checks.log_events import GUIDE, events_of, lines, listed, log_check, said, who
from ncclep_bench.doctor.contract import Trouble
from ncclep_bench.doctor.settings import settings_of
from ncclep_bench.model.facts import Facts

STATUSES = {
    "1": "local length error: the ends disagree about a size, often the MTU",
    "4": "local protection error: memory that is no longer registered",
    "9": "the peer found the request invalid; with vendor error 138 the ends often have different MTUs",
    "10": "remote access error: the peer's memory is not registered for this",
    "11": "remote operation error: look at the peer's log",
    "12": "no answer from the peer after all retries",
    "13": "the peer had no receive buffer ready after all retries",
}


def _retries(facts: Facts) -> Iterator[Trouble]:
    events = [event for event in events_of(facts, "completion") if event.fields["status"] == "12"]
    if events:
        peers = sorted({event.fields["peer"].partition("<")[0] for event in events if "peer" in event.fields})
        flaps = events_of(facts, "port_error")
        yield Trouble(
            f"RDMA timeout after all retries (status 12){who(events)}"
            + (f" towards {listed(peers)}" if peers else "")
            + ": at once means a wrong GID index or no route between rails, later a lossy or flapping fabric"
            + ("; a port error was reported too" if flaps else ""),
            (*lines(events), *lines(flaps[:2])),
        )


def _mtu_signs(facts: Facts) -> Iterator[Trouble]:
    violations = events_of(facts, "rdma_access")
    invalid = [event for event in events_of(facts, "completion") if event.fields["status"] in ("1", "9")]
    both = [*violations, *invalid]
    if both:
        yield Trouble(
            f"{'local access violation' if violations else 'completion with status ' + invalid[0].fields['status']}"
            f"{who(violations or invalid)}"
            + (f" and status {invalid[0].fields['status']}{who(invalid)}" if violations and invalid else "")
            + ": suspect an MTU mismatch, else different adapter firmware or plugins; compare active_mtu of both "
            "ends first",
            lines(both),
        )


def _completions(facts: Facts) -> Iterator[Trouble]:
    events = [e for e in events_of(facts, "completion") if e.fields["status"] not in ("0", "1", "5", "9", "12")]
    for status in sorted({event.fields["status"] for event in events}):
        these = [event for event in events if event.fields["status"] == status]
        yield Trouble(
            f"RDMA completion with status {status}{who(these)}: {STATUSES.get(status, 'see ibv_wc_status')}",
            lines(these),
        )


def _port_errors(facts: Facts) -> Iterator[Trouble]:
    events = events_of(facts, "port_error", "link_down")
    if events and not any(event.fields["status"] == "12" for event in events_of(facts, "completion")):
        yield Trouble(f"a port went down while the job ran{who(events)}", lines(events))


def _efa(facts: Facts) -> Iterator[Trouble]:
    missing = events_of(facts, "no_plugin")
    sockets = [event for event in events_of(facts, "network_used") if event.fields["network"].lower() == "socket"]
    settings = settings_of(facts) if facts.fact("job.settings").state == "value" else None
    asked = [
        setting
        for name in ("FI_PROVIDER", "LD_PRELOAD", "LD_LIBRARY_PATH", "NCCL_NET_PLUGIN", "NCCL_NET")
        if settings and (setting := settings.get(name)) and re.search(r"efa|ofi", setting.value, re.IGNORECASE)
    ]
    if (missing or sockets) and asked:
        yield Trouble(
            "EFA is asked for, but NCCL runs on sockets: it does not find the plugin (libnccl-net.so) on the loader "
            "path" + ("; libibverbs is missing too" if events_of(facts, "no_libibverbs") else ""),
            (*lines([*missing, *sockets]), *map(str, asked)),
        )


def _mixed_rails(facts: Facts) -> Iterator[Trouble]:
    for event in events_of(facts, "adapters_used"):
        found = re.findall(r"([\w-]+):\d+/(IB|RoCE)", event.fields["adapters"])
        infiniband = list(dict.fromkeys(name for name, kind in found if kind == "IB"))
        ethernet = list(dict.fromkeys(name for name, kind in found if kind == "RoCE"))
        if infiniband and ethernet:
            yield Trouble(
                f"NCCL takes Ethernet adapters ({listed(ethernet)}) for rails beside InfiniBand{who([event])}",
                lines([event]),
                f"export NCCL_IB_HCA=={','.join(infiniband)}",
            )
            return


def _libibverbs(facts: Facts) -> Iterator[Trouble]:
    if events := events_of(facts, "no_libibverbs"):
        yield Trouble(f"libibverbs cannot be loaded{who(events)}: no InfiniBand, no RoCE, no EFA", lines(events))


def _hca_count(facts: Facts) -> Iterator[Trouble]:
    events, odd = events_of(facts, "hca_count"), events_of(facts, "hca_missing")
    if events or odd:
        named = [f"rank {e.rank} has {e.fields['has']} of {e.fields['max']}" for e in odd]
        counts = next((f" (min {e.fields['min']}, max {e.fields['max']})" for e in events if "min" in e.fields), "")
        yield Trouble(
            f"ranks have different numbers of RDMA adapters{counts}"
            + (f": {listed(named)}" if named else "")
            + "; NCCL goes on all the same, and the extra channels have no peer",
            lines([*events, *odd]),
        )


CHECKS = (
    log_check(
        "IB011",
        "RDMA peers answer",
        _retries,
        why="Status 12 comes when no acknowledgement arrives: nothing can arrive, or packets get lost.",
        by_hand="grep 'Got completion' LOG; show_gids; grep . /sys/class/infiniband/*/ports/*/hw_counters/*",
        remedy="unset NCCL_IB_GID_INDEX   # at once; later in a run: look for port errors and rising counters on "
        "both ends",
        reference=f"{GUIDE}; reports: NVIDIA/nccl#426, NVIDIA/nccl#905",
    ),
    log_check(
        "IB012",
        "Both ends of a connection agree on its MTU",
        _mtu_signs,
        why="With different MTUs one end writes past what the other posted: a local access violation here, an invalid "
        "request there, at the same time.",
        by_hand="ibv_devinfo | grep active_mtu   # on both ends",
        remedy="ibv_devinfo | grep -E 'hca_id|active_mtu|fw_ver'   # on both hosts; set the same MTU",
        reference="reports: NVIDIA/nccl#1710, NVIDIA/nccl#1524",
    ),
    log_check(
        "IB013",
        "RDMA requests complete",
        _completions,
        why="The status names what the adapter refused; flushes that follow another error are left out.",
        by_hand="grep 'Got completion' LOG",
        remedy="read the log of the peer that the line names at the same time",
        reference=GUIDE,
    ),
    log_check(
        "IB014",
        "No port went down",
        _port_errors,
        severity="warning",
        why="A flapping link costs seconds each time, or the job.",
        by_hand="sudo dmesg | grep -i mlx5; ibstat",
        remedy="ibstat; sudo mlxlink -d DEVICE   # cable, transceiver, switch port",
        reference=GUIDE,
    ),
    log_check(
        "IB015",
        "Every rank has the same number of RDMA adapters",
        _hca_count,
        why="A rank that may open fewer adapters builds fewer channels; NCCL_IGNORE_NET_MISMATCH is 1 by default, "
        "so the "
        "job starts and spins.",
        by_hand="ls /dev/infiniband   # in every rank",
        remedy="export NCCL_IGNORE_NET_MISMATCH=0   # fails early; then give every rank the same "
        "/dev/infiniband/uverbs*",
        reference="report: NVIDIA/nccl#2428",
    ),
    log_check(
        "IB016",
        "Queue pairs can be connected",
        said("ibv_modify_qp failed{who}: wrong or missing GID index, or no route to the peer's address", "modify_qp"),
        why="The address handle cannot be made: the GID at this index is absent, or of another protocol than the "
        "peer's.",
        by_hand="show_gids",
        remedy="unset NCCL_IB_GID_INDEX",
        reference="report: NVIDIA/nccl#426",
    ),
    log_check(
        "IB017",
        "libibverbs is installed",
        _libibverbs,
        severity="warning",
        why="NCCL loads it by name; slim images leave it out, and sockets are what remains.",
        by_hand="ldconfig -p | grep ibverbs",
        remedy="apt-get install libibverbs1 ibverbs-providers",
        reference="report: NVIDIA/nccl#959",
    ),
    log_check(
        "IB018",
        "All rails are of one kind",
        _mixed_rails,
        severity="warning",
        why="NCCL takes every RDMA device for a rail that it is not told to leave; a cloud's or a management "
        "adapter slows all.",
        by_hand="grep 'NET/IB : Using' LOG",
        remedy="export NCCL_IB_HCA==mlx5_0,mlx5_1",
        reference="report: NVIDIA/nccl#302",
    ),
    log_check(
        "NET003",
        "The network plugin is found",
        _efa,
        why="NCCL falls back to sockets without a word louder than INFO. The plugin's folder moved between versions.",
        by_hand="ldconfig -p | grep nccl-net; grep -E 'NET/|Using network' LOG",
        remedy="export LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:/opt/amazon/efa/lib:$LD_LIBRARY_PATH\n"
        "export NCCL_NET='AWS Libfabric'   # fails loudly where the plugin is missing",
        reference="reports: NVIDIA/nccl#959, NVIDIA-NeMo/RL#1973",
    ),
    log_check(
        "NET004",
        "The socket interface was found",
        said(
            "NCCL found no socket interface{who}: NCCL_SOCKET_IFNAME names one that does not exist there",
            "no_interface",
        ),
        why="Names differ between machines; NCCL_SOCKET_IFNAME is often copied from another.",
        by_hand="ip -brief link; echo $NCCL_SOCKET_IFNAME   # on the node that says so",
        remedy="unset NCCL_SOCKET_IFNAME",
        reference="reports: pytorch/pytorch#29482, NVIDIA/nccl#913",
    ),
    log_check(
        "NET005",
        "Ranks agree on the address family",
        said(
            "a peer's address has an unusable family{who}: IPv4 and IPv6 are mixed, or the ends run different NCCL "
            "versions",
            "address_family",
        ),
        why="A family that is neither IPv4 nor IPv6 is memory of another layout.",
        by_hand="grep family LOG",
        remedy="export NCCL_SOCKET_FAMILY=AF_INET   # and compare the NCCL versions of both ends",
        reference="report: NVIDIA/nccl#1837",
    ),
)
