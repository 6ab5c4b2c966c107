"""YAML as people read it: order kept, long expressions as blocks, nothing folded."""

from __future__ import annotations

from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def document(value: object, header: str) -> str:
    """`value` below a comment."""
    comment = "".join(f"# {line}\n" for line in header.splitlines())
    text = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, width=1_000, allow_unicode=True, indent=2
    )
    return f"{comment}{text}"
