"""Checking every byte of the packs, and the index against them: what verify and check build on."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import suppress

from ciuic.errors import NotFound
from ciuic.repository.chunks import location_of
from ciuic.repository.errors import DamagedPack, UnsupportedFormat
from ciuic.repository.index import ForeignIndexError, Index
from ciuic.repository.maintenance import strict_records
from ciuic.repository.model import PackDamage, PackRecord
from ciuic.repository.packs import Packs, Segment
from ciuic.repository.segmentcheck import Checker, check_record
from ciuic.units import plural

Progress = Callable[[int, int], None]


def scrub(
    packs: Packs,
    index_path: str,
    seed: int,
    progress: Progress | None,
    after: int,
    goes_on: Callable[[int], bool],
    between: Callable[[], None],
) -> Iterator[PackDamage]:
    """See Repository.scrub."""
    sizes = packs.sizes()
    covered, newest = _covered(index_path)
    total, done = sum(sizes.values()), 0
    with Checker(packs, seed, index_path) as checker:
        for number, size_bytes in sizes.items():
            if number > after:
                facts = covered.get(number, (-1, False))
                with (
                    suppress(NotFound),
                    packs.left_as_found(number),
                ):  # garbage collection may drop it meanwhile
                    for damage in _scrub_pack(
                        packs, checker, number, seed, facts, fresh=number > newest, between=between
                    ):
                        if packs.size(number) < size_bytes:
                            break  # prune moves it elsewhere from its end on: what lived in it is checked there
                        yield damage
            done += size_bytes
            if progress is not None:
                progress(done, total)
            if number > after and not goes_on(number):
                return


def _covered(index_path: str) -> tuple[dict[int, tuple[int, bool]], float]:
    """What the index covers, and the number of the newest pack in it: none is newer where the index is no guide."""
    nothing: tuple[dict[int, tuple[int, bool]], float] = ({}, math.inf)
    try:
        index = Index.open(index_path, "read")
    except sqlite3.Error:
        return nothing
    try:
        covered = index.packs()
        return covered, max(covered, default=0) if index.fact("last_pack") else math.inf
    except sqlite3.Error:
        return nothing
    finally:
        index.close()


def _scrub_pack(
    packs: Packs,
    checker: Checker,
    number: int,
    seed: int,
    covered: tuple[int, bool],
    *,
    fresh: bool,
    between: Callable[[], None],
) -> Iterator[PackDamage]:
    """``fresh``: newer than all that the index knows, so a writer is at it, or died at it before a commit."""
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
            number, packs.footer_offset(number), None, "the footer does not list what the pack holds"
        )
        # Records in a segment whose table is damaged are still found through the footer.
        for record in listed:
            if record not in found:
                yield from check_record(packs, number, seed, record, checker.bases)


def _segments(packs: Packs, number: int, covered: tuple[int, bool] | None) -> Iterator[Segment]:
    """What an unsealed pack has beyond the indexed end is a writer's business: at work now, or dead and soon redone."""
    for segment in packs.scan(number):
        if covered is not None and 0 < covered[0] <= segment.offset:
            return
        yield segment


def pack_problems(packs: Packs, index_path: str) -> Iterator[tuple[int, str]]:
    """See Repository.pack_problems."""
    covered, newest = _covered(index_path)
    for number, size_bytes in packs.sizes().items():
        known_bytes, sealed = covered.get(number, (-1, False))
        try:
            if number > newest and packs.unfinished(number):
                continue  # a writer is at it, or died at it before a commit
            try:
                packs.header(number)
                if packs.footer(number) is None and sealed:
                    yield number, f"pack {number:016x}: the footer is damaged or missing"
            except (DamagedPack, UnsupportedFormat) as error:
                yield number, error.message
        except NotFound:
            continue  # garbage collection dropped it meanwhile
        if size_bytes < known_bytes:
            missing = known_bytes - size_bytes
            yield number, f"pack {number:016x} has {size_bytes} bytes: its last {missing} are missing"


def index_problems(packs: Packs, index_path: str) -> list[str]:
    """See Repository.check_index; the packs' part."""
    try:
        index = Index.open(index_path, "read")
    except ForeignIndexError as error:
        return [f"the index does not cover anything: {error}"]
    except sqlite3.Error as error:
        return [f"the index cannot be read: {error}"]
    try:
        return _compare(packs, index)
    except sqlite3.Error as error:
        return [f"the index cannot be read: {error}"]
    finally:
        index.close()


def _compare(packs: Packs, index: Index) -> list[str]:
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
            records = strict_records(packs, number)
        except (DamagedPack, NotFound):
            unlisted = True  # a matter of the pack, which scrub reports
            continue
        expected_rows += len(records)
        listed = index.copies_in(number, [record.id for record in records])
        wrong = sum((record.id, location_of(number, record)) not in listed for record in records)
        if wrong:
            problems.append(f"the index lacks {plural(wrong, 'chunk')} of pack {number:016x}")
    rows = index.db.execute("SELECT count(*) FROM chunks").fetchone()[0]
    if not problems and not unlisted and rows != expected_rows:
        problems.append(f"the index has {plural(rows, 'row')} for {plural(expected_rows, 'chunk')}")
    return problems
