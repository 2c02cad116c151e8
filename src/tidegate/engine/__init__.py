"""A run of a pipeline: its options, its generations, their stages and checkpoints, and what it tells."""
