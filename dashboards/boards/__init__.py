"""The five boards, one module each. Each has `board(slo)`; what is common is in `pieces`."""
