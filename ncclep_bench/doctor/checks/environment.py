"""The job's environment: settings that switch transports off, contradict each other or do nothing; process limits."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

import msgspec

from ncclep_bench.doctor.checks.dtype import Gpu, Library
from ncclep_bench.doctor.contract import Check, Trouble, Verdict
from ncclep_bench.doctor.nccl_variables import DEBUG_LEVELS, FOREIGN, GONE, KNOWN, NUMBERS, TUNING
from ncclep_bench.doctor.settings import ENVIRONMENT, Setting, pattern_of, settings_of
from ncclep_bench.model.facts import Facts
from ncclep_bench.units import format_bytes

MIN_OPEN_FILES = 4096
MIN_SHARED_MEMORY_BYTES = 1 << 30
CONTAINER_DEFAULT_BYTES = 64 << 20
TYPO_LIKENESS = 0.87

_LOCAL_TRANSPORTS = {
    "OMPI_MCA_btl": {"sm", "vader"},
    "UCX_TLS": {"all", "sm", "shm", "mm", "posix", "sysv", "xpmem"},
}
"""Per transport list, the names of which one must be in it (or none after `^`) for shared memory."""


class Limit(msgspec.Struct):
    """A process limit; None is unlimited."""

    soft: int | None
    hard: int | None


class SharedMemory(msgspec.Struct):
    """Size of /dev/shm."""

    total_bytes: int
    free_bytes: int


def _said(*settings: Setting | None) -> tuple[str, ...]:
    return tuple(str(setting) for setting in settings if setting is not None)


def _drop(*settings: Setting | None) -> str:
    """How to take settings away again, where they were made."""
    given = [setting for setting in settings if setting is not None]
    variables = [setting.name for setting in given if setting.source == ENVIRONMENT]
    lines = [f"unset {' '.join(variables)}"] if variables else []
    lines += [
        f"sed -i '/^{setting.name}=/d' {setting.source.rpartition(':')[0]}"
        for setting in given
        if setting.source != ENVIRONMENT
    ]
    return "\n".join(lines)


def _ib_disable(facts: Facts) -> Iterator[Trouble]:
    if off := settings_of(facts).on("NCCL_IB_DISABLE"):
        yield Trouble("InfiniBand and RoCE are switched off: nodes talk over TCP sockets", _said(off), _drop(off))


def _p2p_disable(facts: Facts) -> Iterator[Trouble]:
    settings = settings_of(facts)
    level = settings.get("NCCL_P2P_LEVEL")
    if off := settings.on("NCCL_P2P_DISABLE"):
        yield Trouble("GPUs of one node do not reach each other over NVLink or PCIe", _said(off), _drop(off))
    elif level is not None and level.value.upper() in ("LOC", "0"):
        yield Trouble(f"NCCL_P2P_LEVEL={level.value} means no peer access at all", _said(level), _drop(level))


def _shm_disable(facts: Facts) -> Iterator[Trouble]:
    if off := settings_of(facts).on("NCCL_SHM_DISABLE"):
        yield Trouble("ranks of one node that lack peer access talk over the network", _said(off), _drop(off))


def _cumem_disable(facts: Facts) -> Iterator[Trouble]:
    if off := settings_of(facts).off("NCCL_CUMEM_ENABLE"):
        yield Trouble(
            "cuMem allocation is off: no symmetric windows, no NVLS, no multi-node NVLink", _said(off), _drop(off)
        )


def _nvls_disable(facts: Facts) -> Iterator[Trouble]:
    if off := settings_of(facts).off("NCCL_NVLS_ENABLE"):
        yield Trouble("NVLink SHARP is off: dense partners measure slower than this machine is", _said(off), _drop(off))


def _contradictions(facts: Facts) -> Iterator[Trouble]:
    settings = settings_of(facts)
    get, on, off = settings.get, settings.on, settings.off
    ib_off, cumem_off, p2p_off = on("NCCL_IB_DISABLE"), off("NCCL_CUMEM_ENABLE"), on("NCCL_P2P_DISABLE")
    level, network, algorithm = get("NCCL_P2P_LEVEL"), get("NCCL_NET"), get("NCCL_ALGO")
    chosen = algorithm.value.upper() if algorithm and not algorithm.value.startswith("^") else ""
    wants_ib = [setting for setting in settings.starting("NCCL_IB_") if setting is not ib_off]

    if p2p_off and level and level.value.upper() not in ("LOC", "0"):
        yield Trouble(
            f"peer access is disabled, and its level is set to {level.value}: the level does nothing",
            _said(p2p_off, level),
            _drop(p2p_off),
        )
    if ib_off and wants_ib:
        names = ", ".join(setting.name for setting in wants_ib)
        yield Trouble(f"InfiniBand is disabled, and tuned by {names}", _said(ib_off, *wants_ib), _drop(ib_off))
    if ib_off and network and network.value.upper() == "IB":
        yield Trouble(
            "InfiniBand is disabled, and asked for: NCCL finds no network", _said(ib_off, network), _drop(ib_off)
        )
    if cumem_off:
        for wish in (on("NCCL_NVLS_ENABLE"), on("NCCL_MNNVL_ENABLE")):
            if wish and wish.number == 1:
                yield Trouble(
                    f"{wish.name} needs cuMem allocation, which is off", _said(cumem_off, wish), _drop(cumem_off)
                )
    if (nvls_off := off("NCCL_NVLS_ENABLE")) and "NVLS" in chosen:
        yield Trouble(f"NVLS is off, and NCCL_ALGO asks for {chosen}", _said(nvls_off, algorithm), _drop(nvls_off))
    low, high = get("NCCL_MIN_CTAS"), get("NCCL_MAX_CTAS")
    if low and high and low.number > high.number:
        yield Trouble(f"at least {low.number} CTAs and at most {high.number}", _said(low, high), _drop(low, high))


def _only_sockets(facts: Facts) -> Iterator[Trouble]:
    settings = settings_of(facts)
    off = [settings.on(f"NCCL_{name}_DISABLE") for name in ("P2P", "SHM", "IB")]
    if all(off):
        yield Trouble(
            "peer access, shared memory and InfiniBand are all off: only TCP is left", _said(*off), _drop(*off)
        )


def _not_a_number(facts: Facts) -> Iterator[Trouble]:
    for setting in settings_of(facts).starting("NCCL_"):
        value = setting.value.strip()
        if setting.name in NUMBERS and not value.lstrip("+-")[:1].isdecimal():
            yield Trouble(
                f"{setting.name} wants a number; NCCL reads {setting.value!r} as 0",
                _said(setting),
                f"export {setting.name}={_meant(value)}",
            )


def _meant(value: str) -> str:
    return "1" if value.lower() in ("true", "yes", "on", "y", "t", "enable", "enabled") else "0"


def _unknown_names(facts: Facts) -> Iterator[Trouble]:
    for setting in settings_of(facts).starting("NCCL_", " ", "\t", "nccl_", "NCLL_", "NCC_", "NCCL"):
        name = setting.name
        if name in KNOWN or name in GONE or name.startswith(FOREIGN):
            continue
        if name.strip() in KNOWN:
            yield Trouble(
                f"blanks around the name: NCCL takes {name!r} for another variable than {name.strip()}",
                _said(setting),
                f"{name.strip()}={setting.value.strip()}   # without blanks, in {setting.source.rpartition(':')[0]}",
            )
            continue
        close = difflib.get_close_matches(name.strip().upper(), KNOWN, n=1, cutoff=TYPO_LIKENESS)
        if close:
            yield Trouble(
                f"NCCL knows no {name}; it does know {close[0]}",
                _said(setting),
                f"unset {name}\nexport {close[0]}={setting.value}",
            )
        elif name.startswith("NCCL_"):
            yield Trouble(f"{name} is not a variable that NCCL documents", _said(setting), _drop(setting), "info")


def _gone_names(facts: Facts) -> Iterator[Trouble]:
    for setting in settings_of(facts).effective.values():
        if successor := GONE.get(setting.name):
            yield Trouble(
                f"{setting.name} is no longer heeded; {successor} took its place",
                _said(setting),
                f"{_drop(setting)}\n# and set {successor} if the effect is still wanted",
            )


def _hidden_settings(facts: Facts) -> Iterator[Trouble]:
    settings = settings_of(facts)
    for setting in settings.assignments:
        winner = settings.effective[setting.name]
        if setting.name.startswith("NCCL_") and setting.value != winner.value:
            yield Trouble(
                f"{setting.name} is set twice; {winner.value} counts, {setting.value} does not",
                _said(winner, setting),
                _drop(setting),
            )


def _debug(facts: Facts) -> Iterator[Trouble]:
    settings = settings_of(facts)
    level = settings.get("NCCL_DEBUG")
    if level is None:
        for filters in ("NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"):
            if setting := settings.get(filters):
                yield Trouble(
                    f"{filters} does nothing without NCCL_DEBUG", _said(setting), "export NCCL_DEBUG=INFO", "info"
                )
    elif level.value.upper() not in DEBUG_LEVELS:
        yield Trouble(
            f"{level.value!r} is no level: NCCL stays silent",
            _said(level),
            f"export NCCL_DEBUG=INFO   # one of {', '.join(DEBUG_LEVELS)}",
            "warning",
        )
    elif level.value.upper() in ("INFO", "TRACE") and settings.get("NCCL_DEBUG_FILE") is None:
        yield Trouble(
            f"every rank writes its {level.value} log to standard output",
            _said(level),
            "export NCCL_DEBUG_FILE=nccl.%h.%p.log",
        )


def _tuning(facts: Facts) -> Iterator[Trouble]:
    settings = settings_of(facts)
    pinned = [setting for name in TUNING if (setting := settings.get(name))]
    if pinned:
        names = ", ".join(setting.name for setting in pinned)
        yield Trouble(f"tuning is pinned by {names}: NCCL does not choose for itself", _said(*pinned), _drop(*pinned))


def _gdr_level(facts: Facts) -> Iterator[Trouble]:
    level = settings_of(facts).get("NCCL_NET_GDR_LEVEL")
    if level is not None and level.value.upper() in ("LOC", "0"):
        yield Trouble(
            f"NCCL_NET_GDR_LEVEL={level.value} means no GPUDirect RDMA: every byte passes through host memory",
            _said(level),
            _drop(level),
        )


def _interface_forced(facts: Facts) -> Iterator[Trouble]:
    setting = settings_of(facts).get("NCCL_SOCKET_IFNAME")
    if setting is not None and not pattern_of(setting.value).exclude:
        yield Trouble(
            f"the socket interface is forced to {setting.value}, on every node alike",
            _said(setting),
        )


def _matches(facts: Facts, setting: Setting | None, fact: str, what: str) -> Iterator[Trouble]:
    """Entries of a name list that match nothing on this machine, or by prefix more than they say."""
    if setting is None or pattern_of(setting.value).exclude:
        return
    pattern, there = pattern_of(setting.value), facts.read(fact, list[str])
    evidence = (str(setting), f"{what}s here: {', '.join(there) or 'none'} ({facts.fact(fact).source})")
    missing = [name for name in pattern.names if not pattern.matches(name, there)]
    if missing:
        verdict: Verdict = "error" if len(missing) == len(pattern.names) else "warning"
        yield Trouble(f"no {what} is called {', '.join(missing)}", evidence, _drop(setting), verdict)
    for name in pattern.names:
        if name in there and (more := [found for found in pattern.matches(name, there) if found != name]):
            yield Trouble(
                f"{name} is a prefix: it picks {', '.join(more)} too",
                evidence,
                f"export {setting.name}=={','.join(pattern.names)}",
                "warning",
            )


def _interface_exists(facts: Facts) -> Iterator[Trouble]:
    return _matches(facts, settings_of(facts).get("NCCL_SOCKET_IFNAME"), "host.interfaces", "interface")


def _hca_exists(facts: Facts) -> Iterator[Trouble]:
    return _matches(facts, settings_of(facts).get("NCCL_IB_HCA"), "host.rdma_devices", "adapter")


def _launch_blocking(facts: Facts) -> Iterator[Trouble]:
    if on := settings_of(facts).on("CUDA_LAUNCH_BLOCKING"):
        yield Trouble(
            "each launch waits for its kernel; a communication kernel waits for peers that have not launched yet",
            _said(on),
            _drop(on),
        )


def _visible_devices(facts: Facts) -> Iterator[Trouble]:
    setting = settings_of(facts).effective.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return
    devices = [device.strip() for device in setting.value.split(",")]
    twice = sorted({device for device in devices if device and devices.count(device) > 1})
    if twice:
        once = ",".join(dict.fromkeys(devices))
        yield Trouble(
            f"{', '.join(twice)} is listed twice: CUDA then shows no device at all",
            _said(setting),
            f"export CUDA_VISIBLE_DEVICES={once}",
        )
    elif devices[0] in ("", "-1"):
        yield Trouble("every GPU is hidden from this process", _said(setting), _drop(setting), "warning")
    elif "-1" in devices or "" in devices:
        end = min(devices.index(mark) for mark in ("-1", "") if mark in devices)
        yield Trouble(
            f"the list ends at its entry {devices[end]!r}: {len(devices) - end - 1} after it are hidden",
            _said(setting),
            f"export CUDA_VISIBLE_DEVICES={','.join(devices[:end])}",
            "warning",
        )


def _visible_devices_exist(facts: Facts) -> Iterator[Trouble]:
    setting = settings_of(facts).get("CUDA_VISIBLE_DEVICES")
    gpus = facts.read("gpus.list", list[Gpu])
    if setting is None:
        return
    indices = [int(part) for part in setting.value.split(",") if part.strip().isdecimal()]
    beyond = [index for index in indices if index >= len(gpus)]
    if beyond:
        yield Trouble(
            f"device {beyond[0]} does not exist: it and all after it are hidden",
            (str(setting), f"{len(gpus)} GPUs ({facts.fact('gpus.list').source})"),
            f"export CUDA_VISIBLE_DEVICES={','.join(map(str, range(len(gpus))))}",
        )


def _mpi_shared_memory(facts: Facts) -> Iterator[Trouble]:
    settings = settings_of(facts)
    summary = "MPI ranks of one node talk over the network instead of shared memory"
    for name, local in _LOCAL_TRANSPORTS.items():
        setting = settings.get(name)
        if setting is None:
            continue
        excludes = setting.value.startswith("^")
        names_local = bool(local & set(setting.value.lstrip("^").split(",")))
        if names_local == excludes:
            yield Trouble(summary, _said(setting), _drop(setting))
    for name in ("MPIR_CVAR_NOLOCAL", "MPIR_CVAR_CH3_NOLOCAL"):
        if setting := settings.on(name):
            yield Trouble(summary, _said(setting), _drop(setting))


def _world_sizes(facts: Facts) -> Iterator[Trouble]:
    settings = settings_of(facts)
    sizes = [
        setting
        for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")
        if (setting := settings.get(name)) and setting.value.isdecimal()
    ]
    if len({setting.value for setting in sizes}) > 1:
        yield Trouble(
            "launchers disagree about the number of ranks: " + ", ".join(setting.value for setting in sizes),
            _said(*sizes),
        )


def _memlock(facts: Facts) -> Iterator[Trouble]:
    limit = facts.read("limits.memlock", Limit)
    devices = facts.get("host.rdma_devices", list[str])
    if limit.soft is None or devices == []:
        return
    yield Trouble(
        f"a process may lock {format_bytes(limit.soft)}: registering memory with an RDMA adapter fails beyond it",
        (
            f"soft {limit.soft} B, hard {limit.hard} B ({facts.fact('limits.memlock').source})",
            f"RDMA adapters: {', '.join(devices) if devices else 'unknown'}",
        ),
    )


def _open_files(facts: Facts) -> Iterator[Trouble]:
    limit = facts.read("limits.nofile", Limit)
    if limit.soft is not None and limit.soft < MIN_OPEN_FILES:
        yield Trouble(
            f"a process may open {limit.soft} files; each peer takes several sockets, queues and segments",
            (f"soft {limit.soft}, hard {limit.hard or 'unlimited'} ({facts.fact('limits.nofile').source})",),
            f"ulimit -n {limit.hard or 1048576}",
        )


def _stack(facts: Facts) -> Iterator[Trouble]:
    if facts.read("limits.stack", Limit).soft is None:
        yield Trouble(
            "with an unlimited stack glibc gives threads 2 MiB, less than NCCL's helper threads may use",
            (f"soft unlimited ({facts.fact('limits.stack').source})",),
        )


def _shared_memory(facts: Facts) -> Iterator[Trouble]:
    size = facts.read("host.shared_memory", SharedMemory)
    evidence = (f"total {format_bytes(size.total_bytes)}, free {format_bytes(size.free_bytes)} (/dev/shm)",)
    if size.total_bytes <= CONTAINER_DEFAULT_BYTES:
        yield Trouble(
            f"/dev/shm has {format_bytes(size.total_bytes)}, a container's default: ranks of one node cannot set up",
            evidence,
            verdict="error",
        )
    elif size.total_bytes < MIN_SHARED_MEMORY_BYTES:
        yield Trouble(f"/dev/shm has {format_bytes(size.total_bytes)}: large batches are waived", evidence)
    elif size.free_bytes < size.total_bytes // 10:
        yield Trouble(
            f"/dev/shm is nearly full: {format_bytes(size.free_bytes)} left, perhaps of ranks that died",
            evidence,
            "ls -l /dev/shm   # and remove what no living process has open: fuser -v /dev/shm/*",
        )


def _cpus(facts: Facts) -> Iterator[Trouble]:
    ranks, cpus = facts.read("ep.ranks", int), facts.read("host.cpus", int)
    quota = facts.get("host.cpu_quota", float)
    usable = cpus if quota is None else min(cpus, quota)
    if ranks > usable:
        sources = [facts.fact("host.cpus").source] + (
            [facts.fact("host.cpu_quota").source] if quota is not None else []
        )
        yield Trouble(
            f"{ranks} ranks on {usable:g} CPUs, if all of them run here: they take turns, and times include waiting",
            (f"{ranks} ranks ({facts.fact('ep.ranks').source})", f"{usable:g} CPUs ({'; '.join(sources)})"),
        )


def _nccl_versions(facts: Facts) -> Iterator[Trouble]:
    libraries = facts.read("libraries.nccl", list[Library])
    versions = {library.version for library in libraries if library.version}
    if len(versions) > 1:
        yield Trouble(
            f"{len(versions)} versions of NCCL are installed: {', '.join(sorted(versions))}; "
            "which one a process loads depends on its search path",
            tuple(f"{library.path}: {library.version or 'unknown'}" for library in libraries),
        )


def _nccl_wheels(facts: Facts) -> Iterator[Trouble]:
    packages = facts.read("libraries.packages", dict[str, str])
    wheels = [f"{name} {version}" for name, version in packages.items() if name.startswith("nvidia-nccl-cu")]
    if len(wheels) > 1:
        yield Trouble(
            f"{' and '.join(wheels)} own the same libnccl.so.2: the one installed last is there, whatever pip says",
            tuple(wheels),
        )


_ENV = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_TROUBLESHOOTING = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
_SEE_ENV = "env | grep -E 'NCCL|CUDA|UCX|MPI'; cat ${NCCL_CONF_FILE:-~/.nccl.conf} /etc/nccl.conf"

CHECKS = (
    Check(
        code="NCCL001",
        title="InfiniBand is in use",
        severity="warning",
        needs=("job.settings",),
        judge=_ib_disable,
        why="NCCL_IB_DISABLE=1 is often left over from debugging. Nothing fails; the job runs at socket speed.",
        by_hand=_SEE_ENV,
        remedy="unset NCCL_IB_DISABLE",
        reference=f"{_ENV}#nccl-ib-disable",
    ),
    Check(
        code="NCCL002",
        title="Peer access between GPUs is in use",
        severity="warning",
        needs=("job.settings",),
        judge=_p2p_disable,
        why="Without peer access GPUs of one node copy through host memory, at a tenth of NVLink's rate or less.",
        by_hand=_SEE_ENV,
        remedy="unset NCCL_P2P_DISABLE",
        reference=f"{_ENV}#nccl-p2p-disable; failure report: NVIDIA/nccl#1608",
    ),
    Check(
        code="NCCL003",
        title="Shared memory between ranks is in use",
        severity="warning",
        needs=("job.settings",),
        judge=_shm_disable,
        why="Where GPUs lack peer access, shared memory is the only path that does not leave the node.",
        by_hand=_SEE_ENV,
        remedy="unset NCCL_SHM_DISABLE",
        reference=f"{_ENV}#nccl-shm-disable",
    ),
    Check(
        code="NCCL004",
        title="cuMem allocation is in use",
        severity="warning",
        needs=("job.settings",),
        judge=_cumem_disable,
        why="Symmetric windows, which NCCL EP stands on, and NVLS and multi-node NVLink need cuMem memory.",
        by_hand=_SEE_ENV,
        remedy="unset NCCL_CUMEM_ENABLE",
        reference=f"{_ENV}#nccl-cumem-enable",
    ),
    Check(
        code="NCCL005",
        title="NVLink SHARP is left to NCCL",
        severity="info",
        needs=("job.settings",),
        judge=_nvls_disable,
        why="NCCL_NVLS_ENABLE=0 is a usual way around a broken fabric manager, and stays behind after the repair.",
        by_hand=_SEE_ENV,
        remedy="unset NCCL_NVLS_ENABLE",
        reference=f"{_ENV}#nccl-nvls-enable",
    ),
    Check(
        code="NCCL006",
        title="NCCL settings do not contradict each other",
        severity="error",
        needs=("job.settings",),
        judge=_contradictions,
        why="Of two settings that exclude each other one does nothing, and nobody is told which.",
        by_hand=_SEE_ENV,
        remedy="decide for one of the two",
        reference=f"{_ENV}; failure report: NVIDIA/nccl#1608",
    ),
    Check(
        code="NCCL007",
        title="A transport faster than TCP is left",
        severity="error",
        needs=("job.settings",),
        judge=_only_sockets,
        why="With peer access, shared memory and InfiniBand off, even GPUs of one node talk over TCP.",
        by_hand=_SEE_ENV,
        remedy="unset NCCL_P2P_DISABLE NCCL_SHM_DISABLE NCCL_IB_DISABLE",
        reference=_ENV,
    ),
    Check(
        code="NCCL008",
        title="Numeric settings are numbers",
        severity="warning",
        needs=("job.settings",),
        judge=_not_a_number,
        why="NCCL reads numbers with strtoll and does not look at what is left over: true, yes and on count as 0, so "
        "a switch meant to be on is off.",
        by_hand=_SEE_ENV,
        remedy="write 0 or 1",
        reference="https://github.com/NVIDIA/nccl/blob/master/src/misc/param.cc",
    ),
    Check(
        code="NCCL009",
        title="NCCL settings are ones NCCL knows",
        severity="warning",
        needs=("job.settings",),
        judge=_unknown_names,
        why="NCCL ignores variables it does not know, misspelt ones among them.",
        by_hand=_SEE_ENV,
        remedy="correct the name",
        reference=_ENV,
    ),
    Check(
        code="NCCL010",
        title="NCCL settings are still heeded",
        severity="warning",
        needs=("job.settings",),
        judge=_gone_names,
        why="Renamed and removed variables live on in job scripts and do nothing, or only until the next release.",
        by_hand=_SEE_ENV,
        remedy="use the variable that took its place",
        reference=_ENV,
    ),
    Check(
        code="NCCL011",
        title="No setting hides another",
        severity="warning",
        needs=("job.settings",),
        judge=_hidden_settings,
        why="The environment wins over NCCL_CONF_FILE or ~/.nccl.conf, and these over /etc/nccl.conf; in a file the "
        "first line wins. The loser looks as if it counted.",
        by_hand=_SEE_ENV,
        remedy="remove the setting that does not count",
        reference=_ENV,
    ),
    Check(
        code="NCCL012",
        title="NCCL's log goes where it helps",
        severity="info",
        needs=("job.settings",),
        judge=_debug,
        why="Hundreds of ranks that log to one terminal slow the job down and mix their lines; a misspelt level logs "
        "nothing when it is needed.",
        by_hand="echo $NCCL_DEBUG $NCCL_DEBUG_FILE $NCCL_DEBUG_SUBSYS",
        remedy="export NCCL_DEBUG=WARN",
        reference=f"{_ENV}#nccl-debug",
    ),
    Check(
        code="NCCL013",
        title="Tuning is left to NCCL",
        severity="info",
        needs=("job.settings",),
        judge=_tuning,
        why="Pinned algorithms, protocols and channels suit the machine they were found on; on ranks that lack them "
        "NCCL picks something else, and the job can hang at some sizes only.",
        by_hand=_SEE_ENV,
        remedy="unset them, or set them on every rank",
        reference=f"{_ENV}; failure reports: NVIDIA/nccl#1136, NVIDIA/nccl#394",
    ),
    Check(
        code="GDR001",
        title="GPUDirect RDMA is not switched off",
        severity="warning",
        needs=("job.settings",),
        judge=_gdr_level,
        why="Level LOC (or 0) stages every message in host memory, which costs most of the network's rate.",
        by_hand=_SEE_ENV,
        remedy="unset NCCL_NET_GDR_LEVEL",
        reference=f"{_ENV}#nccl-net-gdr-level-formerly-nccl-ib-gdr-level",
    ),
    Check(
        code="NET001",
        title="The socket interface is left to NCCL",
        severity="info",
        needs=("job.settings",),
        judge=_interface_forced,
        why="A forced interface must exist under this name on every node; names differ between machine types.",
        by_hand="ip -brief link   # on every node",
        remedy="unset NCCL_SOCKET_IFNAME   # unless nodes have interfaces that do not reach each other",
        reference=f"{_ENV}#nccl-socket-ifname",
    ),
    Check(
        code="NET002",
        title="The socket interface exists, and is the one meant",
        severity="error",
        needs=("job.settings", "host.interfaces"),
        judge=_interface_exists,
        why="A name that matches nothing ends in 'no socket interface found'; names are prefixes: eth1 is eth10 too.",
        by_hand="ip -brief link; echo $NCCL_SOCKET_IFNAME",
        remedy="unset NCCL_SOCKET_IFNAME",
        reference=f"{_ENV}#nccl-socket-ifname; failure report: pytorch/pytorch#29482",
    ),
    Check(
        code="IB001",
        title="The RDMA adapters exist, and are the ones meant",
        severity="error",
        needs=("job.settings", "host.rdma_devices"),
        judge=_hca_exists,
        why="Names match by prefix: mlx5_1 picks mlx5_10 to mlx5_19 too, storage and management adapters among them.",
        by_hand="ls /sys/class/infiniband; echo $NCCL_IB_HCA",
        remedy="export NCCL_IB_HCA==mlx5_0,mlx5_1",
        reference=f"{_ENV}#nccl-ib-hca",
    ),
    Check(
        code="GPU001",
        title="CUDA_VISIBLE_DEVICES lists each GPU once",
        severity="error",
        needs=("job.settings",),
        judge=_visible_devices,
        why="An index listed twice makes the whole list invalid, and the first invalid entry ends it.",
        by_hand="echo $CUDA_VISIBLE_DEVICES",
        remedy="unset CUDA_VISIBLE_DEVICES",
        reference="https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables",
    ),
    Check(
        code="GPU002",
        title="CUDA_VISIBLE_DEVICES names GPUs that are there",
        severity="error",
        needs=("job.settings", "gpus.list"),
        judge=_visible_devices_exist,
        why="The first entry that does not exist hides itself and every entry after it.",
        by_hand="nvidia-smi -L; echo $CUDA_VISIBLE_DEVICES",
        remedy="unset CUDA_VISIBLE_DEVICES",
        reference="https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables",
    ),
    Check(
        code="GPU003",
        title="Kernel launches do not block",
        severity="warning",
        needs=("job.settings",),
        judge=_launch_blocking,
        why="With CUDA_LAUNCH_BLOCKING=1 a rank stands in its launch before its helper thread gets work: a hang that "
        "appears only while debugging.",
        by_hand="echo $CUDA_LAUNCH_BLOCKING",
        remedy="unset CUDA_LAUNCH_BLOCKING",
        reference="failure report: NVIDIA/nccl#750",
    ),
    Check(
        code="MPI001",
        title="MPI uses shared memory within a node",
        severity="warning",
        needs=("job.settings",),
        judge=_mpi_shared_memory,
        why="A transport list written for one cluster often leaves shared memory out; everything works, slowly.",
        by_hand="env | grep -E 'OMPI_MCA|UCX_TLS|MPIR_CVAR'",
        remedy="unset OMPI_MCA_btl UCX_TLS",
        reference="https://openucx.readthedocs.io/en/master/faq.html; https://docs.open-mpi.org/en/main/tuning-apps/",
    ),
    Check(
        code="MPI002",
        title="Launchers agree on the number of ranks",
        severity="warning",
        needs=("job.settings",),
        judge=_world_sizes,
        why="One launcher inside another, or variables of an earlier job, make ranks wait for peers that do not exist.",
        by_hand="env | grep -E 'WORLD_SIZE|PMI_SIZE'",
        remedy="unset WORLD_SIZE   # or start with one launcher only",
        reference="https://pytorch.org/docs/stable/distributed.html#environment-variable-initialization",
    ),
    Check(
        code="LIM001",
        title="Memory can be locked without limit",
        severity="warning",
        needs=("limits.memlock",),
        judge=_memlock,
        why="RDMA registration pins memory. Limits of a login shell do not reach ranks that a daemon starts, so look "
        "from inside a rank.",
        by_hand="ulimit -l   # in a rank",
        remedy="ulimit -l unlimited   # container: --ulimit memlock=-1 --cap-add IPC_LOCK",
        reference=f"{_TROUBLESHOOTING}; failure reports: NVIDIA/nccl-tests#206, openucx/ucx#8229",
    ),
    Check(
        code="LIM002",
        title="Enough files can be open",
        severity="warning",
        needs=("limits.nofile",),
        judge=_open_files,
        why="The default of 1024 is enough for a few nodes; larger jobs fail in accept() or when they create segments.",
        by_hand="ulimit -n   # in a rank",
        remedy="ulimit -n 1048576",
        reference="failure report: NVIDIA/nccl#550",
    ),
    Check(
        code="LIM003",
        title="The stack limit is finite",
        severity="warning",
        needs=("limits.stack",),
        judge=_stack,
        why="glibc sizes thread stacks by this limit, and falls back to 2 MiB where there is none.",
        by_hand="ulimit -s   # in a rank",
        remedy="ulimit -s 8192",
        reference=_TROUBLESHOOTING,
    ),
    Check(
        code="LIM004",
        title="/dev/shm is large enough",
        severity="warning",
        needs=("host.shared_memory",),
        judge=_shared_memory,
        why="Ranks of one node share windows there; containers start with 64 MiB, and dead ranks leave segments.",
        by_hand="df -h /dev/shm; ls -l /dev/shm",
        remedy="docker run --shm-size=8g …   # Kubernetes: an emptyDir of medium Memory at /dev/shm",
        reference=f"{_TROUBLESHOOTING}; failure reports: NVIDIA/nccl#342, NVIDIA/nccl#525",
    ),
    Check(
        code="LIM005",
        title="Every rank has a CPU",
        severity="info",
        needs=("ep.ranks", "host.cpus"),
        judge=_cpus,
        why="Ranks that share a CPU wait for each other's time slice; rows are marked oversubscribed.",
        by_hand="nproc; cat /sys/fs/cgroup/cpu.max",
        remedy="use fewer ranks, or a machine or container with more CPUs",
        reference="docs/columns.md: oversubscribed",
    ),
    Check(
        code="LIB001",
        title="One version of NCCL is installed",
        severity="info",
        needs=("libraries.nccl",),
        judge=_nccl_versions,
        why="A system library can shadow the one in a wheel, so that an upgrade changes nothing, and ranks with other "
        "search paths load another version.",
        by_hand="ldconfig -p | grep nccl; grep libnccl /proc/PID/maps",
        remedy="remove all but one, or put the wanted folder first in LD_LIBRARY_PATH",
        reference="failure reports: NVIDIA/nccl#1267, NVIDIA/nccl#1328",
    ),
    Check(
        code="LIB002",
        title="One NCCL wheel is installed",
        severity="error",
        needs=("libraries.packages",),
        judge=_nccl_wheels,
        why="The wheels for CUDA 12 and 13 write the same file; the package list no longer tells which one is there.",
        by_hand="pip list | grep nvidia-nccl",
        remedy="pip uninstall -y nvidia-nccl-cu12 nvidia-nccl-cu13 && pip install nvidia-nccl-cu13",
        reference="failure reports: marin-community/marin#7344, verl-project/verl#6621",
    ),
)
