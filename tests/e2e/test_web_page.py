"""The page of `ciuic web` before a real daemon: what it shows, what it does, and what it survives."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import quote

import msgspec
import numpy as np
import pytest
from support import remote_recipe as recipe
from support.checkpoint_files import FORMATS, plain_safetensors
from support.live import module_tmp
from support.remote_host import RemoteHost, new_remote
from support.site import Site, ended, running_site
from support.until import until
from support.web_page import WebPage, action, href, open_page, place, web_page

from ciuic.printable import one_line
from ciuic.remote.access import add_slot
from ciuic.remote.object_names import status_name
from ciuic.remote.objects.opening import open_objects
from ciuic.remote.sealing.key_slots import make_key_file

__all__ = ["module_tmp"]
pytestmark = pytest.mark.mount
_ODD = b"<img src=x onerror=alert(1)> \xff\n&'\"%2e"


@pytest.fixture(scope="module")
def site(module_tmp: Path) -> Iterator[Site]:
    with running_site(module_tmp, "data") as made:
        (root,) = made.roots
        (root / "config.yaml").write_text("lr: 0.2\n")
        (root / "gone").write_text("for a while\n")
        (Path(os.fsdecode(os.fsencode(root) + b"/" + _ODD))).write_text("odd\n")
        made.snapshot()
        (root / "gone").unlink()
        made.snapshot()
        yield made


@pytest.fixture(scope="module")
def page(site: Site) -> Iterator[WebPage]:
    with open_page(site, "--actions") as made:
        yield made


def test_a_file_goes_back_and_forth(page: WebPage, site: Site) -> None:
    """A path leads to its version, the plan, the restore and its undo; the log has both, and the bytes are those of each time."""
    file = site.roots[0] / "changing.yaml"
    for number in (1, 2):
        file.write_text(f"lr: 0.{number}\n")
        site.snapshot()
    file.write_text("destroyed\n")
    shown = page.ask(f"/files?{place(file)}")
    assert "lr: 0.2" in shown.text
    assert shown.text.count("Restore…") == 3
    first = page.run("list", "--machine-readable").stdout.splitlines()[1].partition("|")[0]
    restore = page.ask(f"/restore?{place(file, first)}")
    plan = page.follow(page.ask(f"/plan?{place(file, first)}", {"csrf": restore.csrf, "dest": ""}))
    assert "Type the name of what is written" in plan.text
    assert file.read_text() == "destroyed\n"
    # Without the name, nothing is done.
    assert page.act("restore", place(file, first), typed="data").status == 400
    assert file.read_text() == "destroyed\n"
    done = page.act("restore", place(file, first), typed=" changing.yaml ")
    assert file.read_text() == "lr: 0.1\n"
    safety = done.text.partition('action="/act?s=')[2].partition("&")[0]
    assert "is done" in page.act("undo", f"s={safety}").text
    assert file.read_text() == "destroyed\n"
    logged = json.loads(page.run("log", "--json").stdout)["actions"][:4]
    assert [(one["what"].split()[1], one["outcome"]) for one in logged] == [
        ("undo", "done"), ("undo", "begun"), ("restore", "done"), ("restore", "begun")
    ]  # fmt: skip
    assert {one["who"] for one in logged} == {"root"}


def test_several_paths_are_chosen_restored_and_taken_back(page: WebPage, site: Site) -> None:
    """Paths chosen in a listing are restored together, extras are removed on request, and the undo brings everything back."""
    top = site.roots[0] / "several"
    for name in ("a", "b", "kept"):
        (top / name).mkdir(parents=True)
        (top / name / "file").write_text(f"{name} 1\n")
    site.snapshot()
    id_ = page.run("list", "--machine-readable").stdout.partition("|")[0]
    for name in ("a", "b", "kept"):
        (top / name / "file").write_text(f"{name} 2\n")
    (top / "b/extra").write_text("made later\n")
    assert f'value="{quote(f"{top}/a")}"' in page.ask(f"/files?{place(top, id_)}").text
    chosen = "&".join(f"also{at}={quote(quote(f'{top}/{name}'))}" for at, name in enumerate("ab"))
    restore = page.ask(f"/restore?s={id_}&{chosen}")
    assert "2 paths" in restore.text
    form = {"csrf": restore.csrf, "dest": "", "delete": "1"}
    plan = page.follow(page.ask(f"/plan?s={id_}&{chosen}", form))
    assert f"{top}/b/extra" in plan.text
    assert "<dt>Removed</dt><dd>1" in plan.text
    # Of several paths the directory above them is typed, and the form has all that was planned.
    target = action(plan.text, "/act")
    assert page.ask(target, {"csrf": plan.csrf, "kind": "restore", "typed": "a"}).status == 400
    done = page.follow(page.ask(target, {"csrf": plan.csrf, "kind": "restore", "typed": "several"}))
    assert "is done" in done.text
    found = {str(one.relative_to(top)): one.read_text() for one in top.rglob("*") if one.is_file()}
    assert found == {"a/file": "a 1\n", "b/file": "b 1\n", "kept/file": "kept 2\n"}
    safety = done.text.partition('action="/act?s=')[2].partition("&")[0]
    assert "is done" in page.act("undo", f"s={safety}").text
    assert (top / "b/extra").read_text() == "made later\n"


def test_a_whole_page_of_names_is_restored(page: WebPage, site: Site) -> None:
    """All names that a listing shows at once can be chosen; of more the limit is told."""
    top = site.roots[0] / "wide"
    top.mkdir()
    files = [top / f"file-{number:03}" for number in range(101)]
    for file in files:
        file.write_text("as it was\n")
    site.snapshot()
    id_ = page.run("list", "--machine-readable").stdout.partition("|")[0]
    for file in files:
        file.write_text("changed\n")
    names = [f"also{at}={quote(quote(str(file)))}" for at, file in enumerate(files)]
    restore = page.ask(f"/restore?s={id_}&{'&'.join(names)}")
    refused = page.ask(action(restore.text, "/plan"), {"csrf": restore.csrf, "dest": "", "delete": "1"})
    assert "1 to 100 paths, and this one of 101" in refused.text
    restore = page.ask(f"/restore?s={id_}&{'&'.join(names[:100])}")
    form = {"csrf": restore.csrf, "dest": "", "delete": "1"}
    plan = page.follow(page.ask(action(restore.text, "/plan"), form))
    form = {"csrf": plan.csrf, "kind": "restore", "destq": "", "typed": "wide"}
    assert "is done" in page.follow(page.ask(action(plan.text, "/act"), form)).text
    assert [file.read_text() for file in files] == ["as it was\n"] * 100 + ["changed\n"]


def test_names_and_contents_are_text(page: WebPage, site: Site) -> None:
    """A name that is markup, and bytes that are no text, are shown escaped, lead to the file, and can be restored."""
    path = os.fsencode(site.roots[0]) + b"/" + _ODD
    listing = page.ask(f"/files?{place(site.roots[0])}").text
    assert "<img" not in listing
    assert "&lt;img src=x onerror=alert(1)&gt;" in listing
    assert "odd" in page.ask(f"/files?{place(path)}").text
    # As the form above the names sends it.
    filtered = page.ask(f"/files?sq=latest&pq={quote(quote(os.fspath(site.roots[0])))}&start=conf").text
    assert "config.yaml" in filtered
    assert "gone" not in filtered
    download = page.ask(f"/download?{place(path)}")
    assert download.body == b"odd\n"
    assert download.headers["content-disposition"].startswith(
        'attachment; filename="<img src=x onerror=alert(1)> __'
    )
    assert "sandbox" in download.headers["content-security-policy"]
    os.unlink(path)
    id_ = page.run("list", "--machine-readable").stdout.partition("|")[0]
    assert "is done" in page.act("restore", place(path, id_), typed=one_line(_ODD)).text
    assert Path(os.fsdecode(path)).read_text() == "odd\n"


def test_what_is_deleted_is_found(page: WebPage, site: Site) -> None:
    """A path that the newest snapshot has not shows its versions, and that it was deleted."""
    answer = page.ask(f"/files?{place(site.roots[0] / 'gone')}")
    assert "deleted" in answer.text
    assert "Look" in answer.text


def test_snapshots_are_taken_held_and_forgotten(page: WebPage) -> None:
    """Each of the other actions does what the command does; to forget, the id is typed."""
    assert "is done" in page.act("snapshot", message="from the page").text
    id_ = page.run("list", "--machine-readable").stdout.partition("|")[0]
    assert "from the page" in page.ask("/snapshots").text
    page.act("hold", f"s={id_}", message="for a test")
    assert "for a test" in page.ask(f"/snapshot?s={id_}").text
    page.act("release", f"s={id_}")
    page.act("tag", f"s={id_}", add="of-the-page")
    assert "of-the-page" in page.ask(f"/snapshot?s={id_}").text
    page.act("tag", f"s={id_}", removeq="of-the-page")
    assert "of-the-page" not in page.ask(f"/snapshot?s={id_}").text
    assert page.act("forget", f"s={id_}", typed="cs-other").status == 400
    assert id_ in page.run("list").stdout
    page.act("forget", f"s={id_}", typed=id_)
    assert id_ not in page.run("list").stdout


def test_a_page_that_only_shows_refuses_actions(site: Site) -> None:
    """Without `web.actions` no form changes anything, also one that a caller makes up."""
    reader = Site(site.top / "reader")
    reader.top.mkdir()
    # The same daemon, and another place for the page.
    (reader.top / "run").symlink_to(site.top / "run")
    reader.config.write_text(site.config.read_text().replace(f"{site.top}/run", f"{reader.top}/run"))
    with open_page(reader) as page:
        before = page.run("list", "--machine-readable").stdout
        shown = page.ask("/snapshots")
        assert "read-only" in shown.text
        assert 'action="/act' not in page.ask("/").text
        answer = page.ask("/act", {"csrf": shown.csrf, "kind": "snapshot"})
        assert answer.status == 403
        assert page.run("list", "--machine-readable").stdout == before


def test_a_killed_front_comes_back(page: WebPage, site: Site) -> None:
    """The process that faces browsers is started again when it is killed; the daemon and the root notice nothing."""
    before = page.front()
    os.kill(before, signal.SIGKILL)
    until("its end", lambda: ended(before))
    page.wait()
    page.log_in()
    assert page.ask("/").status == 200
    assert site.root_status(site.roots[0]).restarts == 0


def test_the_front_reads_and_writes_nothing(page: WebPage) -> None:
    """As root's, the process that faces browsers is another user, has one capability, and gets no other."""
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{page.front()}/status").read_text().splitlines()
        if ":\t" in line
    )
    assert status["Uid"].split() == ["65534"] * 4
    assert {status[name] for name in ("CapEff", "CapPrm")} == {f"{1 << 2:016x}"}
    assert status["Groups"].split() == []
    assert status["NoNewPrivs"] == "1"


def test_events_are_numbered_and_told_again(page: WebPage, site: Site) -> None:
    """A page that comes back gets what it missed, once; one from before the server's start is told to load again."""
    import http.client

    def listen(last: str, until_text: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
        headers = {"Cookie": page.cookie} | ({"Last-Event-ID": last} if last else {})
        connection.request("GET", "/events", headers=headers)
        answer, got = connection.getresponse(), ""
        while until_text not in got:
            got += answer.readline().decode()
        connection.close()
        return got

    hello = listen("", "event: hello")
    last = hello.partition("id: ")[2].split()[0]
    id_ = site.snapshot()
    missed = listen(last, f'"id":"{id_}","state":"committed"')
    ids = [line for line in missed.splitlines() if line.startswith("id: ")]
    assert len(ids) == len(set(ids))
    assert "event: reset" in listen("00000000-3", "event: reset")


def test_a_remote_is_shown_without_its_hosts(short_tmp: Path) -> None:
    """Of a remote the page shows the hosts, their snapshots and files, and a download is what was uploaded; nothing can be changed."""
    url = f"file://{short_tmp}/nas"
    remote = new_remote(open_objects(url, make=True))
    key = short_tmp / "key"
    add_slot(remote, "file", make_key_file(str(key)))
    gone = RemoteHost(short_tmp / "alpha", remote, name="alpha")
    content = random.Random(1).randbytes(3_000_000)
    (gone.root / "model").write_bytes(content)
    snapshot = gone.snapshot()
    gone.upload()
    shutil.rmtree(gone.repository.path)
    name = status_name(recipe.STATUS_KEY.reporter)
    status = msgspec.structs.replace(
        recipe.STATUS, host="<b>alpha</b>", time_ns=snapshot.time_ns, error="503\x1b <script>"
    )
    remote.objects.put(name, [recipe.STATUS_KEY.encode(remote.sealer, name, status)])
    site = Site(short_tmp)
    site.write_config()
    with open(site.config, "a") as config:
        config.write(f'[[remote]]\nname = "nas"\nurl = "{url}"\nkey_file = "{key}"\n')
    with web_page(site, "--actions", global_options=("--repo", url)) as page:
        page.log_in()
        hosts = page.ask("/hosts")
        assert snapshot.id in hosts.text
        assert snapshot.host in hosts.text
        # What another host says of itself: whole, and as text.
        assert '<span class="tag torn">error</span> 503' in hosts.text
        assert "&lt;script&gt;" in hosts.text
        assert "&lt;b&gt;alpha&lt;/b&gt;" in hosts.text
        assert '<span class="tag good">GOOD</span> /data' in hosts.text
        assert "\x1b" not in hosts.text
        assert "model" in page.ask(f"/files?{place(gone.root)}").text
        assert page.ask(f"/download?{place(gone.root / 'model')}").body == content
        assert page.ask("/").status == page.ask("/alerts").status == 200
        csrf = page.ask("/").csrf
        assert page.ask("/act", {"csrf": csrf, "kind": "snapshot"}).status == 403
        # The page of the repository runs beside it, from the same configuration.
        with open_page(site) as own:
            assert own.ask("/snapshots").status in (200, 404)


def test_what_fails_says_why_and_how_to_go_back(page: WebPage, site: Site) -> None:
    """A restore that cannot be, and one that is killed in the middle, have a page: with the reason, and with the way back."""
    root = site.roots[0]
    (root / "large").write_bytes(random.Random(1).randbytes(64 << 20))
    id_ = site.snapshot()
    elsewhere = site.top / "elsewhere"
    (elsewhere / "config.yaml").mkdir(parents=True)
    refused = page.act("restore", place(root / "config.yaml", id_), dest=str(elsewhere), typed="elsewhere")
    assert "has ended with exit code 6" in refused.text
    assert "internal error" not in refused.text
    os.truncate(root / "large", 1)

    def safety_snapshots() -> int:
        return page.run("list", "--all").stdout.count("safety")

    before = safety_snapshots()
    form = {"csrf": page.ask("/").csrf, "kind": "restore", "typed": "data"}
    answer = page.ask(f"/act?{place(root, id_)}", form)

    until(
        "the restore",
        lambda: bool(_restores(root)) or "data-action" not in page.ask(answer.headers["location"]).text,
    )
    until("its safety snapshot", lambda: safety_snapshots() > before or not _restores(root))
    for pid in _restores(root):
        os.kill(pid, signal.SIGKILL)
    ended_page = page.follow(answer)
    assert "was ended by signal 9" in ended_page.text or "is done" in ended_page.text
    safety = ended_page.text.partition('action="/act?s=')[2].partition("&")[0]
    assert "is done" in page.act("undo", f"s={safety}").text
    assert (root / "large").stat().st_size == 1


def _restores(root: Path) -> list[int]:
    """Return the processes that restore a root."""
    found = []
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit() and f"--path={root}".encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(int(name))
    return found


def test_what_runs_is_on_every_page_and_can_be_stopped(page: WebPage, site: Site) -> None:
    """A restore under way is shown on each page, and ended by its button as ^C ends it; the log says who wanted that."""
    root = site.roots[0]
    (root / "large").write_bytes(random.Random(2).randbytes(64 << 20))
    id_ = site.snapshot()
    os.truncate(root / "large", 1)
    form = {"csrf": page.ask("/").csrf, "kind": "restore", "typed": "data"}
    answer = page.ask(f"/act?{place(root, id_)}", form)
    number = answer.headers["location"].rpartition("=")[2]
    until("the restore", lambda: bool(_restores(root)))
    for pid in _restores(root):
        os.kill(pid, signal.SIGSTOP)
    try:
        for target in ("/", "/snapshots", "/files", "/drills", "/log"):
            assert f'data-running="{number}"' in page.ask(target).text
        stopped = page.ask(f"/act?n={number}", {"csrf": form["csrf"], "kind": "stop"})
        assert stopped.headers["location"].endswith(number)
    finally:
        for pid in _restores(root):
            os.kill(pid, signal.SIGCONT)
    ended_page = page.follow(answer)
    # 1 where the interpreter itself was only starting.
    assert re.search("with exit code (130|1)<|ended by signal 2", ended_page.text), ended_page.text
    assert "It was not carried out whole" in ended_page.text
    assert "data-running" not in page.ask("/files").text
    assert "to be stopped" in page.ask("/log").text
    # Of one that has ended nothing can be stopped, of one that never was neither.
    assert page.act("stop", f"n={number}").status == 200
    assert page.ask("/act?n=77", {"csrf": form["csrf"], "kind": "stop"}).status == 400


def test_snapshots_are_found_by_time_and_stepped_through(page: WebPage, site: Site) -> None:
    """The list begins at a day, or has those of a verdict alone; a path leads to the snapshots beside the one that is shown."""
    path = site.roots[0] / "config.yaml"
    ids = [site.snapshot(), site.snapshot(), site.snapshot()]
    tomorrow = datetime.now().astimezone() + timedelta(days=1)
    for target in ("/snapshots", f"/snapshots?day={tomorrow:%Y-%m-%d}"):
        assert all(f"s={one}" in page.ask(target).text for one in ids)
    assert not any(one in page.ask("/snapshots?day=2020-01-01").text for one in ids)
    assert not any(one in page.ask("/snapshots?verdict=TORN").text for one in ids)
    assert page.ask("/snapshots?day=never").status == 400
    middle = page.ask(f"/files?{place(path, ids[1])}").text
    beside = re.findall(r'href="/files\?s=([^&]*)&amp;[^"]*" rel="(prev|next)"', middle)
    assert beside == [(ids[0], "prev"), (ids[2], "next")]


def test_a_drill_is_started_from_the_page(page: WebPage, site: Site) -> None:
    """Its button runs `ciuic drill`, whose result is on the page of drills."""
    site.snapshot()
    assert "Start a drill" in page.ask("/drills").text
    before = page.ask("/drills").text.count("<tr>")
    assert "Drill is done" in page.act("drill").text
    assert page.ask("/drills").text.count("<tr>") > before


def test_names_are_found_in_all_snapshots(page: WebPage, site: Site) -> None:
    """A search has what is there and what was deleted, each with the snapshot that had it last; a bad pattern is refused."""
    root = site.roots[0]
    (root / "gone.pt").write_text("weights")
    last = site.snapshot()
    (root / "gone.pt").unlink()
    site.snapshot()
    for target in ("/find?pattern=*.pt", "/find?pattern=gone.*&deleted=1"):
        text = page.ask(target).text
        assert href(text, "/files") == f"/files?{place(root / 'gone.pt', last)}"
        assert "deleted</span>" in text
    assert "config.yaml" in page.ask("/find?pattern=config.*").text
    assert "0 paths" in page.ask("/find?pattern=config.*&deleted=1").text
    assert "finds nothing" in page.ask("/find?pattern=/").text
    assert page.ask("/find").status == page.ask("/find?pattern=%FF").status == 200


def test_a_large_plan_is_shown(page: WebPage, site: Site) -> None:
    """Of a plan over many files, those are shown that would change, and how many; one that cannot be shown lets nothing be pressed."""
    root = site.roots[0]
    (root / "many").mkdir()
    for number in range(3000):
        (root / "many" / f"f{number:04}").touch()
    id_ = site.snapshot()
    for number in range(0, 3000, 10):
        (root / "many" / f"f{number:04}").unlink()
    plan = page.follow(page.ask(f"/plan?{place(root, id_)}", {"csrf": page.ask("/").csrf, "dest": ""}))
    assert "<dd>300, 0 B" in plan.text
    assert "and 100 more" in plan.text
    assert "skipped" not in plan.text
    assert "f0010" in plan.text
    number = (
        plan.text
        and page.ask(f"/plan?{place(root / 'many', id_)}", {"csrf": page.ask("/").csrf}).headers["location"]
    )
    other = number.replace("many", "other")
    assert page.ask(other).status == 400


def test_a_training_is_led_to_its_own_checkpoint(short_tmp: Path) -> None:
    """The last good checkpoint of the training's own root is offered, restored with what lies beside it, and undone.

    What is passed over is named in the plan, numbers that are not finite beside the verdict; from the overview, the log and the safety snapshot a way leads to the undo.
    """
    with running_site(short_tmp, "one", "other") as site:
        one, other = site.roots
        whole = FORMATS["safetensors"].make(random.Random(1))
        (one / "step-1.safetensors").write_bytes(whole)
        state = one / "trainer_state.json"
        state.write_text('{"step": 1}')
        good = site.snapshot()
        (one / "step-2.safetensors").write_bytes(whole[:-9])
        state.write_text('{"step": 2}')
        (other / "newer.safetensors").write_bytes(plain_safetensors({"w": np.array([1, np.nan], "f4")}))
        newest = site.snapshot()
        with open_page(site, "--actions") as page:
            watched = page.run("watch", "--name", "mine", "--", "sh", "-c", f"cd {one} && kill -9 $$")
            assert watched.returncode
            until("its incident", lambda: "mine died" in page.ask("/").text)
            until("verdicts", lambda: "step-1.safetensors" in page.ask("/").text)
            until("the mark", lambda: "1 not finite" in page.ask("/").text)
            assert "1 number is not finite" in page.ask(f"/snapshot?s={newest}").text
            shown = page.ask("/").text
            banner = shown.partition("mine died")[2].partition("</section>")[0]
            assert "step-1.safetensors" in banner
            assert "step-2" not in shown
            form = page.ask(href(banner, "/restore"))
            plan = page.follow(page.ask(action(form.text, "/plan"), {"csrf": form.csrf, "dest": ""}))
            assert "step-2.safetensors" in plan.text
            done = page.act("restore", action(plan.text, "/act").partition("?")[2], typed="one")
            assert f"snapshot={good}" in done.text
            assert state.read_text() == '{"step": 1}'
            at = href(page.ask("/").text, "/action")
            assert at == href(page.ask("/log").text, "/action")
            undo = action(page.ask(at).text, "/act").partition("?")[2]
            assert undo in page.ask(f"/snapshot?{undo.partition('&')[0]}").text.replace("&amp;", "&")
            assert "is done" in page.act("undo", undo).text
            assert state.read_text() == '{"step": 2}'
            # A daemon that hangs keeps no page.
            assert site.process is not None
            site.process.send_signal(signal.SIGSTOP)
            for view in ("/", "/alerts", "/drills"):
                assert "does not answer" in page.ask(view).text
            site.process.send_signal(signal.SIGCONT)


def test_a_repository_that_is_gone_is_named(page: WebPage, site: Site) -> None:
    """While the repository's disk is not there, pages say so; they go on when it is back."""
    repository = site.top / "repository"
    repository.rename(site.top / "away")
    for target in ("/", "/snapshots", "/files", f"/versions?{place(site.roots[0])}"):
        answer = page.ask(target)
        assert "internal error" not in answer.text
        assert "there is no repository" in answer.text
        assert answer.status in (404, 503)
    (site.top / "away").rename(repository)
    assert page.ask("/snapshots").status == 200


def test_what_cannot_be_read_is_told(page: WebPage, site: Site) -> None:
    """A snapshot whose file is damaged is named beside the versions, which are those of the others; it is not passed over in silence."""
    file = site.roots[0] / "config.yaml"
    assert "could be read" not in page.ask(f"/versions?{place(file)}").text
    newest = page.run("list", "--machine-readable").stdout.partition("|")[0]
    stored = site.top / "repository/snapshots" / newest
    data = stored.read_bytes()
    id_ = site.snapshot()
    stored = site.top / "repository/snapshots" / id_
    whole = stored.read_bytes()
    stored.write_bytes(data[:-1])
    answer = page.ask(f"/versions?{place(file)}")
    stored.write_bytes(whole)
    assert "Not everything could be read" in answer.text
    assert id_ in answer.text
    assert "Look" in answer.text
