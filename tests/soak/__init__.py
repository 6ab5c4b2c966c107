"""The soak: a whole server under load while things go wrong at random, and what was left of it.

    traffic    which requests there are, and which of them is sent next; pure
    load       the clients, in a process of their own
    answers    what a client makes of the bytes that it got; pure
    mischief   what may go wrong, and which of it comes next; pure
    culprit    does it to a running server
    watch      memory, threads and files of the processes
    serve      the server, with deadlines that are short enough to be seen
    run        the order of all this
    report     what was found, and whether it is good enough; pure

`python -m tests.soak --help`, docs/operations.md.
"""
