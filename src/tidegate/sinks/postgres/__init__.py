"""PostgreSQL tables: `table` is what a user writes, `bound` what a run calls."""
