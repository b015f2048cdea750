"""Weights on disk: those that come with the package, and the user's cache.

Here for the policies; the reward models share how files are found, read and written.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tokencredit import __version__
from tokencredit.errors import InputError
from tokencredit.lab.catalogue import Setting
from tokencredit.lab.catalogue import setting as setting_named
from tokencredit.lab.evaluation import evaluate
from tokencredit.lab.tokenizer import tokenizer_for
from tokencredit.lab.warmup import OnProgress, fresh_policy, warm_up

__all__ = ["build_policy", "cache_folder", "load_policy", "policy_metadata"]

_WEIGHTS = "model.safetensors"
_SHIPPED = Path(__file__).parent / "data"
_FINAL_SEED = 999


def load_policy(
    setting: Setting | str, *, on_progress: OnProgress | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The setting's warm policy in float32, and its tokenizer.

    The weights come from the package if they are shipped, else from the cache; if they are in
    neither, they are built into the cache, which takes one to three minutes.

    Args:
        setting: A setting, or the name of one.
        on_progress: Told how a build gets on, as ``on_progress(step, loss, accuracy)``.

    Returns:
        A new model on the CPU in evaluation mode, and a new tokenizer.

    Raises:
        InputError: There is no such setting, or a stored file is damaged.

    Example:
        >>> model, tokenizer = load_policy("chain-qwen3")
        >>> model.dtype, len(tokenizer)
        (torch.float32, 23)
    """
    if isinstance(setting, str):
        setting = setting_named(setting)
    path = find_weights(setting.name, setting.fingerprint)
    if path is None:
        folder = cached_weights(setting.name, setting.fingerprint).parent
        path = build_policy(setting, folder, on_progress=on_progress)
    return read_weights(fresh_policy(setting), path), tokenizer_for(setting.task)


def build_policy(
    setting: Setting,
    folder: str | Path,
    *,
    seed: int | None = None,
    on_progress: OnProgress | None = None,
) -> Path:
    """Warm a policy up and write its weights, in float16, to ``folder/model.safetensors``.

    The same setting and seed on the same number of threads give the same weights. The file
    appears under its name only when it is complete, so that processes which build at the same
    time do not disturb each other.

    Args:
        setting: What to build.
        folder: Where to; made if absent.
        seed: Instead of the setting's own. A file built from another seed records that and is
            not taken for the setting's policy.
        on_progress: Told how it gets on, as ``on_progress(step, loss, accuracy)``.

    Returns:
        The file written. Its header says how it came about; see `policy_metadata`.

    Raises:
        InputError: The target accuracy is not reached, or the folder cannot be written.
    """
    if seed is not None:
        setting = replace(setting, seed=seed)
    path = weights_in(folder, "build_policy")
    warmed = warm_up(setting, on_progress=on_progress)
    # Measured on the weights as stored, not on the float32 ones that they were rounded from.
    halved = round_weights(warmed.model)
    accuracy = evaluate(
        warmed.model, tokenizer_for(setting.task), setting.task, seed=_FINAL_SEED
    ).accuracy
    write_weights(
        path,
        halved,
        {
            "setting": setting.name,
            "fingerprint": setting.fingerprint,
            "seed": str(warmed.seed),
            "steps": str(warmed.steps),
            "accuracy": f"{accuracy:.4f}",
            "version": __version__,
        },
    )
    return path


def policy_metadata(setting: Setting | str) -> dict[str, str] | None:
    """What the header of the setting's stored policy says; None if it is not built yet.

    Args:
        setting: A setting, or the name of one.

    Returns:
        ``setting``, ``fingerprint`` (of everything that decides the weights), ``seed`` (the one
        that worked), ``steps`` of warm-up, ``accuracy`` (sampled, 1,024 held-out prompts), and
        the ``version`` of the package that built it.

    Raises:
        InputError: There is no such setting, or the stored file is damaged.

    Example:
        >>> policy_metadata("chain-qwen3")["setting"]
        'chain-qwen3'
    """
    if isinstance(setting, str):
        setting = setting_named(setting)
    path = find_weights(setting.name, setting.fingerprint)
    return None if path is None else read_metadata(path)


def cache_folder() -> Path:
    """Where built policies and reward models are kept.

    ``$TOKENCREDIT_CACHE`` if set, else ``$XDG_CACHE_HOME/tokencredit``, else
    ``~/.cache/tokencredit``.
    """
    own = os.environ.get("TOKENCREDIT_CACHE")
    if own:
        return Path(own)
    general = os.environ.get("XDG_CACHE_HOME")
    return (Path(general) if general else Path.home() / ".cache") / "tokencredit"


def find_weights(name: str, fingerprint: str) -> Path | None:
    """The stored weights of exactly this fingerprint, shipped or cached; None if not built."""
    for path in (_SHIPPED / name / _WEIGHTS, cached_weights(name, fingerprint)):
        if path.is_file() and read_metadata(path).get("fingerprint") == fingerprint:
            return path
    return None


def cached_weights(name: str, fingerprint: str) -> Path:
    """Where the cache has them; a variant of the same name has a place of its own."""
    return cache_folder() / f"{name}-{fingerprint}" / _WEIGHTS


def weights_in(folder: str | Path, owner: str) -> Path:
    """The file to build in a folder, checked to be writable before the minutes of work.

    Args:
        folder: Where to; made if absent.
        owner: Which function builds, for the message.

    Raises:
        InputError: The folder cannot be written.
    """
    path = Path(folder) / _WEIGHTS
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InputError(
            f"{owner}: cannot write to {path.parent} ({error.strerror}); choose another "
            "folder, or set TOKENCREDIT_CACHE"
        ) from error
    return path


def read_metadata(path: Path) -> dict[str, str]:
    """What a file's header says."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise _damaged(path, str(error)) from error


def read_weights(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    """Fill a fresh model from a file; tied weights through the name they share."""
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise _damaged(path, str(error)) from error
    expected = {name: tensor.shape for name, tensor in _own_tensors(model).items()}
    if expected != {name: tensor.shape for name, tensor in tensors.items()}:
        raise _damaged(path, "its tensors are not those of the model")
    model.load_state_dict(tensors, strict=False)
    return model


def round_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Round a model's weights to float16, in place, and return them as they are stored."""
    halved = _own_tensors(model)
    model.load_state_dict(halved, strict=False)
    return halved


def _own_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's weights in float16, each tied tensor once."""
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            tensors[name] = tensor.detach().to(torch.float16).contiguous()
    return tensors


def write_weights(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a file that appears under its name only when it is complete."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    try:
        save_file(tensors, name, metadata=metadata)
        # mkstemp makes files that only their owner may read.
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _damaged(path: Path, reason: str) -> InputError:
    return InputError(f"{path}: not a stored model ({reason}); delete the file to build it anew")
