"""RDMA adapters: ibv_devinfo, ibstat, ibstatus, sysfs dumps, GID tables, traffic classes, mlnx_qos."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from ncclep_bench.doctor.parsers.contract import Parsed
from ncclep_bench.doctor.records import Counter, Gid, Mtu, Port, PriorityFlow, TrafficClass
from ncclep_bench.doctor.text import Line

_FIELD = re.compile(r"\s*([A-Za-z][\w ]*?)\s*[:=]\s*(.*?)\s*")
_DEVICE_LINE = re.compile(
    r"\s*(?:hca_id:\s*(\S+)|CA '([^']+)'|Infiniband device '([^']+)' port (\d+) status:)\s*", re.IGNORECASE
)
_PORT_LINE = re.compile(r"\s*port(?::\s*| )(\d+):?\s*", re.IGNORECASE)
_STATE = re.compile(r"(?:\d+: ?)?(?:PORT_)?(ACTIVE_DEFER|ACTIVE|DOWN|INIT\w*|ARMED|NOP)\b", re.IGNORECASE)
_RATE = re.compile(r"([\d.]+)")
_SYSFS = re.compile(r"/sys/class/infiniband/([^\s=:/]+)/([^\s=:]*)\s*[=:\s]\s*(.*)")
_SYSFS_GID = re.compile(r"ports/(\d{1,3})/(?:gid_attrs/)?(gids|types|ndevs)/(\d{1,4})")
_CAT = re.compile(r"\bcat\s+(/sys/class/infiniband/[^\s*?{]+)\s*$")
_SYSFS_PORT = re.compile(r"ports/(\d+)/(.+)")
_GID_HEADER = re.compile(r"\s*DEV\s+PORT\s+INDEX\s+GID\b.*", re.IGNORECASE)
_GID_ROW = re.compile(
    r"\s*(?:([\w.-]+):?\s+)?([A-Za-z]\w*)\s+(\d{1,3})\s+(\d{1,4})\s+([0-9a-f]{0,4}:[0-9a-f:]+[0-9a-f.]*)\s+"
    r"(?:(\d+(?:\.\d+){3})\s+)?(v1|v2|IB|RoCE ?v[12])(?:\s+(\S+))?\s*",
    re.IGNORECASE,
)
_GID_OF_PORT = re.compile(
    r"\s*GID\[\s*(\d+)\]:\s*([0-9a-fA-F:.]+)(?:,\s*(RoCE v[12]|IB/RoCE v1|IB))?\s*", re.IGNORECASE
)
_GLOBAL_CLASS = re.compile(r"\s*Global tclass\s*=\s*(\d+)\s*", re.IGNORECASE)
_CLASS_FILES = re.compile(r"/sys/class/infiniband/([^/\s]+)/tc/\d+/traffic_class")
_QOS_NETDEV = re.compile(r"mlnx_qos\b.*?-i\s*(\S+)")
_PFC = re.compile(r"\s*(?:PFC configuration:\s*)?enabled\s+((?:[01]\s+){3,}[01])\s*", re.IGNORECASE)
_DSCP = re.compile(r"prio:\s*(\d)\s+dscp:\s*([\d,. ]+)", re.IGNORECASE)
_TRUST = re.compile(r"\s*Priority trust state:\s*(\w+)", re.IGNORECASE)
_NO_GID = re.compile(r"[0:]*|fe80(?::0000){3}(?::0000){4}")
_KINDS = {"roce v2": "v2", "rocev2": "v2", "v2": "v2", "ib": "IB"}

_PORT_KEYS = {
    "state": "state",
    "physical state": "physical",
    "phys state": "physical",
    "phys_state": "physical",
    "rate": "rate",
    "active_width": "",
    "base lid": "lid",
    "port_lid": "lid",
    "sm lid": "sm_lid",
    "sm_lid": "sm_lid",
    "lid": "lid",
    "link layer": "link_layer",
    "link_layer": "link_layer",
    "max_mtu": "max_mtu",
    "active_mtu": "active_mtu",
}
_ADAPTER_KEYS = {
    "ca type": "board",
    "hca_type": "board",
    "vendor_part_id": "board",
    "system image guid": "adapter",
    "sys_image_guid": "adapter",
}


def ports(lines: Sequence[Line]) -> Parsed:
    """State, speed, LIDs and MTU of each port, from whichever tool printed them."""
    found = [*_listed_ports(lines), *_sysfs_ports(lines)]
    states = [port for fields in found if (port := _port(fields))]
    mtus = [mtu for fields in found if (mtu := _mtu(fields))]
    return {name: records for name, records in (("rdma.ports", states), ("rdma.mtu", mtus)) if records}


def counters(lines: Sequence[Line]) -> Parsed:
    """`counters/` and `hw_counters/` in dumps of sysfs."""
    found = [
        Counter(
            at=line.at,
            host=host,
            device=device,
            port=int(port[1]),
            counter=port[2].rpartition("/")[2],
            value=int(value),
        )
        for line, host, device, key, value in _sysfs(lines)
        if (port := _SYSFS_PORT.fullmatch(key)) and "counters/" in key and _is_number(value)
    ]
    return {"rdma.counters": found} if found else {}


def gids(lines: Sequence[Line]) -> Parsed:
    """GID tables of show_gids, `ibv_devinfo -v` and sysfs; a table that starts again is the next host's."""
    found = [*_listed_gids(lines), *_sysfs_gids(lines)]
    return {"rdma.gids": list(_apart(found))} if found else {}


def qos(lines: Sequence[Line]) -> Parsed:
    """mlnx_qos and the traffic class that the driver gives to every queue pair of the kernel's making."""
    classes: list[TrafficClass] = []
    flows: list[PriorityFlow] = []
    device, netdev, trust = "", "", ""
    priority_of_dscp: dict[str, int] = {}
    for line in lines:
        if match := _CLASS_FILES.search(line.text):
            device = match[1]
        if match := _QOS_NETDEV.search(line.text):
            netdev, trust, priority_of_dscp = match[1], "", {}
        if match := _GLOBAL_CLASS.search(line.text):
            classes.append(TrafficClass(at=line.at, host=line.host, device=device, value=int(match[1]) & 255))
        elif match := _TRUST.match(line.text):
            trust = match[1].lower()
        elif match := _PFC.fullmatch(line.text):
            enabled = [priority for priority, mark in enumerate(match[1].split()) if mark == "1"]
            flows.append(
                PriorityFlow(
                    at=line.at,
                    host=line.host,
                    netdev=netdev,
                    enabled=enabled,
                    priority_of_dscp=priority_of_dscp,
                    trust=trust,
                )
            )
        for priority, codes in _DSCP.findall(line.text):
            priority_of_dscp.update(
                (code.strip(), int(priority)) for code in codes.split(",") if code.strip().isdigit()
            )
    return {name: found for name, found in (("rdma.traffic_class", classes), ("rdma.qos", flows)) if found}


def _listed_ports(lines: Sequence[Line]) -> Iterator[dict[str, Any]]:
    """Fields of every listed port; a port that one tool lists again, where no host is named, is the next host's."""
    listings: dict[str, int] = {}
    seen: set[tuple[str, int, str, int]] = set()
    for fields in _port_fields(lines):
        tool = fields.pop("tool")
        listing = listings.setdefault(tool, 1)
        if not fields["host"] and (tool, listing, fields["device"], fields["port"]) in seen:
            listing = listings[tool] = listing + 1
        seen.add((tool, listing, fields["device"], fields["port"]))
        yield fields if listing == 1 or fields["host"] else {**fields, "host": f"host {listing}"}


def _port_fields(lines: Sequence[Line]) -> Iterator[dict[str, Any]]:
    """Fields of every port that ibv_devinfo, ibstat or ibstatus lists, whatever the indentation."""
    device, tool = "", ""
    about: dict[str, str] = {}
    fields: dict[str, Any] | None = None
    for line in lines:
        if match := _DEVICE_LINE.fullmatch(line.text):
            if fields:
                yield fields
            device, about, fields = match[1] or match[2] or match[3], {}, None
            tool = "ibv_devinfo" if match[1] else "ibstat" if match[2] else "ibstatus"
            if match[4]:
                fields = {"at": line.at, "host": line.host, "tool": tool, "device": device, "port": int(match[4])}
            continue
        if match := _PORT_LINE.fullmatch(line.text):
            if fields:
                yield fields
            fields = {
                "at": line.at,
                "host": line.host,
                "tool": tool,
                "device": device or "adapter",
                "port": int(match[1]),
                **about,
            }
            continue
        match = _FIELD.fullmatch(line.text)
        key = match[1].lower() if match else ""
        if match and key in _ADAPTER_KEYS:
            about[_ADAPTER_KEYS[key]] = match[2]
        elif match and fields and _PORT_KEYS.get(key):
            fields.setdefault(_PORT_KEYS[key], match[2])
            fields["at"] = line.at if key == "state" else fields["at"]
    if fields:
        yield fields


def _sysfs(lines: Sequence[Line]) -> Iterator[tuple[Line, str, str, str, str]]:
    """(line, host, device, path below the device, content) of each `path = content` or `host:path:content` line.

    A dump that starts again is another host's; counters alone that come again are a second reading.
    """
    asked, dump = "", 1
    seen: set[tuple[str, str, str]] = set()
    for line in lines:
        # What `cat` was asked for stands above its answer.
        text, asked = (f"{asked} = {line.text}" if asked else line.text), ""
        if match := _CAT.search(text):
            asked = match[1]
        elif match := _SYSFS.search(text):
            before = text[: match.start()].strip()
            host = before[:-1] if before.endswith(":") and " " not in before else line.host
            place = (host, match[1], match[2])
            if place in seen and "counters/" not in match[2]:
                dump += 1
                seen.clear()
            seen.add(place)
            yield line, host or (f"host {dump}" if dump > 1 else ""), match[1], match[2], match[3].strip()


def _sysfs_ports(lines: Sequence[Line]) -> Iterator[dict[str, Any]]:
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    about: dict[tuple[str, str], dict[str, str]] = {}
    for line, host, device, key, value in _sysfs(lines):
        if key in _ADAPTER_KEYS:
            about.setdefault((host, device), {})[_ADAPTER_KEYS[key]] = value
        port = _SYSFS_PORT.fullmatch(key)
        if port and (name := _PORT_KEYS.get(port[2])):
            fields = found.setdefault(
                (host, device, port[1]), {"at": line.at, "host": host, "device": device, "port": int(port[1])}
            )
            fields[name] = value
            fields["at"] = line.at if name == "state" else fields["at"]
    for (host, device, _), fields in found.items():
        yield {**about.get((host, device), {}), **fields}


def _port(fields: dict[str, Any]) -> Port | None:
    state = _STATE.search(fields.get("state", ""))
    rate = _RATE.match(fields.get("rate", ""))
    if not state and not rate:
        return None
    return Port(
        at=fields["at"],
        host=fields["host"],
        device=fields["device"],
        port=fields["port"],
        board=fields.get("board", ""),
        adapter=fields.get("adapter", "") if set(fields.get("adapter", "")) - set("0x:") else "",
        state=state[1].upper() if state else "",
        physical=fields.get("physical", "").rpartition(":")[2].strip(),
        rate_gbps=float(rate[1]) if rate and rate[1].count(".") < 2 and rate[1] != "." else None,
        link_layer=fields.get("link_layer", ""),
        lid=_number(fields.get("lid")),
        sm_lid=_number(fields.get("sm_lid")),
    )


def _mtu(fields: dict[str, Any]) -> Mtu | None:
    active, most = (_number((fields.get(name) or "").split(" ")[0]) for name in ("active_mtu", "max_mtu"))
    if not active:
        return None
    state = _STATE.search(fields.get("state", ""))
    return Mtu(
        at=fields["at"],
        host=fields["host"],
        device=fields["device"],
        port=fields["port"],
        max_bytes=most,
        active_bytes=active,
        state=state[1].upper() if state else "",
        link_layer=fields.get("link_layer", ""),
    )


def _listed_gids(lines: Sequence[Line]) -> Iterator[Gid]:
    device, port, headers, host = "", 1, 0, ""
    for line in lines:
        if match := _DEVICE_LINE.fullmatch(line.text):
            device = match[1] or match[2] or match[3]
        elif match := _PORT_LINE.fullmatch(line.text):
            port = int(match[1])
        elif _GID_HEADER.fullmatch(line.text):
            headers += 1
            host = f"host {headers}" if headers > 1 else ""
        elif match := _GID_ROW.fullmatch(line.text):
            yield Gid(
                at=line.at,
                host=line.host or match[1] or host,
                device=match[2],
                port=int(match[3]),
                index=int(match[4]),
                gid=match[5].lower(),
                kind=_KINDS.get(match[7].lower(), "v1"),
                netdev=match[8] or "",
            )
        elif match := _GID_OF_PORT.fullmatch(line.text):
            yield Gid(
                at=line.at,
                host=line.host,
                device=device,
                port=port,
                index=int(match[1]),
                gid=match[2].lower(),
                kind=_KINDS.get((match[3] or "").lower(), "v1"),
            )


def _sysfs_gids(lines: Sequence[Line]) -> Iterator[Gid]:
    table: dict[tuple[str, str, str, str], dict[str, str]] = {}
    where: dict[tuple[str, str, str, str], str] = {}
    for line, host, device, key, value in _sysfs(lines):
        if match := _SYSFS_GID.fullmatch(key):
            place = (host, device, match[1], match[3])
            table.setdefault(place, {})[match[2]] = value
            where[place] = line.at
    for (host, device, port, index), entry in table.items():
        gid, kind = entry.get("gids", "").lower(), entry.get("types", "").lower()
        if gid and kind and not _NO_GID.fullmatch(gid):
            yield Gid(
                at=where[host, device, port, index],
                host=host,
                device=device,
                port=int(port),
                index=int(index),
                gid=gid,
                kind=_KINDS.get(kind, "v1"),
                netdev=entry.get("ndevs", ""),
            )


def _apart(entries: Sequence[Gid]) -> Iterator[Gid]:
    import msgspec

    seen: set[tuple[str, int, int]] = set()
    table = 1
    for entry in entries:
        key = (entry.device, entry.port, entry.index)
        if not entry.host and key in seen:
            table += 1
            seen.clear()
        seen.add(key)
        yield entry if entry.host or table == 1 else msgspec.structs.replace(entry, host=f"host {table}")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20


def _number(text: str | None) -> int | None:
    if not text:
        return None
    word = text.split()[0] if text.split() else ""
    if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", word):
        return int(word, 16)
    return int(word) if _is_number(word) else None
