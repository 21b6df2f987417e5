"""URLs of remotes: parse, check and show.

A URL names a place and never a credential: user names, passwords and query strings are refused, so a URL can
be logged. `StoreSettings` has what a URL does not say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from ciuic.errors import UsageError

SCHEMES: Final = ("s3", "gs", "az", "oss", "ssh", "file", "memory")
"""Schemes of remotes; ``memory`` is for tests."""
# Names of buckets: S3 and OSS 3 to 63 characters, GCS allows dots and 222 of them, Azure containers dashes.
_BUCKET = re.compile(r"[a-z0-9A-Z][A-Za-z0-9._-]{1,220}[A-Za-z0-9]\Z")
_PART = re.compile(r"[A-Za-z0-9._=+@-]+\Z")
_MAX_PREFIX_BYTES = 255
_REGION = re.compile(r"[a-z0-9-]{1,40}\Z")
_STORAGE_CLASS = re.compile(r"[A-Za-z0-9_-]{1,40}\Z")
_ACCOUNT = re.compile(r"[a-z0-9]{3,24}\Z")
# Neither begins with a hyphen: ssh would take it for an option.
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\Z")
_HOST = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\])\Z")
_HELP = "write s3://BUCKET/PREFIX, gs://…, az://CONTAINER/PREFIX, oss://…, ssh://USER@HOST/DIRECTORY or file:///DIRECTORY"


@dataclass(frozen=True)
class RemoteUrl:
    """Place of a remote: a bucket and a prefix, or a directory here or on another host."""

    scheme: str
    bucket: str
    """Bucket or container; for ``ssh`` user, host and port; empty for ``file``."""
    prefix: str
    """Names in the bucket begin with it and a slash; empty for a whole bucket. For ``file`` and ``ssh`` the directory;
    ``/~/`` at its beginning is the home directory on the other host."""

    def __str__(self) -> str:
        """Return the URL in its one normal form."""
        if self.scheme == "file":
            return f"file://{self.prefix}"
        if self.scheme == "ssh":
            return f"ssh://{self.bucket}{self.prefix}"
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")

    @property
    def ssh_options(self) -> tuple[str, ...]:
        """Arguments of ssh(1) that name user, port and host."""
        user, host, port = _split_place(self.bucket)
        return (*(("-l", user) if user else ()), *(("-p", port) if port else ()), "--", host.strip("[]"))


@dataclass(frozen=True)
class StoreSettings:
    """Settings of a store beside its URL; an empty text stands for the store's default."""

    endpoint: str = ""
    """URL of a server other than the cloud's own, such as ``https://minio.example:9000``. Plain ``http://`` is
    taken only when it is written here."""
    region: str = ""
    account: str = ""
    """Azure: name of the storage account."""
    virtual_hosted: bool | None = None
    """S3: the bucket is part of the host name. None: for OSS and for AWS itself, not for another endpoint."""
    storage_class: str = ""
    """Class of data packs, such as ``STANDARD_IA``; all other objects stay in the bucket's own class."""
    sign_payloads: bool | None = None
    """S3: have the store check a SHA-256 of each body, 0.6 s of a processor for each GiB. None: where TLS does
    not check it anyway."""
    ssh_command: str = ""
    """ssh: program and options, such as ``ssh -i /etc/ciuic/backup-key``."""
    ssh_program: str = ""
    """ssh: ``ciuic`` on the other host, as its shell finds it."""

    def __post_init__(self) -> None:
        if self.endpoint:
            _check_endpoint(self.endpoint)
        for name, value, pattern in (
            ("region", self.region, _REGION),
            ("account", self.account, _ACCOUNT),
            ("storage_class", self.storage_class, _STORAGE_CLASS),
        ):
            if value and not pattern.match(value):
                raise UsageError(f"{name} of a remote has characters that no store uses: {value[:60]!r}")


def parse_url(text: str) -> RemoteUrl:
    """Return the place that a URL names.

    Raises:
        UsageError: the message says what is wrong with the URL; it does not repeat a password in it.
    """
    scheme, separator, _rest = text.partition("://")
    if not separator:
        raise UsageError(f"a remote is a URL, got {text[:100]!r}", hint=_HELP)
    if scheme not in SCHEMES:
        raise UsageError(f"a remote cannot have the scheme {scheme[:20]!r}", hint=_HELP)
    try:
        parts = urlsplit(text)
    except ValueError as exc:
        raise UsageError(f"a remote's URL cannot be read: {exc}", hint=_HELP) from None
    if scheme == "ssh":
        return _ssh_url(text)
    # The host is checked first: everything else may be shown once no password can be in it.
    if "@" in parts.netloc or ":" in parts.netloc or parts.query or parts.fragment:
        raise UsageError(
            f"a remote's URL ({scheme}://…) has a bucket and a prefix alone: no user, password, port, ? or #",
            hint="credentials come from the environment, shared files or the instance; endpoint= names a server",
        )
    if scheme == "file":
        return RemoteUrl("file", "", _directory(text, parts.netloc, parts.path))
    if not _BUCKET.match(parts.netloc):
        what = "container" if scheme == "az" else "bucket"
        raise UsageError(f"not the name of a {what}: {parts.netloc[:100]!r} in {text[:200]!r}", hint=_HELP)
    return RemoteUrl(scheme, parts.netloc, _prefix(text, parts.path))


def _split_place(place: str) -> tuple[str, str, str]:
    """Return user, host and port of ``USER@HOST:PORT``; empty where they are missing. The host keeps its case, and brackets."""
    user, _, rest = place.rpartition("@")
    end = rest.find("]") + 1
    host, _, port = rest[end:].partition(":")
    return user, rest[:end] + host, port


def _ssh_url(text: str) -> RemoteUrl:
    parts = urlsplit(text)
    user, host, port = _split_place(parts.netloc)
    if ":" in user:
        raise UsageError("a remote's URL must not have a password: ssh uses its keys and its agent")
    if parts.query or parts.fragment:
        raise UsageError(
            f"an ssh URL has user, host, port and directory alone, got {text[:200]!r}", hint=_HELP
        )
    if port and not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise UsageError(f"the port in a remote's URL must be a number from 1 to 65535, got {port[:20]!r}")
    if "@" in parts.netloc and not _USER.match(user):
        raise UsageError(f"not the name of a user: {user[:60]!r} in {text[:200]!r}")
    if not _HOST.match(host):
        raise UsageError(f"not the name of a host: {host[:100]!r} in {text[:200]!r}", hint=_HELP)
    place = "".join((f"{user}@" if user else "", host, f":{port}" if port else ""))
    return RemoteUrl("ssh", place, _directory(text, "", parts.path))


def _prefix(text: str, path: str) -> str:
    prefix = path.strip("/")
    for part in prefix.split("/") if prefix else ():
        if not _PART.match(part) or part.startswith("."):
            raise UsageError(
                f"the prefix of a remote has parts of A-Z a-z 0-9 . _ = + @ -, none empty or with a dot in front, "
                f"got {part[:60]!r} in {text[:200]!r}"
            )
    if len(prefix) > _MAX_PREFIX_BYTES:
        raise UsageError(
            f"the prefix of a remote has at most {_MAX_PREFIX_BYTES} characters, got {len(prefix)}"
        )
    return prefix


def _directory(text: str, host: str, path: str) -> str:
    if host:
        raise UsageError(f"a directory's URL has three slashes: file:///{host}{path[:100]}", hint=_HELP)
    if "%" in path or "\0" in path or any(part in (".", "..") for part in path.split("/")):
        raise UsageError(f"a directory's URL is an absolute path without %, . and .., got {text[:200]!r}")
    directory = "/" + "/".join(part for part in path.split("/") if part)
    if directory in ("/", "/~"):
        raise UsageError("a remote must have a directory of its own", hint="write file:///mnt/nas/ciuic")
    return directory


def _check_endpoint(endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
        parts = urlsplit("")
    if "@" in endpoint or parts.query or parts.fragment:
        raise UsageError(
            "endpoint of a remote must not have a user, password, ? or #", hint="credentials never go there"
        )
    if not valid:
        raise UsageError(
            f"endpoint of a remote must be a URL such as https://HOST:PORT, got {endpoint[:100]!r}"
        )
