"""What Dynamo says of guards, breaks and errors, read: texts of torch 2.13."""

import pytest

from modtrace.analysis.compile.texts import CodeLine, plain_name, read_break, read_guard

PATHS = ("", "blocks", "blocks.0", "blocks.0.scale")

SIZE = "2/0: tensor 'x' size mismatch at index 0. expected 3, actual 5"

#: As Dynamo pads it, with the line of the code and its hint.
INTEGER = (
    "7/1: s._modules['scale'].factor == 1                          # return x * s.factor  # m.py:25 in forward "
    "(HINT: torch.compile considers integer attributes of the nn.Module to be static. If you are observing "
    "recompilation, you might want to make this integer dynamic using "
    "torch._dynamo.config.allow_unspec_int_on_nn_module = True, or convert this integer into a tensor.)\n"
    "User stack trace:\n"
    '  File "/home/me/m.py", line 35, in torch_dynamo_resume_in_forward_at_34\n'
    "    x = s.scale(x)\n"
    '  File "/site-packages/torch/nn/modules/module.py", line 1832, in inner\n'
    "    result = forward_call(*args, **kwargs)\n"
    '  File "/home/me/m.py", line 25, in forward\n'
    "    return x * s.factor\n"
)

PRINT = (
    "Failed to trace builtin operator\n"
    "  Explanation: Dynamo does not know how to trace builtin operator `print`\n"
    "  Hint: Please report an issue to PyTorch.\n"
    "  Hint: Avoid calling builtin `print`.\n\n"
    "  Developer debug context: builtin print\n"
    "User stack trace:\n"
    '  File "/home/me/m.py", line 9, in forward\n'
    '    print("hello")'
)

LIMIT = (
    "Unsupported: Dynamo recompile limit exceeded\n"
    "  Explanation: Dynamo attempted to recompile the code object too many times, exceeding the "
    "accumulated_recompile_limit cache size limit (currently set to 256). Excessive recompilations can degrade "
    "performance due to the compilation overhead of each recompilation.\n"
    "  Hint: To monitor recompilations, enable TORCH_LOGS=recompiles.\n"
)


def test_a_size_that_changed_is_told_with_both_sizes() -> None:
    told = read_guard(SIZE, "blocks.0", PATHS)
    assert told.reason == "the size of the tensor 'x' changed in dimension 0"
    assert (told.values, told.module, told.line) == (("3", "5"), None, None)
    assert "mark_dynamic(tensor, 0)" in told.advice


def test_a_tensor_that_dynamo_named_itself_is_not_named() -> None:
    told = read_guard(SIZE.replace("'x'", "'___stack0'"), None, PATHS)
    assert told.reason == "the size of a tensor changed in dimension 0"
    assert told.subject == read_guard(SIZE, None, PATHS).subject


@pytest.mark.parametrize(
    ("function", "place"),
    [("torch_dynamo_resume_in_forward_at_34", "the graph break at line 34"), ("forward", "a graph break")],
)
def test_value_behind_a_break_is_told_as_one(function: str, place: str) -> None:
    told = read_guard("1/0: len(___stack2) == 3   # return n  # m.py:34 in forward", "", PATHS, function)
    assert told.reason == f"len(the value alive across {place}) changed"
    assert (told.values, told.advice) == (
        ("3",),
        "mend that graph break, or keep in a tensor what changes",
    )


def test_mode_of_a_module_needs_nothing() -> None:
    told = read_guard("0/0: self._modules['blocks'].training == True", "", PATHS)
    assert (told.reason, told.values) == ("blocks.training changed", ("True",))
    assert told.is_of_mode
    assert told.advice == "nothing, if it comes once: a graph is kept for each mode"


def test_an_object_that_was_replaced_is_told_without_its_number() -> None:
    text = "0/1: ___check_obj_id(self.act, 139770517773248), type=<class 'function'>  # self.act(x)"
    told = read_guard(text, "", PATHS)
    assert (told.reason, told.advice) == (
        "self.act is another object",
        "set it before the first call and leave it",
    )


def test_an_attribute_is_named_by_the_path_of_its_module_and_the_line_that_reads_it() -> None:
    told = read_guard(INTEGER, "blocks.0", PATHS)
    assert (told.reason, told.values, told.module) == (
        "blocks.0.scale.factor changed",
        ("1",),
        "blocks.0.scale",
    )
    assert told.line == CodeLine("/home/me/m.py", 25, "forward", "return x * s.factor")
    assert [line.function for line in told.stack] == ["forward", "forward"]
    assert "allow_unspec_int_on_nn_module" in told.advice


@pytest.mark.parametrize("base", [None, "blocks"], ids=["module not known", "no such path"])
def test_a_module_that_is_not_known_stays_as_dynamo_wrote_it(base: str | None) -> None:
    told = read_guard(INTEGER, base, PATHS)
    assert (told.reason, told.module) == ("s._modules['scale'].factor changed", None)


def test_an_integer_in_a_list_has_no_advice_for_integers() -> None:
    told = read_guard(INTEGER.replace(".factor ==", ".layers[1] =="), "blocks.0", PATHS)
    assert told.advice == "keep in a tensor what changes, or set it before the first call and leave it"


def test_any_other_guard_is_told_as_it_is() -> None:
    told = read_guard("0/0: len(xs) <= 3", "", PATHS)
    assert told.reason == "no longer true: len(xs) <= 3"
    assert not told.advice


@pytest.mark.parametrize(
    ("guard", "reason", "values", "advice"),
    [
        (
            "tensor 'x' dtype mismatch. expected Float, actual Double",
            "the dtype of the tensor 'x' changed",
            ("Float", "Double"),
            "nothing, if it comes once: a graph is kept for each dtype",
        ),
        (
            "tensor 'x' rank mismatch. expected 2, actual 3",
            "the number of dimensions of the tensor 'x' changed",
            ("2", "3"),
            "nothing, if it comes once: a graph is kept for each number of dimensions",
        ),
        (
            "tensor 'self._modules['blocks']._parameters['bias']' requires_grad mismatch. expected requires_grad=1. "
            "Guard failed on a parameter, consider using torch._dynamo.config.force_parameter_static_shapes = False",
            "requires_grad of the tensor 'blocks.bias' changed",
            ("True",),
            "call it in one grad mode, with tensors that require a gradient each time or never",
        ),
        (
            "tensor 'x' stride mismatch at index 0. expected 4, actual 1",
            "the stride of the tensor 'x' changed in dimension 0",
            ("4", "1"),
            "give it in one layout each time: call .contiguous() on it before",
        ),
        (
            "2 <= x.size()[0]",
            "the size of the tensor 'x' in dimension 0 became 0 or 1, and those are compiled apart",
            (),
            "nothing, if it comes once: a graph is kept for each of them",
        ),
        (
            "mask is None",
            "mask is no longer None",
            (),
            "nothing, if it comes once: a graph is kept for None and one for the rest",
        ),
        (
            "GLOBAL_STATE changed: default_dtype ",
            "a setting of torch changed: default_dtype",
            (),
            "nothing, if it comes once: a graph is kept for each setting",
        ),
        (
            "G['LIMIT'] == 2",
            "the global variable LIMIT changed",
            ("2",),
            "keep in a tensor what changes, or set it before the first call and leave it",
        ),
    ],
)
def test_what_has_changed_is_told_in_plain_words(
    guard: str, reason: str, values: tuple[str, ...], advice: str
) -> None:
    told = read_guard(f"0/0: {guard}", "", PATHS)
    assert (told.reason, told.values, told.advice) == (reason, values, advice)


def test_change_between_training_and_evaluation_is_told_as_one() -> None:
    told = read_guard("0/0: GLOBAL_STATE changed: grad_mode ", "", PATHS)
    assert told.reason == "the grad mode changed, as between training and evaluation"
    assert told.advice.startswith("nothing, if it comes once")


def test_a_guard_that_dynamo_did_not_find_is_told_in_its_words() -> None:
    told = read_guard("Unable to find recompilation reasons", "", PATHS)
    assert told.reason == "Unable to find recompilation reasons"


def test_a_break_in_a_library_is_told_at_the_line_of_the_user() -> None:
    told = read_break(
        f"{PRINT}\n"
        '  File "/env/lib/python3.11/site-packages/torch/_dynamo/polyfills/__init__.py", line 513, in instantiate\n'
        "    obj.__init__(*args, **kwargs)\n"
        '  File "/usr/lib/python3.11/ctypes/__init__.py", line 370, in __init__\n'
        "    class _FuncPtr(_CFuncPtr):"
    )
    assert told.line == CodeLine("/home/me/m.py", 9, "forward", 'print("hello")')


def test_a_break_in_a_model_of_a_library_is_told_there() -> None:
    told = read_break(PRINT.replace("/home/me/m.py", "/env/lib/python3.11/site-packages/models/m.py"))
    assert told.line is not None
    assert told.line.number == 9


def test_a_break_has_its_explanation_and_the_first_hint_that_says_what_to_do() -> None:
    told = read_break(PRINT)
    assert told.reason == (
        "Failed to trace builtin operator: Dynamo does not know how to trace builtin operator `print`"
    )
    assert told.advice == "Avoid calling builtin `print`."
    assert told.line == CodeLine("/home/me/m.py", 9, "forward", 'print("hello")')


@pytest.mark.parametrize(
    "text", ["generic_jump TensorVariable()", "Data-dependent branching\n  Explanation: ..."]
)
def test_a_branch_on_a_tensor_is_told_in_the_same_words(text: str) -> None:
    told = read_break(text)
    assert (
        told.reason == "which branch is taken depends on the numbers in a tensor (data-dependent branching)"
    )
    assert told.advice == "torch.where computes both branches; torch.cond keeps the choice in the graph"


def test_a_break_that_dynamo_gives_one_word_for_is_told_in_a_sentence() -> None:
    assert read_break("step_unsupported").reason == (
        "a graph break below this line from which Dynamo cannot go on: the rest of the function runs uncompiled"
    )


def test_the_limit_of_compilations_is_told_by_its_name_and_number() -> None:
    told = read_break(LIMIT)
    assert told.reason == (
        "the limit of compilations, accumulated_recompile_limit=256, is reached: "
        "calls that fit no graph so far run uncompiled"
    )
    assert told.advice.endswith("raise torch._dynamo.config.accumulated_recompile_limit")


def test_where_all_lines_are_of_torch_the_innermost_is_told() -> None:
    told = read_break('Why\nUser stack trace:\n  File "/x/torch/optim/sgd.py", line 7, in step\n')
    assert told.line == CodeLine("/x/torch/optim/sgd.py", 7, "step")


@pytest.mark.parametrize(
    "text", ["", "\n", "User stack trace:\n", 'User stack trace:\n  File "", line x, in y']
)
def test_any_text_is_read(text: str) -> None:
    assert read_break(text).text == text
    assert read_guard(text, "", PATHS).text == text


def test_the_part_behind_a_break_has_the_name_of_its_function() -> None:
    assert plain_name("torch_dynamo_resume_in_forward_at_34") == "forward"
    assert plain_name("forward") == "forward"
    assert CodeLine.parse("C:\\m.py:31", "forward") == CodeLine("C:\\m.py", 31, "forward")
    assert CodeLine.parse("", "forward") is None


def test_part_of_another_class_is_no_fault() -> None:
    text = "1/0: ___check_type_id(self._modules['mlp'], 94), type=<class 'A'>  # mlp (HINT: type A)"
    told = read_guard(text, "blocks.1", ["blocks.1", "blocks.1.mlp"])
    assert told.reason == "blocks.1.mlp is of another class"
    assert told.advice == "nothing, if it comes once: a graph is kept for each class"


def test_a_module_whose_name_begins_like_that_of_a_size_is_named() -> None:
    told = read_guard("0/0: self._modules['size_head'].training == True", "", {"size_head"})
    assert (told.module, told.subject) == ("size_head", "size_head.training")
