"""Locks on files and folders."""

import errno
import fcntl
from pathlib import Path

import pytest

from dflash_toolkit import UserError
from dflash_toolkit.files import locked


def test_a_lock_excludes_other_runs_and_ends_with_an_error(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "file"):
        with pytest.raises(RuntimeError), locked(place):
            with pytest.raises(UserError, match="another run"), locked(place):
                raise AssertionError("two hold it")
            raise RuntimeError("a mistake")
        with locked(place):
            pass


def test_a_file_system_without_locks_does_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without)
    with locked(tmp_path / "file"):
        assert (tmp_path / "file").exists()
