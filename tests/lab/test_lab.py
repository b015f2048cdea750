import subprocess
import sys

import pytest

from tokencredit import lab

WITHOUT = "import sys; sys.modules['transformers'] = None\n"


def test_every_public_name_is_there_and_documented():
    for name in lab.__all__:
        assert getattr(lab, name) is not None
        assert name in dir(lab)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = lab.nothing


def test_importing_the_lab_does_not_import_transformers():
    code = "import sys, tokencredit, tokencredit.lab; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_transformers_the_extra_is_named():
    code = WITHOUT + "import tokencredit\nimport tokencredit.lab"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "MissingExtraError" in done.stderr
    assert "pip install 'tokencredit[trl]'" in done.stderr
