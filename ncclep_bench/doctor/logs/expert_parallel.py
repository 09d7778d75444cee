"""Lines of NCCL EP, DeepEP and NVSHMEM."""

from __future__ import annotations

from ncclep_bench.doctor.logs.contract import Family, signature

_SIGNATURES = (
    signature(
        "ep_timeout",
        "timeout",
        r"(?:NCCL EP|DeepEP)\b(?!: using)(?=.*\btimeout)(?:(?=.*?\b(?P<operation>dispatch|combine)))?"
        r"(?:(?=.*?(?<!src )\brank ?[:=]? ?(?P<rank>\d+)))?(?:(?=.*?\bsrc_rank ?[:=]? ?(?P<source>\d+)))?"
        r"(?:(?=.*?(?<!src )\bRDMA: ?(?P<node>\d+), nvl: ?(?P<local>\d+)))?"
        r"(?:(?=.*?\bsrc RDMA(?: \w+)?: ?(?P<source_node>\d+)))?(?:(?=.*?\bsrc nvl(?: \w+)?: ?(?P<source_local>\d+)))?",
        effect=True,
    ),
    signature(
        "ep_capacity",
        "num_max_dispatch",
        r"(?:assert\w*).*num_max_dispatch_tokens_per_rank.*",
    ),
    signature("ep_capacity", "num_max_dispatch", r"(?:fail|exceed|must be).*num_max_dispatch_tokens_per_rank.*"),
    signature("ep_identical", "must be identical", r".*must be identical across ranks.*"),
    signature("ep_queue_pairs", "num_rc_per_pe", r".*num_rc_per_pe\s*>=\s*num_channels.*"),
    signature("ep_queue_pairs", "num_qp", r".*num_qps?_per_rank must be >=.*"),
    signature("ep_gin", "requires gin", r"NCCL EP requires GIN.*"),
    signature("ep_ipc", "ipc failure", r"Fatal IPC Failure.*"),
    signature("ep_dtype", "unsupported ", r".*Unsupported (?:data ?)?type.*"),
    signature("ep_dtype", "unsupported ", r".*unsupported dtype.*"),
    signature("ep_dtype", "nccl_invalid_data", r".*NCCL_INVALID_DATA_?TYPE.*"),
    signature("no_peermem", "nv_peer_mem", r"neither nv_peer_mem,? (?:or|nor) nvidia_peermem detected.*"),
    signature("ibgda", "transport: ibgda", r"init failed for transport: IBGDA.*"),
    signature("devx", "devx_uar", r"(?:cannot|unable to|failed to) allocate mlx5dv_devx_uar.*"),
    signature("gdrcopy", "gdrcopy", r"(?:GDRCopy open call failed|gdr_open.*fail|Unable to (?:open|load) gdrcopy).*"),
    signature(
        "peer_unreachable",
        "is not accessible",
        r"\[GPU (?P<gpu>\d+)\] Peer GPU (?P<peer>\d+) is not accessible.*",
        effect=True,
    ),
    signature(
        "nvshmem_failed", "transport map failed", r"non-zero status: \d+ building transport map failed.*", effect=True
    ),
)

LOGS = Family(("deepep", "deep_ep", "nccl ep", "nvshmem"), _SIGNATURES)
