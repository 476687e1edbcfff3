"""Text in columns."""

from modtrace.views.common.columns import Column, Text, render_columns, render_lines


def test_wide_letters_take_two_columns_and_accents_none() -> None:
    cells = [Text("层"), Text("e\u0301"), Text("abc")]
    assert render_columns([Column("", cells, right=False), Column("", [Text("|")] * 3)], color=False) == (
        "层   |\ne\u0301    |\nabc  |\n"
    )


def test_pieces_keep_their_styles() -> None:
    line = Text.join([Text("a", "dim"), Text("", "red"), Text("b"), Text("c", "bold red")], ", ")
    assert render_lines([line], color=True) == "\x1b[2ma\x1b[0m, , b, \x1b[1;31mc\x1b[0m\n"
    assert render_lines([line], color=False) == "a, , b, c\n"


def test_column_without_a_title_has_no_line_for_it() -> None:
    assert render_columns([Column("", [Text("1"), Text("22")])], color=False) == " 1\n22\n"
    assert render_columns([Column("n", [Text("1"), Text("22")])], color=False) == " n\n 1\n22\n"
