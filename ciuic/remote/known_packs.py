"""Packs that a remote had when this host last used it, for those that look at it without the index of the process that uploads.

The file is ``packs`` in the directory of that process for the remote: the line ``rounds N`` (the last round whose deletions are
in it; -1 for none), then a line with size and reference for each pack. What a power cut or an interrupted write tore is no line
(the reference has a length), and is left out: a pack that is missing here is one that nobody misses.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from ciuic.remote.log_reader import Rounds
from ciuic.remote.object_names import MANIFESTS_PREFIX, PackRef
from ciuic.remote.objects.model import Objects
from ciuic.remote.remote_index import list_packs, packs_lacking
from ciuic.remote.sealing.sealer import Sealer
from ciuic.system.disk import Disk, open_to_write, read_regular

_NAME: Final = "packs"
# 1.5 million packs; a terabyte has 65,000 of the largest ones.
_MAX_BYTES: Final = 64 << 20
_ROUNDS: Final = re.compile(rb"rounds (-1|[0-9]{1,10})\n")
_PACK: Final = re.compile(rb"^([0-9]{1,10}) ([dm][0-9a-f]{32})$", re.MULTILINE)


class KnownPacks(NamedTuple):
    """Content of the file."""

    rounds_finished: int
    sizes: dict[PackRef, int]
    """Size of each pack in bytes; 0: it was not noted."""


def write_known_packs(directory: str, rounds_finished: int, sizes: Mapping[PackRef, int]) -> None:
    """Replace the file; not durable: an older one names fewer packs."""
    lines = [f"rounds {rounds_finished}\n", *(f"{size_bytes} {ref}\n" for ref, size_bytes in sizes.items())]
    Disk().replace_file(f"{directory}/{_NAME}", "".join(lines).encode("ascii"), durable=False)


def add_known_pack(directory: str, ref: PackRef, size_bytes: int) -> None:
    """Add a pack that was stored. OSError where there is no file to add to."""
    with os.fdopen(open_to_write(f"{directory}/{_NAME}", os.O_WRONLY | os.O_APPEND), "wb", 0) as file:
        # The line end first, so that what an interrupted process wrote in part spoils no other line.
        file.write(f"\n{size_bytes} {ref}\n".encode("ascii"))


def read_known_packs(directory: str) -> KnownPacks | None:
    """Return the content of the file; None for none that can be read."""
    try:
        data = read_regular(f"{directory}/{_NAME}", _MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    head = _ROUNDS.match(data)
    if head is None or len(data) > _MAX_BYTES:
        return None
    found = _PACK.finditer(data)
    return KnownPacks(int(head[1]), {PackRef(one[2].decode("ascii")): int(one[1]) for one in found})


class LostObjects(NamedTuple):
    """Objects that are not there any more."""

    packs: list[PackRef]
    """Those that no round of a collection condemned; also those that have another size."""
    manifests: list[str]
    given_up: list[str]
    """Manifests that a collection removed: their snapshots are not stored either."""


def manifests_lacking(manifests: Mapping[str, int], objects: Objects) -> list[str]:
    """Return the manifests, with their sizes, that a remote lacks, or has with another size; a size of 0 is unknown. One listing."""
    listed = {info.name: info.size_bytes for info in objects.list(MANIFESTS_PREFIX)}
    return [
        name
        for name, size_bytes in manifests.items()
        if (found := listed.get(name)) is None or size_bytes not in (0, found)
    ]


def lost_objects(
    objects: Objects, sealer: Sealer, known: KnownPacks, manifests: Mapping[str, int]
) -> LostObjects:
    """Return what a remote has lost.

    It costs the listing of all packs and manifests, and a GET for each round since, where some are missing.

    Args:
        objects: Space of a repository in a remote.
        sealer: Its seals.
        known: Packs that were there; read before the call.
        manifests: Sizes of manifests that were there, by name; 0: it was not noted.

    Raises:
        RemoteUnreachable: the store does not answer.
        DamagedRemote: a round cannot be read.
    """
    packs = packs_lacking(known.sizes, list_packs(objects))
    missing = manifests_lacking(manifests, objects)
    if not packs and not missing:
        return LostObjects([], [], [])
    # After the listing, so that a round which deleted before it is read.
    rounds = Rounds(objects, sealer, known=known.rounds_finished)
    rounds.refresh()
    return LostObjects(
        [ref for ref in packs if ref not in rounds.condemned],
        [name for name in missing if name not in rounds.manifests],
        [name for name in missing if name in rounds.manifests],
    )
