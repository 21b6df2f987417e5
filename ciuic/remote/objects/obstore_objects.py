"""Objects in S3, OSS, GCS and Azure, over obstore.

Guarantees: an object is there whole or not at all, for no request uses multipart; a body is sent from the
caller's buffers without a copy; what fails is one of the errors of `Objects`, with no credential in its text.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from itertools import islice
from typing import Any, Final, TypeVar

from ciuic.errors import CiuicError
from ciuic.remote.objects.clients import Clients, import_obstore
from ciuic.remote.objects.failures import failure, is_conflict, status_of
from ciuic.remote.objects.model import (
    MAX_OBJECT_BYTES,
    CutReply,
    NonsenseReply,
    NoSuchObject,
    ObjectInfo,
    RemoteUnreachable,
    TooLargeObject,
    check_name,
)
from ciuic.remote.objects.ranges import merge_ranges, slices_of
from ciuic.remote.objects.urls import RemoteUrl, StoreSettings
from ciuic.repository.ids import Bytes

# Only the content of files may go to a class that must be thawed: names, trees and logs are always needed.
_DATA_PACK: Final = re.compile(r"(?:\A|/)packs/data/")
_LIST_PAGE: Final = 1000
# Stores list 100 (OSS), 1,000 or 5,000 objects with one request.
_STORE_PAGE: Final = 100
# An answer that is none of a store is that of a proxy, and the next one mostly the store's.
_NONSENSE_PAUSES_SECONDS: Final = (0.1, 1.0, 3.0)
# obstore goes on with a body that was cut, but for listings. Four minutes in all, as other reads are repeated.
_CUT_PAUSES_SECONDS: Final = (0.5, 1.0, 2.0, 4.0, 8.0, *[15.0] * 15)
_DELETE_BATCH: Final = 1000
_DELETE_THREADS: Final = 8
# Two creates of one name at one moment; the other one is over in milliseconds.
_CONFLICT_PAUSES_SECONDS: Final = (0.05, 0.2, 1.0, 3.0)
_RANGE_NOT_SATISFIABLE: Final = 416
_READ_CHUNK_BYTES: Final = 1 << 20
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)

T = TypeVar("T")


class ObstoreObjects:
    """Objects below a prefix of a bucket."""

    def __init__(
        self,
        url: RemoteUrl,
        settings: StoreSettings,
        *,
        clients: Clients | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._url = str(url)
        self._bucket = url.bucket
        self._obstore: Any = import_obstore()
        self._clients = clients or Clients(url, settings)
        self._storage_class = settings.storage_class
        self._sleep = sleep

    @property
    def url(self) -> str:
        """URL of the prefix."""
        return self._url

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        """Store the parts as one object, in place of one that is there."""
        check_name(name)
        client = self._clients.sending(sum(len(part) for part in data))
        # An iterator of buffers is sent as it is; joined, it would be copied.
        body = data[0] if len(data) == 1 else iter(data)
        attributes = None
        if self._storage_class and _DATA_PACK.search(name):
            attributes = {"Storage-Class": self._storage_class}
        try:
            self._obstore.put(client, name, body, use_multipart=False, attributes=attributes)
        except Exception as exc:
            raise self._failure(exc, "store", name, writes=True) from None

    def create(self, name: str, data: bytes) -> bool:
        """Store the object if the name is free; False if it is taken."""
        check_name(name)
        for pause_seconds in (*_CONFLICT_PAUSES_SECONDS, None):
            try:
                self._put_if_absent(name, data)
                return True
            except (
                self._obstore.exceptions.AlreadyExistsError,
                self._obstore.exceptions.PreconditionError,
            ) as exc:
                if not is_conflict(exc):
                    return False
                if pause_seconds is None:
                    break
            except Exception as exc:
                raise self._failure(exc, "create", name, writes=True) from None
            self._sleep(pause_seconds)
        raise RemoteUnreachable(f"cannot create {name}: the store sees another create of it all the time")

    def _put_if_absent(self, name: str, data: bytes) -> None:
        client = self._clients.creating
        if self._clients.is_oss:
            # The client's header does it.
            self._obstore.put(client, name, data, use_multipart=False)
        else:
            self._obstore.put(client, name, data, use_multipart=False, mode="create")

    def get(self, name: str) -> bytes:
        """Return the whole object."""
        check_name(name)
        return self._read(name, lambda: self._whole(name))

    def _whole(self, name: str) -> bytes:
        result = self._obstore.get(self._clients.reading, name)
        size_bytes = result.meta["size"]
        if size_bytes > MAX_OBJECT_BYTES:
            raise TooLargeObject(name, size_bytes)
        # In pieces: half the processor time of one large buffer, which obstore itself puts together.
        data = b"".join(result.stream(min_chunk_size=_READ_CHUNK_BYTES))
        if len(data) != size_bytes:
            raise RemoteUnreachable(f"cannot read {name}: {len(data)} of {size_bytes} bytes came")
        return data

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Bytes]:
        """Return the bytes of each (offset, length), cut at the end of the object."""
        check_name(name)
        if not merge_ranges(ranges):
            return [b""] * len(ranges)
        try:
            return self._read(name, lambda: self._ranges(name, ranges))
        except _OutsideObject:
            # A range begins at the end of the object or behind it, which fails all of them.
            info = self.info(name)
            if info is None:
                raise NoSuchObject(name) from None
        inside = [(offset, min(length, max(0, info.size_bytes - offset))) for offset, length in ranges]
        if inside == list(ranges):
            raise RemoteUnreachable(f"cannot read {name}: the store refuses ranges that lie within it")
        return self.get_ranges(name, inside)

    def _ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Bytes]:
        merged = merge_ranges(ranges)
        read = self._obstore.get_ranges(
            self._clients.reading,
            name,
            starts=[offset for offset, _ in merged],
            lengths=[length for _, length in merged],
            coalesce=0,
        )
        return slices_of(merged, [memoryview(body) for body in read], ranges)

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        """Return the size of the object and its last ``length`` bytes."""
        check_name(name)
        if length > 0 and self._clients.has_suffix_ranges:
            try:
                return self._read(name, lambda: self._suffix(name, length))
            except _OutsideObject:
                # The object is empty.
                pass
        info = self.info(name)
        if info is None:
            raise NoSuchObject(name)
        start = max(0, info.size_bytes - length)
        (last,) = self.get_ranges(name, [(start, info.size_bytes - start)])
        return info.size_bytes, bytes(last)

    def _suffix(self, name: str, length: int) -> tuple[int, bytes]:
        result = self._obstore.get(self._clients.reading, name, options={"range": {"suffix": length}})
        size_bytes = result.meta["size"]
        start, end = result.range
        if end - start > length or end != size_bytes:
            raise RemoteUnreachable(
                f"cannot read {name}: the store answered another range than was asked for"
            )
        return size_bytes, bytes(result.bytes())

    def info(self, name: str) -> ObjectInfo | None:
        """Return size and time of an object; None if there is none."""
        check_name(name)
        try:
            found = _info(self._read(name, lambda: self._obstore.head(self._clients.small, name)))
        except NoSuchObject:
            return None
        # obstore 0.11, the last for Python 3.10, answers with the prefix in front.
        return found._replace(name=name)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with ``prefix``.

        obstore takes the page of a proxy, if it is well-formed HTML, for a listing without objects, and so for the end of one
        that has several pages. An end where one may come is asked for again, after the last object.
        """
        again = self._retries()
        asked_again = False
        while True:
            number = 0
            try:
                for meta in self._listed(prefix, after):
                    number += 1
                    after = meta["path"]
                    if after.startswith(prefix):
                        yield _info(meta)
            except (NonsenseReply, CutReply) as error:
                again(error)
                continue
            if number % _STORE_PAGE or (asked_again and not number):
                return
            asked_again = True

    def _listed(self, prefix: str, after: str) -> Iterator[dict[str, Any]]:
        # obstore compares whole parts of names: what is before the last slash is asked for.
        directory = prefix.rpartition("/")[0] or None
        try:
            pages = self._obstore.list(
                self._clients.reading, directory, offset=after or None, chunk_size=_LIST_PAGE
            )
            for page in pages:
                yield from page
        except FileNotFoundError as exc:
            error = self._failure(exc, "list", prefix, lists=True)
            # A store that keeps directories may miss this one; a bucket that is missing is told.
            if not isinstance(error, NoSuchObject):
                raise error from None
        except Exception as exc:
            raise self._failure(exc, "list", prefix or "objects", lists=True) from None

    def delete(self, names: Iterable[str]) -> None:
        """Delete these objects."""
        left = iter(names)
        with ThreadPoolExecutor(_DELETE_THREADS) as threads:
            while batch := list(islice(left, _DELETE_BATCH)):
                for name in batch:
                    check_name(name)
                if self._clients.has_bulk_delete:
                    self._delete(batch)
                else:
                    # One request each, as such stores want it: one that is missing must not end the others.
                    list(threads.map(self._delete, batch))

    def _delete(self, names: Sequence[str]) -> None:
        try:
            self._obstore.delete(self._clients.small, names)
        except FileNotFoundError as exc:
            error = self._failure(exc, "delete", "objects")
            if not isinstance(error, NoSuchObject):
                raise error from None
        except Exception as exc:
            raise self._failure(exc, "delete", names if isinstance(names, str) else "objects") from None

    def reconnect(self) -> None:
        """Make new connections for the reads that begin from now on."""
        self._clients.renew_reading()

    def close(self) -> None:
        """Do nothing: obstore closes its connections with its clients."""

    def _read(self, name: str, request: Callable[[], T]) -> T:
        again = self._retries()
        while True:
            try:
                return request()
            except CiuicError:
                raise
            except Exception as exc:
                if status_of(exc) == _RANGE_NOT_SATISFIABLE:
                    raise _OutsideObject from None
                error = self._failure(exc, "read", name)
            if not isinstance(error, NonsenseReply):
                raise error from None
            again(error)

    def _retries(self) -> Callable[[NonsenseReply | CutReply], None]:
        """Return what waits before a read is repeated over new connections, and raises its error in the end."""
        nonsense, cut = iter(_NONSENSE_PAUSES_SECONDS), iter(_CUT_PAUSES_SECONDS)

        def again(error: NonsenseReply | CutReply) -> None:
            pause_seconds = next(cut if isinstance(error, CutReply) else nonsense, None)
            if pause_seconds is None:
                raise error from None
            self._sleep(pause_seconds)
            self.reconnect()

        return again

    def _failure(
        self, exc: Exception, doing: str, name: str, *, writes: bool = False, lists: bool = False
    ) -> CiuicError:
        return failure(exc, doing, name, writes=writes, lists=lists, bucket=self._bucket)


class _OutsideObject(Exception):
    """A range lies outside the object."""


def _info(meta: dict[str, Any]) -> ObjectInfo:
    modified = meta["last_modified"] - _EPOCH
    # Not by timestamp(), whose floating point loses the last digits.
    nanoseconds = (modified.days * 86400 + modified.seconds) * 10**9 + modified.microseconds * 1000
    return ObjectInfo(meta["path"], meta["size"], nanoseconds)
