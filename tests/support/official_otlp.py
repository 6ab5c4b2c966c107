"""OTLP/JSON read with the official definitions."""

from __future__ import annotations

import base64
import json
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData


def official(line: bytes) -> TracesData:
    """Parsed with the generated classes: OTLP/JSON has ids in hex, protobuf's JSON in base64."""

    def in_base64(node: Any) -> Any:
        if isinstance(node, list):
            return [in_base64(item) for item in node]
        if not isinstance(node, dict):
            return node
        return {
            key: base64.b64encode(bytes.fromhex(value)).decode()
            if key in ("traceId", "spanId", "parentSpanId")
            else in_base64(value)
            for key, value in node.items()
        }

    return json_format.ParseDict(in_base64(json.loads(line)), TracesData())
