import pytest
import torch

from lazyio.engine import place
from lazyio.engine.models.base import Model
from lazyio.engine.place import check_memory, check_state, device_of, dtype_of
from lazyio.engine.state import State
from lazyio.errors import NeverFits, SettingError, Unsupported

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


def test_the_device_asked_for() -> None:
    assert device_of("cpu") == CPU
    assert device_of(CPU) == CPU


@pytest.mark.parametrize("asked", ["gpu", "mps", "meta", "cpu:3", 1.5])
def test_devices_there_are_not(asked: str) -> None:
    with pytest.raises(SettingError, match=r"device is .*; it can be cpu, cuda or cuda:N"):
        device_of(asked)


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(Unsupported, match="device is 'cuda:2', and torch sees 2 CUDA devices here: set device to cpu"):
        device_of("cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(Unsupported, match="device is 'cuda', and torch sees 0 CUDA devices here"):
        device_of("cuda")


@pytest.mark.parametrize(("there", "device"), [(True, torch.device("cuda", 0)), (False, CPU)])
def test_the_device_without_a_word(monkeypatch: pytest.MonkeyPatch, there: bool, device: torch.device) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(there))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert device_of(None) == device


@pytest.mark.parametrize(
    ("asked", "config", "device", "dtype"),
    [
        ("bfloat16", {}, CPU, torch.bfloat16),
        (torch.float16, {}, CPU, torch.float16),
        ("torch.float32", {"dtype": "bfloat16"}, CUDA, torch.float32),
        (None, {"dtype": "bfloat16"}, CPU, torch.float32),
        (None, {"dtype": "float16"}, CUDA, torch.float16),
        (None, {"torch_dtype": "float32"}, CUDA, torch.float32),
        (None, {}, CUDA, torch.bfloat16),
        (None, {"dtype": "float8_e4m3fn"}, CUDA, torch.bfloat16),
    ],
)
def test_the_dtype(
    asked: str | torch.dtype | None, config: dict[str, str], device: torch.device, dtype: object
) -> None:
    assert dtype_of(asked, config, device) == dtype


def test_another_dtype() -> None:
    with pytest.raises(SettingError, match="dtype is 'int8'; it can be float32, bfloat16, float16"):
        dtype_of("int8", {}, CPU)


class Sized(Model):
    """A state of a KiB a token."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)

    def new_state(self, capacity: int, device: torch.device | None = None) -> State:
        assert device == torch.device("meta")
        return State({"all": torch.empty(capacity, 1024, dtype=torch.int8, device=device)}, capacity)

    @property
    def device(self) -> torch.device:
        return CPU

    @classmethod
    def from_config(cls, config: object) -> Model:
        raise AssertionError

    def forward(self, ubatch: object, rows: object) -> torch.Tensor:
        raise AssertionError

    def logits(self, hidden: object) -> torch.Tensor:
        raise AssertionError


def test_a_state_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "available_memory_bytes", lambda: 1 << 20)
    check_state(Sized(), 1024)
    with pytest.raises(NeverFits) as error:
        check_state(Sized(), 1025)
    assert str(error.value) == (
        "the state of a sequence of 1025 tokens takes 1.0 MiB, and 1.0 MiB of memory can be had on cpu: "
        "shorten the prompt, or lower max_tokens"
    )


def test_memory_of_a_gpu_counts_what_torch_holds_and_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300)
    check_memory(1400, "it", CUDA, "less")
    with pytest.raises(NeverFits, match=r"it takes 1.4 KiB, and 1.4 KiB of memory can be had on cuda:0: less"):
        check_memory(1401, "it", CUDA, "less")
