"""Lines of torch and of the programs around NCCL."""

from __future__ import annotations

from ncclep_bench.doctor.logs.contract import Family, signature

_SIGNATURES = (
    signature(
        "watchdog",
        "watchdog",
        r"\[(?:.*?\b)?Rank (?P<rank>\d+)\].*Watchdog caught collective operation timeout: "
        r"WorkNCCL\(SeqNum=(?P<sequence>\d+), OpType=(?P<operation>\w+).*?(?:Timeout\(ms\)=(?P<timeout_ms>\d+))?",
        effect=True,
    ),
    signature("mpi_not_cuda", "mpi_built_with_cuda", r"mpi_built_with_cuda_support:value:false"),
)

LOGS = Family(("processgroupnccl", "mpi_built_with_cuda"), _SIGNATURES)
