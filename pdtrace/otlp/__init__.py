"""OpenTelemetry's wire forms of spans: OTLP JSON lines, protobuf, and what others write."""
