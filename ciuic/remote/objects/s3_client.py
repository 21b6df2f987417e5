"""Client of botocore for what obstore has no request for: versions, locks, storage classes, thawing.

`S3Client` reaches the same bucket as the objects of the remote, with the same credentials. botocore is optional
(``ciuic[remote-versions]``) and imported when a client is made: nothing that uploads or restores needs it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from types import ModuleType
from typing import Any, Final

from ciuic.errors import CiuicError, UsageError
from ciuic.remote.objects.credentials import AlibabaProvider, AwsProvider, Credential, aws_provider
from ciuic.remote.objects.failures import failure
from ciuic.remote.objects.model import RemoteRefused
from ciuic.remote.objects.s3_place import S3Place, s3_place
from ciuic.remote.objects.urls import RemoteUrl, StoreSettings

_CONNECT_TIMEOUT_SECONDS: Final = 10
_READ_TIMEOUT_SECONDS: Final = 30
# With the waits of botocore's "standard" mode, which end at 20 s each, about 30 s.
_MAX_ATTEMPTS: Final = 5
_MAX_CONNECTIONS: Final = 16


def import_botocore() -> ModuleType:
    """Return the module botocore.session.

    Raises:
        UsageError: it is not installed; the message says how to.
    """
    try:
        import botocore.session
    except ImportError:
        raise UsageError(
            "versions, locks and storage classes of an object store need botocore",
            hint="pip install 'ciuic[remote-versions]'",
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
        self.client: Final = _make(url, s3_place(url, settings, environment), environment)
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
            raise s3_failure(exc, doing, name, writes=writes, bucket=self.bucket) from None

    def close(self) -> None:
        """Close connections."""
        self.client.close()


def s3_failure(
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
    code, status = error_of(exc)
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


def error_of(exc: BaseException) -> tuple[str, int]:
    """Return the store's code (``InvalidObjectState``) and the HTTP status of a reply; empty and 0 without one."""
    response = getattr(exc, "response", None)
    if not isinstance(response, dict):
        return "", 0
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(response.get("Error", {}).get("Code", "")), int(status)


class _Answer(Exception):
    """Reply of the store with an error."""


def _make(url: RemoteUrl, place: S3Place, environment: Mapping[str, str]) -> Any:
    # Before the library: what is wrong with the shared files is told in our words.
    provider: AlibabaProvider | AwsProvider | None
    provider = AlibabaProvider(environment) if url.scheme == "oss" else aws_provider(environment)
    session_module = import_botocore()
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
    )


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
