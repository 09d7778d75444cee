"""What healthy machines look like, kept in a file, and how far a machine has drifted from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ncclep_bench.doctor.records import Drift
from ncclep_bench.errors import InputError
from ncclep_bench.model.facts import NOT_COLLECTED, Fact, Facts
from ncclep_bench.runtime.place import OWN_VARIABLES

SCHEMA = 1
MAX_BYTES = 1 << 30

Items = dict[str, Any]
"""What a document says of one kind: the name of each thing, without ids of the machine, and its value."""


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of healthy machines."""

    baseline_schema: int = SCHEMA
    machines: list[Facts]

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def read_baseline(file: Path) -> Baseline:
    """Raises InputError for a file that cannot be read, or is no baseline of this schema version."""
    try:
        if file.exists() and not file.is_file():
            raise InputError(f"{file}: is a folder or a device, not a file", hint="ncclep-doctor baseline save FILE")
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(
            f"{file}: cannot be read: {error.strerror}", hint="ncclep-doctor baseline save FILE"
        ) from error
    if len(data) > MAX_BYTES:
        raise InputError(f"{file}: is larger than {MAX_BYTES >> 20} MiB, and no baseline")
    try:
        version = msgspec.json.decode(data, type=_Version).baseline_schema
        if version != SCHEMA:
            raise InputError(f"{file}: a baseline of schema version {version}, this is version {SCHEMA}")
        baseline = msgspec.json.decode(data, type=Baseline)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(f"{file}: not a baseline: {error}", hint="ncclep-doctor baseline save writes one") from error
    if not baseline.machines:
        raise InputError(f"{file}: a baseline without machines", hint="ncclep-doctor baseline save FILE")
    return baseline


class _Version(msgspec.Struct):
    baseline_schema: int


def drift(baseline: Baseline, now: Facts) -> Facts:
    """How `now` differs, as facts of the section `drift`: from its own past where the baseline has it, else from all.

    Compared is each fact that both sides tell; a kind of which neither tells any is absent. Counters are compared with
    the same machine's alone.
    """
    past = [machine for machine in baseline.machines if machine.host == now.host]
    healthy = past or baseline.machines
    found: dict[str, Fact] = {}
    for name, kind in KINDS.items():
        drifts: list[Drift] = []
        compared = []
        for fact, items in kind.items.items():
            known = [machine for machine in healthy if machine.fact(fact).state == "value"]
            if not known or now.fact(fact).reason == NOT_COLLECTED or (kind.grows and not past):
                continue
            compared.append(fact)
            before = [items(machine.fact(fact).value) for machine in known]
            told = now.fact(fact)
            if told.state == "value":
                drifts += _drifts(before, items(told.value), now, grows=kind.grows)
            elif any(before) and len(known) == len(healthy):
                reason = f"{told.state.replace('_', ' ')} ({told.reason})"
                drifts.append(_drift(fact, [f"{len(before[-1])} values"], reason, before, now))
        reason = f"{now.host or 'this machine'} has no past in it" if kind.grows and not past else f"no {name} in both"
        found[name] = (
            Fact("value", ", ".join(compared), msgspec.to_builtins(drifts))
            if compared
            else Fact("absent", "baseline", reason=reason)
        )
    return Facts(host=now.host, rank=now.rank, sections={"drift": found})


def _drifts(before: Sequence[Items], after: Items, now: Facts, *, grows: bool) -> Iterator[Drift]:
    """Things whose value no healthy machine has; of counters those that are larger than any was."""
    for item in sorted({name for items in before for name in items} | after.keys()):
        seen = [items[item] for items in before if item in items]
        if grows:
            if seen and item in after and after[item] > max(seen):
                yield _drift(item, seen, after[item], before, now)
        elif item not in after:
            # What one healthy machine lacks is no must.
            if len(seen) == len(before):
                yield _drift(item, seen, None, before, now)
        elif not any(_alike(after[item], value) for value in seen):
            yield _drift(item, seen, after[item], before, now)


def _drift(item: str, seen: Sequence[Any], value: Any, before: Sequence[Items], now: Facts) -> Drift:
    return Drift(
        at=item,
        host=now.host,
        item=item,
        healthy=list(dict.fromkeys(map(str, seen))),
        now=None if value is None else str(value),
        machines=len(before),
    )


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 0.02 * max(abs(one), abs(other))
    return bool(one == other)


# ---- what belongs to which kind ----


def _records(value: Any) -> list[dict[str, Any]]:
    return [record for record in value if isinstance(record, dict)] if isinstance(value, list) else []


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _fields(pattern: str) -> Callable[[Any], Items]:
    """Fields of nvidia-smi -q by the number of the GPU: its address may be another on another machine."""
    wanted = re.compile(pattern)

    def items(value: Any) -> Items:
        return {
            f"GPU {number} {name}": said
            for number, gpu in enumerate(_records(value))
            for name, said in _mapping(gpu.get("fields")).items()
            if wanted.fullmatch(name) and said not in ("N/A", "")
        }

    return items


def _numbers(items: Callable[[Any], Items]) -> Callable[[Any], Items]:
    """Those items that are numbers."""

    def numbers(value: Any) -> Items:
        found = {name: re.match(r"\d+", str(said)) for name, said in items(value).items()}
        return {name: int(match[0][:18]) for name, match in found.items() if match}

    return numbers


def _one(name: str, pattern: str = r"(.+)") -> Callable[[Any], Items]:
    """One thing: the first match in a text, or a number."""

    def items(value: Any) -> Items:
        if isinstance(value, (int, float)):
            return {name: float(value) if "bytes" in name else value}
        match = re.search(pattern, value) if isinstance(value, str) else None
        return {name: match[1]} if match else {}

    return items


def _named(prefix: str, *only: str) -> Callable[[Any], Items]:
    """A table of names and values."""
    return lambda value: {f"{prefix} {k}": str(v) for k, v in _mapping(value).items() if not only or k in only}


def _library(name: str) -> Callable[[Any], Items]:
    def items(value: Any) -> Items:
        versions = sorted({str(record["version"]) for record in _records(value) if record.get("version")})
        return {name: ", ".join(versions)} if versions else {}

    return items


_PER_RANK = OWN_VARIABLES | {"CUDA_VISIBLE_DEVICES"}
_TUNING = re.compile(r"[\w.-]*(?:iommu|pci|hugepage|numa|mitigations|nvidia|isolcpus|nohz)[\w.-]*")
_VIRTUAL = re.compile(r"(?:veth|docker|cali|br-|tap|ifb|virbr)\w*|lo")
_ERRORS = re.compile(
    r".*(?:error|discard|drop|replay|recover|downed|retry|timeout|exceeded|cnp|nak|out_of_|rnr|crc).*",
    re.IGNORECASE,
)


def _settings(value: Any) -> Items:
    items: Items = {}
    for setting in _records(value):
        name = str(setting.get("name", ""))
        if name not in _PER_RANK:
            items.setdefault(name, str(setting.get("value", "")))
    return items


def _kernel_options(value: Any) -> Items:
    words = (word.partition("=") for word in str(value).split())
    return {f"kernel option {name}": said or "on" for name, _, said in words if _TUNING.fullmatch(name)}


def _sysctls(value: Any) -> Items:
    return {
        f"net.ipv4.conf.{of}.{name}": str(said)
        for of in ("all", "default")
        for name, said in _mapping(_mapping(value).get(of)).items()
    }


def _limit(name: str) -> Callable[[Any], Items]:
    def items(value: Any) -> Items:
        soft = _mapping(value).get("soft", "")
        return {} if soft == "" else {f"limit {name}": "unlimited" if soft is None else str(soft)}

    return items


def _links_up(value: Any) -> Items:
    up: dict[str, int] = {}
    for link in _records(value):
        gpu = str(link.get("gpu"))
        up[gpu] = up.get(gpu, 0) + (link.get("state") == "up")
    return {f"GPU {number} NVLinks up": count for number, count in enumerate(up.values())}


def _ports(*keys: str) -> Callable[[Any], Items]:
    return lambda value: {
        f"{port.get('device')}:{port.get('port')} {key}": str(port[key])
        for port in _records(value)
        for key in keys
        if port.get(key) not in (None, "")
    }


def _devices(value: Any) -> Items:
    real = [device for device in _records(value) if not _VIRTUAL.fullmatch(str(device.get("name")))]
    told = (("MTU", "mtu_bytes"), ("up", "up"))
    return {f"{device.get('name')} {name}": str(device[key]) for device in real for name, key in told if key in device}


def _paths(value: Any) -> Items:
    return {
        f"path {row} {column}": str(path)
        for record in _records(value)
        for row, cells in _mapping(record.get("paths")).items()
        for column, path in _mapping(cells).items()
        if row < column
    }


def _link_errors(value: Any) -> Items:
    order: dict[str, int] = {}
    items: Items = {}
    for record in _records(value):
        gpu = order.setdefault(str(record.get("gpu")), len(order))
        items[f"GPU {gpu} NVLink {record.get('link')} {record.get('counter')}"] = record.get("value")
    return items


def _port_errors(value: Any) -> Items:
    return {
        f"{record.get('device')}:{record.get('port')} {record.get('counter')}": record.get("value")
        for record in _records(value)
        if _ERRORS.fullmatch(str(record.get("counter")))
    }


class Kind(NamedTuple):
    """One kind of drift: the facts that tell it and what they say; of a kind that `grows` only more is drift."""

    items: Mapping[str, Callable[[Any], Items]]
    grows: bool = False


KINDS: Mapping[str, Kind] = {
    "versions": Kind(
        {
            "libraries.packages": _named("package"),
            "host.kernel": _one("kernel"),
            "gpus.driver": _one("NVIDIA driver", r"\b(\d+\.\d+(?:\.\d+)*)"),
            "gpus.cuda": _one("CUDA of the driver"),
            "mpi.build": _named("MPI", "implementation", "version", "cuda_aware"),
            **{f"libraries.{n}": _library(f"lib{n}") for n in ("nccl", "nccl_ep", "nvshmem", "cudart", "mpi")},
            "gpus.query": _fields(r"vbios version|inforom version/image version"),
        }
    ),
    "settings": Kind(
        {
            "job.settings": _settings,
            "gpus.driver_options": _named("driver option"),
            "host.command_line": _kernel_options,
            "network.sysctls": _sysctls,
        }
    ),
    "limits": Kind(
        {
            **{f"limits.{name}": _limit(name) for name in ("memlock", "nofile", "stack")},
            "host.cpus": _one("processors"),
            "host.cpu_quota": _one("processor quota"),
            "host.memory_bytes": _one("memory, bytes"),
            "host.numa_nodes": lambda value: {"NUMA nodes": len(_records(value))},
            "host.shared_memory": lambda value: _one("/dev/shm, bytes")(_mapping(value).get("total_bytes")),
        }
    ),
    "links": Kind(
        {
            "gpus.list": lambda value: {"GPUs": len(_records(value))},
            "gpus.query": _fields(r"product name"),
            "gpus.links": _links_up,
            "gpus.topology": _paths,
            "rdma.ports": _ports("state", "rate_gbps", "link_layer"),
            "rdma.mtu": _ports("active_bytes"),
            "network.devices": _devices,
        }
    ),
    "speeds": Kind(
        {
            "gpus.query": _fields(
                r"(?:max|applications) clocks/.*|gpu power readings/(?:current|max) power limit|ecc mode/current"
                r"|mig mode/current|persistence mode|pci/gpu link info/pcie generation/max"
                r"|pci/gpu link info/link width/(?:max|current)"
            )
        }
    ),
    "counters": Kind(
        {
            "gpus.query": _numbers(
                _fields(
                    r"ecc errors/(?:volatile|aggregate)/.*|remapped rows/(?:inactive )?(?:un)?correctable error"
                    r"|pci/replays since reset"
                )
            ),
            "gpus.link_errors": _numbers(_link_errors),
            "rdma.counters": _numbers(_port_errors),
        },
        grows=True,
    ),
}
"""The kinds of drift, one check each."""
