"""A web server on this machine that misbehaves as told."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Site:
    """Files by path. `break_after`: bytes sent by each answer before the connection is cut."""

    files: dict[str, bytes] = field(default_factory=dict)
    break_after: list[int] = field(default_factory=list)
    ranges: bool = True
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    address: str = ""


@contextmanager
def serve() -> Iterator[Site]:
    site = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            wish = self.headers.get("Range")
            site.asked.append((self.path, wish))
            content = site.files.get(self.path)
            if content is None:
                self.send_error(404)
                return
            start = int(wish.removeprefix("bytes=").removesuffix("-")) if wish else 0
            if wish and site.ranges and start >= len(content):
                self.send_error(416)
                return
            partial = bool(wish) and site.ranges
            body = content[start:] if partial else content
            self.send_response(206 if partial else 200)
            self.send_header("Content-Length", str(len(body)))
            if partial:
                last = len(content) - 1
                self.send_header("Content-Range", f"bytes {start}-{last}/{len(content)}")
            self.end_headers()
            limit = site.break_after.pop(0) if site.break_after else len(body)
            self.wfile.write(body[:limit])
            self.close_connection = True

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        site.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield site
        finally:
            server.shutdown()
            thread.join()
