"""The programs beside the server: Jaeger, Prometheus, Alertmanager, on loopback.

Their files are in `collector/`; this package finds the programs, starts and stops them, and wires
servers to them. Nothing that serves requests imports it.
"""
