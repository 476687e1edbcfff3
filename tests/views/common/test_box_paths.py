"""Names for boxes: labels with slashes between them, each name once."""

from helpers.typed_records import typed_box
from modtrace.views.common.box_paths import name_boxes


def test_labels_of_boxes_make_one_namespace_each_whatever_is_in_them() -> None:
    boxes = [
        typed_box("a", label="a/b;c\\"),
        typed_box("a/0", box=0, call=1, repeats=32),
        typed_box("again", label="a/b;c\\"),
        typed_box("third", label="a/b;c\\~2"),
        typed_box("nameless", kind="container", label="", type=""),
    ]
    assert name_boxes(boxes) == [
        "a\\/b,c_",
        "a\\/b,c_/0@1 x32",
        "a\\/b,c_~2",
        "a\\/b,c_~2~2",
        "container",
    ]


def test_names_that_are_given_twice_are_told_apart_also_from_ones_that_look_so() -> None:
    boxes = [typed_box("1", label="a~2"), *(typed_box("2", label="a") for _ in range(3))]
    assert name_boxes(boxes) == ["a~2", "a", "a~3", "a~4"]
