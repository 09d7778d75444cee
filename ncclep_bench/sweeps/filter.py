"""`--filter`: a small, safe expression over the fields of a case."""

from __future__ import annotations

import ast
import difflib
import operator
from collections.abc import Callable
from typing import Any

from ncclep_bench.errors import InputError
from ncclep_bench.model.case import Case

Evaluate = Callable[[Case], Any]

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, container: item in container,
    ast.NotIn: lambda item, container: item not in container,
}
_HINT = 'write for instance: collective == "dispatch" and tokens >= 64 and dtype in ["float16", "bfloat16"]'
_LONGEST = 1_000  # so that neither parsing nor evaluating can exhaust the stack


def case_filter(expression: str) -> Callable[[Case], bool]:
    """A predicate from comparisons (`== != < <= > >= in`), `and`, `or`, `not` and parentheses over fields of Case.

    A field that the case does not use is None: it equals only None and matches no ordering, nor does a word a number.
    Raises InputError for an unknown name, with the nearest field, and for anything else than the above.
    """
    try:
        if len(expression) > _LONGEST:
            raise ValueError(f"longer than {_LONGEST} characters")
        evaluate = _compiled(ast.parse(expression.strip(), mode="eval").body, expression)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise InputError(f"--filter {_shown(expression)}: cannot be read: {reason}", hint=_HINT) from error
    return lambda case: bool(evaluate(case))


def _compiled(node: ast.expr, expression: str) -> Evaluate:
    match node:
        case ast.BoolOp(op=op, values=operands):
            parts = [_compiled(operand, expression) for operand in operands]
            combine = all if isinstance(op, ast.And) else any
            return lambda case: combine(part(case) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            negated = _compiled(operand, expression)
            return lambda case: not negated(case)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return lambda case: -number
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            terms = [_compiled(term, expression) for term in (left, *comparators)]
            known = [_COMPARISONS[type(op)] for op in ops if type(op) in _COMPARISONS]
            if len(known) == len(ops):
                steps = list(zip(known, terms[:-1], terms[1:], strict=True))
                return lambda case: all(_holds(step, before(case), after(case)) for step, before, after in steps)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            values = [_compiled(item, expression) for item in items]
            return lambda case: [value(case) for value in values]
        case ast.Constant(value=str() | bool() | int() | float() | None as constant):
            return lambda case: constant
        case ast.Name(id=name) if name in Case.__struct_fields__:
            return lambda case: getattr(case, name)
        case ast.Name(id=name):
            close = difflib.get_close_matches(name, Case.__struct_fields__, n=1)
            advice = f"did you mean {close[0]}? " if close else f'a word is written in quotes: "{name}"; '
            raise InputError(
                f"--filter {_shown(expression)}: unknown name {name!r}",
                hint=f"{advice}names: {', '.join(Case.__struct_fields__)}",
            )
    part = ast.get_source_segment(expression.strip(), node) or type(node).__name__
    raise InputError(f"--filter {_shown(expression)}: {_shown(part)} is not allowed", hint=_HINT)


def _holds(compare: Callable[[Any, Any], bool], left: Any, right: Any) -> bool:
    try:
        return compare(left, right)
    except TypeError:
        return False


def _shown(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:197] + "...")
