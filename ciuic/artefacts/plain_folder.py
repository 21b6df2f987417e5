"""A folder of files as an artefact: brought up to date with what a form wants to have in it, by the manifest in it.

Guarantees: on return everything is durable. The manifest names every file before it is written, so that an interrupted export is completed by the next
one, and says of none that it is written before it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ciuic.artefacts.folder import MANIFEST, ExportFolder, Manifest, Updated, Written

_NOT_YET = Written("", "none:" + "0" * 32, 0)


class Item(NamedTuple):
    """A file of the artefact."""

    identity: str
    """Id of what it is made from, and how."""
    mtime_ns: int
    pieces: Callable[[], Iterator[bytes]]
    """Function that reads or makes its content."""
    is_executable: bool = False


def bring_up_to_date(
    folder: ExportFolder, items: Mapping[bytes, Item], facts: Manifest, *, overwrite: bool
) -> Updated:
    """Write what has changed, remove what is gone, durably on return.

    Args:
        folder: The folder.
        items: What it is to have, by relative name.
        facts: Manifest without files.
        overwrite: Whether to replace files that no export has written.

    Raises:
        DestinationExists: such a file is there.
    """
    before = Manifest.decode(folder.read(MANIFEST) or b"")
    own = (MANIFEST,) if before.files else ()
    folder.refuse_foreign((*items, MANIFEST), (*before.files, *own), overwrite=overwrite)
    done: dict[bytes, Written] = {}
    for name, item in items.items():
        old = before.files.get(name, _NOT_YET)
        if old.identity == item.identity and folder.has(
            name, old.size_bytes, item.mtime_ns, is_executable=item.is_executable
        ):
            done[name] = old
    folder.begin()
    gone = before.files.keys() - items.keys()
    if gone or len(done) < len(items):
        names = {**dict.fromkeys((*before.files, *items), _NOT_YET), **done}
        folder.write(MANIFEST, (facts._replace(snapshot="", files=names).encode(),))
        folder.sync()
    # First: a directory may be where a file was, and a file where a directory was.
    for name in sorted(gone):
        folder.remove(name)
    kept = sum(one.size_bytes for one in done.values())
    for name, item in items.items():
        if name not in done:
            done[name] = _write(folder, name, item)
    folder.sync()
    manifest = facts._replace(files=done).encode()
    if folder.read(MANIFEST) != manifest:
        folder.write(MANIFEST, (manifest,))
        folder.sync()
    size_bytes = sum(one.size_bytes for one in done.values())
    return Updated(len(done), size_bytes, size_bytes - kept, len(gone))


def _write(folder: ExportFolder, name: bytes, item: Item) -> Written:
    hashed = hashlib.sha256()
    size_bytes = 0

    def passed() -> Iterator[bytes]:
        nonlocal size_bytes
        for piece in item.pieces():
            hashed.update(piece)
            size_bytes += len(piece)
            yield piece

    folder.write(name, passed(), is_executable=item.is_executable, mtime_ns=item.mtime_ns)
    return Written(item.identity, f"sha256:{hashed.hexdigest()}", size_bytes)
