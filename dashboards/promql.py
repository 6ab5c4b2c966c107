"""PromQL as a tree: what the parser gives, in the few shapes that rules look at.

Owns the bridge to the parser (promql-parser, a port of Prometheus's own grammar); knows no rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import promql_parser as pp


class PromqlError(ValueError):
    """It is no PromQL; the message says where."""


@dataclass(frozen=True, slots=True)
class Selector:
    """`name{label="value"}`; matchers as (label, operator, value), sorted. `window`: `[5m]`."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]
    window: bool


@dataclass(frozen=True, slots=True)
class Aggregation:
    """`op by (labels) (inner)`; `by` is empty without one, and for `without (labels)`, which
    `without` has then."""

    op: str
    by: tuple[str, ...]
    inner: Node
    without: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Binary:
    op: str
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Number:
    value: float


@dataclass(frozen=True, slots=True)
class Text:
    value: str


Node = Selector | Aggregation | Call | Binary | Number | Text

_OPERATORS = {"Equal": "=", "NotEqual": "!=", "Re": "=~", "NotRe": "!~"}


def parse(expr: str) -> Node:
    """Raises PromqlError."""
    try:
        return _node(pp.parse(expr))
    except ValueError as error:
        raise PromqlError(f"{error} in {expr}") from error


def _node(expr: object) -> Node:
    match expr:
        case pp.ParenExpr():
            return _node(expr.expr)
        case pp.UnaryExpr():
            return Binary("*", Number(-1.0), _node(expr.expr))
        case pp.SubqueryExpr():
            return _node(expr.expr)
        case pp.VectorSelector():
            return _selector(expr, window=False)
        case pp.MatrixSelector():
            return _selector(expr.vector_selector, window=True)
        case pp.AggregateExpr():
            modifier = expr.modifier
            if modifier is None:
                return Aggregation(str(expr.op), (), _node(expr.expr))
            labels = tuple(modifier.labels)
            if modifier.type == pp.AggModifierType.By:
                return Aggregation(str(expr.op), labels, _node(expr.expr))
            return Aggregation(str(expr.op), (), _node(expr.expr), without=labels)
        case pp.Call():
            return Call(expr.func.name, tuple(_node(argument) for argument in expr.args))
        case pp.BinaryExpr():
            return Binary(_operator(str(expr.op)), _node(expr.lhs), _node(expr.rhs))
        case pp.NumberLiteral():
            return Number(expr.val)
        case pp.StringLiteral():
            return Text(expr.val)
        case _:
            raise PromqlError(f"{type(expr).__name__} is not known")


def _operator(text: str) -> str:
    return text.split(" ", 1)[0]  # without `on (…)` and the like


def _selector(vector: pp.VectorSelector, *, window: bool) -> Selector:
    matchers = tuple(
        sorted(
            (matcher.name, _OPERATORS[str(matcher.op).rpartition(".")[2]], matcher.value)
            for matcher in vector.matchers.matchers
        )
    )
    return Selector(vector.name or "", matchers, window)


def children(node: Node) -> tuple[Node, ...]:
    match node:
        case Aggregation():
            return (node.inner,)
        case Call():
            return node.arguments
        case Binary():
            return (node.left, node.right)
        case _:
            return ()


def walk(node: Node) -> Iterator[Node]:
    yield node
    for child in children(node):
        yield from walk(child)


def selectors(node: Node) -> Iterator[Selector]:
    for found in walk(node):
        if isinstance(found, Selector):
            yield found


def selectors_within(
    node: Node, inside: tuple[str, ...] = ()
) -> Iterator[tuple[Selector, tuple[str, ...]]]:
    """Each selector with the functions that it is inside of."""
    if isinstance(node, Selector):
        yield node, inside
    deeper = (*inside, node.name) if isinstance(node, Call) else inside
    for child in children(node):
        yield from selectors_within(child, deeper)


def calls(node: Node, name: str) -> Iterator[Call]:
    for found in walk(node):
        if isinstance(found, Call) and found.name == name:
            yield found


def quotients(node: Node) -> Iterator[tuple[Node, Node]]:
    for found in walk(node):
        if isinstance(found, Binary) and found.op == "/":
            yield found.left, found.right


def factors(node: Node) -> Iterator[float]:
    """Numbers that something is multiplied with or divided by."""
    for found in walk(node):
        if isinstance(found, Binary) and found.op in {"*", "/"}:
            for side in (found.left, found.right):
                if isinstance(side, Number):
                    yield side.value


def labels(node: Node) -> frozenset[str] | None:
    """Labels that its series may have; None where they are not written in the query."""
    match node:
        case Selector():
            return None
        case Aggregation("topk" | "bottomk", _, inner):
            return labels(inner)
        case Aggregation(_, by, inner, without):
            kept = labels(inner)
            if without is None:
                return frozenset(by)
            return None if kept is None else kept - frozenset(without)
        case Call("label_replace" | "label_join", (inner, Text(made), *_)):
            kept = labels(inner)
            return None if kept is None else kept | {made}
        case Call("histogram_quantile", (*_, inner)):
            kept = labels(inner)
            return None if kept is None else kept - {"le"}
        case Call("scalar" | "vector" | "absent", _) | Number() | Text():
            return frozenset()
        case Call(_, arguments):
            return labels(arguments[0]) if arguments else frozenset()
        case Binary(op, left, right):
            return _joined(op, left, right)


def _joined(op: str, left: Node, right: Node) -> frozenset[str] | None:
    mine, others = labels(left), labels(right)
    if op in {"and", "unless"}:
        return mine
    # Which side's labels stay depends on the matching; a number has none.
    return None if mine is None or others is None else mine | others


def number_of(node: Node) -> float | None:
    return node.value if isinstance(node, Number) else None
