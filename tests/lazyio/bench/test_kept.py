from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from lazyio.bench import kept
from lazyio.bench.kept import KeptJson, write_whole


def test_each_document_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    file = KeptJson(out)
    for number in range(3):
        file.write({"runs": number})
        assert json.loads(out.read_text()) == {"runs": number}
    assert list(tmp_path.iterdir()) == [out]
    file.void()
    assert not out.exists()


def test_a_file_of_somebody_else_is_not_removed(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_text("theirs")
    KeptJson(out).void()
    assert out.read_text() == "theirs"
    KeptJson(None).write({}, last=True)


def test_an_interrupt_while_it_is_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    write_whole(out, {"runs": 1})
    write = Path.write_text

    def interrupted(path: Path, text: str) -> int:
        write(path, text[:5])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(out, {"runs": 2})
    assert json.loads(out.read_text()) == {"runs": 1}
    assert list(tmp_path.iterdir()) == [out]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "there" / "out.json")
    KeptJson(link).write({"runs": 1})
    assert link.is_symlink()
    assert json.loads((tmp_path / "there" / "out.json").read_text()) == {"runs": 1}


def test_a_pipe_has_the_last_document_alone(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    file = KeptJson(pipe)
    file.write({"runs": 1})
    file.write({"runs": 2}, last=True)
    reader.join()
    assert [json.loads(text) for text in read] == [{"runs": 2}]


def test_a_folder_where_no_file_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    out.write_text("before")
    monkeypatch.setattr(kept.os, "access", lambda path, _: path != tmp_path)
    file = KeptJson(out)
    file.write({"runs": 1})
    assert out.read_text() == "before"
    file.write({"runs": 2}, last=True)
    assert json.loads(out.read_text()) == {"runs": 2}
