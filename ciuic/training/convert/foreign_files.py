"""Files of torch and safetensors and folders of Hugging Face that another program wrote, read without executing anything.

Somebody else may still change them. Guarantees: what is opened is a regular file of the directory itself. No link in it is followed, so that content from elsewhere (a file that
only root may read) does not get into a snapshot; those that lead to it are followed by the rule of a restore's destination
(`ciuic.restore.destination`), also while they are exchanged. A pipe is not waited for and a device not opened. What was changed or
exchanged while it was read is refused. Refusals name the file.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import torch

from ciuic.errors import CiuicError, UsageError
from ciuic.restore.destination import open_way
from ciuic.system.disk import PIN, READ_FILE
from ciuic.training.convert.exporting import CONFIGURATION, WEIGHTS, is_configuration_name
from ciuic.training.format import tensors
from ciuic.training.format.layout import read_header
from ciuic.training.json_documents import MAX_DOCUMENT_BYTES, decode_json

_LINK: Final = (
    "a symbolic link, which is not followed; copy the directory with `cp -rL` if you trust its links"
)
_CHANGED: Final = "{} was changed while it was read: import it when its writer is done, or a copy of it"
_MAX_LINKS: Final = 40
_KINDS: Final[tuple[tuple[Callable[[int], bool], str], ...]] = (
    (stat.S_ISLNK, _LINK),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


class ForeignDirectory:
    """An open directory; names are those of its own files.

    Raises:
        CiuicError: Another user's link leads to a directory of somebody else.
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = open_way(os.fsencode(path.absolute()))
        self._opened: dict[str, _Version] = {}

    def __enter__(self) -> ForeignDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def names(self) -> list[str]:
        """Return all names in the directory, sorted."""
        return sorted(os.listdir(self._fd))

    def has(self, name: str) -> bool:
        """Return whether there is anything of this name."""
        try:
            os.lstat(name, dir_fd=self._fd)
        except FileNotFoundError:
            return False
        return True

    def is_directory(self, name: str) -> bool:
        """Return whether this is a directory itself."""
        return stat.S_ISDIR(os.lstat(name, dir_fd=self._fd).st_mode)

    def size_bytes(self) -> int:
        """Return the size of all regular files in it, without those in its directories."""
        found = (os.lstat(name, dir_fd=self._fd) for name in self.names())
        return sum(status.st_size for status in found if stat.S_ISREG(status.st_mode))

    def open(self, name: str, max_bytes: int | None = None) -> IO[bytes]:
        """Open a file.

        Args:
            name: Its name, which a document of the directory may have given.
            max_bytes: Largest size that is accepted.

        Raises:
            ValueError: It lies elsewhere, is no regular file, or is larger.
            OSError: It cannot be opened.
        """
        # A path could lead to any file.
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            raise ValueError(f"{self.path} names a file outside of its directory: {name!r}")
        try:
            os.fsencode(name)
        except UnicodeEncodeError:
            raise ValueError(f"{self.path} names a file by what is no text: {name!r}") from None
        file = _open(self.path / name, name, self._fd, max_bytes)
        found = _version(os.fstat(file.fileno()))
        if self._opened.setdefault(name, found) != found:
            file.close()
            raise ValueError(_CHANGED.format(self.path / name))
        return file

    def require_unchanged(self) -> None:
        """Check that the files that were opened are there as they were; files of two checkpoints are none.

        Raises:
            ValueError: One was changed or exchanged meanwhile.
        """
        for name, before in self._opened.items():
            try:
                found = _version(os.lstat(name, dir_fd=self._fd))
            except FileNotFoundError:
                found = None
            if found != before:
                raise ValueError(_CHANGED.format(self.path / name))


@contextmanager
def open_foreign(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that the user named, to be read as a whole; links that lead to it are followed as those to a directory are.

    Raises:
        ValueError: It is no regular file, or was changed while it was read.
        CiuicError: Another user's link leads to a file of somebody else.
        OSError: It cannot be opened.
    """
    with _named(path) as file:
        before = _version(os.fstat(file.fileno()))
        yield file
        if _version(os.fstat(file.fileno())) != before:
            raise ValueError(_CHANGED.format(path))


def _named(path: Path) -> IO[bytes]:
    """Open the file at a path, following links at its end."""
    at = str(path.absolute())
    owners: set[int] = set()
    for _ in range(_MAX_LINKS):
        above, name = os.path.split(at)
        folder = open_way(os.fsencode(above))
        try:
            # Owner and target are read from one descriptor: the name may be exchanged.
            link = os.open(name or ".", PIN, dir_fd=folder)
            try:
                status = os.fstat(link)
                if not stat.S_ISLNK(status.st_mode):
                    file = _open(path, name or ".", folder, None)
                    break
                owners.add(status.st_uid)
                at = os.path.join(above, os.fsdecode(os.readlink(b"", dir_fd=link)))
            finally:
                os.close(link)
        finally:
            os.close(folder)
    else:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    owner = os.fstat(file.fileno()).st_uid
    foreign = owners - {0, os.geteuid(), owner}
    if foreign:
        file.close()
        raise CiuicError(
            f"{path} leads through a symbolic link of user {min(foreign)} to a file of user {owner}",
            hint="name the file itself, not a link to it",
        )
    return file


class _Version(NamedTuple):
    """Identity of a file's content at one moment, as far as its writers set the time as the kernel does."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int


def _version(status: os.stat_result) -> _Version:
    return _Version(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _open(path: Path, name: str, dir_fd: int | None, max_bytes: int | None) -> IO[bytes]:
    # Before it is opened, because that alone may have effects on a device.
    _check(path, os.lstat(name, dir_fd=dir_fd), max_bytes)
    # And after, because another may have taken its place: O_NONBLOCK, so that a pipe is not waited for.
    fd = os.open(name, READ_FILE, dir_fd=dir_fd)
    try:
        _check(path, os.fstat(fd), max_bytes)
    except ValueError:
        os.close(fd)
        raise
    return os.fdopen(fd, "rb")


def _check(path: Path, status: os.stat_result, max_bytes: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((text for is_kind, text in _KINDS if is_kind(status.st_mode)), "a device")
        raise ValueError(f"{path} must be a regular file, and is {kind}")
    if max_bytes is not None and status.st_size > max_bytes:
        raise ValueError(f"{path} must have at most {max_bytes} bytes, and has {status.st_size}")


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
