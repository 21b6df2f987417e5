"""Check that a stored state can be loaded: each tensor that its document names is in a file, as it is described.

Looks where a reader looks, at the headers of all files, and makes no tensor: it needs neither torch nor NumPy. That
the content is the one that was stored is for the ids of the chunks to tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from ciuic.errors import Damaged
from ciuic.repository import Repository
from ciuic.training.format.files import Files, read_file, top_of
from ciuic.training.format.layout import SUFFIX, TensorInFile, decode_header
from ciuic.training.format.pieces import covers, is_inside
from ciuic.training.format.reading import FACTS_FILE, STATE_FILE, STATE_VERSION, read_facts
from ciuic.training.format.shards import parse_piece
from ciuic.training.format.tensors import safetensors_name, stored_shape
from ciuic.training.util.documents import MALFORMED, decode_json
from ciuic.types import SnapshotId


def check_resolves(repository: Repository, id_: SnapshotId) -> None:
    """Check that a reader finds every tensor of a state, with its shape and dtype.

    A snapshot without a training state has nothing to find.

    Raises:
        Damaged: A tensor is in no file or another than it is described, or a document is not as it should be.
        CiuicError: A file cannot be read.
    """
    snapshot = repository.snapshots.load(id_)
    if not snapshot.roots or snapshot.roots[0].entry is None:
        return
    files = Files(repository, top_of(snapshot.roots[0].entry, id_))
    names = list(files.names())
    if FACTS_FILE not in names or STATE_FILE not in names:
        return
    try:
        read_facts(repository, id_)
        document = files.read(STATE_FILE)
        held: dict[str, dict[str, TensorInFile]] = {}
        for name in names:
            if name.endswith(SUFFIX):
                held.setdefault(name.partition("/")[0], {}).update(_header(repository, files, name))
        check_document(document, held)
    except (*MALFORMED, ValueError) as error:
        raise Damaged(f"the state of {id_} cannot be loaded: {error}") from None


def check_document(data: bytes | bytearray, held: Mapping[str, Mapping[str, TensorInFile]]) -> None:
    """Check that the tensors of a state's document are held by its files.

    Args:
        data: Content of `state.json`.
        held: Tensors in the files by object and name.

    Raises:
        ValueError: A tensor is in no file or another than it is described, or the document is no JSON.
        Exception: One of `MALFORMED`: the document is not as it should be.
    """
    state = decode_json(data, STATE_FILE)
    if state["version"] != STATE_VERSION:
        return  # a later version's own affair
    for of, skeleton in {**state["objects"], "values": state["values"]}.items():
        for own in _tensors(skeleton):
            _check(own, held.get(of, {}), f"{of}.{own['name']}")


def _header(repository: Repository, files: Files, name: str) -> dict[str, TensorInFile]:
    entry, wanted = files.entry(name), files.block_size
    while True:
        room = bytearray(min(wanted, entry.size_bytes))
        read_file(repository, entry, memoryview(room))
        found = decode_header(bytes(room), entry.size_bytes)
        if not isinstance(found, int):
            return found
        # `read_file` fills whole blocks.
        wanted = -(-found // files.block_size) * files.block_size


def _tensors(skeleton: Any) -> Iterator[dict[str, Any]]:
    """Yield what stands for each tensor in a packed state."""
    stack = [skeleton]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            if value.get("$") in ("tensor", "sharded"):
                yield value
            else:
                stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)


def _check(own: dict[str, Any], held: Mapping[str, TensorInFile], called: str) -> None:
    """Raise ValueError unless a described tensor is held."""
    if own["$"] == "sharded":
        _check_pieces(own, held, called)
    elif own["name"] not in held:
        raise ValueError(f"the tensor {called} is in no file")
    elif "dtype" in own:
        # Stored as bytes, because safetensors has no name for its dtype.
        where, elements = held[own["name"]], prod(stored_shape(own["shape"]))
        size_bytes = where.stop - where.start
        if where.dtype != "U8" or (size_bytes % elements if elements else size_bytes):
            raise ValueError(f"the tensor {called} of shape {own['shape']} cannot have {size_bytes} bytes")


def _check_pieces(own: dict[str, Any], held: Mapping[str, TensorInFile], called: str) -> None:
    shape, dtype = stored_shape(own["shape"]), safetensors_name(own["dtype"])
    regions = set()
    for name, where in held.items():
        piece = parse_piece(name)
        if piece is None or piece[0] != own["name"]:
            continue
        if dtype is None:
            return  # stored as bytes, along the last dimension
        if where.dtype != dtype:
            raise ValueError(f"a piece of the tensor {called} is of {where.dtype}, expected {dtype}")
        regions.add((piece[1], where.shape))
    inside = all(is_inside(*region, shape) for region in regions)
    if not (inside and covers(list(regions), shape)):
        raise ValueError(f"the pieces of the tensor {called} do not make up the whole")
