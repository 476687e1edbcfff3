"""Text in columns."""

from modtrace.views.common.columns import (
    Column,
    Text,
    explain_columns,
    fit_columns,
    render_columns,
    render_fitted,
    render_lines,
)


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


def test_lines_that_are_too_long_are_broken_at_blanks_and_keep_their_styles() -> None:
    line = Text.join([Text("  ab cd", "red"), Text("ef gh-ij 层层")])
    assert render_lines([line, Text("")], color=False, width=7) == "  ab\n  cdef\n  gh-ij\n  层层\n\n"
    assert render_lines([line], color=True, width=12) == (
        "\x1b[31m  \x1b[0m\x1b[31mab \x1b[0m\x1b[31mcd\x1b[0mef\n  gh-ij 层层\n"
    )
    assert render_lines([Text("a " + "b" * 9 + " c")], color=False, width=4) == f"a {'b' * 9}\n  c\n"


def test_columns_are_left_out_in_turn_until_the_others_fit() -> None:
    columns = [Column(title, [Text("1234")]) for title in ("a", "b", "c", "b")]
    assert fit_columns(columns, 22, ["c", "b"]).left_out == ()
    fitted = fit_columns(columns, 21, ["x", "b", "c"])
    assert ([each.title for each in fitted.shown], fitted.left_out, fitted.needed) == (["a", "c"], ("b",), 22)
    assert fit_columns(columns, 1, ["c"]).left_out == ("c",)
    assert fit_columns(columns, None, ["c"]).left_out == ()


def test_what_was_left_out_for_a_wide_column_comes_back_where_that_had_to_go_too() -> None:
    columns = [
        Column(title, [Text("1" * width)])
        for title, width in (("name", 10), ("a", 4), ("wide", 20), ("b", 4))
    ]
    fitted = fit_columns(columns, 22, ["a", "b", "wide"])
    assert ([column.title for column in fitted.shown], fitted.left_out) == (["name", "a", "b"], ("wide",))
    fitted = fit_columns(columns, 16, ["a", "b", "wide"])
    assert ([column.title for column in fitted.shown], fitted.left_out) == (["name", "b"], ("a", "wide"))


def test_a_long_name_widens_no_table() -> None:
    columns = [
        Column("module", [Text("a" * 2000 + "." + "b" * 2999), Text("head")], right=False),
        Column("time", [Text("1ms")] * 2),
        Column("flops", [Text("12")] * 2),
    ]
    for width, widest in ((None, 213), (200, 200), (80, 80), (10, 33)):
        lines = render_columns(fit_columns(columns, width, ()).shown, color=False).splitlines()
        assert [len(line) for line in lines] == [widest] * 3
    assert lines[1].startswith("aaaaaa…bbbbbbbbbbbbb  ")
    fitted = fit_columns(columns, 80, ["flops", "time"])
    assert fitted.left_out == ()  # a name does not drive them out


def test_a_name_keeps_its_styles_and_columns_of_width_where_it_is_cut() -> None:
    name = Text.join([Text("├─ ", "dim"), Text("层" * 9, "bold")])
    assert name.cut(21) is name
    assert name.cut(12).render(color=True) == "\x1b[2m├─ \x1b[0m\x1b[1m…层层层\x1b[0m"
    assert name.cut(12).width <= 12


def test_control_characters_are_escaped_in_all_texts() -> None:
    """U+202E shows what follows from right to left."""
    assert Text("a\u202eb\x1b[31m\n").render(color=False) == r"a\u202eb\x1b[31m\n"


def test_what_is_left_out_is_named_below_the_table() -> None:
    columns = [Column(title, [Text("1234")]) for title in ("a", "b", "c")]
    assert render_fitted(fit_columns(columns, 10, ["c", "b"]), width=10, color=False) == (
        "   a     b\n1234  1234\nleft out\n  at a\n  width of\n  10: c (a\n  width of\n  16 shows\n  all, and\n"
        "  so does\n  | less\n  -S)\n"
    )
    whole = render_columns(columns, color=False)
    assert render_fitted(fit_columns(columns, 16, ["b"]), width=16, color=False) == whole


def test_a_legend_explains_the_columns_that_are_there() -> None:
    legend = ((({"a", "b"}, "one"), ({"c"}, "two")), (({"d"}, "three"),))
    assert [each.render(color=False) for each in explain_columns(legend, {"b", "c"})] == ["one; two"]
    assert [each.render(color=False) for each in explain_columns(legend, {"d"})] == ["three"]
