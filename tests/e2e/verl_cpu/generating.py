"""verl's synchronous V1 trainer with Hugging Face generation in place of a vLLM server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.rollout.replica import TokenOutput


@ray.remote(num_cpus=0)
class Generator:
    """Holds a copy of the policy; answers one request at a time."""

    def __init__(self, folder: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        torch.manual_seed(1)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()

    def load(self, folder: str) -> int:
        """The weights of a checkpoint; how many tensors."""
        from safetensors.torch import load_file

        weights: dict[str, Any] = {}
        for file in Path(folder).glob("*.safetensors"):
            weights |= {name: value.float() for name, value in load_file(file).items()}
        self.model.load_state_dict(weights)
        return len(weights)

    def entropies(self, ids: list[list[int]], lengths: list[int]) -> list[list[float]]:
        """Of each response's tokens, from a forward pass of its own, in float64."""
        import torch

        out: list[list[float]] = []
        for row, n in zip(ids, lengths, strict=True):
            with torch.no_grad():
                logits = self.model(torch.tensor([row])).logits[0, -n - 1 : -1].double()
            logp = logits.log_softmax(dim=-1)
            out.append((-(logp.exp() * logp).sum(dim=-1)).tolist())
        return out

    def generate(self, prompt: list[int], length: int, temperature: float) -> list[int]:
        import torch

        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=temperature,
                top_k=0,
                max_new_tokens=length,
            )
        return out[0, len(prompt) :].tolist()


class Client:
    """What an agent loop asks for tokens."""

    def __init__(self, generator: Any, length: int) -> None:
        self.generator, self.length = generator, length

    async def generate(
        self, request_id: str, *, prompt_ids: Any, sampling_params: Any, **_: Any
    ) -> TokenOutput:
        temperature = sampling_params.get("temperature", 1.0)
        ids = await self.generator.generate.remote(list(prompt_ids), self.length, temperature)
        steps = {"min_global_steps": 0, "max_global_steps": 0}
        return TokenOutput(token_ids=ids, stop_reason="completed", extra_fields=steps)


class NoServers:
    """In place of verl's manager of vLLM servers."""

    @classmethod
    def create_empty(cls, config: Any) -> NoServers:
        return cls()

    def get_replicas(self) -> list[Any]:
        return []


trainer_base.LLMServerManager = NoServers


@trainer_base.register_trainer("tiny_sync")
class TinyTrainer(PPOTrainerSync):
    # verl compares the mode with "sync" in several places.
    trainer_mode = property(lambda self: "sync", lambda self, value: None)
    _enable_hybrid_replicas = False

    def get_llm_client(self) -> Any:
        self.generator = Generator.remote(self.config.actor_rollout_ref.model.path)
        return Client(self.generator, self.config.actor_rollout_ref.rollout.response_length)

    def on_init_end(self) -> None:
        pass

    def on_sample_end(self) -> None:
        pass

    def _compute_advantage(self, batch: Any, metrics: dict[str, float]) -> Any:
        """verl's, and how far its advantages are from credit that owes verl nothing.

        The generator holds the weights that sampled, so its entropies are the right ones.
        """
        import torch

        from tokencredit import Rollouts, assign

        batch = super()._compute_advantage(batch, metrics)
        fields = ["input_ids", "responses", "response_mask", "rm_scores", "advantages", "uid"]
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=fields
        )
        lengths = [len(row) for row in data["responses"].unbind()]
        ids = [row.tolist() for row in data["input_ids"].unbind()]
        rows = ray.get(self.generator.entropies.remote(ids, lengths))
        entropy = torch.nested.nested_tensor([torch.tensor(row) for row in rows])
        mask, scores, got = (
            torch.nested.to_padded_tensor(data[name], 0.0)
            for name in ("response_mask", "rm_scores", "advantages")
        )
        options = dict(self.config.algorithm.get("tokencredit") or {})
        options.pop("success_from", None)  # here the score above 0.5, which says the same
        credit = assign(
            Rollouts(
                scores.sum(dim=1), list(data["uid"]), mask, entropy=entropy.to_padded_tensor(0.0)
            ),
            self.config.algorithm.adv_estimator.removeprefix("tokencredit_"),
            **options,
        )
        shift = credit.advantage.roll(1, dims=1)  # what an alignment off by one would leave
        metrics["check/advantage_error"] = float((got - credit.advantage).abs().max())
        metrics["check/shifted_error"] = float((got - shift)[:, 1:-1].abs().max())
        metrics["check/padding_rows"] = float((mask.sum(dim=1) == 0).sum())
        return batch

    def on_step_end(self) -> None:
        """On policy: the generator takes over what was just trained."""
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        assert ray.get(self.generator.load.remote(str(folder / "actor" / "huggingface")))
