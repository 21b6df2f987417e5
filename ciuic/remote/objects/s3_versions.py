"""Versions of objects in S3-compatible stores.

References:
    Amazon S3 API Reference: ListObjectVersions, GetObject (versionId), PutObjectRetention
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any, Final

from ciuic.remote.objects.model import RemoteRefused
from ciuic.remote.objects.s3_client import S3Client, error_of
from ciuic.remote.objects.versions import Version
from ciuic.repository.ids import Bytes

_PAGE: Final = 1000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
_RANGE_NOT_SATISFIABLE: Final = 416


class S3Versions:
    """`ObjectVersions` of a prefix of a bucket."""

    def __init__(self, s3: S3Client) -> None:
        self._s3 = s3
        self._lock_mode = ""

    @property
    def url(self) -> str:
        """URL of the prefix."""
        return str(self._s3.url)

    def list(self, prefix: str, *, after: str = "") -> Iterator[Version]:
        """Yield all versions and marks of deletion of names that begin with ``prefix``."""
        arguments: dict[str, Any] = {
            "Bucket": self._s3.bucket,
            "Prefix": self._s3.key(prefix),
            "MaxKeys": _PAGE,
        }
        if after:
            arguments["KeyMarker"] = self._s3.key(after)
        while True:
            with self._s3.request("list versions of", prefix or "objects") as client:
                page = client.list_object_versions(**arguments)
            found = [self._version(entry, is_deletion=False) for entry in page.get("Versions", ())]
            found += [self._version(entry, is_deletion=True) for entry in page.get("DeleteMarkers", ())]
            # A page has them in two lists. Sorting is stable: the versions of a name stay newest first; a name that goes
            # on in the next page is the last one here. Part by part, for that is the order of SeaweedFS as well.
            found.sort(key=lambda version: version.name.split("/"))
            yield from found
            if not page.get("IsTruncated"):
                return
            arguments["KeyMarker"] = page["NextKeyMarker"]
            # Where a page ends with a whole name, some stores name no version.
            arguments.pop("VersionIdMarker", None)
            if marker := page.get("NextVersionIdMarker"):
                arguments["VersionIdMarker"] = marker

    def read(self, version: Version, offset: int, length: int) -> Bytes:
        """Return bytes of a version; fewer where it ends."""
        length = min(length, version.size_bytes - offset)
        if length <= 0:
            return b""
        with self._s3.request("read", version.name) as client:
            try:
                reply = client.get_object(
                    Bucket=self._s3.bucket,
                    Key=self._s3.key(version.name),
                    VersionId=version.id,
                    Range=f"bytes={offset}-{offset + length - 1}",
                )
                data: bytes = reply["Body"].read(length)
            except Exception as exc:
                if error_of(exc)[1] == _RANGE_NOT_SATISFIABLE:
                    return b""
                raise
        return data

    def lock(self, version: Version, until_ns: int) -> None:
        """Have the store refuse to delete the version before this time, in the mode of the bucket's default."""
        until = _EPOCH + timedelta(microseconds=until_ns // 1000)
        key = {"Bucket": self._s3.bucket, "Key": self._s3.key(version.name), "VersionId": version.id}
        retention = {"Mode": self._mode(), "RetainUntilDate": until}
        try:
            with self._s3.request("lock", version.name) as client:
                client.put_object_retention(**key, Retention=retention)
        except RemoteRefused:
            # A lock that lasts longer already is refused as well.
            with self._s3.request("lock", version.name) as client:
                standing = client.get_object_retention(**key)["Retention"]["RetainUntilDate"]
            if standing < until:
                raise

    def _mode(self) -> str:
        """Return the mode of the bucket's default retention; GOVERNANCE where it has none."""
        if not self._lock_mode:
            with self._s3.request("read the lock configuration of", self._s3.bucket) as client:
                try:
                    found = client.get_object_lock_configuration(Bucket=self._s3.bucket)
                except Exception as exc:
                    code, status = error_of(exc)
                    if code == "ObjectLockConfigurationNotFoundError" or status in (404, 501):
                        raise RemoteRefused(
                            f"the bucket {self._s3.bucket} has no object lock",
                            hint="docs/remote.md, Ransomware and mistakes, says how a bucket gets it",
                        ) from None
                    raise
            rule = found.get("ObjectLockConfiguration", {}).get("Rule", {}).get("DefaultRetention", {})
            self._lock_mode = rule.get("Mode", "GOVERNANCE")
        return self._lock_mode

    def delete_marks(self, name: str) -> None:
        """Delete a name; its versions stay."""
        with self._s3.request("delete", name) as client:
            client.delete_object(Bucket=self._s3.bucket, Key=self._s3.key(name))

    def close(self) -> None:
        """Close connections."""
        self._s3.close()

    def _version(self, entry: dict[str, Any], *, is_deletion: bool) -> Version:
        modified = entry["LastModified"] - _EPOCH
        return Version(
            name=self._s3.name(entry["Key"]),
            id=entry.get("VersionId", "null"),
            size_bytes=entry.get("Size", 0),
            modified_ns=(modified.days * 86400 + modified.seconds) * 10**9 + modified.microseconds * 1000,
            digest=entry.get("ETag", "").strip('"'),
            is_current=bool(entry.get("IsLatest")) and not is_deletion,
            is_deletion=is_deletion,
        )
