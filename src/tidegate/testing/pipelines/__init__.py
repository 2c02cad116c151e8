"""A user's own pipeline in a user's own test: rows in, tables out.

`run.py` has what a test calls; `sources.py` puts rows in the place of what sources read, `rows.py` says what is wrong
with them, `tables.py` is what a test gets.
"""
