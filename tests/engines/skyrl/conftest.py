"""One thread, no network; what SkyRL's modules ask for at import and no CPU has; the harness."""

import importlib.machinery
import importlib.util
import os
import sys
import types
import typing
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

collect_ignore = ["skyrl_harness.py"]  # imports SkyRL, which may not be there

if importlib.util.find_spec("skyrl") is not None:
    if sys.version_info < (3, 12):  # SkyRL asks for 3.12's at import, though its metadata says 3.11
        import typing_extensions

        typing.TypedDict = typing_extensions.TypedDict
    if importlib.util.find_spec("flash_attn") is None:
        # Imported by name, called only with packed sequences, which need a GPU.
        package: Any = types.ModuleType("flash_attn")
        package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None, is_package=True)
        package.__path__ = []
        padding: Any = types.ModuleType("flash_attn.bert_padding")
        padding.__spec__ = importlib.machinery.ModuleSpec("flash_attn.bert_padding", None)
        padding.pad_input = padding.unpad_input = None
        sys.modules |= {"flash_attn": package, "flash_attn.bert_padding": padding}
