"""Log events of the repository. structlog is imported when there is something to say: most commands never do.

``sink`` takes the events instead where it is set: the command line keeps stdout for results and says what matters itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

sink: Callable[[str, Mapping[str, object]], None] | None = None
"""Called with event and fields."""


def warning(event: str, **fields: object) -> None:
    """Something is not as it should be, and was dealt with."""
    if sink is not None:
        sink(event, fields)
        return
    import structlog

    structlog.get_logger("ciuic.repository").warning(event, **fields)


def info(event: str, **fields: object) -> None:
    """Something that an operator may want to know afterwards."""
    if sink is not None:
        sink(event, fields)
        return
    import structlog

    structlog.get_logger("ciuic.repository").info(event, **fields)
