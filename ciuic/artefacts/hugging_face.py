"""Export of a checkpoint to a folder as on the Hugging Face hub: weights as safetensors, their index, configuration, model card.

Files of safetensors are copied; one alone gets the name that `from_pretrained` looks for. Where there are none, weights of torch become such; their
pickle is interpreted as data (`training.tensor_files`). Other files in formats that execute code when they are opened are left out, and named. The
model card says which snapshot it is, in its metadata (``ciuic_snapshot``).

References:
    https://huggingface.co/docs/safetensors (format)
    https://huggingface.co/docs/hub/model-cards (metadata of a card)
    transformers/modeling_utils.py (names of shards, index)

A folder of files as an artefact: brought up to date with what a form wants to have in it, by the manifest in it.

Guarantees: on return everything is durable. The manifest names every file before it is written, so that an interrupted export is completed by the next
one, and says of none that it is written before it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from ciuic.artefacts.folder import MANIFEST, OWN_NAMES, ExportFolder, Manifest, Updated, Written
from ciuic.artefacts.git import is_obeyed
from ciuic.artefacts.snapshot_files import ExportedFile, LeftOut, SnapshotFiles
from ciuic.errors import Damaged, UsageError
from ciuic.printable import one_line
from ciuic.repository import Repository
from ciuic.training.change_figures import numpy
from ciuic.training.format.shards import by_bare_name
from ciuic.training.stored_tensors import BlockReader
from ciuic.training.tensor_files import FileTensors
from ciuic.types import Snapshot

_NOT_YET = Written("", "none:" + "0" * 32, 0)


class Item(NamedTuple):
    """A file of the artefact."""

    identity: str
    """Id of what it is made from, and how."""
    mtime_ns: int
    pieces: Callable[[], Iterator[bytes]]
    """Function that reads or makes its content."""
    is_executable: bool = False


def bring_up_to_date(
    folder: ExportFolder, items: Mapping[bytes, Item], facts: Manifest, *, overwrite: bool
) -> Updated:
    """Write what has changed, remove what is gone, durably on return.

    Args:
        folder: The folder.
        items: What it is to have, by relative name.
        facts: Manifest without files.
        overwrite: Whether to replace files that no export has written.

    Raises:
        DestinationExists: such a file is there.
    """
    before = Manifest.decode(folder.read(MANIFEST) or b"")
    own = (MANIFEST,) if before.files else ()
    folder.refuse_foreign((*items, MANIFEST), (*before.files, *own), overwrite=overwrite)
    done: dict[bytes, Written] = {}
    for name, item in items.items():
        old = before.files.get(name, _NOT_YET)
        if old.identity == item.identity and folder.has(
            name, old.size_bytes, item.mtime_ns, is_executable=item.is_executable
        ):
            done[name] = old
    folder.begin()
    gone = before.files.keys() - items.keys()
    if gone or len(done) < len(items):
        names = {**dict.fromkeys((*before.files, *items), _NOT_YET), **done}
        folder.write(MANIFEST, (facts._replace(snapshot="", files=names).encode(),))
        folder.sync()
    # First: a directory may be where a file was, and a file where a directory was.
    for name in sorted(gone):
        folder.remove(name)
    kept = sum(one.size_bytes for one in done.values())
    for name, item in items.items():
        if name not in done:
            done[name] = _write(folder, name, item)
    folder.sync()
    manifest = facts._replace(files=done).encode()
    if folder.read(MANIFEST) != manifest:
        folder.write(MANIFEST, (manifest,))
        folder.sync()
    size_bytes = sum(one.size_bytes for one in done.values())
    return Updated(len(done), size_bytes, size_bytes - kept, len(gone))


def _write(folder: ExportFolder, name: bytes, item: Item) -> Written:
    hashed = hashlib.sha256()
    size_bytes = 0

    def passed() -> Iterator[bytes]:
        nonlocal size_bytes
        for piece in item.pieces():
            hashed.update(piece)
            size_bytes += len(piece)
            yield piece

    folder.write(name, passed(), is_executable=item.is_executable, mtime_ns=item.mtime_ns)
    return Written(item.identity, f"sha256:{hashed.hexdigest()}", size_bytes)


MAX_SHARD_BYTES: Final = 5_000_000_000
"""Size above which weights that are made are cut into several files, as `save_pretrained` does."""
_CARD: Final = b"README.md"
_INDEX: Final = b"model.safetensors.index.json"
_WEIGHTS: Final = b"model.safetensors"
_PICKLED: Final = re.compile(rb"(?i).*\.(bin|pt|pth|ckpt|pkl|pickle|joblib|distcp)\Z", re.DOTALL)
_TORCH: Final = re.compile(rb"(?i)[^/]*\.(bin|pt|pth|ckpt)\Z", re.DOTALL)
# Beside the weights in checkpoints of the Trainer and of Accelerate.
_NO_WEIGHTS: Final = re.compile(
    rb"(optimizer|scheduler|scaler|rng_state|random_states|training_args)[^/]*\Z", re.DOTALL
)
_SHARD: Final = re.compile(rb"([^/]+)-\d{5}-of-\d{5}\.safetensors\Z", re.DOTALL)
# Names that libraries look for besides, or instead: variants, adapters of peft, models and adapters of diffusers, of Mistral, of OpenCLIP.
_LOOKED_FOR: Final = re.compile(
    rb"(model|adapter_model|diffusion_pytorch_model|pytorch_lora_weights|consolidated|open_clip_(pytorch_)?model)(\.[^/]*)?\Z",
    re.DOTALL,
)
_CONFIG: Final = b"config.json"
_MODEL_KEYS: Final = ("model_state_dict", "state_dict", "model")
"""Keys under which checkpoints with more than weights have them."""
_OTHER_STATE: Final = re.compile(r"(optim|lr_|sched|scaler|ema|rng|random|cuda)")
_DTYPES: Final = re.compile(r"(F64|F32|F16|BF16|F8_[A-Z0-9]+|[IU](8|16|32|64)|BOOL)\Z")
_PIECE_BYTES: Final = 4 << 20
_MAX_LYING_BYTES: Final = 8 << 30
"""Limit of a tensor whose elements lie in another order than that of its indices: it is put in order in memory."""
_MADE_BY: Final = b"safetensors 1 "
"""Part of the identity of files that are made; another number makes them anew."""
_MAX_CARD_BYTES: Final = 4 << 20


class Folder(NamedTuple):
    """Result of an export."""

    updated: Updated
    left_out: tuple[LeftOut, ...]


def export_hugging_face(
    repository: Repository,
    snapshot: Snapshot,
    path: bytes,
    found: SnapshotFiles,
    destination: Path,
    *,
    overwrite: bool = False,
) -> Folder:
    """Bring a folder up to date with a checkpoint of a snapshot, durably on return.

    Args:
        repository: Repository of the snapshot.
        snapshot: The snapshot.
        path: Path of the checkpoint, a directory or a file of weights.
        found: What the snapshot has there.
        destination: The folder, or the name of a new one in a directory that exists.
        overwrite: Whether to replace files that no export has written.

    Raises:
        UsageError: there are no weights, or they cannot be told from others.
        NotPermitted: the folder is another user's, or, for root, another user may write to it.
        DestinationExists: a file of the folder would be replaced that no export has written.
        Damaged: a file cannot be read.
    """
    files = {name: file for name, file in found.files.items() if not file.entry.is_symlink}
    left_out = [
        *found.left_out,
        *(LeftOut(name, "it is a symbolic link") for name in found.files.keys() - files.keys()),
    ]
    # The folder may be a clone of a repository of the hub.
    for name in [name for name in files if is_obeyed(name) or name.split(b"/")[0] in OWN_NAMES]:
        left_out.append(
            LeftOut(name, "git would obey it" if is_obeyed(name) else "the export has a file of this name")
        )
        del files[name]
    copied = {name: file for name, file in files.items() if not _PICKLED.match(name)}
    names = _names_looked_for(copied, is_directory=found.is_directory)
    items = {names.get(name, name): _copy_of(file) for name, file in copied.items()}
    used: set[bytes] = set()
    source = next(iter(names), b"")
    if not any(name.endswith(b".safetensors") for name in copied):
        weights = _weights(files, path)
        made, unread = _converted(repository, path, weights)
        items.update(made)
        used.update(weights)
        source = next(iter(weights)) if len(weights) == 1 else b""
        left_out += unread
        # It names the files that were converted.
        items.pop(b"pytorch_model.bin.index.json", None)
    elif _INDEX not in items:
        items.update(_index_of(repository, _shards_without_index(copied)))
    left_out += [
        LeftOut(name, "files of this kind can execute code when they are opened")
        for name in files.keys() - copied.keys() - used
    ]
    items[_CARD] = _card(snapshot, path, source, copied.get(_CARD))
    facts = Manifest(str(snapshot.id), repository.id, path, str(snapshot.time_ns // 1_000_000_000))
    with ExportFolder(destination) as folder:
        updated = bring_up_to_date(folder, dict(sorted(items.items())), facts, overwrite=overwrite)
    return Folder(updated, tuple(sorted(left_out)))


def _names_looked_for(files: Mapping[bytes, ExportedFile], *, is_directory: bool) -> dict[bytes, bytes]:
    """Return the name that `from_pretrained` looks for, by the name of the file that is to have it: the only weights, or their index.

    A directory without a configuration at its top is for another library, and keeps its names.
    """
    top = [name for name in files if b"/" not in name]
    if _INDEX in top or _WEIGHTS in top or (is_directory and _CONFIG not in top):
        return {}
    weights = [name for name in top if name.endswith(b".safetensors")]
    # First: an index names its weights as they are.
    indexes = [name for name in top if weights and name.endswith(b".safetensors.index.json")]
    for named, looked_for in ((indexes, _INDEX), (weights, _WEIGHTS)):
        if len(named) == 1 and not _SHARD.match(named[0]):
            return {} if _LOOKED_FOR.match(named[0]) else {named[0]: looked_for}
    return {}


def _shards_without_index(files: Mapping[bytes, ExportedFile]) -> dict[bytes, ExportedFile]:
    """Return the shards of the model at the top; none where there are several models."""
    models: dict[bytes, dict[bytes, ExportedFile]] = {}
    for name, file in files.items():
        shard = _SHARD.match(name)
        if shard is not None and (shard[1] == b"model" or not _LOOKED_FOR.match(shard[1])):
            models.setdefault(shard[1], {})[name] = file
    return models.get(b"model") or (next(iter(models.values())) if len(models) == 1 else {})


def _copy_of(file: ExportedFile) -> Item:
    return Item(file.identity, file.entry.mtime_ns, file.pieces)


def _weights(files: Mapping[bytes, ExportedFile], path: bytes) -> dict[bytes, ExportedFile]:
    """Return the files of torch with the weights."""
    candidates = {
        name: file for name, file in files.items() if _TORCH.match(name) and not _NO_WEIGHTS.match(name)
    }
    sharded = {name: file for name, file in candidates.items() if name.startswith(b"pytorch_model")}
    if sharded:
        return sharded
    if len(candidates) == 1:
        return candidates
    if not candidates:
        raise UsageError(
            f"{one_line(path)} has no weights: neither safetensors nor a file of torch",
            hint="-p names the checkpoint's directory; ciuic checkpoints lists those of a snapshot",
        )
    names = ", ".join(one_line(name) for name in list(candidates)[:5])
    raise UsageError(
        f"{one_line(path)} has several files of torch: {names}", hint="-p names the one with the weights"
    )


class _Tensor(NamedTuple):
    """A tensor of a file of torch."""

    tensors: FileTensors
    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    element_bytes: int

    @property
    def is_ordered(self) -> bool:
        """True if the elements lie in the order of the indices."""
        order = self.tensors.order(self.name)
        return order == tuple(sorted(order))


def _converted(
    repository: Repository, path: bytes, weights: Mapping[bytes, ExportedFile]
) -> tuple[dict[bytes, Item], list[LeftOut]]:
    """Return files of safetensors with the tensors of files of torch, and what of them is none of the model's."""
    reader = BlockReader(repository)
    found: dict[str, _Tensor] = {}
    for name, file in weights.items():
        tensors = FileTensors(repository, file.entry, path + b"/" + name, reader)
        for key in tensors.names():
            found[key] = _described(tensors, key)
    model, others = _of_model(found)
    for tensor in model.values():
        if tensor.size_bytes > _MAX_LYING_BYTES and not tensor.is_ordered:
            raise UsageError(
                f"{one_line(tensor.name)} is larger than {_MAX_LYING_BYTES >> 30} GiB and stored in another order than that of its indices",
                hint="save it with contiguous()",
            )
        if not _DTYPES.match(tensor.dtype) or tensor.size_bytes < 0:
            raise UsageError(
                f"safetensors cannot hold {one_line(tensor.name)}: it has dtype {tensor.dtype}"
                + (", and is a view of a part of its storage" if tensor.size_bytes < 0 else "")
            )
    source = b"".join(file.identity.encode() for file in weights.values())
    identity = hashlib.blake2b(_MADE_BY + source, digest_size=16)
    mtime_ns = max(file.entry.mtime_ns for file in weights.values())
    shards = _shards(model)
    items: dict[bytes, Item] = {}
    index: dict[str, str] = {}
    for number, names in enumerate(shards):
        file_name = (
            _WEIGHTS.decode()
            if len(shards) == 1
            else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        )
        own = identity.copy()
        own.update(file_name.encode())
        items[file_name.encode()] = Item(
            own.hexdigest(), mtime_ns, partial(_safetensors, reader, {name: model[name] for name in names})
        )
        index.update(dict.fromkeys(names, file_name))
    if len(shards) > 1:
        items[_INDEX] = _index(index, sum(one.size_bytes for one in model.values()), mtime_ns)
    first = next(iter(weights))
    left_out = [LeftOut(first, f"tensors that are not of the model: {one_line(name)}") for name in others[:1]]
    return items, left_out


def _described(tensors: FileTensors, key: str) -> _Tensor:
    stored = tensors.tensor(key)
    size_bytes = sum(place.size_bytes for place in stored.ranges) if stored.ranges else -1
    return _Tensor(tensors, key, stored.kind.name, tensors.shape(key), size_bytes, stored.kind.element_bytes)


def _of_model(found: Mapping[str, _Tensor]) -> tuple[dict[str, _Tensor], list[str]]:
    """Return the tensors of the model under their names in it, and the names of others.

    Raises:
        UsageError: there are several states, and none has the name of a model's.
    """
    states = {name: one.tensors.state(one.name) for name, one in found.items()}
    # A flat state may have a part called `model`: what holds its tensors is the file itself.
    tops = dict.fromkeys(state.partition(".")[0] for state in states.values())
    key: str | None = next((key for key in _MODEL_KEYS if key in tops), None)
    if key is None:
        named = [top for top in tops if top and not _OTHER_STATE.match(top)]
        if "" in tops or not named:
            return _bare(dict(found)), []
        if len(named) > 1:
            raise UsageError(
                f"the file has several states: {', '.join(map(one_line, named[:5]))}",
                hint=f"the model's is the one called {', '.join(_MODEL_KEYS)}",
            )
        key = named[0]
    own = {name for name, state in states.items() if state.partition(".")[0] == key}
    model = {name.removeprefix(f"{key}."): one for name, one in found.items() if name in own}
    return _bare(model), [name for name in found if name not in own]


def _bare(found: dict[str, _Tensor]) -> dict[str, _Tensor]:
    """Return the tensors under names without those of torch.compile and DistributedDataParallel."""
    names = by_bare_name(found)
    return {name: found[key] for name, key in names.items()} if names else found


def _shards(model: Mapping[str, _Tensor]) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size_bytes = 0
    for name, tensor in model.items():
        if shards[-1] and size_bytes + tensor.size_bytes > MAX_SHARD_BYTES:
            shards.append([])
            size_bytes = 0
        shards[-1].append(name)
        size_bytes += tensor.size_bytes
    return shards


def _safetensors(reader: BlockReader, model: Mapping[str, _Tensor]) -> Iterator[bytes]:
    """Yield a file of safetensors."""
    # Wide numbers first: each then lies at a multiple of its size, as readers that map the file want it.
    ordered = sorted(model.items(), key=lambda one: -one[1].element_bytes)
    # Without `format` the loaders of Hugging Face refuse the file.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in ordered:
        stop = at + tensor.size_bytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    padded = -(-len(text) // 8) * 8
    yield struct.pack("<Q", padded) + text.ljust(padded)
    for _, tensor in ordered:
        yield from _data(reader, tensor)


def _data(reader: BlockReader, tensor: _Tensor) -> Iterator[bytes]:
    """Yield the elements of a tensor in the order of its indices."""
    (place,) = tensor.tensors.tensor(tensor.name).ranges
    if tensor.is_ordered:
        for start in range(place.start, place.start + place.size_bytes, _PIECE_BYTES):
            yield bytes(
                reader.read(place.entry, start, min(start + _PIECE_BYTES, place.start + place.size_bytes))
            )
        return
    # Such as a transposed matrix, stored by columns.
    np, order = numpy(), tensor.tensors.order(tensor.name)
    raw = np.frombuffer(reader.read(place.entry, place.start, place.start + place.size_bytes), np.uint8)
    lying = raw.reshape(*place.shape, tensor.element_bytes)
    yield lying.transpose(*np.argsort(order).tolist(), len(order)).tobytes()


def _index_of(repository: Repository, shards: Mapping[bytes, ExportedFile]) -> dict[bytes, Item]:
    """Return the index of shards that have none."""
    if not shards:
        return {}
    index: dict[str, str] = {}
    size_bytes = 0
    reader = BlockReader(repository)
    for name, file in shards.items():
        tensors = FileTensors(repository, file.entry, name, reader)
        for key in tensors.names():
            index[key] = os.fsdecode(name)
            size_bytes += sum(place.size_bytes for place in tensors.tensor(key).ranges)
    return {_INDEX: _index(index, size_bytes, max(file.entry.mtime_ns for file in shards.values()))}


def _index(index: Mapping[str, str], size_bytes: int, mtime_ns: int) -> Item:
    document = {"metadata": {"total_size": size_bytes}, "weight_map": dict(sorted(index.items()))}
    return _of_bytes(json.dumps(document, indent=2).encode("ascii") + b"\n", mtime_ns)


def _card(snapshot: Snapshot, path: bytes, source: bytes, old: ExportedFile | None) -> Item:
    """Return the model card: that of the checkpoint, or a new one, with the snapshot in its metadata, and the file whose name is another here."""
    text = b""
    if old is not None:
        if old.size_bytes > _MAX_CARD_BYTES:
            raise Damaged(f"{one_line(_CARD)} has {old.size_bytes} bytes, more than a model card")
        text = b"".join(old.pieces())
    facts: Sequence[tuple[str, str]] = (
        *((("ciuic_weights", one_line(source)),) if source else ()),
        ("ciuic_snapshot", str(snapshot.id)),
        ("ciuic_path", one_line(path)),
        ("ciuic_time_ns", str(snapshot.time_ns)),
    )
    # JSON strings are YAML.
    lines = b"".join(f"{key}: {json.dumps(value)}\n".encode("ascii") for key, value in facts)
    begin = re.match(rb"---[ \t]*\r?\n", text)
    if begin is not None:
        head, end, body = text[begin.end() :].partition(b"\n---")
        head = re.sub(rb"(?m)^ciuic_(snapshot|path|time_ns|weights):.*\n?", b"", head)
        text = b"---\n" + lines + head + end + body
    else:
        text = b"---\n" + lines + b"---\n" + (text or b"# Weights from a snapshot\n\nExported by ciuic.\n")
    return _of_bytes(text, snapshot.time_ns)


def _of_bytes(data: bytes, mtime_ns: int) -> Item:
    return Item(hashlib.blake2b(data, digest_size=16).hexdigest(), mtime_ns, lambda: iter((data,)))
