"""The page of a training: numbers of logs and of states, beside the snapshots."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.live import module_tmp
from support.site import Site, running_site
from support.web_page import WebPage, open_page

from ciuic.training.format.reading import Facts, encode_facts

__all__ = ["module_tmp"]
pytestmark = pytest.mark.mount
_KEY = "<b>loss"


@pytest.fixture(scope="module")
def site(module_tmp: Path) -> Iterator[Site]:
    with running_site(module_tmp, "data") as made:
        (root,) = made.roots
        for step in range(0, 300, 100):
            with open(root / "log-1.jsonl", "a") as log:
                for at in range(step, step + 100, 10):
                    loss = float("nan") if at == 150 else 4.0 / (1 + at)
                    log.write(json.dumps({"step": at, _KEY: loss, "grad_norm": 1.5}) + "\n")
            (root / "snapshot.json").write_bytes(
                encode_facts(Facts(step=step + 95, metrics={"accuracy": step / 1000, "odd": float("inf")}))
            )
            made.snapshot()
        with open(made.config, "a") as config:
            config.write(f'[[watch_number]]\nfile = "{root}/log-*.jsonl"\nkey = "{_KEY}"\n')
        yield made


@pytest.fixture
def log(site: Site) -> Iterator[Path]:
    """Return the log of a training, which is whole again after the test."""
    file = site.roots[0] / "log-1.jsonl"
    content = file.read_bytes()
    yield file
    file.unlink(missing_ok=True)
    file.write_bytes(content)


@pytest.fixture(scope="module")
def page(site: Site) -> Iterator[WebPage]:
    with open_page(site) as made:
        yield made


def _coordinates(text: str) -> list[tuple[float, float]]:
    return [
        (float(x), float(y))
        for line in re.findall(r'<polyline points="([^"]*)"', text)
        for x, y in (pair.split(",") for pair in line.split())
    ]


def test_numbers_are_drawn_beside_the_snapshots(page: WebPage) -> None:
    """The loss, the norm and the snapshots share the axis of steps; a number that is none is a gap, and said in the table."""
    text = page.ask("/training").text
    assert "<b>loss" not in text
    assert "&lt;b&gt;loss (left axis)" in text
    assert "grad_norm (right axis)" in text
    # The NaN cuts the loss in two; each of the two in the legend is one.
    assert len(re.findall(r"<polyline", text)) == 2 + 1 + 2
    assert all(0 <= x <= 1000 and 0 <= y <= 340 for x, y in _coordinates(text))
    assert text.count('<rect class="flag') >= 3
    assert "nan" not in text.partition("<svg")[2].partition("</svg>")[0].lower()
    assert "not finite" in text
    for step in (95, 195, 295):
        assert f"step {step}" in text
    # The newest snapshot's number, and a link to what changed before it.
    newest, before = (
        line.partition("|")[0] for line in page.run("list", "--machine-readable").stdout.splitlines()[:2]
    )
    assert f"/compare?a={before}&amp;b={newest}" in text
    assert f"{4.0 / 291:.4g}" in text


def test_the_overview_shows_the_curves(page: WebPage) -> None:
    """The picture that comes after the page has the same curves as the training's page, and so has the next overview."""
    drawn = page.ask("/picture").text
    assert "&lt;b&gt;loss (left axis)" in drawn
    assert _coordinates(drawn) == _coordinates(page.ask("/training").text)
    assert _coordinates(page.ask("/").text) == _coordinates(drawn)


def test_reported_metrics_are_series(page: WebPage) -> None:
    """What a training reported with its states can be chosen, and is drawn by the steps of those."""
    text = page.ask("/training").text
    number = re.search(r'name="series(\d+)" value="\d+"> accuracy', text)
    assert number is not None
    chosen = page.ask(f"/training?series{number[1]}={number[1]}").text
    assert "accuracy (left axis)" in chosen
    assert chosen.count("<circle") == 3


def test_a_log_that_is_gone_is_read_from_the_newest_snapshot(page: WebPage, log: Path) -> None:
    """The numbers of a file that was deleted since are those of the newest snapshot, and the page says so."""
    log.unlink()
    text = page.ask("/training").text
    newest = page.run("list", "--machine-readable").stdout.partition("|")[0]
    assert f"{log} in {newest}" in text
    assert "grad_norm (right axis)" in text


def test_hostile_files_harm_nobody(page: WebPage, log: Path) -> None:
    """A log that is a link elsewhere, a fifo or garbage gives no numbers of its own, and the page stays."""
    log.unlink()
    log.symlink_to("/etc/passwd")
    assert page.ask("/training").status == 200
    log.unlink()
    log.write_bytes(
        b'{"step": 1e999, "x": [' * 1000
        + b"\xff\n"
        + b'{"step": -5, "grad_norm": 1e308}\n{"grad_norm": -1e308}\n'
    )
    answer = page.ask("/training")
    assert answer.status == 200
    assert all(0 <= x <= 1000 and 0 <= y <= 340 for x, y in _coordinates(answer.text))
    assert page.ask("/").status == 200
