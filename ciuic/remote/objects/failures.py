"""Failures of an object store: turn what obstore raises into the errors of `Objects`.

An error's text has the operation, the HTTP status and the store's own code, never the body of the reply or a
URL's query: bodies repeat signed requests with their session tokens, and queries of Azure are signatures.
Raise what is returned here ``from None``, so that no traceback shows the original.
"""

from __future__ import annotations

import re

from ciuic.errors import CiuicError
from ciuic.remote.objects.model import (
    ArchivedObject,
    CutReply,
    NonsenseReply,
    NoSuchBucket,
    NoSuchObject,
    NotAListing,
    RefusedBody,
    RemoteFull,
    RemoteRefused,
    RemoteUnreachable,
    UntrustedStore,
)

_STATUS = re.compile(r"Server returned non-2xx status code: (\d{3})")
_URL = re.compile(r"https?://\S+")
_CODE = re.compile(r"<Code>([A-Za-z0-9._-]{1,64})</Code>")
# One of the answers for the objects of a request that was answered with success, in obstore's words (S3 API, DeleteObjects).
_DELETE_FAILED = re.compile(
    r'DeleteFailed \{\s*path: "[^"]*",\s*code: "([A-Za-z0-9._-]{1,64})"(?:,\s*message: "([^"]{1,300})")?'
)
_REGION = re.compile(r"<Region>([a-z0-9-]{1,40})</Region>|expecting '([a-z0-9-]{1,40})'")
_MESSAGE = re.compile(r"<Message>([^<]{1,300})")
# Signatures, keys and tokens are longer; host names, ARNs and bucket names are mostly not.
_LONG_WORD = re.compile(r"[A-Za-z0-9+/=_-]{30,}")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
# obstore's words for answers with success that are none of a store: a body that cannot be parsed, a range that is the
# whole, a stored object without its mark, a redirect to nowhere.
_NO_LISTING = "invalid list response"
_NONSENSE = (
    "non-partial response when range requested",
    "Unable to extract metadata from headers",
    "invalid DeleteObjects response",
    "Received redirect without LOCATION",
)
_PAGE = re.compile(r"non-2xx status code: \d{3}[^:]{0,60}:\s*(?:<!doctype html|<html)", re.IGNORECASE)
_PROXY_HINT = "a proxy may have answered in place of the store"
# Of Amazon S3 (a message), and codes of others.
_CHECKSUM_WANTED = (
    "x-amz-checksum- HTTP header is required",
    "MissingUploadObjectWithObjectLockHeaders",
    "MissingContentMD5",
)
# obstore's word for a request that was never sent.
_NOT_CONNECTED = "kind: Connect"
# obstore's words for a body that ended early, or stalled.
_CUT = ("request or response body error", "end of file before message length")
_FULL_CODES = frozenset({"XMinioStorageFull", "InsufficientStorage", "InsufficientCapacity", "QuotaExceeded"})
_FULL_STATUS = 507
_TOO_LARGE_STATUS = 413
# The largest pack with its last chunk; only documents with tens of thousands of names are larger.
_WANTED_BODY_MIB = 32
_TOO_LARGE_CODES = frozenset({"EntityTooLarge", "RequestBodyTooLarge"})
# Answers to a read of an object that must be thawed first: Amazon S3 (403) and OSS, Azure (409).
_ARCHIVED_CODES = frozenset({"InvalidObjectState", "BlobArchived", "BlobBeingRehydrated"})
# Codes with a status below 500 of requests that succeed later.
_PASSING_CODES = frozenset(
    {
        "RequestTimeout",
        "SlowDown",
        "OperationAborted",
        "ConditionalRequestConflict",
        "ServerBusy",
        "Throttling",
    }
)
# The same with a status from 500 on, or without one of their own.
_PASSING_ANSWERS = _PASSING_CODES | {"InternalError", "ServiceUnavailable"}
# Also pages tell with them that credentials are missing, or that this is not allowed.
_REFUSALS = frozenset({401, 403, 407})
_PASSING_STATUS = frozenset({408, 409, 425, 429})
# Hosts and paths of the services that hand out credentials to instances.
_METADATA = ("169.254.169.254", "169.254.170.", "metadata.google.internal", "fd00:ec2", "token request")


def _code_of(exc: BaseException) -> str:
    """Return the store's own code for an error, such as ``SlowDown``; empty if it gave none."""
    match = _CODE.search(str(exc))
    return match[1] if match else ""


def status_of(exc: BaseException) -> int:
    """Return the HTTP status of the last reply; 0 if there was none."""
    match = _STATUS.search(str(exc))
    return int(match[1]) if match else 0


def was_not_done(exc: BaseException) -> bool:
    """Return whether the store answered with an error, or was not reached: a create whose reply is lost may have been done."""
    return bool(status_of(exc) or _NOT_CONNECTED in str(exc))


def wants_checksum(exc: BaseException) -> bool:
    """Return whether the store refused a body because no checksum came with it.

    References:
        Amazon S3 API, PutObject: a checksum is required where the bucket has a retention period by Object Lock
    """
    return status_of(exc) == 400 and any(mark in str(exc) for mark in _CHECKSUM_WANTED)


def is_conflict(exc: BaseException) -> bool:
    """True if the store refused a create because another one was under way: the name may still be free.

    References: Amazon S3 API, PutObject: 409 ConditionalRequestConflict, "the upload should be retried".
    """
    return _code_of(exc) in ("ConditionalRequestConflict", "OperationAborted")


def failure(
    exc: Exception,
    doing: str,
    name: str,
    *,
    writes: bool = False,
    lists: bool = False,
    bucket: str = "",
    body_bytes: int = 0,
) -> CiuicError:
    """Return the error of `Objects` that stands for one of obstore.

    Args:
        exc: what obstore raised.
        doing: operation for the message, such as ``store``.
        name: object or prefix that it concerned.
        writes: whether the request was to store something, which no missing object can prevent.
        lists: whether it was to list objects, of which the same holds.
        bucket: name of the bucket for the message.
        body_bytes: size of the body that was sent.
    """
    # By name, so that this module does not import obstore.
    kind = type(exc).__name__
    text, status, code = str(exc), status_of(exc), _code_of(exc)
    what = f"cannot {doing} {name}" if name else f"cannot {doing}"
    if any(mark in text for mark in _NO_BUCKET):
        named = f"the bucket {bucket}" if bucket else "the bucket"
        return NoSuchBucket(f"{what}: {named} does not exist", hint="make the bucket first, then try again")
    if lists and (_NO_LISTING in text or (status == 404 and code != "NoSuchKey")):
        return NotAListing(f"{what}: what was answered is not a listing", hint=_PROXY_HINT)
    if status == 404 and writes:
        return NonsenseReply(
            f"{what}: {' '.join(filter(None, ('404', code)))} was answered, which says of no bucket that it is missing",
            hint=f"check endpoint and bucket; {_PROXY_HINT}",
        )
    # Before pages: a proxy says this with one.
    if writes and (status == _TOO_LARGE_STATUS or code in _TOO_LARGE_CODES):
        wanted = max(_WANTED_BODY_MIB, -(-body_bytes // (1 << 20)))
        return RefusedBody(
            f"{what}: the store, or a proxy before it, takes no body of {body_bytes} bytes "
            f"({' '.join(filter(None, (str(status), code)))}); raise its limit to {wanted} MiB, in nginx client_max_body_size {wanted}m"
        )
    if any(mark in text for mark in _NONSENSE) or (
        _PAGE.search(text) and status < 500 and status not in _REFUSALS
    ):
        return NonsenseReply(f"{what}: what was answered is no reply of an object store", hint=_PROXY_HINT)
    if isinstance(exc, FileNotFoundError) or status == 404:
        return NoSuchObject(name)
    if status == _FULL_STATUS or code in _FULL_CODES:
        return RemoteFull(
            f"{what}: the store has no room for more ({' '.join(filter(None, (str(status), code)))})",
            hint="free space in the store, or raise the quota",
        )
    if any(mark in text for mark in _METADATA):
        return RemoteRefused(
            f"{what}: no credentials in the environment or the shared files, and the instance's metadata has none"
        )
    if "External AWS credential provider" in text:
        return RemoteRefused(f"{what}: {_provider_message(text)}")
    if failed := _DELETE_FAILED.search(text):
        answer = f"{what}: the store answered {failed[1]}"
        if failed[1] in _PASSING_ANSWERS:
            return RemoteUnreachable(answer)
        return RemoteRefused(f"{answer}{_plain(failed[2] or '')}", hint=_hint(failed[1]))
    if code in _ARCHIVED_CODES:
        return ArchivedObject(name)
    answer = f"{what}: the store answered {' '.join(filter(None, (str(status or ''), code))) or 'nothing'}"
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return RemoteRefused(f"{answer}{_message(text, code)}", hint=_hint(code))
    if status in (301, 307, 308) or code in ("AuthorizationHeaderMalformed", "PermanentRedirect"):
        region = _REGION.search(text)
        known = f"; it is in {region[1] or region[2]}" if region else ""
        return RemoteRefused(f"{answer}{known}", hint="set the region of the bucket")
    if status == 501 or kind in ("NotSupportedError", "InvalidPathError", "UnknownConfigurationKeyError"):
        return RemoteRefused(f"{answer}: the store or its client does not support this")
    if 400 <= status < 500 and status not in _PASSING_STATUS and code not in _PASSING_CODES:
        return RemoteRefused(f"{answer}{_message(text, code)}", hint=_hint(code))
    if not status and any(mark in text for mark in _CUT):
        return CutReply(f"{what}: the connection ended within the reply of the store")
    if not status:
        broken = _transport(text)
        kind_of_error = UntrustedStore if broken in _CERTIFICATE_FAULTS else RemoteUnreachable
        return kind_of_error(f"{what}: no answer from the store ({broken})")
    return RemoteUnreachable(answer)


def _message(text: str, code: str) -> str:
    """Return the store's sentence where it helps to mend a policy; without anything like a key."""
    match = _MESSAGE.search(text)
    if code not in ("AccessDenied", "InvalidStorageClass", "InvalidRequest") or not match:
        return ""
    return _plain(match[1])


def _plain(message: str) -> str:
    plain = "".join(char if char.isprintable() else " " for char in message)
    return f" ({_LONG_WORD.sub('…', plain)[:200]})" if plain else ""


def _hint(code: str) -> str:
    return {
        "RequestTimeTooSkewed": "set the clock of this machine",
        "SignatureDoesNotMatch": "check the secret key, and that no proxy changes requests",
        "InvalidAccessKeyId": "check the access key, and that it belongs to this store",
        "ExpiredToken": "renew the session token",
        "InvalidStorageClass": "storage_class must be one that the store has",
    }.get(code, "")


def _provider_message(text: str) -> str:
    """Return the message of our own provider, which shows no key."""
    match = re.search(r"NoCredentials: ([^\n]{1,400})", text)
    return match[1] if match else "the credentials could not be read"


_EXPIRED = "its TLS certificate has expired: renew it there, or set the clock of this machine"
_NOT_YET_VALID = "its TLS certificate is not valid yet: set the clock of this machine"
_OTHER_NAME = (
    "its TLS certificate is for another host name: check the endpoint, or name it in the certificate"
)
_UNKNOWN_ISSUER = (
    "its TLS certificate is signed by nobody whom this machine trusts: "
    "SSL_CERT_FILE names a file with the certificate of a private authority"
)
_CERTIFICATE_FAULTS = frozenset({_EXPIRED, _NOT_YET_VALID, _OTHER_NAME, _UNKNOWN_ISSUER})


def _transport(text: str) -> str:
    """Return what broke, in a few words."""
    # Without URLs, in which these words may be names of the user's.
    lower = _URL.sub("", text).lower()
    for mark, words in (
        # Words of rustls, as obstore shows them (ExpiredContext { … }), and of OpenSSL and urllib3, by way of botocore.
        ("expiredcontext", _EXPIRED),
        ("certificate: expired", _EXPIRED),
        ("certificate expired", _EXPIRED),
        ("certificate has expired", _EXPIRED),
        ("notvalidyet", _NOT_YET_VALID),
        ("not yet valid", _NOT_YET_VALID),
        ("notvalidforname", _OTHER_NAME),
        ("not valid for name", _OTHER_NAME),
        ("hostname mismatch", _OTHER_NAME),
        ("ip address mismatch", _OTHER_NAME),
        (" doesn't match ", _OTHER_NAME),
        ("peer certificate", _UNKNOWN_ISSUER),
        ("invalidcertificate", _UNKNOWN_ISSUER),
        ("certificate verify failed", _UNKNOWN_ISSUER),
        ("dns error", "its host name has no address"),
        ("connection refused", "connection refused"),
        ("timed out", "timed out"),
        ("timedout", "timed out"),
        ("connection reset", "connection reset"),
        ("incompletemessage", "connection closed"),
        ("network unreachable", "network unreachable"),
    ):
        if mark in lower:
            return words
    return "connection failed"
