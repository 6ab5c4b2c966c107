"""Whether the host's transfer process knows this worker's KV pool: asked before anything is copied.

Owns the question and its repetition; knows nothing of pools' bytes or of handoffs.

`RegisterPool` has no answer of its own. A drain has, messages of one sender are handled in order,
and draining a handoff that does not exist is answered at once: so the answer to a drain that was
sent behind the registration says that the registration was handled. Heartbeats repeat the
registration, but with nothing to tell when; copies that overtake it fail.
"""

from __future__ import annotations

from collections.abc import Callable

from server.kv.pool import PoolDescriptor
from server.wire.messages import AnyMessage, CancelCopies, CopiesDrained, Peer, RegisterPool

ASK_EVERY_NS = 200_000_000


class Registration:
    """`known` is True once the transfer process has answered.

    send   sends to the transfer process; False when it cannot be reached
    """

    def __init__(
        self, peer: Peer, pool: PoolDescriptor, send: Callable[[AnyMessage], bool]
    ) -> None:
        self.known = False
        self._peer = peer
        self._pool = pool
        self._send = send
        self._handoff_id = f"registration-{peer.instance}-{peer.incarnation}"
        self._asked_ns: int | None = None

    def ask(self, now_ns: int) -> None:
        """Register and ask, unless that is known or was asked a moment ago."""
        if self.known or (self._asked_ns is not None and now_ns - self._asked_ns < ASK_EVERY_NS):
            return
        self._asked_ns = now_ns
        if self._send(RegisterPool(peer=self._peer, pool=self._pool)):
            self._send(CancelCopies(handoff_id=self._handoff_id, reply_to=self._peer))

    def forget(self) -> None:
        """The transfer process does not know the pool any more: it was started anew."""
        self.known = False
        self._asked_ns = None

    def answered(self, message: CopiesDrained) -> bool:
        """Whether `message` is the answer; then the pool is known."""
        if message.handoff_id != self._handoff_id:
            return False
        self.known = True
        return True
