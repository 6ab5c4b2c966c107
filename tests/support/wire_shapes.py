"""Hypothesis strategies for what messages look like on the wire: right in shape, free in value."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, get_args

import hypothesis.strategies as st
import msgspec
from msgspec import inspect

from server.wire.messages import ENVELOPE, AnyMessage

_NOTHING: Mapping[type[Any] | str, st.SearchStrategy[Any]] = MappingProxyType({})
_INTS = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 20)
_SIMPLE: dict[type[inspect.Type], st.SearchStrategy[Any]] = {
    inspect.IntType: _INTS,
    inspect.FloatType: st.floats(),
    inspect.StrType: st.text(max_size=40),
    inspect.BytesType: st.binary(max_size=40),
    inspect.BoolType: st.booleans(),
    inspect.NoneType: st.none(),
    inspect.AnyType: st.none() | _INTS | st.text(max_size=5),
}


Known = Mapping[type[Any] | str, st.SearchStrategy[Any]]
"""What a struct, or a field of any struct by its name, holds instead of anything."""


def frames() -> st.SearchStrategy[bytes]:
    """One frame of any message type but requests: whoever can send those orders real work."""
    types = [m for m in get_args(AnyMessage) if not m.__name__.endswith("Request")]
    return st.one_of([bodies(message) for message in types]).map(frame_of)


def frame_of(body: Any) -> bytes:
    """The frame of a message's body as builtins."""
    return ENVELOPE + msgspec.msgpack.encode(body)


def bodies(message: type[Any], known: Known = _NOTHING) -> st.SearchStrategy[Any]:
    """Bodies of one message type, as builtins."""
    return shape_of(inspect.type_info(message), known)


def shape_of(info: inspect.Type, known: Known = _NOTHING) -> st.SearchStrategy[Any]:
    """Values that a decoder of this type takes, unless the type itself checks further."""
    if type(info) in _SIMPLE:
        return _SIMPLE[type(info)]

    def shape(one: inspect.Type) -> st.SearchStrategy[Any]:
        return shape_of(one, known)

    match info:
        case inspect.StructType():
            return known[info.cls] if info.cls in known else _struct(info, known)
        case inspect.UnionType():
            return st.one_of([shape(one) for one in info.types])
        case inspect.ListType() | inspect.VarTupleType():
            return st.lists(shape(info.item_type), max_size=5)
        case inspect.TupleType():
            return st.tuples(*[shape(one) for one in info.item_types]).map(list)
        case inspect.DictType():
            return st.dictionaries(shape(info.key_type), shape(info.value_type), max_size=3)
        case inspect.EnumType():
            return st.sampled_from([member.value for member in info.cls])
        case inspect.LiteralType():
            return st.sampled_from(list(info.values))
        case _:
            raise NotImplementedError(f"no strategy for {info}")


def _struct(info: inspect.StructType, known: Known) -> st.SearchStrategy[Any]:
    fields = {
        field.encode_name: (
            known[field.name] if field.name in known else shape_of(field.type, known)
        )
        for field in info.fields
    }
    if info.array_like:
        return st.tuples(*fields.values()).map(list)
    tag = {} if info.tag_field is None else {info.tag_field: st.just(info.tag)}
    return st.fixed_dictionaries({**tag, **fields})
