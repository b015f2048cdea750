"""``tokencredit train``: one run, from parsed arguments to a report."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tokencredit.engines.trl.arguments import (
    TrainArguments,
    parse_train_arguments,
    read_yaml,
)
from tokencredit.engines.trl.guards import apply_requirements, recommended_config
from tokencredit.engines.trl.jobs import Job, configured_job
from tokencredit.engines.trl.run_folder import RunFolder, next_folder
from tokencredit.errors import InputError, TokenCreditError
from tokencredit.methods.rule import Rule

__all__ = ["RunFaultError", "train"]

MAY_CHANGE = {
    "max_steps",
    "num_train_epochs",
    "save_steps",
    "save_total_limit",
    "logging_steps",
    "report_to",
    "output_dir",
}
"""What a resumed run may set otherwise than the run it goes on with."""
HERE_ONLY = {"credit", "use_cpu", "dataloader_pin_memory", "bf16", "gradient_checkpointing"}
"""Defaults of the lab that depend on the machine (and the rule, which is written in full)."""
ALMOST_FULL = 4 * 2**20


class RunFaultError(TokenCreditError):
    """A run failed by a fault that is not the user's; its traceback is in the run folder."""


def train(argv: Sequence[str]) -> RunFolder:
    """Run ``tokencredit train`` with these arguments; the folder of the finished run.

    Raises:
        InputError: the user's input cannot be used.
        RunFaultError: anything else that failed.
    """
    arguments, folder = _prepare(list(argv))
    main = _is_main()
    try:
        _run(arguments, folder)
    except (InputError, KeyboardInterrupt):
        raise
    except Exception as error:
        if folder.path.is_dir() and shutil.disk_usage(folder.path).free < ALMOST_FULL:
            raise InputError(
                f"{folder.path}: the disk is full; free some space and go on with "
                f"--resume --output_dir {folder.path}"
            ) from error
        if main:
            try:
                folder.error.write_text(traceback.format_exc(), encoding="utf-8")
            except OSError:
                traceback.print_exc()
        raise RunFaultError(
            f"{type(error).__name__}: {' '.join(str(error).split())} (traceback in {folder.error})"
        ) from error
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return folder


def _is_main() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def _say(text: str) -> None:
    if _is_main():
        print(text, flush=True)


# -- before the run -------------------------------------------------------------------------


def _prepare(argv: list[str]) -> tuple[TrainArguments, RunFolder]:
    argv = _resumed_config(argv)
    name = _lab_of(argv)
    defaults: dict[str, Any] = {}
    if name is not None:
        from tokencredit import lab
        from tokencredit.engines.trl.embedded import lab_defaults
        from tokencredit.lab import credits as _credits  # noqa: F401 - registers them

        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        defaults = lab_defaults(lab.setting(name))
    _quiet()
    arguments = parse_train_arguments(argv, defaults=defaults)
    folder = _folder_of(arguments)
    arguments.training.output_dir = str(folder.path)
    if _is_main():
        if arguments.resume:
            if not folder.holds_a_run():
                raise InputError(f"--resume: output_dir {folder.path} holds no run")
            _check_same_run(arguments, folder)
        else:
            folder.open_new()
    return arguments, folder


def _resumed_config(argv: list[str]) -> list[str]:
    """``--resume --output_dir X`` alone goes on with X's own configuration."""
    if "--resume" not in argv or "--config" in argv or "--lab" in argv:
        return argv
    folder = _flag(argv, "--output_dir")
    if folder is None:
        raise InputError("--resume: name the run by --output_dir (or repeat its --config or --lab)")
    config = RunFolder(folder).config
    if not config.exists():
        raise InputError(f"--resume: output_dir {folder} holds no run (no config.yaml)")
    return ["--config", str(config), *argv]


def _flag(argv: list[str], name: str) -> str | None:
    for i, arg in enumerate(argv):
        if arg == name and i + 1 < len(argv):
            return argv[i + 1]
        if arg.startswith(name + "="):
            return arg.split("=", 1)[1]
    return None


def _lab_of(argv: list[str]) -> str | None:
    """The lab's setting, by flag or YAML: its defaults must be known before the parsing."""
    if "--lab" in argv:
        after = argv[argv.index("--lab") + 1 :]
        return after[0] if after and not after[0].startswith("-") else "chain-qwen3"
    flag = _flag(argv, "--lab")
    if flag is not None:
        return flag
    path = _flag(argv, "--config")
    value = read_yaml(path).get("lab") if path is not None else None
    return None if value is None else ("chain-qwen3" if value is True else str(value))


def _folder_of(arguments: TrainArguments) -> RunFolder:
    if "output_dir" in arguments.explicit:
        return RunFolder(arguments.training.output_dir)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("train: several processes need one folder: set --output_dir")
    model = arguments.model.model_name_or_path
    what = arguments.lab or (Path(model).name if model else "run")
    stem = f"{what}-{arguments.rule.name if arguments.rule else 'plain'}"
    if not arguments.resume:
        return RunFolder(next_folder("runs", stem))
    runs = sorted(Path("runs").glob(f"{stem}-*"))
    if not runs:
        raise InputError(f"--resume: no run runs/{stem}-* here; name it by --output_dir")
    return RunFolder(runs[-1])


def _config_of(arguments: TrainArguments, applied: dict[str, Any]) -> dict[str, Any]:
    """The YAML that reproduces the run."""
    fields: dict[str, Any] = {}
    if arguments.lab is not None:
        fields["lab"] = arguments.lab
        fields["eval_prompts"] = arguments.eval_prompts
    rule = arguments.rule
    if rule is not None:
        options = {k: list(v) if isinstance(v, tuple) else v for k, v in rule.options().items()}
        fields["credit"] = {"name": rule.name, **options}
    if arguments.success_from is not None:
        fields["success_from"] = arguments.success_from
    fields["entropy_source"] = arguments.entropy_source
    fields["record_every"] = arguments.record_every
    fields.update({k: v for k, v in arguments.defaults.items() if k not in HERE_ONLY})
    fields.update({k: v for k, v in arguments.explicit.items() if k != "output_dir"})
    fields.update(applied)
    fields.setdefault("seed", arguments.training.seed)
    return fields


def _check_same_run(arguments: TrainArguments, folder: RunFolder) -> None:
    if not folder.config.exists():
        return
    saved, now = read_yaml(folder.config), _config_of(arguments, {})
    for key in sorted(set(saved) & set(now) - MAY_CHANGE):
        if saved[key] != now[key]:
            raise InputError(
                f"--resume: {key} was {saved[key]!r} in {folder.config} and is {now[key]!r} now; "
                "leave it as it was, or start another run"
            )


def _apply_recipe(arguments: TrainArguments) -> dict[str, Any]:
    """What the rule requires, and what its paper recommends where the user said nothing."""
    rule, training = arguments.rule, arguments.training
    if rule is None:
        return {}
    applied: dict[str, Any] = {}
    for name, value in recommended_config(rule).items():
        if name in arguments.explicit or getattr(training, name) == value:
            continue
        setattr(training, name, value)
        applied[name] = value
        _say(f"  {name}={value} (recommended by {rule.paper}; set it yourself to change it)")
    for line in apply_requirements(training, rule, explicit=arguments.explicit):
        _say(f"  {line}")
    return applied


# -- the run --------------------------------------------------------------------------------


def _run(arguments: TrainArguments, folder: RunFolder) -> None:
    from tokencredit.engines.trl.recording import RolloutRecorder
    from tokencredit.engines.trl.report import write_report
    from tokencredit.engines.trl.trainer import CreditGRPOTrainer
    from tokencredit.engines.trl.watching import MetricsFile, Progress

    rule, training, main = arguments.rule, arguments.training, _is_main()
    what = arguments.lab or arguments.model.model_name_or_path
    _say(f"tokencredit train: {what}, credit {rule.name if rule else 'none (plain GRPO)'}")
    _say(f"  run folder {folder.path}")
    applied = _apply_recipe(arguments)
    job = _job(arguments)
    checkpoint = folder.rewind() if arguments.resume and main else None
    if arguments.resume and not main:
        complete = folder.checkpoints()
        checkpoint = complete[-1][1] if complete else None
    if main and not (arguments.resume and folder.config.exists()):
        folder.save_config(_config_of(arguments, applied))
    training.disable_tqdm = True
    try:
        trainer = CreditGRPOTrainer(
            model=job.model,
            reward_funcs=job.rewards,
            args=training,
            train_dataset=job.train,
            eval_dataset=job.evaluation,
            processing_class=job.tokenizer,
            peft_config=job.peft,
            quantization_config=job.quantization,
            credit=rule,
            success_from=arguments.success_from,
            entropy_source=arguments.entropy_source,
            signals=job.signals,
        )
    except (ValueError, OSError, ImportError, NotImplementedError) as error:
        if isinstance(error, TokenCreditError):
            raise
        raise InputError(f"train: {' '.join(str(error).split())}") from error
    _own_output(trainer)
    trainer.add_callback(Progress())
    trainer.add_callback(MetricsFile(folder.metrics))
    if arguments.record_every and rule is not None:
        meta = {"model": str(what), "temperature": training.temperature}
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        trainer.on_credit.append(
            RolloutRecorder(folder.rollouts, tokenizer, every=arguments.record_every, meta=meta)
        )
    _measure(trainer, job, folder, arguments, "before")
    if checkpoint is not None:
        _say(f"  going on from {checkpoint.name}")
    start = time.monotonic()
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    seconds = time.monotonic() - start
    trainer.save_model(str(folder.path))
    _measure(trainer, job, folder, arguments, "after")
    if main:
        facts = {
            "task and model": what,
            "credit": "none (plain GRPO)" if rule is None else _in_words(rule),
            "steps": trainer.state.global_step,
            "training time": f"{seconds:.0f} s"
            + ("" if checkpoint is None else f" since {checkpoint.name}"),
        }
        path = write_report(folder, title=f"tokencredit run {folder.path.name}", facts=facts)
        _summary(folder, path, seconds)
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=arguments.script.dataset_name)
    trainer.accelerator.end_training()


def _job(arguments: TrainArguments) -> Job:
    if arguments.lab is None:
        return configured_job(arguments)
    from tokencredit import lab
    from tokencredit.engines.trl.embedded import lab_job

    def on_progress(step: int, loss: float, accuracy: float | None) -> None:
        if accuracy is not None or step % 100 == 0:
            reached = "" if accuracy is None else f"  sampled accuracy {accuracy:.3f}"
            _say(f"  building the policy: step {step}  loss {loss:.3f}{reached}")

    setting = lab.setting(arguments.lab)
    return lab_job(setting, arguments.training, arguments.rule, on_progress=on_progress)


def _quiet() -> None:
    """Our own lines say what matters; libraries keep their warnings, but for deprecations."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers|trl")
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("tokencredit").setLevel(logging.INFO if _is_main() else logging.WARNING)
    if not logging.getLogger("tokencredit").handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("  %(message)s"))
        logging.getLogger("tokencredit").addHandler(handler)
        logging.getLogger("tokencredit").propagate = False


def _own_output(trainer: Any) -> None:
    from transformers import PrinterCallback, ProgressCallback

    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)


def _measure(
    trainer: Any, job: Job, folder: RunFolder, arguments: TrainArguments, moment: str
) -> None:
    """Accuracy on held-out prompts, by the main process; kept so that a resumed run has both."""
    if job.accuracy is None or not _is_main():
        return
    known = folder.saved_evaluation()
    if moment == "before" and moment in known:
        return
    result = job.accuracy(trainer.accelerator.unwrap_model(trainer.model), arguments.eval_prompts)
    low, high = result.interval
    known[moment] = {
        "accuracy": result.accuracy,
        "low": low,
        "high": high,
        "prompts": result.total,
    }
    folder.save_evaluation(known)
    _say(
        f"  held-out accuracy {moment} {result.accuracy:.3f} "
        f"(95 % {low:.3f} .. {high:.3f}, {result.total} prompts)"
    )


def _in_words(rule: Rule) -> str:
    options = ", ".join(f"{name}={value}" for name, value in rule.options().items())
    return f"{rule.name} ({options})" if options else rule.name


def _summary(folder: RunFolder, report: Path, seconds: float) -> None:
    evaluation = folder.saved_evaluation()
    if "before" in evaluation and "after" in evaluation:
        before, after = evaluation["before"], evaluation["after"]
        _say(
            f"  accuracy {before['accuracy']:.3f} [{before['low']:.3f}, {before['high']:.3f}]"
            f" -> {after['accuracy']:.3f} [{after['low']:.3f}, {after['high']:.3f}]"
        )
    _say(f"  trained in {seconds:.0f} s; report {report}")
