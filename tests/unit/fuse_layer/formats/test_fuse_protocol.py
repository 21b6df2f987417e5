"""Tests of the kernel's structures: sizes, to the byte, and encoding and decoding of fields."""

from __future__ import annotations

import os
import stat
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.fuse_layer import fuse_protocol as p

SIZES = [
    # Values of sizeof in include/uapi/linux/fuse.h of Linux 6.18.
    (p.IN_HEADER, "fuse_in_header", 40),
    (p.OUT_HEADER, "fuse_out_header", 16),
    (p.INIT_OUT, "fuse_init_out", 64),
    (p.ATTR, "fuse_attr", 88),
    (p.OPEN_OUT, "fuse_open_out", 16),
    (p.FORGET_IN, "fuse_forget_in", 8),
    (p.BATCH_FORGET_IN, "fuse_batch_forget_in", 8),
    (p.FORGET_ONE, "fuse_forget_one", 16),
    (p.GETATTR_IN, "fuse_getattr_in", 16),
    (p.SETATTR_IN, "fuse_setattr_in", 88),
    (p.MKNOD_IN, "fuse_mknod_in", 16),
    (p.MKDIR_IN, "fuse_mkdir_in", 8),
    (p.RENAME_IN, "fuse_rename_in", 8),
    (p.RENAME2_IN, "fuse_rename2_in", 16),
    (p.LINK_IN, "fuse_link_in", 8),
    (p.OPEN_IN, "fuse_open_in", 8),
    (p.CREATE_IN, "fuse_create_in", 16),
    (p.RELEASE_IN, "fuse_release_in", 24),
    (p.READ_IN, "fuse_read_in", 40),
    (p.WRITE_IN, "fuse_write_in", 40),
    (p.WRITE_OUT, "fuse_write_out", 8),
    (p.KSTATFS, "fuse_statfs_out", 80),
    (p.FSYNC_IN, "fuse_fsync_in", 16),
    (p.SETXATTR_IN, "fuse_setxattr_in", 16),
    (p.SETXATTR_IN_SHORT, "FUSE_COMPAT_SETXATTR_IN_SIZE", 8),
    (p.GETXATTR_IN, "fuse_getxattr_in", 8),
    (p.GETXATTR_OUT, "fuse_getxattr_out", 8),
    (p.FALLOCATE_IN, "fuse_fallocate_in", 32),
    (p.LSEEK_IN, "fuse_lseek_in", 24),
    (p.LSEEK_OUT, "fuse_lseek_out", 8),
    (p.COPY_FILE_RANGE_IN, "fuse_copy_file_range_in", 56),
    (p.COPY_FILE_RANGE_OUT, "fuse_copy_file_range_out", 8),
    (p.STATX_IN, "fuse_statx_in", 24),
    (p.STATX_STRUCT, "fuse_statx", 256),
    (p.DIRENT, "fuse_dirent", 24),
    (p.BACKING_MAP, "fuse_backing_map", 16),
    (p.NOTIFY_INVAL_INODE_OUT, "fuse_notify_inval_inode_out", 24),
    (p.SECCTX_HEADER, "fuse_secctx_header", 8),
    (p.SECCTX, "fuse_secctx", 8),
]
COMPOSED = [
    (p.INIT_IN.size + p.INIT_IN_EXT.size, "fuse_init_in", 64),
    (p.ENTRY_HEAD.size + p.ATTR.size, "fuse_entry_out", 128),
    (p.ATTR_HEAD.size + p.ATTR.size, "fuse_attr_out", 104),
    (p.STATX_OUT_HEAD.size + p.STATX_STRUCT.size, "fuse_statx_out", 288),
    (p.ENTRY_HEAD.size + p.ATTR.size + p.DIRENT.size, "fuse_direntplus", 152),
]


@pytest.mark.parametrize(("size", "name", "expected"), [(s.size, n, e) for s, n, e in SIZES] + COMPOSED)
def test_sizes_are_those_of_the_header(size: int, name: str, expected: int) -> None:
    """Each structure has the header's size: the kernel refuses others, and their callers wait for ever."""
    assert size == expected, name


def test_every_structure_is_in_the_table() -> None:
    """Every structure is in the table of sizes."""
    known = {id(structure) for structure, _, _ in SIZES}
    composed = {"INIT_IN", "INIT_IN_EXT", "ENTRY_HEAD", "ATTR_HEAD", "STATX_OUT_HEAD", "BACKING_ID"}
    here = {
        name for name, value in vars(p).items() if isinstance(value, struct.Struct) and id(value) not in known
    }
    assert here <= composed


def test_places_of_fields_in_init() -> None:
    """Flags above 32 bits and the stack depth are at the offsets where the kernel reads them."""
    reply = p.INIT_OUT.pack(7, 45, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
    # The field is flags2.
    assert struct.unpack_from("<I", reply, 32) == (9,)
    # The field is max_stack_depth.
    assert struct.unpack_from("<I", reply, 36) == (10,)
    # The field is max_pages.
    assert struct.unpack_from("<H", reply, 28) == (7,)


names = st.binary(min_size=1, max_size=255).filter(lambda name: b"\0" not in name)


@given(st.lists(names, min_size=1, max_size=3), st.binary(max_size=20))
def test_names_are_taken_apart_as_they_were_put_together(wanted: list[bytes], rest: bytes) -> None:
    """Names of any bytes are split as they were joined, whatever follows them."""
    data = memoryview(b"".join(name + b"\0" for name in wanted) + rest)
    assert p.names_of(data, len(wanted)) == wanted
    assert p.name_of(data) == wanted[0]


@given(names)
def test_a_name_without_its_end_is_malformed(name: bytes) -> None:
    """A name without its end is refused, and nothing is read beyond it."""
    for call in (lambda data: p.names_of(data, 1), lambda data: p.names_of(data, 2), p.name_of):
        with pytest.raises(p.MalformedRequest):
            call(memoryview(name))


@given(names, st.integers(1, (1 << 64) - 1), st.integers(0, (1 << 63) - 1))
def test_directory_entries_are_padded_to_eight_bytes(name: bytes, node: int, offset: int) -> None:
    """Directory entries are padded to eight bytes, and give number, offset, length, type and name."""
    entry = p.pack_dirent(node, stat.S_IFDIR | 0o755, offset, name)
    assert len(entry) % 8 == 0
    assert len(entry) - p.DIRENT.size - len(name) < 8
    assert p.DIRENT.unpack_from(entry) == (node, offset, len(name), stat.S_IFDIR >> 12)
    assert entry[p.DIRENT.size :].rstrip(b"\0") == name.rstrip(b"\0")


@given(st.integers(0, (1 << 12) - 1), st.integers(0, (1 << 20) - 1))
def test_device_numbers_there_and_back(major: int, minor: int) -> None:
    """Device numbers convert between the kernel's 32-bit and glibc's 64-bit form."""
    number = os.makedev(major, minor)
    assert p.user_device(p.kernel_device(number)) == number


def test_attributes_of_a_time_before_1970() -> None:
    """Times before 1970 have signed seconds sent as unsigned ones, and nanoseconds are never negative."""
    st_ = os.stat_result((stat.S_IFREG, 0, 0, 1, 0, 0, 0, -2, -2, -2), {"st_atime_ns": -1_500_000_000, "st_mtime_ns": -1, "st_ctime_ns": 0, "st_blksize": 4096, "st_rdev": 0})  # fmt: skip
    fields = p.ATTR.unpack(p.pack_attr(5, st_, 1, 0))
    assert fields[3] == (1 << 64) - 2
    assert fields[6] == 500_000_000
    assert (fields[4], fields[7]) == ((1 << 64) - 1, 999_999_999)


def _context(name: bytes, value: bytes) -> bytes:
    body = p.SECCTX.pack(len(value), 0) + name + b"\0" + value
    return body + bytes(-len(body) % 8)


@given(st.lists(st.tuples(names, st.binary(max_size=64)), max_size=3))
def test_all_security_contexts_are_read(pairs: list[tuple[bytes, bytes]]) -> None:
    """All security contexts that were sent are read, with the attribute's whole name."""
    body = b"".join(_context(name, value) for name, value in pairs)
    data = p.SECCTX_HEADER.pack(p.SECCTX_HEADER.size + len(body), len(pairs)) + body
    wanted = [(name if b"." in name else b"security." + name, value) for name, value in pairs]
    assert p.security_contexts(data) == wanted


@given(st.binary(max_size=200))
def test_extensions_of_any_bytes_are_read_or_malformed(data: bytes) -> None:
    """Extensions of any bytes are read or malformed, whatever their lengths claim."""
    try:
        p.security_contexts(data)
    except p.MalformedRequest:
        return
