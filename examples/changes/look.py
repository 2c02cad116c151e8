"""Reads both tables at the newest checkpoint that they show, and folds the log of changes by hand to compare."""

from pathlib import Path

import tidegate

tables = tidegate.read(Path(__file__).parent / "state")
log, customers = tables["change_log"].to_pandas(), tables["customers"].to_pandas()
here = customers[~customers["deleted"]].astype({"credit": "int"})  # what readers of the table ask for
print(f"{tables.checkpoint}: {len(log):,} changes came, of {log['seq'].nunique():,} that were made")
print(f"{len(here):,} customers, {len(customers) - len(here):,} more were deleted")
print(here.sort_values("id").head(5).to_string(index=False))
folded = log.sort_values("seq").drop_duplicates("id", keep="last")
same = dict(zip(folded["id"], folded["seq"], strict=True)) == dict(zip(customers["id"], customers["seq"], strict=True))
print(f"customers {'is' if same else 'IS NOT'} what the log of changes gives")
