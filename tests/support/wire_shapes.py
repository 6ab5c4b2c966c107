"""Hypothesis strategies for what messages look like on the wire: right in shape, free in value."""

from __future__ import annotations

from typing import Any, get_args

import hypothesis.strategies as st
import msgspec
from msgspec import inspect

from server.wire.messages import ENVELOPE, AnyMessage

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


def frames() -> st.SearchStrategy[bytes]:
    """One frame of any message type but requests: whoever can send those orders real work."""
    types = [
        shape_of(inspect.type_info(message))
        for message in get_args(AnyMessage)
        if not message.__name__.endswith("Request")
    ]
    return st.one_of(types).map(lambda body: ENVELOPE + msgspec.msgpack.encode(body))


def shape_of(info: inspect.Type) -> st.SearchStrategy[Any]:
    """Values that a decoder of this type takes, unless the type itself checks further."""
    if type(info) in _SIMPLE:
        return _SIMPLE[type(info)]
    match info:
        case inspect.StructType():
            return _struct(info)
        case inspect.UnionType():
            return st.one_of([shape_of(one) for one in info.types])
        case inspect.ListType() | inspect.VarTupleType():
            return st.lists(shape_of(info.item_type), max_size=5)
        case inspect.TupleType():
            return st.tuples(*[shape_of(one) for one in info.item_types]).map(list)
        case inspect.DictType():
            return st.dictionaries(shape_of(info.key_type), shape_of(info.value_type), max_size=3)
        case inspect.EnumType():
            return st.sampled_from([member.value for member in info.cls])
        case inspect.LiteralType():
            return st.sampled_from(list(info.values))
        case _:
            raise NotImplementedError(f"no strategy for {info}")


def _struct(info: inspect.StructType) -> st.SearchStrategy[Any]:
    fields = {field.encode_name: shape_of(field.type) for field in info.fields}
    if info.array_like:
        return st.tuples(*fields.values()).map(list)
    tag = {} if info.tag_field is None else {info.tag_field: st.just(info.tag)}
    return st.fixed_dictionaries({**tag, **fields})
