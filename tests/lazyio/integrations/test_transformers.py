from __future__ import annotations

import copy
import gc
import json
import pickle
import shutil
import struct
import threading
from pathlib import Path

import pytest
import torch

from lazyio.errors import ModelError, SettingError, TableError, Unsupported
from lazyio.integrations.lazy_embedding import LazyEmbedding
from lazyio.integrations.transformers import lazify
from lazyio.ple.tables import find_table

transformers = pytest.importorskip("transformers")

TEXT = ["Qwen4Exp", "Gemma4", "Gemma3n"]
WHOLE = ["Qwen4ExpForConditionalGeneration", "Gemma4ForConditionalGeneration"]


def resident(folder: Path, dtype: torch.dtype | str = torch.float32):
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name).from_pretrained(folder, dtype=dtype)


def tokens(rows: int = 2, length: int = 29, seed: int = 3) -> torch.Tensor:
    """Some are the EOS that cuts n-grams."""
    ids = torch.randint(3, 256, (rows, length), generator=torch.Generator().manual_seed(seed))
    ids[0, 5:7] = 255
    return ids


@torch.no_grad()
def logits(model, ids: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, **more).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*TEXT, *WHOLE])
def test_logits_are_those_of_the_resident_table(saved, name: str, dtype: torch.dtype):
    folder = saved(name)
    expected = resident(folder, dtype)
    lazy = lazify(folder, mode="on", dtype=dtype)
    assert type(lazy).__name__ == type(expected).__name__
    assert isinstance(lazy, type(expected))
    assert lazy.dtype == dtype
    assert torch.equal(logits(lazy, tokens()), logits(expected, tokens()))
    # The table does matter.
    for parameter_name, parameter in expected.named_parameters():
        if "ngram_embedding" in parameter_name or "embed_tokens_per_layer" in parameter_name:
            torch.nn.init.zeros_(parameter)
    assert not torch.equal(logits(lazy, tokens()), logits(expected, tokens()))
    lazy.lazyio_table.close()


@pytest.mark.parametrize("name", TEXT)
def test_generate(saved, name: str):
    """Prompts of two lengths, one padded at its left, and steps from the cache."""
    expected, lazy = resident(saved(name)), lazify(saved(name), mode="uring")
    ids, mask = tokens(), torch.ones(2, 29, dtype=torch.int64)
    mask[0, :7] = 0
    asked = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    found = lazy.generate(ids, **asked)
    assert found.shape[1] > 30
    assert torch.equal(found, expected.generate(ids, **asked))
    assert lazy.lazyio_table.stats().rows > ids.numel()
    lazy.lazyio_table.close()


@pytest.mark.parametrize("mode", ["off", "on", "on-bare", "on-direct", "uring"])
def test_every_mode_gives_the_same(saved, mode: str):
    lazy = lazify(saved("Qwen4Exp"), mode=mode)
    assert torch.equal(logits(lazy, tokens()), logits(resident(saved("Qwen4Exp")), tokens()))
    lazy.lazyio_table.close()


@pytest.mark.parametrize("name", [*TEXT, *WHOLE])
def test_a_loaded_model_gives_its_memory_back(saved, name: str):
    model = resident(saved(name))
    expected = logits(model, tokens())
    before = sum(parameter.numel() for parameter in model.parameters())
    (table,) = (m for n, m in model.named_modules() if n.endswith(("ngram_embedding", "embed_tokens_per_layer")))
    size = table.weight.numel()
    weight = weakref_to(table.weight)
    del table
    lazy = lazify(model, mode="on")
    assert lazy is model
    assert sum(parameter.numel() for parameter in model.parameters()) == before - size
    gc.collect()
    assert weight() is None
    assert torch.equal(logits(lazy, tokens()), expected)
    with pytest.raises(ModelError, match="lazy already"):
        lazify(lazy, mode="on")
    lazy.lazyio_table.close()


def weakref_to(tensor: torch.Tensor):
    import weakref

    return weakref.ref(tensor)


def test_a_table_from_another_file(saved, tmp_path: Path):
    """Quantised rows in place of the folder's: logits are those of a model that holds what they decode to."""
    gguf = pytest.importorskip("gguf")
    expected = resident(saved("Qwen4Exp"))
    embedding = expected.model.layers[1].ple.ple_embedding.ngram_embedding
    packed = gguf.quants.quantize(embedding.weight.detach().numpy(), gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(tmp_path / "table.gguf", "qwen4exp")
    writer.add_tensor("per_layer_token_embd.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    embedding.weight.data = torch.from_numpy(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0))
    lazy = lazify(saved("Qwen4Exp"), mode="on", table=tmp_path / "table.gguf")
    assert lazy.lazyio_table.table.dtype == "Q8_0"
    assert torch.equal(logits(lazy, tokens()), logits(expected, tokens()))
    lazy.lazyio_table.close()


@pytest.mark.parametrize("name", ["Qwen4Exp", "Gemma4"])
def test_moved_converted_and_copied(saved, name: str):
    expected = resident(saved(name)).to(torch.bfloat16)
    lazy = lazify(saved(name), mode="on").to(torch.bfloat16)
    assert torch.equal(logits(lazy, tokens()), logits(expected, tokens()))
    copied = copy.deepcopy(lazy)
    assert copied.lazyio_table is not lazy.lazyio_table
    assert copied.lazyio_table in list(copied.modules())
    copied.float()
    other = lazify(saved(name), mode="on").bfloat16().float()
    assert torch.equal(logits(copied, tokens()), logits(other, tokens()))
    assert torch.equal(logits(lazy.train().eval(), tokens()), logits(expected, tokens()))
    del lazy
    gc.collect()
    assert logits(copied, tokens()).dtype == torch.float32  # the copy keeps the table open
    copied.lazyio_table.close()


def test_loaded_in_a_dtype_by_name(saved):
    assert lazify(saved("Gemma4"), mode="on", dtype="bfloat16", device="cpu").dtype == torch.bfloat16
    assert lazify(resident(saved("Gemma4")), mode="on", dtype="float16", device="cpu").dtype == torch.float16


def test_weights_still_train(saved):
    lazy = lazify(saved("Gemma4"), mode="on")
    lazy(input_ids=tokens(), labels=tokens()).loss.backward()
    assert lazy.model.layers[0].per_layer_input_gate.weight.grad.abs().sum() > 0
    lazy.lazyio_table.close()


@pytest.mark.parametrize("name", ["Qwen4Exp", "Gemma4"])
def test_the_state_is_everything_but_the_table(saved, name: str):
    lazy, whole = lazify(saved(name), mode="on"), resident(saved(name)).state_dict()
    missing = set(whole) - set(lazy.state_dict())
    assert len(missing) == 1
    assert not set(lazy.state_dict()) - set(whole)
    for save in (lazy.save_pretrained, lazy.push_to_hub):
        with pytest.raises(Unsupported, match=rf"can't be saved: its table stays in .*{name}"):
            save("nowhere")
    with pytest.raises(TypeError, match="an open table can't be pickled"):
        pickle.dumps(lazy)
    lazy.lazyio_table.close()


def test_resizing_token_embeddings(saved):
    with pytest.raises(Unsupported, match="can't be resized: its table has a row for each token"):
        lazify(saved("Gemma4"), mode="on").resize_token_embeddings(300)
    lazy = lazify(saved("Qwen4Exp"), mode="on")
    assert lazy.resize_token_embeddings(300).num_embeddings == 300


def test_nothing_is_left_running(saved):
    descriptors, threads = list(Path("/proc/self/fd").iterdir()), threading.active_count()
    lazy = lazify(saved("Qwen4Exp"), mode="uring")
    logits(lazy, tokens())
    del lazy
    gc.collect()
    assert threading.active_count() <= threads
    assert len(list(Path("/proc/self/fd").iterdir())) <= len(descriptors)


def test_a_closed_table_says_so(saved):
    lazy = lazify(saved("Gemma4"), mode="on")
    with lazy.lazyio_table as embedding:
        assert isinstance(embedding, LazyEmbedding)
        logits(lazy, tokens())
    with pytest.raises(TableError, match="table of this model is closed"):
        logits(lazy, tokens())
    lazy.lazyio_table.close()


@pytest.mark.parametrize("name", ["Qwen4Exp", "Gemma4"])
def test_ids_outside_the_table(saved, name: str):
    lazy = lazify(saved(name), mode="on")
    with pytest.raises(IndexError):
        lazy.lazyio_table(torch.tensor([lazy.lazyio_table.rows]))
    with pytest.raises(IndexError):
        lazy.lazyio_table(torch.tensor([-1]))
    assert lazy.lazyio_table(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, lazy.lazyio_table.width)
    lazy.lazyio_table.close()


def test_tokens_without_a_row(saved):
    """Releases of transformers differ in what they do about them; a lazy table does the same."""
    folder = saved("Gemma3n", vocab_size_per_layer_input=240)
    expected, lazy = resident(folder), lazify(folder, mode="on")
    assert tokens().max() >= 240
    try:
        wanted = logits(expected, tokens())
    except IndexError:
        with pytest.raises(IndexError):
            logits(lazy, tokens())
    else:
        assert torch.equal(logits(lazy, tokens()), wanted)
    lazy.lazyio_table.close()


def test_what_can_t_be_made_lazy(saved, tmp_path: Path):
    with pytest.raises(ModelError, match="is no folder; download the model first"):
        lazify(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"is no model of transformers: .*config\.json"):
        lazify(tmp_path)
    with pytest.raises(ModelError, match="not a Linear"):
        lazify(torch.nn.Linear(2, 2))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ModelError, match="holds a llama model; models of qwen4_exp, gemma4, gemma3n have a table"):
        lazify(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gemma4_text", "architectures": ["Gemma9ForCausalLM"]}')
    with pytest.raises(Unsupported, match="has no 'Gemma9ForCausalLM'"):
        lazify(tmp_path)
    small = resident(saved("Gemma4", hidden_size_per_layer_input=0))
    with pytest.raises(ModelError, match="Gemma4ForCausalLM has 0 per-layer embedding tables, not one"):
        lazify(small, mode="on")
    model = resident(saved("Gemma4"))
    model.name_or_path = "someone/gemma"
    with pytest.raises(ModelError, match=r"did not come from a folder .*'someone/gemma'"):
        lazify(model, mode="on")


@pytest.mark.parametrize(
    ("architectures", "message"),
    [
        (None, "architectures = None; it must be a list"),
        ([], r"architectures = \[\]; it must be a list"),
        ("Gemma4ForCausalLM", "architectures = 'Gemma4ForCausalLM'; it must be a list"),
        (["pipeline"], "names the architecture 'pipeline', which is no gemma4_text model"),
        (["LlamaForCausalLM"], "names the architecture 'LlamaForCausalLM', which is no gemma4_text model"),
    ],
)
def test_a_folder_must_name_its_class(saved, tmp_path: Path, architectures, message: str):
    config = json.loads((saved("Gemma4") / "config.json").read_text()) | {"architectures": architectures}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        lazify(tmp_path)


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"dtype": torch.float64}, SettingError, "dtype is 'float64'; it can be float32, bfloat16, float16"),
        ({"dtype": "Tensor"}, SettingError, "dtype is 'Tensor'"),
        ({"device": "meta"}, SettingError, "device is 'meta'; it can be cpu, cuda or cuda:N"),
        ({"device": "cuda:99"}, Unsupported, "device is 'cuda:99', and torch sees"),
    ],
)
def test_devices_and_dtypes_that_can_t_be_had(saved, asked, error: type[Exception], message: str):
    """Said before anything is loaded or changed."""
    model = resident(saved("Gemma4"))
    for each in (saved("Gemma4"), model):
        with pytest.raises(error, match=message):
            lazify(each, mode="on", **asked)
    assert type(model) is transformers.Gemma4ForCausalLM


def test_dtype_auto_is_the_model_s_own(saved):
    for each in (saved("Gemma4"), resident(saved("Gemma4"), torch.bfloat16)):
        lazy = lazify(each, mode="on", dtype="auto")
        assert lazy.dtype == (torch.float32 if each == saved("Gemma4") else torch.bfloat16)
        lazy.lazyio_table.close()


def test_a_folder_without_some_weights(saved, tmp_path: Path):
    """transformers would fill them with random numbers."""
    safetensors = pytest.importorskip("safetensors.torch")
    shutil.copy(saved("Gemma4") / "config.json", tmp_path)
    weights = safetensors.load_file(saved("Gemma4") / "model.safetensors")
    del weights["model.layers.0.self_attn.o_proj.weight"]
    safetensors.save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 .*, such as model\.layers\.0\.self_attn\.o_proj\.weight"):
        lazify(tmp_path, mode="on")


def test_another_model_s_table_is_refused(saved):
    with pytest.raises(ModelError, match=r"240 rows of 96 values; the model's embedding has 256 of 96: .*another"):
        lazify(saved("Gemma4"), table=saved("Gemma3n", vocab_size_per_layer_input=240), mode="on")
    with pytest.raises(ModelError, match=r"n-gram heads of .* the table is another model's"):
        lazify(saved("Qwen4Exp"), table=saved("Qwen4Exp", ngram_vocab_size_base=600), mode="on")
    with pytest.raises(TableError, match="no per-layer embedding table"):
        lazify(saved("Gemma4"), table=saved("Gemma4", hidden_size_per_layer_input=0), mode="on")


TABLE_BYTES = 3 << 30


def test_the_table_is_never_held(saved, tmp_path: Path):
    """A table of zeros that take no room on disk. Converted to another dtype they would take 1.5 GiB of memory."""
    folder = grown(saved("Gemma4"), tmp_path / "grown")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = peak_bytes()
    lazy = lazify(folder, mode="on", dtype="bfloat16")
    assert lazy.lazyio_table.table.spec.table_bytes == TABLE_BYTES
    logits(lazy, tokens())
    assert peak_bytes() - before < TABLE_BYTES // 16
    lazy.lazyio_table.close()


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024


def grown(folder: Path, into: Path) -> Path:
    """The model with a table of many more rows."""
    shutil.copytree(folder, into)
    spec = find_table(folder)
    rows = TABLE_BYTES // spec.row_bytes // 256 * 256
    config = json.loads((into / "config.json").read_text()) | {"vocab_size_per_layer_input": rows}
    (into / "config.json").write_text(json.dumps(config))
    path = into / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    kept = {name: entry for name, entry in header.items() if name not in (spec.tensor, "__metadata__")}
    body, where = bytearray(), {}
    for name, entry in kept.items():
        start, end = entry["data_offsets"]
        where[name] = entry | {"data_offsets": [len(body), len(body) + end - start]}
        body += data[8 + length + start : 8 + length + end]
    size = rows * spec.row_bytes
    entry = {"dtype": "F32", "shape": [rows, spec.row_values], "data_offsets": [len(body), len(body) + size]}
    text = json.dumps(where | {spec.tensor: entry, "__metadata__": {"format": "pt"}}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + body)
        file.truncate(file.tell() + size)
    return into


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_values_with_the_scale_of_a_float16(saved, device: str):
    """Rounded as the scaled embeddings of transformers round it."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    model = resident(saved("Gemma3n"), torch.float16).to(device)
    scaled = model.model.embed_tokens_per_layer
    scaled.embed_scale.fill_(15.99)
    scaled.scalar_embed_scale = 15.99
    ids = torch.arange(256, device=device)
    expected = scaled(ids)
    assert torch.equal(lazify(model, mode="on").lazyio_table(ids), expected)
    assert expected.isfinite().all()


def test_a_table_longer_than_the_embedding(saved):
    """As those of GGUF files that fill a vocabulary up."""
    lazy = lazify(saved("Gemma4", vocab_size_per_layer_input=240), table=saved("Gemma4"), mode="on")
    assert lazy.lazyio_table(torch.tensor([239])).shape == (1, 96)
    with pytest.raises(IndexError, match="row 240 is outside the embedding, which has rows 0 to 239"):
        lazy.lazyio_table(torch.tensor([3, 240]))
    lazy.lazyio_table.close()
