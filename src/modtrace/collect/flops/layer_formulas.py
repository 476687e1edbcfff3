"""Formulas for the floating-point operations of attention and recurrent layers, given shapes.

Only matrix products are counted, not softmax and gates. Masks and `is_causal` do not lower the count, as in
`torch.utils.flop_counter`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from .formulas import Formula, elements, named


def _attention(args: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Counts queries times keys, then scores times values, as torch's `sdpa_flop_count` does.

    There may be any number of batch dimensions. Rows are counted in the output, because keys and values may have fewer
    heads (grouped queries).
    """
    query, key, value = args[:3]
    return 2 * elements(outputs[0][:-1]) * int(key[-2]) * int(query[-1] + value[-1])


def _attention_backward(args: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Counts five products, the first of which computes the scores again, as torch's `sdpa_backward_flop_count`.

    This is 2.5 times the forward if queries and values are equally wide, as in FlashAttention-2 (Dao, 2023).
    """
    grad_output, query, key, value = args[:4]
    return 2 * elements(grad_output[:-1]) * int(key[-2]) * int(3 * query[-1] + 2 * value[-1])


def _attention_by_position(lengths: int, args: Sequence[Any], outputs: Sequence[Any]) -> int | None:
    """Counts attention where heads come after positions, as in kernels (native/transformers/cuda/attention.cu).

    Returns None if sequences are packed into one, as their lengths are values of the tensors at `lengths`, which are
    gone.
    """
    query, key, value = args[:3]
    is_packed = any(args[lengths : lengths + 2])
    return None if is_packed else _attention([query, _by_head(key), value], [_by_head(query)])


def _attention_by_position_backward(args: Sequence[Any], outputs: Sequence[Any]) -> int | None:
    """Counts the backward of attention where heads come after positions."""
    grad_output, query, key, value = args[:4]
    if any(args[6:8]):
        return None
    return _attention_backward([_by_head(grad_output), query, _by_head(key), value], outputs)


def _by_head(shape: Any) -> Any:
    batch, positions, heads, width = shape
    return batch, heads, positions, width


def _multi_head_attention(args: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Counts projections and attention in the fast path of `nn.MultiheadAttention`.

    The source is native/transformers/attention.cpp.
    """
    query, key, _, width = args[:4]
    rows, key_rows = elements(query[:-1]), elements(key[:-1])
    projections = 4 * rows * width * width + 4 * key_rows * width * width
    return int(projections + 4 * rows * key[-2] * width)


def _encoder_layer(args: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Counts attention and feed-forward in the fast path of `nn.TransformerEncoderLayer`.

    The source is native/transformers/transformer.cpp.
    """
    source, width, *_ = args
    feed_forward = 2 * elements(source[:-1]) * (elements(args[14]) + elements(args[16]))
    return _multi_head_attention([source, source, source, width], outputs) + feed_forward


def _recurrent(first_weight: int, args: Sequence[Any], outputs: Sequence[Any], times: int = 1) -> int:
    """Counts a recurrent layer: every row (one time step of one example) is multiplied by two matrices.

    The matrices lead from the input and from the hidden state to the gates. For T time steps, B examples, I inputs, H
    hidden units and G gates (LSTM 4, GRU 3, RNN 1) the count is 2*T*B*G*H*(I + H). A backward computes the gradients of
    rows and of matrices, so `times` is 2. (native/mkldnn/RNN.cpp, native/RNN.cpp)
    """
    from_input, from_hidden = args[first_weight : first_weight + 2]
    return times * 2 * elements(args[0][:-1]) * (elements(from_input) + elements(from_hidden))


def _recurrent_layers(weights: int, args: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Counts all layers and directions of a recurrent network.

    The argument at position `weights` lists their parameters. The projection of an LSTM (`proj_size`) is a third
    matrix. A packed sequence has one row for each existing time step.
    """
    return 2 * elements(args[0][:-1]) * sum(elements(arg) for arg in args[weights] if len(arg) == 2)


def _recurrent_backward(args: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Counts the gradients of the rows, and those of the matrices if the output mask asks for them.

    The source is native/cudnn/RNN.cpp.
    """
    return _recurrent_layers(1, args, outputs) * (1 + bool(args[-1][3]))


def _nothing(args: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Returns 0 for the gates of a cell, which work element by element; the products are operators of their own."""
    return 0


_ATTENTION = """
    scaled_dot_product_attention _scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable
    _triton_scaled_dot_attention
"""
_ATTENTION_BACKWARD = """
    _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_fused_attention_overrideable_backward
"""
_GATES = """
    _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward _thnn_fused_lstm_cell_backward_impl
    _thnn_differentiable_lstm_cell_backward _thnn_fused_gru_cell _thnn_fused_gru_cell_backward
    _thnn_differentiable_gru_cell_backward
"""

#: Formulas by the operator's name, without its overload unless the overload has its own arguments.
LAYERS: Mapping[str, Formula] = {
    **named(_attention, _ATTENTION),
    **named(_attention_backward, _ATTENTION_BACKWARD),
    **named(partial(_attention_by_position, 3), "_flash_attention_forward"),
    **named(partial(_attention_by_position, 4), "_efficient_attention_forward"),
    **named(_attention_by_position_backward, "_flash_attention_backward _efficient_attention_backward"),
    **named(_multi_head_attention, "_native_multi_head_attention"),
    **named(_encoder_layer, "_transformer_encoder_layer_fwd"),
    **named(partial(_recurrent, 1), "mkldnn_rnn_layer"),
    **named(partial(_recurrent, 1, times=2), "mkldnn_rnn_layer_backward"),
    **named(partial(_recurrent, 2), "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"),
    **named(partial(_recurrent_layers, 1), "_cudnn_rnn miopen_rnn"),
    **named(_recurrent_backward, "_cudnn_rnn_backward miopen_rnn_backward"),
    **named(partial(_recurrent_layers, 2), "_lstm_mps lstm.input gru.input rnn_tanh.input rnn_relu.input"),
    **named(partial(_recurrent_layers, 3), "lstm.data gru.data rnn_tanh.data rnn_relu.data"),
    **named(_nothing, _GATES),
}
