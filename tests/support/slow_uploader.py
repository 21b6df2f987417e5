"""Process that uploads over a line of a given rate: ``slow_uploader.py SAVE_DIR ORDER BYTES_A_SECOND``."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from ciuic.config import RemoteConfig
from ciuic.remote import replication
from ciuic.remote.access import configured_objects
from ciuic.remote.objects.model import Objects
from ciuic.repository.identity import Bytes
from ciuic.structs import decode_json
from ciuic.training.remote.upload_process import main
from ciuic.training.remote.uploads import UploadOrder


class SlowObjects:
    """Objects of another store; what is stored shares one line."""

    def __init__(self, objects: Any, rate: float) -> None:
        self._objects = objects
        self._rate = rate
        self._line = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        with self._line:
            time.sleep(sum(len(part) for part in data) / self._rate)
        self._objects.put(name, data)


if __name__ == "__main__":
    original = configured_objects
    rate = float(sys.argv[3])

    def slow(remote: RemoteConfig) -> Objects:
        return SlowObjects(original(remote), rate)

    setattr(replication, "configured_objects", slow)  # noqa: B010
    main(sys.argv[1], decode_json(sys.argv[2], UploadOrder))
