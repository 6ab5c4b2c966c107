"""Limits of clients: what the command line may say of them."""

from __future__ import annotations

import msgspec
import pytest

from server.client_limits import NAMES, ClientLimits, parse_client_limits
from server.errors import StartError


def test_what_is_not_named_keeps_its_default() -> None:
    limits = parse_client_limits("head_s=2.5, max_headers=20,")
    assert limits == msgspec.structs.replace(ClientLimits(), head_s=2.5, max_headers=20)
    assert parse_client_limits("") == ClientLimits()


@pytest.mark.parametrize("name", NAMES)
def test_every_limit_has_a_name_on_the_command_line(name: str) -> None:
    value = getattr(ClientLimits(), name)
    assert getattr(parse_client_limits(f"{name}={2 * value}"), name) == 2 * value


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("heads=1", "got 'heads=1', expected each of head_s="),
        ("head_s=1,head_s=2", "got 'head_s=2', expected each of head_s="),
        ("head_s", "Expected `float`"),
        ("head_s=soon", "Expected `float`"),
        ("max_headers=20.5", "Expected `int`"),
        ("head_s=0", "head_s is 0.0, expected more than 0 seconds"),
        ("idle_s=-1", "idle_s is -1.0, expected more than 0 seconds"),
        ("body_s=inf", "body_s is inf, expected more than 0 seconds"),
        ("unread_s=nan", "unread_s is nan, expected more than 0 seconds"),
        ("max_head_bytes=1023", "max_head_bytes is 1023, expected at least 1024"),
        ("max_headers=7", "max_headers is 7, expected at least 8"),
        ("max_connections=0", "max_connections is 0, expected at least 1"),
    ],
)
def test_what_makes_no_sense_is_named(option: str, said: str) -> None:
    with pytest.raises(StartError, match="--client-limits") as caught:
        parse_client_limits(option)
    assert said in str(caught.value)
