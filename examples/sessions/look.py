"""Reads both tables at the newest checkpoint that they show."""

from pathlib import Path

import tidegate

tables = tidegate.read(Path(__file__).parent / "state")
sessions, visitors = tables["sessions"].to_pandas(), tables["visitors"].to_pandas()
print(
    f"{tables.checkpoint}: {len(sessions):,} visits of {len(visitors):,} visitors, {sessions['clicks'].sum():,} clicks"
)
print(sessions.sort_values(["visitor", "visit"]).head(4).to_string(index=False))
counted = sessions.groupby("visitor").size().to_dict()
agree = counted == dict(zip(visitors["visitor"], visitors["visit"], strict=True))
print(f"sessions and visitors {'agree' if agree else 'DO NOT agree'}")
