"""Extension points: entries keep their contracts, plug-ins stand in their tables, unknown names list the known ones."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

import ncclep_bench.backends
import ncclep_bench.collectives
import ncclep_bench.doctor.checks
import ncclep_bench.doctor.logs
import ncclep_bench.doctor.parsers
import ncclep_bench.doctor.selftests
import ncclep_bench.ep
import ncclep_bench.reporting
import ncclep_bench.reporting.findings
import ncclep_bench.routing
from ncclep_bench.backends.contract import Backend
from ncclep_bench.collectives.contract import Collective
from ncclep_bench.doctor.logs.contract import Family
from ncclep_bench.errors import InputError
from ncclep_bench.registry import (
    BACKENDS,
    CHECKS,
    COLLECTIVES,
    ENGINES,
    FINDING_FORMATS,
    FORMATS,
    LOGS,
    PARSERS,
    ROUTINGS,
    SELF_TESTS,
    Registry,
)
from ncclep_bench.reporting.contract import Format
from ncclep_bench.reporting.findings.contract import FindingFormat

REGISTRIES = [COLLECTIVES, BACKENDS, ENGINES, ROUTINGS, CHECKS, SELF_TESTS, PARSERS, LOGS, FORMATS, FINDING_FORMATS]


def members(contract: type) -> set[str]:
    """Attributes and methods that a Protocol class asks for."""
    return set(inspect.get_annotations(contract)) | {name for name in vars(contract) if name[0] != "_"}


def keeps(contract: type) -> Callable[[str, Any], bool]:
    return lambda _, value: (
        not (inspect.isclass(value) or inspect.ismodule(value))
        and all(hasattr(value, name) for name in members(contract))
    )


def is_check_family(name: str, value: Any) -> bool:
    return name == "CHECKS" and len(value) > 0


def is_self_test_family(name: str, value: Any) -> bool:
    return name == "SELF_TESTS" and isinstance(value, tuple) and len(value) > 0


def is_parser(name: str, value: Any) -> bool:
    return inspect.isfunction(value) and name[0] != "_" and value.__annotations__.get("return") == "Parsed"


def is_log_family(_: str, value: Any) -> bool:
    return isinstance(value, Family)


def is_engine(name: str, value: Any) -> bool:
    return inspect.isclass(value) and name.endswith("Engine") and name != "Engine"


def is_format(_: str, value: Any) -> bool:
    return isinstance(value, Format)


def is_finding_format(_: str, value: Any) -> bool:
    return isinstance(value, FindingFormat)


def is_routing(_: str, value: Any) -> bool:
    return inspect.isclass(value) and hasattr(value, "choose") and not getattr(value, "_is_protocol", False)


PLUG_INS = [
    pytest.param(COLLECTIVES, ncclep_bench.collectives, keeps(Collective), id="collectives"),
    pytest.param(BACKENDS, ncclep_bench.backends, keeps(Backend), id="backends"),
    pytest.param(ENGINES, ncclep_bench.ep, is_engine, id="engines"),
    pytest.param(ROUTINGS, ncclep_bench.routing, is_routing, id="routings"),
    pytest.param(CHECKS, ncclep_bench.doctor.checks, is_check_family, id="checks"),
    pytest.param(SELF_TESTS, ncclep_bench.doctor.selftests, is_self_test_family, id="self-tests"),
    pytest.param(PARSERS, ncclep_bench.doctor.parsers, is_parser, id="parsers"),
    pytest.param(LOGS, ncclep_bench.doctor.logs, is_log_family, id="logs"),
    pytest.param(FORMATS, ncclep_bench.reporting, is_format, id="formats"),
    pytest.param(FINDING_FORMATS, ncclep_bench.reporting.findings, is_finding_format, id="finding formats"),
]


def plug_ins(package: ModuleType, is_plug_in: Callable[[str, Any], bool]) -> Iterator[tuple[str, Any]]:
    """Every object in the package's modules that looks like a plug-in, with `module:name`."""
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        for name, value in vars(importlib.import_module(found.name)).items():
            if is_plug_in(name, value):
                yield f"{found.name}:{name}", value


@pytest.mark.parametrize(("registry", "package", "is_plug_in"), PLUG_INS)
def test_every_entry_is_there_and_keeps_its_contract(
    registry: Registry, package: ModuleType, is_plug_in: Callable[[str, Any], bool]
):
    for name in registry:
        assert is_plug_in(registry.table[name].partition(":")[2], registry.get(name)), name


@pytest.mark.parametrize(("registry", "package", "is_plug_in"), PLUG_INS)
def test_every_plug_in_is_in_its_table(registry: Registry, package: ModuleType, is_plug_in: Callable[[str, Any], bool]):
    listed = [registry.get(name) for name in registry]

    found = list(plug_ins(package, is_plug_in))

    assert len(found) >= len(listed)
    assert [name for name, value in found if not any(value is entry for entry in listed)] == []


@pytest.mark.parametrize("registry", [COLLECTIVES, BACKENDS], ids=lambda registry: registry.kind)
def test_an_object_is_called_what_its_table_calls_it(registry: Registry):
    assert [registry.get(name).name for name in registry] == list(registry)


def test_every_partner_is_a_collective_without_a_partner():
    partners = {COLLECTIVES.get(name).partner for name in COLLECTIVES} - {None}

    assert partners
    assert [COLLECTIVES.get(name).partner for name in partners] == [None] * len(partners)


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.kind)
def test_an_unknown_name_lists_the_known_ones(registry: Registry):
    with pytest.raises(InputError) as caught:
        registry.get("no such thing")

    assert f"unknown {registry.kind} 'no such thing'" in str(caught.value)
    assert all(name in str(caught.value) for name in registry)


def test_a_misspelt_name_gets_the_close_one():
    with pytest.raises(InputError, match=r"did you mean 'dispatch'\?"):
        COLLECTIVES.get("dispach")
