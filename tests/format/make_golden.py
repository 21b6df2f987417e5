"""Make the golden repository of a new format version.

Run once, commit the result, and never run again for that version:

    python tests/format/make_golden.py tests/format/golden-<version>

Version 3 and later have an identity (`golden_recipe.IDENTITY`); earlier ones a random seed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import golden_recipe as recipe

from ciuic.repository import Repository
from ciuic.repository.index_database import INDEX_NAME, discard
from ciuic.types import SnapshotId


def main(target: str) -> None:
    identity = recipe.IDENTITY if int(target.rpartition("-")[2]) >= 3 else None
    with Repository.create(target, block_size=recipe.BLOCK, identity=identity) as repository:
        with repository.writer(pack_bytes=20_000) as writer:
            # The snapshots then find this content stored already.
            recipe.put_coded(writer)
            recipe.put_relative_to_twins(writer)
            writer.commit(recipe.first_draft(writer))
        with repository.writer() as writer:
            writer.commit(recipe.second_draft(writer))
            writer.set_marks(SnapshotId("cs-000002"), hold=True, reason="kept", tags=["marked"])
    discard(f"{target}/{INDEX_NAME}")
    Path(target, "lock").unlink()


if __name__ == "__main__":
    main(sys.argv[1])
