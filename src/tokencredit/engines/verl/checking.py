"""``python -m tokencredit.engines.verl check``: does this installation work, does this config?

verl swallows the faults of its plugins, so a broken installation shows only as "Unknown advantage
estimator". This says on one screen what is the matter. It starts no training and no Ray.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from tokencredit.engines.options import PREFIX
from tokencredit.engines.verl.estimators import register_estimators
from tokencredit.engines.verl.settings import (
    ESTIMATOR,
    LOSS_MODE,
    SECTION,
    lookup,
    misspelt,
    needed_overrides,
    notes,
    obstacles,
    read_section,
    recommended_overrides,
    setting_of,
    usable_methods,
    wrong_name,
)
from tokencredit.errors import InputError, nearest
from tokencredit.texts import printable

__all__ = ["main"]

PLUGIN = "tokencredit.engines.verl.plugin"
POLICY_VARIABLE = "VERL_USE_EXTERNAL_PLUGINS"
RUN_WITH = "0.9.1, its functions with 0.9.0"

USAGE = """\
usage: python -m tokencredit.engines.verl check [CONFIG.yaml] [key=value ...]

Says whether verl loads tokencredit here, and what of a configuration stands in a method's way.
CONFIG.yaml is laid over verl's defaults, overrides over both, written as for verl.trainer.main_ppo
(key=value, +key=value, ~key; not --config-name and --config-path: name the file).
Exit code: 0 fine, 2 something is in the way.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)

    def format_help(self) -> str:
        return USAGE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code: 0 fine, 2 something is in the way."""
    parser = _Parser(prog="python -m tokencredit.engines.verl")
    parser.add_argument("command")
    parser.add_argument("words", nargs="*")
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv:
        print(
            "tokencredit: say what to do: python -m tokencredit.engines.verl check", file=sys.stderr
        )
        return 2
    try:
        given = parser.parse_args(argv)
        if given.command != "check":
            raise InputError(f"unknown command {given.command!r}; there is: check")
        found = _installation()
        if given.words and "verl" in sys.modules:
            try:
                found += _configuration(given.words)
            except InputError as error:
                if not found:
                    raise
                found.append(str(error))  # and what is wrong besides
        elif not found:
            _show_methods()
    except InputError as error:
        print(f"tokencredit: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        return 2
    except SystemExit as end:  # argparse, after --help
        return end.code if isinstance(end.code, int) else 0
    if found:
        print(f"\nin the way ({len(found)}):")
        for line in found:
            print(f"  - {printable(' '.join(line.split()))}")
        return 2
    print("\nfine: nothing is in the way")
    return 0


# -- the installation --------------------------------------------------------------------------


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _row(what: str, value: str) -> None:
    print(f"  {what:<20}{value}")


def _installation() -> list[str]:
    """Print what is installed and loaded; what is wrong with it, a line each."""
    print("installation")
    for package in ("tokencredit", "verl", "ray", "torch", "TransferQueue"):
        remark = f"  (run with {RUN_WITH})" if package == "verl" else ""
        _row(package, _version(package) + remark)
    if find_spec("verl") is None:
        return ["verl is not installed: pip install 'tokencredit[verl]'"]
    try:
        _quietly(lambda: import_module("verl"))
    except Exception as error:
        return [f"verl cannot be imported: {type(error).__name__}: {error}"]
    found: list[str] = []
    by_verl = PLUGIN in sys.modules
    _row("plugin", "loaded by verl" if by_verl else "NOT loaded by verl")
    try:
        plugin: Any = _quietly(lambda: import_module(PLUGIN))
    except Exception as error:
        return [f"the plugin fails: {type(error).__name__}: {error}"]
    if not by_verl:
        found.append(_why_not_loaded())
    from tokencredit.engines.verl.taps import attached

    _row("estimators", f"{len(plugin.ESTIMATORS)}: {' '.join(plugin.ESTIMATORS)}")
    _row("policy losses", f"{len(plugin.LOSSES)}: {' '.join(plugin.LOSSES)}")
    for trainer, there in attached().items():
        _row(f"tap, {trainer} trainer", "attached" if there else "NOT attached")
        if not there:
            why = plugin.TAPS.get(trainer) or "verl's functions were replaced after verl loaded it"
            found.append(f"no entropies from the {trainer} trainer: {why}")
    return found


def _quietly(call: Callable[[], Any]) -> Any:
    """Without verl's warnings about accelerators and engines that are not there."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        return call()


def _why_not_loaded() -> str:
    policy = os.environ.get(POLICY_VARIABLE, "auto").strip().lower()
    names = {name.strip() for name in policy.split(",")}
    if policy != "auto" and "tokencredit" not in names:
        return f"{POLICY_VARIABLE}={policy} keeps verl from loading tokencredit; unset it"
    if not any(one.value == PLUGIN for one in entry_points(group="verl.plugins")):
        return (
            "tokencredit has no entry point here, so verl does not know of it: install it "
            "(pip install ...) rather than putting it on PYTHONPATH, or set "
            f"VERL_USE_EXTERNAL_MODULES={PLUGIN}"
        )
    return f"verl did not load its plugins: set VERL_USE_EXTERNAL_MODULES={PLUGIN}"


# -- a configuration ---------------------------------------------------------------------------


def _configuration(words: Sequence[str]) -> list[str]:
    """Print what a configuration asks for; what stands in its way, a line each."""
    from omegaconf.errors import OmegaConfBaseException

    config = _compose(words)
    print("\nconfiguration")
    try:
        return _judge(config)
    except OmegaConfBaseException as error:  # such as an interpolation that leads nowhere
        raise InputError(f"check: {str(error).splitlines()[0]}") from error


def _judge(config: Any) -> list[str]:
    name = str(lookup(config, ESTIMATOR, "none"))
    _row("estimator", name)
    _row("policy loss", str(lookup(config, LOSS_MODE, "vanilla")))
    _row("trainer", "V1" if lookup(config, "trainer.use_v1", True) else "legacy")
    try:
        setting = setting_of(lookup(config, "algorithm"), register_estimators())
    except InputError as error:
        found = misspelt(config, register_estimators())
        plain = read_section(None, name, register_estimators()[name])
        return [str(error), *found, *obstacles(config, plain), *_unknown_loss(config)]
    if setting is None:
        found = misspelt(config, register_estimators())
        return found if any(ESTIMATOR in line for line in found) else [*found, wrong_name(name)]
    options = setting.rule.options()
    _row("rule", f"{setting.rule.name}: {', '.join(f'{k}={v}' for k, v in options.items())}")
    if setting.rule.reads_success:
        field = setting.success_from
        _row("success", f"the reward's field {field}" if field else "the score is above 0.5")
    _row("entropies", "needed" if setting.needs_entropy else "not needed")
    _show_overrides(setting, config)
    for line in notes(config, setting):
        print(f"  note: {line}")
    found = misspelt(config, register_estimators())
    return found + obstacles(config, setting) + _unknown_loss(config)


def _unknown_loss(config: Any) -> list[str]:
    """A policy loss that nobody registered; the trainers find it in their first step."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    mode = str(lookup(config, LOSS_MODE, "vanilla"))
    if mode in POLICY_LOSS_REGISTRY or mode.startswith(PREFIX):
        return []
    return [f"{LOSS_MODE}={mode}: verl has no such loss{nearest(mode, POLICY_LOSS_REGISTRY)}"]


def _show_overrides(setting: Any, config: Any) -> None:
    print("  needs:")
    for line in needed_overrides(setting):
        print(f"    {line}")
    print("  its paper trains with, besides (0.2 by convention where it names no clip):")
    for line in recommended_overrides(setting):
        key, _, value = line.strip("'").partition("=")
        yours = lookup(config, key)
        same = str(yours).lower() == value.lower() or _number(yours) == _number(value) is not None
        print(f"    {line}" + ("" if same else f"   (yours: {yours})"))


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _show_methods() -> None:
    print("\nwhat each method needs (options: +" + SECTION + ".OPTION=VALUE)")
    for method in usable_methods():
        setting = read_section(None, PREFIX + method, method)
        print(f"  {method:<9}{' '.join(needed_overrides(setting))}")
    print("\n  with a command's overrides, `check` says more: check algorithm.adv_estimator=...")


def _compose(words: Sequence[str]) -> Any:
    """The defaults of verl, then a YAML file if there is one, then overrides."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    files = [word for word in words if "=" not in word and not word.startswith("~")]
    overrides = [word for word in words if word not in files]
    if len(files) > 1:
        raise InputError(f"check: one configuration at a time, got {', '.join(files)}")
    file = _read_yaml(files[0]) if files else None
    # Without a file Hydra does it all. With one, overrides must come after it.
    early = [word for word in overrides if file is None or _chooses(word)]
    try:
        GlobalHydra.instance().clear()
        with initialize_config_module("verl.trainer.config", version_base=None):
            config: Any = compose("ppo_trainer", overrides=early)
        if file is not None:
            OmegaConf.set_struct(config, False)
            _tell_unknown(files[0], file, config)
            config = OmegaConf.merge(config, file)
            _override(config, [word for word in overrides if not _chooses(word)])
    except InputError:
        raise
    except Exception as error:  # of Hydra and OmegaConf: many kinds, all about the user's words
        raise InputError(f"check: {' '.join(str(error).splitlines()[:2])}") from error
    return config


def _tell_unknown(name: str, file: Any, defaults: Any, above: str = "") -> None:
    """Say which of a file's keys verl's defaults do not have: they may be misspelt."""
    for key in file:
        path = f"{above}{key}"
        if path == SECTION or not defaults:  # ours; or a mapping that holds what anybody puts there
            continue
        if key not in defaults:
            hint = nearest(str(key), map(str, defaults))
            print(f"note: {name}: {path} is not among verl's defaults{hint}")
        elif hasattr(file[key], "keys") and hasattr(defaults[key], "keys"):
            _tell_unknown(name, file[key], defaults[key], f"{path}.")


def _chooses(override: str) -> bool:
    """Whether an override picks a file of verl's, such as ``model_engine=megatron``."""
    key = override.partition("=")[0].lstrip("+~")
    return "@" in key or "/" in key or key == "model_engine"


def _override(config: Any, overrides: Sequence[str]) -> None:
    """Hydra's overrides, in place: a key without ``+`` must be there already."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    nowhere = object()
    for one in OverridesParser.create().parse_overrides(list(overrides)):
        key = one.key_or_group
        there = OmegaConf.select(config, key, default=nowhere) is not nowhere
        if not there and not one.is_add() and not one.is_force_add():
            raise InputError(f"check: there is no {key}; to add it: +{key}=...")
        if there and one.is_add():
            raise InputError(f"check: {key} is there already; to change it: {key}=...")
        if one.is_sweep_override():
            raise InputError(f"check: {key}: one value at a time, not a sweep")
        OmegaConf.update(config, key, None if one.is_delete() else one.value())


def _read_yaml(name: str) -> Any:
    from omegaconf import OmegaConf

    path = Path(name)
    if not path.is_file():
        raise InputError(f"check: no file {name}; an override is written key=value")
    try:
        config: Any = OmegaConf.load(path)
    except Exception as error:  # of the YAML parser
        raise InputError(f"check: {name} is no YAML: {str(error).splitlines()[0]}") from error
    if not hasattr(config, "items"):
        raise InputError(f"check: {name} must hold keys and values")
    for key in ("defaults", "hydra"):
        config.pop(key, None)
    return config
