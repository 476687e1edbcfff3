"""Tables and lines as HTML."""

import re
from html.parser import HTMLParser

from modtrace.views.common.columns import Column, Text, render_columns, render_lines
from modtrace.views.html.tables import MAX_ROWS, HtmlMarkup, render_page


def texts(count: int) -> list[Text]:
    return [Text(str(each)) for each in range(count)]


def test_table_has_a_row_for_each_line_and_says_how_it_is_aligned_and_styled() -> None:
    columns = [
        Column("module", [Text.join([Text("└─ ", "dim"), Text("fc")]), Text()], right=False),
        Column("out rms", [Text("NaN", "bold red"), Text("1.0")]),
    ]
    assert render_columns(columns, color=HtmlMarkup()) == (
        '<table><thead><tr><th class="left">module</th><th>out rms</th></tr></thead><tbody>\n'
        '<tr><td class="left"><span class="dim">└─ </span>fc</td>'
        '<td><span class="bold red">NaN</span></td></tr>\n'
        '<tr><td class="left"></td><td>1.0</td></tr>\n'
        "</tbody></table>\n"
    )


def test_lines_are_elements_of_their_own() -> None:
    assert render_lines([Text("a", "cyan"), Text("b")], color=HtmlMarkup()) == (
        '<div><span class="cyan">a</span></div>\n<div>b</div>\n'
    )


def test_names_and_titles_cannot_become_markup() -> None:
    evil = "<script>alert(1)</script>&\"'"
    content = render_columns([Column(evil, [Text(evil)])], color=HtmlMarkup())
    content += render_lines([Text(evil, "dim")], color=HtmlMarkup())
    assert "<script" not in content
    assert content.count("&lt;script&gt;alert(1)&lt;/script&gt;&amp;&quot;&#x27;") == 3


def test_rows_of_a_large_table_are_left_out_and_counted() -> None:
    content = render_columns([Column("n", texts(MAX_ROWS + 3))], color=HtmlMarkup())
    assert re.findall(r"<td>(\d+)</td>", content) == [str(each) for each in range(200)]
    assert content.endswith('</table>\n<div><span class="dim">print shows 3 more rows</span></div>\n')
    assert "print shows" not in render_columns([Column("n", texts(MAX_ROWS))], color=HtmlMarkup())


def test_columns_for_which_there_is_no_room_are_left_out_and_named() -> None:
    columns = [Column("n", texts(1)), Column("self", texts(1)), Column("%", texts(1))]
    content = render_columns(columns, color=HtmlMarkup(without=("self", "%")))
    assert re.findall("<th>(.*?)</th>", content) == ["n"]
    assert content.endswith('<div><span class="dim">print shows the columns self, %</span></div>\n')
    assert "print shows" not in render_columns(columns[:1], color=HtmlMarkup(without=("self", "%")))


def test_page_is_one_element_with_its_style_and_without_a_script() -> None:
    page = render_page("<div>a</div>\n")
    assert page.startswith('<div class="modtrace">\n<style>\n')
    assert page.endswith("</style>\n<div>a</div>\n</div>\n")
    rules = re.sub(r"/\*.*?\*/", "", re.findall("<style>(.*)</style>", page, re.DOTALL)[0])
    assert [
        rule for rule in rules.split("}") if rule.strip() and not rule.strip().startswith(".modtrace")
    ] == []
    assert opened(page) == {"div": 2, "style": 1}


def opened(page: str) -> dict[str, int]:
    """Returns how many elements of which kind there are."""
    counts: dict[str, int] = {}

    class Counter(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            counts[tag] = counts.get(tag, 0) + 1

    Counter().feed(page)
    return counts
