"""`CreditGRPOTrainer`: TRL's GRPOTrainer with token-level credit."""

from __future__ import annotations

from trl import GRPOTrainer

from tokencredit.engines.trl.mixin import TokenCreditMixin

__all__ = ["CreditGRPOTrainer"]


class CreditGRPOTrainer(TokenCreditMixin, GRPOTrainer):
    """TRL's GRPOTrainer with token-level credit: a drop-in, with the same arguments and a few more.

    See `TokenCreditMixin` for the added arguments. With ``credit=None`` it *is* GRPOTrainer.

        from tokencredit import GTPO
        from tokencredit.engines.trl import CreditGRPOTrainer

        trainer = CreditGRPOTrainer(
            model="Qwen/Qwen3-0.6B", reward_funcs=accuracy, train_dataset=dataset,
            credit=GTPO(alpha2=0.1),
        )
        trainer.train()
    """
