import pytest
import torch
from transformers import PreTrainedModel

from tokencredit.errors import InputError
from tokencredit.lab import new_policy, sample_responses

FAMILIES = ["llama", "qwen3", "gpt2"]
SIZES = {"llama": 782_464, "qwen3": 717_184, "gpt2": 812_800}  # 24 words


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_goes_forward_and_generates(family):
    model = new_policy(family, 24, seed=0)
    assert isinstance(model, PreTrainedModel)
    ids = torch.randint(3, 24, (3, 7), generator=torch.Generator().manual_seed(0))
    assert model(input_ids=ids).logits.shape == (3, 7, 24)
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=True
    )
    assert out.shape[0] == 3 and 7 < out.shape[1] <= 12
    assert sum(p.numel() for p in model.parameters()) == SIZES[family]
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.generation_config.eos_token_id == 1
    assert model.generation_config.pad_token_id == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_training_mode_computes_what_was_sampled_with(family):
    model = new_policy(family, 24, seed=0)
    ids = torch.arange(3, 10)[None]
    assert torch.equal(model.train()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


def test_the_seed_decides_the_weights_and_the_global_state_is_left_alone():
    before = torch.get_rng_state()
    one, same, other = (new_policy("llama", 24, seed=s, layers=1, width=16) for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    weights = [m.get_input_embeddings().weight for m in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_initializer_range_is_heeded(family):
    narrow, wide = (
        new_policy(family, 24, seed=0, initializer_range=r)
        .get_input_embeddings()
        .weight.std()
        .item()
        for r in (0.02, 0.06)
    )
    assert wide / narrow == pytest.approx(3.0, rel=0.01)


def test_what_cannot_be_built_is_refused():
    with pytest.raises(InputError, match=r"did you mean 'llama'"):
        new_policy("lama", 24, seed=0)
    with pytest.raises(InputError, match="width=100"):
        new_policy("llama", 24, seed=0, width=100)
    with pytest.raises(InputError, match="heads=3"):
        new_policy("llama", 24, seed=0, heads=3)


def _tiny(family="qwen3"):
    return new_policy(family, 24, seed=0, layers=1, width=16, heads=2)


def test_sampling_repeats_at_a_seed_and_leaves_mode_and_random_state():
    model = _tiny().train()
    ids = torch.full((20, 4), 5)
    before = torch.get_rng_state()
    one, same, other = (
        sample_responses(model, ids, max_new_tokens=6, seed=s, batch_size=8) for s in (0, 0, 1)
    )
    assert one == same != other
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert len(one) == 20


def test_responses_end_at_their_eos_or_at_the_limit():
    responses = sample_responses(_tiny(), torch.full((200, 4), 5), max_new_tokens=6, seed=0)
    assert any(row[-1] == 1 for row in responses)
    for row in responses:
        assert 1 not in row[:-1]
        assert row[-1] == 1 or len(row) == 6


def test_greedy_takes_the_most_probable_token_and_every_token_can_be_sampled():
    model = _tiny()
    ids = torch.full((2000, 4), 5)
    best = int(model(input_ids=ids[:1]).logits[0, -1].argmax())
    assert sample_responses(model, ids[:2], max_new_tokens=1, seed=0, greedy=True) == [[best]] * 2
    seen = {row[0] for row in sample_responses(model, ids, max_new_tokens=1, seed=0)}
    assert seen == set(range(24))  # fresh weights: about 80 of each, none cut by top-k


def test_a_low_temperature_is_nearly_greedy():
    model, ids = _tiny(), torch.full((50, 4), 5)
    cold = sample_responses(model, ids, max_new_tokens=1, seed=0, temperature=1e-4)
    assert cold == sample_responses(model, ids, max_new_tokens=1, seed=0, greedy=True)


def test_what_cannot_be_sampled_is_refused():
    ids = torch.ones(1, 2, dtype=torch.long)
    with pytest.raises(InputError, match="temperature=0"):
        sample_responses(_tiny(), ids, max_new_tokens=1, seed=0, temperature=0)
    with pytest.raises(InputError, match="batch_size=0"):
        sample_responses(_tiny(), ids, max_new_tokens=1, seed=0, batch_size=0)
