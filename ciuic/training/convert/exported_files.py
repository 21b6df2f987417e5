"""Exported files: safetensors and NumPy's npz, files of `torch.save`, and the folder that `from_pretrained` opens.

In files of tensors by name, a name is the path of the tensor in the state, joined by dots: ``model.layer.weight``, or
``layer.weight`` where one object alone is exported. Everything that is no tensor is left out.

Files of torch are those that `torch.load(weights_only=True)` opens, with a record for ciuic where one is wanted.

The folder of transformers has the weights and the configuration files, which the integration of the Trainer saves with
each snapshot (`CONFIGURATION` in its object `progress`).
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from ciuic.errors import UsageError
from ciuic.training.convert.destination import new_directory, new_file
from ciuic.training.convert.export_state import RANDOM, ExportState, as_plain
from ciuic.training.format import tensors
from ciuic.training.format.layout import encode_header
from ciuic.training.format.shards import by_bare_name
from ciuic.training.format.structure import Leaf


def tensors_of(state: ExportState) -> dict[str, Any]:
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


def write_safetensors(
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


def write_npz(path: Path, found: Mapping[str, Any], *, overwrite: bool) -> int:
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
    import zipfile

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
                f"{name} has numbers of {value.dtype}, which NumPy has not", hint="pip install torch"
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


def facts_of(state: ExportState) -> dict[str, str]:
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


def write_hugging_face(path: Path, state: ExportState, *, overwrite: bool) -> int:
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
    found = tensors_of(state.only(["model"]))
    # Names as the model has them without torch.compile and DistributedDataParallel.
    found = {
        name: found[key]
        for name, key in (by_bare_name(found) or dict(zip(found, found, strict=True))).items()
    }
    with new_directory(path, overwrite=overwrite, names=_PATTERNS) as folder:
        size_bytes = write_safetensors(folder / WEIGHTS, found, {}, overwrite=False)
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
