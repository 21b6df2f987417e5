"""Storage classes of S3-compatible stores: by botocore, because obstore has no request for them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any, Final

from ciuic.remote.objects.model import NoSuchObject, check_name
from ciuic.remote.objects.s3_client import S3Client, error_of
from ciuic.remote.objects.storage_classes import ListedClass, ObjectClass, ThawSpeed, find_class

_SPEEDS: Final[dict[ThawSpeed, str]] = {"standard": "Standard", "bulk": "Bulk", "expedited": "Expedited"}
_EXPIRY: Final = re.compile(r'expiry-date="([^"]{1,64})"')
# Answers to a request to thaw what is being thawed, or can be read.
_THAWS_ALREADY: Final = ("RestoreAlreadyInProgress", "InvalidObjectState")
_DEFAULT_CLASS: Final = "STANDARD"


class S3Classes:
    """`ObjectClasses` of an S3-compatible store.

    References:
        Amazon S3 API Reference: CopyObject, RestoreObject, HeadObject (x-amz-restore), ListObjectsV2
    """

    def __init__(self, client: S3Client) -> None:
        self._client = client

    @property
    def scheme(self) -> str:
        """Scheme of the remote's URL."""
        return self._client.url.scheme

    def list(self, prefix: str) -> Iterator[ListedClass]:
        """Yield name and storage class of the objects whose names begin with ``prefix``."""
        arguments: dict[str, Any] = {"Bucket": self._client.bucket, "Prefix": self._client.key(prefix)}
        while True:
            with self._client.request("list", prefix) as client:
                page = client.list_objects_v2(**arguments)
            for found in page.get("Contents", ()):
                yield ListedClass(self._client.name(found["Key"]), _class(found.get("StorageClass")))
            if not page.get("IsTruncated"):
                return
            arguments["ContinuationToken"] = page["NextContinuationToken"]

    def look(self, name: str) -> ObjectClass:
        """Return the class of an object, and whether it can be read."""
        check_name(name)
        with self._client.request("look at", name) as client:
            found = client.head_object(Bucket=self._client.bucket, Key=self._client.key(name))
        storage_class, restore = _class(found.get("StorageClass")), found.get("Restore", "")
        if 'ongoing-request="true"' in restore:
            return ObjectClass(storage_class, "thawing")
        if 'ongoing-request="false"' in restore:
            return ObjectClass(storage_class, "ready", _expiry_ns(restore))
        is_archive = find_class(self.scheme, storage_class).is_archive
        return ObjectClass(storage_class, "archived" if is_archive else "ready")

    def change(self, name: str, storage_class: str) -> None:
        """Copy the object onto itself in another class, within the store."""
        check_name(name)
        key = self._client.key(name)
        with self._client.request("move", name) as client:
            client.copy_object(
                Bucket=self._client.bucket,
                Key=key,
                CopySource={"Bucket": self._client.bucket, "Key": key},
                StorageClass=storage_class,
                # SeaweedFS takes COPY for a copy that changes nothing; a pack has no metadata to lose.
                MetadataDirective="REPLACE",
            )

    def thaw(self, name: str, speed: ThawSpeed, days: int) -> None:
        """Ask the store to make an archived object readable for some days."""
        check_name(name)
        request = {"Days": days, "GlacierJobParameters": {"Tier": _SPEEDS[speed]}}
        with self._client.request("thaw", name) as client:
            try:
                client.restore_object(
                    Bucket=self._client.bucket, Key=self._client.key(name), RestoreRequest=request
                )
            except Exception as error:
                code, status = error_of(error)
                if code in _THAWS_ALREADY:
                    return
                if status == 404 and code != "NoSuchBucket":
                    raise NoSuchObject(name) from None
                raise


def _class(name: str | None) -> str:
    return "" if name in (None, "", _DEFAULT_CLASS) else str(name).upper()


def _expiry_ns(restore: str) -> int | None:
    match = _EXPIRY.search(restore)
    try:
        return int(parsedate_to_datetime(match[1]).timestamp()) * 10**9 if match else None
    except (ValueError, OverflowError):
        return None
