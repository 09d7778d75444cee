"""Answers of NCCL's RAS client, as text and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ncclep_bench.doctor.parsers.contract import Parsed
from ncclep_bench.doctor.records import RasReport
from ncclep_bench.doctor.text import Line

_START = re.compile(r"Job summary", re.IGNORECASE)
_GROUP = re.compile(r"\s*\d+(?:\s+[\d-]+){5,}\s+([A-Z]{2,}(?:[,/ ][A-Z]{2,})*?)\s+([A-Z]{2,}(?:[,/ ][A-Z]{2,})*)\s*")
_REACHED = re.compile(r"\s*(\d{1,9}) ranks? (?:has|have) launched up to operation (\d{1,18})", re.IGNORECASE)
_RANK = re.compile(r"\s*Rank (\d{1,9})(?: has launched up to operation (\d{1,18}))? --(.*)", re.IGNORECASE)
_PROCESS = re.compile(r"\s*(Process \d{1,9} on node \S+)", re.IGNORECASE)
_SECTION = re.compile(
    r".*(missing communicator data|considered dead|ranks have different|errors? on \d+ rank)", re.IGNORECASE
)
"""What a section is about; its heading starts with a number sign, as comments do."""


def reports(lines: Sequence[Line]) -> Parsed:
    """Each answer in the text: states and errors of its communicators, and counts per rank where they are told."""
    found = [*_texts(lines), *_documents(lines)]
    return {"ras.reports": found} if found else {}


def _texts(lines: Sequence[Line]) -> Iterator[RasReport]:
    current: RasReport | None = None
    reached, section = 0, ""
    for line in lines:
        if _START.search(line.text):
            if current:
                yield current
            current = RasReport(at=line.at, host=line.host, states=[], errors=[], progress={}, missing={})
            section = ""
        elif current is None:
            continue
        elif match := _GROUP.fullmatch(line.text):
            current.states.append(match[1])
            current.errors.append(match[2])
        elif match := _SECTION.match(line.text):
            section = match[1].lower().partition(" ")[0]
        elif match := _REACHED.match(line.text):
            reached = int(match[2])
            current.progress[f"{match[1]} ranks"] = reached
        elif match := _RANK.match(line.text):
            if section == "missing":
                current.missing[f"rank {match[1]}"] = f"does not answer;{match[3]}"
            elif match[2] or current.progress:
                current.progress[f"rank {match[1]}"] = int(match[2] or reached)
        elif section == "considered" and (match := _PROCESS.match(line.text)):
            current.missing[match[1].lower()] = "considered dead"
    if current:
        yield current


def _documents(lines: Sequence[Line]) -> Iterator[RasReport]:
    """RAS documents: JSON that has communicators in it, one document after the other."""
    start = next((number for number, line in enumerate(lines) if line.text.lstrip().startswith("{")), None)
    if start is None:
        return
    text = "\n".join(line.text for line in lines[start:])
    decoder, position = json.JSONDecoder(), 0
    while (position := text.find("{", position)) >= 0:
        try:
            document, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return
        line = lines[start + text.count("\n", 0, position)]
        position = end
        if isinstance(document, dict) and any("communicators" in key for key in document):
            report = RasReport(at=line.at, host=line.host, states=[], errors=[], progress={}, missing={})
            _walk(document, report, "", 0)
            yield report


def _walk(node: Any, report: RasReport, communicator: str, depth: int) -> None:
    """Take states, errors, counts and missing ranks out of a node; ranks of several communicators are told apart."""
    if depth > 12:
        return
    if isinstance(node, list):
        several = sum(isinstance(item, dict) and "ranks" in item for item in node) > 1
        for number, item in enumerate(node):
            of = f" of {str(item.get('hash', number))[:32]}" if several and isinstance(item, dict) else communicator
            _walk(item, report, of, depth + 1)
        return
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if key in ("status", "state") and isinstance(value, str):
            report.states.append(value.upper())
        elif key in ("errors", "error") and isinstance(value, str):
            report.errors.append(value.upper())
        elif isinstance(value, (dict, list)):
            _walk(value, report, communicator, depth + 1)
    counts = next((value for key, value in node.items() if "count" in key and isinstance(value, dict)), None)
    rank = node.get("comm_rank", node.get("rank"))
    if not isinstance(rank, int):
        return
    if counts:
        report.progress[f"rank {rank}{communicator}"] = sum(value for value in counts.values() if type(value) is int)
    status = node.get("status")
    if isinstance(status, dict) and (status.get("considered_dead") or status.get("unresponsive")):
        said = "considered dead" if status.get("considered_dead") else "does not answer"
        report.missing[f"rank {rank}{communicator}"] = f"{said}; process {node.get('pid')} on node {node.get('host')}"
