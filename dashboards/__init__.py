"""Grafana dashboards and alert rules, generated from `pdtrace`; nothing here runs beside serving.

`python -m dashboards.build` writes `generated/`, which is committed and shipped with the wheel.
"""
