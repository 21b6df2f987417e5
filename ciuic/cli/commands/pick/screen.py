"""The screen of ``ciuic pick``: names on the left, versions on the right, a preview below; and the dialog of a restore.

Guarantees: the screen waits for nothing: what it shows comes from the thread of `Reader`. A list shows the lines that are in view and
makes no others, so that its length does not matter. No text is read as markup.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar, Final

from rich.segment import Segment
from rich.style import Style
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal, Vertical
from textual.events import Resize
from textual.geometry import Size
from textual.message import Message
from textual.screen import ModalScreen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.timer import Timer
from textual.widgets import Input, Static

from ciuic.cli import INTERRUPTED
from ciuic.cli.commands.pick import answers
from ciuic.cli.commands.pick.answers import STATE_STYLES, Line, Node, Version, kind_of, size_of
from ciuic.cli.commands.pick.reader import Answer, Place, Reader
from ciuic.cli.commands.pick.restoring import Done, Order, ProgressLine, copied, plan, restored
from ciuic.cli.shared import times
from ciuic.cli.shared.messages import shown, shown_text, wrapped_to
from ciuic.cli.shared.progress import LineReporter
from ciuic.errors import CiuicError, Partial
from ciuic.repository.lookup import is_within
from ciuic.system.shell_quoting import word
from ciuic.units import human_size

_REST_SECONDS: Final = 0.12
"""Time for which the cursor rests on a line before the repository is asked about it."""
_SPINNER: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_SPIN_SECONDS: Final = 0.1
_WIDE: Final = 90
"""Columns from which names and versions stand side by side."""
_KEYS: Final = (
    ("enter", "look"),
    ("/", "filter"),
    ("r", "restore"),
    ("space", "mark"),
    ("d", "diff"),
    ("n", "now"),
    ("c", "copy"),
    ("y", "command"),
    ("q", "quit"),
)
_KEYS_IN_SHORT: Final = "/ filter r restore spc mark d diff n now c copy y cmd q quit"
"""The same for 60 columns."""
_CHANGE_STYLES: Final = {"added": "green", "gone": "bold red", "retyped": "magenta", "changed": "yellow"}


class Rows(ScrollView, can_focus=True):
    """List with a cursor, or without one a text, of which the lines in view are made.

    Args:
        draw: Returns the parts of a line for an item.
        has_cursor: False for a text, which scrolls.
        id: Name of the widget.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home,g", "end(0)", show=False),
        Binding("end,G", "end(1)", show=False),
        Binding("left,h", "sideways(-1)", show=False),
        Binding("right,l", "sideways(1)", show=False),
        Binding("enter", "choose", show=False),
    ]

    class Moved(Message):
        """The cursor is on another item."""

        def __init__(self, rows: Rows) -> None:
            super().__init__()
            self.rows = rows

        @property
        def control(self) -> Rows:
            """The list."""
            return self.rows

    class Chosen(Moved):
        """Enter was pressed on the item."""

    class Sideways(Moved):
        """An arrow to the left (-1) or right (1) was pressed on the item."""

        def __init__(self, rows: Rows, step: int) -> None:
            super().__init__(rows)
            self.step = step

    def __init__(self, draw: Callable[[Any], list[Line]], *, has_cursor: bool = True, id: str) -> None:
        super().__init__(id=id)
        self._draw = draw
        self._has_cursor = has_cursor
        self.items: list[Any] = []
        self.cursor = 0

    @property
    def item(self) -> Any:
        """The item at the cursor; None in an empty list."""
        return self.items[self.cursor] if self.cursor < len(self.items) else None

    def replace(self, items: list[Any], cursor: int = 0) -> None:
        """Show other items."""
        self.items = items
        self.cursor = min(cursor, max(0, len(items) - 1))
        self.resized()
        if self._has_cursor:
            self._follow()
        else:
            self.scroll_to(0, 0, animate=False)

    def resized(self) -> None:
        """Show the items as they are now."""
        width = self.size.width
        if not self._has_cursor:
            width = max((len(part.text) for item in self.items for part in self._draw(item)), default=0)
        self.virtual_size = Size(width, len(self.items))
        self.refresh()

    def on_resize(self, event: Resize) -> None:
        """Fit the lines to the new width."""
        self.resized()
        if self._has_cursor:
            self._follow()

    def render_line(self, y: int) -> Strip:
        """Return a line of the screen."""
        scroll_x, scroll_y = self.scroll_offset
        at = y + scroll_y
        base = self.rich_style
        if at >= len(self.items):
            return Strip.blank(self.size.width, base)
        is_here = self._has_cursor and at == self.cursor
        if is_here:
            # In the list that has not the focus the place stays visible.
            base += Style(reverse=True) if self.has_focus else Style(underline=True, bold=True)
        parts = [Segment(text, base + Style.parse(style)) for text, style in self._draw(self.items[at])]
        strip = Strip(parts)
        width = self.size.width
        if strip.cell_length > width and self._has_cursor:
            strip = Strip([*strip.crop(0, width - 1), Segment("…", base)])
        return strip.crop_extend(scroll_x, scroll_x + width, base)

    def move_to(self, at: int) -> None:
        """Put the cursor on an item."""
        at = max(0, min(at, len(self.items) - 1))
        if at != self.cursor:
            self.cursor = at
            self.refresh()
            self.post_message(self.Moved(self))
        self._follow()

    def _follow(self) -> None:
        top, height = self.scroll_offset.y, max(1, self.size.height)
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False)
        elif self.cursor >= top + height:
            self.scroll_to(y=self.cursor - height + 1, animate=False)

    def action_move(self, step: int) -> None:
        """Move by a line."""
        if self._has_cursor:
            self.move_to(self.cursor + step)
        else:
            self.scroll_to(y=self.scroll_offset.y + step, animate=False)

    def action_page(self, step: int) -> None:
        """Move by a page."""
        self.action_move(step * max(1, self.size.height - 1))

    def action_end(self, last: int) -> None:
        """Move to the beginning or the end."""
        if self._has_cursor:
            self.move_to(len(self.items) - 1 if last else 0)
        else:
            self.scroll_to(y=len(self.items) if last else 0, animate=False)

    def action_sideways(self, step: int) -> None:
        """Scroll a text sideways; in a list say that the arrow was pressed."""
        if self._has_cursor:
            self.post_message(self.Sideways(self, step))
        else:
            self.scroll_to(x=self.scroll_offset.x + 8 * step, animate=False)

    def action_choose(self) -> None:
        """Say that the item was chosen."""
        if self.item is not None:
            self.post_message(self.Chosen(self))


def _node_line(item: Node | Line) -> list[Line]:
    if isinstance(item, Line):
        return [item]
    sign = ("▾ " if item.is_open else "▸ ") if item.entry.is_dir else "  "
    style = "red" if item.is_gone else "bold" if item.entry.is_dir else ""
    size = "" if item.entry.is_symlink else f"  {human_size(item.size_bytes)}"
    gone = "  GONE" if item.is_gone else ""
    name = f"{'  ' * item.depth}{sign}{item.name}{kind_of(item.entry)}"
    return [Line(name, style), Line(size, "dim"), Line(gone, "bold red")]


def _version_line(item: Version | Line) -> list[Line]:
    if isinstance(item, Line):
        return [item]
    found = item.found
    entry = found.entry
    what = "GONE" if entry is None else ", ".join(found.details) or found.kind
    size = "" if entry is None else human_size(size_of(entry))
    verdict = (
        [] if item.verdict is None else [Line(f"  {item.verdict.state}", STATE_STYLES[item.verdict.state])]
    )
    return [
        Line("● " if item.is_marked else "  ", "bold cyan"),
        Line(times.clock(item.snapshot.time_ns)),
        Line(f"  {item.snapshot.id}", "bold"),
        Line(f" {size:>9}"),
        *verdict,
        Line(f"  {what}", _CHANGE_STYLES[found.kind]),
        *([Line("  safety", "cyan")] if item.snapshot.is_safety else []),
    ]


def _line(item: Line) -> list[Line]:
    return [item]


class Told(Message):
    """The reader has an answer."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer


class RestoreScreen(ModalScreen[None]):
    """Dialog of a restore: to where, the plan, yes or no, progress, and what became of it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", show=False),
        Binding("i", "in_place", show=False),
        Binding("b", "beside", show=False),
        Binding("y", "yes", show=False),
        Binding("n", "leave", show=False),
        Binding("q", "leave", show=False),
    ]

    def __init__(self, picker: Picker, version: Version) -> None:
        super().__init__()
        self._picker = picker
        self._version = version
        self.stage = "where"
        """``where``, ``plan`` (asked for), ``confirm``, ``running``, ``done``."""
        self._order: Order | None = None
        self._lines: list[str] = []
        """Lines that the restore has printed so far."""

    def compose(self) -> ComposeResult:
        """Make the dialog."""
        with Vertical(id="dialog"):
            yield Static(markup=False, id="restore-title")
            yield Rows(_line, has_cursor=False, id="plan")
            yield Input(id="dest", select_on_focus=False)
            yield Static(markup=False, id="restore-progress")
            yield Static(markup=False, id="restore-keys")

    def on_mount(self) -> None:
        """Ask to where."""
        snapshot = self._version.snapshot
        self.query_one("#restore-title", Static).update(
            f"restore {shown(self._version.path)} as in {snapshot.id} ({times.clock(snapshot.time_ns)})"
        )
        self.query_one("#dest", Input).display = False
        self._say("i in place, over what is there now   b beside it, into another directory   esc leave")
        self.query_one("#plan", Rows).focus()

    def _say(self, keys: str) -> None:
        self.query_one("#restore-keys", Static).update(keys)

    def action_in_place(self) -> None:
        """Plan a restore over what is there."""
        if self.stage == "where":
            self._plan(None)

    def action_beside(self) -> None:
        """Ask for the directory."""
        if self.stage == "where":
            field = self.query_one("#dest", Input)
            field.value = os.path.join(os.getcwd(), "restored")
            field.display = True
            field.focus()
            self._say("enter plan   esc leave")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Plan a restore into the directory."""
        if self.stage == "where" and event.value:
            self._plan(os.fsencode(os.path.abspath(os.path.expanduser(event.value))))

    def _plan(self, dest: bytes | None) -> None:
        self.query_one("#dest", Input).display = False
        self.query_one("#plan", Rows).focus()
        self._order = order = Order(self._version.snapshot.id, self._version.path, dest)
        self._picker.command = order.words()
        self.stage = "plan"
        self._say("looking what would be done …   esc leave")
        session = self._picker.reader.session
        self._picker.reader.ask("plan", lambda question: plan(session, order))

    def action_yes(self) -> None:
        """Restore."""
        order = self._order
        if self.stage != "confirm" or order is None:
            return
        self.stage = "running"
        # Whatever ends the program before the restore ends it, too.
        self._picker.exit_status = INTERRUPTED
        self._lines = []
        self.query_one("#plan", Rows).replace([])
        self._say("restoring …   q twice leaves it cut short: it can be run again")
        session = self._picker.reader.session
        self._picker.reader.ask("restore", lambda question: restored(session, order, self._picker.reporter))

    def action_leave(self) -> None:
        """Close the dialog; while the restore runs, the program if asked twice."""
        if self.stage == "running":
            self._picker.leave_restore()
            return
        self._picker.reader.drop("plan")
        self.dismiss()

    def progress(self, text: str) -> None:
        """Show the progress."""
        self.query_one("#restore-progress", Static).update(text)

    def take(self, answer: Answer) -> None:
        """Show the plan, or what became of the restore."""
        rows = self.query_one("#plan", Rows)
        lines = [item for item in answer.items if isinstance(item, str)]
        code = next((item.code for item in answer.items if isinstance(item, Done)), None)
        width = max(20, self.size.width - 8)
        self._lines += lines
        shown_lines = [*rows.items]
        shown_lines += [Line(part) for line in lines for part in wrapped_to(line, 2, width)]
        if answer.error is not None:
            shown_lines += [Line(part, "red") for part in _told(answer.error, width)]
        rows.replace(shown_lines)
        if not answer.is_last:
            return
        self.progress("")
        is_over = answer.kind == "restore"
        self._picker.exit_status = 0
        if not is_over and answer.error is None:
            self.stage = "confirm"
            # The sums stand below the names, of which there may be many.
            rows.scroll_to(y=len(rows.items), animate=False)
            self._say("y restore now   n, esc leave")
            return
        self.stage = "done"
        if is_over and code in (0, Partial.exit_code):
            undo = any("ciuic undo" in line for line in self._lines)
            rows.replace(
                [*rows.items, Line("done" + ("; ciuic undo takes it back" if undo else ""), "bold green")]
            )
        self._say("esc close")


def _told(error: Exception, width: int) -> list[str]:
    """Return the lines of an error."""
    message = error.message if isinstance(error, CiuicError) else str(error) or type(error).__name__
    hint = error.hint if isinstance(error, CiuicError) else ""
    lines = [shown_text(line) for text in (message, hint) if text for line in text.split("\n")]
    return [part for line in lines for part in wrapped_to(line, 2, width)]


class Picker(App[None]):
    """The program on the screen.

    Args:
        reader: Thread that reads; not yet started.
        path: Path to begin with; None for the roots.
        cwd: Directory into which files are copied.
    """

    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (_WIDE, "-wide")]  # noqa: RUF012 as the base class has it
    CSS = """
    Screen { layout: vertical; }
    #title { height: 1; text-style: bold; }
    #upper { height: 3fr; }
    #upper > Container { width: 2fr; border: round ansi_bright_black; }
    #upper > Container:focus-within, #lower:focus-within { border: round ansi_blue; }
    #upper > #right { width: 3fr; }
    .-narrow #upper { layout: vertical; }
    .-narrow #upper > Container, .-narrow #upper > #right { width: 100%; height: 1fr; }
    #lower { height: 2fr; border: round ansi_bright_black; }
    Rows { height: 1fr; background: ansi_default; scrollbar-size-vertical: 1; overflow-x: hidden; }
    #preview, #plan { overflow-x: auto; scrollbar-size-horizontal: 0; }
    #heading { height: 1; text-style: bold; }
    #filter { display: none; height: 1; border: none; }
    #status, #keys { height: 1; }
    #keys { color: ansi_bright_black; }
    RestoreScreen { align: center middle; }
    #dialog { width: 94%; height: 80%; border: round ansi_blue; background: ansi_default; padding: 0 1; }
    #restore-title { height: auto; text-style: bold; }
    #dest { height: 1; border: none; }
    #restore-progress { height: 1; }
    #restore-keys { height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "leave", show=False, priority=False),
        Binding("slash", "filter", show=False),
        Binding("escape", "leave_list", show=False),
        Binding("r", "restore", show=False),
        Binding("space", "mark", show=False),
        Binding("d", "difference", show=False),
        Binding("n", "now", show=False),
        Binding("c", "copy", show=False),
        Binding("y", "command", show=False),
    ]

    def __init__(self, reader: Reader, path: bytes | None, cwd: bytes) -> None:
        # The colours of the terminal: they are readable on its background, and it may have only 16.
        super().__init__(ansi_color=True)
        self.theme = "ansi-dark"
        self.names: Final = Rows(_node_line, id="names")
        self.versions: Final = Rows(_version_line, id="versions")
        """Versions of the name at the cursor."""
        self._preview: Final = Rows(_line, has_cursor=False, id="preview")
        self._field: Final = Input(id="filter", placeholder="part of a name; enter searches everywhere")
        self._title: Final = Static("ciuic pick", markup=False, id="title")
        self._heading: Final = Static(markup=False, id="heading")
        self._status: Final = Static(markup=False, id="status")
        self._keys: Final = Static(markup=False, id="keys")
        self.reader = reader
        self.failure: Exception | None = None
        """Why the repository could not be opened."""
        self.exit_status = 0
        self.printed: list[str] = []
        """Command lines that were asked for, to be printed at the end."""
        self.command: list[str | bytes] = []
        """Words of the command that does what is on the screen."""
        self._path = path
        """Path that is being opened, a directory at a time."""
        self._place: Place | None = None
        """Root of that path; None for any that has it."""
        self._cwd = cwd
        self._roots: list[Node] = []
        self._tree: list[Any] = []
        """Lines of the tree, while a filter shows a part of them."""
        self._is_filtered = False
        self._opening: dict[str, Node] = {}
        """Directories whose names are still arriving, by the kind of the question."""
        self._shown: Any = None
        """Item of the names whose versions are shown, or asked for."""
        self._now = False
        self._rest: Timer | None = None
        self._frame = 0
        self._message = ""
        self._leaving = 0

    def compose(self) -> ComposeResult:
        """Make the screen."""
        yield self._title
        with Horizontal(id="upper"):
            with Container():
                yield self.names
                yield self._field
            with Container(id="right"):
                yield self.versions
        with Vertical(id="lower"):
            yield self._heading
            yield self._preview
        yield self._status
        yield self._keys

    def on_mount(self) -> None:
        """Begin to read."""
        self.reader.tell = self._tell
        self.set_interval(_SPIN_SECONDS, self._spin)
        self.names.focus()
        session, path = self.reader.session, self._path
        self.reader.ask("open", lambda question: answers.opened(session, path))
        self._show_keys()

    def _tell(self, answer: Answer) -> None:
        # From the reader's thread. After the end there is nobody to tell.
        self.post_message(Told(answer))

    def on_resize(self, event: Resize) -> None:
        """Fit the line of the keys."""
        self._show_keys()

    def _show_keys(self) -> None:
        text = "  ".join(f"{key} {does}" for key, does in _KEYS)
        if len(text) > self.size.width:
            text = _KEYS_IN_SHORT
        self._keys.update(text[: self.size.width])

    def _spin(self) -> None:
        self._frame += 1
        self._show_status()

    def _show_status(self) -> None:
        busy = f"{_SPINNER[self._frame % len(_SPINNER)]} reading …  " if self.reader.is_busy else ""
        self._status.update(busy + self._message)

    def say(self, text: str) -> None:
        """Show a message on the last line but one."""
        self._message = text
        self._show_status()

    # Answers.

    def on_told(self, event: Told) -> None:
        """Show an answer."""
        answer = event.answer
        if not self.reader.is_current(answer):
            return
        if answer.is_last:
            self.reader.is_done(answer)
        if answer.kind in ("plan", "restore"):
            if isinstance(self.screen, RestoreScreen):
                self.screen.take(answer)
        else:
            getattr(self, f"_take_{answer.kind.split()[0]}")(answer)
        if answer.error is not None and answer.kind not in ("plan", "restore", "open", "copy"):
            self.say("; ".join(_told(answer.error, 400)))
        self._show_status()

    def _take_open(self, answer: Answer) -> None:
        if answer.error is not None:
            self.failure = answer.error
            self.exit()
            return
        for opened in answer.items:
            self._roots = opened.nodes
            self._path = opened.path
            self._title.update(f"ciuic pick  {opened.title}")
            self.names.replace(list(opened.nodes))
            if opened.said:
                self.say(" ".join(opened.said))
            self._go_on()

    def _go_on(self) -> None:
        """Open what leads to the path to begin with, one directory at a time."""
        rows, path = self.names, self._path
        nodes = [node for node in rows.items if isinstance(node, Node)]
        if path is None:
            if len(nodes) == 1:
                self._open(nodes[0])
            self._rested()
            return
        leading = [node for node in nodes if is_within(path, node.path) and self._place in (None, node.place)]
        if not leading:
            return
        at = max(leading, key=lambda node: len(node.path))
        rows.move_to(rows.items.index(at))
        if at.path == path or not at.entry.is_dir or at.is_open:
            if at.path != path:
                self.say(f"no snapshot has {shown(path)}")
            self._path = self._place = None
            self._rested()
            return
        self._open(at)

    def _open(self, node: Node) -> None:
        node.is_open = True
        kind = f"children {id(node)}"
        self._opening[kind] = node
        self.reader.ask(kind, lambda question: answers.children(question, node))
        self.names.refresh()

    def _close(self, node: Node) -> None:
        for kind, one in list(self._opening.items()):
            if answers.is_below(one, node):
                self.reader.drop(kind)
                del self._opening[kind]
        node.is_open = False
        at = self.names.items.index(node) + 1
        stop = self._end_of(self.names.items, at, node.depth)
        kept = self.names.cursor
        del self.names.items[at:stop]
        self.names.cursor = kept if kept < at else at - 1 if kept < stop else kept - (stop - at)
        self.names.resized()

    @staticmethod
    def _end_of(items: list[Any], at: int, depth: int) -> int:
        """Return where what is below a directory of this depth ends."""
        while at < len(items) and (not isinstance(items[at], Node) or items[at].depth > depth):
            at += 1
        return at

    def _take_children(self, answer: Answer) -> None:
        node = self._opening[answer.kind]
        rows = self.names
        items = self._tree if self._is_filtered else rows.items
        at = self._end_of(items, items.index(node) + 1, node.depth)
        items[at:at] = answer.items
        if not self._is_filtered:
            if at <= rows.cursor:
                rows.cursor += len(answer.items)
            rows.resized()
        if answer.is_last:
            del self._opening[answer.kind]
            if self._path is not None and not self._opening:
                self._go_on()

    def _take_search(self, answer: Answer) -> None:
        self.names.items += answer.items
        self.names.resized()
        if answer.is_last and not self.names.items:
            self.say("nothing found")
        if len(self.names.items) == len(answer.items):
            self._rested()

    def _take_versions(self, answer: Answer) -> None:
        rows = self.versions
        was_empty = not rows.items
        rows.items += answer.items
        rows.resized()
        if was_empty and rows.items:
            self._look()
        if answer.is_last and not rows.items and answer.error is None:
            self._preview.replace([])
        if answer.is_last:
            found = [row for row in rows.items if isinstance(row, Version)]
            session = self.reader.session
            self.reader.ask(
                "verdicts",
                lambda question: answers.verdicts_of(question, found, session.checkpoint_patterns),
            )

    def _take_verdicts(self, answer: Answer) -> None:
        for version, verdict in answer.items:
            version.verdict = verdict
        self.versions.refresh()
        self._show_heading()

    def _take_preview(self, answer: Answer) -> None:
        self._preview.items += answer.items
        self._preview.resized()

    def _take_copy(self, answer: Answer) -> None:
        lines = [item for item in answer.items if isinstance(item, str)]
        if answer.error is not None:
            lines += _told(answer.error, 400)
        self.say("; ".join(line.strip() for line in lines))

    # The lists.

    def on_rows_moved(self, event: Rows.Moved) -> None:
        """Look at the item when the cursor rests."""
        if event.rows.id == "names":
            self._after_rest(self._rested)
        elif event.rows.id == "versions":
            self._now = False
            self._after_rest(self._look)

    def _after_rest(self, look: Callable[[], None]) -> None:
        if self._rest is not None:
            self._rest.stop()
        self._rest = self.set_timer(_REST_SECONDS, look)

    def _rested(self) -> None:
        """Ask for the versions of the name at the cursor, unless they are shown."""
        if self._rest is not None:
            self._rest.stop()
        node = self.names.item
        if node is not None and node is self._shown:
            return
        self._shown = node
        for kind in ("verdicts", "preview"):
            self.reader.drop(kind)
        self.versions.replace([])
        self._preview.replace([])
        self._show_heading()
        if isinstance(node, Node):
            self.command = ["history", node.path]
            self.reader.ask("versions", lambda question: answers.versions_of(question, node))

    def _look(self) -> None:
        """Ask for the preview of the version at the cursor."""
        version = self.versions.item
        self._preview.replace([])
        self._show_heading()
        if isinstance(version, Version):
            now, found = self._now, version.found
            if found.entry is not None:
                self.command = Order(version.snapshot.id, version.path, None).words()
            if now:
                self.command = ["diff", str(version.snapshot.id), "-p", version.path]
            self.reader.ask("preview", lambda question: answers.preview(question, version, now))

    def _show_heading(self, text: str = "") -> None:
        node, version = self.names.item, self.versions.item
        if not text and isinstance(version, Version):
            verdict = version.verdict
            judged = "" if verdict is None else f"  {verdict.state}: {shown_text(verdict.reason)}"
            text = f"{version.snapshot.id}  {shown(version.path)}{judged}"
        elif not text and isinstance(node, Node):
            text = shown(node.path)
        self._heading.update(text)

    def on_rows_chosen(self, event: Rows.Chosen) -> None:
        """Open a directory, or go on to the versions; from a version to its preview."""
        item = event.rows.item
        if event.rows.id == "names" and isinstance(item, Node):
            self._rested()
            if item.entry.is_dir and not self._is_filtered and not item.is_open:
                self._open(item)
            else:
                self.versions.focus()
        elif event.rows.id == "versions":
            self._preview.focus()

    def on_rows_sideways(self, event: Rows.Sideways) -> None:
        """Open and close directories, and go from list to list."""
        item = event.rows.item
        if event.rows.id == "versions":
            (self.names if event.step < 0 else self._preview).focus()
            return
        if event.rows.id != "names" or not isinstance(item, Node):
            return
        if event.step > 0:
            if item.entry.is_dir and not item.is_open and not self._is_filtered:
                self._open(item)
            else:
                self.versions.focus()
        elif item.is_open and not self._is_filtered:
            self._close(item)
        else:
            self._to_parent(item)

    def _to_parent(self, node: Node) -> None:
        rows = self.names
        for at in range(rows.cursor - 1, -1, -1):
            one = rows.items[at]
            if isinstance(one, Node) and one.depth < node.depth:
                rows.move_to(at)
                return

    # The filter.

    def action_filter(self) -> None:
        """Ask for a part of a name."""
        field = self._field
        field.display = True
        field.value = ""
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Show the lines of the tree that have the text."""
        if event.input.id != "filter" or not event.input.display:
            return
        self.reader.drop("search")
        self._filter()
        if not event.value:
            self._unfilter()
            return
        self.names.replace(list(answers.named(self._tree, event.value)))
        self._after_rest(self._rested)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Search for the text in all roots and all snapshots."""
        if event.input.id != "filter":
            return
        if not event.value:
            self.action_leave_list()
            return
        self._filter()
        self.names.replace([])
        self._rested()
        self.names.focus()
        self.say(f"names with {shown_text(event.value)} in all snapshots; esc shows the tree again")
        roots, text = self._roots, event.value
        self.reader.ask("search", lambda question: answers.searched(question, roots, text))

    def _filter(self) -> None:
        if not self._is_filtered:
            self._tree = self.names.items
            self._is_filtered = True

    def _unfilter(self) -> None:
        """Show the tree again, with the cursor on the name that was found."""
        if not self._is_filtered:
            return
        node = self.names.item
        self._is_filtered = False
        at = next((at for at, one in enumerate(self._tree) if one is node), 0)
        self.names.replace(self._tree, at)
        self._tree = []
        if isinstance(node, Node) and self.names.item is not node:
            # Found by a search: the directories that lead to it are opened.
            self._path, self._place = node.path, node.place
            self._go_on()
        else:
            self._rested()

    def action_leave_list(self) -> None:
        """Leave the filter, or the list for the one before it."""
        field = self._field
        if field.display:
            field.display = False
            self.reader.drop("search")
            self.say("")
            self._unfilter()
            self.names.focus()
        elif self._is_filtered:
            self._unfilter()
        elif self._preview.has_focus:
            self.versions.focus()
        else:
            self.names.focus()

    # What is done.

    def _version(self) -> Version | None:
        """The version at the cursor, if it has something to restore; says so if not."""
        version = self.versions.item
        if not isinstance(version, Version):
            self.say("choose a name first, and a version of it")
            return None
        if version.found.entry is None:
            self.say("GONE there: choose a version below it")
            return None
        return version

    def action_restore(self) -> None:
        """Ask to where the version is restored."""
        version = self._version()
        if version is not None:
            self.push_screen(RestoreScreen(self, version))

    def action_mark(self) -> None:
        """Mark the version at the cursor, or take its mark away; two have one."""
        version = self.versions.item
        if not isinstance(version, Version):
            return
        version.is_marked = not version.is_marked
        marked = [one for one in self.versions.items if isinstance(one, Version) and one.is_marked]
        if len(marked) > 2:
            next(one for one in marked if one is not version).is_marked = False
        self.versions.refresh()

    def action_difference(self) -> None:
        """Show how two marked versions differ; with one mark, that one and the one at the cursor; with none, from the one before."""
        found = [one for one in self.versions.items if isinstance(one, Version)]
        chosen = [one for one in found if one.is_marked]
        here = self.versions.item
        if len(chosen) < 2 and isinstance(here, Version) and here not in chosen:
            chosen.append(here)
        if len(chosen) == 1:
            chosen += found[found.index(chosen[0]) + 1 :][:1]
        if len(chosen) < 2:
            self.say("there is no other version to compare with: mark two with the space bar")
            return
        new, old = sorted(chosen, key=found.index)
        self.command = ["diff", str(old.snapshot.id), str(new.snapshot.id), "-p", new.path]
        self._preview.replace([])
        self._show_heading(f"{shown(new.path)}  {old.snapshot.id} → {new.snapshot.id}")
        self.reader.ask("preview", lambda question: answers.difference(question, old, new))

    def action_now(self) -> None:
        """Compare the version with the disk as it is now, or with the version before again."""
        if self._version() is not None:
            self._now = not self._now
            self._look()

    def action_copy(self) -> None:
        """Copy the file into the current directory, where nothing has its name."""
        version = self._version()
        if version is None:
            return
        if version.found.entry is not None and version.found.entry.is_dir:
            self.say("c copies one file; r restores a directory, also beside")
            return
        order = Order(version.snapshot.id, version.path, self._cwd)
        self.command = order.words()
        session = self.reader.session
        self.reader.ask("copy", lambda question: copied(session, order))

    def action_command(self) -> None:
        """Show the command line that does what is on the screen, and print it at the end."""
        if not self.command:
            self.say("nothing is chosen")
            return
        line = " ".join(word(os.fsencode(one)) for one in (*self._program(), *self.command))
        if line not in self.printed:
            self.printed.append(line)
        self.copy_to_clipboard(line)
        self._preview.replace(
            [Line(part, "bold") for part in wrapped_to(line, 2, max(20, self.size.width - 4))]
        )
        self._show_heading("the same as a command, which is printed at the end as well:")

    def _program(self) -> list[str]:
        session = self.reader.session
        words = ["ciuic"]
        if session.names_repository:
            words += ["--repo", session.place]
        if session.as_host is not None:
            words += ["--as-host", session.as_host]
        return words

    def reporter(self, task: str) -> LineReporter:
        """Return what shows the progress of a restore in its dialog. Called in the reader's thread."""

        def show(line: LineReporter, elapsed_seconds: float) -> None:
            self.post_message(Progressed(line, elapsed_seconds))

        return ProgressLine(task, show)

    def on_progressed(self, event: Progressed) -> None:
        """Show the progress of a restore."""
        if isinstance(self.screen, RestoreScreen):
            self.screen.progress(event.line.line(event.elapsed_seconds, max(10, self.size.width - 8)))

    def leave_restore(self) -> None:
        """Leave while a restore runs, if asked twice: it is cut short as by a signal."""
        self._leaving += 1
        if self._leaving > 1:
            self.exit()

    def action_leave(self) -> None:
        """End the program."""
        if isinstance(self.screen, RestoreScreen):
            self.screen.action_leave()
        else:
            self.exit()


class Progressed(Message):
    """A restore has gone on."""

    def __init__(self, line: LineReporter, elapsed_seconds: float) -> None:
        super().__init__()
        self.line = line
        self.elapsed_seconds = elapsed_seconds
