"""Made models, loaded as any other: both formats of one seed are one model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lazyio
from lazyio.engine.synthetic import Plan, plan_model, write_folder, write_gguf
from lazyio.engine.synthetic.configs import ARCHITECTURES
from lazyio.engine.synthetic.rows import SCALE
from lazyio.engine.text.text import open_text
from lazyio.engine.ubatch import Ubatch
from lazyio.engine.weights.load import load_model, open_source, outline
from lazyio.engine.weights.trunk import plan_dummy, plan_trunk
from lazyio.errors import ModelError, NeverFits, SettingError
from lazyio.ple.codec import decode
from lazyio.ple.gguf import open_gguf
from lazyio.ple.rowids import row_ids_of
from lazyio.ple.tables import find_table

CPU = torch.device("cpu")
MESSAGES = [{"role": "user", "content": "What does the import statement do? naïve 日本"}]


class Known:
    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def values(self) -> torch.Tensor:
        return self._values


def rows_of(path: Path, ids: list[int]) -> torch.Tensor:
    with lazyio.open_table(path, mode="off") as table:
        packed = table.gather(row_ids_of(table.spec)(ids))
        return torch.from_numpy(decode(packed, table.spec.dtype, scale=table.spec.scale)).reshape(len(ids), -1)


def logits_of(path: Path, ids: list[int], zeroed: bool = False) -> torch.Tensor:
    source = open_source(path)
    model = load_model(plan_trunk(source, outline(source), device=CPU, dtype=torch.float32))
    rows = None
    if model.row_values:
        values = rows_of(path, ids)
        rows = Known(torch.zeros_like(values) if zeroed else values)
    ubatch = Ubatch.of([(model.new_state(len(ids)), ids)], CPU)
    return model.logits(model.step(ubatch, rows))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_folder_and_gguf_of_one_seed_are_one_model(architecture: str, tmp_path: Path):
    plan = plan_model(architecture, seed=5)
    folder = tmp_path / "model"
    write_folder(plan, folder, trunk="F32", table="F32")
    (file,) = write_gguf(plan, tmp_path / "model.gguf", trunk="F32", table="F32")
    texts = [open_text(place) for place in (folder, file)]
    ids, same = (text.chat(MESSAGES) for text in texts)
    assert ids == same
    assert texts[0].stop_ids == texts[1].stop_ids
    assert texts[0].decode(ids) == texts[1].decode(ids)
    one, other = (logits_of(place, ids) for place in (folder, file))
    assert one.shape == (len(ids), plan.config["vocab_size"])
    assert 0.2 < one.std() < 3
    assert torch.equal(one.argmax(-1), other.argmax(-1))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    if plan.table is not None:
        assert (one - logits_of(folder, ids, zeroed=True)).abs().max() > 0.1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_other_types_and_parts(architecture: str, tmp_path: Path):
    plan = plan_model(architecture, seed=5)
    folder = tmp_path / "model"
    write_folder(plan, folder, trunk="BF16", table="F8_E4M3" if architecture == "qwen4_exp" else "F16")
    table = "Q5_K" if architecture.startswith("gemma") else "IQ4_NL"
    paths = write_gguf(plan, tmp_path / "model.gguf", trunk="Q8_0", table=table, parts=3)
    assert [path.name for path in paths] == [f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    ids = open_text(paths[1]).chat(MESSAGES)
    one, other = logits_of(folder, ids), logits_of(paths[0], ids)
    assert one.isfinite().all()
    assert other.isfinite().all()
    if plan.table is None:
        # The same parameters, rounded more.
        assert torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1] > 0.95
        return
    spec = find_table(str(paths[0]))
    assert (spec.dtype, spec.rows, spec.row_values) == (table, plan.table.rows, plan.table.row_values)
    assert spec.extents[0].path.endswith("-00003-of-00003.gguf")
    assert find_table(str(folder)).scale == (SCALE if architecture == "qwen4_exp" else None)


def written(plan: Plan, place: Path) -> dict[str, bytes]:
    place.mkdir()
    write_folder(plan, place / "folder", shards=8)
    write_gguf(plan, place / "m.gguf", parts=2)
    return {path.name: path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_a_seed_gives_the_same_bytes_and_another_others(tmp_path: Path):
    one = written(plan_model("qwen4_exp", seed=1), tmp_path / "a")
    assert one == written(plan_model("qwen4_exp", seed=1), tmp_path / "b")
    other = written(plan_model("qwen4_exp", seed=2), tmp_path / "c")
    assert one.keys() == other.keys()
    assert {name for name in one if one[name] != other[name]} == {
        *(name for name in one if name.endswith(".safetensors")),
        "m-00002-of-00002.gguf",
    }


def test_shards_of_a_table_of_ngrams(tmp_path: Path):
    plan = plan_model("qwen4_exp", rows=5000)
    write_folder(plan, tmp_path / "eight", shards=8, with_trunk=False)
    write_folder(plan, tmp_path / "one", shards=1, with_trunk=False)
    ids = list(range(300, 340))
    assert torch.equal(rows_of(tmp_path / "eight", ids), rows_of(tmp_path / "one", ids))
    spec = find_table(str(tmp_path / "eight"))
    assert spec.ngram == plan.table.ngram
    names = json.loads((tmp_path / "eight" / "model.safetensors.index.json").read_text())["weight_map"]
    assert sum(".shard_" in name for name in names) == 8
    assert json.loads((tmp_path / "eight" / "config.json").read_text())["split_ngram_parts"] == 8
    with pytest.raises(SettingError, match="127 shards don't divide the"):
        write_folder(plan, tmp_path / "uneven", shards=127)
    assert not (tmp_path / "uneven").exists()


@pytest.mark.parametrize("architecture", ["qwen4_exp", "gemma3n", "qwen3_5"])
def test_without_a_trunk_there_is_what_random_weights_need(architecture: str, tmp_path: Path):
    plan = plan_model(architecture)
    paths = write_folder(plan, tmp_path / "m", with_trunk=False)
    source = open_source(tmp_path / "m")
    model = load_model(plan_dummy(outline(source, "dummy"), device=CPU, dtype=torch.float32))
    assert dict(model.named_parameters()).keys() >= plan.shapes.keys()
    assert open_text(tmp_path / "m").has_template
    assert any(path.suffix == ".safetensors" for path in paths) == (plan.table is not None)
    with pytest.raises(ModelError):
        plan_trunk(source, outline(source), device=CPU, dtype=torch.float32)


def test_keys_of_gguf_have_the_types_that_others_read(tmp_path: Path):
    import gguf

    (file,) = write_gguf(plan_model("qwen4_exp"), tmp_path / "m.gguf")
    fields = gguf.GGUFReader(file).fields
    kinds = {
        key: [kind.name for kind in fields[f"qwen4exp.{key}"].types] for key in ("ple.layer_multipliers", "ple.layers")
    }
    assert kinds == {"ple.layer_multipliers": ["ARRAY", "UINT64"], "ple.layers": ["ARRAY", "UINT32"]}
    assert open_gguf(str(file)).metadata["qwen4exp.ple.layers"] == (1,)
    (file,) = write_gguf(plan_model("gemma4"), tmp_path / "g.gguf")
    metadata = open_gguf(str(file)).metadata
    assert metadata["gemma4.attention.sliding_window_pattern"] == (True, False) * 4
    assert metadata["gemma4.feed_forward_length"] == (96,) * 4 + (192,) * 4
    factors = np.fromfile(file, "<f4", 32, offset=open_gguf(str(file)).tensor("rope_freqs.weight").offset)
    assert factors.tolist() == [1.0] * 8 + [np.float32(1e30)] * 24


@pytest.mark.parametrize("options", [{"trunk": "Q4_K"}, {"table": "F8_E4M3"}, {"table": "IQ1_S"}, {"parts": 0}])
def test_what_a_gguf_file_can_not_have(tmp_path: Path, options: dict[str, Any]):
    with pytest.raises(SettingError, match="a GGUF"):
        write_gguf(plan_model("qwen4_exp"), tmp_path / "m.gguf", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{"trunk": "Q8_0"}, {"table": "IQ4_NL"}])
def test_what_a_folder_can_not_have(tmp_path: Path, options: dict[str, Any]):
    with pytest.raises(SettingError, match="a folder can have parameters of F32"):
        write_folder(plan_model("qwen4_exp"), tmp_path / "m", **options)
    assert not list(tmp_path.iterdir())


def test_files_appear_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plan = plan_model("qwen3_5")

    def stop(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(plan, tmp_path / "m", progress=stop)
    assert not list(tmp_path.iterdir())
    write_folder(plan, tmp_path / "m")
    before = (tmp_path / "m" / "config.json").read_bytes()
    with pytest.raises(SettingError, match="exists; give another name"):
        write_folder(plan_model("gemma4"), tmp_path / "m")
    assert (tmp_path / "m" / "config.json").read_bytes() == before
    done: list[int] = []
    write_folder(plan_model("gemma4"), tmp_path / "m", overwrite=True, progress=done.append)
    assert done == sorted(done)
    assert (tmp_path / "m" / "config.json").read_bytes() != before
    with pytest.raises(SettingError, match="there is no folder"):
        write_gguf(plan, tmp_path / "nowhere" / "m.gguf")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(NeverFits, match=r"has 1000 B free, and the model takes .* fewer layers or rows"):
        write_gguf(plan, tmp_path / "m.gguf")
