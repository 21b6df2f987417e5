"""Proxy in front of an S3 store that keeps storage classes and archives nothing: it archives as Amazon S3 does.

An object that was copied to an archive class answers GET with 403 InvalidObjectState until it was restored
(RestoreObject) and looked at a few times.
"""

from __future__ import annotations

import threading
from urllib.parse import urlsplit

from support.object_servers import FaultProxy

ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")
_REFUSAL = b"<Error><Code>InvalidObjectState</Code><Message>The operation is not valid</Message></Error>"
_EXPIRY = 'ongoing-request="false", expiry-date="Fri, 21 Dec 2029 00:00:00 GMT"'

Answer = tuple[int, list[tuple[str, str]], bytes]


class ArchiveProxy(FaultProxy):
    """Proxy that archives.

    Args:
        endpoint: The store.
        looks: How often an object is looked at before its thaw is done.
    """

    def __init__(self, endpoint: str, looks: int = 2) -> None:
        self.archived: set[str] = set()
        """Paths of objects that cannot be read."""
        self.thawing: dict[str, int] = {}
        self.restores: list[bytes] = []
        """Bodies of the requests to restore."""
        self._looks = looks
        self._state = threading.Lock()
        super().__init__(endpoint)

    def ask(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Answer:
        """Answer as the store would if it archived."""
        place, query = urlsplit(path).path, urlsplit(path).query
        with self._state:
            if method == "POST" and query == "restore":
                self.restores.append(body)
                self.thawing.setdefault(place, self._looks)
                return 202, [], b""
            if method == "GET" and place in self.archived:
                return 403, [], _REFUSAL
        answer = super().ask(method, path, headers, body)
        with self._state:
            if method == "HEAD":
                answer[1].extend(self._restore_header(place))
            storage_class = {name.lower(): value for name, value in headers}.get("x-amz-storage-class")
            if method == "PUT" and answer[0] == 200:
                self.archived.discard(place)
                if storage_class in ARCHIVES:
                    self.archived.add(place)
        return answer

    def _restore_header(self, place: str) -> list[tuple[str, str]]:
        if place not in self.thawing:
            return []
        self.thawing[place] -= 1
        if self.thawing[place] > 0:
            return [("x-amz-restore", 'ongoing-request="true"')]
        self.archived.discard(place)
        return [("x-amz-restore", _EXPIRY)]
