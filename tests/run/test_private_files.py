"""Files for this user alone, with a real disk."""

import errno
import os
import resource

import pytest

from mps_trainer.run.private_files import make_private, write_private


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.parametrize("content", [b"bytes", "text \u00e4"])
def test_a_file_is_replaced_and_nobody_else_may_read_it(tmp_path, open_umask, content):
    path = tmp_path / "status.json"
    path.write_text("old")
    write_private(path, content)
    assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_no_link_is_followed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("a.json", "a.json.tmp", ".a.json.tmp", ".a.json.same.tmp"):
        (tmp_path / name).symlink_to(victim)
    write_private(tmp_path / "a.json", b"new")
    assert victim.read_text() == "mine"
    assert not (tmp_path / "a.json").is_symlink()
    # Even where the name was guessed.
    monkeypatch.setattr("secrets.token_hex", lambda n: "same")
    with pytest.raises(FileExistsError):
        write_private(tmp_path / "a.json", b"newer")
    assert victim.read_text() == "mine"


def test_a_full_disk_leaves_the_old_content_and_nothing_else(tmp_path):
    path = tmp_path / "status.json"
    path.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match="too large") as caught:
            write_private(path, b"x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_made_private_or_closed(tmp_path, open_umask):
    for _ in range(2):
        make_private(tmp_path / "a" / "b")
        assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
        (tmp_path / "a" / "b").chmod(0o755)
