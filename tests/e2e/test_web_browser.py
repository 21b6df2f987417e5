"""The page of `ciuic web` in Debian's Chromium: what a person does with it, and what hostile names do to it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.ci import IN_CI, needs
from support.live import module_tmp
from support.site import Site, running_site
from support.until import until
from support.web_page import WebPage, place, web_page

from ciuic.printable import one_line

try:
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import Browser, BrowserContext, Error, sync_playwright
except ImportError:
    if IN_CI:
        raise
    pytest.skip("playwright and axe-playwright-python are not installed", allow_module_level=True)

__all__ = ["module_tmp"]
pytestmark = [pytest.mark.mount, pytest.mark.timeout(600)]
_CHROMIUM = shutil.which("chromium")
_MARKUP = "<img src=x onerror=alert(1)>"
_NAMES = (
    b"<script>alert(1)<",
    b'"><img src=x onerror=alert(1)>',
    b"' onfocus=alert(1) autofocus='",
    b"two\nlines\t\"'&amp;%2e%2e{{7*7}}",
    "\u202eright to left\u2066 \u200b".encode(),
    b"no UTF-8 \xff\xfe\xc3",
    b"n" * 255,
    "\u20ac".encode() * 85,
    b"javascript:alert(1)",
    b" -rf ",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if _CHROMIUM is None:
        needs("chromium is not installed")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def filled(module_tmp: Path) -> Iterator[tuple[Site, str]]:
    """Provide a daemon with two roots, one of which has markup for a name, and names that are more than names; and a comparison."""
    with running_site(module_tmp, "data", _MARKUP) as made:
        root, odd = made.roots
        (root / "config.yaml").write_text("lr: 0.1\n")
        (odd / "file").write_text("in a root with an odd name\n")
        for name in _NAMES:
            file = os.path.join(os.fsencode(root), name)
            if len(name) < 255:
                os.mkdir(file)
                Path(os.fsdecode(file + b"/script>")).write_text(
                    f"{_MARKUP}</pre><script>alert(1)</script>\n"
                )
            else:
                Path(os.fsdecode(file)).write_text(_MARKUP)
        os.symlink(_MARKUP, root / "link")
        ids = []
        for step in (10, 20):
            for name in _NAMES:
                file = os.path.join(os.fsencode(root), name) + (b"/script>" if len(name) < 255 else b"")
                with open(file, "a") as changed:
                    changed.write(f"{_MARKUP} {step}\n")
            save_file({_MARKUP: np.full((4, 4), step, "float32")}, odd / "weights.safetensors")
            with open(odd / "log.jsonl", "a") as log:
                log.write(json.dumps({"step": step, _MARKUP: 1.0 / step}) + "\n")
            (root / "config.yaml").write_text(f"lr: 0.{step // 10}\n")
            ids.append(made.snapshot())
        with open(made.config, "a") as config:
            config.write(f"[[watch_number]]\nfile = '{odd}/log.jsonl'\nkey = '{_MARKUP}'\n")
        yield made, f"/compare?a={ids[0]}&b={ids[1]}"


@pytest.fixture(scope="module")
def site(filled: tuple[Site, str]) -> Site:
    """Return the daemon."""
    return filled[0]


@pytest.fixture(scope="module")
def compare(filled: tuple[Site, str]) -> str:
    """Return the comparison of two snapshots between which every name has changed."""
    return filled[1]


@pytest.fixture(scope="module")
def server(site: Site) -> Iterator[WebPage]:
    with web_page(site, "--actions") as made:
        drilled = made.run("drill")
        assert drilled.returncode == 0, drilled.stderr
        yield made


class Visitor:
    """A person at a browser, who is told whatever goes wrong in it."""

    def __init__(self, context: BrowserContext, server: WebPage) -> None:
        self.wrong: list[str] = []
        self.address = f"http://127.0.0.1:{server.port}"
        self.server = server
        context.set_default_timeout(60_000)
        context.route("**/*", self._route)
        self.page = context.new_page()
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.wrong.append(f"script: {error}"))
        self.page.on(
            "dialog", lambda dialog: (self.wrong.append(f"dialog: {dialog.message}"), dialog.dismiss())
        )

    def _route(self, route: Any) -> None:
        if route.request.url.startswith(f"{self.address}/"):
            route.continue_()
        else:
            self.wrong.append(f"network: {route.request.url}")
            route.abort()

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(f"console: {message.text}")

    def log_in(self) -> None:
        """Follow a one-time link."""
        self.go(self.server.link())
        self.page.get_by_role("button", name="Log in").click()
        self.page.wait_for_url(f"{self.address}/")

    def go(self, target: str) -> None:
        """Open an address of the page."""
        # Events never end, so that the network is never idle.
        self.page.goto(self.address + target, wait_until="load")

    def press(self, name: str | re.Pattern[str]) -> None:
        """Press a button."""
        self.page.get_by_role("button", name=name).click()

    def follow(self, name: str, at: int = 0) -> None:
        """Follow a link."""
        self.page.get_by_role("link", name=name).nth(at).click()


@contextmanager
def _visit(browser: Browser, server: WebPage, **options: Any) -> Iterator[Visitor]:
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    try:
        visitor = Visitor(context, server)
        visitor.log_in()
        yield visitor
        assert visitor.wrong == []
    finally:
        context.close()


def test_tabs_that_nobody_sees_leave_connections_to_others(browser: Browser, server: WebPage) -> None:
    """A browser has six connections to a host: more overviews than that can be open behind the one that is seen."""
    with _visit(browser, server) as visitor:
        for _ in range(7):
            tab = visitor.page.context.new_page()
            tab.goto(visitor.address, wait_until="load")
            # All pages of such a browser say that they are seen.
            tab.evaluate(
                "Object.defineProperty(document, 'hidden', { get: () => true });"
                "document.dispatchEvent(new Event('visibilitychange'))"
            )
        visitor.go("/snapshots")
        visitor.page.get_by_role("heading", name="Snapshots").wait_for()


def _place(path: Path | bytes) -> str:
    return place(path).partition("&")[2]


def _destroy_and_restore(visitor: Visitor, file: Path) -> None:
    """Go the whole way from the overview to a restore and back."""
    page = visitor.page
    file.write_text("destroyed\n")
    visitor.go("/")
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Files").click()
    # The directory that all roots are in is there at once.
    for step in (f"{file.parent.name}/", file.name):
        page.get_by_role("table").get_by_role("link", name=step, exact=True).click()
    page.get_by_role("heading", name="Versions").wait_for()
    visitor.follow("Restore…", -1)
    visitor.press("Show the plan")
    assert file.read_text() == "destroyed\n"
    _confirm(visitor)
    visitor.press("Restore now")
    _end(visitor)
    assert file.read_text() == "lr: 0.1\n"
    _confirm(visitor)
    visitor.press("Undo")
    _end(visitor)
    assert file.read_text() == "destroyed\n"


def _confirm(visitor: Visitor) -> None:
    """Type what the page asks for."""
    field = visitor.page.get_by_label(re.compile("to confirm"))
    field.fill(field.locator("xpath=..").locator("code").inner_text())


def _end(visitor: Visitor) -> None:
    """Wait for the end of an action; without scripts its page is looked at again and again."""

    def ended() -> bool:
        heading = visitor.page.get_by_role("heading", level=1).inner_text()
        again = visitor.page.get_by_role("link", name="Look again")
        if "runs" in heading and again.count():
            again.click()
        return "is done" in heading

    until("the end of the action", ended)


def test_a_file_goes_back_and_forth(browser: Browser, server: WebPage, site: Site) -> None:
    """Path, version, plan, restore and undo, with the bytes of each time, and nothing asked of another origin."""
    with _visit(browser, server) as visitor:
        _destroy_and_restore(visitor, site.roots[0] / "config.yaml")


def test_it_works_without_scripts(browser: Browser, server: WebPage, site: Site) -> None:
    """The same with JavaScript off."""
    with _visit(browser, server, java_script_enabled=False) as visitor:
        _destroy_and_restore(visitor, site.roots[0] / "config.yaml")


def test_the_overview_is_a_picture(browser: Browser, server: WebPage) -> None:
    """The curves come by themselves, with a mark for each snapshot that knows its step; the five cards stand in one row."""
    with _visit(browser, server) as visitor:
        page = visitor.page
        page.locator("#picture .curve").first.wait_for()
        assert page.locator("#picture a").count() >= 2
        tops = {round(one.bounding_box()["y"]) for one in page.locator(".card").all()}  # type: ignore[index]
        assert (page.locator(".card").count(), len(tops)) == (5, 1)
        # On a telephone the newest end is what is seen.
        page.set_viewport_size({"width": 360, "height": 700})
        page.reload()
        page.locator("#picture .curve").first.wait_for()
        places = [one.bounding_box() for one in page.locator("#picture rect.flag").all()]
        assert 0 <= max(place["x"] for place in places if place) < 360
    with _visit(browser, server, java_script_enabled=False) as visitor:
        assert visitor.page.locator("#picture rect.flag").count() >= 2


def _is_text(visitor: Visitor, *texts: str) -> None:
    """Check that texts stand on the page as they are, and that nothing on the page came from a name."""
    page = visitor.page
    shown = page.locator("body").inner_text().replace("\xa0", " ")
    for text in texts:
        assert text in shown or text in page.title()
    assert page.locator("script").count() == 1
    assert page.locator("img:not(.preview)").count() == 0
    assert (
        page.evaluate(
            "[...document.querySelectorAll('*')].flatMap(e => e.getAttributeNames()).filter(n => n.startsWith('on'))"
        )
        == []
    )
    assert page.locator("[autofocus]").count() == 0
    assert page.evaluate("[...document.links].filter(a => a.protocol !== 'http:').length") == 0


def test_names_are_text_everywhere(browser: Browser, server: WebPage, site: Site, compare: str) -> None:
    """Each page that shows a name shows it as text, whatever is in it, and the name leads to the file that has it."""
    root = os.fsencode(site.roots[0])
    with _visit(browser, server) as visitor:
        page = visitor.page
        visitor.go(compare)
        _is_text(visitor, *map(one_line, _NAMES))
        visitor.go("/find?pattern=*")
        _is_text(visitor, *map(one_line, _NAMES))
        visitor.go("/changes")
        _is_text(visitor, *(one_line(name) if len(name) < 255 else "data" for name in _NAMES))
        for name in _NAMES:
            path = root + b"/" + name
            shown = one_line(name)
            visitor.go(f"/files?{place(root)}")
            _is_text(visitor, shown)
            row = page.get_by_role("table").locator("tbody tr").filter(has_text=shown)
            row.get_by_role("link").first.click()
            if len(name) < 255:
                _is_text(visitor, shown)
                page.get_by_role("table").get_by_role("link", name="script>", exact=True).click()
                path += b"/script>"
            page.get_by_role("heading", name="Versions").wait_for()
            _is_text(visitor, "Versions", _MARKUP)
            visitor.go(f"/versions?{place(path)}")
            _is_text(visitor, shown)
            visitor.go(f"{compare}&{_place(path)}")
            _is_text(visitor, shown, f"+{_MARKUP} 20")
            visitor.go(f"/restore?{place(path)}")
            _is_text(visitor, shown)
            visitor.press("Show the plan")
            page.get_by_text("Plan: restore").wait_for()
            _is_text(visitor, shown)
            content = Path(os.fsdecode(path)).read_bytes()
            Path(os.fsdecode(path)).write_text("destroyed\n")
            _confirm(visitor)
            visitor.press("Restore now")
            _end(visitor)
            _is_text(visitor, "restore --snapshot")
            assert Path(os.fsdecode(path)).read_bytes() == content
            visitor.go(f"/files?{place(path + b'-not-there')}")
            page.get_by_text("no snapshot has").wait_for()
            visitor.wrong = [one for one in visitor.wrong if "404" not in one]
            _is_text(visitor, shown)
        visitor.go("/log")
        _is_text(visitor, "restore --snapshot")


def test_texts_are_text_everywhere(browser: Browser, server: WebPage, site: Site, compare: str) -> None:
    """So are a root's name, messages, reasons and what is asked for."""
    with _visit(browser, server) as visitor:
        page = visitor.page
        page.get_by_label("Why").fill(_MARKUP)
        visitor.press("Take a snapshot now")
        _end(visitor)
        _is_text(visitor, _MARKUP)
        visitor.follow("Look at")
        _is_text(visitor, _MARKUP)
        page.get_by_label("Why").fill(f"'{_MARKUP}")
        visitor.press("Hold")
        _end(visitor)
        for target in (
            "/", "/snapshots", "/files", "/alerts", "/log", f"/files?{place(site.roots[1])}",
            "/snapshots?q=%3Cimg+src%3Dx+onerror%3Dalert%281%29%3E",
        ):  # fmt: skip
            visitor.go(target)
            _is_text(visitor, _MARKUP if target != "/alerts" else "")
        weights = site.roots[1] / "weights.safetensors"
        for target in (
            compare, f"{compare}&{_place(weights)}", f"{compare}&{_place(site.roots[1])}&tensors=1", "/training", "/changes",
            "/hosts", "/drills", f"/versions?{place(weights)}", f"/files?{place(weights)}&tensors=1",
        ):  # fmt: skip
            visitor.go(target)
            _is_text(visitor, _MARKUP if target != "/drills" else "exact")
            assert page.locator(".banner.warn").count() == 0, target
        for target in ("/snapshot?s=", "/files?p=", "/action?n=", "/files?s="):
            visitor.go(f"{target}%3Cscript%3Ealert(1)%3C/script%3E")
            _is_text(visitor, "")
        visitor.wrong = [one for one in visitor.wrong if "status of 40" not in one]


_FOCUS = "(() => { const at = document.activeElement; const style = getComputedStyle(at); return [at.textContent.trim() || at.name, style.outlineStyle, style.outlineWidth, at.getBoundingClientRect().width > 0]; })()"


_STOPS = (
    "[...document.querySelectorAll('a[href], button, input:not([type=hidden]), select, [tabindex=\"0\"]')]"
    ".map(e => e.textContent.trim() || e.name)"
)


def test_the_keyboard_is_enough(browser: Browser, server: WebPage, site: Site) -> None:
    """Tab reaches everything that can be pressed, in the order of the page, and shows where it is; the first stop skips the menu."""
    with _visit(browser, server) as visitor:
        page = visitor.page
        visitor.go(f"/files?{place(site.roots[0] / 'config.yaml')}")
        page.keyboard.press("Tab")
        assert page.evaluate(_FOCUS)[0] == "Skip to the content"
        assert page.evaluate("document.activeElement.getBoundingClientRect().left >= 0")
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        assert page.evaluate("document.getElementById('main').contains(document.activeElement)")
        for _ in range(5):
            visitor.go("/")
            wanted = page.evaluate(_STOPS)
            stops = []
            for _ in wanted:
                page.keyboard.press("Tab")
                text, style, width, is_shown = page.evaluate(_FOCUS)
                assert (style, width, is_shown) == ("solid", "3px", True), text
                stops.append(text)
            # Verdicts on the snapshots of tests before may come meanwhile, each with a mark in the chart.
            if page.evaluate(_STOPS) == wanted:
                break
        assert stops == wanted
        # And the whole way to a restore.
        file = site.roots[0] / "config.yaml"
        file.write_text("lr: 0.3\n")
        site.snapshot()
        file.write_text("destroyed\n")
        visitor.go(f"/files?{place(file)}")
        for name, keys in (("Restore…", ""), ("Show the plan", ""), ("typed", "config.yaml")):
            for _ in range(100):
                page.keyboard.press("Tab")
                try:
                    if page.evaluate(_FOCUS)[0] == name:
                        break
                except Error:
                    # A page that shows progress, as of a plan on a busy machine, loads itself again when that has ended.
                    page.wait_for_load_state()
            page.keyboard.type(keys)
            with page.expect_navigation():
                page.keyboard.press("Enter")
        _end(visitor)
        assert file.read_text() == "lr: 0.3\n"


def test_a_live_page_keeps_what_is_typed(browser: Browser, server: WebPage, site: Site) -> None:
    """News arrive in a page in which a form is being filled in, and neither the text nor the place in the page is lost."""
    with _visit(browser, server) as visitor:
        page = visitor.page
        page.get_by_text("live", exact=True).wait_for()
        page.get_by_label("Why").fill("half a sentence")
        page.keyboard.press("Tab")
        assert page.evaluate(_FOCUS)[0] == "Take a snapshot now"
        for _ in range(2):
            id_ = site.snapshot()
            page.get_by_role("table").get_by_text(id_, exact=True).wait_for()
            assert page.get_by_label("Why").input_value() == "half a sentence"
            assert page.evaluate(_FOCUS)[0] == "Take a snapshot now"
        page.get_by_label("Why").focus()
        id_ = site.snapshot()
        page.get_by_role("table").get_by_text(id_, exact=True).wait_for()
        page.keyboard.type(", and its end")
        assert page.get_by_label("Why").input_value().endswith(", and its end")
        link = page.get_by_role("table").get_by_role("link", name=id_, exact=True)
        link.focus()
        page.get_by_role("table").get_by_text(site.snapshot(), exact=True).wait_for()
        assert page.evaluate(_FOCUS)[0] == id_


_LOOKS: tuple[tuple[Literal["light", "dark"], int], ...] = (("light", 1280), ("dark", 360))


def test_nobody_is_left_out(browser: Browser, server: WebPage, site: Site, compare: str) -> None:
    """axe finds nothing serious on any page, by day and by night, at a desk and on a telephone; none is wider than its window."""
    file = site.roots[0] / "config.yaml"
    newest = server.run("list", "--machine-readable").stdout.partition("|")[0]
    weights = site.roots[1] / "weights.safetensors"
    with _visit(browser, server) as visitor:
        page = visitor.page
        # Ends of words, which any page must break.
        page.get_by_label("Why").fill("w" * 300)
        visitor.press("Take a snapshot now")
        _end(visitor)
        _accessible(visitor)
        targets = (
            "/", "/snapshots", f"/snapshot?s={newest}", "/files", f"/files?{place(site.roots[0])}", f"/files?{place(file)}",
            f"/versions?{place(file)}", "/alerts", "/log", f"/files?{place(os.fsencode(site.roots[0]) + b'/' + _NAMES[6])}",
            "/compare", compare, f"{compare}&{_place(file)}", f"{compare}&{_place(weights)}",
            f"{compare}&{_place(site.roots[1])}&tensors=1", f"/files?{place(weights)}&tensors=1", "/training", "/changes",
            "/drills", "/hosts", "/no-such-page",
        )  # fmt: skip
        for target in targets:
            visitor.go(target)
            _accessible(visitor)
        visitor.go(f"/restore?{place(file)}")
        _accessible(visitor)
        visitor.press("Show the plan")
        page.get_by_text("Plan: restore").wait_for()
        _accessible(visitor)
        _confirm(visitor)
        visitor.press("Restore now")
        _end(visitor)
        _accessible(visitor)
        visitor.press("Log out")
        page.get_by_text("To log in, run on the host").wait_for()
        _accessible(visitor)
        visitor.go(server.link())
        _accessible(visitor)
        visitor.wrong = [one for one in visitor.wrong if "status of 40" not in one]


def _accessible(visitor: Visitor) -> None:
    page = visitor.page
    for colours, width in _LOOKS:
        page.emulate_media(color_scheme=colours)
        page.set_viewport_size({"width": width, "height": 800})
        found = Axe().run(page).response["violations"]
        assert [
            (one["id"], [node["html"][:200] for node in one["nodes"]])
            for one in found
            if one["impact"] in ("serious", "critical")
        ] == [], (page.url, colours, width)
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, (page.url, wide)
