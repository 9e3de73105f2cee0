"""The examples of docs/integrations.md work as they are printed."""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lazyio.ple.synthetic import write_gguf

PAGE = Path(__file__).parents[3] / "docs/integrations.md"


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page."""
    folder = tmp_path_factory.mktemp("scripts")
    for name, text in re.findall(r"^```python\n# (\S+)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[Path, Path], str]:
    """Run a script with one argument; what it printed."""

    def printed(script: Path, argument: Path) -> str:
        monkeypatch.setattr(sys, "argv", [str(script), str(argument)])
        capsys.readouterr()
        runpy.run_path(str(script), run_name="__main__")
        return capsys.readouterr().out

    return printed


def test_with_transformers(scripts: Path, run, saved, tmp_path: Path):
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = {
        word: number for number, word in enumerate(["<unk>", "<eos>", "The", "table", "stays", "on", "the", "disk"])
    }
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path / "model"
    folder.mkdir()
    for file in saved("Gemma4").iterdir():
        (folder / file.name).symlink_to(file)
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>").save_pretrained(folder)
    printed = run(scripts / "with_transformers.py", folder)
    assert printed.startswith("The table stays on the disk")
    assert int(re.search(r"(\d+) rows asked for in", printed)[1]) >= 6


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "demo.gguf"
    write_gguf(path, 48_000, "Q4_0", 32)
    return path


def test_own_loop(scripts: Path, run, table: Path, monkeypatch: pytest.MonkeyPatch):
    replies = []
    for mode in ("off", "uring"):
        monkeypatch.setenv("LAZYIO_LAZY_MODE", mode)
        replies.append(run(scripts / "own_loop.py", table))
    assert re.fullmatch(r"\[(\d+, ){19}\d+\]\n", replies[0])
    assert replies[0] == replies[1]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_ple_rows(scripts: Path, table: Path, device: str):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    loading = importlib.util.spec_from_file_location("ple_rows", scripts / "ple_rows.py")
    loaded = importlib.util.module_from_spec(loading)
    loading.loader.exec_module(loaded)
    rows = loaded.PleRows(table, torch.device(device), torch.float32, most_tokens=5, mode="on")
    buffer = rows.buffer
    for sequences in ([([7], [1, 2]), ([9], None)], [([4, 5, 6], [3]), ([8], [7, 7])]):
        rows.start(sequences)
        rows.wait()
        ids = np.concatenate([rows.row_ids(tokens, before) for tokens, before in sequences])
        expected = rows.table.decode(rows.table.gather(ids)).reshape(len(ids), -1)
        assert rows.buffer.data_ptr() == buffer.data_ptr()
        np.testing.assert_array_equal(buffer[: len(ids)].cpu().numpy(), expected)
        assert not buffer[4:].any()
    rows.close()
