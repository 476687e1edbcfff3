"""Puts a report into the page that the browser shows: one file, which loads nothing."""

import base64
import hashlib
import html
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from ...analysis.report.tables import Report
from .payload import encode_payload

_HEAD = "<!-- modtrace:head -->"
_PAYLOAD = "<!-- modtrace:payload -->"
_ELEMENT = '<script type="application/json" id="payload'
#: The end of the policy.
_LAST_RULE = "form-action 'none'"
_PAYLOAD_ELEMENT = re.compile(r'id="payload"[^>]*>([^<]*)<')
_SCRIPT = re.compile(r"<script[^>]*>(.*?)</script>", re.DOTALL)
_STYLE = re.compile(r"<style[^>]*>(.*?)</style>", re.DOTALL)


def render_report(report: Report) -> str:
    """Returns the page with the report in it."""
    page = _read_page()
    head = _PAGE_POLICY.format(_policy_of(page))
    payload = f'{_ELEMENT}">{encode_payload(report)}</script>'
    before, _, rest = page.partition(_HEAD)
    between, _, after = rest.partition(_PAYLOAD)
    return before + head + between + payload + after


def let_follow(page: str, state: str) -> str:
    """Returns the page of a recording that grows, which may ask its own server, and no other, for new data.

    Args:
        page: what `render_report` returned.
        state: the state of the recording, as the server describes it.
    """
    before, policy, rest = page.partition(_LAST_RULE)
    between, element, after = rest.partition(f'{_ELEMENT}"')
    followed = f'{element} data-follow="{html.escape(state)}"'
    return f"{before}{policy}; connect-src 'self'{between}{followed}{after}"


def payload_of(page: str) -> str:
    """Returns the payload in a page."""
    found = _PAYLOAD_ELEMENT.search(page)
    assert found is not None
    return found[1]


def size_without_data() -> int:
    """Returns the size in bytes of the page without a report: its text, style and code."""
    return len(_read_page().encode("utf-8"))


@dataclass(frozen=True, repr=False)
class ReportFrame:
    """A report as a notebook shows it: in a frame with its own origin, from which it cannot reach the notebook."""

    page: str
    height: int

    def __repr__(self) -> str:
        return "a report, which notebooks show; Recording.write_html(path) writes it to a file"

    def _repr_html_(self) -> str:
        return (
            f'<iframe sandbox="allow-scripts allow-downloads" srcdoc="{html.escape(self.page)}" width="100%" '
            f'height="{self.height}" frameborder="0" title="modtrace report"></iframe>'
        )


@cache
def _read_page() -> str:
    return files(__package__).joinpath("page.html").read_text(encoding="utf-8")


#: The policy that nothing may be loaded, and that only the page's script and style, known by their hashes, run.
_PAGE_POLICY = '<meta http-equiv="Content-Security-Policy" content="{}">'


def _policy_of(page: str) -> str:
    scripts, styles = (" ".join(map(_hash, pattern.findall(page))) for pattern in (_SCRIPT, _STYLE))
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; img-src data: blob:; "
        f"base-uri 'none'; {_LAST_RULE}"
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
