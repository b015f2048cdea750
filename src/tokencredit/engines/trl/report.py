"""The report that a run leaves: what was trained, how it went, where everything is."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tokencredit.engines.trl.run_folder import RunFolder
from tokencredit.files import write_aside

__all__ = ["write_report"]

CREDIT_METRICS = (
    "credit/sign_flips",
    "credit/effective_share",
    "credit/largest_share",
    "credit/groups_skipped",
    "credit/unknown_tokens",
    "credit/coverage",
    "credit/misaligned_share",
    "credit/predicted_gain",
    "credit/at_bounds",
)


FILES = (
    (
        "config.yaml",
        "`config.yaml` reproduces the run: give its path to `tokencredit train --config`",
    ),
    ("metrics.jsonl", "`metrics.jsonl`: everything that was logged, one line a log"),
    ("rollouts.jsonl", "`rollouts.jsonl`: recorded responses with their credit"),
    ("model*.safetensors", "`model.safetensors` and the tokenizer: the trained policy"),
    ("adapter_model.safetensors", "`adapter_model.safetensors`: the trained adapter (LoRA)"),
    ("checkpoint-*", "`checkpoint-*`: for --resume"),
)


def write_report(folder: RunFolder, *, title: str, facts: Mapping[str, Any]) -> Path:
    """Write ``report.md`` and the learning curve as SVG and PNG beside it.

    Args:
        folder: a run whose ``metrics.jsonl`` (and, for the lab, ``evaluation.json``) are written.
        title: first line of the report.
        facts: shown as a list under it.

    Returns:
        The report's path.
    """
    history = read_metrics(folder.metrics)
    evaluation = folder.saved_evaluation()
    pictured = draw_curve(history, evaluation, folder.path)
    lines = [f"# {title}", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    if "before" in evaluation and "after" in evaluation:
        lines += ["", "## Accuracy on held-out prompts", ""]
        lines += ["| | accuracy | 95 % interval | prompts |", "|---|---|---|---|"]
        for moment in ("before", "after"):
            e = evaluation[moment]
            lines.append(
                f"| {moment} | {e['accuracy']:.3f} | {e['low']:.3f} .. {e['high']:.3f} "
                f"| {e['prompts']} |"
            )
    if pictured:
        lines += ["", "## Learning curve", "", "![reward and entropy by step](learning_curve.svg)"]
    rows = [
        (name, first, last)
        for name in CREDIT_METRICS
        if (pair := _ends(history, name)) is not None
        for first, last in [pair]
    ]
    if rows:
        lines += ["", "## Credit", "", "| | first steps | last steps |", "|---|---|---|"]
        lines += [f"| {name} | {first:.4g} | {last:.4g} |" for name, first, last in rows]
    lines += ["", "## Files", ""]
    lines += [f"- {line}" for pattern, line in FILES if any(folder.path.glob(pattern))]
    lines += ["", "## Versions", "", ", ".join(f"{k} {v}" for k, v in versions().items()), ""]
    write_aside(folder.report, "\n".join(lines))
    return folder.report


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` that carry a reward."""
    if not path.exists():
        return []
    entries = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [entry for entry in entries if entry.get("reward") is not None]


def draw_curve(history: list[dict[str, Any]], evaluation: Mapping[str, Any], folder: Path) -> bool:
    """``learning_curve.svg`` and ``.png``: mean reward and policy entropy by step."""
    if not history:
        return False
    from matplotlib.figure import Figure

    steps = [entry["step"] for entry in history]
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    reward = [entry["reward"] for entry in history]
    left.plot(steps, reward, color="#88a9c3", linewidth=1, label="mean reward of a step")
    left.plot(steps, _running_mean(reward), color="#1f4e79", linewidth=2, label="running mean")
    for moment, x in (("before", 0), ("after", steps[-1])):
        if moment in evaluation:
            e = evaluation[moment]
            error = [[e["accuracy"] - e["low"]], [e["high"] - e["accuracy"]]]
            label = "held-out accuracy, 95 %" if moment == "before" else None
            left.errorbar([x], [e["accuracy"]], yerr=error, fmt="o", color="#b3541e", label=label)
    left.set(xlabel="step", ylabel="reward", title="Reward")
    left.legend(frameon=False, fontsize=8, loc="lower right")
    entropy = [entry.get("entropy") for entry in history]
    pairs = [(s, h) for s, h in zip(steps, entropy, strict=True) if h is not None]
    right.plot([s for s, _ in pairs], [h for _, h in pairs], color="#1f4e79")
    right.set(xlabel="step", ylabel="nats per token", title="Policy entropy")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    for ending in ("svg", "png"):
        temporary = folder / f".learning_curve.tmp.{ending}"
        figure.savefig(temporary, dpi=150)
        temporary.replace(folder / f"learning_curve.{ending}")
    return True


def versions() -> dict[str, str]:
    """What the run was run with."""
    found = {"python": platform.python_version()}
    for package in (
        "tokencredit",
        "torch",
        "trl",
        "transformers",
        "accelerate",
        "datasets",
        "peft",
    ):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _running_mean(values: list[float], width: int = 10) -> list[float]:
    out: list[float] = []
    for i in range(len(values)):
        window = values[max(0, i + 1 - width) : i + 1]
        out.append(sum(window) / len(window))
    return out


def _ends(history: list[dict[str, Any]], name: str) -> tuple[float, float] | None:
    values = [entry[name] for entry in history if entry.get(name) is not None]
    if not values:
        return None
    k = max(1, len(values) // 10)
    return sum(values[:k]) / k, sum(values[-k:]) / k
