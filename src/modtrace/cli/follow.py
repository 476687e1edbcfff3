"""Serves the report of a recording on this machine alone, and reads the recording again as it grows."""

import hmac
import json
import secrets
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import pyarrow.compute as pc

from ..api.report import MAX_MB, make_report
from ..errors import ModtraceError
from ..store.reader import FolderReader
from ..store.snapshot import Snapshot
from ..views.html.page import let_follow, payload_of

_HOST = "127.0.0.1"
_TEXT, _JSON, _HTML = "text/plain", "application/json", "text/html"


class FollowedReport:
    """The page of a recording that may still be written, made again when there are new steps."""

    def __init__(self, data: FolderReader, *, step: int | None = None, max_mb: float = MAX_MB) -> None:
        """Takes the recording, and what `make_report` takes."""
        self._data = data
        self._step, self._max_mb = step, max_mb
        self._lock = threading.Lock()  # a thread answers each request
        self._state, self._page, self._took_s = "", "", 0.0

    def read_state(self) -> dict[str, Any]:
        """Returns a text that changes when there are new steps, whether the run has ended, and when to ask again."""
        with self._lock:
            steps = self._data.table("steps")
            last = pc.max(steps["step"]).as_py()
            is_closed = self._data.is_closed
            wait_s = max(2.0, 5 * self._took_s)  # making pages takes a sixth of a processor at most
            state = f"{steps.num_rows} steps, last {last}, {'ended' if is_closed else 'running'}"
            return {"state": state, "last": last, "ended": is_closed, "wait_ms": int(1000 * wait_s)}

    def read_page(self) -> str:
        """Returns the page with all steps that are there now."""
        state = self.read_state()["state"]
        with self._lock:
            if state != self._state:
                began = time.monotonic()
                page = make_report(Snapshot(self._data), step=self._step, max_mb=self._max_mb)
                self._page, self._state = let_follow(page, state), state
                self._took_s = time.monotonic() - began
            return self._page


class ReportServer:
    """Answers requests for a report from this machine that know its token, on a free port; a context manager."""

    def __init__(self, report: FollowedReport) -> None:
        """Binds the port; nothing is answered before the object is entered."""
        self._token = secrets.token_urlsafe(24)
        self._server = ThreadingHTTPServer((_HOST, 0), _make_handler(report, self._token))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        """The address of the page, with the token in it."""
        return f"http://{_HOST}:{self._server.server_port}/{self._token}/"

    def __enter__(self) -> "ReportServer":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _make_handler(report: FollowedReport, token: str) -> type[BaseHTTPRequestHandler]:
    pages: dict[str, Callable[[], tuple[str, str]]] = {
        "": lambda: (_HTML, report.read_page()),
        "state": lambda: (_JSON, json.dumps(report.read_state())),
        "payload": lambda: (_TEXT, payload_of(report.read_page())),
    }

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        server: ThreadingHTTPServer

        def do_GET(self) -> None:
            # A page of another site that has its own name lead here would send that name.
            own = {f"{name}:{self.server.server_port}" for name in (_HOST, "localhost")}
            if self.headers.get("Host") not in own:
                self._answer(HTTPStatus.FORBIDDEN, _TEXT, "not for this host")
                return
            path = self.path.split("?")[0]
            _, given, name = (*path.split("/", 2), "", "")[:3]
            # Without the last slash the page would ask for its data beside the token.
            if (
                path.count("/") < 2
                or not hmac.compare_digest(given.encode(), token.encode())
                or name not in pages
            ):
                self._answer(HTTPStatus.NOT_FOUND, _TEXT, "nothing is here")
                return
            try:
                kind, text = pages[name]()
            except (ModtraceError, ValueError, OSError) as error:
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, str(error), again_s=None if name else 2)
                return
            self._answer(HTTPStatus.OK, kind, text)

        def _answer(self, status: HTTPStatus, kind: str, text: str, *, again_s: int | None = None) -> None:
            content = text.encode("utf-8", "replace")
            self.send_response_only(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            if again_s is not None:  # the browser itself asks for the page again
                self.send_header("Refresh", str(again_s))
            self.send_header("Referrer-Policy", "no-referrer")  # the address has the token in it
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("X-Frame-Options", "DENY")
            self.send_header("Cross-Origin-Resource-Policy", "same-origin")
            self.end_headers()
            self.wfile.write(content)

        def version_string(self) -> str:
            """Returns what errors that `http.server` answers itself have as their server: no version of Python."""
            return "modtrace"

        def log_message(self, *_: Any) -> None:
            """Prints nothing: a line for each question would fill the terminal."""

    return Handler
