"""Export of a snapshot's state: the formats, what each needs, and the one function that writes them all."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from ciuic.errors import UsageError
from ciuic.repository import Repository
from ciuic.training.convert.export_state import ExportState, missing_package, read_snapshot

FORMATS: Final = ("torch", "safetensors", "hf", "dcp", "npz")
# Imported before the state is read, so that its tensors are torch's.
_NEEDED: Final = {"torch": ("torch",), "dcp": ("torch",), "hf": (), "safetensors": (), "npz": ("numpy",)}
_MAX_RANKS: Final = 100_000


class Exported(NamedTuple):
    """Result of an export."""

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
    state = read_snapshot(str(save_dir) if isinstance(save_dir, Path) else save_dir, root, snapshot)
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
    from ciuic.training.convert import exported_files

    if to == "torch":
        size_bytes = exported_files.write_torch(path, state.whole(), overwrite=overwrite)
        return size_bytes, {*state.objects, *state.values}
    if to == "hf":
        return exported_files.write_hugging_face(path, state, overwrite=overwrite), {"model"}
    found = exported_files.tensors_of(state)
    names = {
        name for name in state.objects if state.is_bare or any(one.startswith(f"{name}.") for one in found)
    }
    if to == "npz":
        return exported_files.write_npz(path, found, overwrite=overwrite), names
    facts = exported_files.facts_of(state)
    return exported_files.write_safetensors(path, found, facts, overwrite=overwrite), names


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
