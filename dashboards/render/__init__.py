"""Pictures of the boards, from the committed JSON and a real Prometheus and Jaeger.

By a page of our own on Grafana's component library; not by Grafana itself.
"""
