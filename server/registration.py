"""Whether the host's transfer process knows this worker's KV pool, and whether it is still there.

Owns the question and its repetition; knows nothing of pools' bytes or of handoffs.

`RegisterPool` has no answer of its own. A drain has, messages of one sender are handled in order,
and draining a handoff that does not exist is answered at once: so the answer to a drain that was
sent behind the registration says that the registration was handled. Heartbeats repeat the
registration, but with nothing to tell when; copies that overtake it fail. The question is repeated
for as long as the worker lives: an answer of another incarnation says that the transfer process was
started anew, none for `dead_after_s` that it is of no use. The answer also says which copy jobs
have come: a job may be lost on its way while both processes are well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from server.kv.pool import PoolDescriptor
from server.request import NS_PER_S
from server.silence import Silence
from server.wire.messages import AnyMessage, CancelCopies, CopiesDrained, Peer, RegisterPool

ASK_EVERY_NS = 200_000_000
CHECK_EVERY_NS = 1_000_000_000
"""How often a transfer process that knows the pool is asked again."""
_REMEMBERED = 64


class Registration:
    """`known` is True while the transfer process answers and knows the pool.

    send   sends to the transfer process; False when it cannot be reached
    """

    def __init__(
        self,
        peer: Peer,
        pool: PoolDescriptor,
        send: Callable[[AnyMessage], bool],
        *,
        dead_after_s: float,
    ) -> None:
        self.known = False
        self._peer = peer
        self._pool = pool
        self._send = send
        self._dead_after_ns = round(dead_after_s * NS_PER_S)
        self._handoff_id = f"registration-{peer.instance}-{peer.incarnation}"
        self._asked_ns: int | None = None
        self._open = False  # a question was not answered yet
        self._silence = Silence()
        self._transfer: str | None = None
        self._started_ns = 0
        self._retired: deque[str] = deque(maxlen=_REMEMBERED)

    def ask(self, now_ns: int) -> None:
        """Register and ask, unless that was done a moment ago. To be called every turn."""
        if self._open and self._silence.look(now_ns) > self._dead_after_ns:
            self.known = False
        every_ns = CHECK_EVERY_NS if self.known else ASK_EVERY_NS
        if self._asked_ns is not None and now_ns - self._asked_ns < every_ns:
            return
        self._asked_ns = now_ns
        self._open = True
        sent = self._send(RegisterPool(peer=self._peer, pool=self._pool)) and self._send(
            CancelCopies(handoff_id=self._handoff_id, reply_to=self._peer, ask_jobs=True)
        )
        if not sent:
            self.known = False

    def forget(self) -> None:
        """The transfer process does not know the pool: ask at once."""
        self.known = False
        self._asked_ns = None

    def replaced_by(self, transfer: Peer, started_ns: int) -> bool:
        """Whether `transfer`, which answered just now and started at `started_ns`, took the place
        of another one. It knows of no pool yet, unless the answer is one to a registration."""
        incarnation = transfer.incarnation
        if incarnation == self._transfer or incarnation in self._retired:
            return False
        if self._transfer is not None and started_ns < self._started_ns:
            self._retired.append(incarnation)  # late words of one that is gone
            return False
        before, self._transfer = self._transfer, incarnation
        self._started_ns = started_ns
        if before is None:
            return False
        self._retired.append(before)
        self.forget()
        return True

    def answered(self, message: CopiesDrained) -> bool:
        """Whether `message` is the answer; then the pool is known."""
        if message.handoff_id != self._handoff_id:
            return False
        if message.transfer.incarnation not in self._retired:
            self.known = True
            self._open = False
            self._silence.end()
        return True
