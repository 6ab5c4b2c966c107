"""Keys of the control plane: who may connect to an inbox over a network.

Owns the folder of keys, which endpoints need them, and who is let in (ZAP, RFC 27); sockets are
`server.wire.sockets`. Hosts that serve together have copies of one folder:

    inbox.key, inbox.key_secret        what inboxes prove themselves with
    process.key, process.key_secret    what processes that connect prove themselves with
    known/*.key                        public keys that inboxes let in

A host may have a process key of its own, if the others have its public half under `known`.
"""

from __future__ import annotations

import ipaddress
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth import create_certificates, load_certificate
from zmq.utils import z85

from server.errors import StartError
from server.log_fields import logged

KNOWN = "known"
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"pdtrace"
_INBOX, _PROCESS = "inbox", "process"
_TCP = "tcp://"
_LOCAL = ("ipc://", "inproc://")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, Z85."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """What a process needs to be reached and to reach others. `known`: raw public keys let in."""

    inbox: KeyPair
    process: KeyPair
    known: frozenset[bytes]


def is_networked(endpoint: str) -> bool:
    """Whether `endpoint` is a TCP endpoint: those are encrypted where there are keys."""
    return endpoint.startswith(_TCP)


def needs_keys(endpoint: str) -> bool:
    """Whether others than this host's processes may reach `endpoint`, or read what goes there."""
    if endpoint.startswith(_LOCAL):
        return False
    if not is_networked(endpoint):
        return True
    # `tcp://source;destination` is what a connecting socket may say.
    host = endpoint.removeprefix(_TCP).rpartition(";")[2].rpartition(":")[0]
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:  # a wildcard, an interface or a name
        return True


def endpoint_refusal(endpoint: str, keys: CurveKeys | None) -> str | None:
    """Why no socket may be opened for `endpoint`; None when one may."""
    if not needs_keys(endpoint):
        return None
    if not is_networked(endpoint):
        return f"{logged(endpoint)} is neither ipc nor tcp"
    if keys is None:
        return (
            f"{logged(endpoint)} can be reached from other hosts and there are no keys: make some "
            "with `python -m server keys DIR` and give --curve-keys DIR"
        )
    return None


def make_keys(directory: Path) -> None:
    """Make a folder (0700) with new keys (0600). Raises StartError when it exists already or
    cannot be made."""
    if not zmq.has("curve"):
        raise StartError("this build of ZeroMQ has no CURVE: install pyzmq with libsodium")
    try:
        directory.mkdir(mode=0o700, parents=True)
        (directory / KNOWN).mkdir(mode=0o700)
        for name in (_INBOX, _PROCESS):
            create_certificates(directory, name)
        (directory / KNOWN / f"{_PROCESS}.key").write_bytes(
            (directory / f"{_PROCESS}.key").read_bytes()
        )
        for path in directory.rglob("*.key*"):
            path.chmod(0o600)
    except FileExistsError as error:
        raise StartError(f"{directory} exists: keys are only made in a new folder") from error
    except OSError as error:
        raise StartError(f"keys cannot be made in {directory}: {error.strerror}") from error


def load_keys(directory: str | Path | None) -> CurveKeys | None:
    """The keys in `directory`; None without one. Raises StartError for a folder that is not as
    `make_keys` makes it, or whose secrets others could read."""
    if directory is None:
        return None
    path = Path(directory)
    known = frozenset(
        z85.decode(_load(certificate).public) for certificate in sorted(path.glob(f"{KNOWN}/*.key"))
    )
    if not known:
        raise StartError(f"{path / KNOWN} has no public keys: nobody could connect")
    return CurveKeys(
        inbox=_load_pair(path / f"{_INBOX}.key_secret"),
        process=_load_pair(path / f"{_PROCESS}.key_secret"),
        known=known,
    )


def _load_pair(path: Path) -> KeyPair:
    pair = _load(path)
    if not pair.secret:
        raise StartError(f"{path} has no secret key: make a new folder of keys")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise StartError(f"{path} can be read by others: chmod 600, or make new keys")
    return pair


def _load(path: Path) -> KeyPair:
    try:
        public, secret = load_certificate(path)
    except OSError as error:
        raise StartError(f"key {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise StartError(f"{path} is no key: {error}") from error
    for key in (public, secret or public):
        if not _is_key(key):
            raise StartError(f"{path} is no key: expected 40 characters of Z85")
    return KeyPair(public, secret or b"")


def _is_key(key: bytes) -> bool:
    try:
        return len(key) == 40 and len(z85.decode(key)) == 32
    except (ValueError, KeyError, OverflowError, IndexError):
        return False


def zap_answer(request: Sequence[bytes], known: frozenset[bytes]) -> tuple[bool, list[bytes]]:
    """Whether the peer of a ZAP request is let in, and the reply: only CURVE, only known keys."""
    version, request_id = (*request[:2], b"", b"")[:2]
    mechanism, credentials = request[5:6], request[6:]
    allowed = (
        version == b"1.0"
        and mechanism == [b"CURVE"]
        and len(credentials) == 1
        and credentials[0] in known
    )
    status = [b"200", b"OK"] if allowed else [b"400", b"unknown key"]
    return allowed, [b"1.0", request_id, *status, b"", b""]
