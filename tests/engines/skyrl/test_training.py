"""Training by SkyRL's own methods, from a generator's output to the optimiser: reward rises.

The steps of its loop between sampling and the optimiser, one after the other, in one process.
Sampling is Hugging Face's in place of vLLM; there are no Ray actors, no CUDA, one rank.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("skyrl", reason="skyrl is not installed: `make skyrl` makes its environment")

from skyrl_harness import OneWorker, configuration, tiny_model, trainer, training_worker

from tokencredit import Rollouts, assign

PROMPTS, SIZE, LENGTH, STEPS = 6, 8, 6, 12
GRPO_S = "trainer.algorithm.policy_loss_type=tokencredit_sequence_arithmetic"


def rollout(model, generator: torch.Generator) -> tuple[dict, list[str]]:
    """What a SkyRL generator returns. Right: more even than odd tokens; 2 ends a response."""
    prompts = torch.randint(3, 64, (PROMPTS, 4), generator=generator).repeat_interleave(SIZE, 0)
    model.eval()
    with torch.no_grad():
        out = model.model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True,
            max_new_tokens=LENGTH, eos_token_id=2, pad_token_id=0, top_k=0,
        )[:, 4:]  # fmt: skip
    responses = []
    for row in out.tolist():
        responses.append(row[: row.index(2) + 1] if 2 in row else row)
    rewards = [float(sum(token % 2 == 0 for token in one) > len(one) / 2) for one in responses]
    return {
        "prompt_token_ids": prompts.tolist(),
        "response_ids": responses,
        "rewards": rewards,
        "loss_masks": [[1] * len(one) for one in responses],
        "stop_reasons": ["stop"] * len(responses),
        "rollout_logprobs": None,
    }, [str(i // SIZE) for i in range(PROMPTS * SIZE)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [["tokencredit_gtpo"], ["tokencredit_grpo_s", GRPO_S]])
def test_reward_rises(estimator, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    torch.manual_seed(0)
    cfg = configuration(
        *estimator, f"trainer.train_batch_size={PROMPTS}",
        f"trainer.policy_mini_batch_size={PROMPTS // 2}",
        f"generator.n_samples_per_prompt={SIZE}",
    )  # fmt: skip
    model = tiny_model(tmp_path)
    one = trainer(cfg, model)
    one.dispatch = OneWorker(training_worker(cfg, model, 3e-3))
    one.tokenizer = SimpleNamespace(pad_token_id=0)
    one.global_step, one.all_timings = 1, {}
    one._vllm_metrics_scraper = None
    generator, scores = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        output, uids = rollout(model, generator)
        scores.append(sum(output["rewards"]) / len(output["rewards"]))
        raw = torch.tensor(output["rewards"])
        output, uids = one.postprocess_generator_output(output, uids)
        data = one.convert_to_training_input(output, uids)
        data = one.compute_advantages_and_returns(one.fwd_logprobs_values_reward(data))
        check(one, model, data, raw, uids, estimator[0].removeprefix("tokencredit_"))
        data.pop("rewards")
        data.metadata.pop("uids")
        status = one.train_critic_and_policy(data)
        assert status["policy_entropy"] > 0
    first, last = sum(scores[:3]) / 3, sum(scores[-3:]) / 3
    print(f"{estimator[0]}: mean reward {first:.3f} -> {last:.3f} in {STEPS} steps")
    assert last > first + 0.15, scores


def check(one, model, data, raw, uids, method: str) -> None:
    """The step's advantages against `assign` on the entropies of another forward pass."""
    from skyrl_harness import entropies

    own = entropies(model, data)
    rollouts = Rollouts(raw, uids, data["response_mask"], entropy=own)
    assert torch.allclose(data["advantages"], assign(rollouts, method).advantage, atol=1e-4)
