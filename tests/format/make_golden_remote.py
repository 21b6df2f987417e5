"""Write the golden remotes of a new version of the remote's format.

Run once, commit the result, and never run again for that version:

    python tests/format/make_golden_remote.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import remote_recipe as recipe


def main() -> None:
    for kind in recipe.KINDS:
        with tempfile.TemporaryDirectory() as work:
            recipe.make(recipe.GOLDEN / kind, Path(work), sealed=kind == "sealed")


if __name__ == "__main__":
    main()
