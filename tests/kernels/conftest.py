"""Where kernels run."""

import pytest
import torch


@pytest.fixture(params=["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """A device that kernels run on; on the CPU they are interpreted."""
    pytest.importorskip("triton")
    compiled = torch.cuda.is_available()
    if compiled != (request.param == "compiled"):
        pytest.skip("compiled kernels need a GPU" if not compiled else "with a GPU kernels are compiled")
    return torch.device("cuda" if compiled else "cpu")
