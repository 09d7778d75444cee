"""What must be equal on all ranks, and what must be different: the odd rank is named."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from ncclep_bench.doctor.contract import Check, Trouble, Verdict
from ncclep_bench.doctor.records import Answer, ClockOffset, Gpu, NetDevice, PathMtu, Port, Told
from ncclep_bench.model.facts import Facts
from ncclep_bench.runtime.path_mtu import LOCAL_BRIDGES

OWN = ("NCCL_DEBUG_FILE", "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE", "NCCL_HOSTID")
"""Settings that each rank may have to itself."""

MAX_CLOCK_OFFSET_S = 1.0
GPU_CEILINGS = ("max clocks/sm", "max clocks/memory", "applications clocks/graphics", "applications clocks/memory")

SHARED_SETTINGS = ("NCCL_", "NVSHMEM_", "UCX_TLS", "DEEPEP_", "SGLANG_DEEPEP_", "CUDA_DEVICE_MAX_CONNECTIONS")


def _told(facts: Facts, name: str) -> list[Told]:
    return facts.read(f"ranks.{name}", list[Told])


def _shown(value: object) -> str:
    return "unset" if value is None else str(value)


def _named(ranks: Sequence[Told]) -> str:
    return ", ".join(told.who for told in ranks[:6]) + (f" and {len(ranks) - 6} more" if len(ranks) > 6 else "")


def odd_ones(said: Sequence[tuple[Told, Any]], what: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Summary and evidence where ranks say different things of `what`: the smaller parties are the odd ones."""
    parties: dict[str, list[Told]] = defaultdict(list)
    for told, value in said:
        parties[json.dumps(value, sort_keys=True, default=str)].append(told)
    if len(parties) < 2:
        return
    usual, *others = sorted(parties, key=lambda value: -len(parties[value]))
    tie = len(parties[usual]) == len(parties[others[0]])
    differing = "; ".join(f"{_shown(json.loads(value))} on {_named(parties[value])}" for value in others[:4])
    yield (
        f"{what} differs: {differing}; {_shown(json.loads(usual))} on "
        + (_named(parties[usual]) if tie else f"the other {len(parties[usual])}"),
        tuple(
            f"{told.who}: {what} = {_shown(json.loads(value))} ({told.at})"
            for value in (*others[:4], usual)
            for told in parties[value][:2]
        ),
    )


def _config(facts: Facts) -> Iterator[Trouble]:
    told = _told(facts, "ep_config")
    for field in sorted({field for rank in told for field in rank.value}):
        for summary, evidence in odd_ones([(rank, rank.value.get(field)) for rank in told], field):
            yield Trouble(summary, evidence)


def _settings(facts: Facts) -> Iterator[Trouble]:
    told = _told(facts, "job_settings")
    values: list[dict[str, str]] = []
    for rank in told:
        effective: dict[str, str] = {}
        for setting in rank.value:
            effective.setdefault(setting["name"], setting["value"])
        values.append(effective)
    names = {name for own in values for name in own if name.startswith(SHARED_SETTINGS) and name not in OWN}
    for name in sorted(names):
        for summary, evidence in odd_ones([(r, own.get(name)) for r, own in zip(told, values, strict=True)], name):
            yield Trouble(summary, evidence, f"export {name}=…   # the same on every rank: mpirun -x {name}")


def equal(name: str, what: str, of: Callable[[Any], Any] = lambda value: value) -> Callable[[Facts], Iterator[Trouble]]:
    """A judge that wants `of(value)` of a compared fact to be the same on all ranks."""

    def judge(facts: Facts) -> Iterator[Trouble]:
        for summary, evidence in odd_ones([(told, of(told.value)) for told in _told(facts, name)], what):
            yield Trouble(summary, evidence)

    return judge


def _limits(facts: Facts) -> Iterator[Trouble]:
    for name, what in (("limits_memlock", "locked memory"), ("limits_nofile", "open files"), ("limits_stack", "stack")):
        if facts.fact(f"ranks.{name}").state == "value":
            said = [(told, told.value.get("soft") or "unlimited") for told in _told(facts, name)]
            for summary, evidence in odd_ones(said, f"limit of {what}"):
                yield Trouble(summary, evidence)


def _places(facts: Facts) -> Iterator[Trouble]:
    boots = _told(facts, "host_boot_id")
    machines: dict[str, set[str]] = defaultdict(set)
    names: dict[str, set[str]] = defaultdict(set)
    for told in boots:
        machines[told.host].add(told.value)
        names[told.value].add(told.host)
    for host, ids in machines.items():
        if len(ids) > 1:
            yield Trouble(
                f"{len(ids)} machines are called {host}: their ranks are taken for neighbours that share memory",
                tuple(f"{told.who}: boot id {told.value}" for told in boots if told.host == host)[:6],
            )
    for boot, hosts in names.items():
        if len(hosts) > 1:
            yield Trouble(
                f"one machine has {len(hosts)} names ({', '.join(sorted(hosts)[:6])}): its ranks are counted to "
                f"different nodes",
                tuple(f"{told.who}: boot id {told.value}" for told in boots if told.value == boot)[:6],
                "docker run --uts=host …   # or --hostname, the same for all containers of a machine",
            )


def _blocks(facts: Facts) -> Iterator[Trouble]:
    told = sorted(_told(facts, "place"), key=lambda rank: rank.rank or 0)
    counts = Counter(rank.host for rank in told)
    evidence = tuple(f"{host}: {count} ranks" for host, count in counts.items())[:8]
    if len(set(counts.values())) > 1:
        yield Trouble(
            "nodes have different numbers of ranks: "
            "" + ", ".join(f"{host} {n}" for host, n in list(counts.items())[:8]),
            evidence,
        )
    changes = sum(a.host != b.host for a, b in pairwise(told))
    if changes >= len(counts):
        yield Trouble(
            f"ranks do not follow each other node by node: rank {told[0].rank} is on {told[0].host}, rank "
            f"{told[1].rank} on "
            f"{told[1].host}",
            tuple(f"rank {rank.rank}: {rank.host}" for rank in told[:8]),
        )


def _gpus(facts: Facts) -> Iterator[Trouble]:
    users: dict[tuple[str, str], list[Told]] = defaultdict(list)
    for told in _told(facts, "gpu"):
        users[told.host, told.value].append(told)
    for (host, gpu), ranks in users.items():
        if len(ranks) > 1:
            yield Trouble(
                f"{_named(ranks)} use the same GPU ({gpu} of {host})",
                tuple(f"{told.who}: {gpu} ({told.at})" for told in ranks[:6]),
            )


def _splits(facts: Facts) -> Iterator[Trouble]:
    told = {rank.rank: rank for rank in _told(facts, "ep_splits") if rank.rank is not None}
    wrong = [
        (a, b, told[a].value["send"][b], told[b].value["receive"][a])
        for a in told
        for b in told
        if b < len(told[a].value["send"])
        and a < len(told[b].value["receive"])
        and told[a].value["send"][b] != told[b].value["receive"][a]
    ]
    if wrong:
        a, b, sent, expected = wrong[0]
        yield Trouble(
            f"rank {a} sends {sent} rows to rank {b}, which expects {expected}"
            + (f"; {len(wrong) - 1} more pairs disagree" if len(wrong) > 1 else ""),
            tuple(f"{a} → {b}: sent {sent}, expected {expected}" for a, b, sent, expected in wrong[:6]),
        )


def _calls(facts: Facts) -> Iterator[Trouble]:
    told = _told(facts, "ep_calls")
    for operation in sorted({name for rank in told for name in rank.value}):
        said = [(rank, rank.value.get(operation, 0)) for rank in told]
        for summary, evidence in odd_ones(said, f"number of {operation} calls"):
            yield Trouble(summary, evidence)


def _complete(facts: Facts) -> Iterator[Trouble]:
    told = _told(facts, "ep_ranks")
    for summary, evidence in odd_ones([(rank, rank.value) for rank in told], "number of ranks"):
        yield Trouble(summary, evidence)
    numbers = Counter(rank.rank for rank in told if rank.rank is not None)
    if twice := [number for number, count in numbers.items() if count > 1]:
        yield Trouble(
            f"more than one process is rank {_numbers(twice)}",
            tuple(f"{rank.who}: {rank.value} ranks ({rank.at})" for rank in told if rank.rank in twice)[:6],
        )
    size = max((rank.value for rank in told), default=0)
    if numbers and (missing := [number for number in range(size) if number not in numbers]):
        yield Trouble(
            f"nothing is known of rank {_numbers(missing)} of {size}",
            (f"facts of {len(numbers)} ranks, of which {told[0].who} says that there are {size} ({told[0].at})",),
        )


def _numbers(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _once_per_host(told: Sequence[Told]) -> list[Told]:
    return list({rank.host: rank for rank in reversed(told)}.values())[::-1]


def _interfaces(facts: Facts) -> Iterator[Trouble]:
    """Interfaces on one IP network; of networks that differ from host to host, as rails have them, those of a name."""
    import ipaddress

    networks: dict[str, list[tuple[str, NetDevice]]] = defaultdict(list)
    for rank in _once_per_host(_told(facts, "network_devices")):
        for device in msgspec.convert(rank.value, list[NetDevice]):
            for text in device.networks if device.up and not LOCAL_BRIDGES.match(device.name) else ():
                try:
                    network = ipaddress.ip_interface(text).network
                except ValueError:
                    continue
                if not network.is_loopback and network.prefixlen < 32:
                    networks[str(network)].append((device.host or rank.host, device))
    names: dict[str, list[tuple[str, NetDevice]]] = defaultdict(list)
    for network_name, ends in networks.items():
        if len({host for host, _ in ends}) == 1:
            names[ends[0][1].name].extend(ends)
        else:
            yield from _one_mtu(ends, f"network {network_name}")
    for name, ends in names.items():
        yield from _one_mtu(ends, f"interfaces called {name}")


def _one_mtu(ends: Sequence[tuple[str, NetDevice]], where: str) -> Iterator[Trouble]:
    by_mtu: dict[int, list[tuple[str, NetDevice]]] = defaultdict(list)
    for host, device in ends:
        by_mtu[device.mtu_bytes].append((host, device))
    if len(by_mtu) > 1:
        parties = sorted(by_mtu.items(), key=lambda party: len(party[1]))
        said = "; ".join(
            f"{mtu} on {', '.join(f'{device.name} of {host}' for host, device in party[:3])}"
            + (f" and {len(party) - 3} more" if len(party) > 3 else "")
            for mtu, party in parties
        )
        host, device = parties[0][1][0]
        yield Trouble(
            f"MTU differs on {where}: {said}",
            tuple(
                f"{host}: {device.name} mtu {mtu} ({device.at})" for mtu, party in parties for host, device in party[:2]
            ),
            f"ip link set {device.name} mtu {max(by_mtu)}   # on {host}, if the switch ports carry it",
        )


def _path_mtu(facts: Facts) -> Iterator[Trouble]:
    for rank in _told(facts, "network_path_mtu"):
        for path in msgspec.convert(rank.value, list[PathMtu]):
            ends = f"{path.device} of {path.host} ({path.address}) to {path.peer_device} of {path.peer}"
            ends += f" ({path.peer_address})"
            evidence = (
                f"{path.at}: {path.tried_bytes} B tried, {path.passed_bytes} B passed; MTU {path.mtu_bytes} and "
                f"{path.peer_mtu_bytes}",
            )
            if path.error or not path.passed_bytes:
                yield Trouble(
                    f"not known what fits from {ends}: {path.error or 'no probe, however small, was answered'}",
                    (f"{path.at}: {path.error or 'no answer'}",),
                    f"ping -M do -s {1452 if ':' in path.peer_address else 1472} {path.peer_address}   "
                    f"# on {path.host}; a firewall may stop UDP alone",
                    "info",
                )
            elif path.passed_bytes < path.tried_bytes and path.told_bytes:
                yield Trouble(
                    f"from {ends} {path.passed_bytes} B fit, and routers say so; the interfaces send up to "
                    f"{path.tried_bytes} B",
                    evidence,
                    f"ip link set {path.device} mtu {path.passed_bytes}   # on {path.host}",
                    "warning",
                )
            elif path.passed_bytes < path.tried_bytes:
                yield Trouble(
                    f"from {ends} packets over {path.passed_bytes} B vanish without a word; both ends send up to "
                    f"{path.tried_bytes} B",
                    evidence,
                    f"ip link set {path.device} mtu {path.passed_bytes}   # on {path.host}, and {path.peer_device} on "
                    f"{path.peer}, until the switches between them carry {path.tried_bytes}",
                )


def _clocks(facts: Facts) -> Iterator[Trouble]:
    told = _once_per_host(_told(facts, "host_clock"))
    wrong = [
        (rank, clock)
        for rank in told
        for clock in (msgspec.convert(rank.value, ClockOffset),)
        if abs(clock.offset_s) - clock.uncertain_s > MAX_CLOCK_OFFSET_S
    ]
    if wrong:
        rank, clock = max(wrong, key=lambda pair: abs(pair[1].offset_s))
        yield Trouble(
            f"the clock of {rank.host} is {abs(clock.offset_s):.1f} s {'fast' if clock.offset_s > 0 else 'slow'}, "
            "seen from rank 0" + (f"; {len(wrong) - 1} more hosts differ" if len(wrong) > 1 else ""),
            tuple(f"{told.who}: {own.offset_s:+.3f} s ± {own.uncertain_s:.3f} s ({told.at})" for told, own in wrong)[
                :6
            ],
        )


def _of_gpus(*keys: str) -> Callable[[Any], Any]:
    return lambda gpus: sorted({tuple(gpu.get(key, "") for key in keys) for gpu in gpus})


def _same_gpus(facts: Facts) -> Iterator[Trouble]:
    told = _once_per_host(_told(facts, "gpus_list"))
    said = [(host, dict(Counter(gpu.get("name", "") for gpu in host.value))) for host in told]
    for summary, evidence in odd_ones(said, "GPUs of a node"):
        yield Trouble(summary, evidence)


def _gpu_clocks(facts: Facts) -> Iterator[Trouble]:
    """What they may reach, not what they run at now; among GPUs of one model."""
    said: dict[tuple[str, str], list[tuple[Told, Any]]] = defaultdict(list)
    for host in _once_per_host(_told(facts, "gpus_query")):
        for gpu in msgspec.convert(host.value, list[Gpu]):
            model = gpu.fields.get("product name", "")
            one = Told(at=gpu.at, host=f"GPU {gpu.gpu} of {gpu.host or host.host}", rank=None, value=None)
            for key, value in gpu.fields.items():
                if key in GPU_CEILINGS or key.endswith("current power limit"):
                    said[model, key].append((one, value))
    for (model, key), values in said.items():
        if {value for _, value in values} - {"N/A"}:
            for summary, evidence in odd_ones(values, f"{key} of {model or 'the GPUs'}"):
                yield Trouble(summary, evidence)


def _rails(facts: Facts) -> Iterator[Trouble]:
    told = _once_per_host(_told(facts, "rdma_ports"))
    rails: dict[int, list[tuple[Told, Any]]] = defaultdict(list)
    for host in told:
        for number, port in enumerate(msgspec.convert(host.value, list[Port])):
            state = port.state or "state unknown"
            rails[number].append((host, f"{port.name} {state} {port.rate_gbps or '?'} Gb/s {port.link_layer}".strip()))
    for number, ports in rails.items():
        if len(ports) == len(told):  # IB201 says where lists differ in length
            for summary, evidence in odd_ones(ports, f"RDMA port {number}"):
                yield Trouble(summary, evidence)


def _namespaces(facts: Facts) -> Iterator[Trouble]:
    boots = {(told.rank, told.host): told.value for told in _told(facts, "host_boot_id")}
    by_machine: dict[str, list[Told]] = defaultdict(list)
    for told in _told(facts, "host_namespaces"):
        if boot := boots.get((told.rank, told.host)):
            by_machine[boot].append(told)
    for ranks in by_machine.values():
        for kind in ("ipc", "pid"):
            for summary, evidence in odd_ones([(told, told.value.get(kind)) for told in ranks], f"{kind} namespace"):
                yield Trouble(f"ranks of one machine live apart: {summary}", evidence)


def _answers(facts: Facts) -> Iterator[Trouble]:
    answer = facts.read("job.answer", Answer)
    who = f"rank {facts.rank}" + (f" on {facts.host}" if facts.host else "")
    process = f"pid {answer.pid}" if answer.pid else "its process is not known"
    if not answer.answered:
        doing = f": it {answer.doing}" if answer.doing else ""
        yield Trouble(
            f"{who} did not answer within {answer.seconds:g} s{doing}",
            (f"{who}: {process}",),
            f"kill -CONT {answer.pid}   # on {facts.host}" if answer.pid and "stopped" in answer.doing else None,
        )
    elif answer.doing:
        yield Trouble(
            f"{who} cannot use its configuration: {answer.doing}",
            (f"{who}: {process}",),
            "correct the file on that rank's host; ncclep-doctor check --config FILE says what is wrong in it",
        )


def _check(
    code: str,
    title: str,
    need: str,
    judge: Callable[[Facts], Iterator[Trouble]],
    *,
    why: str,
    by_hand: str,
    remedy: str,
    reference: str,
    severity: Verdict = "error",
) -> Check:
    return Check(code, title, severity, (f"ranks.{need}",), judge, why, by_hand, remedy, reference)


CHECKS = (
    Check(
        "EP300",
        "Every rank answers",
        "error",
        ("job.answer",),
        _answers,
        why="A rank that is stopped, gone, or waits somewhere else keeps all the others waiting; neither MPI nor NCCL "
        "says for whom.",
        by_hand="ps -o pid,stat,wchan,args -C python   # on every node: T is stopped, D waits for a device",
        remedy="gdb -p PID -batch -ex bt   # or py-spy dump --pid PID: what it is doing; then start the job again",
        reference="MPI standard: collective calls complete only when every rank takes part",
    ),
    _check(
        "EP301",
        "Ranks have the same EP configuration",
        "ep_config",
        _config,
        why="Offsets into the peers' buffers are computed from it; NCCL EP and DeepEP take most fields on trust, "
        "and a rank "
        "with another value hangs the first dispatch without an error.",
        by_hand="print the configuration on every rank",
        remedy="use one configuration file for all ranks; where values must differ, the largest one on all of them",
        reference="NCCL EP source; report: deepseek-ai/DeepEP#208",
    ),
    _check(
        "EP302",
        "Every machine has one name, and every name one machine",
        "host_boot_id",
        _places,
        why="NCCL EP counts nodes by host name, DeepEP and NVSHMEM go by it too.",
        by_hand="hostname; cat /proc/sys/kernel/random/boot_id   # in every rank",
        remedy="sudo hostnamectl set-hostname NAME   # a name of its own for every machine",
        reference="NCCL EP source; reports: NVIDIA/nccl#187, deepseek-ai/DeepEP#316",
    ),
    _check(
        "EP303",
        "Ranks fill the nodes evenly and in blocks",
        "place",
        _blocks,
        severity="warning",
        why="NCCL EP takes rank / ranks per node for the node: round-robin or uneven placement makes wrong neighbours.",
        by_hand="mpirun --display map …",
        remedy="mpirun --map-by ppr:8:node --rank-by slot …   # srun --distribution=block",
        reference="NCCL EP source; report: NVIDIA/nccl#2385",
    ),
    _check(
        "EP304",
        "What one rank sends, the other expects",
        "ep_splits",
        _splits,
        why="An all-to-all whose two ends count differently waits until its timeout, and totals do not show the pair.",
        by_hand="gather the send and receive counts of all ranks, and compare S[i][j] with R[j][i]",
        remedy="exchange the counts before the rows: recv = all_to_all(send counts)",
        reference="report: pytorch/pytorch#194559",
    ),
    _check(
        "EP305",
        "Every rank makes every call",
        "ep_calls",
        _calls,
        why="A rank without tokens that skips a layer leaves the others waiting in its all-to-all.",
        by_hand="count dispatch and combine calls on every rank",
        remedy="run a dummy forward pass on ranks without tokens",
        reference="reports: vllm-project/vllm#51984, vllm-project/vllm#53578",
    ),
    _check(
        "EP306",
        "Ranks replay the same graph",
        "ep_graph",
        equal("ep_graph", "graph", lambda graph: [graph.get("key"), graph.get("padded_tokens")]),
        why="Ranks that pad their batch by themselves choose graphs of different sizes, whose collectives do not "
        "match.",
        by_hand="print graph key and padded tokens of the step on every rank",
        remedy="agree on the padded number of tokens first: the maximum over all ranks",
        reference="report: vllm-project/vllm#25906",
    ),
    _check(
        "NCCL201",
        "Ranks have the same settings",
        "job_settings",
        _settings,
        severity="warning",
        why="Ranks that choose another algorithm, protocol or transport wait for messages that never come, at some "
        "sizes only.",
        by_hand="env | grep -E 'NCCL|NVSHMEM' | sort   # in every rank",
        remedy="set the variables in the launcher: mpirun -x NAME, srun --export=ALL",
        reference="reports: NVIDIA/nccl#1136, NVIDIA/nccl#394",
    ),
    _check(
        "LIB201",
        "Ranks find the same NCCL",
        "libraries_nccl",
        equal(
            "libraries_nccl", "NCCL version", lambda found: sorted({library.get("version") or "" for library in found})
        ),
        why="Set-up messages differ between versions; the symptoms are strange sizes and address families.",
        by_hand="ldconfig -p | grep nccl   # on every node",
        remedy="install the same version on every node",
        reference="reports: NVIDIA/nccl#1267, NVIDIA/nccl#1328",
    ),
    _check(
        "LIB202",
        "Ranks run the same packages",
        "libraries_packages",
        equal("libraries_packages", "package versions"),
        severity="warning",
        why="Nodes that were upgraded at different times differ in defaults and formats.",
        by_hand="pip freeze   # on every node",
        remedy="pip install -r requirements.txt   # the same lock file on every node",
        reference="report: NVIDIA/nccl#1267",
    ),
    _check(
        "IB201",
        "Ranks have the same adapters in the same order",
        "host_rdma_devices",
        equal("host_rdma_devices", "list of RDMA adapters"),
        severity="warning",
        why="NCCL pairs adapters by their place in the list; a missing or additional one shifts every rail behind it.",
        by_hand="ls /sys/class/infiniband   # on every node",
        remedy="export NCCL_IB_HCA==mlx5_0,mlx5_1   # the rails that every node has, in the same order",
        reference="reports: NVIDIA/nccl#366, NVIDIA/nccl#1363",
    ),
    _check(
        "IB202",
        "Ranks may use the same number of adapters",
        "rdma_device_files",
        equal("rdma_device_files", "number of usable RDMA devices", lambda files: sum(f["usable"] for f in files)),
        why="A container that admits fewer devices gives its rank fewer channels; NCCL starts all the same, and spins.",
        by_hand="ls -l /dev/infiniband   # in every rank",
        remedy="export NCCL_IGNORE_NET_MISMATCH=0   # fails early; then admit the same /dev/infiniband/uverbs* "
        "everywhere",
        reference="report: NVIDIA/nccl#2428",
    ),
    _check(
        "GPU201",
        "Every rank has a GPU of its own",
        "gpu",
        _gpus,
        why="NCCL refuses two ranks on one GPU.",
        by_hand="echo $LOCAL_RANK $CUDA_VISIBLE_DEVICES; nvidia-smi -L   # in every rank",
        remedy="torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",
        reference="reports: horovod/horovod#3929, NVIDIA/Megatron-LM#661",
    ),
    _check(
        "LIM201",
        "Ranks have the same limits",
        "limits_memlock",
        _limits,
        severity="warning",
        why="A node whose daemon was started with other limits fails alone, and its peers wait.",
        by_hand="ulimit -a   # in every rank",
        remedy="set LimitMEMLOCK=infinity and LimitNOFILE=1048576 in the launcher's service on every node",
        reference="reports: NVIDIA/nccl-tests#206, openucx/ucx#8229",
    ),
    _check(
        "NET201",
        "Ranks of one machine share their namespaces",
        "host_namespaces",
        _namespaces,
        severity="warning",
        why="Containers with IPC or PID namespaces of their own cannot map each other's memory, and fall back to "
        "the network.",
        by_hand="readlink /proc/self/ns/ipc /proc/self/ns/pid   # in every rank",
        remedy="docker run --ipc=host --pid=host …   # or one pod for all ranks of a machine",
        reference="reports: NVIDIA/nccl#1781, NVIDIA/nccl#324",
    ),
    _check(
        "LIM202",
        "Ranks run on the same kind of CPU",
        "host_cpu_model",
        equal("host_cpu_model", "CPU model"),
        severity="info",
        why="NCCL's tuning looks at the CPU's vendor; ranks that see different ones may choose different protocols.",
        by_hand="lscpu | grep 'Model name'   # on every node",
        remedy="export NCCL_ALGO=Ring NCCL_PROTO=Simple   # only if sizes hang; else leave it",
        reference="report: NVIDIA/nccl#1136",
    ),
    _check(
        "EP307",
        "The group is complete, and each rank is there once",
        "ep_ranks",
        _complete,
        why="Processes that were started for two jobs, or a rank that was not started at all, wait for each other.",
        by_hand="echo $PMI_RANK $PMI_SIZE $OMPI_COMM_WORLD_RANK $OMPI_COMM_WORLD_SIZE   # in every rank",
        remedy="mpirun -n 16 ncclep-doctor collect -o facts-%r.json   # one launcher, the job's own MPI",
        reference="MPI standard: ranks of a communicator are numbered from 0 without gaps",
    ),
    _check(
        "GPU202",
        "Every node has the same GPUs",
        "gpus_list",
        _same_gpus,
        severity="warning",
        why="A node that has lost a GPU, or has others, gets fewer channels or is the slowest in every all-to-all.",
        by_hand="nvidia-smi -L   # on every node",
        remedy="sudo dmesg | grep -i xid   # on the node that lacks one: why it fell off",
        reference="NCCL source: the number of channels is the least that any rank has (init.cc)",
    ),
    _check(
        "GPU203",
        "GPUs of one model may run at the same clocks and power",
        "gpus_query",
        _gpu_clocks,
        severity="warning",
        why="A node with lower application clocks or a lower power limit drags every step of the others.",
        by_hand="nvidia-smi -q -d CLOCK,POWER   # on every node",
        remedy="sudo nvidia-smi -rac; sudo nvidia-smi -pl WATTS   # the same on every node",
        reference="report: NVIDIA/NVSentinel#890",
    ),
    _check(
        "LIB203",
        "Nodes run the same NVIDIA driver",
        "gpus_list",
        equal("gpus_list", "NVIDIA driver", _of_gpus("driver")),
        severity="warning",
        why="Drivers decide about cuMem, fabric handles and multicast; NCCL chooses by what its own node can do.",
        by_hand="cat /proc/driver/nvidia/version   # on every node",
        remedy="install the same driver on every node",
        reference="report: NVIDIA/nccl#1267",
    ),
    _check(
        "LIB204",
        "Nodes run the same kernel",
        "host_kernel",
        equal("host_kernel", "kernel"),
        severity="info",
        why="RDMA and peer-memory modules come with the kernel; nodes that were upgraded at different times differ.",
        by_hand="uname -r   # on every node",
        remedy="reboot the nodes that have an update pending",
        reference="nvidia-peermem and DOCA-OFED: built for one kernel",
    ),
    _check(
        "IB203",
        "Rails have the same ports on every node",
        "rdma_ports",
        _rails,
        severity="warning",
        why="NCCL pairs adapters by their place in the list, dead ports included: a rail that is down or slower on one "
        "node stops or slows the whole ring.",
        by_hand="ibstat   # on every node: State, Rate, Link layer, in order",
        remedy="export NCCL_IB_HCA==mlx5_0,mlx5_1   # rails that are ACTIVE on every node, in the same order",
        reference="reports: NVIDIA/nccl#366, NVIDIA/nccl#1363",
    ),
    _check(
        "NET202",
        "Interfaces of one network have one MTU",
        "network_devices",
        _interfaces,
        why="What the larger one sends in one packet the smaller one drops: set-up messages pass, payloads hang.",
        by_hand="ip link   # on every node",
        remedy="ip link set eth0 mtu 9000   # on every node, as the switch ports have it",
        reference="RFC 1191; report: NVIDIA/nccl#1957",
    ),
    _check(
        "NET203",
        "Paths between hosts carry what both ends send",
        "network_path_mtu",
        _path_mtu,
        why="A switch or tunnel with a smaller MTU that drops large packets without saying so lets connections "
        "be made, and every large message hangs.",
        by_hand="ping -M do -s 8972 ADDRESS   # from each end; 8972 = 9000 - 28",
        remedy="ip link set eth0 mtu 1500   # at both ends, or the MTU of the ends on every switch between",
        reference="RFC 2923, section 2.1; RFC 8899",
    ),
    _check(
        "NET204",
        "Clocks of the hosts agree",
        "host_clock",
        _clocks,
        severity="info",
        why="The earliest cause in logs of several hosts is found by their times.",
        by_hand="chronyc tracking   # on every node",
        remedy="sudo systemctl restart chronyd",
        reference="RFC 5905",
    ),
    _check(
        "LIM203",
        "Ranks may all ask for memory policies, or none",
        "host_numa_policy",
        equal("host_numa_policy", "permission to ask for memory policies", lambda policy: policy.get("allowed")),
        why="NCCL probes it in every rank and takes another kind of host buffer where it fails; ranks must agree.",
        by_hand="numactl --show   # in every rank",
        remedy="export NCCL_CUMEM_HOST_ENABLE=0   # on all ranks, or --cap-add SYS_NICE for all",
        reference="report: NVIDIA/nccl#2388",
    ),
    _check(
        "MPI201",
        "Ranks load the same MPI",
        "mpi_build",
        equal("mpi_build", "MPI", lambda build: f"{build.get('implementation')} {build.get('version')}"),
        why="Ranks of two MPIs do not find each other: each starts alone as rank 0 of 1, or the start fails.",
        by_hand="python -c 'from mpi4py import MPI; print(MPI.Get_library_version())'   # on every node",
        remedy="install the same MPI on every node, and start with its own mpiexec",
        reference="https://mpi4py.readthedocs.io/en/stable/install.html",
    ),
)
