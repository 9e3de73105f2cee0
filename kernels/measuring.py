"""What tools that measure kernels lack, said in one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import torch

from lazyio.kernels.contract import usable


def the_gpu() -> torch.device:
    """The GPU to measure on. Ends the program where there is none that kernels can run on."""
    if not torch.cuda.is_available():
        end("there is no GPU to measure on")
    device = torch.device("cuda", torch.cuda.current_device())
    if not usable(device):
        end(f"kernels can't run on {torch.cuda.get_device_name(device)}: Triton and compute capability 8.0 are needed")
    return device


def end(why: str) -> NoReturn:
    """End the program with status 2 and one line, which says why."""
    print(f"{Path(sys.argv[0]).stem}: error: {why}", file=sys.stderr)
    sys.exit(2)
