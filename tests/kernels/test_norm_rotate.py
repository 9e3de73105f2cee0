from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from lazyio.engine.layers import rope
from lazyio.engine.layers.norm import RmsNorm
from lazyio.engine.layers.rope import Rope, norm_and_rotate
from lazyio.errors import Unsupported
from lazyio.kernels.norm_rotate import Arguments, norm_rotate, reference, supports

CPU = torch.device("cpu")


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 16), (37, 5, 128), (3, 2, 512)])
def test_any_number_of_heads(tokens: int, heads: int, dim: int, device: torch.device):
    given = Arguments.random(device, 3, tokens, heads, dim, dim // 8)
    (found,), (expected,) = given.results(norm_rotate), given.results(reference)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_layers_do_the_same_with_and_without(offset: float, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    given = Arguments.random(device, 4, 9, 3, 32, 4)
    norm = RmsNorm(32, 1e-6, offset=offset).requires_grad_(False).to(device)
    norm.weight.copy_(given.weight)
    angles = Rope(100.0, 8).angles(torch.arange(9, device=device), torch.float32)
    launched = []
    monkeypatch.setattr(
        rope, "norm_rotate", lambda x, *rest, **sizes: launched.append(x) or norm_rotate(x, *rest, **sizes)
    )
    found = []
    for usable in (True, False):
        monkeypatch.setattr(rope, "usable", lambda _, usable=usable: usable)
        found.append(norm_and_rotate(norm, given.x, angles))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert len(launched) == 1


def test_what_has_no_kernel():
    assert supports(256)
    assert not supports(96)
    with pytest.raises(Unsupported, match=r"no kernel for torch\.float32 and heads of 24: they have those for float32"):
        Arguments.random(CPU, 0, 2, 1, 24, 4).results(norm_rotate)
    with pytest.raises(Unsupported, match=r"no kernel for torch\.float64"):
        Arguments.random(CPU, 0, 2, 1, 32, 4, torch.float64).results(norm_rotate)


@pytest.mark.parametrize(
    "change",
    [
        lambda given: replace(given, x=given.x.transpose(1, 2)),
        lambda given: replace(given, weight=given.weight[:16]),
        lambda given: replace(given, weight=given.weight.repeat_interleave(2)[::2]),
        lambda given: replace(given, cos=given.cos[:1]),
        lambda given: replace(given, sin=given.sin.half()),
        lambda given: replace(given, sin=given.sin[..., :2]),
        lambda given: replace(given, cos=given.cos.to("meta")),
    ],
)
def test_what_does_not_fit_is_never_launched(change):
    with pytest.raises(AssertionError):
        change(Arguments.random(CPU, 0, 4, 32, 32, 4)).results(norm_rotate)


def test_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from lazyio.kernels.norm_rotate import *\n"
        "given = Arguments.random(torch.device('cpu'), 0, 4, 2, 32, 4)\n"
        "given.results(reference); given.results(norm_rotate)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("lazyio.errors.Unsupported: the kernel of norms and rotations needs Triton, which can't be")
