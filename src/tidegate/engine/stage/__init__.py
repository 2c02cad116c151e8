"""One running stage: its query, what it reads, what it writes, and its part in checkpoints."""
