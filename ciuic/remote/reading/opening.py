"""Open a remote for reading: all of its spaces, and the snapshots that its logs commit."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final

from ciuic.errors import UsageError
from ciuic.remote import access
from ciuic.remote.access import Remote, find_spaces, lost_spaces, open_remote, repository_spaces
from ciuic.remote.documents import LiveManifest
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.log_reader import (
    UPLOADING_NS,
    LogReader,
    naming_memory,
    unlogged_manifests,
)
from ciuic.remote.object_names import MANIFESTS_PREFIX, parse_manifest
from ciuic.remote.objects.model import ObjectInfo, Objects
from ciuic.remote.objects.opening import open_objects, open_versions
from ciuic.remote.objects.urls import StoreSettings
from ciuic.remote.reading.cache_directory import cache_root as usual_cache_root
from ciuic.remote.reading.cache_directory import check_own, open_cache
from ciuic.remote.reading.remote_packs import DEFAULT_MEMORY_BYTES, DEFAULT_THREADS
from ciuic.remote.reading.remote_repository import RemoteRepository, SpaceReader
from ciuic.remote.reading.remote_snapshots import (
    CommittedEntry,
    Manifests,
    RemoteSnapshots,
    named_entries,
    stored_manifest,
)
from ciuic.remote.reading.retry_policy import DEFAULT_RETRY_SECONDS, RetryingObjects, RetryPolicy
from ciuic.remote.reading.versions import open_remote_versions
from ciuic.remote.sealing.key_slots import GoesOn, SlotSecret
from ciuic.repository import log as events
from ciuic.types import SnapshotId

# Manifests that no log names are uploads under way, a few at a time, or damage of which a part says enough.
_MAX_UNKNOWN: Final = 32


class ReadableRemote:
    """Snapshots of a remote as of its opening, and the repositories that they are read from; context manager.

    Hosts that share the remote's identity are one repository. Each repository with an identity of its own is another:
    chunks have other ids there.
    """

    def __init__(
        self,
        remote: Remote,
        snapshots: RemoteSnapshots,
        readers: Sequence[SpaceReader],
        lost_spaces: Sequence[DamagedRemote],
    ) -> None:
        """Take the parts; see `read_remote`."""
        self.remote: Final = remote
        self.snapshots: Final = snapshots
        """Snapshots of all repositories, or of one host."""
        self.readers: Final = tuple(readers)
        self.lost_spaces: Final = lost_spaces
        """Spaces that have objects and no remote.json. Snapshots in them are not among ``snapshots``."""
        self.suddenly_given_up: dict[str, int] = {}
        """Snapshots of hosts whose newest were all given up, by the host's label, as far as no collection has deleted them."""
        self._closing = ExitStack()

    @property
    def log_damage(self) -> list[DamagedRemote]:
        """Entries of logs that could not be read, and manifests whose log is gone or cut. What they commit is not among ``snapshots``."""
        return [
            DamagedRemote(f"{reader.space.objects.url}/{name}", reason)
            for reader in self.readers
            for name, reason in (
                *(
                    problem
                    for damaged in reader.damaged_logs.values()
                    for problem in damaged.problems.items()
                ),
                *((one.name, f"no log commits or removes it: {one.reason}") for one in reader.unlogged),
            )
        ]

    @property
    def repositories(self) -> list[RemoteRepository]:
        """All repositories, each with its part of the snapshots; the remote's own first."""
        return [
            RemoteRepository(reader, self.snapshots.only(self._ids_in(reader))) for reader in self.readers
        ]

    def repository_of(self, ids: Iterable[SnapshotId]) -> RemoteRepository:
        """Return the repository that these snapshots are read from.

        Raises:
            UsageError: they lie in several, whose chunks cannot be compared.
        """
        wanted = set(ids)
        having = [reader for reader in self.readers if wanted.intersection(self._ids_in(reader))]
        if len(having) > 1:
            raise UsageError(
                "these snapshots belong to repositories that name chunks differently, and cannot be compared",
                hint="restore one of them, and compare the other with it",
            )
        reader = having[0] if having else self.readers[0]
        return RemoteRepository(reader, self.snapshots.only(self._ids_in(reader)))

    def read_anew(self) -> None:
        """Take no pack and no manifest from the cache, to find out whether the bucket has them all as they were."""
        for reader in self.readers:
            reader.meta.read_anew()
        self.read_manifests_anew()

    def read_manifests_anew(self) -> None:
        """Take no manifest from the cache."""
        for entry in self.snapshots.entries.values():
            entry.manifests.read_anew()

    def of_host(self, name: str) -> ReadableRemote:
        """Return the same with the snapshots of one host alone. It is closed with this one.

        Raises:
            NotFound: the host has no snapshot.
        """
        return ReadableRemote(self.remote, self.snapshots.of_host(name), self.readers, self.lost_spaces)

    def labelled(
        self, job: str | None, epoch: int | None, step: int | None, host: str | None
    ) -> ReadableRemote:
        """Return the same with the snapshots that have these labels alone; see `RemoteSnapshots.labelled`."""
        snapshots = self.snapshots.labelled(job, epoch, step, host)
        return ReadableRemote(self.remote, snapshots, self.readers, self.lost_spaces)

    def close(self) -> None:
        """Close everything that was opened."""
        self._closing.close()

    def __enter__(self) -> ReadableRemote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ids_in(self, reader: SpaceReader) -> list[str]:
        url = reader.space.objects.url
        return [id_ for id_, entry in self.snapshots.entries.items() if entry.manifests.url == url]

    def keep_open(self, closing: ExitStack) -> None:
        """Take over what `close` has to close."""
        self._closing = closing.pop_all()


def open_remote_repository(
    url: str,
    settings: StoreSettings | None,
    secrets: Sequence[SlotSecret],
    *,
    require_sealed: bool = False,
    goes_on: GoesOn | None = None,
    cache_root: Path | None = None,
    all_claims: bool = False,
    wrap: Callable[[Objects], Objects] = lambda objects: objects,
) -> ReadableRemote:
    """Open the remote at a URL for reading, on a host that need not know it.

    Args:
        url: Place of the remote.
        settings: What the URL does not say.
        secrets: Passphrases and keys; none for a remote that is not sealed.
        require_sealed: Refuse a remote in clear, whose configuration says that it is encrypted.
        goes_on: As in `ciuic.remote.access.open_remote`.
        cache_root: Where caches lie; None for the usual place.
        all_claims: As in `read_remote`.
        wrap: Wraps the store, such as for counting.

    Raises:
        NotFound: there is no remote.
        WrongKey: no secret fits, or one is needed.
        UsageError: the URL is none of a remote.
        DamagedRemote: remote.json or a key slot was altered.
        RolledBack: the remote is older than this host has seen it.
        RemoteUnreachable: the store does not answer.
    """
    objects = wrap(open_objects(url, settings))
    try:
        remote = open_remote(objects, secrets, goes_on=goes_on)
        if require_sealed:
            access.require_sealed(remote)
    except BaseException:
        objects.close()
        raise
    return read_remote(remote, cache_root=cache_root, close_objects=True, all_claims=all_claims)


def open_behind_deletions(
    url: str,
    settings: StoreSettings | None,
    secrets: Sequence[SlotSecret],
    *,
    before_ns: int | None = None,
    require_sealed: bool = False,
    cache_root: Path | None = None,
) -> ReadableRemote:
    """Open the remote at a URL as it was stored, also after deletions and overwrites; the bucket has versions.

    Args:
        url: Place of the remote.
        settings: What the URL does not say.
        secrets: Passphrases and keys; none for a remote that is not sealed.
        before_ns: Leave out what was stored at this time or later (ns since 1970); None for nothing.
        require_sealed: Refuse a remote in clear, whose configuration says that it is encrypted.
        cache_root: Where caches lie; None for the usual place.

    Raises:
        NotFound: there was never a remote.
        WrongKey: no secret fits, or one is needed.
        UsageError: versions of this kind of store cannot be read.
        DamagedRemote: no version of a log entry is as it was stored.
        RemoteUnreachable: the store does not answer.
    """
    versions = open_versions(url, settings)
    try:
        remote = open_remote_versions(versions, secrets, before_ns=before_ns).remote
        if require_sealed:
            access.require_sealed(remote)
    except BaseException:
        versions.close()
        raise
    with ExitStack() as closing:
        closing.callback(versions.close)
        root = usual_cache_root() if cache_root is None else cache_root
        # Apart from the usual cache: what this one sees of logs is more than what is there, and of an earlier time less.
        if before_ns is None:
            root /= "versions"
        else:
            root = closing.enter_context(_passing_cache(root))
        # Anybody who may write there can have made up packs.
        opened = read_remote(remote, cache_root=root, skips_unreadable=True)
        closing.callback(opened.close)
        result = ReadableRemote(opened.remote, opened.snapshots, opened.readers, opened.lost_spaces)
        result.keep_open(closing)
    return result


@contextmanager
def _passing_cache(root: Path) -> Iterator[Path]:
    """Provide a cache directory that is deleted at the end: another time is asked for by each run."""
    try:
        check_own(root)
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = tempfile.mkdtemp(prefix="versions-", dir=root)
    except OSError:
        # `open_cache` finds another place.
        yield root / "versions-none"
        return
    try:
        yield Path(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def read_remote(
    remote: Remote,
    *,
    cache_root: Path | None = None,
    retry_seconds: float = DEFAULT_RETRY_SECONDS,
    threads: int = DEFAULT_THREADS,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    close_objects: bool = False,
    skips_unreadable: bool = False,
    all_claims: bool = False,
) -> ReadableRemote:
    """Read the logs of an open remote and return its snapshots; those of damaged logs as far as they can be proved.

    Args:
        remote: Open remote.
        cache_root: Where caches lie; None for the usual place.
        retry_seconds: Time for which a request without an answer is repeated.
        threads: Ranges that are read at the same time.
        memory_bytes: Limit of what is read ahead.
        close_objects: Close the remote's store at the end, or here after an error.
        skips_unreadable: Say nothing of packs whose table cannot be read, unless a snapshot needs them.
        all_claims: Return the snapshots as well that logs gave up, as far as no collection has deleted them.

    Raises:
        RolledBack: the remote is older than this host has seen it.
        RemoteUnreachable: the store does not answer.
    """
    retry = RetryPolicy(retry_seconds)
    entries: list[CommittedEntry] = []
    readers: list[SpaceReader] = []
    sudden: dict[str, int] = {}
    with ExitStack() as closing:
        if close_objects:
            closing.callback(remote.objects.close)
        retrying = remote._replace(objects=RetryingObjects(remote.objects, retry))
        # Over a long way a round trip is dearer than a thread: what waits for no other answer is asked for at once.
        pool = ThreadPoolExecutor(2, thread_name_prefix="listing")
        closing.callback(pool.shutdown, wait=False, cancel_futures=True)
        closing.callback(retry.end)
        found_spaces = pool.submit(find_spaces, retrying.objects)
        damaged_spaces: list[DamagedRemote] = []
        for space in _spaces(retrying, found_spaces, damaged_spaces):
            cache = closing.enter_context(open_cache(remote, space, cache_root))
            reader = SpaceReader(
                space,
                cache,
                retry,
                threads=threads,
                memory_bytes=memory_bytes,
                skips_unreadable=skips_unreadable,
            )
            closing.callback(reader.close)
            readers.append(reader)
            logs = LogReader(
                space.objects, space.sealer, cache_path=str(cache.path / "logs"), skip_damaged=True
            )
            # What collections deleted is there as well where every version is read.
            listed = None if skips_unreadable else pool.submit(_listed, space)
            with naming_memory(str(cache.path)):
                logs.refresh()
                if unknown := [] if listed is None else _unknown(listed.result(), logs):
                    # Their commits may have come after the logs were listed.
                    logs.refresh()
            reader.damaged_logs = logs.damaged
            reader.unlogged = unlogged_manifests(
                space.objects,
                space.sealer,
                _unknown(unknown, logs)[:_MAX_UNKNOWN],
                logs,
                time.time_ns() - UPLOADING_NS,
            )
            for one in reader.unlogged:
                events.warning(
                    "remote_commit_lost", remote=space.objects.url, manifest=one.name, reason=one.reason
                )
            for damaged in logs.damaged.values():
                events.warning("remote_log_damaged", remote=space.objects.url, error=damaged.error.message)
            manifests = Manifests(space, cache, logs, prefer=reader.lookup.prefer)
            live = logs.live()
            if listed is not None and not all_claims:
                sudden |= _suddenly_given_up(listed.result(), logs)
            entries += (CommittedEntry(one, manifests) for one in live.values())
            if all_claims and listed is not None:
                committed = {(one.repository, one.snapshot) for one in live.values()}
                entries += (
                    CommittedEntry(one, manifests, is_given_up=True)
                    for one in _given_up(space, listed.result(), logs)
                    if (one.repository, one.snapshot) not in committed
                )
        pool.shutdown()
        lost = [*lost_spaces(remote.objects, found_spaces.result()), *damaged_spaces]
        opened = ReadableRemote(remote, RemoteSnapshots(named_entries(entries)), readers, lost)
        opened.suddenly_given_up = sudden
        opened.keep_open(closing)
    return opened


_NEWEST: Final = 3


def are_newest_gone(live: Collection[int], gone: Collection[int]) -> bool:
    """Return whether the newest three were all given up, and less than a third is live: every retention keeps the newest.

    Args:
        live: Store's times of the manifests of live snapshots.
        gone: Store's times of those that were given up and are stored.
    """
    stored = sorted([*((time_ns, False) for time_ns in gone), *((time_ns, True) for time_ns in live)])
    return bool(gone) and not any(is_live for _, is_live in stored[-_NEWEST:]) and 3 * len(live) < len(stored)


def _suddenly_given_up(stored: Sequence[ObjectInfo], logs: LogReader) -> dict[str, int]:
    """Return the number of given-up snapshots that are stored, of each host whose newest are all among them."""
    live, removed = logs.live(), logs.removed()
    times: dict[str, tuple[list[int], list[int]]] = {}
    for info in stored:
        if (name := parse_manifest(info.name)) and (info.name in live or info.name in removed):
            times.setdefault(name.host, ([], []))[info.name not in live].append(info.modified_ns)
    return {host: len(gone) for host, (here, gone) in times.items() if are_newest_gone(here, gone)}


def _spaces(own: Remote, found: Future[dict[str, bool]], damaged: list[DamagedRemote]) -> Iterator[Remote]:
    yield own
    yield from repository_spaces(own, found.result(), damaged)


def _unknown(stored: Sequence[ObjectInfo], logs: LogReader) -> list[ObjectInfo]:
    """Return the manifests that no log commits or removes; a reader waits for each."""
    known = {*logs.live(), *logs.removed()}
    return [info for info in stored if info.name not in known]


def _given_up(space: Remote, stored: Sequence[ObjectInfo], logs: LogReader) -> Iterator[LiveManifest]:
    """Yield the snapshots of manifests that logs removed, or that they leave out: a planted sum is no reason to hide one."""
    live, removed = logs.live(), logs.removed()
    since = time.time_ns() - UPLOADING_NS
    names = [
        info.name
        for info in stored
        if info.name not in live and (info.name in removed or info.modified_ns < since)
    ]
    with ThreadPoolExecutor(DEFAULT_THREADS) as pool:
        found = pool.map(partial(stored_manifest, space.objects, space.sealer), names)
        yield from (one for one in found if one is not None)


def _listed(space: Remote) -> list[ObjectInfo]:
    return list(space.objects.list(MANIFESTS_PREFIX))
