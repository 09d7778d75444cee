"""How GPUs and adapters hang together: NVLink mesh, distance to the network, PCIe access control."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ncclep_bench.doctor.contract import Check, Trouble
from ncclep_bench.doctor.records import Acs, Topology
from ncclep_bench.doctor.settings import pattern_of, settings_of
from ncclep_bench.model.facts import Facts

NEAR = ("PIX", "PXB", "PSB")
DISTANCES = (*NEAR, "PHB", "NODE", "SYS")
REDIRECTIONS = ("ReqRedir", "CmpltRedir", "UpstreamFwd")


def _topologies(facts: Facts) -> list[Topology]:
    return facts.read("gpus.topology", list[Topology])


def _is_gpu(name: str) -> bool:
    return name.upper().startswith("GPU")


def _gpus(topology: Topology) -> list[str]:
    return [name for name in topology.paths if _is_gpu(name)]


def _width(cell: str) -> int:
    return int(cell[2:]) if cell.startswith("NV") and cell[2:].isdecimal() else 0


def _nvlinks(topology: Topology, gpu: str) -> dict[str, int]:
    """The other GPUs that rows or columns of the matrix tie to `gpu`, with how many NVLinks."""
    found = {}
    for other in _gpus(topology):
        if other != gpu:
            cells = (topology.paths[gpu].get(other, ""), topology.paths[other].get(gpu, ""))
            found[other] = max(map(_width, cells))
    return found


def _odd_gpu(facts: Facts) -> Iterator[Trouble]:
    for topology in _topologies(facts):
        links = {gpu: _nvlinks(topology, gpu) for gpu in _gpus(topology)}
        joined = [gpu for gpu, peers in links.items() if any(peers.values())]
        mesh = len(joined) > 2 and all(links[a][b] for a in joined for b in joined if a != b)
        if not mesh:
            continue
        for gpu in (gpu for gpu in links if gpu not in joined):
            cells = sorted({cell for other, cell in topology.paths[gpu].items() if other in joined})
            yield Trouble(
                f"{gpu} is off NVLink: it reaches the others by {'/'.join(cells) or 'nothing'}, which all reach "
                f"each other by NVLink",
                (f"{topology.at}: row {gpu}: {' '.join(topology.paths[gpu].values())}",),
            )
        widths = Counter(links[a][b] for a in joined for b in joined if a < b)
        usual = widths.most_common(1)[0][0]
        thin = [(a, b) for a in joined for b in joined if a < b and links[a][b] < usual]
        if thin:
            yield Trouble(
                f"{len(thin)} pairs have fewer than the usual {usual} NVLinks: "
                + ", ".join(f"{a}-{b} {links[a][b]}" for a, b in thin[:8]),
                (f"{topology.at}: NV{usual} elsewhere",),
                verdict="warning",
            )


def _no_nvlink(facts: Facts) -> Iterator[Trouble]:
    for topology in _topologies(facts):
        gpus = _gpus(topology)
        if len(gpus) < 2 or any(any(_nvlinks(topology, gpu).values()) for gpu in gpus):
            continue
        pairs = [(a, b, topology.paths[a].get(b, "")) for a in gpus for b in gpus if a < b]
        near = [f"{a}-{b} ({path})" for a, b, path in pairs if path in NEAR]
        yield Trouble(
            "no NVLink here: experts on one machine talk over PCIe"
            + (
                f"; if peer access hangs on {', '.join(near[:8])}, look at PCIe access control (ACS) and the IOMMU "
                f"first"
                if near
                else ""
            ),
            (topology.at,),
        )


def _reach(topology: Topology) -> tuple[list[str], dict[str, dict[str, str]]]:
    """Adapters, and for each GPU the path to each of them."""
    adapters = list(dict.fromkeys(n for row in topology.paths.values() for n in row if not _is_gpu(n)))
    return adapters, {gpu: {n: topology.paths[gpu].get(n, "") for n in adapters} for gpu in _gpus(topology)}


def _called(topology: Topology, adapter: str) -> str:
    name = topology.names.get(adapter.upper())
    return f"{adapter} ({name})" if name else adapter


def _distance(facts: Facts) -> Iterator[Trouble]:
    for topology in _topologies(facts):
        adapters, reach = _reach(topology)
        best = {
            gpu: min((path for path in paths.values() if path in DISTANCES), key=DISTANCES.index, default="")
            for gpu, paths in reach.items()
        }
        far = [gpu for gpu, path in best.items() if path == "SYS"]
        lone = [gpu for gpu, path in best.items() if path not in (*NEAR, "")]
        near = [gpu for gpu, path in best.items() if path in NEAR]
        evidence = (f"{topology.at}: nearest adapter: " + ", ".join(f"{gpu} {path}" for gpu, path in best.items()),)
        if not adapters:
            continue
        if far and len(far) < len(best):
            yield Trouble(
                f"{', '.join(far)} reach every adapter across the CPU interconnect (SYS): no GPUDirect RDMA for them, "
                f"and slower inter-node traffic than {', '.join(g for g in best if g not in far)}",
                evidence,
            )
        elif near and lone:
            yield Trouble(
                f"{', '.join(lone)} have no adapter of their own (PIX or PXB) and share the rails of "
                f"{', '.join(near)}: "
                "they depend on PXN, and inter-node bandwidth per GPU is a fraction of one adapter",
                evidence,
                verdict="info",
            )
        elif near:
            rails = {n for n in adapters if any(paths[n] in NEAR for paths in reach.values())}
            if len(rails) < len(near):
                yield Trouble(
                    f"{len(near)} GPUs share {len(rails)} near adapters ({', '.join(sorted(rails))}): "
                    f"inter-node bandwidth per GPU is {len(rails)}/{len(near)} of one adapter",
                    evidence,
                    verdict="info",
                )


def _not_rails(facts: Facts) -> Iterator[Trouble]:
    for topology in _topologies(facts):
        adapters, reach = _reach(topology)
        near = [n for n in adapters if any(paths[n] in NEAR for paths in reach.values())]
        remote = [n for n in adapters if reach and all(paths[n] in ("SYS", "NODE") for paths in reach.values())]
        remote = [n for n in remote if all(paths[n] == "SYS" for paths in reach.values())]
        if not near or not remote:
            continue
        evidence = (f"{topology.at}: SYS to every GPU: {', '.join(remote)}",)
        chosen = settings_of(facts).get("NCCL_IB_HCA") if facts.fact("job.settings").state == "value" else None
        pattern = pattern_of(chosen.value) if chosen else None
        names = [topology.names.get(n.upper(), n) for n in remote]
        picked = (
            [name for name in names for entry in pattern.names if pattern.matches(entry, [name])]
            if pattern and not pattern.exclude
            else []
        )
        if picked and chosen:
            yield Trouble(
                f"NCCL_IB_HCA picks {', '.join(picked)}, near no GPU: storage or management adapters",
                (*evidence, str(chosen)),
                verdict="warning",
            )
        else:
            yield Trouble(
                f"{', '.join(_called(topology, n) for n in remote)} are near no GPU: storage or management adapters, "
                "not to be used as compute rails",
                evidence,
                f"export NCCL_IB_HCA=={','.join(topology.names.get(n.upper(), n) for n in near)}",
            )


def _access_control(facts: Facts) -> Iterator[Trouble]:
    bridges = facts.read("pci.acs", list[Acs])
    redirecting = [acs for acs in bridges if any(flag in acs.on for flag in REDIRECTIONS)]
    virtual = any(acs.virtual for acs in bridges)
    if redirecting:
        shown = tuple(f"{a.at}: {a.device} {a.title[:60]}: {' '.join(f + '+' for f in a.on)}" for a in redirecting[:8])
        devices = [acs.device for acs in redirecting if acs.device]
        named = ", ".join(devices[:8]) + (", …" if len(devices) > 8 else "") or f"{len(redirecting)} devices"
        if virtual:
            yield Trouble(
                f"access control redirects at {named}; a virtual machine needs that",
                shown,
                "none, in a virtual machine",
                "info",
            )
        else:
            yield Trouble(
                f"PCIe access control (ACS) redirects peer traffic through the CPU at {named}: peer access is slow "
                f"or hangs",
                shown,
            )
    elif any("SrcValid" in acs.on for acs in bridges):
        on = [acs for acs in bridges if "SrcValid" in acs.on]
        yield Trouble(
            "source validation (SrcValid+) is on by itself: peer traffic is not redirected",
            tuple(f"{acs.at}: {acs.device}" for acs in on[:4]),
            "none",
            "info",
        )


_GUIDE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"

CHECKS = (
    Check(
        code="TOPO001",
        title="No GPU stands outside the NVLink mesh",
        severity="error",
        needs=("gpus.topology",),
        judge=_odd_gpu,
        why="On a machine with NVSwitch every pair shows the same NV#. A GPU that does not has not joined the fabric.",
        by_hand="nvidia-smi topo -m",
        remedy="sudo nvidia-smi --gpu-reset -i GPU   # then systemctl status nvidia-fabricmanager, dmesg | grep Xid",
        reference="report: vllm-project/vllm#16336",
    ),
    Check(
        code="TOPO002",
        title="Every GPU has a near adapter",
        severity="warning",
        needs=("gpus.topology",),
        judge=_distance,
        why="Tokens for other machines leave by the nearest adapter; across the CPU interconnect GPUDirect RDMA is "
        "off, "
        "and an adapter that GPUs share is shared bandwidth.",
        by_hand="nvidia-smi topo -m",
        remedy="export NCCL_PXN_DISABLE=0   # GPUs without an adapter then send by their neighbour's",
        reference="reports: NVIDIA/nccl#1435, warpem/miss-alignment#106",
    ),
    Check(
        code="TOPO003",
        title="Adapters far from every GPU are not rails",
        severity="info",
        needs=("gpus.topology",),
        judge=_not_rails,
        why="Adapters on root ports without GPUs are for storage or management; a rail there is slow and unrouted.",
        by_hand="nvidia-smi topo -m; echo $NCCL_IB_HCA",
        remedy="list the near adapters in NCCL_IB_HCA",
        reference="reports: NVIDIA/nccl#1505, NVIDIA/NVSentinel#1221",
    ),
    Check(
        code="TOPO004",
        title="The GPUs of the machine are joined by NVLink",
        severity="info",
        needs=("gpus.topology",),
        judge=_no_nvlink,
        why="Without NVLink dispatch and combine within the machine take PCIe, where access control can block them.",
        by_hand="nvidia-smi topo -m; sudo lspci -vvv | grep ACSCtl",
        remedy="sudo lspci -vvv | grep -i acsctl   # ReqRedir+ on bridges: disable ACS in the BIOS, boot with iommu=pt",
        reference=f"{_GUIDE}; report: NVIDIA/nccl#667",
    ),
    Check(
        code="TOPO005",
        title="PCIe access control lets peers talk",
        severity="warning",
        needs=("pci.acs",),
        judge=_access_control,
        why="With redirection on, bridges send peer traffic up to the CPU: slow at best, a hang with some IOMMU "
        "settings. "
        "It comes back at every boot. Virtual machines need it.",
        by_hand="sudo lspci -vvv | grep -E '^[0-9a-f]|ACSCtl'",
        remedy="sudo setpci -s BRIDGE ECAP_ACS+0x6.w=0000   # for each bridge named, again after every boot",
        reference=f"{_GUIDE}; reports: NVIDIA/nccl#667, NVIDIA/nccl#2079",
    ),
)
