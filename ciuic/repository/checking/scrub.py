"""Check every byte of the packs, and the index against them, for verify and check."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import suppress

from ciuic.errors import NotFound
from ciuic.repository.checking.segment_check import Checker, check_record
from ciuic.repository.errors import DamagedPack, UnsupportedFormat
from ciuic.repository.identity import Identity
from ciuic.repository.index.database import ForeignIndexError, IndexDatabase, MissingIndexError
from ciuic.repository.model import PackDamage, PackRecord
from ciuic.repository.packs.chunk_reader import location_of
from ciuic.repository.packs.pack_directory import Packs, Segment
from ciuic.units import plural

Progress = Callable[[int, int], None]


def scrub(
    packs: Packs,
    index_path: str,
    identity: Identity,
    progress: Progress | None,
    after: int,
    goes_on: Callable[[int], bool],
    between: Callable[[], None],
) -> Iterator[PackDamage]:
    """Check all packs; see `Repository.scrub`."""
    sizes = packs.sizes()
    covered, newest = _covered(index_path)
    total, done = sum(sizes.values()), 0
    with Checker(packs, identity, index_path) as checker:
        for number, size_bytes in sizes.items():
            if number > after:
                facts = covered.get(number, (-1, False))
                # NotFound: prune may drop the pack meanwhile.
                with suppress(NotFound), packs.page_cache_preserved(number):
                    for damage in _scrub_pack(
                        packs, checker, number, identity, facts, fresh=number > newest, between=between
                    ):
                        if packs.size(number) < size_bytes:
                            # Prune moves chunks elsewhere from the pack's end on; they are checked there.
                            break
                        yield damage
            done += size_bytes
            if progress is not None:
                progress(done, total)
            if number > after and not goes_on(number):
                return


def _covered(index_path: str) -> tuple[dict[int, tuple[int, bool]], float]:
    """Return what the index covers, and its newest pack: infinity if the index says nothing."""
    nothing: tuple[dict[int, tuple[int, bool]], float] = ({}, math.inf)
    try:
        index = IndexDatabase.open(index_path, "read")
    except sqlite3.Error:
        return nothing
    try:
        covered = index.packs()
        # Without that fact the index was just made, and says nothing about which packs are new.
        return covered, max(covered, default=0) if index.fact("last_pack") else math.inf
    except sqlite3.Error:
        return nothing
    finally:
        index.close()


def _scrub_pack(
    packs: Packs,
    checker: Checker,
    number: int,
    identity: Identity,
    covered: tuple[int, bool],
    *,
    fresh: bool,
    between: Callable[[], None],
) -> Iterator[PackDamage]:
    """Check one pack.

    ``fresh`` is True if the pack is newer than all that the index knows: a writer is writing it, or died
    before a commit.
    """
    # A footer ends what a writer does to a pack: one that has it must be whole, however new it is.
    fresh = fresh and packs.unfinished(number)
    try:
        packs.header(number)
    except (DamagedPack, UnsupportedFormat) as error:
        if not fresh:
            yield PackDamage(number, 0, None, str(error))
    listed: list[PackRecord] | None = None
    try:
        listed = packs.footer(number)
    except DamagedPack as error:
        yield PackDamage(number, error.offset, None, error.reason)
    else:
        # The index remembers the pack as sealed: then a footer was synced, and it is gone.
        if listed is None and covered[1]:
            yield PackDamage(number, packs.size(number), None, "the footer is damaged or missing")
    found: list[PackRecord] = []
    for segment in checker.ahead(number, _segments(packs, number, covered if listed is None else None)):
        between()
        if segment.damage is not None and not fresh:
            yield PackDamage(number, segment.offset, None, segment.damage.reason)
        yield from checker.result()
        found += segment.records
    if listed is not None and listed != found:
        yield PackDamage(
            number, packs.footer_offset(number), None, "the footer and the segments have different records"
        )
        # Records in a segment whose table is damaged are still found through the footer.
        for record in listed:
            if record not in found:
                yield from check_record(packs, number, identity, record, checker.bases)


def _segments(packs: Packs, number: int, covered: tuple[int, bool] | None) -> Iterator[Segment]:
    """Yield the segments up to the indexed end.

    Beyond that an unsealed pack is a writer's: one that is writing now, or a dead one whose tail the next
    writer recovers.
    """
    for segment in packs.scan(number):
        if covered is not None and 0 < covered[0] <= segment.offset:
            return
        yield segment


def pack_problems(packs: Packs, index_path: str) -> Iterator[tuple[int, str]]:
    """Yield structural damage of packs; see `Repository.pack_problems`."""
    covered, newest = _covered(index_path)
    for number, size_bytes in packs.sizes().items():
        known_bytes, sealed = covered.get(number, (-1, False))
        try:
            if number > newest and packs.unfinished(number):
                # A writer is writing it, or died before a commit.
                continue
            try:
                packs.header(number)
                if packs.footer(number) is None and sealed:
                    yield number, f"pack {number:016x}: the footer is damaged or missing"
            except (DamagedPack, UnsupportedFormat) as error:
                yield number, error.message
        except NotFound:
            # Prune dropped it meanwhile.
            continue
        if size_bytes < known_bytes:
            missing = known_bytes - size_bytes
            yield number, f"pack {number:016x} has {size_bytes} bytes: its last {missing} are missing"


def index_problems(packs: Packs, index_path: str) -> list[str]:
    """Return where index and packs disagree; see `Repository.check_index`."""
    try:
        index = IndexDatabase.open(index_path, "read")
    except (ForeignIndexError, MissingIndexError) as error:
        return [f"the index does not cover anything: {error}"]
    except sqlite3.Error as error:
        return [f"the index cannot be read: {error}"]
    try:
        return _compare(packs, index)
    except sqlite3.Error as error:
        return [f"the index cannot be read: {error}"]
    finally:
        index.close()


def _compare(packs: Packs, index: IndexDatabase) -> list[str]:
    problems = []
    known = index.packs()
    expected_rows, unlisted = 0, False
    sizes = packs.sizes()
    problems += [
        f"the index names pack {number:016x}, which is missing" for number in known.keys() - sizes.keys()
    ]
    for number, size_bytes in sizes.items():
        if known.get(number, (-1, False))[0] != size_bytes:
            problems.append(f"the index does not cover pack {number:016x}")
            continue
        try:
            records = packs.strict_records(number)
        except (DamagedPack, NotFound):
            # Damage of the pack, which scrub reports.
            unlisted = True
            continue
        expected_rows += len(records)
        listed = index.copies_in(number, [record.id for record in records])
        wrong = sum((record.id, location_of(number, record)) not in listed for record in records)
        if wrong:
            problems.append(f"the index lacks {plural(wrong, 'chunk')} of pack {number:016x}")
    # Only without other problems: each of them explains a difference in the number of rows.
    rows = index.db.execute("SELECT count(*) FROM chunks").fetchone()[0]
    if not problems and not unlisted and rows != expected_rows:
        problems.append(f"the index has {plural(rows, 'row')} for {plural(expected_rows, 'chunk')}")
    return problems
