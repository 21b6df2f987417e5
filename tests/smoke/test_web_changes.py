"""What changed lately, and the drills, on the page of `ciuic web`."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.site import Site, site_in
from support.until import until
from support.web_page import WebPage, open_page

from ciuic.protocol.last_drill import LastDrill, add_drill

pytestmark = pytest.mark.mount
_ODD = "<i>\n&"


@pytest.fixture
def site(short_tmp: Path) -> Iterator[Site]:
    with site_in(short_tmp) as made:
        root = made.root("data")
        made.start()
        # Otherwise it may come between ours, or between two writes.
        until("the first snapshot", made.has_first)
        for name, size in (("checkpoints", 300_000), (_ODD, 50_000)):
            (root / name).mkdir()
            (root / name / "old").write_bytes(bytes(size))
        made.snapshot()
        (root / "checkpoints/old").unlink()
        (root / "checkpoints/new").write_bytes(b"n" * 100_000)
        (root / _ODD / "old").write_bytes(b"o" * 60_000)
        made.snapshot()
        yield made


@pytest.fixture
def page(site: Site) -> Iterator[WebPage]:
    with open_page(site) as made:
        yield made


def test_changes_are_shown_by_directory(page: WebPage) -> None:
    """The sums are those of `ciuic changed`, in a table and in tiles that lie in the map; a name that is markup is text."""
    told = json.loads(page.run("changed", "--since", "1h", "--json").stdout)["roots"]
    for address in ("/changes", "/changes?since=1d", "/changes?since=1w", "/changes?since=<b>"):
        text = page.ask(address).text
        assert "<i>" not in text
        assert "<b>" not in text
        for root in told:
            for directory in root["directories"]:
                assert directory["path"].rpartition("/")[2].partition("<")[0] in text
        tiles = re.findall(
            r'class="tile[^"]*" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', text
        )
        assert len(tiles) == sum(len(root["directories"]) for root in told)
        for tile in tiles:
            x, y, width, height = map(float, tile)
            assert x + width <= 1000.2
            assert y + height <= 260.2
    assert "What changed in" in page.ask("/").text


def test_drills_are_listed(page: WebPage, site: Site) -> None:
    """A drill that was done and one that found damage are listed, newest first; damage stays on top, and its reason is text."""
    assert "no drill yet" in page.ask("/drills").text
    assert 'href="/drills"' in page.ask("/").text
    assert page.run("drill").returncode == 0
    newest = page.run("list", "--machine-readable").stdout.partition("|")[0]
    text = page.ask("/drills").text
    assert ">exact</span>" in text
    assert f'href="/snapshot?s={newest}"' in text
    damaged = LastDrill(
        time_ns=time.time_ns(), verdict="damaged", seconds=1.5, reason="<b>odd", snapshot=newest, files=10**6
    )
    add_drill(site.top / "repository", damaged)
    text = page.ask("/drills").text
    assert "A drill found damage" in text
    assert "<b>odd" not in text
    assert text.index(">damaged</span>") < text.index(">exact</span>")
