"""Tests of the choice of driver by what the kernel offers, which is asked without mounting."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

from ciuic.cli.doctor_checks import driver
from ciuic.fuse_layer import driver_choice
from ciuic.fuse_layer.driver_choice import KernelOffer, ask_kernel, choose
from ciuic.system import mountinfo, privileges

ALL = KernelOffer("7.45", True, True, 1, "")
RESENDS = KernelOffer("7.45", False, True, 1, "it needs CAP_SYS_ADMIN")
NOTHING = KernelOffer("7.38", False, False, 1, "Linux 6.1 does not offer it (6.9 does)")


@pytest.mark.parametrize(
    ("wanted", "offer", "chosen"),
    [
        ("auto", ALL, "kernel"),
        ("auto", RESENDS, "kernel"),
        ("auto", NOTHING, "pyfuse3"),
        ("kernel", NOTHING, "kernel"),
        ("pyfuse3", ALL, "pyfuse3"),
    ],
)
def test_auto_takes_the_kernel_session_where_it_gives_something(
    wanted: str, offer: KernelOffer, chosen: str
) -> None:
    """A configured driver is used, auto follows the kernel's offer, and each choice has its reason."""
    choice = choose(wanted, offer, lambda: "")
    assert choice.driver == chosen
    assert offer.reason in choice.why
    assert choice.why
    assert ("are lost if the worker is killed" in choice.why) == (chosen == "pyfuse3" or not offer.resends)


@pytest.mark.parametrize(("wanted", "offer"), [("auto", NOTHING), ("pyfuse3", ALL), ("pyfuse3", NOTHING)])
def test_without_pyfuse3_the_kernel_session_serves_and_gives_the_reason(
    monkeypatch: pytest.MonkeyPatch, wanted: str, offer: KernelOffer
) -> None:
    """The kernel session serves without pyfuse3, and the reason names the library and its extra."""
    # Make the import fail as if pyfuse3 were not installed.
    monkeypatch.setitem(sys.modules, "pyfuse3", None)
    choice = choose(wanted, offer)
    assert choice.driver == "kernel"
    assert "pyfuse3 is not installed" in choice.why
    assert "ciuic[pyfuse3]" in choice.why
    assert offer.reason in choice.why


def test_a_pyfuse3_that_cannot_be_loaded_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A pyfuse3 whose libfuse cannot be loaded counts as missing, with the loader's message as reason."""
    (tmp_path / "pyfuse3.py").write_text(
        "raise ImportError('libfuse3.so.3: cannot open shared object file')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pyfuse3", raising=False)
    assert "libfuse3.so.3" in choose("pyfuse3", ALL).why


def test_pyfuse3_is_not_imported_for_the_kernel_session() -> None:
    """A worker of the kernel session imports neither libfuse nor an event loop."""

    def fail() -> str:
        raise AssertionError("it was imported")

    assert [choose(wanted, offer, fail).driver for wanted, offer in (("auto", ALL), ("kernel", NOTHING))] == [
        "kernel",
        "kernel",
    ]


@pytest.mark.parametrize(
    ("release", "resends"), [("5.4.0", False), ("6.8.0-45-generic", False), ("6.9.1", True)]
)
def test_a_kernel_that_cannot_be_asked_is_judged_by_its_version(
    monkeypatch: pytest.MonkeyPatch, release: str, resends: bool
) -> None:
    """Auto follows the kernel's version with filtered system calls or without /dev/fuse."""

    def refuse(*arguments: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(driver_choice, "_syscall", refuse)
    offer = ask_kernel(None, release=release)
    assert offer.protocol == ""
    assert offer.resends is resends
    assert bool(offer.reason) is not offer.passthrough


def test_passthrough_without_the_capability_is_not_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for no passthrough is a missing CAP_SYS_ADMIN where the kernel cannot be asked."""
    monkeypatch.setattr(privileges, "permitted", frozenset)
    offer = driver_choice._by_version("6.18.0", "no")
    assert not offer.passthrough
    assert "CAP_SYS_ADMIN" in offer.reason


def _fuse_descriptors() -> list[str]:
    """Return what this process has open of FUSE and of mounts; others of its threads come and go."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    # A mount that is attached nowhere is "/".
    return sorted(
        name for name in found if "fuse" in name or name == "/" or name.startswith("anon_inode:[fs")
    )


@pytest.mark.mount
def test_the_probe_leaves_no_mount_descriptor_or_file(tmp_path: Path) -> None:
    """Asking the kernel mounts nothing, leaves no descriptor or file, and gives the same answer again."""
    directory = os.open(tmp_path, os.O_PATH)
    try:
        before = _fuse_descriptors()
        offers = {ask_kernel(directory) for _ in range(20)}
        assert _fuse_descriptors() == before
        # Other tests mount elsewhere meanwhile.
        here = os.fsencode(tmp_path)
        assert not any(one.mount_point.startswith(here) for one in mountinfo.read())
    finally:
        os.close(directory)
    (offer,) = offers
    assert offer.protocol.startswith("7.")
    assert offer.passthrough is not bool(offer.reason)
    assert os.listdir(tmp_path) == []


def test_doctor_names_the_driver_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doctor names the driver of each root, in use or expected, and warns of obstacles to passthrough."""
    monkeypatch.setattr(driver_choice, "ask_kernel", lambda directory, *, release: RESENDS)
    wanted = [("/a", "auto"), ("/b", "auto"), ("/c", "pyfuse3")]
    found = list(driver(wanted, "6.18.0", {"/a": ("kernel, passthrough", "told by the daemon")}))
    assert [finding.level for finding in found] == ["ok", "warning", "ok"]
    assert "told by the daemon" in found[0].message
    assert "CAP_SYS_ADMIN" in found[1].message
    monkeypatch.setattr(driver_choice, "ask_kernel", lambda directory, *, release: NOTHING)
    assert [finding.level for finding in driver([("/a", "auto"), ("/b", "kernel")], "6.1.0")] == [
        "ok",
        "warning",
    ]
    assert [finding.level for finding in driver([], "6.1.0")] == ["ok"]


def test_doctor_names_the_extra_where_pyfuse3_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing pyfuse3 is a warning where it is configured, and a fact where auto would have used it."""
    monkeypatch.setitem(sys.modules, "pyfuse3", None)
    monkeypatch.setattr(driver_choice, "ask_kernel", lambda directory, *, release: NOTHING)
    explicit, automatic = driver([("/a", "pyfuse3"), ("/b", "auto")], "6.1.0")
    assert (explicit.level, automatic.level) == ("warning", "ok")
    assert "ciuic[pyfuse3]" in explicit.remedy
    assert "ciuic[pyfuse3]" in automatic.message
