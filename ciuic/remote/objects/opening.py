"""Open the objects of a remote from its URL, their versions, and their storage classes.

Each kind of store is imported when one of its kind is opened: all of them take 10 ms of a command's 150.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ciuic.errors import UsageError
from ciuic.remote.objects.model import Objects, ObjectVersions
from ciuic.remote.objects.urls import RemoteUrl, StoreSettings, parse_url

if TYPE_CHECKING:
    from ciuic.remote.objects.storage_classes import ObjectClasses


def open_objects(
    url: str | RemoteUrl, settings: StoreSettings | None = None, *, make: bool = False
) -> Objects:
    """Return the objects below a URL. Nothing is asked of an object store yet.

    Args:
        url: place of the remote.
        settings: what the URL does not say.
        make: make the directory of a ``file`` or ``ssh`` URL where it is missing; a bucket is never made.

    Raises:
        UsageError: the URL or a setting is wrong, or obstore is not installed.
        NoCredentials: the shared files name credentials that cannot be used.
        RemoteUnreachable: a directory is not there.
    """
    where = parse_url(url) if isinstance(url, str) else url
    settings = settings or StoreSettings()
    if where.scheme == "file":
        from ciuic.remote.objects.directory_objects import DirectoryObjects

        return DirectoryObjects(where.prefix, make=make)
    if where.scheme == "memory":
        from ciuic.remote.objects.memory_objects import MemoryObjects

        return MemoryObjects(where.bucket, where.prefix)
    if where.scheme == "ssh":
        from ciuic.remote.objects.ssh_objects import SshObjects

        return SshObjects(where, settings, make=make)
    from ciuic.remote.objects.obstore_objects import ObstoreObjects

    return ObstoreObjects(where, settings)


def open_versions(
    url: str | RemoteUrl, settings: StoreSettings | None = None, environment: Mapping[str, str] = os.environ
) -> ObjectVersions:
    """Return all versions of the objects below a URL. Nothing is asked of the store yet.

    Raises:
        UsageError: botocore is not installed, or versions of this kind of store cannot be read.
        NoCredentials: the shared files name credentials that cannot be used.
    """
    where = parse_url(url) if isinstance(url, str) else url
    settings = settings or StoreSettings()
    if where.scheme not in ("s3", "oss"):
        raise UsageError(
            f"versions of {where.scheme}:// cannot be read here, only those of s3:// and oss://",
            hint="docs/remote.md, Ransomware and mistakes, says how to bring them back with the store's own tools",
        )
    from ciuic.remote.objects.s3_botocore import S3Client, S3Versions

    return S3Versions(S3Client(where, settings, environment))


def open_classes(url: str, settings: StoreSettings | None = None) -> ObjectClasses:
    """Return the storage classes of the data packs below a URL. Nothing is asked of the store yet.

    Raises:
        UsageError: the store has no classes that can be set from here, or its library is not installed.
        NoCredentials: there are none.
    """
    settings = settings or StoreSettings()
    where = parse_url(url)
    if where.scheme == "s3":
        from ciuic.remote.objects.s3_botocore import S3Classes, S3Client

        return S3Classes(S3Client(where, settings))
    if where.scheme == "az":
        from ciuic.remote.objects.azure_classes import AzureClasses

        return AzureClasses(where, settings)
    hint = ""
    if where.scheme in ("gs", "oss"):
        # Google reads all classes at once; the S3 interface of OSS has no RestoreObject.
        hint = "a lifecycle rule of the bucket for packs/data/ does it, with classes that are read at once"
    raise UsageError(f"storage classes of {where.scheme}:// are not changed from here", hint=hint)
