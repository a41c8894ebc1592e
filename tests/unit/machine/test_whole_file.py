from __future__ import annotations

from pathlib import Path

import pytest

from zerooffload.machine import write_whole


def test_a_file_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for text in ("a", "bü"):
        write_whole(file, text, mode=0o600)
        assert file.read_text(encoding="utf-8") == text
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_an_interruption_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    write_whole(file, "before")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_whole(file, "after")
    assert file.read_text(encoding="utf-8") == "before"
    assert list(tmp_path.iterdir()) == [file]
