"""Objects in S3, OSS, GCS and Azure, over obstore.

Guarantees: an object is there whole or not at all, for no request uses multipart; a body is sent from the
caller's buffers without a copy; what fails is one of the errors of `Objects`, with no credential in its text.

The stores are made from a URL, settings and the usual credentials (`Clients`), with retries and time-outs that
are the same for all:

* A request is tried again after 5xx, a lost connection and, where that is safe, a time-out, for 30 seconds;
  then the caller decides, who knows whether waiting is worth it. obstore tries a few times, within two seconds or so, and
  repeats a certificate that is none like everything else; here that is told at once.
* obstore's time-out covers a whole request with its body, so bodies are sent by clients with a time-out for
  their size: a stalled small request is noticed in 30 seconds, and 64 MiB may take 15 minutes.
* Reads have 30 seconds between any two pieces of a body, and 15 minutes in all.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from functools import cached_property
from itertools import islice
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ciuic.errors import CiuicError, UsageError, pip_install
from ciuic.remote.objects.credentials import (
    AlibabaProvider,
    aws_keys,
    aws_provider,
    azure_connection,
    s3_place,
)
from ciuic.remote.objects.failures import (
    failure,
    is_conflict,
    status_of,
    wants_checksum,
    was_not_done,
)
from ciuic.remote.objects.model import (
    MAX_OBJECT_BYTES,
    CutReply,
    ListingProgress,
    NonsenseReply,
    NoSuchObject,
    ObjectInfo,
    RemoteRefused,
    RemoteUnreachable,
    TooLargeObject,
    UntrustedStore,
    check_name,
    merge_ranges,
    slices_of,
)
from ciuic.remote.objects.urls import RemoteUrl, StoreSettings
from ciuic.repository.identity import Bytes

if TYPE_CHECKING:
    from obstore.store import ObjectStore


_CONNECT_TIMEOUT = timedelta(seconds=10)
_READ_TIMEOUT = timedelta(seconds=30)
_RETRY_TIMEOUT = timedelta(seconds=30)
_LONGEST_TIMEOUT = timedelta(minutes=15)
_TIMEOUTS: Final = (
    (256 << 10, timedelta(seconds=30)),
    (8 << 20, timedelta(minutes=4)),
)
"""Size of a body up to which a time-out holds: 8 MiB at 35 KiB/s; longer ones have the longest."""
_BACKOFF: Final = {
    "init_backoff": timedelta(milliseconds=100),
    "max_backoff": timedelta(seconds=3),
    "base": 2,
}
_RETRY: Final[dict[str, Any]] = {
    # Few: what fails then is looked at here, and mostly repeated.
    "max_retries": 4,
    "retry_timeout": _RETRY_TIMEOUT,
    "backoff": _BACKOFF,
}
# Each may be a connection that broke within one body.
_RETRY_BODIES: Final[dict[str, Any]] = {**_RETRY, "max_retries": 10}
# OSS has no If-None-Match for PUT (501); this header is its create-only, answered with 409.
_OSS_CREATE_ONLY: Final = {"x-oss-forbid-overwrite": "true"}


def _import_obstore() -> ModuleType:
    """Return the module obstore.

    Raises:
        UsageError: it is not installed; the message says how to.
    """
    try:
        import obstore
        import obstore.store
    except ImportError:
        raise UsageError("remotes in an object store need obstore", hint=pip_install()) from None
    return obstore


class Clients:
    """Clients of one bucket: by the size of what is sent, for reads, and for create-only.

    Any of them may be used by several threads at once; each keeps its own connections. A process that forks
    must not use them in the child: obstore's threads are not there.
    """

    def __init__(
        self, url: RemoteUrl, settings: StoreSettings, environment: Mapping[str, str] = os.environ
    ) -> None:
        self._url = url
        self._configuration = _Configuration(url, settings, environment)
        self.is_oss: Final = url.scheme == "oss"
        self.has_suffix_ranges: Final = url.scheme != "az"
        self.has_bulk_delete: Final = url.scheme == "s3"
        self.can_send_checksums: Final = url.scheme == "s3"
        # At once, so that what is wrong with the configuration is told when the remote is opened.
        _ = self.small

    # The others when they are used: each takes 5 ms of a processor, and a process may need one alone. Two
    # threads may make one each, and the later one stays.

    @cached_property
    def small(self) -> ObjectStore:
        """Client for bodies of up to 256 KiB, and for requests without one."""
        return self._make(_TIMEOUTS[0][1])

    @cached_property
    def reading(self) -> ObjectStore:
        """Client that reads bodies and listings."""
        return self._make(_LONGEST_TIMEOUT, reads=True)

    def send_checksums(self) -> None:
        """Have bodies be sent with their SHA-256 from now on.

        Not from the beginning: over TLS they are read once more for this alone.
        """
        self._configuration.send_checksums()
        for name in ("small", "creating", "_middle", "_large"):
            self.__dict__.pop(name, None)

    def renew_reading(self) -> None:
        """Have `reading` be a new client, with connections of its own. Requests under way keep the old one."""
        self.__dict__.pop("reading", None)

    @cached_property
    def creating(self) -> ObjectStore:
        """Client whose PUT of a small body may be made create-only."""
        return self._make(_TIMEOUTS[0][1], headers=_OSS_CREATE_ONLY) if self.is_oss else self.small

    @cached_property
    def _middle(self) -> ObjectStore:
        return self._make(_TIMEOUTS[1][1])

    @cached_property
    def _large(self) -> ObjectStore:
        return self._make(_LONGEST_TIMEOUT)

    def sending(self, size_bytes: int) -> ObjectStore:
        """Return the client whose time limit suffices for a body of this size."""
        if size_bytes <= _TIMEOUTS[0][0]:
            return self.small
        return self._middle if size_bytes <= _TIMEOUTS[1][0] else self._large

    def _make(
        self, timeout: timedelta, *, reads: bool = False, headers: Mapping[str, str] | None = None
    ) -> ObjectStore:
        options: dict[str, Any] = {
            "allow_http": self._configuration.allows_http,
            "connect_timeout": _CONNECT_TIMEOUT,
            "timeout": timeout,
            "user_agent": "ciuic",
        }
        if reads:
            # Counted from the request on, so it would end the sending of a long body.
            options["read_timeout"] = _READ_TIMEOUT
        if headers:
            options["default_headers"] = dict(headers)
        try:
            return self._configuration.make(options, _RETRY_BODIES if reads else _RETRY)
        except CiuicError:
            raise
        except Exception as exc:
            # Its text may repeat values, which may be keys: the name of the fault alone is shown.
            match = re.search(r"source: ([A-Z][A-Za-z]{1,60})", str(exc))
            raise RemoteRefused(
                f"cannot open {self._url}: credentials or settings are incomplete"
                + (f" ({match[1]})" if match else "")
            ) from None


class _Configuration:
    """Arguments of obstore's constructors for one URL."""

    def __init__(self, url: RemoteUrl, settings: StoreSettings, environment: Mapping[str, str]) -> None:
        self._url = url
        self._settings = settings
        self._environment = environment
        self._provider: object = None
        # What an environment for other programs says must not lead our requests elsewhere: every key that
        # matters is given.
        self._config: dict[str, Any] = {}
        if url.scheme in ("s3", "oss"):
            self._s3()
        elif url.scheme == "az":
            self._azure()
        self.allows_http: Final = str(self._config.get("endpoint", settings.endpoint)).startswith("http://")

    def send_checksums(self) -> None:
        self._config["checksum_algorithm"] = "SHA256"

    def make(self, options: dict[str, Any], retry: Mapping[str, Any]) -> ObjectStore:
        """Return a client with these options."""
        store = _import_obstore().store
        arguments: dict[str, Any] = {
            "prefix": self._url.prefix or None,
            "client_options": options,
            "retry_config": retry,
        }
        if self._config:
            arguments["config"] = self._config
        if self._provider is not None:
            arguments["credential_provider"] = self._provider
        made: ObjectStore
        if self._url.scheme == "gs":
            made = store.GCSStore(self._url.bucket, **arguments)
        elif self._url.scheme == "az":
            made = store.AzureStore(self._url.bucket, **arguments)
        else:
            made = store.S3Store(self._url.bucket, **arguments)
        return made

    def _s3(self) -> None:
        place = s3_place(self._url, self._settings, self._environment)
        if self._url.scheme == "oss":
            self._provider = AlibabaProvider(self._environment)
            keys = {}
        else:
            self._provider = aws_provider(self._environment)
            keys = aws_keys(self._environment)
        self._config = {
            **keys,
            "region": place.region,
            "virtual_hosted_style_request": place.virtual_hosted,
            "unsigned_payload": not place.signs_payloads,
        }
        if place.endpoint:
            self._config["endpoint"] = (
                place.with_bucket(self._url.bucket) if place.virtual_hosted else place.endpoint
            )

    def _azure(self) -> None:
        connection = azure_connection(self._environment)
        account = (
            self._settings.account
            or connection.get("account_name")
            or self._environment.get("AZURE_STORAGE_ACCOUNT_NAME")
            or self._environment.get("AZURE_STORAGE_ACCOUNT")
        )
        if not account:
            raise UsageError(
                f"{self._url} needs the name of the storage account",
                hint="set account, AZURE_STORAGE_ACCOUNT_NAME or AZURE_STORAGE_CONNECTION_STRING",
            )
        self._config = {**connection, "account_name": account}
        if self._settings.endpoint:
            self._config["endpoint"] = self._settings.endpoint


# Only the content of files may go to a class that must be thawed: names, trees and logs are always needed.
_DATA_PACK: Final = re.compile(r"(?:\A|/)packs/data/")
_LIST_PAGE: Final = 1000
# Stores list 100 (OSS), 1,000 or 5,000 objects with one request.
_STORE_PAGE: Final = 100
# An answer that is none of a store is that of a proxy, and the next one mostly the store's.
_NONSENSE_PAUSES_SECONDS: Final = (0.1, 1.0, 3.0)
# Between the tries of obstore, which has pauses of its own.
_UNANSWERED_PAUSES_SECONDS: Final = (2.0,) * 8
# obstore goes on with a body that was cut, but for listings. Four minutes in all, as other reads are repeated.
_CUT_PAUSES_SECONDS: Final = (0.5, 1.0, 2.0, 4.0, 8.0, *[15.0] * 15)
_DELETE_BATCH: Final = 1000
_DELETE_THREADS: Final = 8
# Two creates of one name at one moment; the other one is over in milliseconds.
_CONFLICT_PAUSES_SECONDS: Final = (0.05, 0.2, 1.0, 3.0)
_RANGE_NOT_SATISFIABLE: Final = 416
_READ_CHUNK_BYTES: Final = 1 << 20
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)

_Result = TypeVar("_Result")


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
        self._obstore: Any = _import_obstore()
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
        size_bytes = sum(len(part) for part in data)
        attributes = None
        if self._storage_class and _DATA_PACK.search(name):
            attributes = {"Storage-Class": self._storage_class}

        def send() -> None:
            client = self._clients.sending(size_bytes)
            # An iterator of buffers is sent as it is; joined, it would be copied.
            body = data[0] if len(data) == 1 else iter(data)
            self._obstore.put(client, name, body, use_multipart=False, attributes=attributes)

        self._write("store", name, send, body_bytes=size_bytes)

    def create(self, name: str, data: bytes) -> bool:
        """Store the object if the name is free; False if it is taken."""
        check_name(name)
        for pause_seconds in (*_CONFLICT_PAUSES_SECONDS, None):
            created = self._write(
                "create",
                name,
                lambda: self._put_if_absent(name, data),
                body_bytes=len(data),
                may_repeat=was_not_done,
            )
            if created is not None:
                return created
            if pause_seconds is not None:
                self._sleep(pause_seconds)
        raise RemoteUnreachable(f"cannot create {name}: the store sees another create of it all the time")

    def _put_if_absent(self, name: str, data: bytes) -> bool | None:
        """Return as `create`, or None while another create of the name is under way."""
        client = self._clients.creating
        # The client's header does it for OSS.
        how = {} if self._clients.is_oss else {"mode": "create"}
        try:
            self._obstore.put(client, name, data, use_multipart=False, **how)
        except (
            self._obstore.exceptions.AlreadyExistsError,
            self._obstore.exceptions.PreconditionError,
        ) as exc:
            return None if is_conflict(exc) else False
        return True

    def _write(
        self,
        doing: str,
        name: str,
        send: Callable[[], _Result],
        *,
        body_bytes: int = 0,
        may_repeat: Callable[[BaseException], bool] = lambda exc: True,
    ) -> _Result:
        """Send a request, again while it may succeed later; with a checksum from then on where the store wants one."""
        again = self._retries()
        is_checked = not self._clients.can_send_checksums
        while True:
            try:
                return send()
            except CiuicError:
                raise
            except Exception as exc:
                error = self._failure(exc, doing, name, writes=True, body_bytes=body_bytes)
                if not is_checked and wants_checksum(exc):
                    self._clients.send_checksums()
                    is_checked = True
                    continue
                if not isinstance(error, RemoteUnreachable) or not may_repeat(exc):
                    raise error from None
            again(error)

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
        that has several pages. An end where one may come is asked for again, after the last object. A store that answers with the
        same page for ever, as a proxy does that ignores where a page begins, is refused.
        """
        again = self._retries(reads=True)
        progress = ListingProgress(prefix)
        asked_again = False
        while True:
            number = 0
            try:
                for meta in self._listed(prefix, after):
                    number += 1
                    after = meta["path"]
                    progress.check(after)
                    if after.startswith(prefix):
                        yield _info(meta)
            except RemoteUnreachable as error:
                if number and not isinstance(error, NonsenseReply):
                    # It went on: what was waited for before is over. Pages that begin again go on for ever.
                    again = self._retries(reads=True)
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
        what = names if isinstance(names, str) else "objects"

        def send() -> None:
            try:
                self._obstore.delete(self._clients.small, names)
            except FileNotFoundError as exc:
                error = self._failure(exc, "delete", "objects")
                if not isinstance(error, NoSuchObject):
                    raise error from None
            except BaseException as exc:
                # By name: pyo3 exports no such class. obstore panics where the reply names an object that was not asked about.
                if type(exc).__name__ != "PanicException":
                    raise
                raise NonsenseReply(
                    f"cannot delete {what}: the reply names other objects than the request",
                    hint="a proxy may have answered in place of the store",
                ) from None

        self._write("delete", what, send)

    def reconnect(self) -> None:
        """Make new connections for the reads that begin from now on."""
        self._clients.renew_reading()

    def close(self) -> None:
        """Do nothing: obstore closes its connections with its clients."""

    def _read(self, name: str, request: Callable[[], _Result]) -> _Result:
        again = self._retries(reads=True)
        while True:
            try:
                return request()
            except CiuicError:
                raise
            except Exception as exc:
                if status_of(exc) == _RANGE_NOT_SATISFIABLE:
                    raise _OutsideObject from None
                error = self._failure(exc, "read", name)
                # obstore has gone on with a body that was cut for as long as that helps.
                if not isinstance(error, RemoteUnreachable) or isinstance(error, CutReply):
                    raise error from None
            again(error)

    def _retries(self, *, reads: bool = False) -> Callable[[RemoteUnreachable], None]:
        """Return what waits before a request is repeated, a read over new connections, and raises its error in the end."""
        nonsense, cut, other = map(
            iter, (_NONSENSE_PAUSES_SECONDS, _CUT_PAUSES_SECONDS, _UNANSWERED_PAUSES_SECONDS)
        )
        ends = time.monotonic() + _RETRY_TIMEOUT.total_seconds()

        def again(error: RemoteUnreachable) -> None:
            is_cut, is_nonsense = reads and isinstance(error, CutReply), isinstance(error, NonsenseReply)
            pause_seconds = next(cut if is_cut else nonsense if is_nonsense else other, None)
            is_over = not is_cut and not is_nonsense and time.monotonic() > ends
            if pause_seconds is None or is_over or isinstance(error, UntrustedStore):
                raise error from None
            self._sleep(pause_seconds)
            if reads:
                self.reconnect()

        return again

    def _failure(
        self,
        exc: Exception,
        doing: str,
        name: str,
        *,
        writes: bool = False,
        lists: bool = False,
        body_bytes: int = 0,
    ) -> CiuicError:
        return failure(
            exc, doing, name, writes=writes, lists=lists, bucket=self._bucket, body_bytes=body_bytes
        )


class _OutsideObject(Exception):
    """A range lies outside the object."""


def _info(meta: dict[str, Any]) -> ObjectInfo:
    modified = meta["last_modified"] - _EPOCH
    # Not by timestamp(), whose floating point loses the last digits.
    nanoseconds = (modified.days * 86400 + modified.seconds) * 10**9 + modified.microseconds * 1000
    return ObjectInfo(meta["path"], meta["size"], nanoseconds)
