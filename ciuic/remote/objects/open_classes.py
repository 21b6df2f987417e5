"""Open the storage classes of a remote's objects from its URL."""

from __future__ import annotations

from ciuic.errors import UsageError
from ciuic.remote.objects.azure_classes import AzureClasses
from ciuic.remote.objects.s3_classes import S3Classes
from ciuic.remote.objects.s3_client import S3Client
from ciuic.remote.objects.storage_classes import ObjectClasses
from ciuic.remote.objects.urls import RemoteUrl, StoreSettings, parse_url


def open_classes(url: str | RemoteUrl, settings: StoreSettings | None = None) -> ObjectClasses:
    """Return the storage classes of the objects below a URL. Nothing is asked of the store yet.

    Raises:
        UsageError: the store has no classes that can be set from here, or its library is not installed.
        NoCredentials: there are none.
    """
    where = parse_url(url) if isinstance(url, str) else url
    if where.scheme == "s3":
        return S3Classes(S3Client(where, settings or StoreSettings()))
    if where.scheme == "az":
        return AzureClasses(where, settings or StoreSettings())
    hint = ""
    if where.scheme in ("gs", "oss"):
        # Google reads all classes at once; the S3 interface of OSS has no RestoreObject.
        hint = "a lifecycle rule of the bucket for packs/data/ does it, with classes that are read at once"
    raise UsageError(f"storage classes of {where.scheme}:// are not changed from here", hint=hint)
