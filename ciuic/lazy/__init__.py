"""Lazy restore: a directory that can be used at once, while its content is fetched behind it.

The directories, names and attributes of a snapshot are restored first, with each file an empty placeholder of its size. A mount
over the destination then serves the tree; what is read is fetched first, the rest behind it. When everything is there, the tree is
moved to the destination itself and the mount is taken away.

Invariants:

* A file is *incomplete* exactly as long as it has a hidden link in the directory ``pending``. The link is removed after its
  content, checked against the ids of its chunks, is durable. So the directory says what is missing after the death of any process.
* An incomplete file has, byte by byte, what a job wrote, the snapshot's content, or nothing. What a job wrote is journaled (`changes`), and
  nothing is fetched over it. Fetching the rest twice is harmless, and needs no journal: a later run compares what is there with the ids.
* A read is answered from blocks that were checked, or fails with EIO. No zeros are read in place of content, through the mount or
  below it: below it the destination shows no names until the tree is complete.

The package may import fuse_layer, restore and what lies below them. `service` wires the rest; `progress` is what other processes are told.

References:
    docs/decisions/lazy-restore.md
"""

from __future__ import annotations

import importlib
import threading


def preload() -> None:
    """Begin to import what a lazy restore needs, in a thread: 0.2 s that a remote's first answers take as well."""
    threading.Thread(target=importlib.import_module, args=("ciuic.lazy.service",), daemon=True).start()
