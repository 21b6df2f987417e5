"""Versions, locks and storage classes of objects in S3-compatible stores, over botocore: obstore has no request for them.

`S3Client` reaches the same bucket as the objects of the remote, with the same credentials. botocore is optional
(``ciuic[remote-versions]``) and imported when a client is made: nothing that uploads or restores needs it.

References:
    Amazon S3 API Reference: ListObjectVersions, GetObject (versionId), PutObjectRetention, RestoreObject
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from types import ModuleType
from typing import Any, Final

from ciuic.errors import CiuicError, UsageError, pip_install
from ciuic.remote.objects.credentials import (
    AlibabaProvider,
    AwsProvider,
    Credential,
    S3Place,
    aws_provider,
    s3_place,
)
from ciuic.remote.objects.failures import failure
from ciuic.remote.objects.model import NoSuchObject, NotAListing, RemoteRefused, Version, check_name
from ciuic.remote.objects.storage_classes import ListedClass, ObjectClass, ThawSpeed, find_class
from ciuic.remote.objects.urls import RemoteUrl, StoreSettings
from ciuic.repository.identity import Bytes

_CONNECT_TIMEOUT_SECONDS: Final = 10
_READ_TIMEOUT_SECONDS: Final = 30
# With the waits of botocore's "standard" mode, which end at 20 s each, about 30 s.
_MAX_ATTEMPTS: Final = 5
_MAX_CONNECTIONS: Final = 16


def _import_botocore() -> ModuleType:
    """Return the module botocore.session.

    Raises:
        UsageError: it is not installed; the message says how to.
    """
    try:
        import botocore.session
    except ImportError:
        raise UsageError(
            "versions, locks and storage classes of an object store need botocore",
            hint=pip_install("ciuic[remote-versions]"),
        ) from None
    module: ModuleType = botocore.session
    return module


class S3Client:
    """botocore's client of one bucket, and the names of a remote in it. May be used by several threads at once."""

    def __init__(
        self, url: RemoteUrl, settings: StoreSettings, environment: Mapping[str, str] = os.environ
    ) -> None:
        """Make the client; the store is not asked yet.

        Raises:
            UsageError: botocore is not installed, or the URL is of another kind of store.
            NoCredentials: the shared files name credentials that cannot be used.
        """
        if url.scheme not in ("s3", "oss"):
            raise UsageError(f"{url} has no interface of S3", hint="this works with s3:// and oss://")
        self.url: Final = url
        self.bucket: Final = url.bucket
        self._prefix: Final = f"{url.prefix}/" if url.prefix else ""
        self.client: Final = _make_client(url, s3_place(url, settings, environment), environment)
        """Client of botocore, that of ``boto3.client("s3")``, whose methods take `bucket` and `key`."""

    def key(self, name: str) -> str:
        """Return the key in the bucket of an object of the remote, or of a prefix of names."""
        return self._prefix + name

    def name(self, key: str) -> str:
        """Return the name in the remote of a key that begins with the remote's prefix."""
        return key[len(self._prefix) :]

    @contextmanager
    def request(self, doing: str, name: str, *, writes: bool = False) -> Iterator[Any]:
        """Provide the client for requests whose failures are raised as the errors of `Objects`.

        Args:
            doing: Operation for the message, such as ``read``.
            name: Object or prefix that it concerns.
            writes: Whether it is to store something.
        """
        try:
            yield self.client
        except CiuicError:
            raise
        except Exception as exc:
            raise _s3_failure(exc, doing, name, writes=writes, bucket=self.bucket) from None

    def close(self) -> None:
        """Close connections."""
        self.client.close()


def _begins_again(prefix: str) -> NotAListing:
    """Return the error for a page that names itself as the next one: asked for it, the store would answer so for ever."""
    return NotAListing(
        f"cannot list {prefix or 'objects'}: the page that was answered names itself as the next one",
        hint="a proxy may have answered in place of the store",
    )


def _s3_failure(
    exc: Exception, doing: str, name: str, *, writes: bool = False, bucket: str = ""
) -> CiuicError:
    """Return the error of `Objects` that stands for one of botocore; raise it ``from None``.

    Args:
        exc: What botocore raised.
        doing: Operation for the message.
        name: Object or prefix that it concerned.
        writes: Whether the request was to store something.
        bucket: Name of the bucket for the message.
    """
    code, status = _error_of(exc)
    if not status:
        if type(exc).__name__ in (
            "NoCredentialsError",
            "PartialCredentialsError",
            "CredentialRetrievalError",
        ):
            return RemoteRefused(f"cannot {doing} {name}: no credentials in the environment or shared files")
        return failure(exc, doing, name, writes=writes, bucket=bucket)
    message = exc.response.get("Error", {}).get("Message", "")  # type: ignore[attr-defined]
    # In the words in which obstore tells the same, so that one place decides what they mean.
    text = f"Server returned non-2xx status code: {status} <Code>{code}</Code><Message>{message}"
    return failure(_Answer(text), doing, name, writes=writes, bucket=bucket)


def _error_of(exc: BaseException) -> tuple[str, int]:
    """Return the store's code (``InvalidObjectState``) and the HTTP status of a reply; empty and 0 without one."""
    response = getattr(exc, "response", None)
    if not isinstance(response, dict):
        return "", 0
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(response.get("Error", {}).get("Code", "")), int(status)


class _Answer(Exception):
    """Reply of the store with an error."""


def _make_client(url: RemoteUrl, place: S3Place, environment: Mapping[str, str]) -> Any:
    # Before the library: what is wrong with the shared files is told in our words.
    provider: AlibabaProvider | AwsProvider | None
    provider = AlibabaProvider(environment) if url.scheme == "oss" else aws_provider(environment)
    session_module = _import_botocore()
    from botocore import UNSIGNED
    from botocore.config import Config

    # Shared files are read by `AwsProfile` alone, with the environment that the caller gives: botocore's own reading
    # would take those of this process, and settings of a profile could lead requests elsewhere.
    unset = (None, None, None, None)
    nowhere = (None, None, os.devnull, None)
    session = session_module.Session(
        session_vars={"profile": unset, "config_file": nowhere, "credentials_file": nowhere}
    )
    options: dict[str, Any] = {}
    if environment.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true"):
        options["signature_version"] = UNSIGNED
    elif environment.get("AWS_ACCESS_KEY_ID") and environment.get("AWS_SECRET_ACCESS_KEY") and not provider:
        session.set_credentials(
            environment["AWS_ACCESS_KEY_ID"],
            environment["AWS_SECRET_ACCESS_KEY"],
            environment.get("AWS_SESSION_TOKEN") or None,
        )
    elif provider is not None:
        session._credentials = _refreshable(provider)
    config = Config(
        connect_timeout=_CONNECT_TIMEOUT_SECONDS,
        read_timeout=_READ_TIMEOUT_SECONDS,
        max_pool_connections=_MAX_CONNECTIONS,
        retries={"mode": "standard", "total_max_attempts": _MAX_ATTEMPTS},
        user_agent_extra="ciuic",
        # Older stores (Ceph, OSS) refuse or ignore the checksums that botocore adds by itself.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        ignore_configured_endpoint_urls=True,
        s3={
            "addressing_style": "virtual" if place.virtual_hosted else "path",
            "payload_signing_enabled": place.signs_payloads,
            # An empty AWS endpoint in us-east-1 is the regional one, as obstore's.
            "us_east_1_regional_endpoint": "regional",
        },
        **options,
    )
    return session.create_client(
        "s3",
        region_name=place.region,
        endpoint_url=place.without_bucket(url.bucket) or None,
        config=config,
        verify=_authorities(),
    )


# Where distributions have them: Debian, Red Hat, SUSE, Alpine.
_SYSTEM_AUTHORITIES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)


def _authorities() -> str | None:
    """Return the file with the authorities that obstore trusts, of this process's environment; None for botocore's own."""
    chosen = os.environ.get("SSL_CERT_FILE")
    return chosen or next((path for path in _SYSTEM_AUTHORITIES if os.path.exists(path)), None)


def _refreshable(provider: Callable[[], Credential]) -> Any:
    """Return credentials of botocore that ask the provider again when they are about to expire."""
    from botocore.credentials import RefreshableCredentials

    def metadata() -> dict[str, str | None]:
        found = provider()
        expires = found["expires_at"] or datetime.now(timezone.utc)
        return {
            "access_key": found["access_key_id"],
            "secret_key": found["secret_access_key"],
            "token": found["token"],
            "expiry_time": expires.isoformat(),
        }

    # The provider's own times have a margin already; botocore's ask at each request within 10 minutes of the end.
    return RefreshableCredentials.create_from_metadata(
        metadata(), metadata, "ciuic", advisory_timeout=30, mandatory_timeout=5
    )


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
            before = (arguments.get("KeyMarker"), arguments.get("VersionIdMarker"))
            if before == (page["NextKeyMarker"], page.get("NextVersionIdMarker")):
                raise _begins_again(prefix)
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
                if _error_of(exc)[1] == _RANGE_NOT_SATISFIABLE:
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
                    code, status = _error_of(exc)
                    if code == "ObjectLockConfigurationNotFoundError" or status in (404, 501):
                        raise RemoteRefused(
                            f"the bucket {self._s3.bucket} has no object lock",
                            hint="docs/remote.md, Ransomware and mistakes, says how a bucket gets it",
                        ) from None
                    raise
            rule = found.get("ObjectLockConfiguration", {}).get("Rule", {}).get("DefaultRetention", {})
            self._lock_mode = rule.get("Mode", "GOVERNANCE")
        return self._lock_mode

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


_SPEEDS: Final[dict[ThawSpeed, str]] = {"standard": "Standard", "bulk": "Bulk", "expedited": "Expedited"}
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
                yield ListedClass(self._client.name(found["Key"]), _class_name(found.get("StorageClass")))
            if not page.get("IsTruncated"):
                return
            if arguments.get("ContinuationToken") == page["NextContinuationToken"]:
                raise _begins_again(prefix)
            arguments["ContinuationToken"] = page["NextContinuationToken"]

    def look(self, name: str) -> ObjectClass:
        """Return the class of an object, and whether it can be read."""
        check_name(name)
        with self._client.request("look at", name) as client:
            found = client.head_object(Bucket=self._client.bucket, Key=self._client.key(name))
        storage_class, restore = _class_name(found.get("StorageClass")), found.get("Restore", "")
        if 'ongoing-request="true"' in restore:
            return ObjectClass(storage_class, "thawing")
        if 'ongoing-request="false"' in restore:
            return ObjectClass(storage_class, "ready")
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
                code, status = _error_of(error)
                if code in _THAWS_ALREADY:
                    return
                if status == 404 and code != "NoSuchBucket":
                    raise NoSuchObject(name) from None
                raise


def _class_name(name: str | None) -> str:
    return "" if name in (None, "", _DEFAULT_CLASS) else str(name).upper()
