"""Which driver serves: by what the kernel offers, which is asked without mounting anything."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ciuic import mountinfo, privileges
from ciuic.cli.doctor_machine import driver
from ciuic.fuse_layer import driver_choice
from ciuic.fuse_layer.driver_choice import Offer, ask_kernel, choose

ALL = Offer("7.45", True, True, 1, "")
RESENDS = Offer("7.45", False, True, 1, "it needs CAP_SYS_ADMIN")
NOTHING = Offer("7.38", False, False, 1, "Linux 6.1 does not offer it (6.9 does)")


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
    wanted: str, offer: Offer, chosen: str
) -> None:
    """What is configured is obeyed; auto goes by the offer; each choice has its reason in words."""
    choice = choose(wanted, offer, lambda: "")
    assert choice.driver == chosen
    assert offer.reason in choice.why
    assert choice.why


@pytest.mark.parametrize(("wanted", "offer"), [("auto", NOTHING), ("pyfuse3", ALL), ("pyfuse3", NOTHING)])
def test_without_pyfuse3_the_kernel_session_serves_and_says_why(
    monkeypatch: pytest.MonkeyPatch, wanted: str, offer: Offer
) -> None:
    """A root is served in any case; the reason names the library and the extra that brings it."""
    monkeypatch.setitem(sys.modules, "pyfuse3", None)  # as if it were not installed
    choice = choose(wanted, offer)
    assert choice.driver == "kernel"
    assert "pyfuse3 is not installed" in choice.why
    assert "ciuic[pyfuse3]" in choice.why
    assert offer.reason in choice.why


def test_a_pyfuse3_that_cannot_be_loaded_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Installed, and its libfuse gone: the loader's own words are in the reason."""
    (tmp_path / "pyfuse3.py").write_text(
        "raise ImportError('libfuse3.so.3: cannot open shared object file')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pyfuse3", raising=False)
    assert "libfuse3.so.3" in choose("pyfuse3", ALL).why


def test_pyfuse3_is_not_asked_for_where_the_kernel_session_is_chosen() -> None:
    """A worker that is waited for imports neither libfuse nor an event loop."""

    def never() -> str:
        raise AssertionError("it was imported")

    assert [
        choose(wanted, offer, never).driver for wanted, offer in (("auto", ALL), ("kernel", NOTHING))
    ] == [
        "kernel",
        "kernel",
    ]


@pytest.mark.parametrize(
    ("release", "resends"), [("5.4.0", False), ("6.8.0-45-generic", False), ("6.9.1", True)]
)
def test_a_kernel_that_cannot_be_asked_is_judged_by_its_version(
    monkeypatch: pytest.MonkeyPatch, release: str, resends: bool
) -> None:
    """Filtered system calls, no /dev/fuse: no error, and auto goes by the version."""

    def refuse(*arguments: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(driver_choice, "_syscall", refuse)
    offer = ask_kernel(None, release=release)
    assert offer.protocol == ""
    assert offer.resends is resends
    assert bool(offer.reason) is not offer.passthrough


def test_passthrough_without_the_capability_is_not_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel cannot be asked and CAP_SYS_ADMIN is missing, that is the reason given."""
    monkeypatch.setattr(privileges, "permitted", frozenset)
    offer = driver_choice._by_version("6.18.0", "no")
    assert not offer.passthrough
    assert "CAP_SYS_ADMIN" in offer.reason


@pytest.mark.mount
def test_asking_leaves_nothing_behind(tmp_path: Path) -> None:
    """Nothing is mounted, no descriptor is left open, no file is made; the answer is the same every time."""
    directory = os.open(tmp_path, os.O_PATH)
    try:
        before = len(os.listdir("/proc/self/fd")), len(mountinfo.read())
        offers = {ask_kernel(directory) for _ in range(20)}
        assert (len(os.listdir("/proc/self/fd")), len(mountinfo.read())) == before
    finally:
        os.close(directory)
    (offer,) = offers
    assert offer.protocol.startswith("7.")
    assert offer.passthrough is not bool(offer.reason)
    assert os.listdir(tmp_path) == []


def test_doctor_says_which_driver_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a mounted root what serves it; of others what would; what stands in passthrough's way is a warning."""
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
    """A warning where the configuration asks for it; where auto would have taken it, a fact."""
    monkeypatch.setitem(sys.modules, "pyfuse3", None)
    monkeypatch.setattr(driver_choice, "ask_kernel", lambda directory, *, release: NOTHING)
    asked, left = driver([("/a", "pyfuse3"), ("/b", "auto")], "6.1.0")
    assert (asked.level, left.level) == ("warning", "ok")
    assert "ciuic[pyfuse3]" in asked.remedy
    assert "ciuic[pyfuse3]" in left.message
