"""List the packs of a remote: one LIST after the other for few packs, many at a time for many.

A store lists a thousand names a request, and each request waits for the one before: 320,000 packs would take half a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Final

from ciuic.remote.format.names import PACKS_PREFIX, PackRef, parse_pack
from ciuic.remote.objects.model import ObjectInfo, Objects

# Packs from which each directory is listed by itself: what was listed until then is listed again.
_MANY_PACKS: Final = 8000
_THREADS: Final = 16
_DIRECTORIES: Final = tuple(f"{PACKS_PREFIX}{kind}/{n:02x}/" for kind in ("data", "meta") for n in range(256))


def list_packs(objects: Objects, *, many: int = _MANY_PACKS) -> dict[PackRef, ObjectInfo]:
    """Return every pack that was there before the call; others may be missing.

    Args:
        objects: Store of a remote, or of a space in it.
        many: Packs from which directories are listed side by side.

    Raises:
        RemoteUnreachable: the store does not answer.
    """
    infos = _packs(objects, PACKS_PREFIX)
    found = dict(islice(infos, many))
    if len(found) < many:
        return found
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="list") as pool:
        for some in pool.map(lambda directory: dict(_packs(objects, directory)), _DIRECTORIES):
            found.update(some)
    return found


def _packs(objects: Objects, prefix: str) -> Iterator[tuple[PackRef, ObjectInfo]]:
    for info in objects.list(prefix):
        if (ref := parse_pack(info.name)) is not None:
            yield ref, info
