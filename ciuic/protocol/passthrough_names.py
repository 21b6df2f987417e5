"""Default name patterns of files whose data always goes through the overlay worker (fuse_layer/state/open_rules.py)."""

from __future__ import annotations

from typing import Final

# Such a file is opened as a checkpoint is: write-only and empty. Without its name it would be written past
# the worker, and its content at a cut would not be exact (docs/decisions/families-of-opens.md).
DEFAULT_TRACKED_NAMES: Final = (
    *("MANIFEST-*", "LOG", "CURRENT", "*.log", "*.wal", "*-wal", "*.journal", "*-journal"),
    *("*.jsonl", "*.ndjson", "events.out.tfevents.*", "*.wandb", "*.out", "*.err"),
)
"""Patterns of logs that programs create and keep open."""
# If a reader were to open such a file in the passthrough family first, the kernel would force later
# read-write opens into that family too, where the worker does not see stores through mappings.
DEFAULT_MAPPED_NAMES: Final = ("*.mdb", "*.lmdb", "*.db", "*.db3", "*.sqlite", "*.sqlite3")
"""Patterns of databases that programs write through shared mappings."""
