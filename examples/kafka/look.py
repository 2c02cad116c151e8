"""Reads the Delta tables at the newest checkpoint that they show, and the PostgreSQL table as it is."""

from pathlib import Path

import psycopg

import tidegate

tables = tidegate.read(Path(__file__).parent / "state")
payments, refused = tables["payments"].to_pandas(), tables["refused"].to_pandas()
print(f"{tables.checkpoint}: {len(payments):,} payments, {len(refused):,} messages refused")
with psycopg.connect("") as connection:
    balances = connection.execute("SELECT account, payments, balance::bigint FROM balances").fetchall()
summed = payments.groupby("account")["amount"].agg(["count", "sum"]).reset_index()
agree = sorted(summed.itertuples(index=False, name=None)) == sorted(balances)
print(f"{len(balances)} accounts: payments and balances {'agree' if agree else 'DO NOT agree'}")
