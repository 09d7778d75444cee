"""nvidia-smi and dcgmi: topology, NVLink state and errors, the long query, processes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ncclep_bench.doctor.parsers.contract import Parsed
from ncclep_bench.doctor.records import Gpu, Link, LinkErrorRate, LinkErrors, PeerStatus, Process, Topology, Unreadable
from ncclep_bench.doctor.text import Line

_PATH = re.compile(r"X|SYS|NODE|PHB|PXB|PIX|PSB|NV\d+|N/A", re.IGNORECASE)
_DEVICE = re.compile(r"(?:GPU|NIC|mlx\d_)\w+", re.IGNORECASE)
_NIC_NAME = re.compile(r"\s*(NIC\d+):\s*(\S+)", re.IGNORECASE)
_GPU_LINE = re.compile(r"\s*GPU (\d+): (.*?)(?: \(UUID.*)?$", re.IGNORECASE)
_LINK_LINE = re.compile(r"\s*Link (\d+): (?:<?(inactive|disabled)>?|([\d.]+) GB/s)\s*$", re.IGNORECASE)
_LINK_ERRORS = re.compile(
    r"\s*Link (\d+): (Replay|Recovery|CRC(?: FLIT| Data)?|CRC FLIT|.{0,20}?) Error(?:s| Counter)?: (\d+)", re.IGNORECASE
)
_LINK_RATE = re.compile(r"\s*Link (\d+): (Effective|Symbol) BER: (\d{1,3}(?:\.\d+)?(?:e-?\d{1,3})?)\s*", re.IGNORECASE)
_NO_LINKS = re.compile(r"all links are inactive", re.IGNORECASE)
_DCGM_GPU = re.compile(r"\s*gpuId (\d+):", re.IGNORECASE)
_DCGM_SWITCH = re.compile(r"\s*(?:NvSwitches:|physicalId \d+:)", re.IGNORECASE)
_DCGM_LINKS = re.compile(r"\s*((?:[UDX_] ){2,}[UDX_])\s*")
_DCGM_STATES = {"U": "up", "D": "down", "X": "disabled", "_": "unsupported"}
_QUERY_GPU = re.compile(r"\s*GPU ([0-9A-F]{8}:[0-9A-F]{2}:[0-9A-F]{2}\.\d)\s*", re.IGNORECASE)
_QUERY_FIELD = re.compile(r"(\s*)(\S.*?)\s*:(?:\s+(.*\S))?\s*")
_TABLE_PROCESS = re.compile(
    r"\|?\s*(\d+)\s+(?:(?:N/A|\d+)\s+(?:N/A|\d+)\s+)?(\d+)\s+[CGM+]{1,3}\s+(\S.*?)\s+(\d+) ?MiB\s*\|?\s*", re.IGNORECASE
)
_PROCESS_HEADER = re.compile(r"\|?\s*Processes:|.*\bpid, .*used_gpu_memory", re.IGNORECASE)
_CSV_PROCESS = re.compile(
    r"\s*(GPU-[\w-]+|[0-9A-F]{4,8}:[0-9A-F]{2}:[0-9A-F]{2}\.\d|\d+),\s*(\d+),\s*(.+?),\s*(\d+)(?: MiB)?\s*",
    re.IGNORECASE,
)
_PEER_CELL = re.compile(r"X|OK|CNS|GNS|TNS|DR|NS|U", re.IGNORECASE)
_PEER_COMMAND = re.compile(r"topo\b.*-p2p\s+([rwnap])\b")
_CAPABILITIES = {"r": "read", "w": "write", "n": "nvlink", "a": "atomics", "p": "pcie"}
_CSV_FIELDS = {
    "name": "product name",
    "gpu_name": "product name",
    "uuid": "gpu uuid",
    "gpu_uuid": "gpu uuid",
    "pci.bus_id": "pci/bus id",
    "gpu_bus_id": "pci/bus id",
    "persistence_mode": "persistence mode",
    "pstate": "performance state",
    "pcie.link.gen.current": "pci/gpu link info/pcie generation/current",
    "pcie.link.gen.gpucurrent": "pci/gpu link info/pcie generation/current",
    "pcie.link.gen.max": "pci/gpu link info/pcie generation/max",
    "pcie.link.width.current": "pci/gpu link info/link width/current",
    "pcie.link.width.max": "pci/gpu link info/link width/max",
    "utilization.gpu": "utilization/gpu",
    "memory.used": "fb memory usage/used",
    "memory.total": "fb memory usage/total",
    "temperature.gpu": "temperature/gpu current temp",
    "power.draw": "gpu power readings/average power draw",
    "power.limit": "gpu power readings/current power limit",
    "clocks.sm": "clocks/sm",
    "clocks.current.sm": "clocks/sm",
    "clocks.max.sm": "max clocks/sm",
    "ecc.mode.current": "ecc mode/current",
    "ecc.errors.corrected.volatile.total": "ecc errors/volatile/correctable",
    "ecc.errors.uncorrected.volatile.total": "ecc errors/volatile/uncorrectable",
    "ecc.errors.uncorrected.aggregate.total": "ecc errors/aggregate/uncorrectable",
    "remapped_rows.pending": "remapped rows/pending",
    "remapped_rows.failure": "remapped rows/remapping failure occurred",
    "mig.mode.current": "mig mode/current",
    "fabric.state": "fabric/state",
    "fabric.status": "fabric/status",
}
_CSV_REASONS = re.compile(r"clocks_(?:event|throttle)_reasons\.(\w+)")
_CSV_OTHERS = frozenset(
    {"index", "count", "timestamp", "driver_version", "compute_cap", "serial", "gpu_serial", "vbios_version"}
)
_REASON_NAMES = {"gpu_idle": "idle"}
_UNREADABLE = re.compile(
    r"Unable to determine the device handle for (?:GPU ?)?(\S+?):? |"
    r"(?:GPU|device) ?([\w:.]{1,64}) ?(?:is lost|has fallen off)|"
    r"\|\s+(\d+)\s+(?:\S+\s){1,6}.*\bERR!|"
    r"(?:Unable to|Failed to|Could not) (?:retrieve|get|query|read)[^:]{0,200}?(?:GPU|device|port) '?([\w:.]{1,64})",
    re.IGNORECASE,
)


def topology(lines: Sequence[Line]) -> Parsed:
    """The matrix of `nvidia-smi topo -m`, cells by tabs or by blanks, with or without legend."""
    matrices: list[tuple[Line, list[str], dict[str, dict[str, str]]]] = []
    names: dict[str, str] = {}
    for line in lines:
        words = line.text.split()
        if (
            len(words) > 1
            and _DEVICE.fullmatch(words[0])
            and (_DEVICE.fullmatch(words[1]) or words[1:3] == ["CPU", "Affinity"])
        ):
            columns = [word for word in words if _DEVICE.fullmatch(word)]
            if columns and columns[-1].upper() == "GPU":
                columns.pop()
            matrices.append((line, columns, {}))
        elif matrices and words and _DEVICE.fullmatch(words[0]) and len(words) > 1 and _PATH.fullmatch(words[1]):
            cells = [word.upper() for word in words[1 : 1 + len(matrices[-1][1])]]
            known = [cell for cell in cells if _PATH.fullmatch(cell)]
            if len(known) == len(cells):
                matrices[-1][2][words[0]] = dict(zip(matrices[-1][1], cells, strict=False))
        elif matrices and (match := _NIC_NAME.fullmatch(line.text)):
            names[match[1].upper()] = match[2]
    found = [
        Topology(at=header.at, host=header.host, paths=paths, names=names) for header, _, paths in matrices if paths
    ]
    return {"gpus.topology": found} if found else {}


def nvlink(lines: Sequence[Line]) -> Parsed:
    """`nvidia-smi nvlink -s` and `-e`, and the table of `dcgmi nvlink -s`."""
    gpu: str | None = ""
    model = ""
    links: list[Link] = []
    errors: list[LinkErrors] = []
    rates: list[LinkErrorRate] = []
    for line in lines:
        text = line.text
        if match := _GPU_LINE.match(text):
            gpu, model = match[1], match[2].strip()
        elif match := _DCGM_GPU.match(text):
            gpu, model = match[1], ""
        elif match := _LINK_LINE.match(text):
            state = (match[2] or "up").lower().replace("inactive", "down")
            links.append(Link(at=line.at, host=line.host, gpu=gpu or "", link=int(match[1]), state=state, model=model))
        elif match := _LINK_RATE.fullmatch(text):
            rates.append(
                LinkErrorRate(
                    at=line.at,
                    host=line.host,
                    gpu=gpu or "",
                    link=int(match[1]),
                    kind=match[2].capitalize(),
                    rate=float(match[3]),
                )
            )
        elif match := _LINK_ERRORS.match(text):
            errors.append(
                LinkErrors(
                    at=line.at,
                    host=line.host,
                    gpu=gpu or "",
                    link=int(match[1]),
                    counter=match[2].strip(),
                    value=int(match[3]),
                )
            )
        elif _DCGM_SWITCH.match(text):
            gpu = None
        elif gpu is None:
            continue
        elif match := _DCGM_LINKS.fullmatch(text):
            links.extend(
                Link(at=line.at, host=line.host, gpu=gpu or "", link=number, state=_DCGM_STATES[mark])
                for number, mark in enumerate(match[1].split())
            )
        elif _NO_LINKS.search(text):
            links.append(Link(at=line.at, host=line.host, gpu=gpu or "", link=-1, state="down", model=model))
    told = {"gpus.links": links, "gpus.link_errors": errors, "gpus.link_error_rates": rates}
    return {name: found for name, found in told.items() if found}


def query(lines: Sequence[Line]) -> Parsed:
    """`nvidia-smi -q`: the fields of each GPU by section; nesting is read from indentation where it is left."""
    gpus: list[Gpu] = []
    open_sections: list[tuple[int, str]] = []
    for line in lines:
        if match := _QUERY_GPU.fullmatch(line.text):
            gpus.append(Gpu(at=line.at, host=line.host, gpu=match[1], fields={}))
            open_sections = []
            continue
        if line.text.strip().lower() == "fabric" and (not gpus or "fabric/state" in gpus[-1].fields):
            gpus.append(Gpu(at=line.at, host=line.host, gpu="not named", fields={}))  # an excerpt
        if not gpus or len(gpus[-1].fields) > 1000:
            continue
        indent = len(line.text.expandtabs()) - len(line.text.expandtabs().lstrip())
        match = _QUERY_FIELD.fullmatch(line.text)
        if match is None or match[3] is None:
            name = line.text.strip().rstrip(":").strip().lower()
            # Without indentation there is no telling where a section ends; the last heading then stands alone.
            open_sections = [(depth, section) for depth, section in open_sections if depth < indent]
            open_sections.append((indent, name))
            continue
        path = [section for depth, section in open_sections if depth < indent or indent == 0]
        gpus[-1].fields.setdefault("/".join([*path, match[2].lower()]), match[3])
    return {"gpus.query": gpus} if gpus else {}


def peer_status(lines: Sequence[Line]) -> Parsed:
    """The matrix of `nvidia-smi topo -p2p r` and its like; without the command above it, of read access."""
    found: list[PeerStatus] = []
    columns: list[str] = []
    capability = "read"
    for line in lines:
        words = line.text.split()
        if match := _PEER_COMMAND.search(line.text):
            capability = _CAPABILITIES[match[1].lower()]
        elif len(words) > 1 and all(re.fullmatch(r"GPU\d+", word, re.IGNORECASE) for word in words):
            columns = words
        elif columns and words[:1] and words[0] in columns and all(map(_PEER_CELL.fullmatch, words[1:])):
            found += [
                PeerStatus(
                    at=line.at, host=line.host, gpu=words[0], peer=peer, capability=capability, status=cell.upper()
                )
                for peer, cell in zip(columns, words[1:], strict=False)
                if cell.upper() != "X"
            ]
    return {"gpus.peers": found} if found else {}


def table(lines: Sequence[Line]) -> Parsed:
    """`nvidia-smi --query-gpu=… --format=csv`, with its header: the fields that checks know from the long query."""
    gpus: list[Gpu] = []
    listed: list[dict[str, str]] = []
    for line, row in _table_rows(lines):
        fields = {_CSV_FIELDS[name]: cell for name, cell in row.items() if name in _CSV_FIELDS}
        for name, cell in row.items():
            if match := _CSV_REASONS.fullmatch(name):
                reason = _REASON_NAMES.get(match[1], match[1].replace("_", " "))
                fields[f"clocks event reasons/{reason}"] = cell
        gpu = row.get("index") or fields.get("pci/bus id") or fields.get("gpu uuid") or str(len(gpus))
        gpus.append(Gpu(at=line.at, host=line.host, gpu=gpu, fields=fields))
        if "product name" in fields and not line.host:
            about = {"index": gpu, "uuid": fields.get("gpu uuid", ""), "name": fields["product name"]}
            listed.append(
                {**about, "compute_capability": row.get("compute_cap", ""), "driver": row.get("driver_version", "")}
            )
    return {name: found for name, found in (("gpus.query", gpus), ("gpus.list", listed)) if found}


def _table_rows(lines: Sequence[Line]) -> Iterator[tuple[Line, dict[str, str]]]:
    names: list[str] = []
    for line in lines:
        cells = [cell.strip() for cell in line.text.split(",")]
        if header := _table_header(cells):
            names = header
        elif names and len(cells) == len(names):
            yield line, dict(zip(names, cells, strict=True))
        else:
            names = []


def _table_header(cells: Sequence[str]) -> list[str]:
    """Names of the columns without their units, if every one is a field of a GPU; else nothing."""
    names = [cell.partition(" [")[0].lower() for cell in cells]
    known = [name for name in names if name in _CSV_FIELDS or name in _CSV_OTHERS or _CSV_REASONS.fullmatch(name)]
    fields = all(re.fullmatch(r"[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*", name) for name in names)
    return names if fields and len(known) > 1 and not {"pid", "process_name"} & set(names) else []


def processes(lines: Sequence[Line]) -> Parsed:
    """The process table at the end of `nvidia-smi`, and `--query-compute-apps` as CSV."""
    found = []
    of_gpus = {line.at for line, _ in _table_rows(lines)}
    for line in lines:
        if line.at in of_gpus:
            continue
        match = _TABLE_PROCESS.fullmatch(line.text) or _CSV_PROCESS.fullmatch(line.text)
        if match:
            found.append(
                Process(
                    at=line.at, host=line.host, gpu=match[1], pid=int(match[2]), name=match[3], used_mib=int(match[4])
                )
            )
    table = any(_PROCESS_HEADER.match(line.text) for line in lines)
    return {"gpus.processes": found} if found or table else {}


def unreadable(lines: Sequence[Line]) -> Parsed:
    """GPUs and ports that a command names and could not read."""
    found = list(_unreadable(lines))
    return {"gpus.unreadable": found} if found else {}


def _unreadable(lines: Sequence[Line]) -> Iterator[Unreadable]:
    for line in lines:
        if match := _UNREADABLE.search(line.text):
            yield Unreadable(
                at=line.at, host=line.host, device=next(filter(None, match.groups())), said=line.text.strip()[:300]
            )
