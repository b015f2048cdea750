"""``tokencredit train``: one run, from parsed arguments to a report."""

from __future__ import annotations

import dataclasses
import errno
import importlib
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

import datasets
import torch
import transformers

from tokencredit.engines.trl.arguments import (
    SECRETS,
    TrainArguments,
    config_path,
    lab_name,
    parse_train_arguments,
    plain,
    read_yaml,
)
from tokencredit.engines.trl.embedded import STRENGTHS
from tokencredit.engines.trl.guards import apply_requirements, recommended_config
from tokencredit.engines.trl.jobs import Job, configured_job
from tokencredit.engines.trl.run_folder import RunFolder, next_folder, numbered_folders
from tokencredit.engines.trl.work import FROM_REWARDS, needs_work
from tokencredit.errors import InputError, MissingExtraError, TokenCreditError
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
    "record_every",
    "env",
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
    except (InputError, MissingExtraError):
        if main:
            folder.discard()
        raise
    except KeyboardInterrupt:
        # Of several processes, those that a launcher stops because one of them failed.
        if not folder.config.exists() or int(os.environ.get("WORLD_SIZE", "1")) > 1:
            if main:
                folder.discard()
            if not folder.config.exists():
                raise
        hint = f"--resume --output_dir {folder.path}"
        raise KeyboardInterrupt(f"interrupted; go on with {hint}") from None
    except BrokenPipeError:
        raise  # whoever read our output left
    except Exception as error:
        if _disk_is_full(error, folder.path):
            if main:
                folder.remove_broken_checkpoints()
                folder.discard()
            raise InputError(
                f"{folder.path}: the disk is full; free some space and "
                + (
                    f"go on with --resume --output_dir {folder.path}"
                    if folder.holds_a_run()
                    else "run it again"
                )
            ) from error
        if _another_rank_failed(error):
            if main:
                folder.discard()
            raise InputError(
                "stopped, as another process of this run ended; what it said tells why"
            ) from error
        if str(error).startswith("Unknown loss type"):  # TRL looks at it in its first step only
            if main:
                folder.discard()
            raise InputError(f"train: {error}; see `loss_type` in --help") from error
        log = folder.error if main else folder.path / f"error-rank{_rank()}.log"
        try:
            log.write_text(traceback.format_exc(), encoding="utf-8")
            where = f"traceback in {log}"
        except OSError:
            traceback.print_exc()
            where = f"its traceback could not be written to {log}"
        raise RunFaultError(
            f"{type(error).__name__}: {' '.join(str(error).split())} ({where})"
        ) from error
    finally:
        folder.release()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return folder


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _is_main() -> bool:
    return _rank() == 0


def _another_rank_failed(error: Exception) -> bool:
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or not isinstance(error, RuntimeError):
        return False
    gone = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return any(words in str(error) for words in gone)


def _disk_is_full(error: BaseException, folder: Path) -> bool:
    """Whether that is what an error comes from: libraries wrap the system's own in theirs."""
    link: BaseException | None = error
    while link is not None:
        text = str(link)
        if isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left" in text or "quota exceeded" in text:
            return True
        # torch.save says only that a write fell short.
        if "PytorchStreamWriter" in text or "unexpected pos" in text:
            return folder.is_dir() and shutil.disk_usage(folder).free < ALMOST_FULL
        link = link.__cause__ or link.__context__
    return False


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

        importlib.import_module("tokencredit.lab.credits")  # registers them

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
        elif "output_dir" in arguments.explicit:
            folder.open_new()
        else:
            folder.open_next()
            arguments.training.output_dir = str(folder.path)
        folder.claim()
    return arguments, folder


def _resumed_config(argv: list[str]) -> list[str]:
    """``--resume --output_dir X`` alone goes on with X's own configuration."""
    if "--resume" not in argv or config_path(argv) is not None or _lab_of(argv) is not None:
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
        return lab_name(after[0] if after and not after[0].startswith("-") else True)
    flag = _flag(argv, "--lab")
    if flag is not None:
        return flag
    path = config_path(argv)
    return None if path is None else lab_name(read_yaml(path).get("lab"))


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
    runs = numbered_folders("runs", stem)
    if not runs:
        raise InputError(f"--resume: no run runs/{stem}-* here; name it by --output_dir")
    return RunFolder(runs[max(runs)])


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
    if arguments.reward_model is not None:
        fields["reward_model"] = arguments.reward_model
    if arguments.path_points != 1:
        fields["path_points"] = arguments.path_points
    if arguments.dynamic_sampling:
        fields["dynamic_sampling"] = arguments.dynamic_sampling
    fields["record_every"] = arguments.record_every
    fields.update({k: v for k, v in arguments.defaults.items() if k not in HERE_ONLY})
    left_out = {"output_dir", "resume_from_checkpoint", *SECRETS}
    fields.update({k: v for k, v in arguments.explicit.items() if k not in left_out})
    fields.update(applied)
    fields.setdefault("seed", arguments.training.seed)
    if arguments.environment:
        fields["env"] = arguments.environment
    return fields


def _check_same_run(arguments: TrainArguments, folder: RunFolder, applied: dict[str, Any]) -> None:
    saved, now = read_yaml(folder.config), _config_of(arguments, applied)
    usual: dict[str, Any] = dict.fromkeys(("lab", "success_from", "credit", "eval_prompts"))
    if arguments.lab is not None and needs_work(arguments.rule):
        usual["reward_model"] = STRENGTHS[0]
    for group in (arguments.script, arguments.training, arguments.model, arguments.dataset):
        usual |= {f.name: plain(f.default) for f in dataclasses.fields(group)}
    for key in sorted((set(saved) | set(now)) - MAY_CHANGE):
        was = saved[key] if key in saved else usual.get(key)
        value = now[key] if key in now else usual.get(key)
        if was != value and key not in HERE_ONLY - {"credit"}:
            raise InputError(
                f"--resume: {key} was {was!r} in {folder.config} and is {value!r} now; "
                "leave it as it was, or start another run"
            )


def _settle_reward_model(arguments: TrainArguments) -> None:
    """Which reward model is differentiated, where the lab has a default or the rule needs none."""
    if needs_work(arguments.rule):
        if arguments.lab is not None and arguments.reward_model is None:
            arguments.reward_model = STRENGTHS[0]
    elif arguments.reward_model is not None:
        what = "plain GRPO" if arguments.rule is None else arguments.rule.name
        _say(
            f"  reward_model {arguments.reward_model} is not used: {what} needs no signal of a "
            "reward model"
        )
        arguments.reward_model = None


def _reward_model_name(arguments: TrainArguments, job: Job) -> str | None:
    """What is differentiated, in a word for the report and the records."""
    if job.reward_model is None:
        return None
    among = arguments.script.reward_model_name_or_path
    named = arguments.reward_model or FROM_REWARDS
    return str(among) if named == FROM_REWARDS and among else named


def _apply_recipe(arguments: TrainArguments) -> dict[str, Any]:
    """What the rule requires, and what its paper recommends where the user said nothing."""
    rule, training = arguments.rule, arguments.training
    if rule is None:
        return {}
    applied: dict[str, Any] = {}
    for name, value in recommended_config(rule).items():
        if name not in arguments.explicit:
            setattr(training, name, value)
            applied[name] = value
    if applied:
        listed = ", ".join(f"{name}={value}" for name, value in applied.items())
        source = f" by {rule.paper}" if rule.paper else ""
        _say(f"  recommended{source}, as you set nothing else: {listed}")
    for line in apply_requirements(training, rule, explicit=arguments.explicit):
        _say(f"  {line}")
    return applied


# -- the run --------------------------------------------------------------------------------


def _run(arguments: TrainArguments, folder: RunFolder) -> None:
    from tokencredit.engines.trl.recording import RolloutRecorder
    from tokencredit.engines.trl.report import write_report
    from tokencredit.engines.trl.trainer import CreditGRPOTrainer
    from tokencredit.engines.trl.watching import (
        AlreadyDoneError,
        MetricsFile,
        NothingLeft,
        Progress,
    )

    rule, training, main = arguments.rule, arguments.training, _is_main()
    what = arguments.lab or arguments.model.model_name_or_path
    _say(f"tokencredit train: {what}, credit {rule.name if rule else 'none (plain GRPO)'}")
    _say(f"  run folder {folder.path}")
    applied = _apply_recipe(arguments)
    _settle_reward_model(arguments)
    if arguments.resume and main and folder.config.exists():
        _check_same_run(arguments, folder, applied)
    job = _job(arguments)
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
            reward_model=job.reward_model,
            reward_tokenizer=job.reward_tokenizer,
            path_points=arguments.path_points,
            dynamic_sampling=arguments.dynamic_sampling,
        )
    except TokenCreditError:
        raise
    except (ValueError, OSError, ImportError, NotImplementedError) as error:
        if _disk_is_full(error, folder.path):
            raise
        raise InputError(f"train: {' '.join(str(error).split())}") from error
    checkpoint = _going_on_from(arguments, folder)
    if main:
        folder.save_config(_config_of(arguments, applied))
    _own_output(trainer)
    trainer.add_callback(Progress())
    trainer.add_callback(MetricsFile(folder.metrics))
    judge = _reward_model_name(arguments, job)
    if arguments.record_every and rule is not None:
        meta: dict[str, Any] = {"model": str(what), "temperature": training.temperature}
        vocabulary = getattr(trainer.model.config, "vocab_size", None)
        if vocabulary is not None:
            meta["vocab_size"] = vocabulary
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        named = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        meta["tokenizer"] = f"{named} ({len(tokenizer)} tokens)"
        if judge is not None:
            meta["reward_model"] = judge
        trainer.on_credit.append(
            RolloutRecorder(folder.rollouts, tokenizer, every=arguments.record_every, meta=meta)
        )
    _measure(trainer, job, folder, arguments, "before")
    if checkpoint is not None:
        _say(f"  going on from {Path(checkpoint).name}")
    start = time.monotonic()
    trainer.add_callback(NothingLeft())
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except AlreadyDoneError:
        _say(f"  all {trainer.state.max_steps} steps are done")
    seconds = time.monotonic() - start
    trainer.save_model(str(folder.path))
    if main and arguments.lab is not None:
        # TRL's model card knows nothing of a policy without a name; report.md says what it is.
        (folder.path / "README.md").unlink(missing_ok=True)
    _measure(trainer, job, folder, arguments, "after")
    if main:
        facts = {
            "task and model": what,
            "credit": "none (plain GRPO)" if rule is None else _in_words(rule),
            **({} if judge is None else {"reward model": judge}),
            "steps": trainer.state.global_step,
            "training time": f"{seconds:.0f} s"
            + ("" if checkpoint is None else f" since {Path(checkpoint).name}"),
        }
        path = write_report(folder, title=f"tokencredit run {folder.path.name}", facts=facts)
        _summary(folder, path, seconds)
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=arguments.script.dataset_name)
    # The main process has measured and reported alone: nobody leaves before it.
    wait_for_all()
    trainer.accelerator.end_training()
    if main:
        folder.error.unlink(missing_ok=True)


_last_work: list[Any] = []


def wait_for_all() -> None:
    """A barrier before the process group is given up, without the deadlock of a plain one.

    Gloo's thread needs the GIL to free the work it did last. If the process group's last owner,
    DDP's reducer, is freed in that moment, its destructor waits for that thread and holds the
    GIL: neither goes on. Where we own that work as well, the thread has nothing to free.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        work: Any = torch.distributed.barrier(async_op=True)
        work.wait()
        _last_work[:] = [work]


def _going_on_from(arguments: TrainArguments, folder: RunFolder) -> str | None:
    if not arguments.resume:
        return arguments.training.resume_from_checkpoint
    if _is_main():
        last = folder.rewind()
    else:
        complete = folder.checkpoints()
        last = complete[-1][1] if complete else None
    return None if last is None else str(last)


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
    return lab_job(
        setting,
        arguments.training,
        arguments.rule,
        reward_model=arguments.reward_model,
        on_progress=on_progress,
    )


class _Printed(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(f"  {record.getMessage()}", flush=True)


def _quiet() -> None:
    """Our own lines say what matters; libraries keep their warnings, but for deprecations."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers|trl")
    transformers.utils.logging.disable_progress_bar()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("tokencredit").setLevel(logging.INFO if _is_main() else logging.WARNING)
    if not logging.getLogger("tokencredit").handlers:
        logging.getLogger("tokencredit").addHandler(_Printed())
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
