"""DeepSpeed: ``latest`` names the directory of the newest checkpoint, which has files of every rank.

References:
    https://deepspeed.readthedocs.io/en/latest/model-checkpointing.html
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from ciuic.units import plural
from ciuic.verdicts.directories.parts import PartsNeeded, document_of, shown_name
from ciuic.verdicts.model import NotJudged, TornContent
from ciuic.verdicts.sources import DirectorySource

_LATEST: Final = b"latest"
_MODEL: Final = re.compile(rb"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt\Z")
_OPTIMIZER: Final = re.compile(
    rb"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt\Z"
)


def recognise(directory: DirectorySource, names: list[bytes]) -> Iterator[PartsNeeded]:
    """Yield the checkpoint that ``latest`` names."""
    if _LATEST not in names:
        return
    taken = frozenset({_LATEST})
    try:
        tag = (document_of(directory, _LATEST, "the file latest") or b"").strip()
    except NotJudged:
        return
    except TornContent as error:
        yield PartsNeeded("deepspeed", _LATEST, torn=str(error), taken=taken)
        return
    # A file that happens to have this name, and is no tag.
    if b"/" in tag or b"\n" in tag or len(tag) > 255 or tag in (b".", b".."):
        return
    below = directory.directory(tag)
    if below is None:
        reason = f"latest names {shown_name(tag)}, which is not there"
        yield PartsNeeded("deepspeed", _LATEST, torn=reason, taken=taken)
        return
    yield _parts(below, tag, taken)


def _parts(below: DirectorySource, tag: bytes, taken: frozenset[bytes]) -> PartsNeeded:
    inside = below.names()
    files = [name for name in inside if _MODEL.match(name) or _OPTIMIZER.match(name)]
    torn = "" if files else f"{shown_name(tag)} has no states of ranks"
    ranks = {(int(found[1]), int(found[2])) for name in files if (found := _OPTIMIZER.match(name))}
    lacking = _lacking(ranks)
    if lacking:
        torn = f"the states of {plural(len(lacking), 'rank')} are missing"
    relative = tuple(tag + b"/" + name for name in files)
    return PartsNeeded("deepspeed", tag, relative, torn=torn, taken=taken.union((tag,)))


def _lacking(ranks: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the ranks of a full rectangle (data parallel by model parallel) that are not there, one at most for each that is."""
    if not ranks:
        return set()
    width = max(rank for rank, _ in ranks) + 1
    height = max(rank for _, rank in ranks) + 1
    # Numbers in names are a user's: the rectangle is not built.
    if width * height > 4 * len(ranks):
        return {(width, height)}
    return {(x, y) for x in range(width) for y in range(height)} - ranks
