"""Runs by ``torch.distributed.run`` on two ranks; rank 0 writes what it saw to a file.

Also run on one rank, for the same file.
"""

import os
import sys
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}


def lengths_apart(call, row):
    """Rank 0's responses are short, rank 1's long."""
    from trl_harness import EOS, response

    ids = [*response(call, row), 5, 6, 7, EOS]
    return [*ids[: 1 + row % 2], EOS] if row < 12 else ids


def some_unscored(completion_ids, **_):
    return [None if len(ids) % 5 == 4 else float(sum(ids) % 2) for ids in completion_ids]


def easy_and_hard(prompts, completion_ids, **_):
    """Two prompts in which there is nothing to compare."""
    known = {"3 + 4 =": 1.0, "5 =": 0.0}
    return [
        known.get(p, float(sum(ids) % 2)) for p, ids in zip(prompts, completion_ids, strict=True)
    ]


def punished(completion_ids, **_):
    return [-0.1 * len(ids) for ids in completion_ids]


def main(path):
    import torch

    torch.set_num_threads(1)
    from trl_harness import (
        CASES,
        Run,
        dataset,
        fixed_rollouts,
        one_step,
        parity,
        plain,
        recommended,
    )

    out = {}

    def keep(name, run):
        trainer = run.trainer
        batch = trainer._buffered_inputs[0]
        out[name] = {
            "gradients": run.keep.gradients,
            "events": [
                plain(e)
                | {
                    "prompts": e.prompts,
                    "responses": e.responses,
                    "rewards": e.rewards,
                    "truncated": e.truncated,
                    "step": e.step,
                }
                for e in run.events
            ],
            "items": float(batch["num_items_in_batch"]),
            "shown": list(trainer._logs["advantages"]),
            "log": run.log,
            "width": batch["completion_ids"].shape[1],
            "last": trainer.last_credit.advantage.clone(),
        }

    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    for micro_batch in (1, 4):
        for case in CASES:
            keep(f"{case}-{micro_batch}", one_step(case, micro_batch, world))

    def run(name, rule, fields=None, **options):
        more = {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 6 // world,
        }
        made = Run(rule, **(more | (fields or {}) | options))
        if name == "listener":
            made.trainer.on_credit = [made.events.append] if rank == 0 else []
        keep(name, made.train())
        assert made.trainer.accelerator.num_processes == world
        if rank > 0:
            assert not made.events
        return made

    gtpo, fields = recommended("gtpo", alpha2=1.0)
    run("unequal", gtpo, fields, rollout=fixed_rollouts(make=lengths_apart))
    run("tools", gtpo, fields, rollout=fixed_rollouts(env_mask=True))
    run("unscored", gtpo, fields, reward_funcs=some_unscored)
    run("truncated", gtpo, fields, mask_truncated_completions=True)
    run(
        "iterations",
        gtpo,
        fields,
        num_iterations=2,
        max_steps=2,
        optim="sgd",
        learning_rate=0.3,
        rollout=fixed_rollouts(make=lengths_apart),
    )
    dapo, fields = recommended("dapo")
    run("dapo", dapo, fields)
    run(
        "refilled",
        dapo,
        fields,
        reward_funcs=easy_and_hard,
        max_steps=2,
        more={"dynamic_sampling": 8},
    )
    grpo_s, fields = recommended("grpo_s", beta2=1.0)
    run("listener", grpo_s, fields, max_steps=2)
    run(
        "rewards",
        grpo_s,
        fields,
        reward_funcs=[parity, punished],
        more={"success_from": "parity"},
    )

    run(
        "evaluation",
        gtpo,
        recommended("gtpo")[1],
        more={"eval_dataset": dataset(4)},
        eval_strategy="steps",
        eval_steps=1,
        num_generations_eval=4,
        per_device_eval_batch_size=8 // world,
    )

    # In two halves, which meet inside the second epoch.
    def steps(folder, until, checkpoint=None):
        options = {"save_steps": 3, "save_strategy": "steps", "max_steps": 6}
        made = Run(
            gtpo,
            more={},
            folder=folder,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=6 // world,
            **options,
        )
        made.trainer.args.max_steps = until
        made.trainer.train(resume_from_checkpoint=checkpoint)
        return [event.prompts for event in made.events]

    folder = Path(path).parent
    whole_run = steps(folder / "whole", 6)
    halves = steps(folder / "halves", 3)
    halves += steps(folder / "halves", 6, str(folder / "halves" / "checkpoint-3"))
    out["resumed"] = {"whole": whole_run, "halves": halves}

    # The first-step check comes to one answer on all ranks, and so ends all of them.
    from trl import GRPOTrainer

    whole = GRPOTrainer._compute_loss

    def flattened(self, model, inputs):
        a = inputs["advantages"]
        a = a if a.dim() == 1 or self.accelerator.process_index else a.mean(dim=1)
        return whole(self, model, inputs | {"advantages": a})

    GRPOTrainer._compute_loss = flattened
    try:
        run("check", gtpo)
    except RuntimeError as error:
        out["check"] = str(error)
    finally:
        GRPOTrainer._compute_loss = whole

    out["world"] = world
    if rank == 0:
        torch.save(out, path)
    if world > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
