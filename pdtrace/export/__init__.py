"""Where finished spans go: files on disk, collectors, and what waits when one of them is down."""
