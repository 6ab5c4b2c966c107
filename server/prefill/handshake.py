"""Whether the two legs of a handoff fit together: compared before anything moves. Pure."""

from __future__ import annotations

from server.engine.base import ModelInfo
from server.kv.layout import KvLayout
from server.wire.messages import HANDOFF_PROTOCOL, PagesReserved


def find_mismatch(
    reserved: PagesReserved, *, info: ModelInfo, layout: KvLayout, num_pages: int
) -> str | None:
    """What does not fit, with both values; None when the legs are compatible.

    num_pages   source pages of the prompt
    """
    decode = reserved.decode.instance
    if reserved.protocol != HANDOFF_PROTOCOL:
        return f"handoff protocol: prefill has {HANDOFF_PROTOCOL}, {decode} has {reserved.protocol}"
    if reserved.fingerprint != info.fingerprint:
        return (
            f"model fingerprint: prefill has {info.fingerprint[:16]}, "
            f"{decode} has {reserved.fingerprint[:16]}"
        )
    if reserved.layout != layout:
        differing = ", ".join(
            f"{name} {getattr(layout, name)} against {getattr(reserved.layout, name)}"
            for name in layout.__struct_fields__
            if getattr(layout, name) != getattr(reserved.layout, name)
        )
        return f"KV layout, prefill against {decode}: {differing}"
    if len(reserved.pages) != num_pages:
        return f"pages: the prompt has {num_pages}, {decode} reserved {len(reserved.pages)}"
    return None
