"""What a person sees: pictures and tables of requests, and the documents behind `--json`."""
