"""How two transfer processes show each other that they know the same secret.

Owns the greeting that precedes all frames, byte by byte; knows nothing of sockets or copies.

    receiver ▶ sender    Hello      PREFACE, nonce
    sender ▶ receiver    Claim      PREFACE, nonce, proof
    receiver ▶ sender    Verdict    ACCEPTED or REFUSED, proof

A proof is HMAC-SHA256 under the secret over which side speaks and both nonces. The receiver proves
itself last, and only to a sender that it has accepted; no KV leaves before that. Nonces are random
per connection, so that nothing that was overheard opens another one. What follows is neither
encrypted nor signed: this tells strangers from peers, it does not hide bytes on the way.
"""

from __future__ import annotations

import hmac
import secrets

from server.kv.transfer.base import Reason, TransferError
from server.kv.transfer.tcp_frames import PREFACE, FrameError

NONCE_BYTES = 32
PROOF_BYTES = 32
HELLO_BYTES = len(PREFACE) + NONCE_BYTES
CLAIM_BYTES = len(PREFACE) + NONCE_BYTES + PROOF_BYTES
VERDICT_BYTES = 1 + PROOF_BYTES
ACCEPTED, REFUSED = b"\x01", b"\x00"
_SENDER, _RECEIVER = b"pdtrace kv sender", b"pdtrace kv receiver"


def _proof(secret: bytes, side: bytes, receivers_nonce: bytes, senders_nonce: bytes) -> bytes:
    return hmac.digest(secret, side + receivers_nonce + senders_nonce, "sha256")


def _after_preface(data: bytes) -> bytes:
    head, rest = data[: len(PREFACE)], data[len(PREFACE) :]
    if head != PREFACE:
        raise FrameError(f"preface is {head!r}, expected {PREFACE!r}")
    return rest


class ReceiverGreeting:
    """The receiving side: say `hello`, read CLAIM_BYTES, say what `answer` returns."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    @property
    def hello(self) -> bytes:
        return PREFACE + self._nonce

    def answer(self, claim: bytes) -> tuple[bool, bytes]:
        """Whether the sender knows the secret, and the verdict to send. Raises FrameError for
        bytes that are no claim."""
        rest = _after_preface(claim)
        nonce, proof = rest[:NONCE_BYTES], rest[NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._secret, _SENDER, self._nonce, nonce)):
            return False, REFUSED + bytes(PROOF_BYTES)
        return True, ACCEPTED + _proof(self._secret, _RECEIVER, self._nonce, nonce)


class SenderGreeting:
    """The sending side: `feed` it what comes, send what it returns, until `done`."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._receivers_nonce: bytes | None = None
        self._pending = bytearray()
        self.done = False

    def feed(self, data: bytes) -> bytes:
        """What to send next, maybe nothing. Raises TransferError when the receiver refuses or does
        not know the secret, and FrameError when it speaks something else."""
        self._pending += data
        if self._receivers_nonce is None:
            if len(self._pending) < HELLO_BYTES:
                self._check_preface()
                return b""
            self._receivers_nonce = _after_preface(self._take(HELLO_BYTES))
            proof = _proof(self._secret, _SENDER, self._receivers_nonce, self._nonce)
            return PREFACE + self._nonce + proof
        if len(self._pending) >= VERDICT_BYTES:
            self._judge(self._take(VERDICT_BYTES), self._receivers_nonce)
            if self._pending:
                raise FrameError("bytes came before any copy was sent")
            self.done = True
        return b""

    def _check_preface(self) -> None:
        """A peer that speaks something else may never say enough."""
        seen = bytes(self._pending[: len(PREFACE)])
        if not PREFACE.startswith(seen):
            raise FrameError(f"preface begins with {seen!r}, expected {PREFACE!r}")

    def _judge(self, verdict: bytes, receivers_nonce: bytes) -> None:
        if verdict[:1] != ACCEPTED:
            raise TransferError(
                Reason.UNAUTHENTICATED,
                "the receiver refused this transfer process: their secrets differ",
            )
        expected = _proof(self._secret, _RECEIVER, receivers_nonce, self._nonce)
        if not hmac.compare_digest(verdict[1:], expected):
            raise TransferError(
                Reason.UNAUTHENTICATED, "the receiver does not know the secret: no KV was sent"
            )

    def _take(self, num_bytes: int) -> bytes:
        taken = bytes(self._pending[:num_bytes])
        del self._pending[:num_bytes]
        return taken
