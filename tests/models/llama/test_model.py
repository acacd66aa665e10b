"""Tests of the LLaMA-style decoder."""

import pytest
import torch

from models.llama import Llama, LlamaConfig, RotaryScaling
from parallel.batch import IGNORE_INDEX

CONFIG = LlamaConfig(num_layers=2, width=24, num_heads=6, num_kv_heads=2, feed_forward_width=40, vocab_size=37)


def _model(config: LlamaConfig = CONFIG) -> Llama:
    model = Llama(config).double()
    generator = torch.Generator().manual_seed(1)
    for fqn, parameter in model.named_parameters():
        model.init_parameter(fqn, parameter.data, generator)
        # Large enough that a wrong mask or position shows.
        parameter.data.mul_(10)
    return model


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, CONFIG.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def test_documents_packed_in_a_row_give_the_logits_of_the_documents_alone() -> None:
    model, tokens = _model(), _tokens(1, 15)
    lengths = [4, 1, 7, 3]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    document_ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    packed = model(tokens, positions=positions, document_ids=document_ids)
    alone = torch.cat([model(each) for each in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-12)


def test_a_later_token_changes_no_earlier_logits() -> None:
    model, tokens = _model(), _tokens(1, 9)
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % CONFIG.vocab_size
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5]) and not torch.equal(before[:, 5:], after[:, 5:])


def test_positions_count_from_zero_where_none_are_given() -> None:
    model, tokens = _model(), _tokens(2, 9)
    assert torch.equal(model(tokens), model(tokens, positions=torch.arange(9).expand(2, 9)))


def test_loss_is_the_sum_over_valid_positions() -> None:
    model, tokens, labels = _model(), _tokens(2, 9), _tokens(2, 9).flip(1)
    labels[1, 4:] = IGNORE_INDEX
    log_p = model(tokens).log_softmax(-1)
    valid = labels != IGNORE_INDEX
    expected = -log_p.gather(-1, labels.where(valid, 0)[..., None])[..., 0][valid].sum()
    loss = model(tokens, labels=labels)
    assert loss.shape == () and loss.dtype == torch.float64
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("scaling", [None, RotaryScaling()])
def test_the_model_has_no_buffers(scaling: RotaryScaling | None) -> None:
    assert not list(Llama(LlamaConfig(rope_scaling=scaling)).buffers())


def test_stages_without_embedding_or_head_chain_to_the_whole_model() -> None:
    model, tokens, labels = _model(), _tokens(2, 9), _tokens(2, 9).flip(1)
    first, middle, last = _model(), _model(), _model()
    first.norm = first.head = None
    middle.embed = middle.norm = middle.head = None
    last.embed = None
    del first.blocks["0"], first.blocks["1"], middle.blocks["1"], last.blocks["0"]
    assert "blocks.1.attention.q_proj.weight" in dict(last.named_parameters())
    hidden = middle(first(tokens), positions=torch.arange(9)[None])
    assert torch.equal(last(hidden, labels=labels), model(tokens, labels=labels))


def test_tied_embeddings_are_one_parameter_with_both_gradients() -> None:
    tied = _model(LlamaConfig(num_layers=1, vocab_size=37, tied_embeddings=True))
    assert tied.head is not None and tied.embed is not None and tied.head.weight is tied.embed.weight
    untied = _model(LlamaConfig(num_layers=1, vocab_size=37))
    untied.load_state_dict(tied.state_dict())
    for model in (tied, untied):
        model(_tokens(2, 9), labels=_tokens(2, 9).flip(1)).backward()
    assert untied.head is not None and untied.embed is not None
    both = untied.embed.weight.grad + untied.head.weight.grad  # type: ignore[operator]
    torch.testing.assert_close(tied.embed.weight.grad, both, rtol=0, atol=1e-12)


def test_rotary_angles_of_a_bfloat16_model_are_float32() -> None:
    model = _model().bfloat16()
    seen = []
    model.blocks["0"].register_forward_pre_hook(lambda _, __, kwargs: seen.extend(kwargs["rotary"]), with_kwargs=True)
    assert model(_tokens(1, 4)).dtype == torch.bfloat16
    assert [each.dtype for each in seen] == [torch.float32] * 2


def test_a_sequence_longer_than_the_positions_go_is_refused() -> None:
    model = Llama(LlamaConfig(max_sequence_length=8))
    with pytest.raises(ValueError, match="has 9 tokens, max_sequence_length=8"):
        model(_tokens(1, 9))
