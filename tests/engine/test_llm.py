import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lazyio.engine import LLM, Sampling
from lazyio.engine import llm as llm_module
from lazyio.engine import place as place_module
from lazyio.engine.weights import memory as memory_module
from lazyio.errors import LazyIOError, ModelError, NeverFits, PromptError, SettingError, TableError

MODES = ("off", "on", "on-bare", "on-direct", "uring")
WITH_TABLE = ("qwen4_exp", "gemma4", "gemma3n")
EOS = 255


@pytest.fixture
def qwen(saved: Callable[[str], tuple[Any, Path]]) -> Path:
    return saved("qwen4_exp")[1]


@pytest.fixture(scope="module")
def llm(saved: Callable[[str], tuple[Any, Path]]) -> Iterator[LLM]:
    with LLM(saved("qwen4_exp")[1], device="cpu", lazy_mode="uring", ubatch=16) as llm:
        yield llm


@pytest.fixture
def talking(qwen: Path, tmp_path: Path) -> Path:
    """A folder with a tokenizer: letters are tokens 0 to 25, and a template for chats."""
    folder = tmp_path / "talking"
    shutil.copytree(qwen, folder)
    letters = {chr(ord("a") + number): number for number in range(26)}
    tokenizer = Tokenizer(models.WordLevel(letters | {f"[{number}]": number for number in range(26, 256)}, "[255]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}z"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return folder


def greedy(pair: Any, tokens: list[int], count: int) -> tuple[int, ...]:
    """What transformers adds, without a cache."""
    known = list(tokens)
    for _ in range(count):
        known.append(int(pair.expected(known)[-1].argmax()))
    return tuple(known[len(tokens) :])


# --- logits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*WITH_TABLE, "qwen3_5", "qwen3_5_moe"])
def test_logits_and_replies_are_those_of_transformers(
    name: str, saved: Callable[[str], tuple[Any, Path]], agree: Callable[..., None]
) -> None:
    pair, folder = saved(name)
    tokens = [*pair.tokens(35), 250, 241]  # beyond the rows of Gemma 3n's table
    expected = pair.expected(tokens)
    with LLM(folder, device="cpu", ubatch=16) as llm:
        agree(llm.logits(tokens), expected)
        agree(llm.logits(tokens, cuts=[1, 6, 10, 20]), expected)
        (completion,) = llm.generate(tokens, max_tokens=6)
    assert completion.token_ids == greedy(pair, tokens, 6)
    assert completion.finish_reason == "length"


@pytest.mark.parametrize("name", ["qwen4_exp", "gemma4"])
@pytest.mark.parametrize("mode", MODES)
def test_modes_and_lookaheads_change_no_bit(
    name: str, mode: str, saved: Callable[[str], tuple[Any, Path]], off: Callable[[str], tuple[torch.Tensor, Any]]
) -> None:
    pair, folder = saved(name)
    tokens = pair.tokens(40)
    logits, replied = off(name)
    for lookahead in (0, 3) if mode == "off" else (0, 1, 3):
        with LLM(folder, device="cpu", lazy_mode=mode, lookahead=lookahead, ubatch=7) as llm:
            assert llm.table is not None
            assert torch.equal(llm.logits(tokens), logits)
            (completion,) = llm.generate(tokens, max_tokens=8, temperature=0.8, seed=5)
            assert completion.token_ids == replied
            assert (llm.table.backend.mode, llm.lookahead) == (mode, lookahead)


@pytest.fixture(scope="session")
def off(saved: Callable[[str], tuple[Any, Path]]) -> Callable[[str], tuple[torch.Tensor, Any]]:
    """With the table in memory and nothing read ahead."""
    known: dict[str, tuple[torch.Tensor, Any]] = {}

    def run(name: str) -> tuple[torch.Tensor, Any]:
        if name not in known:
            pair, folder = saved(name)
            with LLM(folder, device="cpu", lazy_mode="off", lookahead=0, ubatch=7) as llm:
                tokens = pair.tokens(40)
                (completion,) = llm.generate(tokens, max_tokens=8, temperature=0.8, seed=5)
                known[name] = llm.logits(tokens), completion.token_ids
        return known[name]

    return run


def test_another_table_gives_other_logits(saved: Callable[[str], tuple[Any, Path]], tmp_path: Path) -> None:
    pair, folder = saved("gemma4")
    tokens = pair.tokens(20)
    overlay = {token: np.zeros(4 * pair.table.shape[1], np.uint8) for token in range(256)}
    with LLM(folder, device="cpu") as resident, LLM(folder, device="cpu", overlay=overlay) as zeroed:
        assert not torch.allclose(resident.logits(tokens), zeroed.logits(tokens), atol=1e-3)


@pytest.mark.parametrize("cuts", [[], [37, 0], [30], [40], [-1, 38]])
def test_cuts_of_another_prompt(llm: LLM, cuts: list[int]) -> None:
    with pytest.raises(SettingError, match=re.escape(f"cuts are {cuts}; they must be 1 or more, and sum to the 37")):
        llm.logits([1] * 37, cuts=cuts)


def test_logits_of_a_long_ubatch_are_made_in_parts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = llm.logits([*range(30)], cuts=[30])
    monkeypatch.setattr(llm_module, "_LOGITS_TOKENS", 7)
    assert torch.allclose(llm.logits([*range(30)], cuts=[30]), whole, atol=1e-5)


def test_halves_are_near(saved: Callable[[str], tuple[Any, Path]]) -> None:
    pair, folder = saved("qwen4_exp")
    tokens = pair.tokens(20)
    with LLM(folder, device="cpu", dtype="bfloat16") as llm:
        assert (llm.dtype, llm.model.dtype) == (torch.bfloat16, torch.bfloat16)
        logits = llm.logits(tokens)
        assert logits.dtype == torch.float32
        assert (logits - pair.expected(tokens)).abs().mean() < 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["qwen4_exp", "gemma4"])
def test_on_a_gpu_modes_change_no_bit_and_logits_are_near(
    name: str, saved: Callable[[str], tuple[Any, Path]], agree: Callable[..., None]
) -> None:
    pair, folder = saved(name)
    tokens = pair.tokens(40)
    first: torch.Tensor | None = None
    for mode, lookahead in (("off", 0), ("off", 2), ("on", 2), ("uring", 0), ("uring", 3)):
        with LLM(folder, device="cuda", dtype="float32", lazy_mode=mode, lookahead=lookahead, ubatch=7) as llm:
            logits = llm.logits(tokens)
            (completion,) = llm.generate(tokens, max_tokens=6)
        first = logits if first is None else first
        assert torch.equal(logits, first)
        assert completion.token_ids == greedy(pair, tokens, 6)
        assert len(completion.account.steps_waited_s) == 5
        assert completion.account.shares.keys() == {"rows", "compute", "host"}
        assert sum(completion.account.shares.values()) == pytest.approx(1)
    assert first is not None
    agree(first, pair.expected(tokens))


# --- replies ---------------------------------------------------------------------------------------------------------


def test_many_prompts_are_each_as_alone(llm: LLM) -> None:
    prompts = [[1, 2, 3], list(range(40, 60)), [EOS]]
    together = llm.generate(prompts, max_tokens=4)
    alone = [llm.generate(prompt, max_tokens=4)[0] for prompt in prompts]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]


def test_a_seed_repeats_a_reply(llm: LLM) -> None:
    def replies(seed: int) -> list[tuple[int, ...]]:
        return [each.token_ids for each in llm.generate([[1, 2], [1, 2]], max_tokens=8, temperature=2.0, seed=seed)]

    first, second = replies(1)
    assert first == second
    assert replies(1) == [first, second]
    assert replies(2) != [first, second]


def test_a_reply_can_be_left_and_the_next_one_is_whole(llm: LLM) -> None:
    (whole,) = llm.generate([1, 2, 3], max_tokens=6)
    with llm.reply([1, 2, 3], max_tokens=6) as reply:
        assert next(reply).token == whole.token_ids[0]
    assert reply.completion.finish_reason == "interrupted"
    assert llm.generate([1, 2, 3], max_tokens=6)[0].token_ids == whole.token_ids


def test_a_stop_id_ends_a_reply(llm: LLM) -> None:
    (whole,) = llm.generate([1, 2, 3], max_tokens=6)
    (cut,) = llm.generate([1, 2, 3], max_tokens=6, stop=whole.token_ids[2])
    first = whole.token_ids.index(whole.token_ids[2]) + 1
    assert (cut.token_ids, cut.finish_reason) == (whole.token_ids[:first], "stop")


def test_the_account_of_a_reply(llm: LLM) -> None:
    (completion,) = llm.generate(list(range(40)), max_tokens=3)
    account = completion.account
    assert (account.prompt_tokens, account.cuts, account.reply_tokens) == (40, (16, 16, 8), 3)
    assert account.table is not None
    assert account.table.rows == (40 + 2) * 8  # 8 rows a token, and none for the last
    assert 0 < account.table.reads < account.table.rows
    assert len(account.steps_s) == len(account.steps_waited_s) == 2
    assert 0 < account.prompt_waited_s + sum(account.steps_waited_s) < account.prompt_s + sum(account.steps_s)
    assert "prompt of 40 tokens" in account.line()
    assert "336 rows" in account.line()


# --- text ------------------------------------------------------------------------------------------------------------


def test_text_and_chats(talking: Path) -> None:
    with LLM(talking, device="cpu") as llm:
        assert llm.no_text is None
        as_text, as_ids = llm.generate(["abc", [0, 1, 2]], max_tokens=4)
        assert as_text.token_ids == as_ids.token_ids
        assert as_text.text == as_ids.text == llm.text.decode(list(as_text.token_ids))
        assert len(as_text.text) >= 4
        chat, spelt = llm.generate([[{"role": "user", "content": "ab"}], [0, 1, 25]], max_tokens=4)
        assert chat.token_ids == spelt.token_ids


def test_stop_strings_and_the_stop_ids_of_the_model(talking: Path) -> None:
    with LLM(talking, device="cpu") as llm:
        (whole,) = llm.generate("abc", max_tokens=6)
        (cut,) = llm.generate("abc", max_tokens=6, stop=whole.text[-4:])
        assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(whole.text[-4:])], "stop")
        first = whole.token_ids[0]
    (talking / "generation_config.json").write_text(json.dumps({"eos_token_id": [first]}))
    with LLM(talking, device="cpu") as llm:
        (ended,) = llm.generate([0, 1, 2], max_tokens=6)
    assert (ended.token_ids, ended.text, ended.finish_reason) == ((first,), "", "stop")


def test_text_without_a_tokenizer(llm: LLM) -> None:
    assert llm.no_text is not None
    for ask in (lambda: llm.generate("abc"), lambda: llm.generate([1], stop="a"), lambda: llm.text):
        with pytest.raises(ModelError, match=r"has no tokenizer.json.*token ids"):
            ask()


@pytest.mark.parametrize(
    ("check", "error", "match"),
    [
        (lambda llm: llm.text, ModelError, r"has no tokenizer.json"),
        (lambda llm: llm.check("abc"), ModelError, r"has no tokenizer.json"),
        (lambda llm: llm.check([256]), PromptError, "token 256, and the model's vocabulary is 0 to 255"),
        (lambda llm: llm.check([1] * 505, max_tokens=8), PromptError, "are 513, and the model takes 512"),
        (lambda llm: llm.check([1], stop=[-1]), SettingError, "stop has -1"),
        (lambda llm: llm.check([1], max_tokens=0), SettingError, "max_tokens is 0"),
    ],
)
def test_what_is_wrong_with_a_prompt_can_be_said_before_weights_are_read(
    qwen: Path, monkeypatch: pytest.MonkeyPatch, check: Callable[[LLM], object], error: type[Exception], match: str
) -> None:
    monkeypatch.setattr(llm_module, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(error, match=match):
        LLM(qwen, device="cpu", before_loading=check)


def test_a_tokenizer_that_does_not_fit(talking: Path) -> None:
    tokenizer = Tokenizer.from_file(str(talking / "tokenizer.json"))
    tokenizer.add_tokens(["more"])
    tokenizer.save(str(talking / "tokenizer.json"))
    with LLM(talking, device="cpu") as llm:
        assert len(llm.generate([1], max_tokens=2)[0].token_ids) == 2
        with pytest.raises(ModelError, match="ids up to 256, and the model a vocabulary of 256"):
            llm.generate("abc")


# --- what can't be served --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ([], "the prompt is empty"),
        ([0, 256], "token 256, and the model's vocabulary is 0 to 255"),
        ([-1], "token -1"),
        ([1] * 505, "505 tokens and a reply of up to 8 are 513, and the model takes 512"),
        ([1] * 600, "600 tokens"),
        (3, "a prompt is text, token ids or messages"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_runs(llm: LLM, prompt: Any, match: str) -> None:
    assert llm.table is not None
    before = llm.table.stats()
    for prompts in (prompt, [[1, 2], prompt]) if isinstance(prompt, list) else (prompt,):
        with pytest.raises(PromptError, match=match):
            llm.generate(prompts, max_tokens=8)
    assert llm.table.stats() == before


def test_the_whole_context_can_be_used(llm: LLM) -> None:
    assert len(llm.generate([1] * 504, max_tokens=8)[0].token_ids) == 8
    with pytest.raises(PromptError, match="the prompt has 513 tokens, and the model takes 512: shorten it"):
        llm.logits([1] * 513)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be an integer, 1 or more"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"max_tokens": 2.0}, "max_tokens is 2.0"),
        ({"temperature": -1}, "temperature must be"),
        ({"stop": ""}, "stop has an empty string"),
        ({"stop": 256}, "stop has 256; it is strings that are not empty, and token ids from 0 to 255"),
        ({"stop": [None]}, "stop has None"),
    ],
)
def test_bad_arguments_of_a_reply(llm: LLM, given: dict[str, Any], match: str) -> None:
    with pytest.raises(SettingError, match=match):
        llm.generate([1, 2], **given)


def test_too_little_memory_is_said_before_anything_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_module, "available_memory_bytes", lambda: 50_000)
    with pytest.raises(NeverFits, match=r"the state of a sequence of 310 tokens takes .*, and 48.8 KiB of memory"):
        llm.generate([1] * 300, max_tokens=10)
    monkeypatch.setattr(place_module, "available_memory_bytes", lambda: 500_000)
    with pytest.raises(NeverFits, match=r"the logits of 500 tokens takes 500.0 KiB, .*: give a shorter prompt"):
        llm.logits([1] * 500)


def test_too_little_memory_for_weights_is_said_before_the_table_is_loaded(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_module, "available_memory_bytes", lambda: 50_000)
    monkeypatch.setattr(llm_module, "open_beside", lambda *_: pytest.fail("the table was opened"))
    with pytest.raises(NeverFits, match=r"the model needs .* on the host .*, which has 48.8 KiB left"):
        LLM(qwen, device="cpu", lazy_mode="off")


# --- opening ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"dtype": "int4"}, "dtype is 'int4'"),
        ({"load_format": "mmap"}, "load_format is 'mmap'"),
        ({"layers": 2}, "layers is 2"),
        ({"lookahead": 65}, "lookahead is '65'"),
        ({"ubatch": "some"}, "ubatch is 'some'"),
        ({"lazy_mode": "fast"}, "lazy_mode is 'fast'"),
        ({"lazy_mode": "off", "row_cache": "64MiB"}, "row_cache has no effect in mode off"),
        ({"ubatch": "auto", "lookahead": 0}, "ubatch auto has no effect where lookahead is 0"),
    ],
)
def test_bad_settings_are_refused_before_weights_are_read(
    qwen: Path, given: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm_module, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(SettingError, match=match):
        LLM(qwen, **({"device": "cpu"} | given))


@pytest.mark.parametrize(
    "given",
    [{"lazy_mode": "uring"}, {"lookahead": 1}, {"row_cache": 0}, {"table": "here"}, {"strict": True}],
)
def test_a_model_without_a_table_ignores_nothing(
    saved: Callable[[str], tuple[Any, Path]], given: dict[str, Any]
) -> None:
    _, folder = saved("qwen3_5")
    (name,) = given
    with pytest.raises(SettingError, match=f"{name} has no effect: the model of .* has no table; leave it out"):
        LLM(folder, device="cpu", **given)
    with pytest.raises(SettingError, match=r"ubatch auto has no effect where the model of .* has no table"):
        LLM(folder, device="cpu", ubatch="auto")


def test_variables_are_for_all_models(
    saved: Callable[[str], tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAZYIO_LOOKAHEAD", "1")
    monkeypatch.setenv("LAZYIO_UBATCH", "auto")
    with LLM(saved("qwen3_5")[1], device="cpu") as llm:
        assert (llm.table, llm.feed, llm.pace) == (None, None, None)
        assert llm.cuts(5000) == [2048, 2048, 904]
        assert llm.summary().endswith("; no table; ubatch 2048")


def test_a_table_from_elsewhere(saved: Callable[[str], tuple[Any, Path]], qwen: Path, tmp_path: Path) -> None:
    pair, _ = saved("qwen4_exp")
    copy = tmp_path / "copy"
    shutil.copytree(qwen, copy)
    with LLM(qwen, device="cpu", table=copy) as llm:
        assert llm.table is not None
        assert {os.path.dirname(extent.path) for extent in llm.table.extents} == {str(copy)}
        assert len(llm.generate(pair.tokens(9), max_tokens=2)[0].token_ids) == 2


def test_a_table_of_another_model(saved: Callable[[str], tuple[Any, Path]], qwen: Path) -> None:
    with pytest.raises(ModelError, match=r"has 1 rows of 96 values a token, .* and the model of .* takes 64"):
        LLM(qwen, device="cpu", table=saved("gemma4")[1])


def test_a_table_with_too_few_rows(
    saved: Callable[[str], tuple[Any, Path]], tiny: Callable[..., Any], tmp_path: Path
) -> None:
    small = tiny("gemma4", vocab_size=250, vocab_size_per_layer_input=250)
    small.reference.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"has 250 rows, and the model of .* needs one for each of 256 tokens"):
        LLM(saved("gemma4")[1], device="cpu", table=tmp_path)


def test_what_fails_leaves_nothing_open(qwen: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(qwen, broken)
    index = json.loads((broken / "model.safetensors.index.json").read_text())
    shard = index["weight_map"]["lm_head.weight"]
    content = (broken / shard).read_bytes()
    (broken / shard).write_bytes(content[:-1000])
    before = set(os.listdir("/proc/self/fd")), threading.active_count()
    with pytest.raises((ModelError, TableError), match=re.escape(shard)):
        LLM(broken, device="cpu", lazy_mode="uring")
    assert (set(os.listdir("/proc/self/fd")), threading.active_count()) == before


@pytest.mark.parametrize("failing", ["load_model", "DeviceTable", "Feed"])
def test_an_interrupt_while_loading_closes_the_table(qwen: Path, failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    tables: list[Any] = []
    opened = llm_module.open_beside

    def open_and_note(*given: Any) -> Any:
        tables.append(opened(*given))
        return tables[0]

    monkeypatch.setattr(llm_module, "open_beside", open_and_note)
    monkeypatch.setattr(llm_module, failing, interrupted)
    with pytest.raises(KeyboardInterrupt):
        LLM(qwen, device="cpu", lazy_mode="on")
    with pytest.raises(TableError, match="closed"):
        tables[0].gather([0])


def test_closed(qwen: Path) -> None:
    llm = LLM(qwen, device="cpu")
    llm.close()
    llm.close()
    with pytest.raises(LazyIOError, match="the table is closed"):
        llm.generate([1, 2, 3])


def test_a_table_in_memory_leaves_room_for_the_trunk(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lazyio import modes

    available = (1 << 20) + 262_144 + 600_000  # the reserve, the table, and less than the trunk
    monkeypatch.setattr(modes, "available_memory_bytes", lambda: available)
    with LLM(qwen, device="cpu", reserve="1MiB") as llm:
        assert llm.table is not None
        assert llm.table.backend.fetcher != "resident"
    monkeypatch.setattr(modes, "available_memory_bytes", lambda: available + (4 << 20))
    with LLM(qwen, device="cpu", reserve="1MiB") as llm:
        assert llm.table is not None
        assert llm.table.backend.fetcher == "resident"


def test_random_weights_beside_a_true_table(qwen: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dummy"
    shutil.copytree(qwen, folder)
    with LLM(folder, device="cpu", load_format="dummy", layers=2) as llm:
        assert len(llm.model.get_submodule("model.layers")) == 2  # type: ignore[arg-type]
        logits = llm.logits(list(range(20)))
    assert torch.isfinite(logits).all()
    assert logits.std() > 0


def test_planned_cuts(qwen: Path) -> None:
    with LLM(qwen, device="cpu", lazy_mode="uring", ubatch="auto") as llm:
        assert llm.pace is not None
        assert llm.ubatch is None
        cuts = llm.cuts(300)
        assert sum(cuts) == 300
        assert re.search(r"ubatch auto, planned for .* rows/s and .* tokens/s", llm.summary())
        assert len(llm.generate([7] * 300, max_tokens=2)[0].token_ids) == 2


def test_the_summary(llm: LLM) -> None:
    assert re.fullmatch(
        r"qwen4_exp, .* of float32 on cpu; table model\.layers\.1\.ple\.ple_embedding\.ngram_embedding\.weight, "
        r".* of F32, mode uring by .*, (direct|buffered).*\(as asked\); lookahead 2, ubatch 16",
        llm.summary(),
    )


def test_a_sampling_of_its_own(llm: LLM) -> None:
    sampling = Sampling(temperature=1.5, seed=3)
    with llm.reply([1, 2], max_tokens=5, sampling=sampling) as reply:
        tokens = tuple(piece.token for piece in reply)
    assert tokens == llm.generate([1, 2], max_tokens=5, temperature=1.5, seed=3)[0].token_ids


def test_replies_that_are_open_at_the_same_time(qwen: Path) -> None:
    prompts = [[1, 2, 3], [9], [40, 41]]
    for parallel in (1, 2, 3):
        with LLM(qwen, device="cpu", parallel=parallel) as llm:
            whole = [each.token_ids for each in llm.generate(prompts, max_tokens=6)]
            replies = [llm.reply(prompt, max_tokens=6) for prompt in prompts]
            found: list[list[int]] = [[] for _ in prompts]
            for _ in range(6):
                for reply, tokens in zip(reversed(replies), reversed(found), strict=True):
                    tokens.append(next(reply).token)
            assert [tuple(tokens) for tokens in found] == whole
            assert [reply.completion.finish_reason for reply in replies] == ["length"] * 3


def test_a_reply_that_is_forgotten_gives_up_its_lane(qwen: Path) -> None:
    with LLM(qwen, device="cpu", parallel=1) as llm:
        next(llm.reply([1, 2, 3], max_tokens=400))
        steps = llm.scheduler.counts.steps
        assert len(llm.generate([5], max_tokens=3)[0].token_ids) == 3
        assert llm.scheduler.counts.steps == steps + 3


def test_batch_invariance_needs_even_cuts(qwen: Path) -> None:
    for given in ({"ubatch": 300}, {"mixed": 100, "parallel": 2}, {"ubatch": "auto", "lazy_mode": "on"}):
        with pytest.raises(SettingError, match="batch_invariant needs cuts at multiples of 256"):
            LLM(qwen, device="cpu", batch_invariant=True, **given)  # type: ignore[arg-type]


def test_mixed_has_no_effect_with_one_lane(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match=r"mixed 100 has no effect while parallel is 1, .* raise parallel"):
        LLM(qwen, device="cpu", mixed=100)
    monkeypatch.setenv("LAZYIO_PARALLEL", "2")
    LLM(qwen, device="cpu", mixed=100).close()
    monkeypatch.setenv("LAZYIO_PARALLEL", "1")
    monkeypatch.setenv("LAZYIO_MIXED", "100")  # is left alone, whatever cuts it would make
    LLM(qwen, device="cpu", batch_invariant=True).close()


def test_lanes_share_memory(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(qwen, device="cpu", parallel=4) as llm:
        needed = llm.model.new_state(310, torch.device("meta")).nbytes
        monkeypatch.setattr(place_module, "available_memory_bytes", lambda: 4 * needed - 1)
        with pytest.raises(NeverFits, match="the state of 4 sequences of 310 tokens, one for each lane of parallel 4"):
            llm.generate([1] * 300, max_tokens=10)
        monkeypatch.setattr(place_module, "available_memory_bytes", lambda: 4 * needed)
        assert len(llm.generate([1] * 300, max_tokens=10)[0].token_ids) == 10
