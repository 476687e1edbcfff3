"""The page around a report: its policy, and what cannot leave it."""

import base64
import hashlib
import html
import re

from modtrace.analysis.report.tables import Report, ReportTable, text_column
from modtrace.views.html.page import ReportFrame, render_report

_EVIL = "</script><img src=x onerror=alert(1)>\"'&"


def report() -> Report:
    table = ReportTable(rows=1, columns=(text_column("label", "name", [_EVIL]),))
    return Report(
        title=_EVIL, about=((_EVIL, _EVIL),), notes=(_EVIL,), shown_step=-1, tables={"modules": table}
    )


def test_nothing_of_a_recording_is_markup() -> None:
    page = render_report(report())
    assert "onerror" not in page
    payload = re.search(r'<script type="application/json" id="payload">([^<]*)</script>', page)
    assert payload is not None
    assert base64.b64decode(payload[1])[:2] == b"\x1f\x8b"


def test_policy_allows_the_script_and_the_style_of_the_page_and_nothing_else() -> None:
    page = render_report(report())
    policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    assert policy is not None
    [script] = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    [style] = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    hashes = [
        "'sha256-" + base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() + "'"
        for each in (script, style)
    ]
    assert policy[1] == (
        f"default-src 'none'; script-src {hashes[0]}; style-src {hashes[1]}; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def test_policy_comes_before_everything_that_it_is_about_and_the_encoding_within_its_first_kilobyte() -> None:
    page = render_report(report())
    assert 0 < page.index("Content-Security-Policy") < page.index("<style>") < page.index("<script>")
    assert "<meta charset" in page.encode()[:1024].decode()


def test_page_loads_nothing() -> None:
    page = render_report(report())
    assert (
        re.findall(
            r"<(?:link|img|iframe|object|embed)\b|\bsrc=|@import|url\((?!data:)", page.split("<script>")[0]
        )
        == []
    )


def test_frame_of_a_notebook_has_no_access_to_the_notebook() -> None:
    frame = ReportFrame('<b title="x">\'&', 500)._repr_html_()
    assert frame.startswith('<iframe sandbox="allow-scripts allow-downloads" srcdoc="')
    [content] = re.findall(r'srcdoc="([^"]*)"', frame)
    assert html.unescape(content) == '<b title="x">\'&'
    assert 'height="500"' in frame
