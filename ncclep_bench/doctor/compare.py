"""Facts of several ranks as the facts of their group: who says what, for the checks that compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ncclep_bench.doctor.contract import Check, Finding
from ncclep_bench.doctor.records import Told
from ncclep_bench.doctor.run import run_checks
from ncclep_bench.doctor.settings import Settings, settings_of
from ncclep_bench.model.facts import Facts, told
from ncclep_bench.runtime.place import local_rank_of

COMPARED = (
    "ep.ranks",
    "ep.config",
    "ep.splits",
    "ep.calls",
    "ep.graph",
    "job.settings",
    "libraries.nccl",
    "libraries.packages",
    "limits.memlock",
    "limits.nofile",
    "limits.stack",
    "host.boot_id",
    "host.clock",
    "host.namespaces",
    "host.cpu_model",
    "host.kernel",
    "host.numa_policy",
    "mpi.build",
    "host.rdma_devices",
    "rdma.device_files",
    "rdma.ports",
    "gpus.list",
    "gpus.query",
    "network.devices",
    "network.path_mtu",
)
"""Facts that the group gets as `ranks.NAME`, dots as underscores: a list of what each rank says."""

_JOINED = ("rdma.mtu", "rdma.gids")
"""Records that name their host: checks that join compare those of several."""


def judged(checks: Sequence[Check], documents: Sequence[Facts]) -> list[Finding]:
    """What `checks` say of each document, and where there are several, of what they say together."""
    if len(documents) == 1:
        return run_checks(checks, documents[0])
    documents = sorted(documents, key=lambda facts: -1 if facts.rank is None else facts.rank)
    comparing = [check for check in checks if any(need.startswith("ranks.") for need in check.needs)]
    others = [check for check in checks if check not in comparing]
    findings = [finding for facts in documents for finding in _of_one(others, facts)]
    group = group_facts(documents)
    joining = [check for check in others if check.joins]
    findings += [finding for finding in run_checks(joining, group) if finding.verdict != "not_run"]
    return findings + run_checks(comparing, group)


def _of_one(checks: Sequence[Check], facts: Facts) -> list[Finding]:
    findings = run_checks(checks, facts)
    silent = facts.sections.keys() == {"job"}  # Of a rank that has not answered there is nothing else to say.
    return [finding for finding in findings if not silent or finding.verdict != "not_run"]


def group_facts(documents: Sequence[Facts]) -> Facts:
    """What the ranks of `documents` say of each compared fact; one that a rank lacks is compared among the rest."""
    documents = [facts for facts in documents if facts.host or facts.rank is not None]  # loose output is nobody's
    said: dict[str, list[Any]] = {
        f"ranks.{name.replace('.', '_')}": [
            _told(facts, name, facts.fact(name).value) for facts in documents if facts.fact(name).state == "value"
        ]
        for name in COMPARED
    }
    said["ranks.gpu"] = [_told(f, "gpus.list", gpu) for f in documents if (gpu := _gpu_of(f))]
    said["ranks.place"] = [_told(f, "host.boot_id", f.host) for f in documents if f.rank is not None and f.host]
    for name in _JOINED:
        # Ranks of one host see the same adapters; each record counts once.
        records = {
            msgspec.json.encode({**record, "host": host, "at": ""}): {**record, "host": host}
            for facts in documents
            for record in facts.get(name, list[dict[str, Any]]) or []
            for host in (record.get("host") or facts.host,)
        }
        said[name] = list(records.values())
    return Facts(host="", sections={}).having(
        {name: told("the ranks' facts", all_) for name, all_ in said.items() if len(all_) > 1}
    )


def _told(facts: Facts, name: str, value: Any) -> Told:
    return Told(at=facts.fact(name).source, host=facts.host, rank=facts.rank, value=value)


def _gpu_of(facts: Facts) -> str | None:
    """The GPU that a rank which follows its launcher uses, or None where launcher or GPUs are not told."""
    gpus = facts.get("gpus.list", list[dict[str, str]]) or []
    if not gpus or facts.fact("job.settings").state != "value":
        return None
    settings = settings_of(facts)
    local = local_rank_of({setting.name: setting.value for setting in settings.effective.values()})
    visible = _visible(settings, gpus)
    if local is None or not visible:
        return None
    # A launcher that shows each rank its own GPU leaves one in the list, whatever the local rank.
    return visible[local] if local < len(visible) else visible[0] if len(visible) == 1 else None


def _visible(settings: Settings, gpus: list[dict[str, str]]) -> list[str]:
    setting = settings.get("CUDA_VISIBLE_DEVICES")
    uuids = [gpu.get("uuid", "") for gpu in gpus]
    if setting is None:
        return uuids
    entries = [entry.strip() for entry in setting.value.split(",")]
    return [
        uuids[int(entry)] if entry.isdecimal() and int(entry) < len(uuids) else entry
        for entry in entries
        if entry and entry != "-1"
    ]
