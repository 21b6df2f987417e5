"""Files of torch and safetensors and folders of Hugging Face that another program wrote, read without executing anything."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator, Mapping
from typing import IO, Any, Final

import torch

from ciuic.errors import UsageError
from ciuic.training.convert.exporting import CONFIGURATION, WEIGHTS, is_configuration_name
from ciuic.training.convert.foreign_directory import ForeignDirectory
from ciuic.training.format import tensors
from ciuic.training.format.layout import read_header
from ciuic.training.json_documents import MAX_DOCUMENT_BYTES, decode_json

_LEAST_TORCH: Final = (2, 6)
"""First version that is safe: before 2.6, torch.load executed code even with ``weights_only=True`` (CVE-2025-32434)."""
_TORCH_WEIGHTS: Final = "pytorch_model.bin"
_PROGRESS: Final = "trainer_state.json"
# Files of a Trainer's checkpoint by the name of the object in a snapshot of the integration.
_OBJECT_FILES: Final = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"}
_MAX_CONFIGURATION_BYTES: Final = 64 << 20
_ZIP_HEAD: Final = b"PK\3\4"
"""Signature by which torch recognises an archive."""
_MAX_INFLATION: Final = 4
"""Limit of the size of what an archive holds, in sizes of the archive. torch.save compresses nothing."""
_FEW_VALUES: Final = 1_000_000
"""Number of values that needs no relation to the size of its file."""
_MAX_DEPTH: Final = 200
_MAX_SMALL_BYTES: Final = 16 << 20
"""Size of content that needs no relation to the size of its file."""


def load_plain(file: IO[bytes], what: str) -> Any:
    """Return what `torch.save` wrote to an open file, on the CPU.

    Raises:
        UsageError: It is not of torch, or has what only pickle could load, or this torch would execute it.
        ValueError: It is an archive of far more than its own size.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < _LEAST_TORCH:
        raise UsageError(
            f"{what} is not read by torch {torch.__version__}, which executes code of a file that asks for it",
            hint="install torch 2.6 or later",
        )
    check_archive(file, what)
    try:
        # Banned because it is a pickle by default; with weights_only torch interprets it by a table of its own.
        return torch.load(file, map_location="cpu", weights_only=True)  # noqa: TID251
    # UnpicklingError, and whatever else torch raises for bytes that are not its own.
    except Exception as error:
        raise UsageError(
            f"{what} cannot be loaded with weights_only=True: {reason(error)}",
            hint="ciuic executes nothing that it reads: let the program that trusts the file "
            "save its tensors and plain values again",
        ) from None


def check_archive(file: Any, what: str) -> None:
    """Check that the members of an archive, if the file is one, are about as large as the file.

    Raises:
        ValueError: They are larger by far, or the archive is damaged.
    """
    size_bytes = file.seek(0, io.SEEK_END)
    file.seek(0)
    is_archive = file.read(len(_ZIP_HEAD)) == _ZIP_HEAD
    if is_archive:
        try:
            with zipfile.ZipFile(file) as archive:
                inside_bytes = sum(member.file_size for member in archive.infolist())
        except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
            raise ValueError(f"{what} is a damaged archive: {error}") from None
        if inside_bytes > _MAX_SMALL_BYTES + _MAX_INFLATION * size_bytes:
            raise ValueError(
                f"{what} is an archive of {size_bytes} bytes that claims to hold {inside_bytes}, "
                f"more than {_MAX_INFLATION} times as much"
            )
    file.seek(0)


def check_extent(state: Any, size_bytes: int) -> None:
    """Check that a state that was read is no deeper and no larger than its files can mean.

    A container of a kilobyte may hold another one twice, which holds a third one twice, and so on.

    Raises:
        ValueError: It is.
    """
    # A byte of a file makes at most one value.
    left_values = _FEW_VALUES + size_bytes
    left_bytes = _MAX_SMALL_BYTES + 2 * _MAX_INFLATION * size_bytes
    waiting: list[Iterator[Any]] = [iter((state,))]
    while waiting:
        for value in waiting[-1]:
            left_values -= 1
            if isinstance(value, torch.Tensor):
                # A view may repeat its memory as often as its shape says.
                left_bytes -= value.numel() * value.element_size()
            elif isinstance(value, (str, bytes)):
                left_bytes -= len(value)
            if left_values < 0 or left_bytes < 0:
                raise ValueError(f"the state is far larger than its {size_bytes} bytes in files")
            if isinstance(value, Mapping):
                waiting.append(_inside(value))
                break
            if isinstance(value, (list, tuple, set, frozenset)):
                waiting.append(iter(value))
                break
        else:
            waiting.pop()
        if len(waiting) > _MAX_DEPTH:
            raise ValueError(f"the state is nested deeper than {_MAX_DEPTH} levels")


def _inside(value: Mapping[Any, Any]) -> Iterator[Any]:
    for key, inner in value.items():
        yield key
        yield inner


def reason(error: BaseException) -> str:
    """Return what torch says is wrong, without its advice to load the file all the same."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # The reason follows the advice, which is one line or three.
    found = [line for line in lines if line.startswith(("WeightsUnpickler error:", "Trying to load"))]
    other = [line for line in lines if "weights_only" not in line]
    return (
        (found or other or [type(error).__name__])[0]
        .removeprefix("WeightsUnpickler error: ")
        .split(". In PyTorch")[0]
    )


def read_safetensors(file: IO[bytes], what: str) -> dict[str, Any]:
    """Return the tensors of an open safetensors file by name.

    Raises:
        ValueError: The file is malformed.
        OSError: It cannot be read.
    """
    size_bytes = os.fstat(file.fileno()).st_size

    def start(count: int) -> bytes:
        file.seek(0)
        return file.read(count)

    header = read_header(start, size_bytes, 8, what)
    found = {}
    for name, where in header.items():
        owner, memory = tensors.empty_buffer(where.stop - where.start)
        file.seek(where.start)
        if file.readinto(memory) != len(memory):  # type: ignore[attr-defined]
            raise ValueError(f"{what} is shorter than it was")
        array = tensors.Array("torch", where.dtype, where.shape, len(memory))
        found[name] = tensors.from_buffer(owner, 0, array)
    return found


def read_hugging_face(folder: ForeignDirectory) -> tuple[dict[str, Any], int | None, int | None]:
    """Read a folder of `save_pretrained`, or a checkpoint of the Trainer.

    Returns:
        The objects as the integration of the Trainer saves them; the step and the epoch, if the folder has
        them.

    Raises:
        UsageError: There are no weights, or a file has what only pickle could load.
        ValueError: A file is malformed.
        OSError: A file cannot be read.
    """
    objects: dict[str, Any] = {"model": _weights(folder)}
    for name, file in _OBJECT_FILES.items():
        if folder.has(file):
            with folder.open(file) as opened:
                objects[name] = load_plain(opened, str(folder.path / file))
    progress = _document(folder, _PROGRESS) if folder.has(_PROGRESS) else {}
    objects["progress"] = {"state": progress, CONFIGURATION: _configuration(folder)}
    # What the integration keeps of a loss that was not logged: nothing.
    objects["unlogged"] = {}
    step, epoch = progress.get("global_step"), progress.get("epoch")
    return (
        objects,
        step if type(step) is int else None,
        int(epoch) if isinstance(epoch, (int, float)) and 0 <= epoch < 1 << 62 else None,
    )


def _weights(folder: ForeignDirectory) -> dict[str, Any]:
    for name, read in ((WEIGHTS, read_safetensors), (_TORCH_WEIGHTS, load_plain)):
        if folder.has(name):
            with folder.open(name) as weights:
                return dict(read(weights, str(folder.path / name)))
        index = f"{name}.index.json"
        if not folder.has(index):
            continue
        files = _document(folder, index).get("weight_map")
        if not isinstance(files, dict):
            raise ValueError(f"{folder.path / index} has no weight_map")
        found: dict[str, Any] = {}
        for file in sorted(set(map(str, files.values()))):
            with folder.open(file) as weights:
                found |= read(weights, str(folder.path / file))
        return found
    raise UsageError(f"{folder.path} has neither {WEIGHTS} nor {_TORCH_WEIGHTS}, nor an index of one")


def _configuration(folder: ForeignDirectory) -> dict[str, Any]:
    found = {}
    total = 0
    for name in folder.names():
        if not is_configuration_name(name) or name == _PROGRESS or folder.is_directory(name):
            continue
        with folder.open(name, _MAX_CONFIGURATION_BYTES - total) as file:
            content = file.read(_MAX_CONFIGURATION_BYTES - total)
        total += len(content)
        if content:
            found[name] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return found


def _document(folder: ForeignDirectory, name: str) -> Mapping[str, Any]:
    with folder.open(name, MAX_DOCUMENT_BYTES) as file:
        found = decode_json(file.read(MAX_DOCUMENT_BYTES), str(folder.path / name))
    if not isinstance(found, dict):
        raise ValueError(f"{folder.path / name} must be a JSON object")
    return found
