"""What knows PySpark or Spark's file formats: sessions, queries and their plans, logs, gates and snapshots."""
