"""verdicts.json on a disk that refuses."""

import pytest

from mps_trainer.run.doing import Stage, Subject
from mps_trainer.run.verdicts import Verdict, load_verdicts, save_verdicts

VERDICT = Verdict(Stage.TRAINING, Subject(4, None, ("a",)), 1, "signal SIGABRT", True)


def test_what_is_saved_is_loaded_and_private(tmp_path):
    save_verdicts(tmp_path, [VERDICT])
    assert load_verdicts(tmp_path) == [VERDICT]
    assert (tmp_path / "verdicts.json").stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_read_is_no_verdict(tmp_path):
    (tmp_path / "verdicts.json").mkdir()
    assert load_verdicts(tmp_path) == []


@pytest.mark.parametrize("content", ["{", "[{}]", "[3]"])
def test_what_nobody_of_us_wrote_is_no_verdict(tmp_path, content):
    (tmp_path / "verdicts.json").write_text(content)
    assert load_verdicts(tmp_path) == []
