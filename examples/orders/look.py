"""Reads the tables at the newest checkpoint that all of them show, and says whether they agree."""

from pathlib import Path

import tidegate

tables = tidegate.read(Path(__file__).parent / "state")
all_orders, paid, by_country, revenue = (
    tables[name].to_pandas() for name in ("all_orders", "paid_orders", "by_country", "revenue")
)
print(f"{tables.checkpoint}: {len(all_orders):,} orders, {len(paid):,} of them paid, {len(revenue):,} windows closed")
print(by_country.sort_values("country").to_string(index=False))
counted = paid.groupby("country")["amount"].agg(["count", "sum"]).reset_index()
agree = sorted(counted.itertuples(index=False)) == sorted(by_country.itertuples(index=False))
print(f"paid_orders and by_country {'agree' if agree else 'DO NOT agree'}")
print(f"orders that are there twice: {all_orders['id'].duplicated().sum() + paid['id'].duplicated().sum()}")
