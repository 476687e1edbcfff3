"""Floating-point operations of recurrent layers and convolutions equal what one counts by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helpers.flop_mode import flops_of, forward_and_backward, total_flops

#: What count_flops gives must not depend on how a model is run.
MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


#: Batch 2, 3 times, 4 inputs, 5 hidden, 2 layers, both directions: the second layer has 10 inputs.
FIRST = 2 * 2 * 3 * 5 * (4 + 5)
SECOND = 2 * 2 * 3 * 5 * (10 + 5)


@pytest.mark.parametrize("bias", [True, False])
def test_lstm_takes_four_gates_each_direction_and_twice_as_much_backward(bias: bool) -> None:
    model = nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True, bias=bias)
    forward = 2 * 4 * FIRST + 2 * 4 * SECOND
    assert forward == 11_520
    assert forward_and_backward(model, torch.ones(2, 3, 4)) == (11_520, 2 * 11_520)


def test_each_layer_and_direction_of_an_lstm_is_an_operator_of_its_own() -> None:
    model = nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True)
    layer, backward = "aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"
    assert flops_of(lambda: model(torch.ones(2, 3, 4))[0].sum().backward()) == [
        *[(layer, 2160), (layer, 2160), (layer, 3600), (layer, 3600)],
        *[(backward, 7200), (backward, 7200), (backward, 4320), (backward, 4320)],
    ]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers_count_the_same_in_every_mode(
    kind: Any, gates: int, mode: Callable[[], Any], bias: bool
) -> None:
    with mode():
        model = kind(4, 5, num_layers=2, bidirectional=True, batch_first=True, bias=bias)
        assert total_flops(lambda: model(torch.ones(2, 3, 4))) == 2 * gates * (FIRST + SECOND)


@pytest.mark.parametrize(("kind", "gates"), [(nn.GRU, 3), (nn.RNN, 1)])
def test_backward_of_gru_and_rnn_skips_what_needs_no_gradient(kind: Any, gates: int) -> None:
    # One layer and direction. Neither the input nor the first hidden state needs a gradient: 2 of 3 times are left.
    to_input, to_hidden = 2 * gates * 5 * 4 * 2, 2 * gates * 5 * 5 * 2
    forward, backward = forward_and_backward(kind(4, 5, batch_first=True), torch.ones(2, 3, 4))
    assert forward == 3 * (to_input + to_hidden)
    assert backward == 3 * (to_input + to_hidden) + 2 * to_hidden


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTMCell, 4), (nn.GRUCell, 3), (nn.RNNCell, 1)])
def test_loop_over_a_cell_counts_as_the_layer_does(kind: Any, gates: int, mode: Callable[[], Any]) -> None:
    with mode():
        cell = kind(4, 5)

        def run() -> None:
            state = None
            for _ in range(3):
                state = cell(torch.ones(2, 4), state)

        assert total_flops(run) == gates * FIRST


def test_backward_through_an_lstm_cell_takes_both_weights_and_the_hidden_state() -> None:
    cell = nn.LSTMCell(4, 5)
    hidden = (torch.ones(2, 5, requires_grad=True), torch.ones(2, 5))
    to_input, to_hidden = 2 * 2 * 4 * 5 * 4, 2 * 2 * 4 * 5 * 5
    assert (to_input, to_hidden) == (320, 400)
    assert total_flops(lambda: cell(torch.ones(2, 4), hidden)[0].sum().backward()) == 2 * 320 + 3 * 400


@pytest.mark.parametrize("mode", MODES)
def test_packed_sequence_counts_the_times_that_are(mode: Callable[[], Any]) -> None:
    with mode():
        packed = nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 4), [3, 1])
        model = nn.LSTM(4, 5)
        assert total_flops(lambda: model(packed)) == 2 * (3 + 1) * 4 * 5 * (4 + 5)


@pytest.mark.parametrize("mode", MODES)
def test_projection_of_an_lstm_is_a_third_matrix(mode: Callable[[], Any]) -> None:
    with mode():
        model = nn.LSTM(4, 5, proj_size=2)
        assert total_flops(lambda: model(torch.ones(3, 2, 4))) == 2 * 3 * 2 * (20 * 4 + 20 * 2 + 5 * 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("layer", "shape", "flops"),
    [
        (nn.Conv1d(4, 6, 3), (2, 4, 8), 2 * (2 * 6 * 6) * (4 * 3)),
        (nn.Conv1d(4, 6, 3), (4, 8), 2 * (6 * 6) * (4 * 3)),  # no batch
        (nn.Conv2d(4, 6, 3, padding=1, groups=2), (2, 4, 8, 8), 2 * (2 * 6 * 64) * (2 * 9)),
        (nn.Conv2d(4, 6, 3, padding="same"), (2, 4, 8, 8), 2 * (2 * 6 * 64) * (4 * 9)),
        (nn.Conv2d(4, 6, 3, stride=2, dilation=2), (2, 4, 9, 9), 2 * (2 * 6 * 9) * (4 * 9)),
        (nn.Conv3d(1, 2, 2), (1, 1, 3, 3, 3), 2 * (2 * 8) * 8),
        (nn.ConvTranspose1d(4, 6, 3), (4, 8), 2 * (4 * 8) * (6 * 3)),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (2, 4, 8, 8), 2 * (2 * 4 * 64) * (3 * 9)),
        (nn.ConvTranspose3d(1, 2, 2), (1, 1, 3, 3, 3), 2 * 27 * (2 * 8)),
    ],
    ids=str,
)
def test_convolution_multiplies_each_filter_with_each_place(
    layer: nn.Module, shape: tuple[int, ...], flops: int, mode: Callable[[], Any]
) -> None:
    with mode():
        assert total_flops(lambda: layer(torch.ones(shape))) == flops


@pytest.mark.parametrize("layer", [nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_each_gradient_of_a_convolution_takes_what_its_forward_does(layer: Any, groups: int) -> None:
    model = layer(4, 8, 3, groups=groups)
    weight_only = forward_and_backward(model, torch.ones(2, 4, 6, 6))
    both = forward_and_backward(model, torch.ones(2, 4, 6, 6, requires_grad=True))
    forward = 2 * (2 * 16 * 8 if layer is nn.Conv2d else 2 * 36 * 4) * (model.weight[0].numel())
    assert weight_only == (forward, forward)
    assert both == (forward, 2 * forward)
