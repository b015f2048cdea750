"""``tokencredit env``: versions and devices, for bug reports."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from tokencredit.cli.main import Parser

__all__ = ["run"]

PACKAGES = (
    "tokencredit",
    "torch",
    "trl",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "vllm",
    "verl",
    "safetensors",
    "zstandard",
)


def run(argv: list[str]) -> int:
    """Print what a bug report needs."""
    Parser(prog="tokencredit env", description="Versions and devices.").parse_args(argv)
    print(f"python        {platform.python_version()} on {platform.platform()}")
    for package in PACKAGES:
        try:
            found = version(package)
        except PackageNotFoundError:
            found = "not installed"
        print(f"{package:<13} {found}")
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"devices       {', '.join(devices) or 'CPU only'}, {os.cpu_count()} cores")
    return 0
