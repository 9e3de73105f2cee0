"""Where kernels run, and what they are compiled to for a GPU that need not be there."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

#: A body by its name, its constants, warps and stages.
Launch = tuple[str, Mapping[str, Any], int, int]

# In a process of its own: the interpreter, once chosen, stays.
_COMPILE = """
import importlib, json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

module, launches, types = json.loads(sys.argv[1])
bodies = importlib.import_module(module)
for name, constants, warps, stages in launches:
    body = getattr(bodies, name)
    at = {argument: (body.arg_names.index(argument),) for argument in body.arg_names}
    kinds = {argument: "constexpr" if argument in constants else types.get(argument, "*bf16") for argument in at}
    source = ASTSource(
        body,
        kinds,
        {at[argument]: value for argument, value in constants.items()},
        {place: [["tt.divisibility", 16]] for argument, place in at.items() if kinds[argument].startswith("*")},
    )
    options = {"num_warps": warps, "num_stages": stages}
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(json.dumps([name, compiled.metadata.shared, compiled.asm["ptx"]]))
"""


@pytest.fixture(params=["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """A device that kernels run on; on the CPU they are interpreted."""
    pytest.importorskip("triton")
    compiled = torch.cuda.is_available()
    if compiled != (request.param == "compiled"):
        pytest.skip("compiled kernels need a GPU" if not compiled else "with a GPU kernels are compiled")
    return torch.device("cuda" if compiled else "cpu")


@pytest.fixture
def compile_for_h200() -> Callable[[str, Sequence[Launch], Mapping[str, str]], list[tuple[str, int, str]]]:
    """Compile launches of a module's bodies: the name, shared bytes and PTX of each. Types but *bf16 are given."""
    pytest.importorskip("triton")

    def compile(module: str, launches: Sequence[Launch], types: Mapping[str, str]) -> list[tuple[str, int, str]]:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        command = [sys.executable, "-c", _COMPILE, json.dumps([module, launches, types])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return [tuple(json.loads(line)) for line in done.stdout.splitlines()]

    return compile
