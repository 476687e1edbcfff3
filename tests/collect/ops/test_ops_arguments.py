"""What a recording keeps of an op's arguments: the slots of its tensors, and the template of the rest."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from collect.ops.test_ops_tensors import edges, op_rows, recorded


def texts(run: Callable[[], object]) -> list[str]:
    """A line for each op but those that only fill a tensor: its name and template."""
    rows = op_rows(recorded(run))
    fills = ("aten.ones.default", "aten.zeros.default", "aten.lift_fresh.default")
    return [f"{row['name'].removeprefix('aten.')} {row['args']}" for row in rows if row["name"] not in fills]


def test_numbers_are_written_as_what_they_are_though_they_be_equal():
    def run():
        x = torch.ones(2)
        for number in (1, 1.0, True, 1 + 0j, 0.0, -0.0, 2j, float("inf"), float("-inf"), float("nan")):
            x * number

    assert texts(run) == [
        'mul.Tensor {"self":"$self","other":1}',
        'mul.Tensor {"self":"$self","other":1.0}',
        'mul.Tensor {"self":"$self","other":true}',
        'mul.Tensor {"self":"$self","other":"(1+0j)"}',
        'mul.Tensor {"self":"$self","other":0.0}',
        'mul.Tensor {"self":"$self","other":-0.0}',
        'mul.Tensor {"self":"$self","other":"2j"}',
        'mul.Tensor {"self":"$self","other":"inf"}',
        'mul.Tensor {"self":"$self","other":"-inf"}',
        'mul.Tensor {"self":"$self","other":"nan"}',
    ]


def test_dtypes_devices_layouts_and_generators_are_words():
    def run():
        x = torch.ones(2, 2)
        x.to(torch.float64)
        x.clone(memory_format=torch.contiguous_format)
        torch.randn(2, generator=torch.Generator())
        torch.empty(1, dtype=torch.bool, device="meta")
        F.gelu(x, approximate="tanh")

    assert texts(run) == [
        '_to_copy.default {"self":"$self","dtype":"float64"}',
        'clone.default {"self":"$self","memory_format":"contiguous_format"}',
        'randn.generator {"size":[2],"generator":"<Generator>","device":"cpu","pin_memory":false}',
        'empty.memory_format {"size":[1],"dtype":"bool","device":"meta","pin_memory":false}',
        'gelu.default {"self":"$self","approximate":"tanh"}',
    ]


def test_default_is_left_out_wherever_it_is_given():
    def run():
        x = torch.ones(1, 1, 2, 2, device="cpu")  # where attention is one op
        for causal in (False, True):
            F.scaled_dot_product_attention(x, x, x, dropout_p=0.0, is_causal=causal)
        x.sum((0,), keepdim=False, dtype=torch.float64)
        torch.add(x, x, alpha=1)
        F.max_pool2d(x, 2, padding=0, ceil_mode=True)

    assert texts(run) == [
        '_scaled_dot_product_flash_attention_for_cpu.default {"query":"$query","key":"$key","value":"$value"}',
        '_scaled_dot_product_flash_attention_for_cpu.default {"query":"$query","key":"$key","value":"$value",'
        '"is_causal":true}',
        'sum.dim_IntList {"self":"$self","dim":[0],"dtype":"float64"}',
        'add.Tensor {"self":"$self","other":"$other"}',
        'max_pool2d_with_indices.default {"self":"$self","kernel_size":[2,2],"ceil_mode":true}',
    ]


def test_lists_of_tensors_and_none_have_a_slot_for_each():
    def run():
        a, b = torch.ones(2), torch.zeros(2)
        first, second = torch.cat([a, b]).split(2)
        torch.stack([second, first, a]).unbind(0)[2] * 2
        x = torch.ones(2, 2)
        x.index_put_((torch.tensor([0]),), b)
        x[:, None, [0, 1]]

    assert texts(run) == [
        'cat.default {"tensors":["$tensors[0]","$tensors[1]"]}',
        'split.Tensor {"self":"$self","split_size":2}',
        'stack.default {"tensors":["$tensors[0]","$tensors[1]","$tensors[2]"]}',
        'unbind.int {"self":"$self"}',
        'mul.Tensor {"self":"$self","other":2}',
        'index_put_.default {"self":"$self","indices":["$indices[0]"],"values":"$values"}',
        'unsqueeze.default {"self":"$self","dim":1}',
        'index.Tensor {"self":"$self","indices":[null,null,"$indices[2]"]}',
    ]
    assert edges(run) == [
        "0 ones.default()",
        "1 zeros.default()",
        "2 cat.default(tensors[0]=0, tensors[1]=1)",
        "3 split.Tensor(self=2)",
        "4 stack.default(tensors[0]=3[1], tensors[1]=3[0], tensors[2]=0)",
        "5 unbind.int(self=4)",
        "6 mul.Tensor(self=5[2])",
        "7 ones.default()",
        "8 lift_fresh.default(self=leaf0)",
        "9 index_put_.default(self=7, indices[0]=leaf0, values=1)",
        "10 unsqueeze.default(self=9)",
        "11 lift_fresh.default(self=leaf1)",
        "12 index.Tensor(self=10, indices[2]=leaf1)",
    ]


def test_lists_that_are_written_to_make_each_of_their_tensors():
    def run():
        several = [torch.ones(2), torch.zeros(3)]
        doubled = torch._foreach_mul(several, 2)
        torch._foreach_add_(several, doubled)
        several[0] * 2
        several[1] * 2
        doubled[1] * 2

    assert edges(run)[2:] == [
        "2 _foreach_mul.Scalar(self[0]=0, self[1]=1)",
        "3 _foreach_add_.List(self[0]=0, self[1]=1, other[0]=2[0], other[1]=2[1])",
        "4 mul.Tensor(self=3)",
        "5 mul.Tensor(self=3)",
        "6 mul.Tensor(self=2[1])",
    ]


def test_tensors_given_by_name_have_their_slots():
    def run():
        x, y = torch.ones(2), torch.zeros(2)
        torch.ops.aten.add.Tensor(x, other=y, alpha=2)
        torch.clamp(x, min=y)

    assert texts(run) == [
        'add.Tensor {"self":"$self","other":"$other","alpha":2}',
        'clamp.Tensor {"self":"$self","min":"$min"}',
    ]
    assert edges(run)[2:] == ["2 add.Tensor(self=0, other=1)", "3 clamp.Tensor(self=0, min=1)"]


def test_arguments_that_are_none_have_no_slot():
    x = torch.ones(1, 1, 2, 2)

    def run():
        F.layer_norm(x, (2,))
        F.conv2d(x, x)

    assert texts(run) == [
        'native_layer_norm.default {"input":"$input","normalized_shape":[2],"weight":null,"bias":null,"eps":1e-05}',
        'convolution.default {"input":"$input","weight":"$weight","bias":null,"stride":[1,1],"padding":[0,0],'
        '"dilation":[1,1],"transposed":false,"output_padding":[0,0],"groups":1}',
    ]
    assert edges(run) == [
        "0 native_layer_norm.default(input=leaf0)",
        "1 convolution.default(input=leaf0, weight=leaf0)",
    ]


def test_long_lists_of_numbers_are_cut():
    sizes = "[" + "1," * 64 + '"... 70 in all"]'
    assert texts(lambda: torch.ones(70).split([1] * 70)) == [
        f'split_with_sizes.default {{"self":"$self","split_sizes":{sizes}}}'
    ]
