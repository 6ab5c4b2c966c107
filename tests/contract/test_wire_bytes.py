"""The bytes of every message between processes, and what decoding does with anything else.

A changed golden below means that processes of two builds no longer understand each other: raise
`WIRE_VERSION` in `server/wire/messages.py` and write the change into its history. To see the bytes
of a changed message: `python -m tests.contract.test_wire_bytes`.
"""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtrace.propagation import RequestContext
from pdtrace.stages import Mode
from server.engine.base import ModelInfo, SamplingParams
from server.injection.fault import (
    Corrupt,
    Damage,
    Delay,
    Direction,
    Drop,
    Freeze,
    Pause,
    Place,
    Raise,
    Reorder,
    Repeat,
    ShiftClock,
    Shrink,
)
from server.kv.layout import KvLayout
from server.kv.pool import PoolDescriptor
from server.wire.messages import (
    ENVELOPE,
    MAX_MESSAGE_BYTES,
    WIRE_VERSION,
    Abort,
    AnyMessage,
    Cancel,
    CancelCopies,
    ColocatedRequest,
    CopiesDrained,
    CopyDone,
    CopyFailed,
    CopyJob,
    DecodeRequest,
    FaultReport,
    Handoff,
    Heartbeat,
    HeartbeatAck,
    InjectFaults,
    LegClosed,
    LegProbe,
    LegReport,
    LegStatus,
    PagesReserved,
    Peer,
    PoolRef,
    PrefillRequest,
    RegisterPool,
    TokenItem,
    Tokens,
    WireError,
    WorkerLoad,
    decode,
    encode,
)

CONTEXT = RequestContext(
    request_id="req-é",
    trace_id="0af7651916cd43dd8448eb211c80319c",
    root_span_id="b7ad6b7169203331",
    attempt_span_id="00f067aa0ba902b7",
    client_parent_span_id="00f067aa0ba902b8",
    sampled=False,
    tracestate="a=1",
    attempt=2,
    handoff_id="ho-1",
    mode=Mode.PD_EARLY,
)
PREFILL = Peer(instance="prefill-0", endpoint="ipc:///run/p", incarnation="aa")
DECODE = Peer(instance="decode-0", endpoint="ipc:///run/d", incarnation="bb")
GATEWAY = Peer(instance="gateway-0", endpoint="ipc:///run/g", incarnation="cc")
TRANSFER = Peer(instance="transfer-0", endpoint="ipc:///run/t", incarnation="dd")
SAMPLING = SamplingParams(temperature=0.5, top_p=0.9, top_k=40, seed=7)
LAYOUT = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, page_size=16, dtype="float32")
SOURCE = PoolRef(owner="prefill-0", incarnation="aa")
DESTINATION = PoolRef(owner="decode-0", incarnation="bb")

MESSAGES: list[AnyMessage] = [
    Heartbeat(
        peer=DECODE,
        role="decode",
        seq=3,
        sent_ns=1_000_000_000_123,
        load=WorkerLoad(pages_total=512, pages_free=500, running=2, waiting=1, queued_tokens=300),
        progress_age_s=0.25,
        busy=True,
        draining=True,
        info=ModelInfo(
            name="smol",
            fingerprint="f00d",
            vocab_size=49152,
            context_length=2048,
            eos_token_ids=(2, 0),
        ),
        layout=LAYOUT,
        ignored={"late.CopyDone": 3},
        heard=2,
        taken=("ho-1",),
        denied={"control": 2},
        leaving=True,
        unrecorded=True,
    ),
    HeartbeatAck(
        incarnation="bb",
        seq=3,
        sent_ns=1_000_000_000_123,
        received_ns=6_000_000_000_456,
        answered_ns=6_000_000_001_789,
        clock_id="host-a/boot-1",
        gateway=GATEWAY,
    ),
    RegisterPool(
        peer=DECODE,
        pool=PoolDescriptor(owner="decode-0", path="/dev/shm/x", num_pages=512, layout=LAYOUT),
    ),
    DecodeRequest(
        context=CONTEXT,
        prompt_len=3,
        prompt_digest="d1",
        max_tokens=16,
        sampling=SAMPLING,
        stop=("\n\n", "é"),
        ignore_eos=False,
        early=True,
        prefill=PREFILL,
        gateway=GATEWAY,
        faults={"decode.reserve": 800},
        prompt_ids=(1, 300, 49151),
    ),
    PrefillRequest(
        context=CONTEXT,
        prompt_ids=(1, 300, 49151),
        prompt_digest="d1",
        max_tokens=16,
        sampling=SAMPLING,
        early=True,
        ignore_eos=True,
        decode=DECODE,
        gateway=GATEWAY,
        faults={"transfer": 250},
    ),
    ColocatedRequest(
        context=CONTEXT,
        prompt_ids=(1, 300, 49151),
        max_tokens=16,
        sampling=SAMPLING,
        stop=(),
        ignore_eos=True,
        gateway=GATEWAY,
        faults={"prefill.queue": 1},
    ),
    Cancel(
        handoff_id="ho-1",
        outcome="cancelled",
        reason="client_disconnected",
        by="client",
        gateway=GATEWAY,
    ),
    PagesReserved(
        handoff_id="ho-1",
        decode=DECODE,
        fingerprint="f00d",
        layout=LAYOUT,
        pool=DESTINATION,
        pages=(4, 5, 300),
        transfer_address="127.0.0.1:7000",
    ),
    Handoff(handoff_id="ho-1", token_id=17, prompt_len=3, prompt_digest="d1", cached_tokens=2),
    Abort(
        handoff_id="ho-1", outcome="failed", reason="kv_timeout", message="too late", by="decode-0"
    ),
    LegProbe(
        asker=DECODE, legs=(LegStatus(handoff_id="ho-1", state="awaiting_kv", lacks="handoff"),)
    ),
    LegReport(
        peer=PREFILL,
        legs=(
            LegStatus(handoff_id="ho-1", state="sending", whole=True),
            LegStatus(
                handoff_id="ho-2",
                state="closed",
                outcome="failed",
                reason="engine_error",
                message="no",
                by="prefill-0",
            ),
        ),
    ),
    CopyJob(
        context=CONTEXT,
        index=1,
        last=True,
        source=SOURCE,
        source_pages=(0, 1),
        destination=DESTINATION,
        destination_pages=(4, 300),
        transfer_address=None,
        prefill=PREFILL,
        decode=DECODE,
        faults={"transfer": 250},
        again_to="dd",
    ),
    CopyDone(handoff_id="ho-1", index=1, last=True, num_bytes=1_474_560),
    CopyFailed(handoff_id="ho-1", index=1, reason="peer_lost", message="broke", settled=True),
    CancelCopies(handoff_id="ho-1", reply_to=DECODE, ask_jobs=True),
    CopiesDrained(
        handoff_id="ho-1", transfer=TRANSFER, started_ns=1_000_000_000_123, jobs={"ho-2": 1}
    ),
    Tokens(
        instance="decode-0",
        items=(
            TokenItem(handoff_id="ho-1", index=0, token_ids=(17, 49151), cached_tokens=2),
            TokenItem(handoff_id="ho-2", index=9, token_ids=(2,), finish_reason="stop"),
        ),
    ),
    LegClosed(
        handoff_id="ho-1",
        instance="decode-0",
        outcome="completed",
        reason="stop",
        message="",
        by="decode-0",
    ),
    InjectFaults(
        faults=(
            Drop(at="decode-0", message="CopyDone", direction=Direction.SENT, nth=2, count=None),
            Delay(message="Handoff", ms=300),
            Repeat(message="Tokens", ms=5),
            Reorder(message="PagesReserved"),
            Raise(at="prefill", place=Place.MESSAGE, message="Abort"),
            Freeze(stage="decode.queue", ms=40, request="slow-"),
            Corrupt(copy=Damage.ALTERED, nth=3),
            Pause(at="transfer-0", ms=2000, after_ms=100),
            ShiftClock(at="decode", seconds=-2.5),
            Shrink(at="decode", pages=500),
        ),
        clear=True,
        reply_to=GATEWAY,
    ),
    FaultReport(peer=DECODE, armed=1, injected={"drop.CopyDone": 2}),
]

GOLDEN: dict[str, str] = {
    "Heartbeat": (
        "50445404de0011a474797065a9486561727462656174a47065657283a8696e7374616e6365a86465636f6465"
        "2d30a8656e64706f696e74ac6970633a2f2f2f72756e2f64ab696e6361726e6174696f6ea26262a4726f6c65"
        "a66465636f6465a373657103a773656e745f6e73cf000000e8d4a5107ba46c6f616485ab70616765735f746f"
        "74616ccd0200aa70616765735f66726565cd01f4a772756e6e696e6702a777616974696e6701ad7175657565"
        "645f746f6b656e73cd012cae70726f67726573735f6167655f73cb3fd0000000000000a462757379c3a86472"
        "61696e696e67c3a4696e666f85a46e616d65a4736d6f6cab66696e6765727072696e74a466303064aa766f63"
        "61625f73697a65cdc000ae636f6e746578745f6c656e677468cd0800ad656f735f746f6b656e5f6964739202"
        "00a66c61796f757485aa6e756d5f6c61796572731eac6e756d5f6b765f686561647303a8686561645f64696d"
        "40a9706167655f73697a6510a56474797065a7666c6f61743332a769676e6f72656481ad6c6174652e436f70"
        "79446f6e6503a5686561726402a574616b656e91a4686f2d31a664656e69656481a7636f6e74726f6c02a76c"
        "656176696e67c3aa756e7265636f72646564c3"
    ),
    "HeartbeatAck": (
        "5044540488a474797065ac48656172746265617441636bab696e6361726e6174696f6ea26262a373657103a7"
        "73656e745f6e73cf000000e8d4a5107bab72656365697665645f6e73cf00000574fbde61c8ab616e73776572"
        "65645f6e73cf00000574fbde66fda8636c6f636b5f6964ad686f73742d612f626f6f742d31a7676174657761"
        "7983a8696e7374616e6365a9676174657761792d30a8656e64706f696e74ac6970633a2f2f2f72756e2f67ab"
        "696e6361726e6174696f6ea26363"
    ),
    "RegisterPool": (
        "5044540483a474797065ac5265676973746572506f6f6ca47065657283a8696e7374616e6365a86465636f64"
        "652d30a8656e64706f696e74ac6970633a2f2f2f72756e2f64ab696e6361726e6174696f6ea26262a4706f6f"
        "6c84a56f776e6572a86465636f64652d30a470617468aa2f6465762f73686d2f78a96e756d5f7061676573cd"
        "0200a66c61796f757485aa6e756d5f6c61796572731eac6e756d5f6b765f686561647303a8686561645f6469"
        "6d40a9706167655f73697a6510a56474797065a7666c6f61743332"
    ),
    "DecodeRequest": (
        "504454048da474797065ad4465636f646552657175657374a7636f6e746578749aa67265712dc3a9d9203061"
        "663736353139313663643433646438343438656232313163383033313963b062376164366237313639323033"
        "333331b030306630363761613062613930326237b030306630363761613062613930326238c2a3613d3102a4"
        "686f2d31a870645f6561726c79aa70726f6d70745f6c656e03ad70726f6d70745f646967657374a26431aa6d"
        "61785f746f6b656e7310a873616d706c696e6784ab74656d7065726174757265cb3fe0000000000000a5746f"
        "705f70cb3feccccccccccccda5746f705f6b28a47365656407a473746f7092a20a0aa2c3a9aa69676e6f7265"
        "5f656f73c2a56561726c79c3a770726566696c6c83a8696e7374616e6365a970726566696c6c2d30a8656e64"
        "706f696e74ac6970633a2f2f2f72756e2f70ab696e6361726e6174696f6ea26161a76761746577617983a869"
        "6e7374616e6365a9676174657761792d30a8656e64706f696e74ac6970633a2f2f2f72756e2f67ab696e6361"
        "726e6174696f6ea26363a66661756c747381ae6465636f64652e72657365727665cd0320aa70726f6d70745f"
        "6964739301cd012ccdbfff"
    ),
    "PrefillRequest": (
        "504454048ba474797065ae50726566696c6c52657175657374a7636f6e746578749aa67265712dc3a9d92030"
        "61663736353139313663643433646438343438656232313163383033313963b0623761643662373136393230"
        "33333331b030306630363761613062613930326237b030306630363761613062613930326238c2a3613d3102"
        "a4686f2d31a870645f6561726c79aa70726f6d70745f6964739301cd012ccdbfffad70726f6d70745f646967"
        "657374a26431aa6d61785f746f6b656e7310a873616d706c696e6784ab74656d7065726174757265cb3fe000"
        "0000000000a5746f705f70cb3feccccccccccccda5746f705f6b28a47365656407a56561726c79c3a6646563"
        "6f646583a8696e7374616e6365a86465636f64652d30a8656e64706f696e74ac6970633a2f2f2f72756e2f64"
        "ab696e6361726e6174696f6ea26262a76761746577617983a8696e7374616e6365a9676174657761792d30a8"
        "656e64706f696e74ac6970633a2f2f2f72756e2f67ab696e6361726e6174696f6ea26363aa69676e6f72655f"
        "656f73c3a66661756c747381a87472616e73666572ccfa"
    ),
    "ColocatedRequest": (
        "5044540489a474797065b0436f6c6f636174656452657175657374a7636f6e746578749aa67265712dc3a9d9"
        "203061663736353139313663643433646438343438656232313163383033313963b062376164366237313639"
        "323033333331b030306630363761613062613930326237b030306630363761613062613930326238c2a3613d"
        "3102a4686f2d31a870645f6561726c79aa70726f6d70745f6964739301cd012ccdbfffaa6d61785f746f6b65"
        "6e7310a873616d706c696e6784ab74656d7065726174757265cb3fe0000000000000a5746f705f70cb3feccc"
        "cccccccccda5746f705f6b28a47365656407a473746f7090aa69676e6f72655f656f73c3a767617465776179"
        "83a8696e7374616e6365a9676174657761792d30a8656e64706f696e74ac6970633a2f2f2f72756e2f67ab69"
        "6e6361726e6174696f6ea26363a66661756c747381ad70726566696c6c2e717565756501"
    ),
    "Cancel": (
        "5044540486a474797065a643616e63656caa68616e646f66665f6964a4686f2d31a76f7574636f6d65a96361"
        "6e63656c6c6564a6726561736f6eb3636c69656e745f646973636f6e6e6563746564a26279a6636c69656e74"
        "a76761746577617983a8696e7374616e6365a9676174657761792d30a8656e64706f696e74ac6970633a2f2f"
        "2f72756e2f67ab696e6361726e6174696f6ea26363"
    ),
    "PagesReserved": (
        "5044540489a474797065ad50616765735265736572766564aa68616e646f66665f6964a4686f2d31a6646563"
        "6f646583a8696e7374616e6365a86465636f64652d30a8656e64706f696e74ac6970633a2f2f2f72756e2f64"
        "ab696e6361726e6174696f6ea26262ab66696e6765727072696e74a466303064a66c61796f757485aa6e756d"
        "5f6c61796572731eac6e756d5f6b765f686561647303a8686561645f64696d40a9706167655f73697a6510a5"
        "6474797065a7666c6f61743332a4706f6f6c82a56f776e6572a86465636f64652d30ab696e6361726e617469"
        "6f6ea26262a57061676573930405cd012cb07472616e736665725f61646472657373ae3132372e302e302e31"
        "3a37303030a870726f746f636f6c01"
    ),
    "Handoff": (
        "5044540486a474797065a748616e646f6666aa68616e646f66665f6964a4686f2d31a8746f6b656e5f696411"
        "aa70726f6d70745f6c656e03ad70726f6d70745f646967657374a26431ad6361636865645f746f6b656e7302"
    ),
    "Abort": (
        "5044540486a474797065a541626f7274aa68616e646f66665f6964a4686f2d31a76f7574636f6d65a6666169"
        "6c6564a6726561736f6eaa6b765f74696d656f7574a76d657373616765a8746f6f206c617465a26279a86465"
        "636f64652d30"
    ),
    "LegProbe": (
        "5044540483a474797065a84c656750726f6265a561736b657283a8696e7374616e6365a86465636f64652d30"
        "a8656e64706f696e74ac6970633a2f2f2f72756e2f64ab696e6361726e6174696f6ea26262a46c6567739188"
        "aa68616e646f66665f6964a4686f2d31a57374617465ab6177616974696e675f6b76a56c61636b73a768616e"
        "646f6666a577686f6c65c2a76f7574636f6d65a0a6726561736f6ea0a76d657373616765a0a26279a0"
    ),
    "LegReport": (
        "5044540483a474797065a94c65675265706f7274a47065657283a8696e7374616e6365a970726566696c6c2d"
        "30a8656e64706f696e74ac6970633a2f2f2f72756e2f70ab696e6361726e6174696f6ea26161a46c65677392"
        "88aa68616e646f66665f6964a4686f2d31a57374617465a773656e64696e67a56c61636b73a0a577686f6c65"
        "c3a76f7574636f6d65a0a6726561736f6ea0a76d657373616765a0a26279a088aa68616e646f66665f6964a4"
        "686f2d32a57374617465a6636c6f736564a56c61636b73a0a577686f6c65c2a76f7574636f6d65a66661696c"
        "6564a6726561736f6eac656e67696e655f6572726f72a76d657373616765a26e6fa26279a970726566696c6c"
        "2d30"
    ),
    "CopyJob": (
        "504454048da474797065a7436f70794a6f62a7636f6e746578749aa67265712dc3a9d9203061663736353139"
        "313663643433646438343438656232313163383033313963b062376164366237313639323033333331b03030"
        "6630363761613062613930326237b030306630363761613062613930326238c2a3613d3102a4686f2d31a870"
        "645f6561726c79a5696e64657801a46c617374c3a6736f7572636582a56f776e6572a970726566696c6c2d30"
        "ab696e6361726e6174696f6ea26161ac736f757263655f7061676573920001ab64657374696e6174696f6e82"
        "a56f776e6572a86465636f64652d30ab696e6361726e6174696f6ea26262b164657374696e6174696f6e5f70"
        "616765739204cd012cb07472616e736665725f61646472657373c0a770726566696c6c83a8696e7374616e63"
        "65a970726566696c6c2d30a8656e64706f696e74ac6970633a2f2f2f72756e2f70ab696e6361726e6174696f"
        "6ea26161a66465636f646583a8696e7374616e6365a86465636f64652d30a8656e64706f696e74ac6970633a"
        "2f2f2f72756e2f64ab696e6361726e6174696f6ea26262a66661756c747381a87472616e73666572ccfaa861"
        "6761696e5f746fa26464"
    ),
    "CopyDone": (
        "5044540485a474797065a8436f7079446f6e65aa68616e646f66665f6964a4686f2d31a5696e64657801a46c"
        "617374c3a96e756d5f6279746573ce00168000"
    ),
    "CopyFailed": (
        "5044540486a474797065aa436f70794661696c6564aa68616e646f66665f6964a4686f2d31a5696e64657801"
        "a6726561736f6ea9706565725f6c6f7374a76d657373616765a562726f6b65a7736574746c6564c3"
    ),
    "CancelCopies": (
        "5044540484a474797065ac43616e63656c436f70696573aa68616e646f66665f6964a4686f2d31a87265706c"
        "795f746f83a8696e7374616e6365a86465636f64652d30a8656e64706f696e74ac6970633a2f2f2f72756e2f"
        "64ab696e6361726e6174696f6ea26262a861736b5f6a6f6273c3"
    ),
    "CopiesDrained": (
        "5044540485a474797065ad436f70696573447261696e6564aa68616e646f66665f6964a4686f2d31a8747261"
        "6e7366657283a8696e7374616e6365aa7472616e736665722d30a8656e64706f696e74ac6970633a2f2f2f72"
        "756e2f74ab696e6361726e6174696f6ea26464aa737461727465645f6e73cf000000e8d4a5107ba46a6f6273"
        "81a4686f2d3201"
    ),
    "Tokens": (
        "5044540483a474797065a6546f6b656e73a8696e7374616e6365a86465636f64652d30a56974656d739285aa"
        "68616e646f66665f6964a4686f2d31a5696e64657800a9746f6b656e5f6964739211cdbfffad66696e697368"
        "5f726561736f6ec0ad6361636865645f746f6b656e730285aa68616e646f66665f6964a4686f2d32a5696e64"
        "657809a9746f6b656e5f6964739102ad66696e6973685f726561736f6ea473746f70ad6361636865645f746f"
        "6b656e73c0"
    ),
    "LegClosed": (
        "5044540487a474797065a94c6567436c6f736564aa68616e646f66665f6964a4686f2d31a8696e7374616e63"
        "65a86465636f64652d30a76f7574636f6d65a9636f6d706c65746564a6726561736f6ea473746f70a76d6573"
        "73616765a0a26279a86465636f64652d30"
    ),
    "InjectFaults": (
        "5044540484a474797065ac496e6a6563744661756c7473a66661756c74739a86a46b696e64a464726f70a261"
        "74a86465636f64652d30a76d657373616765a8436f7079446f6e65a9646972656374696f6ea473656e74a36e"
        "746802a5636f756e74c087a46b696e64a564656c6179a26174a0a76d657373616765a748616e646f6666a964"
        "6972656374696f6ea87265636569766564a36e746801a5636f756e7401a26d73cd012c87a46b696e64a67265"
        "70656174a26174a0a76d657373616765a6546f6b656e73a9646972656374696f6ea87265636569766564a36e"
        "746801a5636f756e7401a26d730587a46b696e64a772656f72646572a26174a0a76d657373616765ad506167"
        "65735265736572766564a9646972656374696f6ea87265636569766564a36e746801a5636f756e7401a26d73"
        "cd03e886a46b696e64a57261697365a26174a770726566696c6ca5706c616365a76d657373616765a36e7468"
        "01a5636f756e7401a76d657373616765a541626f727487a46b696e64a6667265657a65a26174a0a573746167"
        "65ac6465636f64652e7175657565a26d7328a36e746801a5636f756e7401a772657175657374a5736c6f772d"
        "85a46b696e64a7636f7272757074a26174a0a4636f7079a7616c7465726564a36e746803a5636f756e740184"
        "a46b696e64a57061757365a26174aa7472616e736665722d30a861667465725f6d7364a26d73cd07d084a46b"
        "696e64a5636c6f636ba26174a66465636f6465a861667465725f6d7300a77365636f6e6473cbc00400000000"
        "000084a46b696e64a6736872696e6ba26174a66465636f6465a861667465725f6d7300a57061676573cd01f4"
        "a5636c656172c3a87265706c795f746f83a8696e7374616e6365a9676174657761792d30a8656e64706f696e"
        "74ac6970633a2f2f2f72756e2f67ab696e6361726e6174696f6ea26363"
    ),
    "FaultReport": (
        "5044540484a474797065ab4661756c745265706f7274a47065657283a8696e7374616e6365a86465636f6465"
        "2d30a8656e64706f696e74ac6970633a2f2f2f72756e2f64ab696e6361726e6174696f6ea26262a561726d65"
        "6401a8696e6a656374656481ad64726f702e436f7079446f6e6502"
    ),
}

NAMED = [pytest.param(message, id=type(message).__name__) for message in MESSAGES]
FRAMES = [encode(message) for message in MESSAGES]


def test_every_message_type_has_an_instance_and_golden_bytes() -> None:
    types = {kind.__name__ for kind in get_args(AnyMessage)}
    assert [type(message).__name__ for message in MESSAGES] == list(GOLDEN)
    assert set(GOLDEN) == types


def test_instances_leave_no_optional_field_at_its_default() -> None:
    """Else a renamed optional field could slip through unseen."""
    unset = {
        (type(message).__name__, field.name)
        for message in MESSAGES
        for field in msgspec.structs.fields(message)
        if not field.required and getattr(message, field.name) in (None, False, {}, ())
    }
    assert unset == set()


@pytest.mark.parametrize("message", NAMED)
def test_bytes_are_the_golden_ones_and_decode_to_the_same_message(message: AnyMessage) -> None:
    golden = bytes.fromhex(GOLDEN[type(message).__name__])
    assert encode(message) == golden
    assert decode(golden) == message
    assert decode(memoryview(golden)) == message


def test_the_envelope_carries_the_version() -> None:
    assert ENVELOPE == b"PDT\x04"
    assert WIRE_VERSION == 4


def test_another_version_is_named() -> None:
    frame = b"PDT\x01" + FRAMES[0][4:]
    with pytest.raises(WireError, match="wire version 01, this process speaks 4"):
        decode(frame)


@pytest.mark.parametrize(
    "frame", [b"", b"P", b"PDT", b"GET / HTTP/1.1\r\n", b"\x80\x04\x95pickle", b"PDU\x01\x80"]
)
def test_frames_without_the_envelope_are_refused(frame: bytes) -> None:
    with pytest.raises(WireError, match=r"does not start with|wire version"):
        decode(frame)


@pytest.mark.parametrize("message", NAMED)
def test_a_truncated_frame_is_refused_wherever_it_is_cut(message: AnyMessage) -> None:
    frame = encode(message)
    for length in range(len(frame)):
        with pytest.raises(WireError):
            decode(frame[:length])


def test_bytes_after_a_message_are_refused() -> None:
    with pytest.raises(WireError, match="malformed"):
        decode(FRAMES[0] + b"\x00")


@pytest.mark.parametrize(
    "body",
    [
        {"type": "CopiesDrained"},
        {"type": "CopiesDrained", "handoff_id": 7},
        {"type": "CopiesDrained", "handoff_id": None},
        {"type": "NoSuchMessage", "handoff_id": "h"},
        {"handoff_id": "h"},
        {"type": "CopyDone", "handoff_id": "h", "index": "0", "last": True, "num_bytes": 1},
        {"type": "CopyDone", "handoff_id": "h", "index": 0, "last": 1, "num_bytes": 1},
        ["CopiesDrained", "h"],
        "CopiesDrained",
        None,
        {
            "type": "RegisterPool",
            "peer": {"instance": "i", "endpoint": "e", "incarnation": "n"},
            "pool": {
                "owner": "i",
                "path": "/x",
                "num_pages": 1,
                "layout": {
                    "num_layers": 0,
                    "num_kv_heads": 1,
                    "head_dim": 1,
                    "page_size": 1,
                    "dtype": "float32",
                },
            },
        },
    ],
)
def test_bodies_of_the_wrong_shape_are_refused(body: object) -> None:
    with pytest.raises(WireError, match="malformed"):
        decode(ENVELOPE + msgspec.msgpack.encode(body))


def test_fields_of_a_later_build_are_ignored() -> None:
    body = {"type": "CancelCopies", "handoff_id": "h", "reply_to": PREFILL, "added_later": [1, 2]}
    assert decode(ENVELOPE + msgspec.msgpack.encode(body)) == CancelCopies(
        handoff_id="h", reply_to=PREFILL
    )


def test_a_message_beyond_the_size_limit_is_not_sent() -> None:
    text = "x" * MAX_MESSAGE_BYTES
    with pytest.raises(WireError, match=f"limit is {MAX_MESSAGE_BYTES}"):
        encode(CopyFailed(handoff_id="h", index=0, reason="r", message=text, settled=True))


def test_deep_nesting_is_refused_without_exhausting_the_stack() -> None:
    with pytest.raises(WireError):
        decode(ENVELOPE + b"\x91" * 100_000 + b"\xc0")


@given(st.binary(max_size=300))
def test_random_bytes_are_a_wire_error(data: bytes) -> None:
    for frame in (data, ENVELOPE + data):
        with pytest.raises(WireError):
            decode(frame)


@given(
    number=st.integers(0, len(FRAMES) - 1),
    edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_a_damaged_frame_is_a_message_or_a_wire_error(
    number: int, edits: list[tuple[int, int]]
) -> None:
    frame = bytearray(FRAMES[number])
    for position, value in edits:
        frame[position % len(frame)] = value
    try:
        message = decode(bytes(frame))
    except WireError:
        return
    assert isinstance(message, get_args(AnyMessage))


if __name__ == "__main__":
    for message in MESSAGES:
        print(f'    "{type(message).__name__}": (')
        text = encode(message).hex()
        for start in range(0, len(text), 88):
            print(f'        "{text[start : start + 88]}"')
        print("    ),")
