"""Faults on purpose, for tests: what may go wrong, when it does, and how a process is made to obey.

    fault       the faults that there are
    script      their file syntax, with errors that say where
    plan        which message, call or instant is hit; pure
    lane        messages that are held back, doubled or lost on their way; pure
    injector    what one process does with it: counts, says so, answers
    ports       inbox and outbox of a process, with faults
    freezing    requests that are held in a stage
    shrinking   pages that are out of use
    damage      copies that go wrong
    process     what every process has of it; workers, transfers, gateways: what each role has
    client      how a running server is told

Nothing of it exists in a process of a server that was started without `--allow-faults`.
"""
