"""Tables as aligned text and as HTML.

Guarantees: a cell is one line of one_line characters, whatever a repository contains, so that no name can
drive a terminal; in HTML every cell is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence
from typing import Final

from ciuic.printable import one_line

MAX_ROWS: Final = 60
"""Rows that are shown; a table of all snapshots of a long run would fill a notebook."""
_MAX_CELL: Final = 60

Row = Sequence[str]


def aligned_text(headers: Row, rows: Sequence[Row], numeric: Collection[str], rest: str) -> str:
    """Return a table of columns with two spaces between them.

    Args:
        headers: Headers of the columns.
        rows: Cells by row.
        numeric: Headers of the columns that are aligned to the right.
        rest: What the rows are that are left out after `MAX_ROWS`, for example ``earlier``.
    """
    lines = [list(headers), *(_cells(row) for row in rows[:MAX_ROWS])]
    widths = [max(len(line[at]) for line in lines) for at in range(len(headers))]
    text = [
        "  ".join(
            cell.rjust(width) if header in numeric else cell.ljust(width)
            for cell, width, header in zip(line, widths, headers, strict=True)
        ).rstrip()
        for line in lines
    ]
    return "\n".join([*text, *_left_out(rows, rest)])


def html_table(headers: Row, rows: Sequence[Row], numeric: Collection[str], rest: str) -> str:
    """Return the same as `aligned_text`, as an HTML table for notebooks."""

    def line(kind: str, cells: Row) -> str:
        styled = (
            f"<{kind}{_RIGHT if header in numeric else _LEFT}>{html.escape(cell)}</{kind}>"
            for cell, header in zip(cells, headers, strict=True)
        )
        return f"<tr>{''.join(styled)}</tr>"

    body = "".join(line("td", _cells(row)) for row in rows[:MAX_ROWS])
    after = "".join(f"<p>{html.escape(text)}</p>" for text in _left_out(rows, rest))
    return f"<table><thead>{line('th', headers)}</thead><tbody>{body}</tbody></table>{after}"


_RIGHT: Final = ' style="text-align:right"'
_LEFT: Final = ' style="text-align:left"'


def _cells(row: Row) -> list[str]:
    cells = [one_line(cell) for cell in row]
    return [cell if len(cell) <= _MAX_CELL else f"{cell[: _MAX_CELL - 1]}…" for cell in cells]


def _left_out(rows: Sequence[Row], rest: str) -> list[str]:
    return [f"… and {len(rows) - MAX_ROWS} {rest}"] if len(rows) > MAX_ROWS else []
