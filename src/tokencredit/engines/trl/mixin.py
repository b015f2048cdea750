"""The mixin that gives TRL's GRPOTrainer token-level credit.

Only overrides that call ``super()``: no TRL method body is copied. Credit is formed in
`_generate_and_score_completions`, on the whole generation batch of all ranks, before TRL
shuffles and splits it; the loss then reads ``[b, t]`` advantages, a path that TRL keeps for
subclasses and that the first step checks.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from tokencredit.credit import Credit, assign
from tokencredit.engines.trl.dynamic_sampling import DynamicSampling, Sampled
from tokencredit.engines.trl.epochs import OrderOfEpochs
from tokencredit.engines.trl.event import CreditEvent
from tokencredit.engines.trl.guards import apply_requirements, check_trainer, check_versions
from tokencredit.engines.trl.work import (
    MARKS,
    WORK_SIGNALS,
    TokenMarks,
    WorkSignals,
    needs_work,
)
from tokencredit.errors import InputError, MissingSignalError, nearest
from tokencredit.methods.registry import resolve
from tokencredit.methods.rule import Rule
from tokencredit.rollouts import TRUE_ABOVE, Rollouts

if TYPE_CHECKING:
    from trl import GRPOTrainer as _Base
else:
    _Base = object

__all__ = ["TokenCreditMixin"]

logger = logging.getLogger("tokencredit")

EntropySource = Literal["auto", "old_logprobs", "forward"]
POLICY_SIGNALS = ("entropy", "logprob")
"""Token signals that the trainer fills in itself, from one pass of the policy."""

FORWARD_KEYS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)
"""What a multimodal policy's forward pass needs besides tokens, under TRL's own names."""


class TokenCreditMixin(_Base):
    """Token-level credit for TRL's GRPOTrainer or a subclass of it.

        class MyTrainer(TokenCreditMixin, GRPOTrainer): ...

    Args:
        *args: as for GRPOTrainer.
        credit: a rule (``GTPO(alpha2=0.1)``), a name (``"gtpo"``), or None: then nothing
            changes and the trainer is exactly the one it is mixed into.
        success_from: name of the reward function that says whether a response is right (a value
            above 0.5). Needed by rules that read success when there are several. Where nothing
            says it (several functions, or a reward model alone), records leave it out.
        entropy_source: ``auto`` reuses the old-log-probability pass when TRL runs one, else runs
            one pass without gradient; ``old_logprobs`` and ``forward`` force either.
        signals: further token signals by name, for rules that need them: called like a reward
            function, each returns one list of numbers a response, one number a token, None where it
            is unknown. The trainer itself fills in ``entropy`` and ``logprob``.
        dynamic_sampling: how many further rounds of sampling may replace groups in which there is
            nothing to compare (DAPO): no mix of right and wrong where the rule reads success, else
            equal rewards. 0 = such groups stay. See `DynamicSampling`.
        on_credit: called with a `CreditEvent` after each assignment, on the main process.
        reward_model: for DATC: the frozen reward model that is differentiated. A transformers
            sequence classifier, its folder or name, a `RewardModel` (with options of its own), a
            `GoldAnswer` (its answers a column of the data set), or ``"from_rewards"``: the one
            among the reward functions, whose forward pass is then shared.
        reward_tokenizer: the reward model's tokenizer, to render messages in its own chat
            template. Default: that of ``reward_model``'s folder or name, or of the name that a
            model given as an object was loaded from; where there is none it is taken to be the
            policy's, with a warning.
        path_points: for DATC: average the reward gradient at so many points (`alignment_signals`).
        reward_micro_batch: responses at a time in the reward model; default: TRL's batch size.
        **kwargs: as for GRPOTrainer.

    Raises:
        InputError: a configuration that contradicts the rule, an unknown reward function, a
            trainer or TRL release whose loss would not use token-level advantages.

    The rule's requirements on the configuration are set and logged once (`apply_requirements`).
    Diagnostics are logged as ``credit/...``; ``trainer.last_credit`` holds the latest `Credit`.
    """

    def __init__(
        self,
        *args: Any,
        credit: Rule | str | None = None,
        success_from: str | None = None,
        entropy_source: EntropySource = "auto",
        signals: Mapping[str, Callable[..., Sequence[Sequence[float | None]]]] | None = None,
        dynamic_sampling: int = 0,
        on_credit: Sequence[Callable[[CreditEvent], None]] = (),
        reward_model: Any = None,
        reward_tokenizer: Any = None,
        path_points: int = 1,
        reward_micro_batch: int | None = None,
        **kwargs: Any,
    ) -> None:
        check_versions()
        check_trainer(self)
        if entropy_source not in ("auto", "old_logprobs", "forward"):
            raise InputError(
                "TokenCreditMixin: entropy_source must be auto, old_logprobs or forward, "
                f"got {entropy_source!r}"
            )
        self.credit_rule = None if credit is None else resolve(credit)
        self.entropy_source: EntropySource = entropy_source
        self.last_credit: Credit | None = None
        self.on_credit = list(on_credit)
        self._signal_funcs = dict(signals or {})
        self._scored: dict[str, Any] | None = None
        self._capturing = False
        self._policy_pass: tuple[Tensor, Tensor] | None = None
        self._loss_inputs: dict[str, Any] | None = None
        self._loss_pass: tuple[Any, ...] | None = None
        self._replay: tuple[Any, ...] | None = None
        self._loss_checked = False
        self._source_logged: str | None = None
        self._generated_prompts: Any = None
        self._inputs: list[Any] | None = None
        self._sampled_rewards: Tensor | None = None
        self._work: WorkSignals | None = None
        self._marks: TokenMarks | None = None
        super().__init__(*args, **kwargs)
        unused = not needs_work(self.credit_rule, self._signal_funcs)
        if reward_model is not None and unused and self.accelerator.is_main_process:
            logger.warning(
                "tokencredit: reward_model is not used: %s needs no signal of a reward model",
                "plain GRPO" if self.credit_rule is None else self.credit_rule.name,
            )
        if self.credit_rule is None:
            if dynamic_sampling:
                raise InputError("dynamic_sampling: needs a credit rule, such as credit='dapo'")
            return
        self._check_signals(self.credit_rule, reward_model)
        self._epochs = OrderOfEpochs()
        self.add_callback(self._epochs)
        # On a copy: the user may give the same configuration to another trainer.
        required = copy.copy(self.args)
        lines = apply_requirements(required, self.credit_rule)
        if lines:
            self.args = required
        for line in lines:
            if self.accelerator.is_main_process:
                logger.warning("tokencredit: %s", line)
        self.importance_sampling_level = self.args.importance_sampling_level
        self._success_column = self._find_success(success_from)
        self._dynamic_sampling = self._make_dynamic_sampling(dynamic_sampling)
        # What the user's own functions give is not formed.
        asked = {*self.credit_rule.needs, *self.credit_rule.reads} - set(self._signal_funcs)
        if asked & set(MARKS) or needs_work(self.credit_rule, self._signal_funcs):
            self._marks = TokenMarks(self._tokenizer)
        if needs_work(self.credit_rule, self._signal_funcs):
            self._work = WorkSignals.of(
                reward_model,
                trainer=self,
                needs=sorted(asked),
                reward_tokenizer=reward_tokenizer,
                path_points=path_points,
                micro_batch=reward_micro_batch,
            )

    def _check_signals(self, rule: Rule, reward_model: Any) -> None:
        """Refuse a rule whose signals neither the trainer nor the user forms."""
        for name in rule.needs:
            if name in self._signal_funcs or name in POLICY_SIGNALS:
                continue
            if name not in WORK_SIGNALS:
                raise MissingSignalError(
                    f"{rule.name}: needs the signal {name!r}; give the trainer a "
                    f"function for it: signals={{{name!r}: ...}}"
                )
            if reward_model is None:
                raise MissingSignalError(
                    f"{rule.name}: needs the signal {name!r}, formed from a frozen reward model: "
                    "name one by reward_model (in a script reward_model=..., in YAML "
                    "reward_model: ..., as a flag --reward_model)"
                )
        known = {*POLICY_SIGNALS, *WORK_SIGNALS, *MARKS, *self._signal_funcs}
        for name in rule.reads:
            if name not in known:
                raise InputError(
                    f"{rule.name}: reads the signal {name!r}, which nothing forms"
                    f"{nearest(name, known)}; give the trainer a function for it: "
                    f"signals={{{name!r}: ...}}"
                )

    def _find_success(self, name: str | None) -> int | None:
        names = list(self.reward_func_names)
        if name is not None:
            if name not in names:
                raise InputError(
                    f"success_from: no reward function {name!r}{nearest(name, names)}; there are: "
                    f"{', '.join(names)}"
                )
            if names.count(name) > 1:
                raise InputError(f"success_from: {names.count(name)} reward functions named {name}")
            return names.index(name)
        assert self.credit_rule is not None
        if len(names) == 1 and (
            self.credit_rule.reads_success or not isinstance(self.reward_funcs[0], nn.Module)
        ):
            return 0  # a reward model's raw score is no verdict, unless the rule asks for one
        if self.credit_rule.reads_success:
            raise InputError(
                f"{self.credit_rule.name} reads whether a response is right, and there are "
                f"{len(names)} reward functions: set success_from to one of {', '.join(names)}"
            )
        return None

    # -- data -------------------------------------------------------------------------------

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """TRL's sampler, able to start at a later epoch."""
        sampler = super()._get_train_sampler(dataset)
        if self.credit_rule is not None:
            self._epochs.attach(sampler)
            self._dynamic_sampling.restart()
        return sampler

    # -- forming credit ---------------------------------------------------------------------

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Tensor:
        rewards, self._sampled_rewards = self._sampled_rewards, None
        if rewards is None:
            rewards = self._rewards_with_work(inputs, prompts, completions, completion_ids_list)
        if self.credit_rule is not None:
            if bool(rewards.isnan().all()):
                raise InputError(
                    f"every reward of this batch is None or NaN (reward functions: "
                    f"{', '.join(self.reward_func_names)}): nothing can be learnt from it"
                )
            self._scored = {
                "inputs": inputs,
                "prompts": prompts,
                "completions": completions,
                "completion_ids": completion_ids_list,
                "rewards": rewards,
            }
        return rewards

    def _generate(self, prompts: Any) -> Any:
        generated = super()._generate(prompts)
        if self._inputs is not None:
            generated = self._resample(self._inputs, prompts, generated)
        self._generated_prompts = generated[0]
        return generated

    def _rewards_with_work(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids: Any
    ) -> Tensor:
        """TRL's rewards; a reward model that is differentiated anyway is not run twice."""
        if self._work is None:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids)
        formed = self._work.form(
            inputs,
            self.accelerator.unwrap_model(self.model),
            prompts,
            [list(map(int, ids)) for ids in self._generated_prompts],
            [list(map(int, ids)) for ids in completion_ids],
            self.accelerator.device,
        )
        column = self._work.column
        if column is None:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids)
        model, scores = self.reward_funcs[column], formed.score.tolist()
        self.reward_funcs[column] = lambda **_: scores
        try:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids)
        finally:
            self.reward_funcs[column] = model

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if self.credit_rule is None:
            return super()._generate_and_score_completions(inputs)
        # TRL masks truncated responses before anything looks at them; here they must count in
        # the statistics first, so the masking is done afterwards, by `_exclude`.
        mask_truncated = self.mask_truncated_completions
        self.mask_truncated_completions = False
        self._capturing, self._policy_pass = True, None
        rounds = self._dynamic_sampling.rounds if self.model.training else 0
        self._inputs = inputs if rounds else None
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:
            self.mask_truncated_completions = mask_truncated
            self._capturing, self._inputs, self._sampled_rewards = False, None, None
        if "old_per_token_logps" not in output:
            self._policy_pass = None  # what was seen was the reference model's pass
        scored, self._scored = self._scored, None
        assert scored is not None
        return self._add_credit(output, scored, mask_truncated)

    # -- dynamic sampling -------------------------------------------------------------------

    def _make_dynamic_sampling(self, rounds: int) -> DynamicSampling:
        made = DynamicSampling(rounds, self.train_dataset, self.args.seed, self.num_generations)
        if not made.rounds:
            return made
        for name in ("tools", "environment_factories"):
            if getattr(self, name, None):
                raise InputError(
                    f"dynamic_sampling: not with {name.removesuffix('_factories')}, whose state "
                    "belongs to a row; leave it at 0"
                )
        if {"image", "images"} & set(getattr(self.train_dataset, "column_names", None) or ()):
            raise InputError("dynamic_sampling: not with images; leave it at 0")
        for name in ("_generate", "_calculate_rewards"):
            owner = next(cls for cls in type(self).__mro__ if name in vars(cls))
            if owner is not TokenCreditMixin:
                raise InputError(
                    f"dynamic_sampling: {owner.__name__}.{name} would not see what further rounds "
                    "sample; leave it at 0, or do its work in a rollout_func or a reward function"
                )
        return made

    def _resample(self, inputs: list[Any], prompts: list[Any], generated: tuple[Any, ...]) -> Any:
        """Replace groups that teach nothing, in what was generated and what TRL holds of it."""
        generate = super()._generate

        def sample(rows: list[Any]) -> Sampled:
            texts = [row["prompt"] for row in rows]
            return self._sampled(rows, texts, generate(texts))

        generated = tuple(list(x) if isinstance(x, tuple) else x for x in generated)
        first = self._sampled(inputs, prompts, generated)
        done = self._dynamic_sampling.fill(
            first,
            sample,
            self._useful,
            step=self.state.global_step,
            rank=self.accelerator.process_index,
            ranks=self.accelerator.num_processes,
        )
        self._metrics["train"]["credit/sampling_rounds"].append(done)
        if self._work is None:  # else functions are asked once more, with the work signals
            self._sampled_rewards = first.rewards
            for name, values in first.columns.items():
                if name.startswith("extra_log:"):
                    self._pending_extra_logs[name.removeprefix("extra_log:")] = values
        return generated

    def _sampled(self, inputs: list[Any], prompts: list[Any], generated: Any) -> Sampled:
        """What TRL generated, its lists by name, with the rewards that its functions give."""
        ids, completion_ids, tool_mask, completions, logps, fields, images, _ = generated
        if tool_mask is not None or images is not None:
            raise InputError(
                "dynamic_sampling: not with images or the masks of tools; leave it at 0"
            )
        whole = {key: v for key, v in fields.items() if not isinstance(v, list)}
        by_row = {
            key: v for key, v in fields.items() if isinstance(v, list) and len(v) == len(inputs)
        }
        columns = {
            "prompts": prompts, "ids": ids, "completion_ids": completion_ids,
            "completions": completions,
        } | ({} if logps is None else {"logps": logps})  # fmt: skip
        columns |= {f"field:{key}": values for key, values in by_row.items()}
        for i, row in enumerate(inputs):
            row.update(whole | {key: values[i] for key, values in by_row.items()})
        # Copies: a function may keep its lists, and these change when groups give their place.
        asked = list(prompts), list(completions), list(completion_ids)
        rewards = super()._calculate_rewards(inputs, *asked)
        logged = {key: list(v) for key, v in self._pending_extra_logs.items()}
        self._pending_extra_logs.clear()
        columns |= {f"extra_log:{key}": v for key, v in logged.items() if len(v) == len(inputs)}
        return Sampled(inputs, columns, rewards)

    def _useful(self, rewards: Tensor) -> Tensor:
        """Which groups have something to compare."""
        assert self.credit_rule is not None
        if self.credit_rule.reads_success:
            verdict = rewards[:, self._success_column].view(-1, self.num_generations)
            return (verdict > TRUE_ABOVE).any(dim=1) & (verdict <= TRUE_ABOVE).any(dim=1)
        total = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        total = total.masked_fill(rewards.isnan().all(dim=1), torch.nan)
        groups = total.view(-1, self.num_generations)
        known = ~groups.isnan()
        low = groups.masked_fill(~known, torch.inf).amin(dim=1)
        high = groups.masked_fill(~known, -torch.inf).amax(dim=1)
        return known.any(dim=1) & (high - low > 1e-6 * (1 + high.abs()))  # beyond rounding

    # -- credit -----------------------------------------------------------------------------

    def _add_credit(
        self, output: dict[str, Any], scored: dict[str, Any], mask_truncated: bool
    ) -> dict[str, Any]:
        assert self.credit_rule is not None
        mode: Literal["train", "eval"] = "train" if self.model.training else "eval"
        mask = output["completion_mask"].bool()
        length = mask.sum(dim=1)
        if "tool_mask" in output:
            mask = mask & output["tool_mask"].bool()
        last = output["completion_ids"].gather(1, (length - 1).clamp(min=0).unsqueeze(1))
        truncated = ~torch.isin(last.squeeze(1), self._ends())

        local, source = self._local_signals(output, scored)
        rewards = scored["rewards"]
        n = rewards.shape[0]
        everything = {name: self._gather_tokens(value) for name, value in local.items()}
        whole_mask = self._gather_tokens(mask.to(torch.uint8)).bool()
        all_truncated = self._gather_rows(truncated)
        generations = self.num_generations if mode == "train" else self.num_generations_eval
        total = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        total = total.masked_fill(rewards.isnan().all(dim=1), torch.nan)
        real, success = None, None
        if self._success_column is not None:
            verdict = rewards[:, self._success_column]
            success = verdict > TRUE_ABOVE
            if self.credit_rule.reads_success:
                real = whole_mask.any(dim=1) & ~verdict.isnan()
        rollouts = Rollouts(
            rewards=total,
            group=[i // generations for i in range(n)],
            mask=whole_mask,
            success=success,
            real=real,
            keep=~all_truncated if mask_truncated else None,
            base=self._gather_rows(output["advantages"]),
            signals=everything,
        )
        credit = assign(rollouts, self.credit_rule)
        self.last_credit = credit
        idle = credit.diagnostics["groups_skipped"] == 1.0
        for name, value in credit.diagnostics.items():
            # Where nothing is trained there is no concentration: a 0 would spoil the log's mean.
            if not (idle and name.startswith(("effective_", "largest_"))):
                self._metrics[mode][f"credit/{name}"].append(value)
        self._show_in_completions(credit, whole_mask)
        b, t = mask.shape
        rows = slice(self.accelerator.process_index * b, (self.accelerator.process_index + 1) * b)
        # A copy: what a listener does to its event is not training.
        output["advantages"] = credit.advantage[rows, :t].clone()
        self._exclude(output, (~rollouts.keep | (rollouts.real & ~credit.in_loss))[rows])
        self._tell(output, scored, rollouts, credit, all_truncated, source, mode)
        return output

    def _ends(self) -> Tensor:
        """Ids that end a response."""
        ids = [*self.eos_token_ids, self._tokenizer.pad_token_id]
        return torch.tensor(ids, device=self.accelerator.device)

    def _exclude(self, output: dict[str, Any], rows: Tensor) -> None:
        """Take whole responses out of the loss and its denominator, the way TRL does."""
        stay = (~rows).unsqueeze(1)
        output["completion_mask"] = output["completion_mask"] * stay
        loss_mask = output["completion_mask"]
        if "tool_mask" in output:
            output["tool_mask"] = output["tool_mask"] * stay
            loss_mask = loss_mask * output["tool_mask"]
        # TRL's log-probability of a masked token is 0: so must the old one be, else its ratio, on
        # its way to being multiplied by 0, may overflow.
        for name in ("old_per_token_logps", "ref_per_token_logps"):
            if name in output:
                output[name] = output[name].masked_fill(~stay, 0.0)
        output["num_items_in_batch"] = self.accelerator.gather(loss_mask.sum()).sum()

    def _gather_tokens(self, value: Tensor) -> Tensor:
        if self.accelerator.num_processes == 1:
            return value
        padded = self.accelerator.pad_across_processes(value.contiguous(), dim=1)
        return self.accelerator.gather(padded)

    def _gather_rows(self, value: Tensor) -> Tensor:
        if self.accelerator.num_processes == 1:
            return value
        return self.accelerator.gather(value.contiguous())

    # -- signals ----------------------------------------------------------------------------

    def _local_signals(
        self, output: dict[str, Any], scored: dict[str, Any]
    ) -> tuple[dict[str, Tensor], str | None]:
        """This rank's token signals, ``[b, t]``, and where the entropies came from."""
        assert self.credit_rule is not None
        signals: dict[str, Tensor] = {}
        source = None
        wanted = set(self.credit_rule.needs) & set(POLICY_SIGNALS) - set(self._signal_funcs)
        if wanted or self._policy_pass is not None:
            signals["logprob"], signals["entropy"], source = self._policy_statistics(output)
            if source != self._source_logged and self.accelerator.is_main_process:
                logger.info("tokencredit: token entropies from %s", source)
                self._source_logged = source
        if self._work is not None:
            signals.update(self._work.take(output["completion_ids"]))
        if self._marks is not None:
            signals.update(self._marks.form(output["completion_ids"], self._ends()))
        for name, function in self._signal_funcs.items():
            signals[name] = self._ask_signal(name, function, scored, output)
        return signals, source

    def _policy_statistics(self, output: dict[str, Any]) -> tuple[Tensor, Tensor, str]:
        """Log-probability and entropy of each response token under the policy that sampled."""
        captured, self._policy_pass = self._policy_pass, None
        if self.entropy_source != "forward" and captured is not None:
            return captured[0].float(), captured[1].float(), "the old-log-probability pass"
        if self.entropy_source == "old_logprobs":
            raise InputError(
                "entropy_source='old_logprobs': TRL runs no such pass with this configuration "
                "(steps_per_generation x num_iterations divides gradient_accumulation_steps and "
                "there is no vLLM); use 'auto' or 'forward'"
            )
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        attention = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        batch_size = (
            self.args.per_device_train_batch_size
            if self.model.training
            else self.args.per_device_eval_batch_size
        )
        extra = {key: output[key] for key in FORWARD_KEYS if key in output}
        with torch.no_grad():
            logprob, entropy = self._get_per_token_logps_and_entropies(
                self.model,
                ids,
                attention,
                output["completion_ids"].size(1),
                batch_size=batch_size,
                compute_entropy=True,
                **extra,
            )[:2]
        return logprob.detach().float(), entropy.detach().float(), "one more forward pass"

    def _ask_signal(
        self,
        name: str,
        function: Callable[..., Sequence[Sequence[float | None]]],
        scored: dict[str, Any],
        output: dict[str, Any],
    ) -> Tensor:
        columns = {
            key: [row[key] for row in scored["inputs"]]
            for key in scored["inputs"][0]
            if key not in ("prompt", "completion", "completion_ids")
        }
        values = function(
            prompts=scored["prompts"],
            completions=scored["completions"],
            completion_ids=scored["completion_ids"],
            **columns,
        )
        b, t = output["completion_ids"].shape
        if len(values) != b:
            raise InputError(f"signal {name!r}: one list a response, {b}, got {len(values)}")
        rows: list[list[float]] = []
        for i, (row, ids) in enumerate(zip(values, scored["completion_ids"], strict=True)):
            if len(row) != len(ids):
                raise InputError(
                    f"signal {name!r}, response {i}: one number a token, {len(ids)}, got {len(row)}"
                )
            known = [math.nan if value is None else float(value) for value in row]
            rows.append(known + [0.0] * (t - len(row)))
        return torch.tensor(rows, dtype=torch.float32, device=output["completion_ids"].device)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self._replay is not None:
            return self._replay
        capture = self._capturing and self._policy_pass is None and model is self.model
        if capture:
            kwargs["compute_entropy"] = True
        out = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if capture:
            self._policy_pass = (out[0].detach(), out[1].detach())
        if self._loss_inputs is not None:
            if not self._loss_checked:
                self._loss_pass = tuple(x.detach() if isinstance(x, Tensor) else x for x in out)
            out = (self._arithmetic_ratio(out[0], self._loss_inputs), *out[1:])
        return out

    # -- the loss ---------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        if self.credit_rule is None:
            return super()._compute_loss(model, inputs)
        self._loss_inputs = inputs
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self._loss_inputs = None
        if not self._loss_checked and self.model.training:
            self._loss_checked = self._check_loss(model, inputs)
            self._loss_pass = None
        return loss

    def _arithmetic_ratio(self, logprob: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Log-probabilities whose sequence-level ratio in TRL is GRPO-S's arithmetic mean.

        TRL forms ``exp(mean_t(lp_t - old_t))``. Handed ``lp_t := old_t + log mean_t exp(lp_t -
        old_t)``, that is ``mean_t exp(lp_t - old_t)``, and so is its gradient in the model.
        """
        assert self.credit_rule is not None
        recipe = self.credit_rule.recipe
        if not recipe.ratio_required or recipe.surrogate.ratio != "sequence_arithmetic":
            return logprob
        old = inputs.get("old_per_token_logps")
        old = logprob.detach() if old is None else old
        mask = inputs["completion_mask"]
        mask = mask if "tool_mask" not in inputs else mask * inputs["tool_mask"]
        log_ratio = (logprob - old).masked_fill(mask == 0, -torch.inf)
        empty = mask.sum(dim=1, keepdim=True) == 0
        log_ratio = log_ratio.masked_fill(empty, 0.0)
        count = mask.sum(dim=1, keepdim=True).clamp(min=1)
        return old + log_ratio.logsumexp(dim=1, keepdim=True) - count.log()

    def _check_loss(self, model: Any, inputs: dict[str, Any]) -> bool:
        """Replay the first loss to see that TRL still honours ``[b, t]`` advantages.

        The gradient in the log-probabilities must be the same for ``[b]`` advantages and for
        their broadcast; and, for token-level ratios, advantages of 0 on every other token must
        take exactly those tokens' gradients away. All ranks come to the same answer.

        Returns:
            Whether there was anything to see: not if the loss masks the whole micro-batch.
        """
        assert self._loss_pass is not None
        shape = inputs["advantages"].shape
        # Rows that differ, so that one row's advantage in another row's loss shows.
        base = 1.0 + torch.arange(shape[0], device=inputs["advantages"].device) / shape[0]
        full = base.unsqueeze(1).expand(shape).contiguous()
        half = full.clone()
        half[:, ::2] = 0.0
        zero = self._replayed_gradient(model, inputs, torch.zeros_like(full))
        row = self._replayed_gradient(model, inputs, base) - zero
        broadcast = self._replayed_gradient(model, inputs, full) - zero
        error = (row - broadcast).abs().max()
        if self.importance_sampling_level == "token":
            expected = broadcast.clone()
            expected[:, ::2] = 0.0
            halved = self._replayed_gradient(model, inputs, half) - zero
            error = torch.maximum(error, (halved - expected).abs().max())
        size = row.abs().max()
        wrong, seen = error > 1e-4 * size + 1e-12, size > 0
        found = self._gather_rows(torch.stack([wrong, seen]).to(torch.uint8).unsqueeze(0))
        wrong, seen = found.amax(dim=0).tolist()
        if wrong:
            import trl

            raise RuntimeError(
                f"TRL {trl.__version__} no longer uses token-level advantages the way tokencredit "
                f"needs (loss_type={self.loss_type!r}); please report it"
            )
        return bool(seen)

    def _replayed_gradient(self, model: Any, inputs: dict[str, Any], advantages: Tensor) -> Tensor:
        """Gradient of TRL's loss in the log-probabilities, without a forward pass or a trace."""
        assert self._loss_pass is not None
        mode = "train" if self.model.training else "eval"
        metrics = {name: list(values) for name, values in self._metrics[mode].items()}
        state = {
            name: getattr(self, name)
            for name in ("_entropy_window_stats", "_last_world_entropy", "entropy_coef")
            if hasattr(self, name)
        }
        leaf = self._loss_pass[0].clone().requires_grad_(True)
        self._replay = (leaf, *self._loss_pass[1:])
        try:
            with torch.enable_grad():
                loss = super()._compute_loss(model, {**inputs, "advantages": advantages})
                (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        finally:
            self._replay = None
            self._metrics[mode].clear()
            self._metrics[mode].update(metrics)
            for name, value in state.items():
                setattr(self, name, value)
        return torch.zeros_like(leaf) if gradient is None else gradient

    # -- telling ----------------------------------------------------------------------------

    def _show_in_completions(self, credit: Credit, mask: Tensor) -> None:
        """Put what the loss uses into the completions table: each response's mean advantage."""
        count = mask.sum(dim=1).clamp(min=1)
        values = (credit.advantage.sum(dim=1) / count).tolist()
        shown = self._logs["advantages"]
        for i in range(1, min(len(values), len(shown)) + 1):
            shown[-i] = values[-i]

    def _tell(
        self,
        output: dict[str, Any],
        scored: dict[str, Any],
        rollouts: Rollouts,
        credit: Credit,
        truncated: Tensor,
        source: str | None,
        mode: Literal["train", "eval"],
    ) -> None:
        several = self.accelerator.num_processes > 1
        listened = torch.tensor([len(self.on_credit)], device=truncated.device)
        # A listener that only the main process has needs the other ranks' rows all the same.
        if not bool(self._gather_rows(listened).any()):
            return
        prompt_ids = [
            ids[keep].tolist()
            for ids, keep in zip(output["prompt_ids"], output["prompt_mask"].bool(), strict=True)
        ]
        response_ids = [list(map(int, ids)) for ids in scored["completion_ids"]]
        rows = [scored["prompts"], scored["completions"], prompt_ids, response_ids]
        if several:
            rows = [gather_object(list(row)) for row in rows]
        if not self.accelerator.is_main_process:
            return
        table = scored["rewards"].tolist()
        event = CreditEvent(
            step=self.state.global_step,
            mode=mode,
            rollouts=rollouts,
            credit=credit,
            prompts=rows[0],
            responses=rows[1],
            prompt_ids=rows[2],
            response_ids=rows[3],
            rewards={
                name: [None if line[i] != line[i] else line[i] for line in table]
                for i, name in enumerate(self.reward_func_names)
            },
            truncated=truncated,
            group=rollouts.group,
            entropy_source=source,
            success_known=self._success_column is not None,
        )
        for listener in self.on_credit:
            listener(event)
