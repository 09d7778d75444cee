"""Recorded output and logs, in the formats of the real tools: what triggers each check, and what must not."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ncclep_bench.doctor.recorded import read_recorded
from ncclep_bench.model.facts import Facts


class Recorded(NamedTuple):
    """The text of one file, and a pattern that summary or evidence must show."""

    text: str
    shows: str = ""

    def facts(self, folder: Path) -> Facts:
        file = folder / "recorded.txt"
        file.write_text(self.text)
        (facts,) = read_recorded([file]).documents
        return facts


def links(model: str, *gpus: str) -> str:
    """`nvidia-smi nvlink -s`: one word per GPU, a `+` for each link that is up, a `-` for one that is not."""
    lines = []
    for gpu, states in enumerate(gpus):
        lines.append(f"GPU {gpu}: {model} (UUID: GPU-5a1c0de0-0000-4000-8000-00000000000{gpu})")
        lines += [f"\t Link {n}: {'26.562 GB/s' if state == '+' else '<inactive>'}" for n, state in enumerate(states)]
    return "\n".join(lines) + "\n"


def matrix(rows: str) -> str:
    """`nvidia-smi topo -m` from its cells, row by row."""
    cells = [row.split() for row in rows.strip().splitlines()]
    gpus = [row[0] for row in cells if row[0].startswith("GPU")]
    nics = [f"NIC{n}" for n in range(len(cells[0]) - 1 - len(gpus))]
    header = "\t" + "\t".join([*gpus, *nics, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    names = "".join(f"\n  {nic}: mlx5_{n}" for n, nic in enumerate(nics))
    body = "\n".join("\t".join([*row, "0-31", "0", "N/A"]) for row in cells)
    legend = f"Legend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n\nNIC Legend:\n{names}\n"
    return f"{header}\n{body}\n\n{legend}"


MESH = matrix(
    """
    GPU0 X NV18 NV18 NV18 PIX SYS
    GPU1 NV18 X NV18 NV18 PIX SYS
    GPU2 NV18 NV18 X NV18 SYS PIX
    GPU3 NV18 NV18 NV18 X SYS PIX
    """
).replace("PIX\tSYS", "PIX\tNODE")
OWN_RAILS = matrix(
    """
    GPU0 X NV18 NV18 PIX NODE SYS
    GPU1 NV18 X NV18 NODE PIX SYS
    GPU2 NV18 NV18 X SYS SYS PIX
    """
)


def smi_q(body: str, product: str = "NVIDIA H200") -> str:
    return f"""
==============NVSMI LOG==============

Timestamp                                 : Sun Nov 29 09:00:00 2026
Driver Version                            : 580.65.06
CUDA Version                              : 13.0

Attached GPUs                             : 1
GPU 00000000:19:00.0
    Product Name                          : {product}
    Product Architecture                  : Hopper
    Persistence Mode                      : Enabled
{body}
"""


FABRIC = """\
    Fabric
        State                             : {state}
        Status                            : {status}
        CliqueId                          : 0
        ClusterUUID                       : 00000000-0000-0000-0000-000000000000
        Health
            Bandwidth                     : {bandwidth}
            Route Recovery in progress    : False
            Route Unhealthy               : {route}
            Access Timeout Recovery       : False
"""
PCIE = """\
    GPU Link Info
        PCIe Generation
            Max                           : 5
            Current                       : {generation}
            Device Current                : {generation}
        Link Width
            Max                           : 16x
            Current                       : {width}x
    Performance State                     : {state}
    Utilization
        GPU                               : {busy} %
        Memory                            : 3 %
"""
REASONS = """\
    Clocks Event Reasons
        Idle                              : Not Active
        Applications Clocks Setting       : Not Active
        SW Power Cap                      : Active
        HW Slowdown                       : {slow}
            HW Thermal Slowdown           : {slow}
            HW Power Brake Slowdown       : Not Active
        Sync Boost                        : Not Active
        SW Thermal Slowdown               : Not Active
"""
MEMORY = """\
    MIG Mode
        Current                           : {mig}
        Pending                           : {mig}
    ECC Errors
        Volatile
            SRAM Correctable              : 3
            SRAM Uncorrectable Parity     : 0
            DRAM Uncorrectable            : {uncorrectable}
    Remapped Rows
        Correctable Error                 : 1
        Uncorrectable Error               : 0
        Pending                           : {pending}
        Remapping Failure Occurred        : {failed}
"""
HEALTHY_MEMORY = MEMORY.format(mig="Disabled", uncorrectable=0, pending="No", failed="No")


def ibstat(
    state: str = "Active", physical: str = "LinkUp", rate: int = 400, lid: int = 12, sm: int = 1, ports: str = ""
) -> str:
    return f"""CA 'mlx5_0'
	CA type: MT4129
	Number of ports: 1
	Firmware version: 28.43.2566
	Hardware version: 0
	Node GUID: 0x5c25730300000000
	System image GUID: 0x5c25730300000000
	Port 1:
		State: {state}
		Physical state: {physical}
		Rate: {rate}
		Base lid: {lid}
		LMC: 0
		SM lid: {sm}
		Capability mask: 0xa751e848
		Port GUID: 0x5c25730300000000
		Link layer: InfiniBand
{ports}"""


def devinfo(
    active: int = 4096,
    most: int = 4096,
    layer: str = "InfiniBand",
    state: str = "PORT_ACTIVE (4)",
    name: str = "mlx5_0",
) -> str:
    code = {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}
    return f"""hca_id:	{name}
	transport:			InfiniBand (0)
	fw_ver:				28.43.2566
	vendor_part_id:			4129
	phys_port_cnt:			1
		port:	1
			state:			{state}
			max_mtu:		{most} ({code[most]})
			active_mtu:		{active} ({code[active]})
			sm_lid:			1
			port_lid:		12
			port_lmc:		0x00
			link_layer:		{layer}

"""


def ibstatus(*devices: tuple[str, str, str]) -> str:
    return "\n".join(
        f"""Infiniband device '{name}' port 1 status:
	default gid:	 fe80:0000:0000:0000:5e25:73ff:fe00:0000
	base lid:	 0x1f
	sm lid:		 0x2
	state:		 4: ACTIVE
	phys state:	 5: LinkUp
	rate:		 {rate}
	link_layer:	 {layer}
"""
        for name, rate, layer in devices
    )


def gid_table(index: int, address: str = "10.1.0.7") -> str:
    mapped = "0000:0000:0000:0000:0000:ffff:0a01:0007"
    return f"""DEV	PORT	INDEX	GID					IPv4  		VER	DEV
---	----	-----	---					------------  	---	---
mlx5_0	1	0	fe80:0000:0000:0000:5e25:73ff:fe00:0001			v1	eth2
mlx5_0	1	1	fe80:0000:0000:0000:5e25:73ff:fe00:0001			v2	eth2
mlx5_0	1	{index - 1}	{mapped}	{address}  	v1	eth2
mlx5_0	1	{index}	{mapped}	{address}  	v2	eth2
n_gids_found=4
"""


def peer_matrix(status: str, access: str = "r") -> str:
    """`nvidia-smi topo -p2p`, under the command that was typed."""
    return f"""$ nvidia-smi topo -p2p {access}
 \tGPU0\tGPU1\t
 GPU0\tX\t{status}\t
 GPU1\t{status}\tX\t

Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
  GNS  = GPU not supported
  TNS  = Topology not supported
  NS   = Not supported
  U    = Unknown
"""


def rails(*addresses: str, routes: str = "") -> str:
    """`ip addr`, `ip route` and `show_gids` of a host whose rails eth2, eth3, … have these addresses."""
    told = "".join(
        f"{n}: eth{n}: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 9000 qdisc mq state UP group default qlen 1000\n"
        f"    inet {address} scope global eth{n}\n"
        for n, address in enumerate(addresses, 2)
    )
    gids = "".join(
        f"mlx5_{n}\t1\t3\t0000:0000:0000:0000:0000:ffff:0a0{n + 1}:0007\t{address.partition('/')[0]}\tv2\teth{n + 2}\n"
        for n, address in enumerate(addresses)
    )
    header = "DEV\tPORT\tINDEX\tGID\t\t\tIPv4\tVER\tDEV\n"
    return f"{told}default via 192.0.2.1 dev eth0 proto static\n{routes}{header}{gids}"


def counters(device: str = "mlx5_3", **values: int) -> str:
    return "".join(f"/sys/class/infiniband/{device}/ports/1/counters/{k}:{v}\n" for k, v in values.items())


def qos(pfc: str, trust: str = "dscp") -> str:
    return f"""# mlnx_qos -i eth2
$ mlnx_qos -i eth2
DCBX mode: OS controlled
Priority trust state: {trust}
dscp2prio mapping:
	prio:0 dscp:07,06,05,04,03,02,01,00,
	prio:3 dscp:31,30,29,28,27,26,25,24,
PFC configuration:
	priority    0   1   2   3   4   5   6   7
	enabled     {"   ".join(pfc)}
	buffer      0   0   0   1   0   0   0   0
"""


def lspci(flags: str, other: str = "") -> str:
    return f"""{other}16:00.0 PCI bridge: Broadcom / LSI PEX890xx PCIe Gen 5 Switch (rev b0)
	Control: I/O- Mem+ BusMaster+ SpecCycle- MemWINV- VGASnoop- ParErr+ Stepping- SERR+ FastB2B- DisINTx+
	Capabilities: [170 v1] Access Control Services
		ACSCap:	SrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans+
		ACSCtl:	{flags}
"""


PREFIX = "gpu-07:4242:4311 [3]"
INFO = f"{PREFIX} NCCL INFO NCCL version 2.28.7+cuda13.0\n"


def warn(text: str) -> str:
    """A NCCL log with one warning in it, under the tag of a launcher."""
    return f"[1,5]<stdout>:{INFO}[1,5]<stdout>:{PREFIX} transport/net_ib/p2p.cc:412 NCCL WARN {text}\n"


def said(text: str) -> str:
    """A NCCL log with one more line in it."""
    return f"{INFO}{PREFIX} NCCL INFO {text}\n"


DEEP_EP = "DeepEP buffer: 8 ranks, NVSHMEM 3.3.9\n"
KERNEL = "Nov 29 09:00:01 gpu-07 kernel: nvidia-nvlink: Nvlink Core is being initialized, major device number 511\n"
OOM = "Out of memory: Killed process 2211 (python) total-vm:91234567kB, anon-rss:65432100kB, file-rss:0kB"
TORCH = "[rank{0}]:[E1129 09:00:0{1}.000000000 ProcessGroupNCCL.cpp:683] [Rank {0}] "
WATCHDOG = (
    TORCH
    + "Watchdog caught collective operation timeout: WorkNCCL(SeqNum={2}, OpType=ALLTOALL_BASE, NumelIn=1024, "
    + "NumelOut=1024, Timeout(ms)=600000) ran for 600021 milliseconds before timing out.\n"
)
RAS = """Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          4            1          8        8

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         4         8         8   RUNNING      OK
"""
RAS_MISMATCH = """
Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  7 ranks have launched up to operation 6650
  1 ranks have launched up to operation 6649
  Rank 5 -- GPU 1 managed by process 483072 on node 10.1.0.7
"""
RAS_INCOMPLETE = """
Errors
======

#0-0 (27a079b828ff1a75) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 2 -- GPU 2 managed by process 902 on node 10.0.0.1
"""
RAS_DEAD = """
Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 902 on node 10.0.0.1 managing GPU 2
"""
RAS_JSON = (
    '{{"nccl_version": "2.28.7", "communicators": [{{"size": 2, "ranks": [{{"comm_rank": 0, "coll_op_counts": '
    '{{"AllGather": {0}}}}}, {{"comm_rank": 1, "coll_op_counts": {{"AllGather": {1}}}}}]}}]}}\n'
)
SMI_TABLE = """+---------------------------------------------------------------------------------------+
| Processes:                                                                            |
|  GPU   GI   CI        PID   Type   Process name                            GPU Memory |
|        ID   ID                                                             Usage      |
|=======================================================================================|
{}+---------------------------------------------------------------------------------------+
"""


def held(gpu: int, pid: int, mib: int) -> str:
    return f"|    {gpu}   N/A  N/A   {pid:7}      C   /usr/bin/python3                           {mib:6}MiB |\n"


RECORDED_TRIGGERS: dict[str, list[Recorded]] = {
    "NVL001": [
        Recorded(links("NVIDIA A100-SXM4-40GB", "+" * 12, "+" * 5 + "-" + "+" * 6), r"GPU 1: NVLink degraded, link 5"),
        Recorded(
            links("NVIDIA H100 80GB HBM3", "+" * 18, "-" * 18), r"GPU 1 \(NVIDIA H100 80GB HBM3\): all NVLinks are down"
        ),
        Recorded(links("NVIDIA H100 PCIe", "-" * 18), "right if no bridge is fitted"),
        Recorded(links("NVIDIA X9000", "+++-"), "GPU 0: NVLink degraded"),
        Recorded(
            "| NvLink Link Status |\nGPUs:\n    gpuId 0:\n        U U U U U U\n    gpuId 1:\n        D D D D D D\n"
            "NvSwitches:\n    physicalId 8:\n        U U X X U U\n",
            "GPU 1: all NVLinks are down",
        ),
        Recorded(links("NVIDIA B200", "+" * 18, "+" * 18, "+" * 7), "GPU 2 ends after 7 of 18 links"),
        Recorded(
            "GPU 4: NVIDIA H200 (UUID: GPU-1)\nNVML: Unable to retrieve NVLink information as all links are inActive\n",
            r"GPU 4 \(NVIDIA H200\): all NVLinks are down",
        ),
    ],
    "NVL011": [
        Recorded(
            "GPU 1: NVIDIA B200 (UUID: GPU-1)\n\t Link 4: Effective Errors: 0\n\t Link 4: Effective BER: 3e-9\n"
            "\t Link 4: Symbol BER: 15e-255\n",
            r"1 NVLinks have .*worst GPU 1 link 4: 3e-09 \(effective\)",
        )
    ],
    "GPU015": [
        Recorded(peer_matrix("CNS", "w"), r"GPU0-GPU1, GPU1-GPU0.*the chipset does not support it .*GPU0 write GPU1"),
        Recorded(peer_matrix("DR"), "switched off in the driver"),
        Recorded(peer_matrix("GNS"), "the GPU does not support it"),
    ],
    "NET007": [
        Recorded(rails("10.1.0.7/24", "10.2.0.7/24"), "eth2, eth3 have a subnet each and no route out"),
        Recorded(
            rails("10.1.0.7/24", "10.2.0.7/24") + "32765:\tfrom 10.1.0.7 lookup 101\n",
            "^eth3 have a subnet each",
        ),
    ],
    "NVL002": [
        Recorded(
            "GPU 0: NVIDIA H200 (UUID: GPU-1)\n\t Link 0: Replay Errors: 3\n\t Link 0: Recovery Errors: 0\n"
            "\t Link 0: CRC Errors: 0\nGPU 0: NVIDIA H200 (UUID: GPU-1)\n\t Link 0: Replay Errors: 9\n",
            "Replay errors rise: 3, then 9",
        ),
        Recorded(
            "GPU 1: NVIDIA H200 (UUID: GPU-1)\n\t Link 2: CRC Errors: 65535\n", "link 2: CRC errors are at .* ceiling"
        ),
        Recorded("GPU 1: NVIDIA H200 (UUID: GPU-1)\n\t Link 2: Recovery Errors: 5\n", "takes two readings"),
    ],
    "NVL003": [
        Recorded(
            smi_q(FABRIC.format(state="Completed", status="Insufficient Resources", bandwidth="N/A", route="False")),
            "Insufficient Resources",
        ),
        Recorded(
            smi_q(FABRIC.format(state="Completed", status="Success", bandwidth="Degraded", route="True")),
            "route",
        ),
        Recorded(
            "Fabric\nState : Completed\nStatus : Success\nHealth\nRoute Unhealthy : True\n", "route unhealthy: True"
        ),
        Recorded(smi_q("    Fabric\n        State : In Progress\n        Status : N/A\n"), "state In Progress"),
        Recorded(
            smi_q(
                "    Fabric\n        State : Completed\n        Status : Success\n        Health\n            "
                "Summary : Unhealthy\n"
            ),
            "health",
        ),
        Recorded(
            smi_q(FABRIC.format(state="Completed", status="Success", bandwidth="N/A", route="False"), "NVIDIA GB200"),
            "ClusterUUID is zero",
        ),
    ],
    "GPU004": [
        Recorded(
            SMI_TABLE.format("".join([held(0, 100, 71000), *(held(0, pid, 522) for pid in (101, 102, 103))])),
            "contexts of 3 further processes of the same job, ~522 MiB",
        ),
        Recorded(
            "gpu_bus_id, pid, process_name, used_gpu_memory [MiB]\n"
            "00000000:19:00.0, 100, python, 71000 MiB\n00000000:19:00.0, 101, python, 540 MiB\n"
            "00000000:3B:00.0, 101, python, 70000 MiB\n",
            "1 processes that work on another GPU hold 540 MiB on GPU 00000000:19:00.0",
        ),
    ],
    "GPU005": [Recorded(smi_q(REASONS.format(slow="Active")), "hw slowdown, hw thermal slowdown")],
    "GPU006": [
        Recorded(smi_q(PCIE.format(generation=5, width=8, state="P0", busy=98)), "PCIe link width is 8 of 16"),
        Recorded(smi_q(PCIE.format(generation=3, width=16, state="P0", busy=98)), "PCIe link generation is 3 of 5"),
    ],
    "GPU007": [
        Recorded(smi_q(MEMORY.format(mig="Disabled", uncorrectable=0, pending="Yes", failed="No")), "pending: yes"),
        Recorded(smi_q(MEMORY.format(mig="Disabled", uncorrectable=2, pending="No", failed="No")), "2 uncorrectable"),
        Recorded(smi_q(MEMORY.format(mig="Disabled", uncorrectable=0, pending="No", failed="Yes")), "failure occurred"),
    ],
    "GPU008": [Recorded(smi_q(MEMORY.format(mig="Enabled", uncorrectable=0, pending="No", failed="No")), "MIG is on")],
    "GPU009": [
        Recorded(
            "Unable to determine the device handle for GPU0000:5D:00.0: Unknown Error\n", "5D:00.0 cannot be read"
        ),
        Recorded("ibwarn: [7] mad_rpc: failed\nFailed to query port mlx5_4\n", "mlx5_4 cannot be read"),
    ],
    "TOPO001": [
        Recorded(
            matrix("GPU0 X NV18 NV18 NODE\nGPU1 NV18 X NV18 NODE\nGPU2 NV18 NV18 X NODE\nGPU3 NODE NODE NODE X"),
            "GPU3 is off NVLink.*NODE",
        ),
        Recorded(matrix("GPU0 X NV18 NV16\nGPU1 NV18 X NV18\nGPU2 NV16 NV18 X"), "1 pairs have fewer .*GPU0-GPU2 16"),
    ],
    "TOPO002": [
        Recorded(matrix("GPU0 X SYS SYS\nGPU1 SYS X NODE"), "GPU0 reach every adapter across"),
        Recorded(matrix("GPU0 X NV18 PIX\nGPU1 NV18 X NODE"), "GPU1 have no adapter of their own"),
        Recorded(MESH, "4 GPUs share 2 near adapters"),
    ],
    "TOPO003": [
        Recorded(matrix("GPU0 X NV4 PXB SYS\nGPU1 NV4 X PXB SYS"), r"NIC1 \(mlx5_1\) are near no GPU"),
        Recorded(matrix("GPU0 X NV4 PXB SYS\nGPU1 NV4 X PXB SYS") + "\nNCCL_IB_HCA=mlx5\n", "NCCL_IB_HCA picks mlx5_1"),
    ],
    "TOPO004": [
        Recorded(matrix("GPU0 X PIX SYS\nGPU1 PIX X SYS\nGPU2 SYS SYS X"), r"over PCIe; .*GPU0-GPU1 \(PIX\)"),
    ],
    "TOPO005": [
        Recorded(
            lspci("SrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-"),
            "16:00.0.*slow or hangs",
        ),
        Recorded(lspci("SrcValid+ TransBlk- ReqRedir- CmpltRedir- UpstreamFwd-"), "by itself"),
        Recorded(
            lspci(
                "SrcValid+ ReqRedir+ UpstreamFwd+", "00:03.0 Ethernet controller: Red Hat, Inc. Virtio network device\n"
            ),
            "a virtual machine needs that",
        ),
    ],
    "IB002": [
        Recorded(ibstat("Down", "Polling", 10), "mlx5_0:1 is Down, physical state Polling.*10 Gb/s means nothing"),
        Recorded(ibstat("Down", "Disabled"), "Down, physical state Disabled"),
        Recorded(ibstat("Initializing", "LinkUp"), "INITIALIZING: no subnet manager"),
        Recorded(ibstat(lid=0, sm=0), "active without a subnet manager"),
        Recorded(
            ibstat(ports="\tPort 2:\n\t\tState: Down\n\t\tPhysical state: Polling\n\t\tRate: 10\n"), "mlx5_0:2 is Down"
        ),
        Recorded(ibstat() + ibstat("Down", "Polling"), "mlx5_0:1 on host 2 is Down"),
        Recorded("".join(line.strip() + "\n" for line in ibstat("Down", "Polling").splitlines()), "mlx5_0:1 is Down"),
    ],
    "IB003": [
        Recorded(devinfo(1024, layer="Ethernet"), "active_mtu 1024 of 4096: .*GIN GDAKI"),
        Recorded(devinfo(2048), "active_mtu 2048 of 4096: the switch"),
        Recorded(devinfo(2048, state="active (4)"), "active_mtu 2048 of 4096"),
    ],
    "IB004": [Recorded(devinfo(2048, 2048), "max_mtu of 2048: peers at 4096")],
    "IB005": [
        Recorded(
            f"host: gpu-01\n{devinfo(4096)}\nhost: gpu-02\n{devinfo(1024)}",
            "mlx5_0:1 has another MTU .*gpu-01 4096, gpu-02 1024",
        ),
        Recorded(devinfo() + devinfo(name="mlx5_1") + devinfo(1024, name="mlx5_2"), "mlx5_2:1 1024 against 4096"),
    ],
    "IB006": [
        Recorded(
            ibstatus(("mlx5_0", "400 Gb/sec (4X NDR)", "InfiniBand"), ("mlx5_9", "100 Gb/sec (4X EDR)", "Ethernet")),
            r"mlx5_9 \(100 Gb/s Ethernet\) is not a compute rail",
        ),
        Recorded(
            ibstatus(("mlx5_0", "400 Gb/sec (4X NDR)", "InfiniBand"), ("mlx5_9", "100 Gb/sec (4X EDR)", "Ethernet"))
            + "\nexport NCCL_IB_HCA=mlx5_9\n",
            "NCCL_IB_HCA selects mlx5_9",
        ),
    ],
    "IB007": [
        Recorded(counters(link_downed=255), "link_downed of mlx5_3:1 is saturated at 255"),
        Recorded(counters(symbol_error=7) + counters(symbol_error=70), "symbol_error of mlx5_3:1 rises: 7, then 70"),
        Recorded(counters(symbol_error=7), "counted 7"),
    ],
    "IB008": [
        Recorded(
            f"== gpu-01 ==\n{gid_table(3)}\n== gpu-02 ==\n{gid_table(5)}", "differs between nodes: gpu-01 3, gpu-02 5"
        ),
        Recorded(gid_table(3) + gid_table(5), "differs between nodes"),
        Recorded(
            "".join(
                f"{host}: mlx5_0 1 {index} 0000:0000:0000:0000:0000:ffff:0a01:0007 10.1.0.7 v2 eth2\n"
                for host, index in (("gpu-01", 3), ("gpu-02", 4))
            ),
            "differs between nodes: gpu-01 3, gpu-02 4",
        ),
        Recorded(
            "".join(
                f"{host}:/sys/class/infiniband/mlx5_0/ports/1/{name}/{index}:{value}\n"
                for host, index in (("gpu-01", 3), ("gpu-02", 5))
                for name, value in (("gids", "0000:0000:0000:0000:0000:ffff:0a01:0007"), ("gid_attrs/types", "RoCE v2"))
            ),
            "differs between nodes: gpu-01 3, gpu-02 5",
        ),
        Recorded(
            f"gpu-01$ show_gids\n{gid_table(3)}gpu-02$ show_gids\n{gid_table(5)}NCCL_IB_GID_INDEX=3\n",
            "GID index 3 is forced.*gpu-02",
        ),
        Recorded(
            "".join(
                f"{host}$ cat /sys/class/infiniband/mlx5_0/ports/1/gids/{index}\n"
                f"0000:0000:0000:0000:0000:ffff:0a01:0007\n"
                f"{host}$ cat /sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/{index}\nRoCE v2\n"
                for host, index in (("gpu-01", 3), ("gpu-02", 5))
            ),
            "differs between nodes: gpu-01 3, gpu-02 5",
        ),
        Recorded(
            "/sys/class/infiniband/mlx5_0/ports/1/gids/0 = fe80:0000:0000:0000:5e25:73ff:fe00:0001\n"
            "/sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/0 = RoCE v2\n",
            "has no RoCE v2 IPv4 entry",
        ),
    ],
    "IB009": [
        Recorded("$ cat /sys/class/infiniband/mlx5_0/tc/1/traffic_class\nGlobal tclass=106\n", "traffic class 106"),
    ],
    "IB010": [
        Recorded(qos("00000000"), "eth2: no priority is lossless"),
        Recorded(qos("00010000", "pcp"), "eth2 trusts VLAN priorities"),
    ],
    "GPU010": [
        Recorded(
            warn("Duplicate GPU detected : rank 5 and rank 1 both on CUDA device 19000"),
            "ranks 1, 5 are all on the same GPU",
        ),
    ],
    "GPU011": [
        Recorded(
            KERNEL
            + "Nov 29 09:01:00 gpu-07 kernel: NVRM: Xid (PCI:0000:5d:00): 79, pid=77, GPU has fallen off the bus.\n",
            "Xid 79 on 0000:5d:00",
        ),
        Recorded(
            "[ 1234.567890] NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6)\n",
            "Xid 149 .*fabric",
        ),
        Recorded(
            "kernel: NVRM: Xid (PCI:0000:3b:00): 45, pid=9, name=python, Ch 00000008 caused by previous Xid 74\n",
            "Xid 74",
        ),
        Recorded("[ 99.000001] NVRM: Xid (PCI:0000:3b:00): 211, something new\n", "Xid 211.*see NVIDIA's list"),
    ],
    "GPU012": [Recorded(warn("NVML: Driver/library version mismatch"), "driver and library versions differ")],
    "GPU013": [
        Recorded(
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
            "NVIDIA driver is installed and running.\n",
            "cannot reach the driver",
        )
    ],
    "IB018": [
        Recorded(
            said("NET/IB : Using [0]mlx5_an0:1/RoCE [1]mlx5_ib0:1/IB [RO]; OOB eth0:10.0.0.7<0>"),
            r"takes Ethernet adapters \(mlx5_an0\)",
        )
    ],
    "NVL004": [
        Recorded(
            "Nov 29 09:00:00 gpu-07 nv-fabricmanager[88]: request to query NVSwitch device information from "
            "NVSwitch driver "
            "failed with error:WARNING Nothing to do [NV_WARN_NOTHING_TO_DO]\n",
            "not applicable here",
        ),
        Recorded(
            KERNEL + "Nov 29 09:00:00 gpu-07 nv-fabricmanager[88]: fabric manager NVIDIA GPU driver interface version "
            "580.65.06 does not match with driver version 570.1. version mismatch\n",
            "different versions",
        ),
        Recorded(
            "Nov 29 09:00:00 gpu-07 systemd[1]: nvidia-fabricmanager.service: Failed with result 'exit-code'.\n",
            "the fabric manager failed on gpu-07",
        ),
    ],
    "NVL005": [Recorded(warn("Cuda failure 802 'system not yet initialized'"), "fabric manager is not running")],
    "NVL006": [
        Recorded(
            warn(
                "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 16777216 : CUDA error 401 'the operation'"
            ),
            "multicast memory",
        )
    ],
    "NVL007": [
        Recorded(
            KERNEL + "[ 88.1] nvidia-nvswitch0: SXid (PCI:0000:85:00.0): 20034, Fatal, Link 30 LTSSM Fault Up\n",
            "SXid 20034",
        )
    ],
    "NVL008": [Recorded(warn("Cuda failure 800 'operation not permitted'"), "IMEX channel")],
    "GDR002": [
        Recorded(
            said("NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'"),
            "disabled for mlx5_0 on gpu-07: no peer-memory",
        ),
        Recorded(
            said("NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'") + "nvidia_peermem         16384  0\n",
            "loaded but used by nothing",
        ),
    ],
    "GDR003": [
        Recorded(
            DEEP_EP + "/opt/nvshmem/src/modules/transport/ibrc/ibrc.cpp:nvshmemt_init:1850: neither nv_peer_mem, or "
            "nvidia_peermem detected. Skipping transport.\n",
            "nvidia_peermem is not loaded",
        )
    ],
    "GDR004": [
        Recorded(
            KERNEL + "nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context, skipping\n",
            "invalid contexts",
        )
    ],
    "GDR005": [Recorded(warn("Call to ibv_reg_dmabuf_mr failed with error Operation not supported"), "DMA-BUF failed")],
    "GDR006": [
        Recorded(
            DEEP_EP + "src/host/transport/transport.cpp:420: init failed for transport: IBGDA\n",
            "could not start IBGDA",
        )
    ],
    "GDR007": [Recorded(DEEP_EP + "ibgda.cpp:2000: cannot allocate mlx5dv_devx_uar\n", "lacks RDMA devices")],
    "GDR008": [
        Recorded(DEEP_EP + "src/host/topo/topo.cpp:469: [GPU 3] Peer GPU 11 is not accessible, exiting ...\n", "no way")
    ],
    "IB011": [
        Recorded(
            warn(
                "NET/IB: Got completion from peer 10.1.0.9<41000> with status=12 opcode=0 len=0 vendor err 129 (Send)"
            ),
            "status 12.*on rank 5 towards 10.1.0.9",
        )
    ],
    "IB012": [
        Recorded(
            warn("NET/IB : mlx5_2:1 Got async event : local access violation work queue error"),
            "suspect an MTU mismatch",
        ),
        Recorded(
            warn("NET/IB : Got completion from peer 10.1.0.9<4> with status=9 opcode=1 len=0 vendor err 138"),
            "status 9",
        ),
    ],
    "IB013": [
        Recorded(warn("NET/IB : Got completion with error 4, opcode 0, len 0, vendor err 81"), "local protection error")
    ],
    "IB014": [
        Recorded(warn("NET/IB : mlx5_2:1 Got async event : port error"), "a port went down"),
        Recorded(INFO + KERNEL + "[ 5.000001] mlx5_core 0000:1b:00.0 eth2: Link down\n", "a port went down"),
    ],
    "IB015": [
        Recorded(
            said("Rank 3 has 7 local Net devices (max 8).")
            + said("Detected mixed local Net device counts across ranks (min 7, max 8). Ignoring."),
            r"\(min 7, max 8\): rank 3 has 7 of 8",
        )
    ],
    "IB016": [Recorded(warn("Call to ibv_modify_qp failed with 22 Invalid argument, on dev mlx5_0:1"), "GID index")],
    "IB017": [Recorded(warn("Failed to open libibverbs.so[.1]"), "libibverbs cannot be loaded")],
    "NET003": [
        Recorded("FI_PROVIDER=efa\n" + said("NET/Plugin: No plugin found (libnccl-net.so)"), "NCCL runs on sockets"),
        Recorded("LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib\n" + said("Using network Socket"), "NCCL runs on sockets"),
    ],
    "NET004": [Recorded(warn("Bootstrap : no socket interface found"), "no socket interface")],
    "NET005": [
        Recorded(
            warn("Net : connecting to address  with family 59936 is neither AF_INET(2) nor AF_INET6(10)"),
            "unusable family",
        )
    ],
    "LIM006": [
        Recorded(
            warn("Call to posix_fallocate failed : No space left on device")
            + warn("Error while creating shared memory segment /dev/shm/nccl-Ab12Cd (size 4194656)"),
            "no space left for a segment of 4194656 B",
        ),
        Recorded(warn("Error: failed to extend /dev/shm/nccl-Ab12Cd to 9637892 bytes"), "for a segment of 9637892 B"),
        Recorded(
            warn("Error: failed to extend /dev/shm/nccl-Ab12Cd to 4194660 bytes, error: No space left on device (28)"),
            "/dev/shm is too small",
        ),
    ],
    "LIM007": [Recorded(warn("Call to ibv_reg_mr failed with error Cannot allocate memory"), "limit of locked memory")],
    "LIM008": [Recorded(warn("Accept failed: Too many open files"), "ran out of file descriptors")],
    "LIM009": [Recorded(warn("unlink shared memory /dev/shm/nccl-Ab12Cd failed, error: No such file"), "RemoveIPC")],
    "LIM010": [Recorded(warn("Error while attaching to shared memory segment /dev/shm/nccl-x (size 0)"), "NUMA calls")],
    "LIB003": [
        Recorded(warn("Mismatched NCCL version detected : rank 0 22803 rank 3 22707"), "different builds"),
        Recorded(warn("Message truncated : received 64 bytes instead of 32"), "different builds"),
    ],
    "LIB004": [
        Recorded(
            warn("ncclConfig_t argument must be initialized via NCCL_CONFIG_INITIALIZER"),
            "another version of the header",
        ),
        Recorded(warn("config magic mismatch: got 0x0"), "another version of the header"),
    ],
    "LIM014": [
        Recorded(
            KERNEL.replace("nvidia-nvlink: Nvlink Core is being initialized, major device number 511", OOM),
            "killer ended a process on gpu-07",
        ),
        Recorded(KERNEL + f"[ 912.345678] Memory cgroup {OOM[0].lower()}{OOM[1:]}\n", "killer ended a process"),
        Recorded(
            "slurmstepd: error: Detected 1 oom_kill event in StepId=440575.0. Some tasks have been OOM Killed.\n",
            "killer ended a process",
        ),
        Recorded(
            "slurmstepd: error: Detected 2 oom-kill event(s) in step 3756240.batch cgroup.\n", "killer ended a process"
        ),
        Recorded(
            "srun: error: nid001277: tasks 1-3: Out Of Memory\nsrun: Terminating StepId=440575.0\n",
            "killer ended a process",
        ),
    ],
    "LIM015": [
        Recorded(
            "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total "
            "capacity of 139.80 GiB of which 1.12 GiB is free.\n",
            "no memory left on rank 3 for 2.00 GiB",
        )
    ],
    "LIM016": [
        Recorded("Segmentation fault (core dumped)\n", "a process crashed"),
        Recorded(
            KERNEL + "[ 88.123456] python[2211]: segfault at 0 ip 00007f2b sp 00007ffd error 4 in libnccl.so.2\n",
            "crashed",
        ),
        Recorded("srun: error: Orion-18-69: task 289: Bus error\n", "a process crashed"),
        Recorded(
            "mpirun noticed that process rank 3 with PID 0 on node gpu-07 exited on signal 11 (Segmentation fault).\n",
            "a process crashed on rank 3",
        ),
    ],
    "LIM017": [
        Recorded(
            "mpirun noticed that process rank 3 with PID 0 on node gpu-07 exited on signal 9 (Killed).\n",
            "from outside .signal 9. on rank 3",
        ),
        Recorded("srun: error: gpu-07: task 3: Killed\n", "from outside"),
        Recorded("YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n", "from outside"),
        Recorded("  traceback : Signal 9 (SIGKILL) received by PID 2211\n", "from outside"),
        Recorded("/var/spool/slurmd/job00191/slurm_script: line 28:  8156 Killed   python3 main.py\n", "from outside"),
    ],
    "MPI003": [Recorded("mca:mpi:base:param:mpi_built_with_cuda_support:value:false\n", "built without CUDA")],
    "NCCL014": [
        Recorded(
            warn("Cuda failure 'operation failed due to a previous error during capture'")
            + warn("Attempt to use communicator before the previous operation returned ncclSuccess"),
            "the communicator is poisoned",
        )
    ],
    "NCCL015": [
        Recorded(WATCHDOG.format(0, 1, 900) + WATCHDOG.format(2, 1, 899), "rank 2 still at 899, others wait at 900"),
        Recorded(WATCHDOG.format(0, 1, 900) + WATCHDOG.format(2, 1, 900), "timed out on ranks 0, 2"),
    ],
    "NCCL016": [
        Recorded(RAS, "a snapshot"),
        Recorded(RAS + WATCHDOG.format(0, 1, 900), "one snapshot proves nothing"),
        Recorded(RAS_JSON.format(41, 40) + RAS_JSON.format(41, 40), "rank 1 is behind at 40 of 41"),
        Recorded(2 * (RAS + RAS_MISMATCH), "no rank moved between two answers; .*rank 5 is behind at 6649 of 6650"),
    ],
    "NCCL020": [
        Recorded(RAS + RAS_INCOMPLETE, "does not reach rank 2 .one answer only"),
        Recorded(2 * (RAS + RAS_INCOMPLETE), "does not reach rank 2.*process 902 on node 10.0.0.1"),
        Recorded(RAS + RAS_DEAD, "does not reach process 902 on node 10.0.0.1.*considered dead"),
    ],
    "EP201": [
        Recorded(
            "".join(
                f"Warning: NCCL EP timeout for dispatch receive, rank {rank}, local_expert_idx 3, src_rank {source}\n"
                for rank, source in ((0, 5), (1, 5), (2, 5), (5, 1), (3, 1))
            ),
            "dispatch timed out: suspect rank 5, for which 3 of 5 waiting ranks wait",
        ),
        Recorded(
            "DeepEP dispatch NVL receiver timeout, channel: 1, RDMA: 0, nvl: 2, src RDMA: 1, src nvl: 5, start: 0, "
            "end: 0\n",
            "suspect rank RDMA 1/NVL 5",
        ),
        Recorded("DeepEP timeout for combine receivers, rank 3, responsible_channel = 4\n", "do not say on whom"),
    ],
    "EP202": [
        Recorded(
            DEEP_EP
            + "RuntimeError: Assertion error csrc/deep_ep.cpp:1105 'x.size(0) <= num_max_dispatch_tokens_per_rank'\n",
            "smaller than the batch",
        )
    ],
    "EP203": [
        Recorded(
            "".join(
                f"{PREFIX} NCCL INFO Channel 00/0 : {a}[{a % 8}] -> {b}[{b % 8}] via P2P/IPC\n"
                for a, b in ((0, 1), (1, 2), (7, 8), (8, 9))
            ),
            "ranks 0, 8 are all on GPU 0",
        )
    ],
    "EP204": [
        Recorded(DEEP_EP + "Fatal IPC Failure: cudaIpcOpenMemHandle returned invalid argument\n", "mapping a peer's")
    ],
    "EP205": [
        Recorded(
            "NCCL EP: max_recv_tokens_per_rank must be identical across ranks (0: 512, 3: 1024)\n", "must be identical"
        )
    ],
    "EP206": [
        Recorded(
            DEEP_EP + "Assertion failed: ibgda_get_state()->num_rc_per_pe >= num_channels\n", "too few queue pairs"
        )
    ],
    "EP207": [Recorded("NCCL EP requires GIN, but GIN is not supported\n", "needs GIN")],
    "EP208": [Recorded(DEEP_EP + "combine: Unsupported type for x: float8_e4m3fn\n", "does not take")],
}

HEALTHY_NCCL = Recorded(
    INFO
    + said("NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.7<0>")
    + said("GPU Direct RDMA Enabled for HCA 0 'mlx5_0'")
    + said("Channel 00/0 : 2[2] -> 3[3] via P2P/IPC")
    + said(
        "comm 0x55cc8aa86c70 rank 3 nranks 8 cudaDev 3 nvmlDev 3 busId 5d000 commId 0x65e0bd6ee7449db4 - Init COMPLETE"
    )
)
HEALTHY_EP = Recorded(DEEP_EP + "NCCL EP: using timeout=96993ms (env=unset, source=compile-time default)\n")
HEALTHY_KERNEL = Recorded(
    KERNEL
    + "".join(
        f"Nov 29 09:01:00 gpu-07 kernel: NVRM: Xid (PCI:0000:5d:00): {code}, pid=1, name=python\n"
        for code in (13, 31, 43, 45, 63, 92)
    )
)
HEALTHY_TORCH = Recorded(
    "[rank0]:[I1129 09:00:00.000000000 ProcessGroupNCCL.cpp:970] [PG ID 0 Rank 0] ProcessGroupNCCL created\n"
)
HEALTHY_PROCESSES = Recorded(
    KERNEL
    + "Nov 29 09:00:02 gpu-07 kernel: oom_reaper: waiting\n"
    + "srun: job 4711 queued and waiting for resources\n"
    + "srun: Force Terminated StepId=4711.0\n"
    + "Nov 29 09:00:03 gpu-07 kernel: pcieport 0000:00:01.0: PCIe Bus Error: severity=Corrected, type=Physical Layer\n"
    + "Nov 29 09:00:03 gpu-07 kernel: i2c i2c-0: bus error\n"
    + "note: a wrong count may cause a segmentation fault\n"
    + "Changes: Segmentation fault in libfoo was mended\n"
    + "torch.distributed.elastic: Signal 15 (SIGTERM) received by PID 2211\n"
)
_CALM = {
    "log.nccl": HEALTHY_NCCL,
    "log.expert_parallel": HEALTHY_EP,
    "log.kernel": HEALTHY_KERNEL,
    "log.frameworks": HEALTHY_TORCH,
    "log.processes": HEALTHY_PROCESSES,
}

RECORDED_PEACEFUL: dict[str, list[Recorded]] = {
    "NVL008": [HEALTHY_NCCL, Recorded(warn("Cuda failure 900 'operation not permitted when stream is capturing'"))],
    "NVL001": [
        Recorded(links("NVIDIA H200", "+" * 18, "+" * 18)),
        Recorded(links("NVIDIA H100 NVL", "++++--++++--++++--")),  # 12 of 18 by design
        Recorded(links("NVIDIA A100 80GB PCIe", "+" * 12)),
    ],
    "NVL011": [
        Recorded("GPU 0: NVIDIA B200 (UUID: GPU-1)\n\t Link 0: Effective BER: 15e-255\n\t Link 0: Symbol BER: 1e-14\n")
    ],
    "GPU015": [Recorded(peer_matrix("OK")), Recorded(peer_matrix("NS", "n"))],
    "NET007": [
        Recorded(rails("10.1.0.7/16", "10.1.0.8/16")),
        Recorded(rails("10.1.0.7/24", "10.2.0.7/24") + "NCCL_CROSS_NIC=0\n"),
        Recorded(
            rails(
                "10.1.0.7/24",
                "10.2.0.7/24",
                routes="10.0.0.0/8 via 10.1.0.1 dev eth2\n10.0.0.0/8 via 10.2.0.1 dev eth3 metric 9\n",
            )
        ),
        Recorded(
            rails("10.1.0.7/24", "10.2.0.7/24")
            + "0:\tfrom all lookup local\n32764:\tfrom 10.1.0.7 lookup 101\n32765:\tfrom 10.2.0.0/24 lookup 102\n"
        ),
    ],
    "NVL002": [Recorded("GPU 0: NVIDIA H200 (UUID: GPU-1)\n\t Link 0: Replay Errors: 0\n\t Link 0: CRC Errors: 0\n")],
    "NVL003": [
        Recorded(smi_q(FABRIC.format(state="Completed", status="Success", bandwidth="N/A", route="False"))),
        Recorded(smi_q("    Fabric\n        State : N/A\n        Status : N/A\n")),
        Recorded(
            smi_q(
                "    Fabric\n        State : Completed\n        Status : Success\n        Health\n            "
                "Summary : Healthy\n"
                "            Bandwidth : Full\n            Route Unhealthy : False\n            Incorrect "
                "Configuration : None\n"
            )
        ),
        Recorded(smi_q("")),
    ],
    "GPU004": [
        Recorded(SMI_TABLE.format(held(0, 100, 71000) + held(1, 101, 70990))),
        Recorded(
            SMI_TABLE.format(
                "|  No running processes found                                                           |\n"
            )
        ),
        Recorded("00000000:19:00.0, 100, python, 71000 MiB\n00000000:3B:00.0, 100, python, 71000 MiB\n"),
    ],
    "GPU005": [Recorded(smi_q(REASONS.format(slow="Not Active")))],
    "GPU006": [
        Recorded(smi_q(PCIE.format(generation=5, width=16, state="P0", busy=98))),
        Recorded(smi_q(PCIE.format(generation=1, width=16, state="P8", busy=0))),  # idle links save power
    ],
    "GPU007": [Recorded(smi_q(HEALTHY_MEMORY))],
    "GPU008": [Recorded(smi_q(HEALTHY_MEMORY))],
    "GPU009": [],
    "TOPO001": [
        Recorded(MESH),
        Recorded(matrix("GPU0 X NV4 SYS SYS\nGPU1 NV4 X SYS SYS\nGPU2 SYS SYS X NV4\nGPU3 SYS SYS NV4 X")),
        Recorded(matrix("GPU0 X PIX\nGPU1 PIX X")),
    ],
    "TOPO002": [Recorded(OWN_RAILS), Recorded(matrix("GPU0 X NV18\nGPU1 NV18 X"))],
    "TOPO003": [Recorded(OWN_RAILS)],
    "TOPO004": [Recorded(MESH), Recorded(matrix("GPU0 X PIX"))],
    "TOPO005": [Recorded(lspci("SrcValid- TransBlk- ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl- DirectTrans-"))],
    "IB002": [Recorded(ibstat()), Recorded(devinfo(layer="Ethernet").replace("sm_lid:\t\t\t1", "sm_lid:\t\t\t0"))],
    "IB003": [Recorded(devinfo()), Recorded(devinfo(1024, state="PORT_DOWN (1)")), Recorded(devinfo(2048, 2048))],
    "IB004": [Recorded(devinfo())],
    "IB005": [Recorded(f"host: gpu-01\n{devinfo()}\nhost: gpu-02\n{devinfo()}")],
    "IB006": [
        Recorded(
            ibstatus(("mlx5_0", "400 Gb/sec (4X NDR)", "InfiniBand"), ("mlx5_1", "400 Gb/sec (4X NDR)", "InfiniBand"))
        )
    ],
    "IB007": [
        Recorded(counters(symbol_error=0, link_downed=3, port_xmit_wait=255)),
        Recorded(
            "/sys/class/infiniband/mlx5_3/fw_ver = 28.41.1000\n"
            + counters(link_downed=1)
            + "/sys/class/infiniband/mlx5_3/fw_ver = 28.41.1000\n"
            + counters(link_downed=4)
        ),  # two hosts, not two readings
        Recorded(counters(link_downed=1, port_rcv_data=900) + counters(link_downed=4, port_rcv_data=7)),
    ],
    "IB008": [
        Recorded(f"== gpu-01 ==\n{gid_table(3)}\n== gpu-02 ==\n{gid_table(3)}"),
        Recorded(gid_table(3) + "NCCL_IB_GID_INDEX=3\n"),
    ],
    "IB009": [
        Recorded("Global tclass=0\n"),
        Recorded("Global tclass=106\nNCCL_IB_TC=106\n"),
        Recorded("Global tclass=106\nNCCL_GIN_IB_TC=106\n"),
    ],
    "IB010": [Recorded(qos("00010000"))],
    "NCCL016": [],
    "NCCL020": [Recorded(RAS), Recorded(2 * (RAS + RAS_MISMATCH)), Recorded(RAS + RAS_INCOMPLETE + RAS)],
    "NET003": [
        HEALTHY_NCCL,
        Recorded("FI_PROVIDER=efa\n" + INFO),
        Recorded(said("NET/Plugin: No plugin found (libnccl-net.so)")),
    ],
    "EP203": [
        HEALTHY_NCCL,
        Recorded("".join(f"{PREFIX} NCCL INFO Channel 00/0 : {a}[0] -> {a + 1}[0] via P2P/IPC\n" for a in range(4))),
        Recorded(
            "".join(
                f"gpu-0{a // 8}:1:2 [0] NCCL INFO Channel 00/0 : {a}[{a % 8}] -> {a + 1}[{a % 8 + 1}] via P2P/IPC\n"
                for a in (0, 1, 2, 8, 9, 10)
            )
        ),
    ],
}


def peaceful(code: str, need: str) -> list[Recorded]:
    """The texts that must not trigger `code`; for what logs say, a healthy log of the kind that it needs."""
    return RECORDED_PEACEFUL.get(code) or [_CALM[need]]
