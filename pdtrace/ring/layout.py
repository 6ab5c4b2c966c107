"""Byte layout of a ring file, and the identity its header carries. Writes and reads nothing.

    offset 0      fixed header   magic, format version, sizes, identity length and checksum
    64            counters       16 x u64, in place (`Counter`)
    256           gauges         64 x i64, in place (`pdtrace.stages.Gauge`); unset = GAUGE_UNSET
    1024          identity       JSON of `RingIdentity`
    HEADER_BYTES  blocks         N x block_bytes

    block         u64 sequence, u64 number of its first record, u64 their checksum, records
    record        u32 size | number << 16, u32 checksum, body; padded to 8 bytes
    body          u8 kind, u8 0, u16 presence, u32 attempt, u64 key, i64 t_ns, values
    body, open    as that, presence 1 if it is repeated; the context in MessagePack
    body, step    u8 kind, u8 step kind, u16 members kept, u32 members, u64 number,
                  i64 begin_ns, i64 end_ns, u64 tokens, a u64 key for each member kept
    body, clock   u8 kind, u8 bytes of peer, u16 bytes of its clock id, u32 0, u64 error_ns,
                  i64 t_ns, i64 offset_ns, peer, clock id

Integers are little-endian. A block's sequence is 0 while it is being recycled and otherwise 1 + its
index since the ring was made, so a reader that sees the same sequence before and after a copy has
an intact copy. A record's first 8 bytes are stored last, in one aligned store; until then there is
still what was there before: zero, or a record of an earlier lap. The checksum (CRC-32, seeded with
the low 32 bits of the record's number, of which the first word has 16) tells them apart.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from zlib import crc32

import msgspec

from pdtrace.clock import ClockAnchor
from pdtrace.stages import Role

MAGIC = b"PDTRING\n"
FORMAT_VERSION = 2

# magic, format version, header bytes, block bytes, blocks, identity bytes, identity checksum
FIXED_HEADER = struct.Struct("<8sIIIIII")
COUNTERS_OFFSET = 64
COUNTER_SLOTS = 16
GAUGES_OFFSET = 256
GAUGE_SLOTS = 64
GAUGE_UNSET = -(2**63)
IDENTITY_OFFSET = 1024
HEADER_BYTES = 16 * 1024
MAX_IDENTITY_BYTES = HEADER_BYTES - IDENTITY_OFFSET

BLOCK_HEADER = struct.Struct("<QQQ")  # sequence, number of the first record, block_checksum()
RECORD_HEADER = struct.Struct("<II")  # size | number << 16, checksum
BODY_HEAD = struct.Struct("<BxHIQq")  # kind, presence, attempt, key, t_ns
STEP_HEAD = struct.Struct("<BBHIQqqQ")
CLOCK_HEAD = struct.Struct("<BBHxxxxQqq")

# Kinds below this are values of `pdtrace.stages.Mark`.
FIRST_CONTROL_KIND = 240
KIND_OPEN = 240
KIND_END = 241
KIND_STEP = 242
KIND_CLOCK = 243

MAX_STEP_MEMBERS = 256
BARE_BYTES = RECORD_HEADER.size + BODY_HEAD.size  # of a record without values

MAX_STRING_BYTES = 255  # a string's length is one byte
MAX_ID_BYTES = 256  # request and handoff ids in an OPEN record
MAX_CLOCK_ID_BYTES = 1024

SUFFIX = ".ring"
DIRECTORY_MODE = 0o700
FILE_MODE = 0o400
"""Not even its owner may open it to write: who cuts a ring short, by a slip of `>` or `truncate`,
kills its writer by SIGBUS. The writer has its descriptor already; root may do as it likes."""


def block_checksum(sequence: int, number: int) -> int:
    """Checksum of a block header, so that neither damage nor half a header passes for one."""
    return crc32(b"%d %d" % (sequence, number))


class Counter(IntEnum):
    """In-place counters of a ring header. Values are slots: never reuse one."""

    CLOSED = 0  # 1 after a clean close()
    DROPPED = 1  # records that could not be written
    ERRORS = 2  # errors that the recorder's guard swallowed
    TRUNCATED = 3  # strings cut to MAX_STRING_BYTES or MAX_ID_BYTES
    WRITTEN = 4  # records written, as of the last block begun or close()
    SHED_STEPS = 5  # step records left out to keep within the budget
    SHED_WAITS = 6  # wait records left out to keep within the budget
    SHED_ATTRIBUTES = 7  # marks recorded without their attributes to keep within the budget


class RingCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """Size of a ring: `blocks` x `block_bytes` bytes of records. A bare mark takes 32 bytes.

    blocks       4 to 65536
    block_bytes  4 KiB to 1 MiB, a multiple of 8. Larger than any record, and small enough that a
                 record's 16-bit number is unique in its block
    """

    blocks: int = 64
    block_bytes: int = 64 * 1024

    def __post_init__(self) -> None:
        if not 4 <= self.blocks <= 65536:
            raise ValueError(f"blocks must be 4 to 65536, got {self.blocks}")
        if not 4096 <= self.block_bytes <= 2**20 or self.block_bytes % 8:
            raise ValueError(
                f"block_bytes must be a multiple of 8 from 4096 to 1048576, got {self.block_bytes}"
            )

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.blocks * self.block_bytes


ResourceValue = str | bool | int | float


class RingIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Who writes a ring; fixed when the ring is made.

    instance           worker id, `service.instance.id`
    pid                process id in the writer's namespace
    host_id            the machine, over reboots: equal ids share `CLOCK_MONOTONIC` within a boot
    boot_id            changes at every boot of the host
    anchor             both clocks when the ring was made
    resource           OpenTelemetry resource attributes beyond the fields here
    schema             mark value -> its attributes (key, type) in order, as the writer knew them
    """

    role: Role
    instance: str
    pid: int
    host_id: str
    host_name: str
    boot_id: str
    anchor: ClockAnchor
    service_name: str
    service_namespace: str = ""
    service_version: str = ""
    resource: dict[str, ResourceValue] = {}
    schema: dict[int, list[tuple[str, str]]] = {}

    @property
    def clock_id(self) -> str:
        """`<host id>/<boot id>`: processes with equal ones share CLOCK_MONOTONIC."""
        return f"{self.host_id}/{self.boot_id}"
