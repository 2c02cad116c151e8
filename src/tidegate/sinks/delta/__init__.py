"""Delta tables: `table` is what a user writes, `bound` what a run calls, `reading` how others see them."""
