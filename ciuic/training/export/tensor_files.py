"""Files of tensors by name: safetensors and NumPy's npz.

A name is the path of the tensor in the state, joined by dots: ``model.layer.weight``, or ``layer.weight``
where one object alone is exported. Everything that is no tensor is left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ciuic.errors import UsageError
from ciuic.training.export.destination import new_file
from ciuic.training.export.state_source import RANDOM, ExportState
from ciuic.training.format import tensors
from ciuic.training.format.layout import encode_header
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
