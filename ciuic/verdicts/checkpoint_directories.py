"""Directories that are checkpoints: which files belong together, and what is missing, by each format's index or marker.

Every function of `RECOGNISERS` yields the checkpoints of one format; the files themselves are left to
`ciuic.verdicts.verdict`. Nothing is executed or made of what is read:

* `SnapshotManager`: ``snapshot.json``, ``state.json`` and tensors below a directory for each object
  (docs/snapshot-manager.md).
* `torch.distributed.checkpoint`: ``.metadata`` is written last, and says where each tensor lies in the ``.distcp``
  files. It is a pickle, of which the opcodes are read.
* Orbax: a directory that is renamed into place when it is complete, with ``_CHECKPOINT_METADATA`` and a database
  of arrays.
* DeepSpeed: ``latest`` names the directory of the newest checkpoint, which has files of every rank.
* Megatron: ``latest_checkpointed_iteration.txt`` names the newest iteration, a directory with one for each rank.
* TensorFlow: ``PREFIX.index`` and ``PREFIX.data-00000-of-00001``; ``checkpoint`` names the newest.
* Hugging Face's sharded weights: ``*.index.json`` names the file of each weight; ``NAME-00001-of-00002`` how many there are.
* A directory of one step (``checkpoint-500``) is one checkpoint with all below it, and so are ``model_500.pt`` and ``optim_500.pt``. The
  newest step has what the one before it has.

References:
    https://huggingface.co/docs/transformers/big_models
    https://deepspeed.readthedocs.io/en/latest/model-checkpointing.html
    https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html
    https://google.github.io/tensorstore/kvstore/ocdbt/ (manifest)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import msgspec

from ciuic import __version__
from ciuic.printable import one_line
from ciuic.structs import decode_json, json_decoder
from ciuic.units import plural
from ciuic.verdicts.formats.pickles import Opcode, PickleStream
from ciuic.verdicts.formats.tensor_bundle import SUFFIX, crc32c, read_index
from ciuic.verdicts.model import BoundedReader, NotJudged, OtherFormat, TornContent
from ciuic.verdicts.sources import DirectorySource, FileSource

_MAX_PARTS: Final = 1 << 14
MAX_DOCUMENT_BYTES: Final = 16 << 20


class PartsNeeded(NamedTuple):
    """A checkpoint of several files."""

    format: str
    name: bytes = b""
    """Name of the checkpoint in the directory; empty for the directory itself."""
    files: tuple[bytes, ...] = ()
    """Relative paths of files whose own format is judged."""
    raw: tuple[tuple[bytes, int], ...] = ()
    """(Relative path, least size in bytes) of files without a structure of their own."""
    tail_bytes: int = 1
    """Length of an end of such a file that is not all zeros."""
    torn: str = ""
    """Reason why the checkpoint is TORN, also if all its files are whole."""
    doubt: str = ""
    """Reason why it is at best UNKNOWN."""
    taken: frozenset[bytes] = frozenset()
    """Names in the directory, and paths below it, that are a part of it."""


def read_document(source: FileSource, what: str) -> bytes:
    """Return a whole document; raise TornContent or NotJudged."""
    if source.size_bytes > MAX_DOCUMENT_BYTES:
        raise NotJudged(f"{what} is larger than what is read for a verdict")
    data = BoundedReader(source.read, source.size_bytes, source.name).at(0, source.size_bytes, what)
    if not data.strip(b"\0 \r\n\t"):
        raise TornContent(f"{what} is empty")
    return data


def _document_of(directory: DirectorySource, name: bytes, what: str) -> bytes | None:
    """Return the document of this name; None where there is none."""
    source = directory.below(name)
    return None if source is None else read_document(source, what)


def shown_name(name: bytes) -> str:
    """Return a name for a reason: one line, for any bytes."""
    return one_line(name[:200])


_SHARD_INDEX_SUFFIXES: Final = (b".safetensors.index.json", b".bin.index.json")


_SHARD: Final = re.compile(rb"(.+)-(\d{5})-of-(\d{5})\.(safetensors|bin)\Z", re.DOTALL)
_INDEXED: Final = (b"model", b"pytorch_model", b"diffusion_pytorch_model")
"""Names that `save_pretrained` gives, which writes an index after them."""


class _ShardIndex(msgspec.Struct):
    weight_map: dict[str, str]


_shard_index = json_decoder(_ShardIndex)


def _recognise_sharded(directory: DirectorySource, names: list[bytes]) -> Iterator[PartsNeeded]:
    """Yield the sharded weights in a directory."""
    indexed: set[bytes] = set()
    for name in names:
        if name.endswith(_SHARD_INDEX_SUFFIXES):
            taken = frozenset({name})
            if directory.below(name) is None:
                # A link may lead to what the snapshot does not have, a directory is no index.
                if directory.link_below(name) is not None:
                    yield PartsNeeded("sharded", name, (name,), taken=taken)
                continue
            try:
                shards = _shards_of(_document_of(directory, name, "the index") or b"")
            except TornContent as error:
                yield PartsNeeded("sharded", name, torn=str(error), taken=taken)
            except NotJudged as error:
                yield PartsNeeded("sharded", name, doubt=str(error), taken=taken)
            else:
                indexed.update(shards)
                yield PartsNeeded("sharded", name, tuple(shards), taken=taken.union(shards))
    sets: dict[tuple[bytes, ...], set[bytes]] = {}
    for name in names:
        # Data of a training are called NAME-00001-of-00002.bin as well.
        if (found := _SHARD.match(name)) and (found[4] != b"bin" or found[1] in _INDEXED):
            sets.setdefault(found.group(1, 3, 4), set()).add(name)
    for (prefix, count, _suffix), parts in sets.items():
        if indexed.isdisjoint(parts):
            lacking = int(count) - len(parts)
            torn = f"{lacking} of {plural(int(count), 'file')} are missing" if lacking > 0 else ""
            needs_index = prefix in _INDEXED
            has_index = any(
                name.startswith(prefix) and name.endswith(_SHARD_INDEX_SUFFIXES) for name in names
            )
            doubt = "its index, which is written after its files, is missing" if needs_index else ""
            if has_index:
                doubt = "its index does not name its files"
            taken = frozenset(parts)
            yield PartsNeeded(
                "sharded", min(parts), tuple(sorted(parts)), torn=torn, doubt=doubt, taken=taken
            )


def _shards_of(text: bytes) -> list[bytes]:
    """Return the names of the files that an index names; raise TornContent or NotJudged."""
    try:
        index = _shard_index.decode(text)
    except msgspec.DecodeError as error:
        raise TornContent(f"the index is not the JSON of one: {error}") from None
    # Half of a surrogate pair, which JSON allows, has no bytes.
    shards = {value.encode("utf-8", "replace") for value in index.weight_map.values()}
    if not shards:
        raise TornContent("the index names no file")
    if len(shards) > _MAX_PARTS:
        raise NotJudged("the index names more files than are looked at for a verdict")
    return sorted(shards)


FACTS_FILE: Final = b"snapshot.json"
STATE_FILE: Final = b"state.json"
_TENSORS_SUFFIX: Final = b".safetensors"
_TENSORS_INDEX_SUFFIX: Final = b".safetensors.index.json"
_STATE_VERSION: Final = 1


class _TrainingFacts(msgspec.Struct):
    objects: tuple[str, ...] = ()


class _TrainingState(msgspec.Struct):
    version: int
    objects: dict[str, Any]


def _recognise_training(directory: DirectorySource, names: list[bytes]) -> Iterator[PartsNeeded]:
    """Yield the state that a snapshot of a training is. Its files in another directory are judged by their own formats."""
    if not directory.holds_state or STATE_FILE not in names:
        return
    taken = frozenset(names)
    try:
        _check_training_documents(directory)
        files = tuple(sorted(set(_tensor_files(directory, names))))
    except TornContent as error:
        yield PartsNeeded("training", torn=str(error), taken=taken)
    except NotJudged as error:
        yield PartsNeeded("training", doubt=str(error), taken=taken)
    else:
        yield PartsNeeded("training", files=files, taken=taken)


def _check_training_documents(directory: DirectorySource) -> None:
    facts, state = (
        _training_document(_document_of(directory, name, name.decode()), kind, name.decode())
        for name, kind in ((FACTS_FILE, _TrainingFacts), (STATE_FILE, _TrainingState))
    )
    if state.version != _STATE_VERSION:
        raise NotJudged(f"it was written by a later version of ciuic than {__version__}")
    missing = [name for name in facts.objects if name not in state.objects]
    if missing:
        raise TornContent(f"state.json lacks the object {missing[0]!r}")


def _training_document(text: bytes | None, kind: type[Any], what: str) -> Any:
    if text is None:
        raise TornContent(f"{what} is missing")
    try:
        return decode_json(text, kind)
    except msgspec.DecodeError as error:
        raise TornContent(f"{what} is not the JSON of one: {error}") from None


def _tensor_files(directory: DirectorySource, names: list[bytes]) -> Iterator[bytes]:
    """Yield the files of tensors, those that are there and those that an index names."""
    yield from (name for name in names if name.endswith(_TENSORS_SUFFIX))
    for name in names:
        below = directory.directory(name)
        for inner in [] if below is None else below.names():
            if inner.endswith(_TENSORS_SUFFIX):
                yield name + b"/" + inner
            elif below is not None and inner.endswith(_TENSORS_INDEX_SUFFIX):
                index = _document_of(below, inner, "the index") or b""
                yield from (name + b"/" + shard for shard in _shards_of(index))


_DEEPSPEED_LATEST: Final = b"latest"
# The tag that save_checkpoint chooses, and the script that it copies beside `latest`.
_DEEPSPEED_TAG: Final = re.compile(rb"global_step\d+\Z")
_DEEPSPEED_SCRIPT: Final = b"zero_to_fp32.py"
_TAGS_LOOKED_AT: Final = 8
_DEEPSPEED_MODEL: Final = re.compile(rb"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt\Z")
_DEEPSPEED_OPTIMIZER: Final = re.compile(
    rb"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt\Z"
)


def _recognise_deepspeed(directory: DirectorySource, names: list[bytes]) -> Iterator[PartsNeeded]:
    """Yield the checkpoint that ``latest`` names.

    Other programs have a ``latest`` too, a link, a directory, or a file with anything in it: it is DeepSpeed's only beside
    what else DeepSpeed writes.
    """
    source = directory.file(_DEEPSPEED_LATEST) if _DEEPSPEED_LATEST in names else None
    if source is None:
        return
    taken = frozenset({_DEEPSPEED_LATEST})
    try:
        tag = read_document(source, "the file latest").strip()
    except NotJudged:
        return
    except TornContent as error:
        if _is_of_deepspeed(directory, names):
            yield PartsNeeded("deepspeed", _DEEPSPEED_LATEST, torn=str(error), taken=taken)
        return
    # A file that happens to have this name, and is no tag.
    if b"/" in tag or b"\n" in tag or len(tag) > 255 or tag in (b".", b".."):
        return
    below = directory.directory(tag)
    files = [] if below is None else _rank_states(below)
    if not (files or _DEEPSPEED_TAG.match(tag) or _is_of_deepspeed(directory, names)):
        return
    if below is None:
        reason = f"latest names {shown_name(tag)}, which is not there"
        yield PartsNeeded("deepspeed", _DEEPSPEED_LATEST, torn=reason, taken=taken)
        return
    torn = "" if files else f"{shown_name(tag)} has no states of ranks"
    ranks = {(int(found[1]), int(found[2])) for name in files if (found := _DEEPSPEED_OPTIMIZER.match(name))}
    lacking = _lacking_ranks(ranks)
    if lacking:
        torn = f"the states of {plural(len(lacking), 'rank')} are missing"
    relative = tuple(tag + b"/" + name for name in files)
    yield PartsNeeded("deepspeed", tag, relative, torn=torn, taken=taken.union((tag,)))
    yield from _not_yet_named(directory, names, _DEEPSPEED_TAG, tag, _DEEPSPEED_LATEST)


def _not_yet_named(
    directory: DirectorySource, names: list[bytes], pattern: re.Pattern[bytes], newest: bytes, pointer: bytes
) -> Iterator[PartsNeeded]:
    """Yield the directories of later steps than the one that a pointer names: it is written when all ranks have ended."""
    if not pattern.match(newest):
        return
    for name in names:
        if pattern.match(name) and _number(name) > _number(newest) and directory.directory(name) is not None:
            doubt = f"{pointer.decode()}, which is written last, does not name it"
            yield _doubtful(directory, name, doubt)


def _number(name: bytes) -> int:
    return int(_DIGITS.findall(name)[-1][-18:])


_DIGITS: Final = re.compile(rb"\d+")
_MEGATRON_LATEST: Final = b"latest_checkpointed_iteration.txt"
_MEGATRON_STEP: Final = re.compile(rb"iter_\d{7,}\Z")


def _recognise_megatron(directory: DirectorySource, names: list[bytes]) -> Iterator[PartsNeeded]:
    """Yield the iterations that ``latest_checkpointed_iteration.txt`` does not name yet, and the one that is not there."""
    if directory.file(_MEGATRON_LATEST) is None:
        return
    taken = frozenset({_MEGATRON_LATEST})
    try:
        text = (_document_of(directory, _MEGATRON_LATEST, _MEGATRON_LATEST.decode()) or b"").strip()
    except TornContent as error:
        yield PartsNeeded("megatron", _MEGATRON_LATEST, torn=str(error), taken=taken)
        return
    except NotJudged:
        return
    if not text.isdigit() or len(text) > 18:
        return
    newest = b"iter_%07d" % int(text)
    if newest not in names:
        reason = f"it names {shown_name(newest)}, which is not there"
        yield PartsNeeded("megatron", _MEGATRON_LATEST, torn=reason, taken=taken)
    yield from _not_yet_named(directory, names, _MEGATRON_STEP, newest, _MEGATRON_LATEST)


# In a path of one step at most: NAME-step=100.ckpt, checkpoint-500, iter_0000500, epoch_3.
_STEP_NAME: Final = re.compile(
    rb"(?:.*[-_=.])?(?:checkpoint|ckpt|step|epoch|iter|iteration)[-_=]?(\d{1,18})(?:\.ckpt)?\Z",
    re.IGNORECASE | re.DOTALL,
)
_STEP_OF_FILE: Final = re.compile(rb"(?:step|epoch|iter|iteration)[-_=]?(\d{1,18})", re.IGNORECASE)
# As nanochat, LitGPT and many loops of their own: model_000500.pt, optim_000500_rank0.pt.
_ROLE: Final = re.compile(
    rb"(model|weights|optim|optimizer|opt|scheduler|lr_scheduler|ema|rng|scaler|trainer|training_state|state)"
    rb"[-_.](?:[a-z]+[-_=])?(\d{1,18})(?=[-_.])(?!-of-)",
    re.IGNORECASE,
)
_MAX_DEPTH: Final = 4
_TRAINER_STATE: Final = b"trainer_state.json"
_SAVED: Final = (
    *(b".safetensors", b".pt", b".pth", b".bin", b".npz", b".pkl", b".h5", b".distcp", b".metadata"),
    _TRAINER_STATE,
)

_NO_FORMAT: Final = (b".distcp", b".metadata", b".json")


def is_of_one_step(path: bytes, names: list[bytes]) -> bool:
    """Return whether a directory is what a trainer has saved at one step, not a place for those of several."""
    steps = {int(found[-1]) for name in names if (found := _STEP_OF_FILE.findall(name))}
    return is_step(path.rpartition(b"/")[2]) and len(steps) <= 1


def is_step(name: bytes) -> bool:
    """Return whether a name is one of a step."""
    return _STEP_NAME.match(name) is not None


def _files_below(directory: DirectorySource, name: bytes, depth: int = _MAX_DEPTH) -> Iterator[bytes]:
    """Yield the paths of the files that trainers save, below a directory of one."""
    below = directory.directory(name)
    for inner in [] if below is None else below.names():
        if inner.endswith(_SAVED):
            yield inner
        elif below is not None and depth:
            yield from (inner + b"/" + one for one in _files_below(below, inner, depth - 1))


def _recognise_steps(directory: DirectorySource, names: list[bytes]) -> Iterator[PartsNeeded]:
    """Yield the files of one step that lie beside those of others, and the newest step if it lacks what the one before has."""
    by_step: dict[int, dict[bytes, bytes]] = {}
    """Names of each step, with what is the same in all steps by name: the rank stays."""
    for name in names:
        if name.endswith(_SAVED) and (found := _ROLE.match(name)):
            by_step.setdefault(int(found[2]), {})[name[: found.start(2)] + name[found.end(2) :]] = name
    newest = max(by_step, default=0)
    for step, kinds in by_step.items():
        earlier = max((one for one in by_step if one < step), default=step)
        lacking = _lacking(set(kinds), set(by_step[earlier])) if step == newest else set()
        if len(kinds) > 1 or lacking:
            files = tuple(sorted(kinds.values()))
            first = next((name for name in files if name.startswith((b"model", b"weights"))), files[0])
            yield PartsNeeded("step", first, files, doubt=_doubt_of(lacking), taken=frozenset(files))
    if is_step(directory.path.rpartition(b"/")[2]) and _TRAINER_STATE in names:
        try:
            decode_json(
                _document_of(directory, _TRAINER_STATE, "the state of the trainer") or b"", dict[str, Any]
            )
        except (TornContent, msgspec.DecodeError):
            torn = "it is not the whole JSON of one"
            yield PartsNeeded("step", _TRAINER_STATE, torn=torn, taken=frozenset({_TRAINER_STATE}))
        except NotJudged:
            pass
    families: dict[bytes, list[bytes]] = {}
    for name in names:
        if is_step(name) and directory.directory(name) is not None:
            families.setdefault(_DIGITS.sub(b"#", name), []).append(name)
    for family in families.values():
        *_, before, last = [b"", b"", *sorted(family, key=_number)]
        if not before:
            continue
        sets = [{_DIGITS.sub(b"#", one) for one in _files_below(directory, name)} for name in (before, last)]
        if lacking := _lacking(sets[1], sets[0]):
            yield _doubtful(directory, last, _doubt_of(lacking))


def _doubtful(directory: DirectorySource, name: bytes, doubt: str) -> PartsNeeded:
    """Return a directory that is one checkpoint, and not GOOD."""
    found = [name + b"/" + one for one in _files_below(directory, name)]
    files = tuple(one for one in found if not one.endswith(_NO_FORMAT))
    return PartsNeeded("directory", name, files, doubt=doubt, taken=frozenset({name, *found}))


def _lacking(kinds: set[bytes], before: set[bytes]) -> set[bytes]:
    """Return the kinds of files that a step lacks, if it has a part of those of the one before."""
    return before - kinds if kinds & before else set()


def _doubt_of(lacking: set[bytes]) -> str:
    return f"it has no {shown_name(min(lacking))}, as the step before it has" if lacking else ""


def _is_of_deepspeed(directory: DirectorySource, names: list[bytes]) -> bool:
    """Return whether there is something beside ``latest`` that DeepSpeed alone writes."""
    if _DEEPSPEED_SCRIPT in names:
        return True
    tags = [name for name in names if _DEEPSPEED_TAG.match(name)][-_TAGS_LOOKED_AT:]
    return any(below is not None and _rank_states(below) for below in map(directory.directory, tags))


def _rank_states(below: DirectorySource) -> list[bytes]:
    return [
        name for name in below.names() if _DEEPSPEED_MODEL.match(name) or _DEEPSPEED_OPTIMIZER.match(name)
    ]


def _lacking_ranks(ranks: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the ranks of a full rectangle (data parallel by model parallel) that are not there, one at most for each that is."""
    if not ranks:
        return set()
    width = max(rank for rank, _ in ranks) + 1
    height = max(rank for _, rank in ranks) + 1
    # Numbers in names are a user's: the rectangle is not built.
    if width * height > 4 * len(ranks):
        return {(width, height)}
    return {(x, y) for x in range(width) for y in range(height)} - ranks


_DCP_METADATA: Final = b".metadata"
_DCP_SUFFIX: Final = b".distcp"
_DCP_TAIL_BYTES: Final = 6
"""The last item is a zip archive, which ends with the offset of its directory and the length of a comment, 0."""
_MAX_DCP_MEMO: Final = 1 << 20


def _recognise_distributed(directory: DirectorySource, names: list[bytes]) -> Iterator[PartsNeeded]:
    """Yield the checkpoint that the directory is."""
    data = [name for name in names if name.endswith(_DCP_SUFFIX)]
    metadata = directory.file(_DCP_METADATA) if _DCP_METADATA in names else None
    if metadata is None and not data:
        return
    taken = frozenset([_DCP_METADATA, *data])
    if metadata is None:
        yield PartsNeeded("dcp", torn="its .metadata, which is written last, is missing", taken=taken)
        return
    try:
        ends = _read_dcp_metadata(metadata)
    except TornContent as error:
        # Other programs have a file of this name, too.
        if data:
            yield PartsNeeded("dcp", torn=f".metadata: {error}", taken=taken)
    except NotJudged as error:
        if data:
            yield PartsNeeded("dcp", doubt=f".metadata: {error}", taken=taken)
    else:
        # A file of this name that is something else names no data.
        if ends or data:
            yield PartsNeeded("dcp", raw=tuple(sorted(ends.items())), tail_bytes=_DCP_TAIL_BYTES, taken=taken)


def _read_dcp_metadata(source: FileSource) -> dict[bytes, int]:
    """Return the offset after the last item of each data file; raise TornContent or NotJudged."""
    reader = BoundedReader(source.read, source.size_bytes, source.name)
    if reader.up_to(0, 1, "its beginning") != b"\x80":
        raise TornContent("it does not begin as a pickle")
    stream = PickleStream(reader)
    places = _DcpPlaces()
    for code in stream.opcodes():
        places.see(code)
    if stream.at != source.size_bytes:
        raise TornContent("its pickle ends before the file")
    return places.ends


class _DcpPlaces:
    """Places of items: the states ``{"relative_path": …, "offset": …, "length": …}`` of torch's `_StorageInfo`."""

    def __init__(self) -> None:
        self.ends: dict[bytes, int] = {}
        self._memo: dict[int, Any] = {}
        self._count = 0
        self._last: Any = None
        self._key = b""
        self._path = b""
        self._offset = 0

    def see(self, code: Opcode) -> None:
        """Take the next opcode."""
        name, argument = code
        if name in ("BINGET", "LONG_BINGET"):
            self._value(self._memo.get(argument))
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._remember(argument)
        elif name == "MEMOIZE":
            self._remember(self._count)
            self._count += 1
        elif isinstance(argument, (bytes, int)):
            self._value(argument)
        elif name not in ("FRAME", "PROTO", "MARK"):
            self._last = None

    def _remember(self, index: int) -> None:
        # Texts alone are wanted: paths and keys that occur again.
        if isinstance(self._last, bytes) and len(self._memo) < _MAX_DCP_MEMO:
            self._memo[index] = self._last

    def _value(self, value: Any) -> None:
        self._last = value
        if self._key == b"relative_path" and isinstance(value, bytes):
            self._path = value
        elif self._key == b"offset" and isinstance(value, int):
            self._offset = value
        elif self._key == b"length" and isinstance(value, int) and self._path:
            end = self._offset + value
            if not 0 <= end < 1 << 62 or len(self.ends) > _MAX_PARTS:
                raise NotJudged("it names impossible places")
            self.ends[self._path] = max(self.ends.get(self._path, 0), end)
        self._key = value if isinstance(value, bytes) else b""


_ORBAX_MARKER: Final = b"_CHECKPOINT_METADATA"
_ORBAX_MANIFEST: Final = b"manifest.ocdbt"
_ORBAX_UNFINISHED: Final = b".orbax-checkpoint-tmp"
_ORBAX_MANIFEST_MAGIC: Final = bytes.fromhex("0cdb3a2a")
_MAX_ORBAX_MANIFEST_BYTES: Final = 1 << 20


class _OrbaxMarker(msgspec.Struct):
    commit_timestamp_nsecs: int | None = None


def _recognise_orbax(directory: DirectorySource, names: list[bytes]) -> Iterator[PartsNeeded]:
    """Yield the checkpoint that the directory is."""
    if _ORBAX_MARKER not in names and _ORBAX_MANIFEST not in names:
        return
    taken = frozenset(names)
    if _ORBAX_UNFINISHED in directory.path.rpartition(b"/")[2]:
        yield PartsNeeded("orbax", torn="it was never renamed to its name: its save did not end", taken=taken)
        return
    try:
        _check_orbax_marker(directory)
        raw = tuple(_orbax_data(directory))
    except TornContent as error:
        yield PartsNeeded("orbax", torn=str(error), taken=taken)
    except NotJudged as error:
        yield PartsNeeded("orbax", doubt=str(error), taken=taken)
    else:
        # An item of a checkpoint lies below the directory with the marker.
        doubt = "" if _ORBAX_MARKER in names else "it has no _CHECKPOINT_METADATA of its own"
        yield PartsNeeded("orbax", raw=raw, tail_bytes=4, doubt=doubt, taken=taken)


def _check_orbax_marker(directory: DirectorySource) -> None:
    text = _document_of(directory, _ORBAX_MARKER, "_CHECKPOINT_METADATA")
    if text is None:
        return
    try:
        marker = decode_json(text, _OrbaxMarker)
    except msgspec.DecodeError:
        raise TornContent("_CHECKPOINT_METADATA is not the JSON of one") from None
    if marker.commit_timestamp_nsecs is None:
        raise TornContent("_CHECKPOINT_METADATA has no time of the commit: its save did not end")


def _orbax_data(directory: DirectorySource) -> Iterator[tuple[bytes, int]]:
    """Check the manifests of the directory and of its items, and yield the files of data."""
    names = directory.names()
    found = False
    for item in [b"", *names]:
        place = directory.directory(item) if item else directory
        manifest = None if place is None else place.file(_ORBAX_MANIFEST)
        if place is None or manifest is None:
            continue
        found = True
        _check_orbax_manifest(BoundedReader(manifest.read, manifest.size_bytes, _ORBAX_MANIFEST))
        yield from _orbax_data_files(place, item + b"/" if item else b"")
    if not found:
        raise NotJudged("it has no database of arrays (manifest.ocdbt)")


def _check_orbax_manifest(reader: BoundedReader) -> None:
    head = reader.at(0, 12, "manifest.ocdbt")
    length = int.from_bytes(head[4:], "little")
    if head[:4] != _ORBAX_MANIFEST_MAGIC or length != reader.size_bytes:
        raise TornContent("manifest.ocdbt is incomplete")
    if length > _MAX_ORBAX_MANIFEST_BYTES:
        raise NotJudged("manifest.ocdbt is larger than what is read for a verdict")
    data = reader.at(0, length, "manifest.ocdbt")
    if crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise TornContent("manifest.ocdbt does not match its checksum")


def _orbax_data_files(place: DirectorySource, prefix: bytes) -> Iterator[tuple[bytes, int]]:
    below = place.directory(b"d")
    names = [] if below is None else below.names()
    if not names or len(names) > _MAX_PARTS:
        raise (
            TornContent("it has no data") if not names else NotJudged("it has more files than are looked at")
        )
    for name in names:
        yield prefix + b"d/" + name, 1


_TENSORFLOW_INDEX: Final = SUFFIX.encode("ascii")
_TENSORFLOW_DATA: Final = re.compile(rb"(.+)\.data-\d{5}-of-\d{5}\Z", re.DOTALL)


def _recognise_tensorflow(directory: DirectorySource, names: list[bytes]) -> Iterator[PartsNeeded]:
    """Yield the checkpoints in a directory."""
    data: dict[bytes, set[bytes]] = {}
    for name in names:
        if found := _TENSORFLOW_DATA.match(name):
            data.setdefault(found[1], set()).add(name)
    for prefix, files in sorted(data.items()):
        index = prefix + _TENSORFLOW_INDEX
        taken = frozenset([index, *files])
        source = directory.file(index)
        if source is None:
            yield PartsNeeded(
                "tensorflow", prefix, torn="its index, which is written last, is missing", taken=taken
            )
            continue
        try:
            bundle = read_index(BoundedReader(source.read, source.size_bytes, index))
        except (TornContent, OtherFormat) as error:
            yield PartsNeeded("tensorflow", prefix, torn=str(error) or "its index is damaged", taken=taken)
        except NotJudged as error:
            yield PartsNeeded("tensorflow", prefix, doubt=str(error), taken=taken)
        else:
            raw = tuple(
                (b"%s.data-%05d-of-%05d" % (prefix, shard, bundle.shards), bundle.ends.get(shard, 0))
                for shard in range(bundle.shards)
            )
            yield PartsNeeded("tensorflow", prefix, raw=raw, tail_bytes=8, taken=taken)


RECOGNISERS: Final[tuple[Callable[[DirectorySource, list[bytes]], Iterator[PartsNeeded]], ...]] = (
    _recognise_training,
    _recognise_distributed,
    _recognise_orbax,
    _recognise_deepspeed,
    _recognise_megatron,
    _recognise_tensorflow,
    _recognise_sharded,
    _recognise_steps,
)
