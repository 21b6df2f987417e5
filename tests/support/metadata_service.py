"""Local server in the place of a cloud's metadata service."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[str, str, dict[str, str]], "tuple[int, str, dict[str, str]]"]
"""(method, path, headers) to (status, text, headers)."""


@contextmanager
def service(answer: Answer, host: str = "127.0.0.1") -> Iterator[str]:
    """Address of a local server in the place of a metadata service, on an address of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def handle(self) -> None:
            with suppress(ConnectionError):  # a watcher that ends, or loses patience, waits for no answer
                super().handle()

        def do_GET(self) -> None:
            status, text, headers = answer(
                self.command, self.path, {k.lower(): v for k, v in self.headers.items()}
            )
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_PUT = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer((host, 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://{host}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
