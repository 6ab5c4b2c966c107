"""The agent: one process per host that turns rings into spans, files, OTLP, metrics and answers."""
