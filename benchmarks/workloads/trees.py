"""Trees of many small files: find and du of an existing tree, cold and warm; untar and removal of another; pip install.

Cold means a new mount with no page, dentry or inode cached. Nothing on a tmpfs is ever cold: its data is in
memory.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tarfile
import zipfile

from benchmarks.suite import Job, Suite
from benchmarks.timing import command, preparation, rate

_TREE_FILES = 100_000
_TAR_FILES = 50_000
_WHEEL_FILES = 5_000
_WHEEL = "many-1-py3-none-any.whl"
_FILES_PER_DIRECTORY = 100
_CONTENT = b"x" * 2048


def _paths(count: int) -> list[str]:
    return [f"{number // _FILES_PER_DIRECTORY}/{number % _FILES_PER_DIRECTORY}" for number in range(count)]


def _make_archive(job: Job) -> None:
    with tarfile.open(f"{job.source}/files.tar", "w") as archive:
        for path in _paths(job.count(_TAR_FILES, 100)):
            member = tarfile.TarInfo(path)
            member.size, member.mtime = len(_CONTENT), 1_700_000_000
            archive.addfile(member, io.BytesIO(_CONTENT))


def _make_wheel(job: Job) -> None:
    """Write a wheel of small modules (https://packaging.python.org/specifications/binary-distribution-format/)."""
    files = {f"many/{path}.py": _CONTENT for path in _paths(job.count(_WHEEL_FILES, 50))}
    information = "many-1.dist-info"
    files[f"{information}/METADATA"] = b"Metadata-Version: 2.1\nName: many\nVersion: 1\n"
    files[f"{information}/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = f"{information}/RECORD"
    files[record] = "".join(f"{name},,\n" for name in [*files, record]).encode()
    with zipfile.ZipFile(f"{job.source}/{_WHEEL}", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)


def _furnish_source(job: Job) -> None:
    _make_archive(job)
    _make_wheel(job)


def make_tree(top: str, count: int, content: bytes = b"content\n") -> None:
    """Make ``count`` files with ``content``, a hundred per directory."""
    for path in _paths(count):
        file = f"{top}/{path}"
        try:
            fd = os.open(file, os.O_WRONLY | os.O_CREAT, 0o644)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(file))
            fd = os.open(file, os.O_WRONLY | os.O_CREAT, 0o644)
        os.write(fd, content)
        os.close(fd)


def _furnish(job: Job) -> None:
    make_tree(job.path("tree"), job.count(_TREE_FILES, 100))


def _find(job: Job) -> float:
    command(["find", job.path("tree"), "-type", "f", "-name", "*9"])
    return job.count(_TREE_FILES, 100)


def _du(job: Job) -> float:
    command(["du", "-s", job.path("tree")])
    return job.count(_TREE_FILES, 100)


def _untar(job: Job) -> float:
    os.mkdir(job.path("untarred"))
    command(["tar", "-xf", f"{job.source}/files.tar", "-C", job.path("untarred")])
    return job.count(_TAR_FILES, 100)


def _remove(job: Job) -> float:
    shutil.rmtree(job.path("untarred"))
    return job.count(_TAR_FILES, 100)


def _install(job: Job) -> float:
    command(
        [
            *(sys.executable, "-m", "pip", "install", "-qq", "--no-index", "--no-deps", "--no-compile"),
            # Not --target, which installs into a temporary directory first.
            *("--ignore-installed", "--prefix", job.path("installed"), f"{job.source}/{_WHEEL}"),
        ],
        PIP_DISABLE_PIP_VERSION_CHECK="1",
        PIP_CONFIG_FILE=os.devnull,
    )
    return job.count(_WHEEL_FILES, 50)


def _remove_installed(job: Job) -> None:
    shutil.rmtree(job.path("installed"))


SUITE = Suite(
    "trees",
    (
        rate("find, cold", "files/s", _find, before="remounted"),
        rate("find, warm", "files/s", _find, before="warm", repeat_seconds=0.3),
        rate("du, cold", "files/s", _du, before="remounted"),
        rate("du, warm", "files/s", _du, before="warm", repeat_seconds=0.3),
        rate("untar", "files/s", _untar, limit_seconds=600),
        rate("removal of what was untarred", "files/s", _remove, limit_seconds=600),
        rate("pip install of a wheel", "files/s", _install),
        preparation(_remove_installed),
    ),
    furnish_source=_furnish_source,
    furnish=_furnish,
)
