"""Two processes, one output folder: the second is refused."""

import pytest

from tokencredit import InputError
from tokencredit.cli.main import main
from tokencredit.engines.trl.run_folder import RunFolder


def test_a_claimed_folder_is_refused_to_others(tmp_path, capsys):
    first = RunFolder(tmp_path / "run")
    first.open_new()
    first.claim()
    second = RunFolder(tmp_path / "run")
    second.open_new()
    with pytest.raises(InputError, match="another process is training"):
        second.claim()
    argv = ["train", "--lab", "--max_steps", "1", "--output_dir", str(tmp_path / "run")]
    assert main(argv) == 2
    assert "another process is training" in capsys.readouterr().err
    assert list((tmp_path / "run").iterdir()) == []
    first.release()
    second.claim()
    second.release()
