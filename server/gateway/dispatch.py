"""What each leg of an attempt is sent. Pure: a request and a pair in, messages out."""

from __future__ import annotations

from pdtrace.stages import Mode
from server.gateway.call import Call
from server.gateway.openai_api import GenerationRequest
from server.gateway.prompt import prompt_digest
from server.gateway.routing import PairChoice
from server.wire.messages import (
    AnyMessage,
    ColocatedRequest,
    DecodeRequest,
    Peer,
    PrefillRequest,
)


def leg_messages(
    call: Call, request: GenerationRequest, choice: PairChoice, *, mode: Mode, gateway: Peer
) -> list[tuple[Peer, AnyMessage]]:
    """Messages in the order of sending: decode first, its reservation is what prefill waits for."""
    prefill, decode = choice.prefill.peer, choice.decode.peer
    faults = dict(call.faults)
    if mode is Mode.COLOCATED:
        colocated = ColocatedRequest(
            context=call.context,
            prompt_ids=call.prompt_ids,
            max_tokens=call.max_tokens,
            sampling=request.sampling,
            stop=request.stop,
            ignore_eos=request.ignore_eos,
            gateway=gateway,
            faults=faults,
        )
        return [(decode, colocated)]
    early = mode is Mode.PD_EARLY
    digest = prompt_digest(call.prompt_ids)
    to_decode = DecodeRequest(
        context=call.context,
        prompt_len=len(call.prompt_ids),
        prompt_digest=digest,
        max_tokens=call.max_tokens,
        sampling=request.sampling,
        stop=request.stop,
        ignore_eos=request.ignore_eos,
        early=early,
        prefill=prefill,
        gateway=gateway,
        faults=faults,
        prompt_ids=call.prompt_ids,
    )
    to_prefill = PrefillRequest(
        context=call.context,
        prompt_ids=call.prompt_ids,
        prompt_digest=digest,
        max_tokens=call.max_tokens,
        sampling=request.sampling,
        early=early,
        decode=decode,
        gateway=gateway,
        ignore_eos=request.ignore_eos,
        faults=faults,
    )
    return [(decode, to_decode), (prefill, to_prefill)]
