"""`modtrace view --follow`: who gets an answer, what changes with new steps, and how it ends."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from helpers.command_line import Command
from helpers.growing_run import GrowingRun
from helpers.report_pages import decode, read_payload
from modtrace.api.report import make_report
from modtrace.cli.follow import FollowedReport, ReportServer
from modtrace.store.reader import FolderReader


def get(
    url: str, path: str = "", *, host: str | None = None, method: str = "GET"
) -> tuple[int, str, dict[str, str]]:
    """The status, the text and the headers of an answer."""
    where = urlsplit(url)
    assert where.hostname is not None
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=60)
    connection.request(method, where.path + path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    text = answer.read().decode("utf-8")
    connection.close()
    return answer.status, text, dict(answer.getheaders())


@pytest.fixture
def run(tmp_path: Path) -> Iterator[GrowingRun]:
    growing = GrowingRun(tmp_path / "run.modtrace")
    yield growing
    growing.close()


@pytest.fixture
def server(run: GrowingRun, tmp_path: Path) -> Iterator[ReportServer]:
    with ReportServer(FollowedReport(FolderReader(tmp_path / "run.modtrace"))) as running:
        yield running


def test_page_takes_over_steps_as_they_are_written_and_says_when_the_run_has_ended(
    run: GrowingRun, server: ReportServer
) -> None:
    def read() -> tuple[int | None, bool, int]:
        state = json.loads(get(server.url, "state")[1])
        payload = decode(get(server.url, "payload")[1])[0]
        return state["last"], state["ended"], payload["tables"]["steps"]["rows"]

    assert read() == (0, False, 1)
    first = json.loads(get(server.url, "state")[1])["state"]
    assert json.loads(get(server.url, "state")[1])["state"] == first
    run.go_on()
    assert read() == (1, False, 2)
    assert json.loads(get(server.url, "state")[1])["state"] != first
    run.go_on()
    run.close()
    assert read() == (2, True, 3)
    status, page, _ = get(server.url)
    assert status == 200 and read_payload(page)["tables"]["steps"]["rows"] == 3


def test_served_page_alone_may_ask_its_server_and_a_file_may_not(
    run: GrowingRun, server: ReportServer, tmp_path: Path
) -> None:
    _, page, headers = get(server.url)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None and policy[1].endswith("form-action 'none'; connect-src 'self'")
    assert ' data-follow="1 steps, last 0, running">' in page
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Referrer-Policy"] == "no-referrer" and headers["Cache-Control"] == "no-store"
    file = make_report(FolderReader(tmp_path / "run.modtrace"))
    assert "connect-src" not in file.split("<style>")[0] and " data-follow=" not in file


def test_what_lacks_the_token_or_names_another_host_gets_nothing(server: ReportServer) -> None:
    where = urlsplit(server.url)
    assert where.hostname == "127.0.0.1" and len(where.path) > 30
    port = where.port
    assert get(server.url, host=f"localhost:{port}")[0] == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port}.evil.example"):
        assert get(server.url, "payload", host=host)[:2] == (403, "not for this host")
    for path in (
        "/",
        "/state",
        "/payload",
        f"/{'a' * 32}/payload",
        f"{where.path}x",
        where.path.rstrip("/"),
        f"{where.path}../payload",
        "//",
    ):
        assert get(f"http://127.0.0.1:{port}", path)[:2] == (404, "nothing is here")
    status, _, headers = get(server.url, method="POST")
    assert (status, headers["Server"]) == (501, "modtrace")


def test_a_recording_that_another_run_replaces_is_said_to_be_so(
    run: GrowingRun, server: ReportServer, tmp_path: Path
) -> None:
    run.close()
    (tmp_path / "run.modtrace").rename(tmp_path / "old.modtrace")
    GrowingRun(tmp_path / "run.modtrace").close()
    status, text, _ = get(server.url, "state")
    assert status == 503 and "another run has replaced this recording" in text


def test_ctrl_c_ends_the_server_without_a_word_of_an_error(run: GrowingRun, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "modtrace", "view", "run.modtrace", "--follow"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert get(url)[0] == 200
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, "")
    assert out.splitlines()[-1] == "ended"
    with pytest.raises(OSError):
        get(url)


def test_following_writes_no_file_and_shows_one_recording(
    command: Command, run: GrowingRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for option in (["-o", "a.html"], ["--against", "run.modtrace"]):
        told = command("view", "run.modtrace", "--follow", *option, code=2).err
        assert "--follow serves one recording and writes no file: leave -o and --against out." in told
