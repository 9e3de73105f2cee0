from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

from lazyio.errors import TableError
from lazyio.ple.safetensors import open_safetensors
from lazyio.ple.spec import NgramHash

BESIDE = "model.layers.1.ple.ple_embedding."
TABLE = BESIDE + "ngram_embedding.weight"
MULTIPLIERS = (23703573157769, 20109073645365, 8052911324071)
CONSTANTS = NgramHash(MULTIPLIERS, (101, 103, 107, 109), (0, 101, 204, 311), 2, 255)
CONFIG = {"model_type": "qwen4_exp", "text_config": {"eos_token_id": 255, "ngram_size": 3, "heads_per_ngram": 2}}


def rows(count: int, value: int = 0) -> tuple[str, list[int], bytes]:
    return ("U8", [count, 4], bytes([value]) * count * 4)


def integers(*values: int) -> tuple[str, list[int], bytes]:
    return ("I64", [len(values)], struct.pack(f"<{len(values)}q", *values))


def refusal(path: Path) -> str:
    with pytest.raises(TableError) as caught:
        open_safetensors(str(path))
    return str(caught.value)


def write_index(folder: Path, weight_map: Mapping[str, object], name: str = "model") -> Path:
    path = folder / f"{name}.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


@pytest.fixture
def indexed(tmp_path: Path, write_safetensors) -> Path:
    """A folder of two files and an index, which does not mention a third."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_safetensors(folder / "one.safetensors", {"a": rows(1)})
    write_safetensors(folder / "two.safetensors", {"b": rows(2)})
    write_safetensors(folder / "other.safetensors", {"a": rows(3)})
    write_index(folder, {"a": "one.safetensors", "b": "two.safetensors"})
    return folder


def test_a_folder_with_an_index(indexed: Path) -> None:
    for path in (indexed, indexed / "model.safetensors.index.json"):
        checkpoint = open_safetensors(str(path))
        assert checkpoint.path == str(path)
        assert list(checkpoint.names) == ["a", "b"]
        assert checkpoint.tensor("a").path == str(indexed / "one.safetensors")
        assert checkpoint.tensor("b").shape == (2, 4)
        assert checkpoint.architecture is None


def test_a_file_and_a_folder_of_files(tmp_path: Path, write_safetensors) -> None:
    write_safetensors(tmp_path / "one.safetensors", {"a": rows(1)})
    write_safetensors(tmp_path / "two.safetensors", {"b": rows(2)})
    assert list(open_safetensors(str(tmp_path / "two.safetensors")).names) == ["b"]
    assert list(open_safetensors(str(tmp_path)).names) == ["a", "b"]
    write_safetensors(tmp_path / "two.safetensors", {"a": rows(2)})
    assert "'a' is in two files" in refusal(tmp_path)


def test_folders_that_leave_it_open(tmp_path: Path, indexed: Path) -> None:
    assert "without safetensors files" in refusal(tmp_path)
    write_index(indexed, {}, "another")
    assert list(open_safetensors(str(indexed)).names) == ["a", "b"]
    (indexed / "model.safetensors.index.json").rename(indexed / "third.safetensors.index.json")
    assert "several indexes: another.safetensors.index.json, third" in refusal(indexed)
    (indexed / "third.safetensors.index.json").unlink()
    assert list(open_safetensors(str(indexed)).names) == []


def test_an_index_that_disagrees_with_the_files(indexed: Path) -> None:
    write_index(indexed, {"a": "two.safetensors", "b": "missing.safetensors"})
    checkpoint = open_safetensors(str(indexed))
    with pytest.raises(TableError, match=r"'a' should be in .*two.safetensors and is not"):
        checkpoint.tensor("a")
    with pytest.raises(TableError, match=r"'b' should be in .*missing.safetensors, which is missing"):
        checkpoint.tensor("b")


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}, {"a": None}])
def test_a_damaged_index(indexed: Path, weight_map: object) -> None:
    (indexed / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "no weight_map" in refusal(indexed)


@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "link.safetensors", "x/../../outside.safetensors", "ABSOLUTE"]
)
def test_an_index_that_leads_outside(tmp_path: Path, indexed: Path, write_safetensors, file: str) -> None:
    outside = tmp_path / "outside.safetensors"
    write_safetensors(outside, {"a": rows(1)})
    (indexed / "link.safetensors").symlink_to(outside)
    write_index(indexed, {"a": str(outside) if file == "ABSOLUTE" else file})
    assert "names a file outside its folder" in refusal(indexed)


@pytest.mark.parametrize("file", ["", ".", "sub/..", "sub", "sub/"])
def test_an_index_that_names_a_folder(indexed: Path, file: str) -> None:
    (indexed / "sub").mkdir()
    write_index(indexed, {"a": file})
    told = refusal(indexed)
    assert f"model.safetensors.index.json is damaged: its weight_map names {file!r} as a file of tensors" in told


def test_links_and_folders_inside(indexed: Path) -> None:
    (indexed / "link.safetensors").symlink_to("one.safetensors")
    (indexed / "sub").mkdir()
    (indexed / "two.safetensors").rename(indexed / "sub" / "two.safetensors")
    write_index(indexed, {"a": "link.safetensors", "b": "sub/two.safetensors"})
    checkpoint = open_safetensors(str(indexed))
    assert checkpoint.tensor("a").shape == (1, 4)
    assert checkpoint.tensor("b").path == str(indexed / "sub" / "two.safetensors")


def test_the_folders_of_a_hub_cache(tmp_path: Path, write_safetensors) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    write_safetensors(blobs / "89ab", {"a": rows(1)})
    (snapshot / "one.safetensors").symlink_to("../../blobs/89ab")
    write_index(snapshot, {"a": "one.safetensors"})
    assert open_safetensors(str(snapshot)).tensor("a").shape == (1, 4)


def test_a_loop_of_links(indexed: Path) -> None:
    (indexed / "loop.safetensors").symlink_to("loop.safetensors")
    write_index(indexed, {"a": "loop.safetensors"})
    with pytest.raises(TableError, match=r"loop\.safetensors"):
        open_safetensors(str(indexed)).tensor("a")


def hashed(**change: tuple[str, list[int], bytes] | None) -> dict[str, tuple[str, list[int], bytes]]:
    tensors = {
        "layer_multipliers": integers(*CONSTANTS.multipliers),
        "ngram_heads_vocab_sizes": integers(*CONSTANTS.head_sizes),
        "ngram_heads_offsets": integers(*CONSTANTS.head_offsets),
        **change,
    }
    return {BESIDE + name: tensor for name, tensor in tensors.items() if tensor is not None} | {TABLE: rows(420)}


def test_constants_of_row_ids(tmp_path: Path, write_safetensors) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, hashed())
    assert open_safetensors(str(path)).ngram(TABLE) is None  # there is no config.json
    for config in (CONFIG, CONFIG["text_config"]):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert open_safetensors(str(path)).ngram(TABLE) == CONSTANTS
    assert open_safetensors(str(path)).ngram("model.embed_tokens.weight") is None
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert open_safetensors(str(path)).architecture == "qwen4_exp"
    write_safetensors(path, {TABLE: rows(420)})
    assert open_safetensors(str(path)).ngram(TABLE) is None


def test_constants_in_another_file(tmp_path: Path, write_safetensors) -> None:
    tensors = hashed()
    write_safetensors(tmp_path / "table.safetensors", {TABLE: tensors.pop(TABLE)})
    write_safetensors(tmp_path / "rest.safetensors", tensors)
    write_index(tmp_path, {TABLE: "table.safetensors"} | dict.fromkeys(tensors, "rest.safetensors"))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert open_safetensors(str(tmp_path)).ngram(TABLE) == CONSTANTS


def test_the_first_of_several_end_tokens(tmp_path: Path, write_safetensors) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, hashed())
    (tmp_path / "config.json").write_text('{"eos_token_id": [7, 9], "ngram_size": 3, "heads_per_ngram": 2}')
    constants = open_safetensors(str(path)).ngram(TABLE)
    assert constants is not None
    assert constants.eos == 7


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({"ngram_heads_offsets": None}, {}, "lacks .*ngram_heads_offsets"),
        ({"layer_multipliers": ("F64", [3], bytes(24))}, {}, r"must be a short list of I64 and is F64 \[3\]"),
        ({"layer_multipliers": ("I64", [3, 1], bytes(24))}, {}, r"I64 \[3, 1\]"),
        ({"layer_multipliers": integers()}, {}, r"I64 \[0\]"),
        ({"layer_multipliers": integers(*range(1025))}, {}, r"I64 \[1025\]"),
        ({}, {"ngram_size": 4}, "ngram_size is 4, but .*layer_multipliers has 3"),
        ({}, {"eos_token_id": None}, "eos_token_id of the text model must be a whole number and is None"),
        ({}, {"eos_token_id": []}, r"eos_token_id .* is \[\]"),
        ({}, {"heads_per_ngram": 2.0}, r"heads_per_ngram .* is 2.0"),
        ({}, {"text_config": 1}, "text_config is no object"),
    ],
)
def test_incomplete_constants(tmp_path: Path, write_safetensors, change, config, message: str) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, hashed(**change))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG["text_config"] | config))
    with pytest.raises(TableError, match=message):
        open_safetensors(str(path)).ngram(TABLE)


def test_a_damaged_config(tmp_path: Path, write_safetensors) -> None:
    write_safetensors(tmp_path / "model.safetensors", hashed())
    (tmp_path / "config.json").write_text("{")
    assert f"{tmp_path / 'config.json'} is damaged" in refusal(tmp_path)
