"""What a trace says: whose time was it, which stage stalled, why, and whether to trust it."""
