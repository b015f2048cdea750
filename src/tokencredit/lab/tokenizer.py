"""A word-level tokenizer for a task, built in code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from tokencredit.lab.tasks.task import SPECIAL_TOKENS, context_length

if TYPE_CHECKING:
    from tokencredit.lab.tasks.task import Task

__all__ = ["tokenizer_for"]


def tokenizer_for(task: Task) -> PreTrainedTokenizerFast:
    """One token a word, split at white space; a token's id is its index in the vocabulary.

    Prompts are padded on the left, as generation needs it. A word outside the vocabulary becomes
    ``<unk>``. `decode` joins words by single spaces.

    Args:
        task: Whose vocabulary to use.

    Returns:
        A tokenizer that `save_pretrained` and `AutoTokenizer.from_pretrained` carry to a folder
        and back.

    Example:
        >>> from tokencredit.lab import Chain
        >>> tokenizer = tokenizer_for(Chain())
        >>> ids = tokenizer("6 - 4 =")["input_ids"]
        >>> tokenizer.decode(ids)
        '6 - 4 ='
    """
    pad, eos, unknown = SPECIAL_TOKENS
    ids = {word: index for index, word in enumerate(task.vocabulary)}
    model = Tokenizer(WordLevel(ids, unk_token=unknown))
    model.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    model.add_special_tokens([AddedToken(word, normalized=False) for word in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token=pad,
        eos_token=eos,
        unk_token=unknown,
        padding_side="left",
        model_max_length=context_length(task),
        # Without this the tokenizer also returns token_type_ids, which causal models refuse.
        model_input_names=["input_ids", "attention_mask"],
        # The clean-up is made for prose: it would join "2 ." and the like.
        clean_up_tokenization_spaces=False,
    )
