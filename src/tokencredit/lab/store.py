"""Warm policies on disk: those that come with the package, and the user's cache."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
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
    path = _find(setting)
    if path is None:
        path = build_policy(setting, _cached(setting).parent, on_progress=on_progress)
    return _read(setting, path), tokenizer_for(setting.task)


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
    path = Path(folder) / _WEIGHTS
    _check_writable(path)
    warmed = warm_up(setting, on_progress=on_progress)
    halved = _own_tensors(warmed.model)
    # Measured on the weights as stored, not on the float32 ones that they were rounded from.
    _fill(warmed.model, halved, path)
    accuracy = evaluate(
        warmed.model, tokenizer_for(setting.task), setting.task, seed=_FINAL_SEED
    ).accuracy
    _write(
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
    path = _find(setting)
    return None if path is None else _metadata(path)


def cache_folder() -> Path:
    """Where built policies are kept.

    ``$TOKENCREDIT_CACHE`` if set, else ``$XDG_CACHE_HOME/tokencredit``, else
    ``~/.cache/tokencredit``.
    """
    own = os.environ.get("TOKENCREDIT_CACHE")
    if own:
        return Path(own)
    general = os.environ.get("XDG_CACHE_HOME")
    return (Path(general) if general else Path.home() / ".cache") / "tokencredit"


def _find(setting: Setting) -> Path | None:
    """The stored weights of exactly this setting; a variant of the same name has its own."""
    for path in (_SHIPPED / setting.name / _WEIGHTS, _cached(setting)):
        if path.is_file() and _metadata(path).get("fingerprint") == setting.fingerprint:
            return path
    return None


def _cached(setting: Setting) -> Path:
    return cache_folder() / f"{setting.name}-{setting.fingerprint}" / _WEIGHTS


def _metadata(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise _damaged(path, str(error)) from error


def _read(setting: Setting, path: Path) -> PreTrainedModel:
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise _damaged(path, str(error)) from error
    model = fresh_policy(setting)
    _fill(model, tensors, path)
    return model


def _fill(model: PreTrainedModel, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Copy stored weights into a model; tied ones are filled through the name they share."""
    expected = _own_tensors(model)
    shapes = {name: tensor.shape for name, tensor in expected.items()}
    if shapes != {name: tensor.shape for name, tensor in tensors.items()}:
        raise _damaged(path, "its tensors are not those of the model")
    model.load_state_dict(dict(tensors), strict=False)


def _own_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's weights in float16, each tied tensor once."""
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            tensors[name] = tensor.detach().to(torch.float16).contiguous()
    return tensors


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
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


def _check_writable(path: Path) -> None:
    # Before the minutes of work, not after.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InputError(
            f"build_policy: cannot write to {path.parent} ({error.strerror}); choose another "
            "folder, or set TOKENCREDIT_CACHE"
        ) from error


def _damaged(path: Path, reason: str) -> InputError:
    return InputError(f"{path}: not a stored policy ({reason}); delete the file to build it anew")
