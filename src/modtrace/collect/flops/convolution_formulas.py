"""Formulas for the floating-point operations of convolutions, given shapes.

Padding counts as data, as in `conv_flop_count` of torch.utils.flop_counter. That file (2.13) has most forward formulas;
this one has those that are missing or wrong there:

- `convolution_backward`: for the gradient of a grouped weight, torch pairs every channel of the input with every
  channel of the output, which is `groups` times too many. With 4 groups its count is 2.5 times ours; with 8, 4.5 times.
- `cudnn_convolution`: torch reads the argument `benchmark` as `transposed`, which other convolutions have there.
- `_slow_conv2d_forward`: torch's formula fails because it expects more arguments than the operator has.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from .formulas import Formula, elements, named


def _direct(weight: int, args: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Counts a convolution: each element of the output is a dot product with one filter, of shape `weight[1:]`."""
    return 2 * elements(outputs[0]) * elements(args[weight][1:])


def _transposed(args: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Counts a transposed convolution: each element of the input is multiplied by a filter of shape `weight[1:]`."""
    return 2 * elements(args[0]) * elements(args[1][1:])


def _backward(transposed: int, args: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Counts a backward: the forward's count for the gradient of the input, and again for that of the weight.

    Each gradient pairs every multiplication of the forward with an element of the output's gradient; the bias is only
    summed. The argument at position `transposed` says whether the forward was transposed. The last argument is the mask
    of the gradients that are wanted.
    """
    grad_output, source, weight = args[:3]
    every = source if args[transposed] else grad_output
    return 2 * elements(every) * elements(weight[1:]) * sum(map(bool, args[-1][:2]))


def _time_batch_channel(args: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Counts `conv_tbc`, whose weight is (width, input channels, output channels)."""
    return 2 * elements(outputs[0]) * elements(args[1][:2])


_DIRECT = """
    conv1d conv2d conv3d _convolution_mode cudnn_convolution cudnn_convolution_relu cudnn_convolution_add_relu
    miopen_convolution miopen_convolution_relu miopen_convolution_add_relu miopen_depthwise_convolution
    mkldnn_convolution _mps_convolution thnn_conv2d _slow_conv2d_forward slow_conv3d slow_conv3d_forward
    _conv_depthwise2d conv_depthwise3d slow_conv_dilated2d slow_conv_dilated3d _nnpack_spatial_convolution
"""
_TRANSPOSED = """
    conv_transpose1d conv_transpose2d conv_transpose3d cudnn_convolution_transpose miopen_convolution_transpose
    _mps_convolution_transpose slow_conv_transpose2d slow_conv_transpose3d
"""

#: Formulas by the operator's name, without its overload unless the overload has its own arguments.
CONVOLUTIONS: Mapping[str, Formula] = {
    **named(partial(_direct, 1), _DIRECT),
    **named(_transposed, _TRANSPOSED),
    **named(partial(_backward, 7), "convolution_backward"),
    **named(partial(_backward, 6), "convolution_backward_overrideable"),
    **named(_time_batch_channel, "conv_tbc"),
    **named(partial(_direct, 1), "mkldnn::_convolution_pointwise"),
    **named(
        partial(_direct, 2), "mkldnn::_convolution_pointwise.binary mkldnn::_convolution_pointwise_.binary"
    ),
    **named(_transposed, "mkldnn::_convolution_transpose_pointwise"),
}
