from __future__ import annotations

import math

import pytest

from lazyio.engine.synthetic import plan_model
from lazyio.engine.synthetic.configs import ARCHITECTURES, SIZES, config_of
from lazyio.errors import LazyIOError, ModelError, NeverFits, SettingError


@pytest.mark.parametrize(
    ("architecture", "billions", "table"),
    [
        ("qwen4_exp", (120, 126), (320_001_536, 160)),
        ("qwen3_5", (26, 28), None),
        ("qwen3_5_moe", (34, 36), None),
        ("gemma4", (2, 2.6), (262_144, 35 * 256)),
        ("gemma3n", (2, 3.2), (262_144, 30 * 256)),
    ],
)
def test_true_sizes(architecture: str, billions: tuple[float, float], table: tuple[int, int] | None):
    plan = plan_model(architecture, "true")
    parameters = sum(math.prod(shape) for shape in plan.shapes.values()) / 1e9
    assert billions[0] < parameters < billions[1]
    assert (plan.table and (plan.table.rows, plan.table.row_values)) == table
    assert plan.model.row_values == (0 if table is None else table[1] * (16 if architecture == "qwen4_exp" else 1))


def test_the_released_table_of_ngrams():
    ngram = plan_model("qwen4_exp", "true").table.ngram
    assert ngram.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert (ngram.head_sizes[0], ngram.head_sizes[15], ngram.head_offsets[15]) == (20000003, 20000171, 300001275)


def test_tiny_ones_are():
    for architecture in ARCHITECTURES:
        plan = plan_model(architecture)
        assert sum(math.prod(shape) for shape in plan.shapes.values()) < 2e6
        assert plan.tokenizer.get_vocab_size() <= plan.config["vocab_size"]


@pytest.mark.parametrize(
    ("architecture", "size", "least"),
    [(name, size, 2 if name == "qwen4_exp" else 1) for name in ARCHITECTURES if "qwen" in name for size in SIZES]
    + [(name, size, 2 if size == "tiny" else 5) for name in ("gemma3n", "gemma4") for size in SIZES],
)
def test_any_number_of_layers_from_the_least_on(architecture: str, size: str, least: int):
    for layers in (least, least + 1, 7, 11):
        plan = plan_model(architecture, size, layers=layers)
        assert plan.config["num_hidden_layers"] == len(plan.config["layer_types"]) == layers
        assert any(name.startswith(f"model.layers.{layers - 1}.") for name in plan.shapes)
        assert not any(name.startswith(f"model.layers.{layers}.") for name in plan.shapes)
    with pytest.raises(SettingError, match=f"{least} layers or more; got {least - 1}"):
        plan_model(architecture, size, layers=least - 1)


@pytest.mark.parametrize("rows", [400, 10_000, 1_000_003])
def test_rows_of_ngrams_are_padded_as_in_the_release(rows: int):
    plan = plan_model("qwen4_exp", rows=rows)
    addressed = sum(plan.table.ngram.head_sizes)
    assert addressed <= rows
    assert addressed <= plan.table.rows < addressed + 128
    assert plan.table.rows % 128 == 0
    assert plan.config["ngram_vocab_size_base"] == plan.table.ngram.head_sizes[0]


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (("llama", "tiny"), SettingError, "there is no llama of the size tiny; there are gemma3n"),
        (("gemma4", "huge"), SettingError, "there is no gemma4 of the size huge"),
        (("qwen3_5", "tiny", None, 100), SettingError, "qwen3_5 has no table"),
        (("gemma4", "tiny", None, 4095), SettingError, "a row for each of the 4096 tokens; got 4095"),
        (("qwen4_exp", "tiny", None, 3), NeverFits, "3 rows can't hold 8 n-gram heads"),
        (("gemma3n", "tiny", None, 0), (SettingError, ModelError), "got 0|1 or more"),
    ],
)
def test_what_can_not_be_made(arguments: tuple, kind: type[LazyIOError], message: str):
    architecture, size, layers, rows = (*arguments, None, None)[:4]
    with pytest.raises(kind, match=message):
        plan_model(architecture, size, layers=layers, rows=rows)


def test_a_tokenizer_that_is_too_large():
    with pytest.raises(SettingError, match="a tokenizer of 5000 tokens is more than the 4096"):
        config_of("qwen3_5", "tiny", 1, 5000)
