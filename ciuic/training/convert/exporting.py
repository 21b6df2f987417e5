"""Export of a snapshot's state as files that other programs open, whole and durable at their path, or not at all.

The formats: safetensors, NumPy's npz, files of `torch.save`, the folder that `from_pretrained` opens, and a directory of
`torch.distributed.checkpoint` (`dcp_export`). In files of tensors by name, a name is the path of the tensor in the state,
joined by dots: ``model.layer.weight``, or ``layer.weight`` where one object alone is exported. Everything that is no tensor is
left out. Files of torch are those that `torch.load(weights_only=True)` opens, with a record for ciuic where one is wanted. The
folder of transformers has the weights and the configuration files, which the integration of the Trainer saves with each
snapshot (`CONFIGURATION` in its object `progress`).
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from ciuic.errors import UsageError, pip_install
from ciuic.repository import Repository
from ciuic.training.convert.destination import new_directory, new_file
from ciuic.training.convert.export_state import RANDOM, ExportState, as_plain, missing_package, read_snapshot
from ciuic.training.format import tensors
from ciuic.training.format.layout import encode_header
from ciuic.training.format.shards import by_bare_name
from ciuic.training.format.structure import Leaf

FORMATS: Final = ("torch", "safetensors", "hf", "dcp", "npz")
# Imported before the state is read, so that its tensors are torch's.
_NEEDED: Final = {"torch": ("torch",), "dcp": ("torch",), "hf": (), "safetensors": (), "npz": ("numpy",)}
_MAX_RANKS: Final = 100_000


class Exported(NamedTuple):
    """What an export has written, and what its format could not hold."""

    id: str
    """Id of the snapshot."""
    path: str
    """Absolute path of the file or folder, durable."""
    format: str
    size_bytes: int
    left_out: tuple[str, ...]
    """Names of what the format cannot hold, or ``only`` did not name."""


def export(
    save_dir: Path | Callable[[], Repository],
    path: Path,
    to: str,
    *,
    root: bytes | None = None,
    snapshot: str | None = None,
    only: Sequence[str] = (),
    ranks: int = 1,
    overwrite: bool = False,
    also: Sequence[Callable[[], Repository]] = (),
) -> Exported:
    """Write the state of a snapshot in a format of others, durably on return.

    The state is read into memory as a whole.

    Args:
        save_dir: Directory of the repository, or a function that opens it once more.
        path: Destination, in a directory that exists: a file, or a folder for ``hf`` and ``dcp``.
        to: One of `FORMATS`.
        root: Path of the training in its snapshots, to find the newest; None for any training.
        snapshot: An id or what stands for one; None: the newest that can be read whole.
        only: Names of the objects to export; none: all.
        ranks: Number of ranks for which ``dcp`` cuts the tensors.
        overwrite: Whether to replace what an earlier export has written at ``path``.
        also: Further repositories, which may have other parts of a state that several hosts have saved.

    Raises:
        UsageError: An argument is wrong, or a package is not installed.
        NotFound: There is no such snapshot, object or state.
        Damaged: The snapshot is not as it was saved.
        DestinationExists: There is something at ``path`` that may not be replaced.
    """
    _check(to, ranks, only)
    for name in ("torch", "numpy"):
        # Needed or not: with torch the tensors of torch come as such, bfloat16 included.
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)
    for name in _NEEDED[to]:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            raise missing_package(name, f"--to {to}") from None
    state = read_snapshot(str(save_dir) if isinstance(save_dir, Path) else save_dir, root, snapshot, also)
    chosen = state.only(only)
    path = path.absolute()
    try:
        size_bytes, written = _write(path, chosen, to, ranks, overwrite)
    except ModuleNotFoundError as error:
        raise missing_package(str(error.name), f"--to {to}") from None
    left_out = tuple(name for name in (*state.objects, *state.values) if name not in written)
    return Exported(state.id, str(path), to, size_bytes, left_out)


def _check(to: str, ranks: int, only: Sequence[str]) -> None:
    if to not in FORMATS:
        raise UsageError(f"the format must be one of {', '.join(FORMATS)}, got {to!r}")
    if not 1 <= ranks <= _MAX_RANKS:
        raise UsageError(f"ranks must be from 1 to {_MAX_RANKS}, got {ranks}")
    if ranks != 1 and to != "dcp":
        raise UsageError(f"only --to dcp writes for several ranks, got --to {to} with {ranks} ranks")
    if to == "hf" and only:
        raise UsageError("--to hf writes the model, so --only has no meaning with it")


def _write(path: Path, state: ExportState, to: str, ranks: int, overwrite: bool) -> tuple[int, set[str]]:
    """Write the destination; return its size and the names of the objects and values that it has."""
    if to == "dcp":
        return _write_dcp(path, state, ranks, overwrite), {*state.objects, *state.values}
    # Only here: `import ciuic.training` needs none of it.

    if to == "torch":
        size_bytes = write_torch(path, state.whole(), overwrite=overwrite)
        return size_bytes, {*state.objects, *state.values}
    if to == "hf":
        return _write_hugging_face(path, state, overwrite=overwrite), {"model"}
    found = _tensors_of(state)
    names = {
        name for name in state.objects if state.is_bare or any(one.startswith(f"{name}.") for one in found)
    }
    if to == "npz":
        return _write_npz(path, found, overwrite=overwrite), names
    facts = _facts_of(state)
    return _write_safetensors(path, found, facts, overwrite=overwrite), names


def _write_dcp(path: Path, state: ExportState, ranks: int, overwrite: bool) -> int:
    import torch  # type: ignore[import-not-found, unused-ignore]

    if not torch.distributed.is_available():
        raise UsageError("--to dcp needs a torch with torch.distributed", hint="another build of torch")
    from ciuic.training.convert.dcp_export import write_dcp

    return write_dcp(path, nested(state), ranks, overwrite=overwrite)


def nested(state: ExportState) -> dict[str, Any]:
    """Return the state as `dcp.save` takes it: objects by name, with the manager's facts beside them."""
    if state.is_bare:
        one = state.whole()
        return one if isinstance(one, dict) else dict(state.objects)
    facts = {"epoch": state.facts.epoch, "step": state.facts.step, "metrics": dict(state.facts.metrics)}
    return {**({} if state.is_dcp else facts), **state.objects, **state.values}


def _tensors_of(state: ExportState) -> dict[str, Any]:
    """Return the tensors of all objects and values by name, without those of random generators.

    Raises:
        UsageError: There is none, or one that has no dense numbers.
    """
    found: dict[str, Any] = {}
    values = {name: value for name, value in state.values.items() if name != RANDOM}
    whole = next(iter(state.objects.values())) if state.is_bare else {**state.objects, **values}
    for path, value in _walk(whole, ()):
        name = ".".join(path) or "value"
        # Keys may contain dots.
        while name in found:
            name += "#"
        found[name] = _dense(value, name)
    if not found:
        raise UsageError(
            f"{state.id} has no tensors in {', '.join((*state.objects, *values)) or 'any object'}"
        )
    return found


def _write_safetensors(
    path: Path, found: Mapping[str, Any], facts: Mapping[str, str], *, overwrite: bool
) -> int:
    """Write a safetensors file, durably on return.

    Args:
        path: Destination.
        found: Tensors of torch or arrays of NumPy by name.
        facts: Texts for the header's metadata.
        overwrite: Whether to replace a file that is there.

    Returns:
        The size of the file.

    Raises:
        DestinationExists: There is a file at ``path`` that may not be replaced.
        UsageError: The format has no name for a tensor's dtype.
    """
    leaves = [Leaf(name, value, tensors.describe(value)) for name, value in found.items()]
    for leaf in leaves:
        if leaf.array.true_dtype:
            raise UsageError(
                f"safetensors has no dtype {leaf.array.true_dtype}, which {leaf.name} has",
                hint="--to torch has all dtypes of torch; --only leaves objects out",
            )
    # Wide numbers first: each then lies at a multiple of its size, as readers that map the file want it.
    leaves.sort(key=lambda leaf: -leaf.array.element_bytes)
    of_torch = all(leaf.array.framework == "torch" for leaf in leaves)
    with new_file(path, overwrite=overwrite) as file:
        file.write(encode_header(leaves, of_torch=of_torch, metadata=facts))
        for leaf in leaves:
            file.write(_bytes_of(leaf.value))
        return file.tell()


def _write_npz(path: Path, found: Mapping[str, Any], *, overwrite: bool) -> int:
    """Write an uncompressed npz file without pickled arrays, durably on return.

    NumPy has no bfloat16 and no float8: such numbers become float32, without loss.

    Args:
        path: Destination.
        found: Tensors of torch or arrays of NumPy by name.
        overwrite: Whether to replace a file that is there.

    Returns:
        The size of the file.

    Raises:
        DestinationExists: There is a file at ``path`` that may not be replaced.
    """
    import numpy

    with new_file(path, overwrite=overwrite) as file:
        # Not numpy.savez, which takes names for its own arguments (`file`).
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, value in found.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    numpy.lib.format.write_array(member, _numpy(value), allow_pickle=False)
        file.seek(0, 2)
        return file.tell()


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if tensors.is_array(value):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(item, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for at, item in enumerate(value):
            yield from _walk(item, (*path, str(at)))


def _dense(value: Any, name: str) -> Any:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        if value.dtype.kind not in "biufc":
            raise UsageError(
                f"{name} has numbers of {value.dtype}, which NumPy has not", hint=pip_install("torch")
            )
        return value.astype(value.dtype.newbyteorder("="), copy=False)
    if tensors.is_sparse(value):
        raise UsageError(
            f"{name} is a sparse tensor, which only --to torch has", hint="--only leaves objects out"
        )
    return value.detach()


def _bytes_of(value: Any) -> memoryview:
    torch = sys.modules.get("torch")
    flat: Any
    if torch is not None and isinstance(value, torch.Tensor):
        flat = value.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        import numpy

        flat = numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8)
    return memoryview(flat)


def _numpy(value: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    if value.dtype == torch.bfloat16 or "float8" in str(value.dtype):
        value = value.to(torch.float32)
    return value.resolve_conj().resolve_neg().numpy()


def _facts_of(state: ExportState) -> dict[str, str]:
    """Return what a header says of the snapshot: its id, step, epoch and metrics."""
    facts = state.facts
    return {
        "snapshot": state.id,
        "step": json.dumps(facts.step),
        "epoch": json.dumps(facts.epoch),
        "metrics": json.dumps({name: repr(value) for name, value in facts.metrics.items()}),
    }


# Below the folder that torch.save gives all members: its reader looks at names there alone.
_RECORD: Final = "archive/ciuic.json"
_MAX_RECORD_BYTES: Final = 4096
_ZIP: Final = b"PK\x03\x04"


def write_torch(path: Path, state: Any, *, overwrite: bool, record: bytes = b"") -> int:
    """Write a state as plain values and tensors, durably on return.

    Args:
        path: Destination.
        state: The state; `export_state.as_plain` says what becomes of values that are no tensors.
        overwrite: Whether to replace a file that is there.
        record: Content of an extra member of the archive, for `read_record`; torch does not look at it.

    Returns:
        The size of the file.

    Raises:
        DestinationExists: There is a file at ``path`` that may not be replaced.
        TypeError: A value is of a class that is not known.
    """
    import torch  # type: ignore[import-not-found, unused-ignore]

    plain = as_plain(state)
    with new_file(path, overwrite=overwrite) as file:
        torch.save(plain, file)
        if record:
            # A member appended by zipfile: torch reads the directory at the end of the archive.
            with zipfile.ZipFile(file, "a") as archive:
                archive.writestr(_RECORD, record)
        file.seek(0, 2)
        return file.tell()


def read_record(file: IO[bytes]) -> bytes | None:
    """Return the record of a file that `write_torch` wrote with one; None for any other file."""
    # Other files are read no further: they may be of any size.
    if file.read(len(_ZIP)) != _ZIP:
        return None
    try:
        with zipfile.ZipFile(file) as archive:
            found = archive.getinfo(_RECORD)
            return archive.read(found) if found.file_size <= _MAX_RECORD_BYTES else None
    # What zipfile raises for an archive that is none, is encrypted, or is compressed in a way it does not know.
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


CONFIGURATION: Final = "configuration_files"
"""Key of the files by name, each as a tensor of bytes."""
WEIGHTS: Final = "model.safetensors"
# Names that a snapshot may bring: never a path, a hidden file, a program or an index of weights.
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\.(json|txt|model|jinja|vocab|tiktoken)")
_FORBIDDEN: Final = re.compile(r".*\.index\.json")
# A folder with these alone may be replaced.
_PATTERNS: Final = ("*.json", "*.txt", "*.model", "*.jinja", "*.vocab", "*.tiktoken", "*.safetensors")


def is_configuration_name(name: str) -> bool:
    """Return whether a file of this name may be part of an exported folder."""
    return bool(_NAME.fullmatch(name)) and not _FORBIDDEN.fullmatch(name)


def _write_hugging_face(path: Path, state: ExportState, *, overwrite: bool) -> int:
    """Write the folder, durably on return.

    Args:
        path: Destination.
        state: State of which the object ``model`` is written.
        overwrite: Whether to replace a folder that is there and has no other files.

    Returns:
        The size of its files.

    Raises:
        UsageError: The snapshot has no model, or no configuration of it.
        DestinationExists: There is something at ``path`` that may not be replaced.
    """
    files = _configuration(state)
    found = _tensors_of(state.only(["model"]))
    # Names as the model has them without torch.compile and DistributedDataParallel.
    found = {
        name: found[key]
        for name, key in (by_bare_name(found) or dict(zip(found, found, strict=True))).items()
    }
    with new_directory(path, overwrite=overwrite, names=_PATTERNS) as folder:
        size_bytes = _write_safetensors(folder / WEIGHTS, found, {}, overwrite=False)
        for name, content in files.items():
            size_bytes += (folder / name).write_bytes(content)
    return size_bytes


def _configuration(state: ExportState) -> dict[str, bytes]:
    stored = state.objects.get("progress")
    files = stored.get(CONFIGURATION) if isinstance(stored, Mapping) else None
    if not isinstance(files, Mapping) or "config.json" not in files or "model" not in state.objects:
        raise UsageError(
            f"{state.id} must have a model and its configuration to be exported for from_pretrained, "
            f"and it has {', '.join(state.objects) or 'no object'}",
            hint="snapshots of ciuic.integrations.transformers have both, since this version; "
            "--to safetensors --only model writes the weights alone",
        )
    return {str(name): _content(value) for name, value in files.items() if is_configuration_name(str(name))}


def _content(value: Any) -> bytes:
    # A tensor of torch, or an array of NumPy where there is no torch.
    return bytes(value.numpy() if hasattr(value, "numpy") else value)
