"""Facts without personal details, which the checks judge as they judge the facts themselves."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import msgspec

from ncclep_bench.doctor import records
from ncclep_bench.doctor.collect import FACTS, Machine
from ncclep_bench.doctor.run import all_checks
from ncclep_bench.errors import InputError
from ncclep_bench.model.anonymous import Anonymous
from ncclep_bench.model.facts import Fact, Facts

_VALUES = frozenset({"kind", "state", "physical", "link_layer", "counter", "trust"})
"""Fields of records that hold words of a fixed list."""


def anonymous() -> Anonymous:
    """Knows who works here, and the words of facts that are nobody's."""
    structs = [struct for struct in vars(records).values() if isinstance(struct, type(records.Record))]
    fields = {field for struct in structs for field in struct.__struct_fields__}
    facts = {*FACTS, *(need for check in all_checks() for need in check.needs)}
    knows = Anonymous(fields | {part for name in facts for part in name.split(".")}, _VALUES)
    for variable in ("USER", "LOGNAME"):
        knows.learn_user(os.environ.get(variable, ""))
    knows.learn_home(Machine().home)
    return knows


def anonymised(documents: Sequence[Facts], knows: Anonymous) -> list[Facts]:
    """`documents` with every personal detail replaced, the same in all of them by the same name.

    Raises InputError for values that are nested too deeply to look through.
    """
    try:
        return _anonymised(documents, knows)
    except RecursionError as error:
        raise InputError("facts are nested too deeply to find the personal details in them") from error


def _anonymised(documents: Sequence[Facts], knows: Anonymous) -> list[Facts]:
    for facts in documents:
        knows.learn_host(facts.host)
        knows.learn([_plain(fact) for fact in _all(facts)])
    return [
        msgspec.structs.replace(
            facts,
            host=knows.host(facts.host),
            sections={
                knows.value({section: None}).popitem()[0]: {
                    knows.value({name: None}).popitem()[0]: _replaced(fact, name, knows) for name, fact in own.items()
                }
                for section, own in facts.sections.items()
            },
        )
        for facts in documents
    ]


def _all(facts: Facts) -> Iterable[Fact]:
    return (fact for own in facts.sections.values() for fact in own.values())


def _plain(fact: Fact) -> dict[str, object]:
    return {"source": fact.source, "reason": fact.reason, "value": msgspec.to_builtins(fact.value)}


def _replaced(fact: Fact, name: str, knows: Anonymous) -> Fact:
    # The fact's name is the key of its value, which tells versions from addresses.
    value = knows.value({name: msgspec.to_builtins(fact.value)}).popitem()[1]
    return Fact(fact.state, knows.text(fact.source), value, knows.text(fact.reason))
