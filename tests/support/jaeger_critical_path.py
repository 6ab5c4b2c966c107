"""Jaeger's critical path of one trace, as its user interface computes it, in whole microseconds.

A port of `computeCriticalPath` of jaeger-ui: children that overflow their parent are clipped or
dropped, then the path walks back from the child that ends last; a predecessor must end strictly
before the child after it starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdtrace.spans import Span


@dataclass(slots=True)
class _Node:
    span: Span
    start: int
    end: int
    children: list[_Node] = field(default_factory=list["_Node"])


def critical_path(spans: Sequence[Span]) -> list[tuple[str, int, int]]:
    """(span name, start, end) of each section, first section first; µs since the root's start."""
    origin = min(span.start_ns for span in spans) // 1_000
    nodes: dict[str, _Node] = {}
    for span in spans:
        # Jaeger stores floor(start) and floor(duration).
        start = span.start_ns // 1_000 - origin
        nodes[span.span_id] = _Node(span, start, start + (span.end_ns - span.start_ns) // 1_000)
    (root,) = (node for node in nodes.values() if node.span.parent_id not in nodes)
    for node in nodes.values():
        if node is not root:
            nodes[node.span.parent_id or ""].children.append(node)
    _clip(root)
    sections: list[tuple[str, int, int]] = []
    _walk(root, None, sections)
    return sections[::-1]


def _clip(parent: _Node) -> None:
    kept: list[_Node] = []
    for child in parent.children:
        if child.start >= parent.end or child.end <= parent.start:
            continue  # wholly outside: dropped with all below it
        child.start, child.end = max(child.start, parent.start), min(child.end, parent.end)
        kept.append(child)
    parent.children = sorted(kept, key=lambda node: -node.end)
    for child in parent.children:
        _clip(child)


def _walk(node: _Node, until: int | None, sections: list[tuple[str, int, int]]) -> None:
    """Sections of `node` up to `until`, last first."""
    end = node.end if until is None else until
    for child in node.children:
        if until is not None and child.end >= until:
            continue
        if child.end < end:
            sections.append((node.span.name, child.end, end))
        _walk(child, None, sections)
        end = until = child.start
        _walk(node, until, sections)
        return
    if node.start < end:
        sections.append((node.span.name, node.start, end))
