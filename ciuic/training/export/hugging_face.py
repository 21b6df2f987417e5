"""Folder that `from_pretrained` of transformers opens: weights, and the configuration files of the snapshot.

The integration of the Trainer saves these files with each snapshot (`CONFIGURATION` in its object `progress`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ciuic.errors import UsageError
from ciuic.training.export.destination import new_directory
from ciuic.training.export.state_source import ExportState
from ciuic.training.export.tensor_files import tensors_of, write_safetensors
from ciuic.training.format.shards import by_bare_name

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
