"""Every extension point as one lazy table: name → "module:attribute", nothing imported before it is asked for."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator
from typing import Any

from ncclep_bench.errors import InputError


class Registry:
    """A named table of lazily imported objects; an unknown name lists the known ones."""

    def __init__(self, kind: str, table: dict[str, str]) -> None:
        self.kind = kind
        self.table = table

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def get(self, name: str) -> Any:
        """The object called `name`. Raises InputError for an unknown name."""
        target = self.table.get(name)
        if target is None:
            close = difflib.get_close_matches(name, self.table, n=1)
            hint = (f"did you mean {close[0]!r}? " if close else "") + f"known: {', '.join(self.table)}"
            if all(part in self.table for part in name.split(",")):
                hint = "name one at a time"
            raise InputError(f"unknown {self.kind} {name!r}", hint=hint)
        module, _, attribute = target.partition(":")
        return getattr(importlib.import_module(module), attribute)


COLLECTIVES = Registry(
    "collective",
    {
        "dispatch": "ncclep_bench.collectives.dispatch:DISPATCH",
        "combine": "ncclep_bench.collectives.combine:COMBINE",
        "dispatch_combine": "ncclep_bench.collectives.dispatch_combine:DISPATCH_COMBINE",
        "all_gather_experts": "ncclep_bench.collectives.all_gather_experts:ALL_GATHER_EXPERTS",
        "reduce_scatter_expert_grads": "ncclep_bench.collectives.reduce_scatter_expert_grads:REDUCE_SCATTER_EXPERT_GRADS",  # noqa: E501
        "padded_all_to_all": "ncclep_bench.collectives.padded_all_to_all:PADDED_ALL_TO_ALL",
        "dense_all_gather": "ncclep_bench.collectives.dense_all_gather:DENSE_ALL_GATHER",
        "dense_all_reduce": "ncclep_bench.collectives.dense_all_reduce:DENSE_ALL_REDUCE",
    },
)

BACKENDS = Registry(
    "backend",
    {
        "host": "ncclep_bench.backends.host.backend:HOST",
        "cuda": "ncclep_bench.backends.cuda.backend:CUDA",
        "nccl": "ncclep_bench.backends.nccl.backend:NCCL",
        "nccl_ep": "ncclep_bench.backends.nccl_ep:NCCL_EP",
        "in_memory": "ncclep_bench.backends.in_memory:IN_MEMORY",
    },
)

ENGINES = Registry(
    "backend of EpCommunicator",
    {
        "host": "ncclep_bench.ep.host_engine:HostEngine",
        "cuda": "ncclep_bench.ep.cuda_engine:CudaEngine",
    },
)

ROUTINGS = Registry(
    "routing",
    {
        "uniform": "ncclep_bench.routing.synthetic:Uniform",
        "zipf": "ncclep_bench.routing.synthetic:Zipf",
        "lognormal": "ncclep_bench.routing.synthetic:LogNormal",
        "group_limited": "ncclep_bench.routing.synthetic:GroupLimited",
        "round_robin": "ncclep_bench.routing.synthetic:RoundRobin",
        "all_to_one": "ncclep_bench.routing.synthetic:AllToOne",
        "measured": "ncclep_bench.routing.measured:MeasuredLoad",
        "trace": "ncclep_bench.routing.traces:RecordedTrace",
    },
)

CHECKS = Registry(
    "check family",
    {
        "config": "ncclep_bench.doctor.checks.config:CHECKS",
        "dtype": "ncclep_bench.doctor.checks.dtype:CHECKS",
        "environment": "ncclep_bench.doctor.checks.environment:CHECKS",
        "gpus": "ncclep_bench.doctor.checks.gpus:CHECKS",
        "topology": "ncclep_bench.doctor.checks.topology:CHECKS",
        "rdma": "ncclep_bench.doctor.checks.rdma:CHECKS",
        "machine": "ncclep_bench.doctor.checks.machine:CHECKS",
        "ranks": "ncclep_bench.doctor.checks.ranks:CHECKS",
        "logged_gpus": "ncclep_bench.doctor.checks.logged_gpus:CHECKS",
        "logged_gpudirect": "ncclep_bench.doctor.checks.logged_gpudirect:CHECKS",
        "logged_networks": "ncclep_bench.doctor.checks.logged_networks:CHECKS",
        "logged_setup": "ncclep_bench.doctor.checks.logged_setup:CHECKS",
        "logged_processes": "ncclep_bench.doctor.checks.logged_processes:CHECKS",
        "logged_collectives": "ncclep_bench.doctor.checks.logged_collectives:CHECKS",
        "logged_expert_parallel": "ncclep_bench.doctor.checks.logged_expert_parallel:CHECKS",
        "hang": "ncclep_bench.doctor.checks.hang:CHECKS",
        "drift": "ncclep_bench.doctor.checks.drift:CHECKS",
    },
)

SELF_TESTS = Registry(
    "family of self-tests",
    {
        "payload": "ncclep_bench.doctor.selftests.payload:SELF_TESTS",
        "leaks": "ncclep_bench.doctor.selftests.leaks:SELF_TESTS",
        "graphs": "ncclep_bench.doctor.selftests.graphs:SELF_TESTS",
        "dtypes": "ncclep_bench.doctor.selftests.dtypes:SELF_TESTS",
        "streams": "ncclep_bench.doctor.selftests.streams:SELF_TESTS",
        "tokens": "ncclep_bench.doctor.selftests.tokens:SELF_TESTS",
        "bandwidth": "ncclep_bench.doctor.selftests.bandwidth:SELF_TESTS",
        "agreement": "ncclep_bench.doctor.selftests.agreement:SELF_TESTS",
    },
)

PARSERS = Registry(
    "parser",
    {
        "topology": "ncclep_bench.doctor.parsers.gpus:topology",
        "nvlink": "ncclep_bench.doctor.parsers.gpus:nvlink",
        "query": "ncclep_bench.doctor.parsers.gpus:query",
        "table": "ncclep_bench.doctor.parsers.gpus:table",
        "peer_status": "ncclep_bench.doctor.parsers.gpus:peer_status",
        "processes": "ncclep_bench.doctor.parsers.gpus:processes",
        "unreadable": "ncclep_bench.doctor.parsers.gpus:unreadable",
        "ports": "ncclep_bench.doctor.parsers.rdma:ports",
        "counters": "ncclep_bench.doctor.parsers.rdma:counters",
        "gids": "ncclep_bench.doctor.parsers.rdma:gids",
        "qos": "ncclep_bench.doctor.parsers.rdma:qos",
        "variables": "ncclep_bench.doctor.parsers.host:variables",
        "limits": "ncclep_bench.doctor.parsers.host:limits",
        "network": "ncclep_bench.doctor.parsers.host:network",
        "routes": "ncclep_bench.doctor.parsers.host:routes",
        "rules": "ncclep_bench.doctor.parsers.host:rules",
        "mpi_build": "ncclep_bench.doctor.parsers.host:mpi_build",
        "modules": "ncclep_bench.doctor.parsers.host:modules",
        "software": "ncclep_bench.doctor.parsers.host:software",
        "access_control": "ncclep_bench.doctor.parsers.host:access_control",
        "ras": "ncclep_bench.doctor.parsers.ras:reports",
    },
)

LOGS = Registry(
    "family of logs",
    {
        "nccl": "ncclep_bench.doctor.logs.nccl:LOGS",
        "expert_parallel": "ncclep_bench.doctor.logs.expert_parallel:LOGS",
        "frameworks": "ncclep_bench.doctor.logs.frameworks:LOGS",
        "kernel": "ncclep_bench.doctor.logs.kernel:LOGS",
        "processes": "ncclep_bench.doctor.logs.processes:LOGS",
    },
)

FORMATS = Registry(
    "report format",
    {
        "console": "ncclep_bench.reporting.console:CONSOLE",
        "csv": "ncclep_bench.reporting.csv:CSV",
        "html": "ncclep_bench.reporting.html:HTML",
    },
)

FINDING_FORMATS = Registry(
    "format of findings",
    {
        "console": "ncclep_bench.reporting.findings.console:CONSOLE",
        "json": "ncclep_bench.reporting.findings.json:JSON",
        "junit": "ncclep_bench.reporting.findings.junit:JUNIT",
        "markdown": "ncclep_bench.reporting.findings.markdown:MARKDOWN",
        "html": "ncclep_bench.reporting.findings.html:HTML",
        "github": "ncclep_bench.reporting.findings.github:GITHUB",
        "nagios": "ncclep_bench.reporting.findings.nagios:NAGIOS",
    },
)
