"""The checkpoint protocol, pure: facts in, decisions out.

Nothing in this package does I/O, starts a thread, looks at a clock, draws a random number or knows of
Spark. Time comes in as `now_ms`. That is what lets one seed drive a whole simulated cluster
(`tidegate.testing.simulator`) through the very code that runs pipelines. A test enforces that modules here
import only the standard library, msgspec, `tidegate.errors` and each other.

Read in this order: messages, injector, aligner, coordinator, quorum, decision_log, commit, recovery,
retention.
"""
