"""Sphinx's settings for `make site`: the pages of docs/ as they are on GitHub, in the order of docs/index.md."""

import re
from pathlib import Path

from sphinx.application import Sphinx

project = "modtrace"
root_doc = "docs/index"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "docs/gallery/*.md"]
exclude_patterns = [".*", "build", "viewer", "src", "tests", "benchmarks", "examples"]
extensions = ["myst_parser"]
myst_heading_anchors = 4
highlight_language = "none"  # of fences without a language, which are output
html_theme = "furo"
html_title = "modtrace"
html_search_scorer = str(Path(__file__).with_name("search_scores.js"))
html_static_path = html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False


def setup(app: Sphinx) -> None:
    app.connect("source-read", lambda app, page, source: add_navigation(page, source))
    app.connect("build-finished", lambda app, error: write_redirect(Path(app.outdir)))


def add_navigation(page: str, source: list[str]) -> None:
    """Puts the pages that docs/index.md links into the sidebar, each below the first heading that names it."""
    if page != root_doc:
        return
    seen: set[str] = set()
    start, *sections = source[0].split("\n## ")
    for section in [f"Start\n{start}", *sections]:
        heading, _, text = section.partition("\n")
        links = re.findall(r"\]\((\S+?)\.md(?:#[^)]*)?\)", text)
        pages = [link for link in dict.fromkeys(links) if link not in seen]
        seen.update(pages)
        lines = ["```{toctree}", ":hidden:", f":caption: {heading}", "", *pages, "```"]
        source[0] += "\n" + "\n".join(lines) + "\n"


def write_redirect(folder: Path) -> None:
    """Leads from the folder of the site to its first page."""
    (folder / "index.html").write_text('<meta http-equiv="refresh" content="0; url=docs/index.html">\n')
