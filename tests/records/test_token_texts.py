"""Texts of tokens in records: of byte-level and of SentencePiece vocabularies."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tokencredit.lab import Chain, tokenizer_for
from tokencredit.records.token_texts import _BYTE_OF as BYTE_OF
from tokencredit.records.token_texts import token_texts


def test_byte_level():
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate([*pieces, "<eos>"])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    text = "a b\n\u00fc\u4f60\U0001f600"
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    found = token_texts(tokenizer, ids)
    assert found[:4] == ["a", " ", "b", "\n"]
    assert found[-1] == "<eos>"
    assert all(isinstance(piece, bytes) for piece in found[4:-1])  # one byte each
    joined = b"".join(p if isinstance(p, bytes) else p.encode() for p in found[:-1])
    assert joined.decode() == text
    assert len(BYTE_OF) == 256 == len(set(BYTE_OF.values()))


def test_sentencepiece():
    vocab = {"<unk>": 0, "\u2581the": 1, "<0x0A>": 2, "<0xE4>": 3, "s": 4}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    assert token_texts(tokenizer, [1, 4, 2, 3, 0]) == [" the", "s", "\n", b"\xe4", "<unk>"]


def test_words():
    tokenizer = tokenizer_for(Chain())
    words = ["so", "3", "+", "<eos>"]
    assert token_texts(tokenizer, tokenizer.convert_tokens_to_ids(words)) == words
