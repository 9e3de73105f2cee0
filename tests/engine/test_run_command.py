import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner, Result

from lazyio.cli import app
from lazyio.engine import LLM
from lazyio.engine.forward import Forward
from lazyio.engine.request import Request as ServedRequest
from lazyio.errors import ModelError

PROMPT = "abc"


@pytest.fixture(scope="module")
def bare(tiny: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer, and with room for long replies."""
    folder = tmp_path_factory.mktemp("bare")
    tiny("gemma4", max_position_embeddings=100_000).reference.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(bare: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with one, of letters, and a template that puts "hi" before what a user says."""
    folder = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(bare, folder)
    letters = {chr(ord("a") + number): number for number in range(26)}
    tokenizer = Tokenizer(models.WordLevel(letters | {f"[{number}]": number for number in range(26, 256)}, "[255]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "hi{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 255}))
    return folder


@pytest.fixture(scope="module")
def texts(model: Path) -> dict[str, str]:
    """What the model replies, to be compared with."""
    with LLM(model, device="cpu") as llm:
        return {prompt: llm.generate(prompt, max_tokens=6)[0].text for prompt in (PROMPT, f"hi{PROMPT}")}


def run(*arguments: str | Path, stdin: str | None = None) -> Result:
    options = ["run", *(str(argument) for argument in arguments), "--device", "cpu"]
    return CliRunner().invoke(app, options, input=stdin)


def lines_of(result: Result) -> list[str]:
    return result.stderr.splitlines()


def test_a_reply_goes_to_stdout_and_the_rest_to_stderr(model: Path, texts: dict[str, str]) -> None:
    result = run(model, "-p", PROMPT, "--no-chat", "--max-tokens", "6")
    assert (result.exit_code, result.stdout) == (0, f"{texts[PROMPT]}\n")
    first, last = lines_of(result)
    assert first.startswith("lazyio: gemma4, ")
    assert re.search(r"mode auto by resident, buffered \(it fits in memory: .*; lookahead 2, ubatch 2048$", first)
    assert last.startswith("lazyio: prompt of 3 tokens at ")
    assert "; bound by " in last


def test_a_chat_is_what_a_model_with_a_template_has(model: Path, texts: dict[str, str]) -> None:
    for options in (["--chat"], []):
        assert run(model, "-p", PROMPT, "--max-tokens", "6", *options).stdout == f"{texts[f'hi{PROMPT}']}\n"


def test_a_prompt_from_stdin(model: Path, texts: dict[str, str]) -> None:
    result = run(model, "-p", "-", "--no-chat", "--max-tokens", "6", stdin=PROMPT)
    assert (result.exit_code, result.stdout) == (0, f"{texts[PROMPT]}\n")


def test_several_prompts_have_their_replies_in_order(model: Path) -> None:
    prompts = ["abc", "b", "cabacab"]
    with LLM(model, device="cpu") as llm:
        texts = [llm.generate(prompt, max_tokens=6)[0].text for prompt in prompts]
    options = ["--no-chat", "--max-tokens", "6", "--parallel", "2", "--mixed", "8"]
    asked = [word for prompt in prompts for word in ("-p", prompt)]
    result = run(model, *asked, *options)
    assert (result.exit_code, result.stdout) == (0, "".join(f"{text}\n" for text in texts))
    assert lines_of(result)[0].endswith(", parallel 2")
    assert [line.split(":")[1].strip() for line in lines_of(result)[-4:-1]] == ["1", "2", "3"]
    assert re.search(r"3 replies of 18 tokens together in .* s, .*/s, at most 2 at once$", lines_of(result)[-1])
    result = run(model, *asked, *options, "--json")
    assert [each["text"] for each in json.loads(result.stdout)] == texts


def test_a_prompt_that_fails_leaves_the_others_whole(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(request: Any, token: int) -> bool:
        if len(request.prompt) == 1:
            raise ModelError("planted")
        return take(request, token)

    take = ServedRequest.take
    monkeypatch.setattr(ServedRequest, "take", fails)
    result = run(model, "-p", "abc", "-p", "b", "-p", "abc", "--no-chat", "--max-tokens", "6", "--parallel", "3")
    first, failed, last = result.stdout.splitlines()
    assert (result.exit_code, first, failed) == (2, last, "")
    assert any(line.startswith("lazyio: 2: error: planted; ") for line in lines_of(result))
    assert lines_of(result)[-1] == "lazyio: error: planted"
    result = run(model, "-p", "abc", "-p", "b", "--no-chat", "--max-tokens", "6", "--parallel", "2", "--json")
    assert [(each["finish_reason"], each["error"]) for each in json.loads(result.stdout)] == [
        ("length", None),
        ("error", "planted"),
    ]


def test_a_forward_pass_that_fails_leaves_those_that_waited_whole(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(forward: Forward, chunks: Any, rows: Any) -> Any:
        monkeypatch.setattr(Forward, "step", step)
        raise torch.OutOfMemoryError("CUDA out of memory")

    step = Forward.step
    monkeypatch.setattr(Forward, "step", fails)
    result = run(model, "-p", "ab", "-p", "abc", "--no-chat", "--max-tokens", "6")
    with LLM(model, device="cpu") as llm:
        whole = llm.generate("abc", max_tokens=6)[0].text
    assert (result.exit_code, result.stdout.splitlines()) == (2, ["", whole])
    assert lines_of(result)[-1].startswith("lazyio: error: memory ran out while 2 tokens of 1 sequences were computed")


def test_ids_in_and_out_without_a_tokenizer(bare: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(3, 9))
    with LLM(bare, device="cpu") as llm:
        (expected,) = llm.generate(range(3, 9), max_tokens=5)
    result = run(bare, "--ids", tmp_path / "ids.npy", "--max-tokens", "5")
    assert result.exit_code == 0
    assert [int(word) for word in result.stdout.split()] == list(expected.token_ids)
    assert any(line.startswith("lazyio: token ids only: ") for line in lines_of(result))


def test_all_modes_and_settings_give_one_text(model: Path, texts: dict[str, str]) -> None:
    for options in (
        ["--lazy-mode", "off", "--lookahead", "0"],
        ["--lazy-mode", "on", "--ubatch", "2"],
        ["--lazy-mode", "on-direct", "--direct-io", "off", "--ubatch", "auto"],
        ["--lazy-mode", "uring", "--row-cache", "1MiB", "--direct-io", "on"],
    ):
        result = run(model, "-p", PROMPT, "--no-chat", "--max-tokens", "6", *options)
        assert (result.exit_code, result.stdout) == (0, f"{texts[PROMPT]}\n"), result.stderr
        assert lines_of(result)[1].startswith(f"lazyio: settings: lazy_mode={options[1]}, ")


def test_auto_that_is_not_in_force_is_no_setting_of_a_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYIO_UBATCH", "auto")
    for lookahead, said in (("0", ["lookahead=0"]), ("1", ["lookahead=1", "ubatch=auto (LAZYIO_UBATCH)"])):
        result = run(model, "-p", PROMPT, "--max-tokens", "1", "--lookahead", lookahead)
        assert lines_of(result)[1] == f"lazyio: settings: {', '.join(said)}"


def test_pages_give_the_same_text_and_say_how_memory_is_divided(model: Path, texts: dict[str, str]) -> None:
    result = run(model, "-p", PROMPT, "--no-chat", "--max-tokens", "6", "--kv-pages", "9", "--poison-state")
    assert (result.exit_code, result.stdout) == (0, f"{texts[PROMPT]}\n")
    assert re.search(r"^lazyio: memory of \d+ MiB = .* left; 1 streams of ", lines_of(result)[1])
    assert lines_of(result)[2] == "lazyio: settings: kv_pages=9, poison_state=on"


def test_json(model: Path, texts: dict[str, str]) -> None:
    result = run(model, "-p", PROMPT, "--no-chat", "--max-tokens", "6", "--json", "--stop", texts[PROMPT][-3:])
    document = json.loads(result.stdout)
    assert document["model"] == str(model)
    assert document["text"] == texts[PROMPT][: texts[PROMPT].index(texts[PROMPT][-3:])]
    assert document["finish_reason"] == "stop"
    assert document["account"]["prompt_tokens"] == 3
    assert len(document["token_ids"]) == document["account"]["reply_tokens"]


def test_random_weights_of_a_type(model: Path) -> None:
    result = run(model, "-p", PROMPT, "--max-tokens", "2", "--load-format", "dummy", "--trunk", "q4_0")
    assert result.exit_code == 0, result.stderr
    first, second = lines_of(result)[:2]
    assert " packed as Q4_0 and " in first
    assert second == "lazyio: settings: trunk=Q4_0"


def test_a_seed_repeats_a_reply(model: Path) -> None:
    def reply(seed: str) -> str:
        return run(model, "-p", PROMPT, "--max-tokens", "8", "--temperature", "5", "--seed", seed).stdout

    assert reply("1") == reply("1") != reply("2")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-p", ""], "the prompt is empty"),
        (["--ids", "absent.npy"], "can't read token ids from absent.npy"),
        (["-p", "a", "--top-p", "2"], "top_p must be"),
        (["-p", "a", "--lookahead", "99"], "lookahead is '99'; it can be a whole number from 0 to 64"),
        (["-p", "a", "--lazy-mode", "fast"], "lazy_mode is 'fast'"),
        (["-p", "a", "--max-tokens", "200000"], "a reply of up to 200000 are"),
        (["-p", "a", "--stop", ""], "stop has an empty string"),
        (["-p", "a", "--table", "absent"], "absent"),
        (["-p", "a", "--weights", "fast"], "weights is 'fast'; it can be auto, packed or dequantised"),
        (["-p", "a", "--mixed", "8"], "mixed 8 has no effect while parallel is 1"),
        (["-p", "a", "--kv-pages", "1"], "kv_pages comes to 1, and one stream takes"),
        (["-p", "a", "--kv-pages", "20", "--max-tokens", "9000"], "take 36 pages of 256 positions and"),
        (["-p", "a", "--trunk", "Q4_0"], "trunk is Q4_0, and only weights with load_format 'dummy'"),
    ],
)
def test_what_is_wrong_is_one_line_and_said_before_weights_are_read(
    model: Path, options: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lazyio.engine.llm.load_model", lambda *_, **__: pytest.fail("weights were read"))
    result = run(model, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in lines_of(result)[-1]
    assert lines_of(result)[-1].startswith("lazyio: error: ")


def test_a_missing_tokenizer_is_said_once(bare: Path) -> None:
    result = run(bare, "-p", PROMPT)
    assert result.exit_code == 2
    assert [line.split(": ")[1] for line in lines_of(result)] == ["error"]


def test_no_model(tmp_path: Path) -> None:
    result = run(tmp_path / "absent", "-p", PROMPT)
    assert result.exit_code == 2
    assert str(tmp_path / "absent") in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_an_interrupt_keeps_what_there_is(bare: Path, tmp_path: Path, number: signal.Signals, word: str) -> None:
    np.save(tmp_path / "ids.npy", np.arange(3, 9))
    options = ["--ids", str(tmp_path / "ids.npy"), "--max-tokens", "90000", "--device", "cpu", "--lazy-mode", "uring"]
    command = [sys.executable, "-c", "from lazyio.cli import main; main()", "run", str(bare), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        begun = process.stdout.read(20)  # some tokens
        process.send_signal(number)
        try:
            rest, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 128 + number
    assert all(token.isdecimal() for token in (begun + rest).split())
    *_, account, interrupted = said.splitlines()
    assert account.startswith("lazyio: prompt of 6 tokens at ")
    assert interrupted == f"lazyio: {word}"
    assert "Traceback" not in said
