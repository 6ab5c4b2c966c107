"""The pictures of the boards in `docs/images`, made anew: `make pictures`."""
