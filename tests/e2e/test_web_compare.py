"""Comparisons on the page of `ciuic web`: paths, lines and tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.live import module_tmp
from support.site import Site, running_site
from support.web_page import WebPage, open_page, place

__all__ = ["module_tmp"]
pytestmark = pytest.mark.mount
_ODD = "<b>&'\".txt"


@pytest.fixture(scope="module")
def site(module_tmp: Path) -> Iterator[Site]:
    with running_site(module_tmp, "data") as made:
        (root,) = made.roots
        # Readable by their owner alone: what compares is another user than the owner, with one privilege.
        random = np.random.default_rng(1)
        tensors = {f"layer.{at}": random.standard_normal((16, 16)).astype("float32") for at in range(8)}
        save_file(tensors, root / "step-1.safetensors")
        os.chmod(root / "step-1.safetensors", 0o600)
        (root / _ODD).write_text("lr: 0.1\nseed: 1\n")
        (root / "gone").write_text("for a while\n")
        made.snapshot()
        changed = {name: tensor + np.float32(1e-4) for name, tensor in tensors.items()}
        changed["layer.3"] = tensors["layer.3"] + np.float32(1)
        changed["layer.4"] = tensors["layer.4"].copy()
        changed["layer.5"][0, 0] = np.nan
        changed["layer.6"] = tensors["layer.6"]
        save_file(changed, root / "step-1.safetensors")
        save_file(changed, root / "step-2.safetensors")
        (root / _ODD).write_text("lr: <i>\nseed: 1\n")
        (root / "gone").unlink()
        (root / "binary").write_bytes(b"\0" * 100)
        made.snapshot()
        yield made


@pytest.fixture(scope="module")
def page(site: Site) -> Iterator[WebPage]:
    with open_page(site) as made:
        yield made


@pytest.fixture(scope="module")
def both(page: WebPage) -> tuple[str, str]:
    """Ids of the snapshots, older first."""
    new, old = (
        line.partition("|")[0] for line in page.run("list", "--machine-readable").stdout.splitlines()[:2]
    )
    return old, new


def test_paths_that_differ_are_listed(page: WebPage, site: Site, both: tuple[str, str]) -> None:
    """Two snapshots show what was added, changed and removed; each path leads to the file where it is."""
    old, new = both
    text = page.ask(f"/compare?a={old}&b={new}").text
    root = site.roots[0]
    assert f'href="/files?s={old}&amp;p={root}/gone"' in text
    assert f'href="/files?s={new}&amp;p={root}/binary"' in text
    assert text.count(">changed</span>") == 2
    assert text.count(">added</span>") == 2
    assert text.count(">removed</span>") == 1
    assert "<b>&" not in text
    assert "0 paths" in page.ask(f"/compare?a={new}&b={new}").text
    # The list, the snapshot and the versions of a path lead here.
    assert 'name="a"' in page.ask("/snapshots").text
    assert f"/compare?a={old}&amp;b={new}" in page.ask(f"/snapshot?s={new}").text
    versions = page.ask(f"/versions?{place(root / _ODD)}").text
    assert f"/compare?a={old}&amp;b={new}&amp;p=" in versions


def test_texts_are_compared_by_line(page: WebPage, site: Site, both: tuple[str, str]) -> None:
    """The lines of a text that differ are shown, as text."""
    old, new = both
    text = page.ask(f"/compare?a={old}&b={new}&{place(site.roots[0] / _ODD)}").text
    assert "-lr: 0.1" in text
    assert "+lr: &lt;i&gt;" in text
    assert " seed: 1" in text


def test_checkpoints_are_compared_by_tensor(page: WebPage, site: Site, both: tuple[str, str]) -> None:
    """A checkpoint shows its tensors, the outlier first of those without NaN; identical ones are counted. So do two of different names."""
    old, new = both
    one, two = (site.roots[0] / f"step-{at}.safetensors" for at in (1, 2))
    for query in (f"a={old}&b={new}&{place(one)}", f"a={old}&b={new}&{place(two)}&o={one}"):
        text = page.ask(f"/compare?{query}").text
        assert "6 tensors changed, 2 identical tensors not read" in text
        assert text.index("layer.5") < text.index("layer.3") < text.index("layer.0")
        assert "1 NaN" in text
        assert text.count(">outlier") == 1
    assert "layer.4" not in text
    below = page.ask(f"/compare?a={old}&b={new}&{place(site.roots[0])}").text
    assert "Compare the tensors below" in below


def test_what_cannot_be_compared_says_why(page: WebPage, site: Site, both: tuple[str, str]) -> None:
    """Unknown snapshots and paths are refused with their status; other addresses stay what they were."""
    old, new = both
    assert page.ask(f"/compare?a=cs-000000&b={new}").status == 404
    assert page.ask(f"/compare?a={old}&b={new}&{place(site.roots[0] / 'nowhere')}").status == 404
    missing = page.ask(
        f"/compare?a={old}&b={new}&{place(site.roots[0] / 'binary')}&o={site.roots[0]}/nowhere"
    )
    assert missing.status == 404
    assert f'name="b" value="{new}"' in page.ask("/compare").text


def test_tensors_of_a_file_are_read_in_a_process_of_their_own(page: WebPage, site: Site) -> None:
    """The page of a checkpoint leads to its tensors; that page itself has nothing of what is parsed."""
    root = site.roots[0]
    text = page.ask(f"/files?{place(root / 'step-1.safetensors')}").text
    assert "16x16" not in text
    link = re.search(r'href="([^"]*)">Show its tensors<', text)
    assert link is not None
    shown = page.ask(link.group(1).replace("&amp;", "&")).text
    assert "8 tensors, " in shown, shown
    assert re.search(r"layer\.3  \S+  16x16  norm \d", shown)
    # NaN come first.
    assert re.search(r"1 NaN, 0 infinite\n.*1 NaN", shown)
    assert "Versions" in shown
    assert "Show its tensors" not in page.ask(f"/files?{place(root / _ODD)}").text
    # Asked for where there are none, the rest of the page is there all the same.
    for path, why in (
        (root / "binary", "no tensors that are known"),
        (root / "gone", ""),
    ):
        other = page.ask(f"/files?{place(path)}&tensors=1")
        assert other.status == 200
        assert why in other.text
        assert "Versions" in other.text
