"""The files of a run's MPS folder."""

import shutil

from mps_trainer.mps.folder import mps_folder


def test_a_pause_tells_the_latest_reason_and_is_for_this_user_alone(state):
    folder = mps_folder("a1b2c3d4")
    folder.make()
    for reason in ("process 7 computes here", "process 8 computes here"):
        assert folder.set_pause(reason)
        assert folder.pause_file.read_text() == reason
        before = folder.pause_file.stat()
        assert before.st_mode & 0o777 == 0o600
        # Called twice a second, it must not write each time.
        assert folder.set_pause(reason)
        assert folder.pause_file.stat().st_ino == before.st_ino
    assert folder.set_pause("")
    assert not folder.pause_file.exists()


def test_a_folder_that_was_cleaned_away_is_told_once_and_ends_nobody(state, caplog):
    folder = mps_folder("a1b2c3d4")
    folder.make()
    shutil.rmtree(folder.path)
    assert [folder.set_pause("process 7 computes here") for _ in range(3)] == [False] * 3
    assert caplog.text.count("cannot pause the sidecar") == 1
    assert folder.set_pause("")
