"""The repository's own configuration: identity, block size, format.

Written once, in two copies, mode 0600. Without seed and key no chunk can be checked or found again by content,
so one flipped bit must not lose them: either copy is enough. Both are secrets (docs/format.md says what for).
"""

from __future__ import annotations

import os
import re
import time
import zlib

import msgspec

from ciuic.errors import NotFound, NotPermitted
from ciuic.repository.errors import DamagedRepository, UnsupportedFormat
from ciuic.repository.identity import BLAKE3, KEY_BYTES, XXH3, HashName, Identity
from ciuic.structs import decode_json
from ciuic.system.disk import Disk, read_regular

CONFIG_NAMES = ("config", "config.copy")
FORMAT_VERSION = 1
"""Format of a new repository whose chunks are named by XXH3."""
CODECS_VERSION = 2
"""Format from the first chunk that is stored as planes or a difference, so that an earlier ciuic refuses to
read it."""
KEYED_VERSION = 3
"""Format of a new repository whose chunks are named by keyed BLAKE3. It may have all that format 2 has. None is
raised to it: its chunks would need other ids."""
_VERSIONS = (FORMAT_VERSION, CODECS_VERSION, KEYED_VERSION)
MAX_FILE_BYTES = 16 << 20
"""Limit for a configuration, snapshot or marks file: ten thousand roots take 4 MiB. Decoded, a file takes
twenty times as much."""
# From the block of a file system to half of the largest chunk.
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 4096, 8 << 20


class StoredConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Content of the configuration file."""

    format: int
    id: str
    """32 hexadecimal digits."""
    hash: HashName
    seed: str
    """64-bit seed of tree borders and of XXH3's chunk ids, as 16 hexadecimal digits."""
    key: str = ""
    """Key of BLAKE3, as 64 hexadecimal digits; empty with XXH3."""
    block_size: int
    created_ns: int

    def identity(self) -> Identity:
        """Return the identity. MissingHash if its hash function is not installed."""
        return Identity(self.hash, bytes.fromhex(self.key) or None, int(self.seed, 16))


def new_config(identity: Identity | None, block_size: int) -> StoredConfig:
    """Return the configuration of a new repository; see `Repository.create`."""
    keyed = identity is not None and identity.key is not None
    return StoredConfig(
        format=KEYED_VERSION if keyed else FORMAT_VERSION,
        id=os.urandom(16).hex(),
        hash=BLAKE3 if keyed else XXH3,
        seed=os.urandom(8).hex() if identity is None else f"{identity.seed:016x}",
        key=(identity.key or b"").hex() if identity is not None else "",
        block_size=block_size,
        created_ns=time.time_ns(),
    )


def encode_config(config: StoredConfig) -> bytes:
    """Return one line of JSON for people to read, and a line with its CRC-32."""
    body = msgspec.json.encode(config)
    return body + b"\ncrc32 %08x\n" % zlib.crc32(body)


def decode_config(data: bytes) -> StoredConfig:
    """Return the configuration.

    Raises:
        DamagedRepository: the copy is damaged.
        UnsupportedFormat: a later version of ciuic wrote it.
    """
    body, newline, check = data.partition(b"\n")
    if not newline or check != b"crc32 %08x\n" % zlib.crc32(body):
        raise DamagedRepository("it does not match its checksum")
    try:
        # The format before everything else: a later one may have other fields, and must be named as what it
        # is instead of as damage.
        version = decode_json(body, dict[str, object]).get("format")
        if version not in _VERSIONS:
            raise UnsupportedFormat(
                f"the repository has format {version}; this ciuic reads formats up to {_VERSIONS[-1]}",
            )
        config = decode_json(body, StoredConfig)
        _check_identity(config)
        check_block_size(config.block_size)
    # Up to msgspec 0.20 its errors are no ValueError.
    except (msgspec.DecodeError, ValueError) as error:
        raise DamagedRepository(f"its content is invalid: {error}") from None
    return config


def _check_identity(config: StoredConfig) -> None:
    """Raise ValueError if id, hash, seed and key are not those of a repository of this format."""
    if not _is_hex(config.id, 16) or not _is_hex(config.seed, 8):
        raise ValueError("id or seed has the wrong length")
    keyed = config.format == KEYED_VERSION
    if config.hash != (BLAKE3 if keyed else XXH3):
        raise ValueError(f"format {config.format} has no hash {config.hash}")
    if not _is_hex(config.key, KEY_BYTES if keyed else 0):
        raise ValueError("key has the wrong length")


def _is_hex(text: str, size_bytes: int) -> bool:
    # Not bytes.fromhex, which skips blanks.
    return re.fullmatch("[0-9a-fA-F]*", text) is not None and len(text) == 2 * size_bytes


def check_block_size(block_size: int) -> None:
    """Raise ValueError unless the size is a power of two from 4 KiB to 8 MiB."""
    if block_size & (block_size - 1) or not MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE:
        raise ValueError(f"block size must be a power of two from 4096 to {MAX_BLOCK_SIZE}, got {block_size}")


def read_config(directory: str) -> StoredConfig:
    """Return the configuration from the first good copy.

    Raises:
        NotFound: there is no repository.
        NotPermitted: this process may not read it.
        DamagedRepository: neither copy is good.
        UnsupportedFormat: a later version of ciuic wrote it.
    """
    problems = []
    missing = 0
    for name in CONFIG_NAMES:
        try:
            # Either copy is enough: the second is read only if the first is bad.
            return decode_config(read_regular(f"{directory}/{name}", MAX_FILE_BYTES))
        except FileNotFoundError:
            missing += 1
            problems.append(f"{name}: missing")
        except NotADirectoryError:
            raise NotFound(
                f"a repository is a directory, and {directory} is none",
                hint='name the directory with --repo, or with path = "…" under [repository]',
            ) from None
        except PermissionError as error:
            raise NotPermitted(
                f"cannot read {directory}/{name}: {error.strerror}", hint="Run as root."
            ) from None
        except DamagedRepository as error:
            problems.append(f"{name}: {error.message}")
        except OSError as error:
            problems.append(f"{name}: {error.strerror}")
    if missing == len(CONFIG_NAMES):
        hint = (
            "if its disk is not mounted, mount it; --repo names another repository, ciuic protect makes one"
        )
        raise NotFound(f"there is no repository at {directory}", hint=hint)
    raise DamagedRepository(
        f"the configuration of the repository at {directory} is damaged: {'; '.join(problems)}",
        hint=f"put one of {', '.join(CONFIG_NAMES)} back from another copy of this repository; "
        "ciuic check --repair does the rest",
    )


def config_problems(directory: str) -> list[str]:
    """Return what is wrong with either copy, in words."""
    problems = []
    good = []
    for name in CONFIG_NAMES:
        try:
            good.append(decode_config(read_regular(f"{directory}/{name}", MAX_FILE_BYTES)))
        except (OSError, DamagedRepository, UnsupportedFormat) as error:
            problems.append(f"{name}: {error}")
    # A crash between the two writes of `raise_format` leaves two formats. Nothing is stored then that needs
    # the higher one.
    if len({msgspec.structs.replace(config, format=0) for config in good}) == 2:
        problems.append("config and config.copy differ")
    return problems


def repair_config(disk: Disk, directory: str) -> list[str]:
    """Rewrite a damaged copy from the good one and return the names written. Raises like `read_config`."""
    config = read_config(directory)
    written = []
    for name in CONFIG_NAMES:
        try:
            if decode_config(read_regular(f"{directory}/{name}", MAX_FILE_BYTES)) == config:
                continue
        except (OSError, DamagedRepository):
            # This copy is the one to write.
            pass
        disk.replace_file(f"{directory}/{name}", encode_config(config))
        written.append(name)
    return written


def raise_format(disk: Disk, directory: str, config: StoredConfig) -> StoredConfig:
    """Raise the format to `CODECS_VERSION`, durably, before the first chunk that needs it.

    Raises:
        OSError: the disk failed.
    """
    raised = msgspec.structs.replace(config, format=CODECS_VERSION)
    # The copy that is read first is written last: while it has the old format, nothing of the new one is
    # stored.
    for name in reversed(CONFIG_NAMES):
        disk.replace_file(f"{directory}/{name}", encode_config(raised))
    return raised
