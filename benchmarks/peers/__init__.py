"""Tidegate and others, on the same work, from the same files, in one run: `./dev bench peers`.

    job.py           what a peer is told to do: one description, handed to every process
    work.py          the two works: their input files, and what must come out (the oracle)
    processes.py     a peer's processes: their CPU time, and their end
    environments.py  a virtual environment and jars for a peer that needs its own
    peer.py          what a peer is: install, start, what it shows, what it recorded of its checkpoints
    tidegate.py, plain_spark.py, flink.py, bytewax.py, declarative.py   the peers
    jobs/            what runs in their processes
    outputs.py       the rows that a peer's committed output holds
    life.py          one measurement: start, warm up, run, kill -9, restart, compare
    benchmark.py     rounds of them, as cases; report.py: a table that has a line per peer

This package imports nothing: jobs run under the interpreters of peers, which have none of the project's dependencies.
"""
