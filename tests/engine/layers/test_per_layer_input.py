from __future__ import annotations

import torch

from lazyio.engine.layers.per_layer_input import PerLayerInputs, TakesPerLayerInput

TOKENS, LAYERS, WIDTH, HIDDEN = 5, 3, 4, 6


class Rows:
    """Rows that tell how often they were asked for."""

    def __init__(self) -> None:
        self.asked = 0
        self.rows = torch.randn(TOKENS, LAYERS * WIDTH, generator=torch.Generator().manual_seed(1))

    def values(self) -> torch.Tensor:
        self.asked += 1
        return self.rows


def test_the_inputs_are_the_mean_of_context_and_rows_layer_after_layer():
    rows = Rows()
    context = torch.randn(TOKENS, LAYERS, WIDTH, generator=torch.Generator().manual_seed(2))
    inputs = PerLayerInputs(context, rows, scale=3.0, mean_scale=0.5)
    for layer in (1, 0, 2):
        of_layer = rows.rows[:, layer * WIDTH : (layer + 1) * WIDTH]
        torch.testing.assert_close(inputs.of(layer), (context[:, layer] + 3.0 * of_layer) * 0.5)


def test_rows_are_waited_for_once_when_a_layer_takes_its_input_and_its_gate_is_computed():
    rows = Rows()
    inputs = PerLayerInputs(torch.zeros(TOKENS, LAYERS, WIDTH), rows, scale=1.0, mean_scale=1.0)
    layer = TakesPerLayerInput(0, HIDDEN, WIDTH, 1e-6)
    asked_at_the_gate: list[int] = []
    layer.per_layer_input_gate.register_forward_hook(lambda *_: asked_at_the_gate.append(rows.asked))
    for parameter in layer.parameters():
        torch.nn.init.ones_(parameter)
    assert rows.asked == 0
    for _ in range(2):
        layer.taken(torch.ones(TOKENS, HIDDEN), inputs)
    assert asked_at_the_gate == [0, 1]
    assert rows.asked == 1


def test_without_inputs_a_layer_has_no_parameters_for_them():
    assert not list(TakesPerLayerInput(0, HIDDEN, 0, 1e-6).parameters())
