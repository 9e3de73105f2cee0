"""MLX tables become tables whose rows are in one place, with the same values."""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from lazyio import TableError, find_table, open_table, row_ids_of

TOOL = Path(__file__).resolve().parents[2] / "tools" / "interleave.py"
PLE = "model.layers.1.ple.ple_embedding."
KEY = PLE + "ngram_embedding"
CONFIG = {"model_type": "qwen4_exp", "text_config": {"eos_token_id": 255, "ngram_size": 3, "heads_per_ngram": 2}}
CONSTANTS = {
    "layer_multipliers": (3, 5, 7),
    "ngram_heads_vocab_sizes": (11, 13, 17, 19),
    "ngram_heads_offsets": (0, 11, 24, 41),
}

Tensors = dict[str, tuple[str, list[int], bytes]]


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("interleave", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["interleave"] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tool: Any):
    return lambda *arguments: CliRunner().invoke(tool.app, [str(argument) for argument in arguments])


def write(path: Path, tensors: Tensors) -> None:
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def bf16(values: np.ndarray) -> bytes:
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


class Made:
    """A table of 62 rows in two shards, with its values worked out apart from how they are stored."""

    def __init__(self, bits: int, group: int = 32, f16: bool = False) -> None:
        rng = np.random.default_rng(bits)
        rows, values = 62, 160 if group == 32 else 2 * group
        numbers = rng.integers(0, 1 << bits, (rows, values), np.uint32)
        # Short floats, which both types hold.
        scales, biases = (
            rng.integers(-64, 64, (rows, values // group)).astype(np.float32) / np.float32(64) for _ in range(2)
        )
        self.values = numbers * scales.repeat(group, axis=1) + biases.repeat(group, axis=1)
        words = np.zeros((rows, values * bits // 32), np.uint32)
        for place in range(32 // bits):
            words |= numbers[:, place :: 32 // bits] << np.uint32(place * bits)
        self.tensors: Tensors = {
            PLE + name: ("I64", [len(v)], struct.pack(f"<{len(v)}q", *v)) for name, v in CONSTANTS.items()
        }
        for number, part in enumerate((slice(0, 31), slice(31, 62))):
            floats = [each[part].astype("<f2").tobytes() if f16 else bf16(each[part]) for each in (scales, biases)]
            shape = [31, values // group]
            name = f"{KEY}.shard_{number}"
            self.tensors[f"{name}.weight"] = ("U32", [31, words.shape[1]], words[part].astype("<u4").tobytes())
            self.tensors[f"{name}.scales"] = ("F16" if f16 else "BF16", shape, floats[0])
            self.tensors[f"{name}.biases"] = ("F16" if f16 else "BF16", shape, floats[1])

    def write(self, folder: Path, quantization: Any = None) -> Path:
        """A folder of two files and an index; parts of a row lie in different ones."""
        folder.mkdir()
        index = {name: f"{'b' if name.endswith('scales') else 'a'}.safetensors" for name in self.tensors}
        for file in set(index.values()):
            write(folder / file, {name: tensor for name, tensor in self.tensors.items() if index[name] == file})
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        config = CONFIG | ({"quantization": quantization} if quantization is not None else {})
        (folder / "config.json").write_text(json.dumps(config))
        return folder


@pytest.mark.parametrize(
    ("bits", "group", "f16", "quantization", "dtype"),
    [
        (4, 32, False, None, "MLX_Q4_G32"),
        (8, 32, True, {"group_size": 32, "bits": 8}, "MLX_Q8_G32_F16"),
        (4, 64, False, {"group_size": 64, "bits": 4}, "MLX_Q4_G64"),
        (4, 64, False, {"group_size": 32, f"{KEY}.shard_0": {"group_size": 64}}, "MLX_Q4_G64"),
    ],
)
def test_values_are_those_of_the_model(
    tmp_path: Path, run: Any, bits: int, group: int, f16: bool, quantization: Any, dtype: str
) -> None:
    made = Made(bits, group, f16)
    model = made.write(tmp_path / "model", quantization)
    with pytest.raises(TableError, match=r"python tools/interleave\.py .*model NEW_FOLDER"):
        find_table(model)
    done = run(model, tmp_path / "new")
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["config.json", "table.safetensors"]
    with open_table(tmp_path / "new", mode="on") as table:
        assert (table.dtype, table.n_rows, table.row_values) == (dtype, 62, made.values.shape[1])
        assert f"62 rows of {table.row_bytes} bytes ({dtype})" in done.output
        assert row_ids_of(table.spec)([1, 2]).shape == (2, 4)
        ids = np.array([[61, 0, 30], [31, 5, 5]])
        np.testing.assert_array_equal(table.decode(table.gather(ids)), made.values[ids])


def test_rows_are_brought_together_a_few_at_a_time(
    tmp_path: Path, tool: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(4)
    model = made.write(tmp_path / "model")
    assert run(model, tmp_path / "whole").exit_code == 0
    monkeypatch.setattr(tool, "_STEP_BYTES", 7 * 100)
    assert run(model, tmp_path / "parts").exit_code == 0
    whole, parts = ((tmp_path / name / "table.safetensors").read_bytes() for name in ("whole", "parts"))
    assert whole == parts


def test_the_command_as_the_refusal_gives_it(tmp_path: Path) -> None:
    made = Made(4)
    model = made.write(tmp_path / "a model")
    with pytest.raises(TableError) as refused:
        find_table(model)
    command = str(refused.value).rpartition("python ")[2].replace("NEW_FOLDER", "new")
    command = f"cd {tmp_path} && {sys.executable} {TOOL.parent.parent}/{command}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("wrote new/table.safetensors: 62 rows of 100 bytes (MLX_Q4_G32), ")
    assert done.stderr == ""
    assert find_table(tmp_path / "new").is_ple


def test_existing_tables_are_kept(tmp_path: Path, run: Any) -> None:
    model = Made(4).write(tmp_path / "model")
    assert run(model, tmp_path / "new").exit_code == 0
    refused = run(model, tmp_path / "new")
    assert refused.exit_code == 2
    assert "exists; give another folder, or --force" in refused.output
    assert run(model, tmp_path / "new", "--force").exit_code == 0
    assert "is the model's own folder" in run(model, model).output


def refusal(tmp_path: Path, run: Any, made: Made, *arguments: object, quantization: Any = None) -> str:
    done = run(made.write(tmp_path / "model", quantization), tmp_path / "new", *arguments)
    assert done.exit_code == 2
    assert not (tmp_path / "new").exists()
    return " ".join(done.output.split())


def test_models_without_such_a_table(tmp_path: Path, run: Any) -> None:
    made = Made(4)
    for number in (0, 1):
        del made.tensors[f"{KEY}.shard_{number}.biases"]
    assert "has no per-layer embedding table in MLX's layout" in refusal(tmp_path, run, made)
    assert "can't open" in run(tmp_path / "missing.safetensors", tmp_path / "new").output


def test_a_table_by_name(tmp_path: Path, run: Any) -> None:
    assert f"has no table x in MLX's layout of weight, scales and biases; in it are: {KEY}.weight" in refusal(
        tmp_path, run, Made(4), "--tensor", "x"
    )
    assert run(tmp_path / "model", tmp_path / "new", "--tensor", KEY).exit_code == 0


def test_shards_that_are_missing_or_differ(tmp_path: Path, run: Any) -> None:
    made = Made(4)
    other = {name: tensor for name, tensor in Made(8).tensors.items() if "shard_1" in name}
    made.tensors |= other
    assert "shards of" in refusal(tmp_path, run, made)
    made = Made(4)
    made.tensors = {name.replace("shard_1", "shard_2"): tensor for name, tensor in made.tensors.items()}
    (tmp_path / "second").mkdir()
    assert "lacks shard 1" in refusal(tmp_path / "second", run, made)
    made = Made(4)
    del made.tensors[f"{KEY}.shard_1.scales"]
    (tmp_path / "third").mkdir()
    assert "shard_1.scales, without which" in refusal(tmp_path / "third", run, made)


def test_sizes_of_groups(tmp_path: Path, run: Any) -> None:
    assert "bits a value in groups of 48" in refusal(tmp_path, run, Made(4), "--group", 48)
    (tmp_path / "second").mkdir()
    told = refusal(tmp_path / "second", run, Made(4), quantization={"group_size": "32"})
    assert "group_size is '32' and should be a number of values; give --group" in told


def test_a_failure_leaves_no_table(tmp_path: Path, tool: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Made(4).write(tmp_path / "model")

    def fail(*_: object) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tool, "_rows_of", fail)
    done = run(model, tmp_path / "new")
    assert done.exit_code == 2
    assert "No space left on device" in done.output
    assert list((tmp_path / "new").iterdir()) == []
