"""Pipelines on Spark: stages, channels, gates, snapshots, and the run that drives them."""
