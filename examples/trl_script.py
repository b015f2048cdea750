"""Train with TRL and token-level credit: a whole script, for the lab's tiny policy on a CPU.

    python examples/trl_script.py --steps 3

For a model of your own, replace the four lines of "what to train" by its name, your data set with
a `prompt` column and your reward function, and the CPU settings by yours. The rest stays.
"""

import argparse

from trl import GRPOConfig

from tokencredit import GTPO, lab
from tokencredit.engines.trl import CreditGRPOTrainer, RolloutRecorder, recommended_config


def main() -> None:
    """Train for some steps and write the model and the recorded rollouts."""
    parser = argparse.ArgumentParser(description="GTPO inside TRL, on the lab's chain task.")
    parser.add_argument("--steps", type=int, default=60, help="optimiser steps (default 60)")
    parser.add_argument("--output", default="runs/trl_script", help="output folder")
    options = parser.parse_args()

    # What to train: a policy, its tokenizer, prompts, and a reward function that takes
    # (prompts, completions, completion_ids, **columns) and returns one number a response.
    task = lab.setting("chain-qwen3").task
    model, tokenizer = lab.load_policy("chain-qwen3")
    dataset = lab.prompt_dataset(task, 16 * options.steps, seed=0)
    accuracy = lab.task_reward(task)

    rule = GTPO(alpha1=1.0, alpha2=0.1)
    args = GRPOConfig(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=128,  # responses: 16 prompts of 8
        num_generations=8,
        max_completion_length=task.max_response,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        # For a CPU and a model of 0.7 million parameters:
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        # The loss that the rule's paper trains with; your own settings may stand here instead.
        **recommended_config(rule),
    )
    trainer = CreditGRPOTrainer(
        model=model,
        args=args,
        train_dataset=dataset,
        reward_funcs=accuracy,
        processing_class=tokenizer,
        credit=rule,
        on_credit=[RolloutRecorder(f"{options.output}/rollouts.jsonl", tokenizer, every=10)],
    )
    trainer.train()
    trainer.save_model()
    assert trainer.last_credit is not None
    for name, value in trainer.last_credit.diagnostics.items():
        print(f"credit/{name:<18} {value:.4g}")


if __name__ == "__main__":
    main()
