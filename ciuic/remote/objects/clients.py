"""Clients of object stores: build obstore's stores from a URL, settings and the usual credentials.

Retries and time-outs are set here, for all stores alike:

* A request is tried again after 5xx, a lost connection and, where that is safe, a time-out, for 30 seconds;
  then the caller decides, who knows whether waiting is worth it.
* obstore's time-out covers a whole request with its body, so bodies are sent by clients with a time-out for
  their size: a stalled small request is noticed in 30 seconds, and 64 MiB may take 15 minutes.
* Reads have 30 seconds between any two pieces of a body, and 15 minutes in all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import timedelta
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from ciuic.errors import CiuicError, UsageError
from ciuic.remote.objects.credentials import (
    AlibabaProvider,
    aws_keys,
    aws_provider,
    azure_connection,
)
from ciuic.remote.objects.model import RemoteRefused
from ciuic.remote.objects.s3_place import s3_place
from ciuic.remote.objects.urls import RemoteUrl, StoreSettings

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
_RETRY: Final[dict[str, Any]] = {
    # As many as fit into the time: the time is the limit.
    "max_retries": 40,
    "retry_timeout": _RETRY_TIMEOUT,
    "backoff": {
        "init_backoff": timedelta(milliseconds=100),
        "max_backoff": timedelta(seconds=3),
        "base": 2,
    },
}
# OSS has no If-None-Match for PUT (501); this header is its create-only, answered with 409.
_OSS_CREATE_ONLY: Final = {"x-oss-forbid-overwrite": "true"}


def import_obstore() -> ModuleType:
    """Return the module obstore.

    Raises:
        UsageError: it is not installed; the message says how to.
    """
    try:
        import obstore
        import obstore.store
    except ImportError:
        raise UsageError(
            "remotes in an object store need obstore", hint="pip install --upgrade ciuic"
        ) from None
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
        # At once, so that what is wrong with the configuration is told when the remote is opened.
        self.small: Final = self._make(_TIMEOUTS[0][1])
        """Client for bodies of up to 256 KiB, and for requests without one."""

    # The others when they are used: each takes 5 ms of a processor, and a process may need one alone. Two
    # threads may make one each, and the later one stays.

    @cached_property
    def reading(self) -> ObjectStore:
        """Client that reads bodies and listings."""
        return self._make(_LONGEST_TIMEOUT, reads=True)

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
        """Return the client for a body of this size."""
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
            return self._configuration.make(options)
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

    def make(self, options: dict[str, Any]) -> ObjectStore:
        """Return a client with these options."""
        store = import_obstore().store
        arguments: dict[str, Any] = {
            "prefix": self._url.prefix or None,
            "client_options": options,
            "retry_config": _RETRY,
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
