"""Attacker: the writer of a training state, or a trainer of another user, against loading and watching."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cli_repository import CliRepository

from ciuic.protocol.heartbeat_page import HeartbeatPage, check_page
from ciuic.training.arena import Arena, ReadArena
from ciuic.training.format.layout import decode_header
from ciuic.training.format.reading import load

DEEP = "[" * 100_000 + "]" * 100_000
FACTS = {"version": 1, "objects": ["model"]}
STATE = {"version": 1, "objects": {"model": {"w": {"$": "tensor", "name": "w"}}}, "values": {}}


def header(tensors: dict[str, Any], room: int = 64) -> bytes:
    """Return a safetensors file with this header and so many bytes of tensors."""
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text + bytes(room)


def tensor_header(shape: object = (4,), offsets: object = (0, 16), dtype: object = "F32") -> dict[str, Any]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def saved(tmp_path: Path, state: object = STATE, facts: object = FACTS, tensors: bytes = b"") -> str:
    """Save a snapshot of a state with these files and return its id; a text is its own content."""
    made = CliRepository(tmp_path / "repo", Path("/ciuic"))
    files = {
        name: (value if isinstance(value, str) else json.dumps(value)).encode()
        for name, value in (("state.json", state), ("snapshot.json", facts))
    }
    tree: dict[bytes, Any] = {os.fsencode(name): content for name, content in files.items()}
    tree[b"model"] = {b"small-tensors.safetensors": tensors or header(tensor_header())}
    return str(made.snapshot(tree))


def test_unchanged_files_load(tmp_path: Path) -> None:
    """The unchanged files of these tests load, so each refusal is caused by the change."""
    id_ = saved(tmp_path)
    assert list(load(str(tmp_path / "repo"), id_).objects["model"]["w"]) == [0.0] * 4


@pytest.mark.parametrize(
    "file",
    [
        header(tensor_header(shape=[-1, -4])),
        header(tensor_header(shape=[4.0])),
        header(tensor_header(shape=[True, 4])),
        header(tensor_header(shape=[1 << 62, 1 << 62, 0], offsets=[0, 0])),
        header(tensor_header(shape=[1 << 64, 0], offsets=[0, 0])),
        header(tensor_header(shape="4")),
        header(tensor_header(offsets=[0.0, 16.0])),
        header(tensor_header(offsets=[-16, 0])),
        header(tensor_header(offsets=[64, 80])),
        header(tensor_header(offsets=[16, 0])),
        header(tensor_header(offsets=[0, 16, 0])),
        header(tensor_header(dtype="F33")),
        header(tensor_header(dtype=["F32"])),
        header(
            {f"w{number}": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]} for number in range(1000)}
        ),
        header({"w": None}),
        struct.pack("<Q", len(DEEP)) + DEEP.encode() + bytes(64),
        struct.pack("<Q", 1 << 63) + bytes(64),
        struct.pack("<Q", (100 << 20) + 1) + bytes(64),
        b"\1\0",
    ],
    ids=range(19),
)
def test_a_safetensors_file_is_refused_in_words(tmp_path: Path, file: bytes) -> None:
    """A malformed safetensors file raises ValueError, from the decoder or from loading.

    Shapes and offsets that are negative, no integers, too large, out of the file or overlapping; headers that
    are endless, deep or missing.
    """
    id_ = saved(tmp_path, tensors=file)
    with pytest.raises(ValueError):  # noqa: PT011
        load(str(tmp_path / "repo"), id_)


def test_a_shape_of_no_elements_may_be_any_that_there_is() -> None:
    """An empty tensor keeps its other dimensions."""
    assert decode_header(header(tensor_header(shape=[0, 5], offsets=[3, 3])), 200)["w"].shape == (0, 5)  # type: ignore[index]


@pytest.mark.parametrize(
    "value",
    [
        {"$": "float", "bits": "zz"},
        {"$": "float", "bits": "00"},
        {"$": "dict", "items": [[[], 1]]},
        {"$": "dict", "items": [1]},
        {"$": "dict", "items": [], "metadata": 1},
        {"$": "dict", "items": [], "type": "default", "factory": "eval"},
        {"$": "set", "items": [[1]]},
        {"$": "set"},
        {"$": "scalar", "dtype": "O", "base64": "AAAAAAAAAAA="},
        {"$": "scalar", "dtype": "<f8", "base64": ""},
        {"$": "dtype", "name": "load"},
        {"$": "dtype", "name": 5},
        {"$": "device", "name": "no such device"},
        {"$": "device", "name": []},
        {"$": "size", "items": ["a"]},
        {"$": "sparse", "layout": "sparse_coo", "size": [2], "parts": []},
        {"$": "sparse", "layout": [], "size": [2], "parts": []},
        {"$": "sparse", "layout": "sparse_csr", "size": None, "parts": [1, 2, 3]},
        {"$": "tensor", "name": "w", "dtype": "float64", "shape": [1 << 40]},
        {"$": "tensor", "name": "w", "dtype": "float64", "shape": [-2]},
        {"$": "tensor", "name": "w", "dtype": "nn", "shape": [2]},
        {"$": "tensor", "name": "w", "of": "numpy", "dtype": "O", "shape": [2]},
        {"$": "tensor", "name": ["w"]},
        {"$": "tensor"},
        {"$": "sharded", "name": "w", "dtype": "float32", "shape": [4]},
        {"$": "sharded", "name": "w", "dtype": 7, "shape": "x"},
        {"$": "complex", "real": "1", "imag": []},
        {"$": "int", "hex": ""},
        {"$": "bytes", "base64": 5},
        {"$": "eval"},
        {"$": []},
        {"$": None},
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_a_value_is_refused_in_words(tmp_path: Path, value: object) -> None:
    """A value that no state holds raises ValueError or Damaged, so that the snapshot is skipped."""
    pytest.importorskip("torch")
    id_ = saved(tmp_path, {**STATE, "objects": {"model": {"w": value}}})
    with pytest.raises(Exception) as error:  # noqa: PT011
        load(str(tmp_path / "repo"), id_)
    assert type(error.value).__name__ in ("ValueError", "Damaged", "UnicodeDecodeError", "Error"), error.value
    assert isinstance(error.value, ValueError) or type(error.value).__name__ == "Damaged"


@pytest.mark.parametrize(
    "state",
    ["[]", "5", "null", "{}", '{"version": 1}', DEEP, "{", '{"version": 1, "objects": [], "values": 1}'],
)
def test_a_document_is_refused_in_words(tmp_path: Path, state: str) -> None:
    """A `state.json` that is no JSON, no object, incomplete or nested without end is refused in words."""
    id_ = saved(tmp_path, state)
    with pytest.raises(ValueError):  # noqa: PT011
        load(str(tmp_path / "repo"), id_)


@pytest.mark.parametrize("facts", ["[]", "{", DEEP, '{"step": "one"}', '{"metrics": {"a": []}}'])
def test_facts_are_refused_in_words(tmp_path: Path, facts: str) -> None:
    """A malformed `snapshot.json`, which is read of every listed snapshot, is refused with a message."""
    id_ = saved(tmp_path, facts=facts)
    with pytest.raises(ValueError):  # noqa: PT011
        load(str(tmp_path / "repo"), id_)


def _metadata(change: Callable[[dict[str, Any]], object]) -> bytes:
    document: dict[str, Any] = {
        "version": 1,
        "tensors": {
            "w": {
                "dtype": "float32",
                "shape": [4],
                "requires_grad": False,
                "chunks": [{"offsets": [0], "sizes": [4], "file": "w/w.safetensors", "start": 64}],
            }
        },
        "objects": {"lr": {"folder": "_rank_0"}},
        "planner": None,
    }
    change(document)
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "data",
    [
        DEEP.encode(),
        b"[]",
        b"{",
        _metadata(lambda document: document.pop("tensors")),
        _metadata(lambda document: document.update(tensors=[])),
        _metadata(lambda document: document.update(objects={"lr": "x"})),
        _metadata(lambda document: document.update(planner={"$": "tensor", "name": "w"})),
        _metadata(lambda document: document["tensors"]["w"].update(dtype="load")),
        _metadata(lambda document: document["tensors"]["w"].update(shape=[1 << 70])),
        _metadata(lambda document: document["tensors"]["w"].update(shape="x")),
        _metadata(lambda document: document["tensors"]["w"]["chunks"][0].update(start=-4096)),
        _metadata(lambda document: document["tensors"]["w"]["chunks"][0].update(offsets=[-4])),
        _metadata(lambda document: document["tensors"]["w"]["chunks"][0].update(sizes=[4.5])),
        _metadata(lambda document: document["tensors"]["w"].update(chunks=5)),
    ],
    ids=range(14),
)
def test_dcp_metadata_is_refused_in_words(data: bytes) -> None:
    """Malformed `torch.distributed.checkpoint` metadata raises ValueError."""
    pytest.importorskip("torch.distributed.checkpoint")
    from ciuic.training.dcp.metadata import decode_metadata

    assert decode_metadata(_metadata(lambda document: None))
    with pytest.raises(ValueError):  # noqa: PT011
        decode_metadata(data)


def test_memory_that_could_be_cut_is_not_mapped() -> None:
    """State memory without the seal against shrinking is refused before it is mapped, and closed."""
    fd = os.memfd_create("state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(OSError, match="shrink"):
        ReadArena(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    made = Arena(4096)
    with pytest.raises(OSError):  # noqa: PT011
        os.ftruncate(made.fd, 0)
    read = ReadArena(os.dup(made.fd))
    assert bytes(read.memory[:4]) == bytes(4)
    read.close()
    made.close()


def test_a_heartbeat_page_that_could_be_cut_is_refused() -> None:
    """A heartbeat page that could shrink is refused; an accepted one's seal holds for all descriptors."""
    fd = os.memfd_create("beat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 16)
    with pytest.raises(ValueError, match="shrink"):
        check_page(fd)
    os.close(fd)
    page = HeartbeatPage()
    check_page(page.fd)
    with pytest.raises(OSError):  # noqa: PT011
        os.ftruncate(page.fd, 0)
    page.close()
