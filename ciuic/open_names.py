"""Default patterns of names of files whose data an overlay does not let pass the worker by (fuse_layer/open_rules.py)."""

from __future__ import annotations

from typing import Final

DEFAULT_TRACKED_NAMES: Final = (
    *("MANIFEST-*", "LOG", "CURRENT", "*.log", "*.wal", "*-wal", "*.journal", "*-journal"),
    *("*.jsonl", "*.ndjson", "events.out.tfevents.*", "*.wandb", "*.out", "*.err"),
)
"""Logs that programs create and keep open."""
DEFAULT_MAPPED_NAMES: Final = ("*.mdb", "*.lmdb", "*.db", "*.db3", "*.sqlite", "*.sqlite3")
"""Databases that programs write through shared mappings."""
