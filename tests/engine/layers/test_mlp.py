from __future__ import annotations

import torch

from lazyio.engine.layers.mlp import SiluMlp


def test_the_formula():
    layer = SiluMlp(16, 24)
    generator = torch.Generator().manual_seed(4)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    x = torch.randn(3, 16, generator=generator)
    w = {name: parameter.double() for name, parameter in layer.named_parameters()}
    gate, up = x.double() @ w["gate_proj.weight"].T, x.double() @ w["up_proj.weight"].T
    expected = (gate * gate.sigmoid() * up) @ w["down_proj.weight"].T
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-4)
