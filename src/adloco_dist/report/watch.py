"""The page of a run while it trains, for a browser: `launch/watch.py RUN`, or run.watch=PORT.

A process of its own, which reads what rank 0 writes, stands behind the ranks and takes little of the processor.
"""

import argparse
import json
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from adloco_dist.command import as_tool
from adloco_dist.config import SettingsError
from adloco_dist.config.running import THIS_MACHINE
from adloco_dist.report.one import page_of
from adloco_dist.report.processes import TOKEN_VARIABLE, address_of, listen
from adloco_dist.report.source import Source, read_source
from adloco_dist.report.vega import vega_script
from adloco_dist.terminal import show

MAX_SHARE = 0.05
"""Of one core's time, that renewing the page may take: one that takes long to make is renewed less often."""
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline' 'unsafe-eval'; img-src 'self' data: blob:",
    "Referrer-Policy": "no-referrer",  # the address holds the token
    "X-Content-Type-Options": "nosniff",
}
CONTENT_TYPES = {
    "": "text/html; charset=utf-8",
    "state": "application/json",
    "vega.js": "text/javascript; charset=utf-8",
}
"""Of what is answered, by name."""
NICENESS = 10
"""A tenth of the weight of a rank; with a higher one nothing gets to its end beside ranks that compute on all cores."""
AUTOGROUP = Path("/proc/self/autogroup")
"""Linux may weigh sessions instead of processes (sched_autogroup_enabled): niceness then counts within one alone."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of launch/watch.py."""
    parser = argparse.ArgumentParser(
        description="Show the page of a run in a browser, renewed while it trains. The address that is printed holds a "
        "random token, without which nothing is shown. Runs are only read. Ctrl-C ends it.",
    )
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument("--port", type=int, default=0, help="default: any that is free")
    parser.add_argument("--address", default=THIS_MACHINE, help="where to listen (%(default)s: this machine alone)")
    parser.add_argument("--descriptor", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    with as_tool():
        watched = Watched(read_source(Path(options.run)))
        token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe()
        if options.descriptor is None:
            listener = listen(f"--port={options.port}", options.address, options.port)
            show(f"{options.run} is shown on {address_of(listener, token)}")
        else:
            listener = socket.socket(fileno=options.descriptor)
            threading.Thread(target=_end_with_parent, daemon=True).start()
        _step_back()
        handler = partial(Handler, watched, token)
        with ThreadingHTTPServer(listener.getsockname()[:2], handler, bind_and_activate=False) as server:
            server.socket.close()
            server.socket = listener  # which listens already
            server.serve_forever()


def _end_with_parent() -> None:
    """End this process when the one that started it has ended, however it did: its end of standard input closes."""
    sys.stdin.buffer.read()
    os._exit(0)


class Watched:
    """A run as it was last read; threads that ask at one time wait for each other."""

    def __init__(self, source: Source) -> None:
        self._source, self._lock = source, threading.Lock()
        self._version, self._renew_at = "", 0.0
        self._answers: dict[str, bytes] = {}

    def answer(self, name: str) -> bytes:
        """The page, whose name is empty, or the `state` that it asks for: what it shows now, as JSON.

        Both are made anew where the run has gone on and they are old enough.
        """
        with self._lock:
            if time.monotonic() >= self._renew_at:
                self._renew()
            return self._answers[name]

    def _renew(self) -> None:
        start = time.thread_time()
        self._source = source = read_source(self._source.directory, self._source.history)
        version = f"{source.history.columns.num_bytes} {source.state}"
        if version != self._version:
            page = page_of(source)
            state = {"version": version, "content": page.content(), **page.data()}
            state_bytes = json.dumps(state, allow_nan=False).encode()
            self._answers = {"": page.html(vega=None).encode(), "state": state_bytes}
            self._version = version
        self._renew_at = time.monotonic() + (time.thread_time() - start) / MAX_SHARE


class Handler(BaseHTTPRequestHandler):
    """Answers three addresses, all below the token, and nothing else."""

    server_version, sys_version = "adloco_dist", ""

    def __init__(self, watched: Watched, token: str, *rest: object) -> None:
        self._watched, self._token = watched, token
        super().__init__(*rest)  # type: ignore[arg-type]

    def handle(self) -> None:
        """Answer requests until the browser has no more: a tab that is closed while it loads ends them, too."""
        with suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:
        """Answer a request."""
        token, slash, name = self.path.removeprefix("/").partition("/")
        if not secrets.compare_digest(token.encode(), self._token.encode()) or not slash or name not in CONTENT_TYPES:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            body = vega_script().encode() if name == "vega.js" else self._watched.answer(name)
        except SettingsError as error:  # the run directory is gone
            self.send_error(HTTPStatus.NOT_FOUND, explain=str(error))
            return
        self.send_response(HTTPStatus.OK)
        for key, value in {"Content-Type": CONTENT_TYPES[name], "Content-Length": str(len(body)), **HEADERS}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: addresses hold the token."""


def _step_back() -> None:
    """Lower the priority of this process, and of its session if it has one of its own."""
    os.nice(NICENESS)
    if os.getsid(0) == os.getpid():
        with suppress(OSError):  # a kernel without them
            AUTOGROUP.write_text(str(NICENESS))


if __name__ == "__main__":
    main()
