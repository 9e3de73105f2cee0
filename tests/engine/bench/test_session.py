"""The whole command on a small model with a real table file, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from lazyio import LazyTable, NotCold, RunsDifferError, TableError, Unsupported, open_table
from lazyio.bench.abba.paths import Place
from lazyio.cli import app
from lazyio.engine.bench.rig import Rig
from lazyio.engine.bench.ways import Way
from lazyio.engine.feed import Feed, TokenRows

FEW = ["--decode", "3", "--context", "5", "--rounds", "1", "--ubatch", "8", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tiny: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny("qwen4_exp", ple_embed_dim=256).reference.save_pretrained(path)
    return path


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench-engine", *map(str, arguments)])


def test_prompts_and_decode(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    ids = tmp_path / "ids.npy"
    np.save(ids, np.arange(3, 40))
    result = run(
        folder, "--prompts", "20,30", "--modes", "on,uring", "--lookahead", "0,2", "--ids", ids, "--json", out, *FEW
    )
    assert result.exit_code == 0, result.output
    assert "prompt of 30 tokens, cold, 4 ubatches of at most 8: " in result.output
    assert "uring +2" in result.output
    assert "Logits: equal, bit for bit" in result.output
    measured = json.loads(out.read_text())
    assert [prompt["cuts"] for prompt in measured["prompts"]] == [[8, 8, 4], [8, 8, 8, 6]]
    turns = measured["prompts"][0]["rounds"][0]
    assert [(turn["way"]["mode"], turn["way"]["lookahead"], turn["again"]) for turn in turns] == [
        ("off", 2, False),
        ("on", 0, False),
        ("on", 2, False),
        ("uring", 0, False),
        ("uring", 2, False),
        ("off", 2, True),
    ]
    assert all(len(turn["run"]["computes_s"]) == len(turn["run"]["waits_s"]) == 3 for turn in turns)
    steps = measured["decode"]["rounds"][0]
    assert [turn["way"]["mode"] for turn in steps] == ["off", "on", "uring", "off"]
    assert all(len(turn["run"]["waits_s"]) == 3 for turn in steps)
    assert measured["decode"]["raw_p50_us"] > 0
    # What other programs compare between processes.
    place = Place.parse("prompts.0.rounds.*.[way.mode=uring,way.lookahead=2].run.wall_s")
    assert place.values(measured) == [turns[4]["run"]["wall_s"]]
    for runs in (turns, measured["prompts"][1]["rounds"][0], steps):
        assert len({turn["run"]["logits"] for turn in runs}) == 1
    assert turns[0]["run"]["logits"] != steps[0]["run"]["logits"]


def test_what_was_measured_before_an_error_stands(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RunsDifferError("void")

    monkeypatch.setattr("lazyio.engine.bench.session.measure_decode", fails)
    out = tmp_path / "out.json"
    result = run(folder, "--prompts", "20", "--modes", "on", "--lookahead", "1", "--json", out, *FEW)
    assert result.exit_code == 2
    assert "prompt of 20 tokens, cold" in result.output
    assert "T is the time from" in result.output
    assert len(json.loads(out.read_text())["prompts"]) == 1


def test_a_fallback_of_decode_steps_alone_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise Unsupported("no rings here")

    monkeypatch.setattr("lazyio.fetchers.uring.Ring", refused)
    result = run(folder, "--prompts", "", "--modes", "uring", "--lookahead", "0", *FEW)
    assert result.exit_code == 0, result.output
    assert "uring fell back: " in result.output
    assert "no rings here" in result.output


def test_warm(folder: Path) -> None:
    result = run(
        folder, "--prompts", "20", "--modes", "on", "--lookahead", "1", "--warm", "--decode", "0", *FEW[4:6], *FEW[8:]
    )
    assert result.exit_code == 0, result.output
    assert "prompt of 20 tokens, warm, one ubatch: " in result.output


@pytest.mark.parametrize("arguments", [["--prompts", "20"], ["--streams", "2"], ["--queued", "2"]])
def test_a_table_in_memory_is_not_made_cold(
    folder: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads nothing: only the runs of the other mode begin cold, of prompts and steps, of streams, and of queues."""
    make_cold, modes, cold = Rig.make_cold, list[str](), list[str]()

    def noted(rig: Rig, way: Way) -> None:
        modes.append(way.mode)
        make_cold(rig, way)

    monkeypatch.setattr(Rig, "make_cold", noted)
    monkeypatch.setattr("lazyio.engine.bench.rig.make_cold", lambda _: cold.append(modes[-1]))
    result = run(folder, "--prompts", "", *arguments, "--modes", "on", "--lookahead", "0", *FEW)
    assert result.exit_code == 0, result.output
    assert set(modes) == {"off", "on"}
    assert cold == ["on"] * modes.count("on")


def test_warm_runs_need_no_cold_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a filesystem that keeps all in memory."""

    def refused(_: object) -> None:
        raise NotCold("never drops")

    monkeypatch.setattr("lazyio.engine.bench.session.make_cold", refused)
    options = ["--prompts", "20", "--modes", "on", "--lookahead", "0", *FEW]
    assert run(folder, *options).exit_code == 2
    assert run(folder, *options, "--warm").exit_code == 2  # steps are cold
    result = run(folder, *options, "--warm", "--decode", "0")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompts", "x"], "numbers of tokens"),
        (["--prompts", "", "--decode", "0"], "nothing to measure"),
        (["--prompts", "", "--warm"], "--warm has no effect without --prompts"),
        (["--modes", "maybe"], "maybe"),
        (["--prompts", "600"], "600 tokens are asked for, and the model takes"),
        (["--prompts", "", "--context", "600"], "728 tokens are asked for, and the model takes"),
        (["--json", "/nowhere/at/all.json"], "no folder"),
        (["--prompts", "", "--streams", "1,4", "--kv-pages", "off,1"], "kv_pages comes to 1, and one stream takes"),
        (
            ["--prompts", "", "--streams", "4", "--kv-pages", "off,11"],
            "4 streams have no room at once with kv_pages 11: give 12 or more pages",
        ),
        (["--prompts", "", "--streams", "1", "--kv-pages", "16777216"], "a pool of 16777216 pages for keys"),
    ],
)
def test_what_can_not_be_is_said_before_weights_are_read(
    folder: Path, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lazyio.engine.llm.load_model", lambda *_, **__: pytest.fail("weights were read"))
    result = run(folder, *arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_ids_beyond_the_vocabulary(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyio.engine.llm.load_model", lambda *_, **__: pytest.fail("weights were read"))
    np.save(tmp_path / "ids.npy", np.full(3000, 256))
    result = run(folder, "--prompts", 8, *FEW, "--ids", tmp_path / "ids.npy")
    assert result.exit_code == 2
    assert "below 256 are needed" in result.output


def test_a_model_without_a_table(tiny: Callable[..., Any], tmp_path: Path) -> None:
    tiny("qwen3_5").reference.save_pretrained(tmp_path)
    result = run(tmp_path, "--device", "cpu")
    assert result.exit_code == 2
    assert "has no table whose rows could be waited for; there is nothing to compare" in result.output


def test_other_logits_void_the_comparison(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lazyio.engine.llm import LLM

    with LLM(folder, lazy_mode="on", device="cpu") as llm, ExitStack() as stack:
        assert llm.table is not None
        assert llm.feed is not None
        rig = Rig(llm.model, llm.table.spec, llm.feed.row_ids, {}, stack)
        llm.table.close()
        tokens = list(range(3, 20))
        rig.prompt(Way("on", 1), tokens, [17], warm=True)
        values = TokenRows.values
        monkeypatch.setattr(
            TokenRows, "values", lambda self, out=None: torch.nextafter(values(self, out), torch.tensor(9.0))
        )
        with pytest.raises(RunsDifferError, match="void"):
            rig.prompt(Way("uring", 1), tokens, [17], warm=True)


def test_logits_that_are_no_numbers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal in all runs, as they would be bit for bit: but routers and selections of such values do other work."""
    values = TokenRows.values
    monkeypatch.setattr(TokenRows, "values", lambda self, out=None: values(self, out).fill_(torch.nan))
    result = run(folder, *FEW, "--prompts", "16", "--modes", "off")
    assert result.exit_code == 2
    assert "the logits of off +2 for a prompt of 16 tokens in [8, 8] are no finite numbers" in " ".join(
        result.output.split()
    )


def test_a_table_in_memory_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = list[LazyTable]()

    def opening(spec: Any, *, mode: str, **options: Any) -> LazyTable:
        tables.append(open_table(spec, mode=mode, **options))
        return tables[-1]

    monkeypatch.setattr("lazyio.engine.bench.rig.open_table", opening)
    result = run(folder, *FEW, "--prompts", "16,24", "--modes", "off,on", "--lookahead", "1")
    assert result.exit_code == 0, result.output
    modes = [table.backend.mode for table in tables]
    assert modes.count("off") == 1
    assert modes.count("on") > 1
    for table in tables:
        with pytest.raises(TableError, match="closed"):
            table.gather([0])


def test_streams(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run(
        *(folder, "--prompts", "", "--streams", "1,3", "--kv-pages", "0,40"),
        *("--modes", "uring", "--lookahead", "2", "--json", out, *FEW),
    )
    assert result.exit_code == 0, result.output
    assert "decode of several streams, 3 steps after 5 tokens" in result.output
    last = {line.split("  ")[0].strip(): line.split()[-1] for line in result.output.splitlines() if line.strip()}
    assert last["1, uring"] == "-"
    assert int(last["3, uring, pages 40"].split(".")[0]) > 0
    measured = json.loads(out.read_text())["streams"]
    (turns,) = measured["rounds"]
    arms = [(*turn["arm"].values(), turn["again"]) for turn in turns]
    off, uring = {"mode": "off", "lookahead": 0}, {"mode": "uring", "lookahead": 0}
    pairs = [(n, way, kv, False) for n in (1, 3) for way in (off, uring) for kv in ("off", "40")]
    assert arms == [*pairs, (1, off, "off", True)]
    for turn in turns:
        assert len(turn["steps_s"]) == len(turn["waits_s"]) == 3
        assert 0 < turn["host_s"] < sum(turn["steps_s"])
        assert turn["stats"]["rows"] == turn["arm"]["streams"] * 3 * 8
        assert (turn["peak_pages"] is None) == (turn["arm"]["kv_pages"] == "off")
        assert list(turn["aside_s"]) == ["memory", "cold", "opening", "prompts"]
    assert len({turn["logits"] for turn in turns}) == 2


def test_streams_are_warmed_up_with_few_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the table in memory, so that nothing is read; once for each number of streams."""
    checked, steps = Rig.checked, list[str]()

    def noted(rig: Rig, what: str, label: str, logits: Any) -> str:
        steps.append(f"{what.split(' after ')[0]}: {label}")
        return checked(rig, what, label, logits)

    monkeypatch.setattr(Rig, "checked", noted)
    options = ["--prompts", "", "--streams", "1,2", "--modes", "on", "--lookahead", "0"]
    result = run(folder, *options, *FEW[2:], "--decode", "6")
    assert result.exit_code == 0, result.output
    assert steps[:2] == ["1 streams of 4 steps: 1, off", "2 streams of 4 steps: 2, off"]
    assert len(steps) == 2 + 5
    assert all(" of 6 steps" in words for words in steps[2:])
    steps.clear()
    assert run(folder, *options, *FEW).exit_code == 0
    assert all(" of 3 steps" in words for words in steps)


def test_streams_in_pages_are_cut_elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for others ends a ubatch: then some streams reply earlier than others, and logits are not compared
    with those of windows."""
    options = ["--prompts", "", "--streams", "3", "--kv-pages", "off,40", "--modes", "uring"]
    result = run(folder, *options, *FEW, "--ubatch", "512", "--context", "300")
    assert result.exit_code == 0, result.output
    assert "Logits: equal, bit for bit" in result.output
    feed, calls = Feed.step, count()
    monkeypatch.setattr(Feed, "step", lambda self, tokens: feed(self, [([next(calls) % 9], None) for _ in tokens]))
    result = run(folder, *options, *FEW, "--ubatch", "512", "--context", "300")
    assert result.exit_code == 2
    assert "gave different logits for 3 streams of 3 steps" in result.output


def test_queues(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run(
        *(folder, "--prompts", "", "--queued", "2,3", "--modes", "uring", "--lookahead", "0,2"),
        *("--json", out, *FEW),
    )
    assert result.exit_code == 0, result.output
    assert "one lane, prompts of 5 tokens, replies of 4, cold" in result.output
    (turns,) = json.loads(out.read_text())["queue"]["rounds"]
    runs = [(turn["queued"], *turn["way"].values()) for turn in turns]
    ways = [("off", 2), ("uring", 0), ("uring", 2)]
    assert runs == [*((queued, *way) for queued in (2, 3) for way in ways), (2, "off", 2)]
    for turn in turns:
        assert len(turn["queued_s"]) == len(turn["waited_s"]) == turn["queued"]
        assert turn["queued_s"] == sorted(turn["queued_s"])
        assert turn["stats"]["rows"] == (turn["queued"] + 1) * (5 + 3) * 8
    assert len({turn["logits"] for turn in turns}) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--queued", "2", "--prompts", "8", "--decode", "0"], "--queued needs replies"),
        (["--streams", "0"], "a word of --streams is '0'; it can be a whole number from 1 to 1024"),
        (["--queued", "two"], "a word of --queued is 'two'"),
        (["--streams", "2,2"], "each once"),
        (["--streams", "2,02"], "each once"),
        (["--streams", "2", "--kv-pages", "off,0"], "each once"),
        (["--streams", "2", "--kv-pages", "some"], "a word of --kv-pages is 'some'"),
        (["--kv-pages", "auto"], "no effect without --streams"),
        (["--streams", "2", "--prompts", "8", "--decode", "0"], "--decode is 0"),
    ],
)
def test_streams_that_can_not_be(folder: Path, arguments: list[str], said: str) -> None:
    result = run(folder, *arguments)
    assert result.exit_code == 2
    assert said in result.output
