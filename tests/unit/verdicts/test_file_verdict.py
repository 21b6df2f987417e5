"""Verdicts on single files: whole ones are GOOD, and what a killed writer leaves never is."""

from __future__ import annotations

import importlib.util
import io
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.checkpoint_files import FORMATS, MODES, MemoryFile, damaged, plain_safetensors, watch

from ciuic.verdicts.verdict import judge_file

HERE = [
    name
    for name, one in FORMATS.items()
    # torch has tests of its own, beside the others that need it.
    if one.library != "torch" and (not one.library or importlib.util.find_spec(one.library) is not None)
]
OPEN = "a program had it open for writing"


@pytest.mark.parametrize("name", HERE)
@settings(max_examples=25, deadline=None)
# The zero bytes at the end of its last number are alone in the last block.
@example(seed=621)
@given(seed=st.integers(0, 1 << 32))
def test_whole_files_are_good_and_damaged_ones_are_not(name: str, seed: int) -> None:
    """A file of the format's own library is GOOD; cut, allocated or with a hole it is not, under any name."""
    rng = random.Random(seed)
    one = FORMATS[name]
    whole = one.make(rng)
    verdict = judge_file(MemoryFile(b"a" + one.suffix, whole))
    assert verdict.is_good, verdict
    for what, data in damaged(rng, whole):
        for suffix in (one.suffix, b".bin"):
            verdict = judge_file(MemoryFile(b"a" + suffix, data))
            assert data == whole or not verdict.is_good, (what, len(whole), verdict)


@pytest.mark.parametrize("name", HERE)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_flipped_headers_are_judged_within_bounds(name: str, seed: int) -> None:
    """A file with bytes of its header or its end replaced is judged; no other error escapes."""
    rng = random.Random(seed)
    data = bytearray(FORMATS[name].make(rng))
    for _ in range(rng.randrange(1, 9)):
        at = rng.choice([rng.randrange(min(256, len(data))), -1 - rng.randrange(min(256, len(data)))])
        data[at] = rng.choice([0, 255, rng.randrange(256)])
    source = MemoryFile(b"a" + FORMATS[name].suffix, bytes(data))
    assert judge_file(source).state in ("GOOD", "TORN", "UNKNOWN")
    assert source.read_bytes < (64 << 20) + len(data)


@pytest.mark.parametrize("name", HERE)
def test_doubts_make_a_complete_file_unknown(name: str) -> None:
    """A complete file that was open for writing is UNKNOWN, a torn one is TORN all the same."""
    one = FORMATS[name]
    whole = one.make(random.Random(5))
    assert judge_file(MemoryFile(b"a" + one.suffix, whole, doubt=OPEN))[:2] == ("UNKNOWN", OPEN)
    assert judge_file(MemoryFile(b"a" + one.suffix, whole[: len(whole) // 2], doubt=OPEN)).state == "TORN"


def test_checksums_disprove_a_mixture() -> None:
    """A file that was overwritten in place is UNKNOWN without checksums, and GOOD or TORN by those of a zip archive."""
    mixture = "it was overwritten in place"
    plain = FORMATS["safetensors"].make(random.Random(1))
    assert judge_file(MemoryFile(b"a.safetensors", plain, mixture=mixture)).state == "UNKNOWN"
    into = io.BytesIO()
    np.savez(into, a=np.random.default_rng(1).random(900_000))
    whole = into.getvalue()
    assert judge_file(MemoryFile(b"a.npz", whole, mixture=mixture)).is_good
    mixed = whole[:5_000_000] + b"x" * 4096 + whole[5_004_096:]
    # Without the doubt not so much of it is read.
    assert judge_file(MemoryFile(b"a.npz", mixed)).is_good
    assert judge_file(MemoryFile(b"a.npz", mixed, mixture=mixture)).state == "TORN"


def test_zeros_that_belong_there_are_good_with_a_checksum() -> None:
    """An array of zeros is a hole in a snapshot: its checksum proves it, and without one the file is UNKNOWN."""
    into = io.BytesIO()
    np.savez(into, zeros=np.zeros(700_000), ones=np.ones(3))
    assert judge_file(MemoryFile(b"a.npz", into.getvalue())).is_good
    torn = into.getvalue().replace(np.ones(3).tobytes(), bytes(24))
    assert judge_file(MemoryFile(b"a.npz", torn)).state == "TORN"
    data = plain_safetensors({"a": np.zeros(9000, "f4"), "b": np.ones(3, "f4")})
    verdict = judge_file(MemoryFile(b"a.safetensors", data))
    assert verdict.state == "UNKNOWN"
    assert "hole" in verdict.reason


def test_few_bytes_are_read_of_a_large_file() -> None:
    """Of 32 MiB of tensors less than 64 KiB is read."""
    data = plain_safetensors({f"t{index}": np.ones(1 << 18, "f4") for index in range(32)})
    source = MemoryFile(b"a.safetensors", data)
    assert judge_file(source).is_good
    assert source.read_bytes < 65536


@pytest.mark.parametrize(
    ("name", "data"),
    [
        (b"a.safetensors", struct.pack("<Q", 1 << 40)),
        (b"a.safetensors", struct.pack("<Q", 40) + b'{"a":{"dtype":"F32","shape":[1],"data_o'),
        (b"a.npy", b"\x93NUMPY\x01\x00\x76\x00" + b"(" * 118),
        (b"a.pkl", b"\x80\x04" + b"\x8d" + struct.pack("<Q", 1 << 62)),
        (b"a.h5", b"\x89HDF\r\n\x1a\n\x03\x08\x08\x00" + bytes(60)),
        (b"a.npz", b"PK\x05\x06" + bytes(18)),
        (b"a.safetensors", b""),
    ],
)
def test_hostile_headers_are_refused(name: bytes, data: bytes) -> None:
    """Impossible lengths and counts are refused, and no memory is taken for what they promise."""
    assert not judge_file(MemoryFile(name, data)).is_good


def test_a_zip_archive_of_another_kind_is_judged_by_its_structure() -> None:
    """A zip archive with a comment, compressed members and an empty one is complete; without its end it is not."""
    into = io.BytesIO()
    with zipfile.ZipFile(into, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.comment = b"made by hand"
        archive.writestr("a.txt", b"text " * 999)
        archive.writestr("empty", b"")
    assert judge_file(MemoryFile(b"a.bin", into.getvalue())).is_good
    assert judge_file(MemoryFile(b"a.bin", into.getvalue()[:-1])).state == "TORN"


def test_an_hdf5_file_that_was_not_closed_is_torn() -> None:
    """A file whose writer ended before it closed it says another length, or that it is open."""
    h5py: Any = pytest.importorskip("h5py")
    into = io.BytesIO()
    file = h5py.File(into, "w")
    file.create_dataset("a", data=np.ones(5000))
    file.flush()
    before = into.getvalue()
    file.create_dataset("b", data=np.ones(50_000))
    file.id.close()
    assert judge_file(MemoryFile(b"a.h5", before)).is_good
    assert not judge_file(MemoryFile(b"a.h5", before + bytes(4096))).is_good


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["safetensors", "npz", "pickle"])
def test_no_file_of_a_killed_writer_is_called_good(name: str, mode: str, tmp_path: Path) -> None:
    """No torn file is GOOD, and every whole one that no process had open is."""
    found = watch(name, mode, 7, 12, tmp_path)
    assert not found.wrong
    assert found.whole_good == found.whole
    assert sum(found.states.values()) > 3
