"""Check of the packs of a remote: tables, records, and that the index agrees with them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple

from ciuic.errors import Damaged
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.format.names import PACKS_PREFIX, PackRef, parse_pack
from ciuic.remote.format.pack import MAX_PACK_BYTES
from ciuic.remote.format.pack_reader import RemotePackReader
from ciuic.remote.log.bounded import read_document
from ciuic.remote.objects.model import ArchivedObject, NoSuchObject, Objects
from ciuic.remote.sealing.sealer import Sealer
from ciuic.repository.errors import UnsupportedFormat
from ciuic.repository.model import PackRecord

# Whole packs in memory at once: 64 MiB each.
_READ_AT_ONCE: Final = 2


class CheckedPack(NamedTuple):
    """Result of the check of one pack."""

    ref: PackRef
    size_bytes: int
    """Size as the listing says."""
    records: list[PackRecord]
    """Its table; empty if it is damaged."""
    problem: str
    """Defect in words; empty if there is none."""


def list_packs(objects: Objects) -> dict[PackRef, int]:
    """Return the packs that are there, with their sizes."""
    return {
        ref: info.size_bytes
        for info in objects.list(PACKS_PREFIX)
        if (ref := parse_pack(info.name)) is not None
    }


def check_packs(
    objects: Objects,
    sealer: Sealer,
    packs: dict[PackRef, int],
    *,
    read_share: float = 0.0,
    rng: random.Random | None = None,
    threads: int = 8,
) -> Iterator[CheckedPack]:
    """Yield each pack with what is wrong with it. A pack that was deleted meanwhile is left out.

    Args:
        objects: The remote.
        sealer: Its seals.
        packs: Packs to check, as `list_packs` returns them.
        read_share: Share of the packs of which every byte is read and verified, from 0 to 1; of the others only the
            table.
        rng: Chooses those that are read.
        threads: Tables that are read at the same time.
    """
    rng = rng or random.Random()
    refs = list(packs)
    whole = set(rng.sample(refs, round(len(refs) * min(max(read_share, 0.0), 1.0))))
    tables = (ref for ref in refs if ref not in whole)
    yield from _in_threads(objects, sealer, packs, tables, threads, whole=False)
    yield from _in_threads(objects, sealer, packs, sorted(whole), min(threads, _READ_AT_ONCE), whole=True)


def _in_threads(
    objects: Objects,
    sealer: Sealer,
    packs: dict[PackRef, int],
    refs: Iterable[PackRef],
    threads: int,
    *,
    whole: bool,
) -> Iterator[CheckedPack]:
    check = partial(_check, objects, sealer, packs, whole=whole)
    waiting = list(refs)
    with ThreadPoolExecutor(threads) as pool:
        # In groups, so that results do not pile up faster than the caller takes them.
        for start in range(0, len(waiting), 4 * threads):
            for result in pool.map(check, waiting[start : start + 4 * threads]):
                if result is not None:
                    yield result


def _check(
    objects: Objects, sealer: Sealer, packs: dict[PackRef, int], ref: PackRef, *, whole: bool
) -> CheckedPack | None:
    reader = RemotePackReader(sealer, ref)
    try:
        if packs[ref] > MAX_PACK_BYTES:
            raise DamagedRemote(reader.name, f"it has {packs[ref]} bytes, which no pack has")
        if whole:
            records = read_document(objects, reader.name, reader.check, MAX_PACK_BYTES)
            return CheckedPack(ref, packs[ref], records, "")
        return CheckedPack(ref, packs[ref], reader.read_table(objects), "")
    except NoSuchObject:
        return None
    except (Damaged, UnsupportedFormat, ArchivedObject) as error:
        return CheckedPack(ref, packs[ref], [], error.message)
