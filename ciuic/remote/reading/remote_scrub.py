"""Check every byte of a remote's packs: header, seals, checksums, table, and each chunk against its id."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from ciuic.errors import Damaged, NotFound
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.format.pack import HEADER_BYTES
from ciuic.remote.format.pack_reader import RemotePackReader, in_runs
from ciuic.remote.objects.model import ArchivedObject
from ciuic.remote.objects.verified import read_verified
from ciuic.remote.reading.space_reader import SpaceReader
from ciuic.repository import Repository
from ciuic.repository.errors import Archived, UnsupportedFormat
from ciuic.repository.model import PackDamage, PackRecord
from ciuic.repository.packs.chunk_reader import BadCopyError, read_base, unpack

# Bytes that are asked for at once, and how many such ranges are read ahead.
_RUN_BYTES: Final = 4 << 20
_AHEAD: Final = 6


def scrub_remote(
    reader: SpaceReader,
    repository: Repository,
    sizes: Mapping[int, int],
    progress: Callable[[int, int], None] | None,
    goes_on: Callable[[int], bool],
    between: Callable[[], None],
) -> Iterator[PackDamage]:
    """Yield the damage of these packs; see `Repository.scrub`.

    Args:
        reader: Reader of the space.
        repository: The same as a repository, from which bases are read.
        sizes: Size of each pack that is to be checked, by number and in that order.
        progress: Called with (bytes done, bytes in all).
        goes_on: Called with each checked pack.
        between: Called often.
    """
    done_bytes, all_bytes = 0, sum(sizes.values())
    for number, size_bytes in sizes.items():
        # Those below 0 have no table: the caller has reported them.
        if number >= 0:
            try:
                for damage in _scrub_pack(reader, repository, number):
                    between()
                    if damage is not None:
                        yield damage
            except NotFound:
                # A collection removed it meanwhile; what was live in it was copied before.
                pass
            except ArchivedObject as error:
                # Not read, and no damage.
                reader.archived.add(error.name)
            except (DamagedRemote, UnsupportedFormat) as error:
                yield PackDamage(number, 0, None, error.message)
        done_bytes += size_bytes
        if progress is not None:
            progress(done_bytes, all_bytes)
        if not goes_on(number):
            return


def _scrub_pack(reader: SpaceReader, repository: Repository, number: int) -> Iterator[PackDamage | None]:
    """Yield damage, and None for each run of sound records."""
    pack = RemotePackReader(reader.space.sealer, reader.lookup.ref(number))
    objects, tag_bytes = reader.space.objects, pack.layout.seal.tag_bytes
    records = reader.patience.of(lambda: pack.read_table(objects))

    def check_header() -> None:
        (header,) = objects.get_ranges(pack.name, [(0, HEADER_BYTES)])
        pack.layout.check_header(bytes(header))

    reader.patience.of(lambda: read_verified(objects, check_header))
    runs = list(in_runs(records, _RUN_BYTES))
    for at, run in enumerate(runs):
        for ahead in runs[at : at + _AHEAD]:
            reader.ranges.announce(pack.name, *_span(ahead, tag_bytes))
        start, length = _span(run, tag_bytes)
        data = memoryview(reader.ranges.read(pack.name, start, length))
        for record in run:
            begin = record.offset - start
            stored = data[begin : begin + record.stored_bytes + tag_bytes]
            try:
                content = _opened(reader, pack, record, stored)
                _check_content(repository, record, content)
            except DamagedRemote as error:
                yield PackDamage(number, record.offset, record.id, error.reason)
            except BadCopyError as error:
                yield PackDamage(number, record.offset, record.id, str(error))
        yield None


def _opened(reader: SpaceReader, pack: RemotePackReader, record: PackRecord, stored: memoryview) -> bytes:
    """Return the content of a record, which is read again where these bytes do not verify."""
    try:
        return pack.layout.open_record(record.offset, record.stored_bytes, stored, record.checksum)
    except DamagedRemote:
        (content,) = reader.patience.of(lambda: list(pack.read_records(reader.space.objects, [record])))
        return content


def _check_content(repository: Repository, record: PackRecord, stored: bytes) -> None:
    try:
        base = read_base(record.base, repository.chunks.get)
    except Damaged as error:
        raise BadCopyError(error.message) from None
    except Archived:
        # Its bytes are as they were sealed; whether they are the chunk's takes the base.
        return
    content = unpack(stored, record.raw_bytes, record.flags, base=base)
    if repository.identity.chunk_id(content) != record.id:
        raise BadCopyError("its bytes do not match its id")


def _span(run: list[PackRecord], tag_bytes: int) -> tuple[int, int]:
    start, last = run[0].offset, run[-1]
    return start, last.offset + last.stored_bytes + tag_bytes - start
