"""Formulas for the floating-point operations of the matrix products that torch.utils.flop_counter lacks.

A multiply-add is 2. What an operator does besides its products, such as adding a bias, is not counted. A complex or
integer product counts as a real one. `torch.utils.flop_counter` does the same with products.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

#: A function of an operator's arguments and outputs, with a `torch.Size` for each tensor, that returns its FLOPs.
Formula = Callable[[Sequence[Any], Sequence[Any]], int | None]


def elements(shape: Sequence[int]) -> int:
    """Returns the number of elements of a tensor of this shape."""
    return prod(shape)


def named(formula: Formula, names: str) -> dict[str, Formula]:
    """Returns a mapping from each of the names to the formula; names without a namespace are in `aten`."""
    return {name if "::" in name else f"aten::{name}": formula for name in names.split()}


def _product(position: int, args: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Counts one dot product per element of the output, along the last dimension of the argument at `position`."""
    return 2 * elements(outputs[0]) * int(args[position][-1])


def _linear_backward(args: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Counts the gradients of input and weight, each of which costs as much as the forward.

    The source is `linear_backward` in derivatives.yaml.
    """
    _, grad_output, weight, wanted = args
    return 2 * elements(grad_output) * int(weight[-1]) * sum(map(bool, wanted[:2]))


def _sum_of_products(args: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Counts the products of a batch that `addbmm(self, batch1, batch2)` adds up."""
    return 2 * elements(args[1]) * int(args[2][-1])


def _rank_one(args: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Counts a multiply-add for each element of `addr`; `outer` counts as 0, as it multiplies element by element."""
    return 2 * elements(outputs[0])


def _grouped_product(args: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Counts a grouped product. The groups divide the rows, the columns, or (if both are 2-D) the summed dimension.

    In the last case, no group sums over the whole dimension. Rows after the last offset are counted too, because the
    shapes do not show the offsets.
    """
    first, second = args[0], args[1]
    if len(first) == len(second) == 2:
        return 2 * elements(first) * int(second[-1])
    return 2 * elements(outputs[0]) * int(first[-1])


def _list_of_products(args: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Counts one product for each pair of the two lists."""
    return sum(2 * elements(first) * int(second[-1]) for first, second in zip(args[0], args[1], strict=True))


def _two_products(args: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Counts `a @ b + c @ d`, which inductor fuses into one operator."""
    return 2 * elements(outputs[0]) * int(args[0][-1] + args[2][-1])


def _bilinear(args: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Counts the products of `_trilinear`: (rows, I) by (O, I, J), then by (rows, J)."""
    _, in_1, in_2 = args[2]
    return 2 * elements(outputs[0]) * int(in_2) * int(in_1 + 1)


def _trilinear(args: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Counts two batched products for each index of `unroll_dim` (aten/src/ATen/native/Linear.cpp).

    `expandN` lists the dimensions that the N-th tensor lacks, `summed` those that the output lacks. The first product
    runs over the dimensions of the first two tensors, and already sums those that the third lacks.
    """
    first, second, third, expand_1, expand_2, expand_3, summed = args[:7]
    unrolled = args[7] if len(args) > 7 else 1
    sizes = [_expanded(first, expand_1), _expanded(second, expand_2), _expanded(third, expand_3)]
    whole = [max(lengths) for lengths in zip(*sizes, strict=True)]
    pair = [max(lengths) for lengths in zip(*sizes[:2], strict=True)]
    pair[unrolled] = whole[unrolled]
    gone = [dim for dim in summed if dim in expand_3 and dim != unrolled]
    last = [1 if dim in gone else size for dim, size in enumerate(whole)]
    return 2 * elements(pair) + 2 * elements(last)


def _expanded(shape: Sequence[int], missing: Sequence[int]) -> list[int]:
    sizes = iter(shape)
    return [1 if dim in missing else next(sizes) for dim in range(len(shape) + len(missing))]


def _euclidean_distance(args: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Counts one product of rows that are extended by their squared norm and a one (native/Distance.cpp)."""
    return 2 * elements(outputs[0]) * int(args[0][-1] + 2)


_PRODUCTS_OF_FIRST = """
    bmm.dtype matmul linalg_matmul inner mv dot vdot linear mkldnn_linear mkl::_mkl_linear mkldnn::_linear_pointwise
    _int_mm _scaled_mm_v2 _weight_int4pack_mm _weight_int4pack_mm_for_cpu _weight_int4pack_mm_with_scales_and_zeros
    _weight_int8pack_mm _dyn_quant_matmul_4bit _mixed_dtypes_linear _wrapped_quantized_linear_prepacked
    fbgemm_linear_int8_weight fbgemm_linear_int8_weight_fp32_activation
    fbgemm_linear_fp16_weight fbgemm_linear_fp16_weight_fp32_activation
    onednn::qlinear_pointwise onednn::linear_dynamic_fp16 onednn::linear_relu_dynamic_fp16
    quantized::linear quantized::linear_relu quantized::linear_leaky_relu quantized::linear_tanh
    quantized::linear_dynamic quantized::linear_relu_dynamic
    quantized::linear_dynamic_fp16 quantized::int4mm_packed_weight_cpu quantized::linear_relu_dynamic_fp16
"""

#: Formulas by the operator's name, with or without its overload. For the overload `dtype` of `bmm`, `addmm` and
#: `baddbmm`, torch's own formulas (2.13) fail, as they take its last argument for the shape of the output.
PRODUCTS: Mapping[str, Formula] = {
    **named(partial(_product, 0), _PRODUCTS_OF_FIRST),
    **named(partial(_product, 1), "addmm.dtype baddbmm.dtype addmv _addmm_activation"),
    **named(_sum_of_products, "addbmm"),
    **named(_rank_one, "addr"),
    **named(_grouped_product, "_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2"),
    **named(_list_of_products, "_foreach_mm"),
    **named(_two_products, "inductor::_mm_plus_mm"),
    **named(_linear_backward, "linear_backward mkldnn_linear_backward"),
    **named(_bilinear, "bilinear"),
    **named(_trilinear, "_trilinear"),
    **named(_euclidean_distance, "_euclidean_dist"),
}
