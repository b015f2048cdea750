"""verl's own loop on two CPU ranks: python loop.py FOLDER STEPS [overrides ...].

FOLDER gets the model, checkpoints and ``metrics.jsonl``, verl's own file logger's. Everything is
verl's (Ray, TransferQueue, replay buffer, agent loop, reward loop, FSDP2 over gloo, PPO loss,
optimiser) but the generation and the platform, which are in this folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
    "VERL_ENGINE_DEVICE": "cuda",  # picks verl's FSDP engine, which it registers for no other
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFER_QUEUE_ENABLE": "1",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep),
}
RANKS, PROMPTS, RESPONSES, LENGTH = 2, 6, 8, 12


def overrides(folder: Path, steps: int) -> list[str]:
    """6 prompts a step do not fill mini-batches of 4: verl appends 16 padding rows to 48."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        f"actor_rollout_ref.model.path={folder / 'model'}",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        f"{actor}.strategy=fsdp2",
        "actor_rollout_ref.ref.strategy=fsdp2",
        f"{actor}.ppo_mini_batch_size=4",
        f"{actor}.ppo_micro_batch_size_per_gpu=8",
        f"{actor}.use_torch_compile=False",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"{actor}.optim.lr=5e-3",
        f"{actor}.checkpoint.save_contents=[model,hf_model]",
        f"{rollout}.name=vllm",
        f"{rollout}.n={RESPONSES}",
        f"{rollout}.response_length={LENGTH}",
        f"{rollout}.prompt_length=32",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=32",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.agent.num_workers=1",
        f"{rollout}.calculate_log_probs=False",
        f"data.train_files={folder / 'prompts.parquet'}",
        f"data.val_files={folder / 'prompts.parquet'}",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=32",
        f"data.max_response_length={LENGTH}",
        "data.dataloader_num_workers=0",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={HERE / 'tiny.py'}",
        "trainer.device=cpu",
        f"trainer.n_gpus_per_node={RANKS}",
        "trainer.nnodes=1",
        "trainer.logger=[file]",
        "trainer.val_before_train=False",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=1000",
        "trainer.v1.trainer_mode=tiny_sync",
        "trainer.max_actor_ckpt_to_keep=1",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        "trainer.resume_mode=disable",
        "trainer.save_freq=1",
        "trainer.test_freq=-1",
    ]


def main(folder: Path, steps: int, extra: list[str]) -> None:
    os.environ.update(ENVIRONMENT)
    sys.path.insert(0, str(HERE))
    import ray
    import tiny
    from hydra import compose, initialize_config_module

    folder.mkdir(parents=True, exist_ok=True)
    tiny.make(folder)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[*overrides(folder, steps), *extra])
    variables = ENVIRONMENT | {"VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl")}
    ray.init(
        num_cpus=64,  # logical ones, as the accelerators are
        num_gpus=RANKS,
        include_dashboard=False,
        object_store_memory=200 * 1024**2,
        runtime_env={"env_vars": variables},
    )

    @ray.remote(num_cpus=1)
    class Runner:
        def run(self, config: object) -> None:
            import generating  # noqa: F401 - registers the trainer, in the driver's process
            import torch
            from verl.trainer.main_ppo import TaskRunnerV1

            torch.set_num_threads(1)
            TaskRunnerV1.__ray_metadata__.modified_class().run(config)

    try:
        ray.get(Runner.remote().run.remote(config))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]), sys.argv[3:])
