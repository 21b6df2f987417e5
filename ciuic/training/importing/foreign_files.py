"""Reading of files of torch and safetensors, and of folders of Hugging Face, without executing anything."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

import torch

from ciuic.errors import UsageError
from ciuic.training.export.hugging_face import CONFIGURATION, WEIGHTS, is_configuration_name
from ciuic.training.format import tensors
from ciuic.training.format.layout import decode_header
from ciuic.training.util.documents import MAX_DOCUMENT_BYTES, decode_json

_TORCH_WEIGHTS: Final = "pytorch_model.bin"
_PROGRESS: Final = "trainer_state.json"
# Files of a Trainer's checkpoint by the name of the object in a snapshot of the integration.
_OBJECT_FILES: Final = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"}
_MAX_CONFIGURATION_BYTES: Final = 64 << 20


def read_torch(path: Path) -> Any:
    """Return what `torch.save` wrote, on the CPU.

    Raises:
        UsageError: The file is none of torch, or has what only pickle could load.
        OSError: It cannot be read.
    """
    with _open_regular(path) as file:
        return load_plain(file, str(path))


def load_plain(file: IO[bytes], what: str) -> Any:
    """Return what `torch.save` wrote to an open file, on the CPU.

    Raises:
        UsageError: It is not of torch, or has what only pickle could load.
    """
    try:
        # Banned because it is a pickle by default; with weights_only torch interprets it by a table of its own.
        return torch.load(file, map_location="cpu", weights_only=True)  # noqa: TID251
    # UnpicklingError, and whatever else torch raises for bytes that are not its own.
    except Exception as error:
        raise UsageError(
            f"{what} cannot be loaded with weights_only=True: {_reason(error)}",
            hint="ciuic executes nothing that it reads: let the program that trusts the file "
            "save its tensors and plain values again",
        ) from None


def _reason(error: Exception) -> str:
    """Return what torch says is wrong, without its advice to load the file all the same."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # The reason follows the advice, which is one line or three.
    found = [line for line in lines if line.startswith(("WeightsUnpickler error:", "Trying to load"))]
    return (found or lines or [type(error).__name__])[0].removeprefix("WeightsUnpickler error: ")


def read_safetensors(path: Path) -> dict[str, Any]:
    """Return the tensors of a safetensors file by name.

    Raises:
        ValueError: The file is malformed.
        OSError: It cannot be read.
    """
    with _open_regular(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        header = decode_header(file.read(8), size_bytes)
        if isinstance(header, int):
            file.seek(0)
            header = decode_header(file.read(header), size_bytes)
        if isinstance(header, int):
            raise ValueError(f"the header of {path} has no end")
        found = {}
        for name, where in header.items():
            owner, memory = tensors.empty_buffer(where.stop - where.start)
            file.seek(where.start)
            if file.readinto(memory) != len(memory):  # type: ignore[attr-defined]
                raise ValueError(f"{path} is shorter than it was")
            array = tensors.Array("torch", where.dtype, where.shape, len(memory))
            found[name] = tensors.from_buffer(owner, 0, array)
    return found


def read_hugging_face(path: Path) -> tuple[dict[str, Any], int | None, int | None]:
    """Read a folder of `save_pretrained`, or a checkpoint of the Trainer.

    Returns:
        The objects as the integration of the Trainer saves them; the step and the epoch, if the folder has
        them.

    Raises:
        UsageError: There are no weights, or a file has what only pickle could load.
        ValueError: A file is malformed.
        OSError: A file cannot be read.
    """
    objects: dict[str, Any] = {"model": _weights(path)}
    for name, file in _OBJECT_FILES.items():
        if (path / file).exists():
            objects[name] = read_torch(path / file)
    progress = _document(path / _PROGRESS) if (path / _PROGRESS).exists() else {}
    objects["progress"] = {"state": progress, CONFIGURATION: _configuration(path)}
    # What the integration keeps of a loss that was not logged: nothing.
    objects["unlogged"] = {}
    step, epoch = progress.get("global_step"), progress.get("epoch")
    return (
        objects,
        step if type(step) is int else None,
        int(epoch) if isinstance(epoch, (int, float)) and 0 <= epoch < 1 << 62 else None,
    )


def _weights(path: Path) -> dict[str, Any]:
    for name, read in ((WEIGHTS, read_safetensors), (_TORCH_WEIGHTS, read_torch)):
        if (path / name).exists():
            return dict(read(path / name))
        index = path / f"{name}.index.json"
        if not index.exists():
            continue
        files = _document(index).get("weight_map")
        if not isinstance(files, dict):
            raise ValueError(f"{index} has no weight_map")
        found: dict[str, Any] = {}
        for file in sorted(set(map(str, files.values()))):
            # A name within the folder: a path could lead to any file.
            if "/" in file or file in ("", ".", ".."):
                raise ValueError(f"{index} names a file outside of its folder: {file!r}")
            found |= read(path / file)
        return found
    raise UsageError(f"{path} has neither {WEIGHTS} nor {_TORCH_WEIGHTS}, nor an index of one")


def _configuration(path: Path) -> dict[str, Any]:
    found = {}
    total = 0
    for name in sorted(os.listdir(path)):
        if not is_configuration_name(name) or name == _PROGRESS or not (path / name).is_file():
            continue
        with _open_regular(path / name) as file:
            content = file.read(_MAX_CONFIGURATION_BYTES + 1)
        total += len(content)
        if total > _MAX_CONFIGURATION_BYTES:
            raise ValueError(
                f"the configuration in {path} must have at most {_MAX_CONFIGURATION_BYTES} bytes"
            )
        if content:
            found[name] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return found


def _document(path: Path) -> Mapping[str, Any]:
    with _open_regular(path) as file:
        data = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"{path} must have at most {MAX_DOCUMENT_BYTES} bytes")
    found = decode_json(data, str(path))
    if not isinstance(found, dict):
        raise ValueError(f"{path} must be a JSON object")
    return found


def _open_regular(path: Path) -> IO[bytes]:
    # Links are followed, of which the hub's cache is full; O_NONBLOCK, so that a pipe is not waited for.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UsageError(f"{path} must be a regular file")
    return os.fdopen(fd, "rb")
