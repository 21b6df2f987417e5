"""Parsers of the values of a remote, and their way back to text.

A URL is checked as text: scheme, bucket, prefix. Whether the bucket exists, and whether the library of object
stores takes it, is known only to those who open it (ciuic.remote.objects). Credentials are refused wherever
they could be written: the configuration is readable by every user.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from ciuic.config.model import DailyWindow
from ciuic.config.values import size_value, text_value
from ciuic.units import format_size

BUCKET_SCHEMES = ("s3", "gs", "az", "oss")
"""Schemes of object stores, whose URLs begin with a bucket (Azure: a container)."""
MIN_BANDWIDTH_BYTES = 64 << 10
"""Smallest limit of a second: a pack of 4 MiB then takes a minute."""
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}\Z")
# Names of buckets differ between stores: S3 takes 3 to 63 characters, Google up to 222 and underscores.
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}\Z")
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
_WINDOW = re.compile(r"([01]\d|2[0-3]):([0-5]\d)\s*-\s*(?:([01]\d|2[0-3]):([0-5]\d)|24:00)\Z", re.ASCII)
_MINUTES_PER_DAY = 24 * 60
_NO_CREDENTIALS = (
    "must not have credentials: they come from the environment, the shared files of the store's own tools, "
    "or the machine"
)


def remote_name_value(value: object) -> str:
    """Return the name of a remote, which is a directory's and an argument's as well."""
    text = text_value(value)
    # No hyphen at its beginning: a command would take the name for an option.
    if not _NAME.match(text):
        raise ValueError(
            f"must be 1 to 32 characters of a-z, 0-9 and -, and not begin with -, got {_short(text)}"
        )
    return text


def remote_url_value(value: object) -> str:
    """Return the URL of a remote, without a slash at its end."""
    text = text_value(value)
    if not text.isprintable() or re.search(r"\s", text):
        raise ValueError(f"must be a URL without blanks, got {_short(text)}")
    scheme, separator, rest = text.partition("://")
    # Not printed below: what stands before the @ may be a secret.
    if "@" in (rest.partition("/")[0] if separator else text):
        raise ValueError(_NO_CREDENTIALS)
    if not separator or scheme not in (*BUCKET_SCHEMES, "file"):
        raise ValueError(
            f"must be s3://, gs://, az:// or oss:// and a bucket, or file:/// and a directory, got {_short(text)}"
        )
    place, _, path = rest.partition("/")
    if re.search(r"[?#]", rest):
        raise ValueError("must not have ? or #: endpoint and region are keys of their own")
    parts = path.rstrip("/").split("/") if path.strip("/") else []
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"must have no empty, . or .. part in its path, got {_short(text)}")
    if scheme == "file":
        if place or not parts:
            raise ValueError(
                f"must be file:/// and the absolute path of a directory, such as file:///mnt/nas/ciuic, got {_short(text)}"
            )
    elif not _BUCKET.match(place):
        kind = "container" if scheme == "az" else "bucket"
        raise ValueError(f"must have a {kind} after {scheme}://, got {_short(text)}")
    return "/".join((f"{scheme}://{place}", *parts))


def endpoint_value(value: object) -> str | None:
    """Return the address of an object store's service, or None for an empty text."""
    text = text_value(value)
    if not text:
        return None
    if "@" in text:
        raise ValueError(_NO_CREDENTIALS)
    try:
        split = urlsplit(text)
        # Raises ValueError for a number that is no port's.
        _ = split.port
    except ValueError:
        split = urlsplit("")
    if split.scheme not in ("http", "https") or not split.hostname or split.query or split.fragment:
        raise ValueError(f"must be http:// or https:// and a host, got {_short(text)}")
    if not text.isprintable() or re.search(r"\s", text):
        raise ValueError(f"must be a URL without blanks, got {_short(text)}")
    return text.rstrip("/")


def word_value(value: object) -> str | None:
    """Return the name of a region or storage class, or None for an empty text."""
    text = text_value(value)
    if text and not _WORD.match(text):
        raise ValueError(f"must be a name of letters, digits, - and _, got {_short(text)}")
    return text or None


def bandwidth_value(value: object) -> int:
    """Return a limit in bytes a second."""
    size_bytes = size_value(value)
    if size_bytes < MIN_BANDWIDTH_BYTES:
        raise ValueError(
            f"must be at least {format_size(MIN_BANDWIDTH_BYTES)} a second; leave it out for no limit"
        )
    return size_bytes


def price_value(value: object) -> float:
    """Return a price: a number that is not negative."""
    # bool is a subclass of int in Python; the comparison is false for nan.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise ValueError(f"must be a number, such as 0.005, got {value!r}")
    return float(value)


def window_value(value: object) -> DailyWindow:
    """Return a part of the day, such as ``22:00-06:00``."""
    text = text_value(value)
    match = _WINDOW.match(text)
    if match is None:
        raise ValueError(f'must be two times of day, such as "22:00-06:00", got {_short(text)}')
    hour, minute, end_hour, end_minute = match.groups()
    start = int(hour) * 60 + int(minute)
    end = _MINUTES_PER_DAY if end_hour is None else int(end_hour) * 60 + int(end_minute)
    # 00:00 at the end is the end of the day.
    end = end or _MINUTES_PER_DAY
    if end in (start, start + _MINUTES_PER_DAY):
        raise ValueError(f"must not begin when it ends, got {text}; leave it out for always")
    return DailyWindow(start, end)


def show_price(value: float) -> str:
    """Return a price as text."""
    return f"{value:g}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
