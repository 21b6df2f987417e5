"""The repository's own configuration: identity, hash seed, block size. Written once, in two copies, 0600.

Without the seed no chunk can be checked or found again by content, so one flipped byte must not lose it:
either copy will do. The seed is a secret of the host (docs/format.md says what for).
"""

from __future__ import annotations

import os
import zlib
from typing import Literal

import msgspec

from ciuic.errors import NotFound, NotPermitted
from ciuic.repository.disk import Disk
from ciuic.repository.errors import DamagedRepository, UnsupportedFormat
from ciuic.repository.opening import open_regular

CONFIG_NAMES = ("config", "config.copy")
FORMAT_VERSION = 1
"""What a new repository has."""
CODECS_VERSION = 2
"""With chunks stored as planes or differences: from the first of them on, so that an earlier ciuic says that it cannot read it."""
MAX_FILE_BYTES = 16 << 20
"""Of a configuration, a snapshot file or a marks file: ten thousand roots take 4 MiB. Decoded it is twenty times as much."""
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 4096, 8 << 20


class RepositoryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is in the file."""

    format: int
    id: str
    """32 hexadecimal digits."""
    hash: Literal["xxh3-128"]
    seed: str
    """16 hexadecimal digits: the 64-bit seed of every chunk id."""
    block_size: int
    created_ns: int


def encode_config(config: RepositoryConfig) -> bytes:
    """One line of JSON, and a line with its CRC-32: for people to read, and still checked."""
    body = msgspec.json.encode(config)
    return body + b"\ncrc32 %08x\n" % zlib.crc32(body)


def decode_config(data: bytes) -> RepositoryConfig:
    """DamagedRepository, UnsupportedFormat."""
    body, newline, check = data.partition(b"\n")
    if not newline or check != b"crc32 %08x\n" % zlib.crc32(body):
        raise DamagedRepository("it does not match its checksum")
    try:
        version = msgspec.json.decode(body, type=dict[str, object]).get("format")
        if version not in (FORMAT_VERSION, CODECS_VERSION):
            raise UnsupportedFormat(
                f"the repository has format {version}; this ciuic reads formats up to {CODECS_VERSION}",
                hint="Use the version of ciuic that wrote it, or a later one.",
            )
        config = msgspec.json.decode(body, type=RepositoryConfig)
        if len(bytes.fromhex(config.id)) != 16 or len(bytes.fromhex(config.seed)) != 8:
            raise ValueError("id or seed has the wrong length")
        check_block_size(config.block_size)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise DamagedRepository(f"it makes no sense: {error}") from None
    return config


def check_block_size(block_size: int) -> None:
    """ValueError unless it is a power of two from 4 KiB to 8 MiB."""
    if block_size & (block_size - 1) or not MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE:
        raise ValueError(
            f"a block size must be a power of two from 4096 to {MAX_BLOCK_SIZE}, not {block_size}"
        )


def read_config(directory: str) -> RepositoryConfig:
    """From the first copy that is good. NotFound, NotPermitted, DamagedRepository, UnsupportedFormat."""
    problems = []
    missing = 0
    for name in CONFIG_NAMES:
        try:
            return decode_config(read_file(f"{directory}/{name}"))
        except FileNotFoundError:
            missing += 1
            problems.append(f"{name}: missing")
        except NotADirectoryError:
            raise NotFound(f"{directory} is not a directory") from None
        except PermissionError as error:
            raise NotPermitted(
                f"cannot read {directory}/{name}: {error.strerror}", hint="Run as root."
            ) from None
        except DamagedRepository as error:
            problems.append(f"{name}: {error.message}")
        except OSError as error:
            problems.append(f"{name}: {error.strerror}")
    if missing == len(CONFIG_NAMES):
        hint = "ciuic protect makes one; --repo names another."
        raise NotFound(f"there is no repository at {directory}", hint=hint)
    raise DamagedRepository(
        f"the configuration of the repository at {directory} is damaged: {'; '.join(problems)}"
    )


def config_problems(directory: str) -> list[str]:
    """What is wrong with either copy, in words."""
    problems = []
    good = []
    for name in CONFIG_NAMES:
        try:
            good.append(decode_config(read_file(f"{directory}/{name}")))
        except (OSError, DamagedRepository, UnsupportedFormat) as error:
            problems.append(f"{name}: {error}")
    # A crash may leave two versions: then nothing is stored yet that would need the higher one.
    if len({msgspec.structs.replace(config, format=0) for config in good}) == 2:
        problems.append("config and config.copy differ")
    return problems


def repair_config(disk: Disk, directory: str) -> list[str]:
    """Writes the damaged copy anew from the good one; returns the names written. Raises as `read_config`."""
    config = read_config(directory)
    written = []
    for name in CONFIG_NAMES:
        try:
            if decode_config(read_file(f"{directory}/{name}")) == config:
                continue
        except (OSError, DamagedRepository):
            pass  # that is the one to write
        disk.replace_file(f"{directory}/{name}", encode_config(config))
        written.append(name)
    return written


def raise_format(disk: Disk, directory: str, config: RepositoryConfig) -> RepositoryConfig:
    """Makes the format `CODECS_VERSION`, durably: before the first chunk that needs it. OSError."""
    raised = msgspec.structs.replace(config, format=CODECS_VERSION)
    # The one that is read first comes last: while it has the old version nothing of the new one is there.
    for name in reversed(CONFIG_NAMES):
        disk.replace_file(f"{directory}/{name}", encode_config(raised))
    return raised


def read_file(path: str, limit_bytes: int = MAX_FILE_BYTES) -> bytes:
    """A whole small file; at most so much of it. OSError, also for what is no regular file."""
    fd = open_regular(path, os.O_RDONLY)
    with os.fdopen(fd, "rb") as file:
        return file.read(min(limit_bytes, os.fstat(fd).st_size))  # read() allocates what it is asked for
