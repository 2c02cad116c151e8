"""The choreography: what a leader, a member and a stage do, in order, as coroutines that await requests.

`protocol` holds the machines, which say what may happen; the flows hold the play, which says what is done. They are as
free of I/O, clocks, threads and Spark as `protocol` is: what they need done they ask for (`requests.py`), and somebody
else carries it out. A run on Spark does so with threads, the simulator in simulated time, with faults.
"""
