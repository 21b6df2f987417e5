"""Write the known answers of a new version of the remote's format.

Run once, commit the result, and never run again for that version:

    python tests/format/make_remote_vectors.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import remote_recipe as recipe


def main() -> None:
    for kind in ("sealed", "clear"):
        for name, data in recipe.objects(sealed=kind == "sealed").items():
            path = recipe.VECTORS / kind / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


if __name__ == "__main__":
    main()
