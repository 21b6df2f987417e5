"""Manifest of a root in a snapshot, in the form of trees.manifest, so that the two can be compared."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import Any

import xxhash
from support.trees import Facts, Manifest

from ciuic.types import Entry, RootRecord


def snapshot_manifest(trees: Any, content: Callable[[Entry], bytes], root: RootRecord) -> Manifest:
    """Return every name of the root in the snapshot; a dangling link table reference is an error."""
    found: Manifest = {}
    first_names: dict[int, bytes] = {}
    used_links: set[int] = set()

    def add(path: bytes, entry: Entry) -> None:
        full, same = entry, path
        if entry.link:
            looked_up = trees.link(root.links, entry.link)
            assert looked_up is not None, (
                f"{path!r} refers to inode {entry.link}, which is not in the link table"
            )
            full, same = looked_up, first_names.setdefault(entry.link, path)
            used_links.add(entry.link)
        found[path] = Facts(
            kind=stat.S_IFMT(full.mode),
            mode=stat.S_IMODE(full.mode),
            uid=full.uid,
            gid=full.gid,
            rdev=full.rdev,
            size_bytes=full.size_bytes,
            mtime_ns=full.mtime_ns,
            digest=xxhash.xxh3_128(content(full)).hexdigest() if full.is_file else "",
            target=full.target,
            xattrs=tuple((os.fsdecode(name), value) for name, value in full.xattrs),
            same_inode_as=same,
        )

    def walk(prefix: bytes, directory: Entry) -> None:
        for entry in trees.entries(directory.content):
            add(prefix + entry.name, entry)
            if entry.is_dir:
                walk(prefix + entry.name + b"/", entry)

    add(b".", root.entry)
    walk(b"", root.entry)
    in_table = {entry.ino for entry in trees.links(root.links)}
    assert in_table == used_links, f"link table has {in_table}, the tree refers to {used_links}"
    return found
