"""Open the objects of a remote from its URL."""

from __future__ import annotations

from ciuic.remote.objects.directory_objects import DirectoryObjects
from ciuic.remote.objects.memory_objects import MemoryObjects
from ciuic.remote.objects.model import Objects
from ciuic.remote.objects.obstore_objects import ObstoreObjects
from ciuic.remote.objects.urls import RemoteUrl, StoreSettings, parse_url


def open_objects(
    url: str | RemoteUrl, settings: StoreSettings | None = None, *, make: bool = False
) -> Objects:
    """Return the objects below a URL. Nothing is asked of an object store yet.

    Args:
        url: place of the remote.
        settings: what the URL does not say.
        make: make the directory of a ``file`` URL where it is missing; a bucket is never made.

    Raises:
        UsageError: the URL or a setting is wrong, or obstore is not installed.
        NoCredentials: the shared files name credentials that cannot be used.
        RemoteUnreachable: a directory is not there.
    """
    where = parse_url(url) if isinstance(url, str) else url
    if where.scheme == "file":
        return DirectoryObjects(where.prefix, make=make)
    if where.scheme == "memory":
        return MemoryObjects(where.bucket, where.prefix)
    return ObstoreObjects(where, settings or StoreSettings())
