"""Parsers of configuration values, and their way back to text.

A parser takes a str, an int, a bool or a list of str and raises ValueError with a sentence; the caller adds
where the value was written.

The URL of a remote is checked as text: scheme, bucket, prefix. Whether the bucket exists, and whether the library of object
stores takes it, is known only to those who open it (ciuic.remote.objects). Credentials are refused wherever
they could be written: the configuration is readable by every user.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, TypeVar, get_args
from urllib.parse import urlsplit

import msgspec

from ciuic.retention import MinFree
from ciuic.types import Cloud
from ciuic.units import format_size, parse_duration, parse_share, parse_size

_Number = TypeVar("_Number", int, float)
IoClass = Literal["idle", "best-effort", "none"]

# Limits of the format (docs/format.md, section 3).
MIN_BLOCK_SIZE_BYTES = 4096
MAX_BLOCK_SIZE_BYTES = 8 << 20
# More is a slip of the hand.
_MAX_NAME_BYTES = 255
_MAX_COUNT = 1_000_000
# Compiled with the first use, of which `re` keeps the result: few configurations have all of these settings.
_TAG = r"[^\s,|]+\Z"
_ACCOUNT = r"[A-Za-z_][A-Za-z0-9_.-]*\$?\Z"
MAX_PORT = 65535
# sockaddr_un.sun_path holds 108 bytes, the terminating zero included.
_MAX_SOCKET_PATH_BYTES = 107
_HOST = r"(?=.{1,253}\Z)[a-z0-9-]+(\.[a-z0-9-]+)*"
_HEADER = r"[a-z0-9-]{1,64}"


class IoPrioritySetting(msgspec.Struct, frozen=True):
    """I/O class and level (0 highest … 7) of the capture process; ``none`` leaves it as inherited."""

    # Linux has eight levels in the best-effort class; idle has none (ioprio_set(2)).
    io_class: IoClass = "idle"
    level: int = 0

    def __str__(self) -> str:
        return f"{self.io_class}:{self.level}" if self.io_class == "best-effort" else self.io_class


class DailyWindow(msgspec.Struct, frozen=True):
    """Part of the day, in local time, in which a remote may be written to."""

    start_minute: int
    """Minute of the day, 0 to 1439, at which the window opens."""
    end_minute: int
    """Minute of the day, 1 to 1440, at which it closes; before ``start_minute``: on the next day."""

    def is_open(self, minute: int) -> bool:
        """Return whether the window is open at ``minute`` of the day (0 to 1439)."""
        if self.start_minute < self.end_minute:
            return self.start_minute <= minute < self.end_minute
        return minute >= self.start_minute or minute < self.end_minute

    def __str__(self) -> str:
        minutes = (self.start_minute, self.end_minute)
        return "-".join(f"{minute // 60:02d}:{minute % 60:02d}" for minute in minutes)


def _text_value(value: object) -> str:
    """Return a text without surrounding blanks."""
    if not isinstance(value, str):
        raise ValueError(f"must be a text in quotes, got {value!r}")
    return value.strip()


def _at_least(
    parse: Callable[[object], _Number], least: _Number, otherwise: str
) -> Callable[[object], _Number]:
    """Return a parser that refuses smaller numbers with a sentence."""

    def parse_number(value: object) -> _Number:
        number = parse(value)
        if number < least:
            raise ValueError(otherwise)
        return number

    return parse_number


def duration_value(value: object) -> int:
    """Return a duration in seconds."""
    # bool is a subclass of int in Python.
    if isinstance(value, int) and not isinstance(value, bool) and value != 0:
        raise ValueError(f'a duration needs a unit: "{value}s" for seconds, or m, h, d, w')
    return parse_duration("0" if value == 0 and not isinstance(value, bool) else _text_value(value))


interval_value = _at_least(duration_value, 1, "must be at least 1s")
"""Parser of a duration of at least one second, in seconds."""


def _size_value(value: object) -> int:
    """Return a size in bytes."""
    return (
        value
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0
        else parse_size(_text_value(value))
    )


undo_limit_value = _at_least(
    _size_value, 1 << 20, "must be at least 1MiB, or no snapshot could be finished while the job writes"
)
"""Parser of the limit of an undo log."""


min_share_value = _at_least(
    lambda value: parse_share(_text_value(value)),
    0.0001,
    "must be at least 0.01%, or a snapshot would never end",
)
"""Parser of a share of time."""


def show_share(value: float) -> str:
    """Return a share as text."""
    return f"{value * 100:g}%"


def block_size_value(value: object) -> int:
    """Return a block size: a power of two from 4 KiB to 8 MiB."""
    size_bytes = _size_value(value)
    # A power of two has a single bit set.
    if not MIN_BLOCK_SIZE_BYTES <= size_bytes <= MAX_BLOCK_SIZE_BYTES or size_bytes & (size_bytes - 1):
        raise ValueError(f"must be a power of two from 4KiB to 8MiB, got {format_size(size_bytes)}")
    return size_bytes


def count_value(value: object) -> int:
    """Return an integer from 0 to a million."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"must be an integer, got {value!r}")
    if not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"must be from 0 to {_MAX_COUNT}, got {value}")
    return value


def size_or_share_value(value: object) -> MinFree:
    """Return free space as a size or a share."""
    if isinstance(value, str) and value.strip().endswith("%"):
        return MinFree(share=parse_share(value))
    return MinFree(size_bytes=_size_value(value))


def show_size_or_share(value: MinFree) -> str:
    """Return a size or share as text."""
    return f"{value.share * 100:g}%" if value.share else format_size(value.size_bytes)


def path_value(value: object) -> Path:
    """Return an absolute path, ``.`` and ``..`` removed by text."""
    # Not stripped: the name of a directory may end in a blank.
    text = value if isinstance(value, str) else _text_value(value)
    if not text.startswith("/"):
        raise ValueError(f"must be an absolute path, got {text!r}")
    if "\0" in text:
        raise ValueError(f"must not contain a zero byte, got {text!r}")
    # normpath keeps two leading slashes (POSIX leaves their meaning open).
    return Path("/" + os.path.normpath(text).lstrip("/"))


def path_text_value(value: object) -> str:
    """Return an absolute path as text."""
    return str(path_value(value))


def _check_pattern(pattern: str) -> None:
    # Imported here: who takes no snapshots, and reads no patterns, needs no matcher.
    from ciuic.excludes import check_pattern

    check_pattern(pattern)


def path_pattern_value(value: object) -> str:
    """Return a pattern of absolute paths, as in gitignore."""
    pattern = _text_value(value)
    if not pattern.startswith("/"):
        raise ValueError(f'must be a pattern of absolute paths, such as "/data/run/step-*", got {pattern!r}')
    _check_pattern(pattern)
    if {"", ".", ".."}.intersection(pattern[1:].removesuffix("/").split("/")):
        raise ValueError(f"must not contain //, . or .. as a step, which match nothing, got {pattern!r}")
    return pattern


def listen_value(value: object) -> str | None:
    """Return an address to listen at, ``HOST:PORT`` with a numeric address, or None for an empty text."""
    text = _text_value(value)
    if not text:
        return None
    host, colon, port = text.rpartition(":")
    # ASCII digits alone: int() would accept signs, underscores and digits of other scripts.
    is_port = port.isascii() and port.isdigit() and 0 < int(port[:6]) <= MAX_PORT
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        # Numeric, because a name can have several addresses, and change them.
        version = ip_address(bare).version if colon else 0
    except ValueError:
        version = 0
    # Brackets tell the colons of an IPv6 address from the one before the port.
    if not is_port or version != (6 if bare != host else 4):
        raise ValueError(f"must be an address and a port, such as 127.0.0.1:9847 or [::1]:9847, got {text!r}")
    return text


def socket_value(value: object) -> Path:
    """Return a path that fits into a socket address."""
    path = path_value(value)
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
        raise ValueError(f"too long for a unix socket, at most {_MAX_SOCKET_PATH_BYTES} bytes: {path}")
    return path


def _texts_value(value: object) -> tuple[str, ...]:
    """Return a list of texts."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f'must be a list of texts, such as ["a", "b"], got {value!r}')
    return tuple(value)


def _each(check: Callable[[str], object]) -> Callable[[object], tuple[str, ...]]:
    """Return a parser of a list of texts, each of which a function checks."""

    def parse(value: object) -> tuple[str, ...]:
        texts = _texts_value(value)
        for text in texts:
            check(text)
        return texts

    return parse


patterns_value = _each(_check_pattern)
"""Parser of a list of exclude patterns."""


def _check_name(name: str) -> None:
    if not name or "/" in name or "\0" in name:
        raise ValueError(f'must be patterns of names without a slash, such as ["*.log"], got {name!r}')


names_value = _each(_check_name)
"""Parser of a list of patterns of names without a slash."""


def name_value(value: object) -> str:
    """Return a pattern of names without a slash."""
    name = _text_value(value)
    if not name or "/" in name or "\0" in name:
        raise ValueError(f'must be a pattern of names without a slash, such as "*.pt", got {name!r}')
    # The shell takes such a bracket as it is, so that the rule would never match what was meant.
    if re.search(r"\[(?![!]?.[^]]*])", name, re.DOTALL):
        raise ValueError(f"has a [ that no ] closes, in {name!r}; a [ itself is [[]")
    if len(os.fsencode(name)) > _MAX_NAME_BYTES:
        raise ValueError(f"must be a pattern of at most {_MAX_NAME_BYTES} bytes")
    return name


change_value = _at_least(_size_value, 1, "must be at least 1 byte")
"""Parser of an amount of changed bytes."""


positive_value = _at_least(count_value, 1, "must be at least 1")
"""Parser of an integer from 1 to a million."""


def _check_tag(tag: str) -> None:
    if not re.match(_TAG, tag):
        raise ValueError(f"a tag must have no blanks, commas or |, got {tag!r}")


tags_value = _each(_check_tag)
"""Parser of a list of tags."""


def account_value(kind: str) -> Callable[[object], str | None]:
    """Return a parser for the name of a user or group."""

    def parse(value: object) -> str | None:
        text = _text_value(value)
        if text and not re.match(_ACCOUNT, text):
            raise ValueError(f"must be the name of a {kind}, got {text!r}")
        return text or None

    return parse


def users_value(value: object) -> tuple[str, ...]:
    """Return a list of user names or ``*``."""
    return tuple(user if user == "*" else account_value("user")(user) or "" for user in _texts_value(value))


def program_value(value: object) -> tuple[str, ...]:
    """Return a program with an absolute path, and its arguments."""
    words = _texts_value(value)
    # Absolute: no search in a PATH that a user may have set decides what root runs.
    if words and not words[0].startswith("/"):
        raise ValueError(f"must begin with the absolute path of a program, got {words[0]!r}")
    if any("\0" in word for word in words):
        raise ValueError("must not contain a zero byte")
    return words


def notify_value(value: object) -> tuple[str, ...]:
    """Return URLs of places that get messages, which no error shows: they have passwords in them."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError('must be a list of URLs, such as ["mailto://user:password@example.org"]')
    urls = tuple(value)
    for number, url in enumerate(urls):
        if not re.match(r"[a-z][a-z0-9+.-]*://\S", url, re.IGNORECASE) or not url.isprintable():
            raise ValueError(
                f'must be URLs, such as "mailto://user:password@example.org"; number {number + 1} is none'
            )
    return urls


def ping_value(value: object) -> str:
    """Return the URL of a check, which no error shows: it is a secret."""
    url = value if isinstance(value, str) else ""
    if not re.match(r"https?://[^\s/]", url) or not url.isprintable():
        raise ValueError("must be a URL with http:// or https://")
    return url


def trainer_name_value(value: object) -> str:
    """Return the name of a trainer."""
    text = _text_value(value)
    if not text or not text.isprintable():
        raise ValueError(f"must be a printable name, got {text!r}")
    return text


def io_priority_value(value: object) -> IoPrioritySetting:
    """Return an I/O class and level."""
    text = _text_value(value)
    match = re.fullmatch("idle|none|best-effort(?::([0-7]))?", text)
    if match is None:
        raise ValueError(f"must be idle, none, or best-effort:0 to best-effort:7, got {text!r}")
    if text in ("idle", "none"):
        return IoPrioritySetting("idle" if text == "idle" else "none")
    # What the kernel takes for a process of nice 0 that has set none: (nice + 20) / 5 (ioprio_set(2)).
    return IoPrioritySetting("best-effort", int(match[1] or 4))


def one_of_value(choices: Sequence[str]) -> Callable[[object], str]:
    """Return a parser for one of ``choices``."""

    def parse(value: object) -> str:
        text = _text_value(value)
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, got {text!r}")
        return text

    return parse


def flag_value(value: object) -> bool:
    """Return a boolean."""
    # The flat format has only text.
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, got {value!r}")
    return value


def show_hidden(value: object) -> str:
    """Return that a secret is set; empty if it is not."""
    return "(set)" if value else ""


def show_value(value: object) -> str:
    """Return a value as text, as TOML has it but for the quotes."""
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


BUCKET_SCHEMES = ("s3", "gs", "az", "oss")
"""Schemes of object stores, whose URLs begin with a bucket (Azure: a container)."""
MIN_BANDWIDTH_BYTES = 64 << 10
"""Smallest limit of a second: a pack of 4 MiB then takes a minute."""
_NAME = r"[a-z0-9][a-z0-9-]{0,31}\Z"
# Names of buckets differ between stores: S3 takes 3 to 63 characters, Google up to 222 and underscores.
_BUCKET = r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}\Z"
_SSH_PLACE = r"(?:[A-Za-z0-9_][A-Za-z0-9._-]{0,63}@)?(?:[A-Za-z0-9_][A-Za-z0-9._-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?\Z"
_WORD = r"[A-Za-z0-9_.-]{1,64}\Z"
_WINDOW = r"(?a)([01]\d|2[0-3]):([0-5]\d)\s*-\s*(?:([01]\d|2[0-3]):([0-5]\d)|24:00)\Z"
_MINUTES_PER_DAY = 24 * 60
_NO_CREDENTIALS = (
    "must not have credentials: they come from the environment, the shared files of the store's own tools, "
    "or the machine"
)


def remote_name_value(value: object) -> str:
    """Return the name of a remote, which is a directory's and an argument's as well."""
    text = _text_value(value)
    # No hyphen at its beginning: a command would take the name for an option.
    if not re.match(_NAME, text):
        raise ValueError(
            f"must be 1 to 32 characters of a-z, 0-9 and -, and not begin with -, got {_short(text)}"
        )
    return text


def remote_url_value(value: object) -> str:
    """Return the URL of a remote, without a slash at its end."""
    text = _text_value(value)
    if not text.isprintable() or re.search(r"\s", text):
        raise ValueError(f"must be a URL without blanks, got {_short(text)}")
    scheme, separator, rest = text.partition("://")
    if scheme == "ssh":
        return _ssh_url_value(rest)
    # Not printed below: what stands before the @ may be a secret.
    if "@" in (rest.partition("/")[0] if separator else text):
        raise ValueError(_NO_CREDENTIALS)
    if not separator or scheme not in (*BUCKET_SCHEMES, "file"):
        raise ValueError(
            f"must be s3://, gs://, az:// or oss:// and a bucket, ssh:// and a host, or file:/// and a directory, got {_short(text)}"
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
    elif not re.match(_BUCKET, place):
        kind = "container" if scheme == "az" else "bucket"
        raise ValueError(f"must have a {kind} after {scheme}://, got {_short(text)}")
    return "/".join((f"{scheme}://{place}", *parts))


def _ssh_url_value(rest: str) -> str:
    """Return an ``ssh://`` URL from what stands behind the slashes."""
    place, _, path = rest.partition("/")
    match = re.match(_SSH_PLACE, place)
    if match is None:
        # Not printed: what stands before the @ may be a password.
        raise ValueError(
            "must be ssh://USER@HOST:PORT/DIRECTORY; user and port may be left out, and there is no password"
        )
    parts = path.rstrip("/").split("/") if path.strip("/") else []
    if any(part in ("", ".", "..") for part in parts) or re.search(r"[?#%]", path) or parts in ([], ["~"]):
        raise ValueError(f"must have a directory without ?, #, %, . and .., got {_short(path)}")
    return "/".join((f"ssh://{place}", *parts))


def line_value(value: object) -> str | None:
    """Return a text of one printable line, or None for an empty one."""
    text = _text_value(value).strip()
    if not text.isprintable():
        raise ValueError(f"must be one line of printable text, got {_short(text)}")
    return text or None


def endpoint_value(value: object) -> str | None:
    """Return the address of an object store's service, or None for an empty text."""
    text = _text_value(value)
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


def clouds_value(value: object) -> tuple[str, ...]:
    """Return a list of clouds whose metadata services are asked."""
    clouds = tuple(dict.fromkeys(_texts_value(value)))
    for cloud in clouds:
        if cloud not in get_args(Cloud):
            raise ValueError(f"must be clouds out of {', '.join(get_args(Cloud))}, got {_short(cloud)}")
    return clouds


def metadata_endpoint_value(value: object) -> str | None:
    """Return the address of a metadata service inside of this machine, or None for an empty text."""
    text = endpoint_value(value)
    if text is None:
        return None
    split = urlsplit(text)
    try:
        address = ip_address(split.hostname or "")
    except ValueError:
        address = None
    # Whoever answers there decides when snapshots are cut and when an upload leaves its limits.
    if (
        split.scheme != "http"
        or split.path
        or address is None
        or not (address.is_loopback or address.is_link_local)
    ):
        raise ValueError(
            f"must be http:// and a link-local or loopback address, such as http://127.0.0.1:8080, got {_short(text)}"
        )
    return text


def hosts_value(value: object) -> tuple[str, ...]:
    """Return names of hosts, without ports, in small letters."""
    found = tuple(text.lower() for text in _texts_value(value))
    for text in found:
        if not re.fullmatch(_HOST, text):
            raise ValueError(f"has {text!r}, which is no name of a host such as gpu07.example.org")
    return found


def header_value(value: object) -> str:
    """Return the name of a header of HTTP, in small letters."""
    text = _text_value(value).lower()
    if not re.fullmatch(_HEADER, text):
        raise ValueError(f"must be the name of a header such as X-Remote-User, not {text!r}")
    return text


def word_value(value: object) -> str | None:
    """Return the name of a region or storage class, or None for an empty text."""
    text = _text_value(value)
    if text and not re.match(_WORD, text):
        raise ValueError(f"must be a name of letters, digits, - and _, got {_short(text)}")
    return text or None


bandwidth_value = _at_least(
    _size_value,
    MIN_BANDWIDTH_BYTES,
    f"must be at least {format_size(MIN_BANDWIDTH_BYTES)} a second; leave it out for no limit",
)
"""Parser of a limit in bytes a second."""


def price_value(value: object) -> float:
    """Return a price: a number that is not negative."""
    # bool is a subclass of int in Python; the comparison is false for nan.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise ValueError(f"must be a number, such as 0.005, got {value!r}")
    return float(value)


def window_value(value: object) -> DailyWindow:
    """Return a part of the day, such as ``22:00-06:00``."""
    text = _text_value(value)
    match = re.match(_WINDOW, text)
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


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
