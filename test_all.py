"""
Every property this project promises, as tests. The order is that of the files.

    python test_all.py            all of them; the last line is "N passed, N failed", the exit status 1 on a failure
    python test_all.py -k mask    those whose name contains "mask"
    pytest test_all.py            the same tests, for those who have pytest

The reference is PyTorch with the same weights: nn.MultiheadAttention, nn.LayerNorm, nn.Transformer. Values and
gradients agree to 1e-10 in float64. Where there is no reference, a test spells the thing out in slow loops.
"""
import argparse
import itertools
import math
import random
import re
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import attention as attention_file
from attention import (MultiHeadAttention, ScaledDotProductAttention, attention, make_padding_mask, make_target_mask,
                       subsequent_mask)
from model import BOS, EOS, PAD, UNK, Decoder, Encoder, EncoderDecoder, TransformerClassifier, greedy_decode, make_model
from transformer_layer import (DecoderLayer, Embeddings, EncoderLayer, LayerNorm, PositionalEncoding,
                               PositionwiseFeedForward, SublayerConnection)

HERE = Path(__file__).resolve().parent
SOURCES = ["attention", "transformer_layer", "model", "train", "translate"]  # each may import those to its left
SOURCES = {name: (HERE / f"{name}.py").read_text("utf-8") for name in SOURCES if (HERE / f"{name}.py").exists()}


def setup_function():
    """Before every test: our runner calls this, and pytest by its name."""
    torch.manual_seed(0)
    random.seed(0)


def rand(*shape):
    """Normal float64 numbers that take a gradient."""
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def same(a, b, atol=1e-10):
    """Asserts that two tensors, or two lists of them, agree in shape, type and value. A nan agrees with nothing."""
    if isinstance(a, torch.Tensor):
        a, b = [a], [b]
    assert len(a) == len(b)
    for x, y in zip(a, b):
        assert x.shape == y.shape and x.dtype == y.dtype, (x.shape, x.dtype, y.shape, y.dtype)
        gap = (x.double() - y.double()).abs().max().item()
        assert gap <= atol, f"{gap} apart"


def differs(a, b):
    return not torch.allclose(a, b, rtol=0, atol=1e-3)


def raises(error, words, call, *args, **kwargs):
    """Asserts that call(...) raises this error and that its message holds each of the words."""
    try:
        call(*args, **kwargs)
    except error as problem:
        assert all(str(word) in str(problem) for word in words), problem
    else:
        raise AssertionError(f"no {error.__name__}")


def noting(module, name):
    """Makes module.name note its arguments at each call, in the list that comes back."""
    calls, method = [], getattr(module, name)
    setattr(module, name, lambda *args, **kwargs: (calls.append(args), method(*args, **kwargs))[1])
    return calls


def packed(ours, get=lambda parameter: parameter):
    """get(parameter) for every parameter of our module, in the order and the packing of its counterpart in PyTorch."""
    if isinstance(ours, MultiHeadAttention):
        qkv = ours.w_q, ours.w_k, ours.w_v
        return [torch.cat([get(w.weight) for w in qkv]), torch.cat([get(w.bias) for w in qkv]),
                get(ours.w_o.weight), get(ours.w_o.bias)]
    if isinstance(ours, (EncoderLayer, DecoderLayer)):
        cross = isinstance(ours, DecoderLayer)
        parts = [ours.self_attn, *([ours.cross_attn] if cross else []), ours.feed_forward.w_1, ours.feed_forward.w_2,
                 ours.self_attn_residual.norm, *([ours.cross_attn_residual.norm] if cross else []),
                 ours.feed_forward_residual.norm]
    else:
        parts = list(ours.children())
    return [x for part in parts for x in packed(part, get)] if parts else [get(p) for p in ours.parameters()]


def twins(ours, theirs):
    """Our module and PyTorch's, in float64 and with the same random weights."""
    with torch.no_grad():
        for p in ours.double().parameters():
            p.normal_(std=0.5)
        for p, value in zip(theirs.double().parameters(), packed(ours)):
            p.copy_(value)
    same(list(theirs.parameters()), packed(ours))
    return ours, theirs


def same_with_gradients(ours, our_output, theirs, their_output, inputs):
    """Asserts equal outputs (lists of tensors) and equal gradients of all parameters and inputs."""
    same(our_output, their_output)
    direction = [torch.randn_like(x) for x in our_output]
    leaves = [*inputs, *ours.parameters()]
    gradient = dict(zip(leaves, torch.autograd.grad(our_output, leaves, direction)))
    same([gradient[x] for x in inputs] + packed(ours, gradient.get),
         list(torch.autograd.grad(their_output, [*inputs, *theirs.parameters()], direction)))


def small_model(vocab=11, **options):
    """A tiny encoder-decoder in float64 and evaluation mode."""
    sizes = dict(num_layers=2, d_model=8, num_heads=2, d_ff=16, max_len=12)
    return make_model(vocab, vocab, **{**sizes, **options}).double().eval()


def small_classifier(**options):
    sizes = dict(vocab_size=11, d_model=8, num_heads=2, num_layers=2, d_ff=16, num_classes=3, max_len=12)
    return TransformerClassifier(**{**sizes, **options}).double().eval()


def set_fused(model, fused):
    for module in model.modules():
        if hasattr(module, "fused"):
            module.fused = fused


# --- attention.py


def test_attention_equals_pytorch_for_random_shapes_and_masks():
    for trial in range(60):
        lead = [random.randint(1, 3) for _ in range(random.randint(0, 2))]
        query, key, d_k, d_v = (random.randint(1, 6) for _ in range(4))
        q, k, v = rand(*lead, query, d_k), rand(*lead, key, d_k), rand(*lead, key, d_v)
        shape = [random.choice([size, 1]) for size in (*lead, query)] + [key]  # axes of size 1 broadcast
        mask = None if trial % 3 == 0 else torch.rand(shape) < 0.5
        if mask is not None:
            mask[..., 0] = True  # PyTorch's answer to a blocked row depends on its version
        ours, theirs = attention(q, k, v, mask)[0], F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        direction = torch.randn_like(ours)
        same(ours, theirs)
        same(torch.autograd.grad(ours, (q, k, v), direction), torch.autograd.grad(theirs, (q, k, v), direction))


def test_attention_has_the_gradient_of_finite_differences_with_a_blocked_row():
    mask = torch.tensor([[True, False, True], [False, False, False], [False, True, True]])
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, mask),
                                    (rand(2, 3, 4), rand(2, 3, 4), rand(2, 3, 5)))


def test_multi_head_attention_equals_pytorch_in_its_three_uses():  # self, causal self, cross
    masks = "", "padding", "causal", "padding causal"
    for training, cross, masked, fused in itertools.product((True, False), (False, True), masks, (False, True)):
        rate = 0.0 if training else 0.3
        ours, theirs = twins(MultiHeadAttention(8, 2, rate), nn.MultiheadAttention(8, 2, rate, batch_first=True))
        ours.train(training)
        theirs.train(training)
        ours.attention.fused = fused
        x = rand(3, 4, 8)
        source = rand(3, 6, 8) if cross else x
        padding = torch.arange(source.size(1)) < torch.tensor([[source.size(1)], [2], [3]])
        causal = subsequent_mask(6)[:, :4, :source.size(1)]
        mask = {"": None, "padding": padding, "causal": causal, "padding causal": causal & padding[:, None]}[masked]
        output, weights = ours(x, source, source, mask)
        wanted, wanted_weights = theirs(x, source, source, average_attn_weights=False,  # there, True = drop
                                        key_padding_mask=~padding if "padding" in masked else None,
                                        attn_mask=~causal[0] if "causal" in masked else None)
        known = slice(1 if fused else 2)  # the fused kernel gives no weights
        same_with_gradients(ours, [output, weights][known], theirs, [wanted, wanted_weights][known],
                            [x, source] if cross else [x])


def test_multi_head_attention_equals_a_slow_loop_over_samples_heads_and_queries():
    # so a sample sees no other sample, and a query changes its own row only
    mha = MultiHeadAttention(6, 3).double().eval().requires_grad_(False)
    x, source = rand(2, 4, 6).detach(), rand(2, 5, 6).detach()
    mask = torch.rand(2, 4, 5) < 0.7
    output, weights = mha(x, source, source, mask)
    for i, t in itertools.product(range(2), range(4)):
        heads = []
        for head in range(3):
            cut = slice(2 * head, 2 * head + 2)  # this head's two numbers of the six
            q, k, v = mha.w_q(x[i, t])[cut], mha.w_k(source[i])[:, cut], mha.w_v(source[i])[:, cut]
            scores = [math.exp(q @ k[j] / math.sqrt(2)) if mask[i, t, j] else 0.0 for j in range(5)]
            w = [s / sum(scores) for s in scores]
            same(weights[i, head, t], torch.tensor(w, dtype=torch.float64))
            heads.append(sum(w[j] * v[j] for j in range(5)))
        same(output[i, t], mha.w_o(torch.cat(heads)))


def test_merge_undoes_split_and_a_view_right_after_the_transpose_raises():
    mha, x = MultiHeadAttention(8, 2), rand(3, 5, 8)
    heads = mha.split(x)
    assert heads.shape == (3, 2, 5, 4)
    same(heads[:, 1], x[:, :, 4:])  # a head holds its own slice of every token
    same(mha.merge(heads), x)
    raises(RuntimeError, ["view"], lambda: torch.zeros(3, 2, 5, 4).transpose(1, 2).view(3, 5, 8))


def test_an_expanded_or_transposed_input_works():
    mha = MultiHeadAttention(8, 2).double().eval()
    for x in (rand(1, 5, 8).expand(3, 5, 8), rand(5, 3, 8).transpose(0, 1), rand(8, 5, 3).permute(2, 1, 0)):
        for fused in (False, True):
            mha.attention.fused = fused
            same(mha(x, x, x)[0], mha(*[x.contiguous()] * 3)[0])


def test_d_model_that_does_not_divide_into_heads_is_an_error():
    for d_model, heads in ((10, 4), (8, 0), (8, -2), (0, 2), (-8, 2)):
        raises(ValueError, [f"({d_model})", f"({heads})"], MultiHeadAttention, d_model, heads)


def test_blocked_weights_are_exactly_zero_and_causal_means_no_later_key():
    weights = attention(rand(1, 5, 4), rand(1, 5, 4), rand(1, 5, 4), subsequent_mask(5))[1]
    for i, j in itertools.product(range(5), range(5)):
        assert (weights[0, i, j] > 0) == (j <= i) and (weights[0, i, j] == 0) == (j > i)
    assert subsequent_mask(1).tolist() == [[[True]]]  # row 0 sees itself
    assert subsequent_mask(3).tolist() == [[[True, False, False], [True, True, False], [True, True, True]]]


def test_padding_and_target_masks():
    ids = torch.tensor([[5, 0, 7], [0, 0, 4]])
    assert make_padding_mask(ids).tolist() == [[[[True, False, True]]], [[[False, False, True]]]]
    assert make_padding_mask(ids, pad_idx=7).tolist() == [[[[True, True, False]]], [[[True, True, True]]]]
    assert make_target_mask(ids).tolist() == [[[[True, False, False], [True, False, False], [True, False, True]]],
                                              [[[False, False, False], [False, False, False], [False, False, True]]]]


def test_a_query_that_may_look_nowhere_gets_zeros():
    mask = torch.ones(3, 4, 5, dtype=torch.bool)
    mask[0, 1] = mask[2] = False
    mha, x, source = MultiHeadAttention(8, 2).double().eval(), rand(3, 4, 8), rand(3, 5, 8)
    blocked = ~mask.any(-1)
    assert (attention(x, source, source, mask)[1][blocked] == 0).all()
    for fused in (False, True):
        mha.attention.fused = fused
        output = mha.attention(x, source, source, mask)[0]
        assert (output[blocked] == 0).all() and (output[~blocked] != 0).all()
        same(mha(x, source, source, mask)[0][blocked], mha.w_o.bias.expand(5, 8))  # w_o of zeros


def test_blocked_rows_give_no_nan_even_in_between():
    for fused, ignored in itertools.product((False, True), (False, True)):
        mha, x = MultiHeadAttention(8, 2).double(), rand(2, 3, 8)
        mha.attention.fused = fused
        with torch.autograd.set_detect_anomaly(True):
            output = mha(x, x, x, torch.tensor([[True, True, False], [False, False, False]]))[0]
            (output[:1] if ignored else output).square().sum().backward()  # a loss may ignore the blocked sample
        assert all(p.grad.isfinite().all() for p in (x, *mha.parameters()))


def test_every_float_type_stays_finite_and_keeps_its_type():
    mask = subsequent_mask(4).clone()
    mask[0, 2] = False
    for dtype, fused in itertools.product((torch.float16, torch.bfloat16, torch.float32, torch.float64), (False, True)):
        q = torch.full((1, 2, 4, 64), 60.0, dtype=dtype, requires_grad=True)  # q k = 230,400 overflows float16,
        k = (q * torch.tensor([1, -1, 1, -1])[:, None]).detach().to(dtype)   # divided by sqrt(64) it is 28,800
        sdpa = ScaledDotProductAttention(0.0)
        sdpa.fused = fused
        for m in (None, mask):
            output, weights = sdpa(q, k, k, m)
            output.sum().backward()
            assert output.dtype == dtype and output.isfinite().all() and q.grad.isfinite().all()
            assert fused or weights.dtype == dtype and set(weights.float().sum(-1).flatten().tolist()) <= {0.0, 1.0}
        mha, x = MultiHeadAttention(8, 2).to(dtype), torch.randn(2, 4, 8).to(dtype) * 30
        mha.attention.fused = fused
        output = mha(x, x, x, mask)[0]
        assert output.dtype == dtype and output.isfinite().all()


def test_masks_of_every_allowed_rank_block_what_they_say():
    batch, heads, query, key = 2, 2, 4, 5  # batch = heads: a (batch, key) mask must not mask heads
    mha, x, source = MultiHeadAttention(8, heads).double().eval(), rand(batch, query, 8), rand(batch, key, 8)
    shapes = [(batch, key), *itertools.product((batch, 1), (query, 1), (key,)),
              *itertools.product((batch, 1), (heads, 1), (query, 1), (key,))]
    for shape in shapes:
        mask = torch.rand(shape) < 0.6
        whole = mask[:, None, None] if mask.dim() == 2 else mask[:, None] if mask.dim() == 3 else mask
        assert (mha(x, source, source, mask)[1] > 0).equal(whole.expand(batch, heads, query, key))


def test_a_mask_that_does_not_fit_is_an_error_with_both_shapes():
    mha, x, source = MultiHeadAttention(8, 2), torch.randn(3, 4, 8), torch.randn(3, 5, 8)
    for shape in ((), (5,), (4, 5), (1, 5), (3, 1), (3, 4), (2, 4, 5), (3, 5, 4), (3, 4, 1), (3, 3, 4, 5), (3, 2, 4, 1),
                  (3, 2, 5, 5), (2, 2, 4, 5), (1, 3, 2, 4, 5)):
        raises(ValueError, [shape, (3, 2, 4, 5)], mha, x, source, source, torch.ones(shape, dtype=torch.bool))
    alone = torch.randn(1, 5, 8)  # a (len, len) mask with a batch of one: once turned 5 positions into 25
    raises(ValueError, [(5, 5)], mha, alone, alone, alone, subsequent_mask(5)[0])


def test_masks_of_zeros_and_ones_agree_in_every_type():
    mha, x = MultiHeadAttention(8, 2).double().eval(), rand(2, 3, 8)
    mask = torch.tensor([[True, True, False], [False, True, True]])
    wanted = mha(x, x, x, mask)[0]
    for dtype, fused in itertools.product((torch.uint8, torch.int64, torch.float16, torch.float32), (False, True)):
        mha.attention.fused = fused
        same(mha(x, x, x, mask.to(dtype))[0], wanted)
        same(attention(x, x, x, mask[:, None].to(dtype)), attention(x, x, x, mask[:, None]))


def test_an_additive_mask_is_refused():
    mha, x = MultiHeadAttention(8, 2), torch.randn(1, 2, 8)
    for value in (-math.inf, -1e9, 2.0, math.nan):
        mask = torch.tensor([[[0.0, value], [0.0, 0.0]]])
        for call in (mha, attention):
            raises(ValueError, ["True = may look", (1, 2, 2)], call, x, x, x, mask)


def test_returned_weights_are_those_before_dropout():
    mha, x = MultiHeadAttention(8, 2, dropout=0.5).double().train(), rand(3, 5, 8)
    output, weights = mha(x, x, x)
    same(weights.sum(-1), torch.ones(3, 2, 5, dtype=torch.float64))
    assert differs(output, mha(x, x, x)[0])  # while the output is from after it
    same(weights, mha.eval()(x, x, x)[1])


def test_a_dropout_of_one_lets_nothing_through_and_in_evaluation_everything():
    sdpa, x = ScaledDotProductAttention(1.0), rand(2, 3, 4)
    for fused in (False, True):
        sdpa.fused = fused
        assert (sdpa.train()(x, x, x)[0] == 0).all()
        same(sdpa.eval()(x, x, x)[0], attention(x, x, x)[0])


def test_stored_weights_are_detached_and_none_when_fused_which_is_read_at_every_call():
    mha, x = MultiHeadAttention(8, 2).double(), rand(3, 5, 8)
    for fused in (False, True, False):
        mha.attention.fused = fused
        weights = mha(x, x, x)[1]
        assert (weights is None) == (mha.attn is None) == fused
        assert fused or mha.attn.equal(weights) and weights.requires_grad and not mha.attn.requires_grad


def test_an_edit_of_attention_or_of_a_method_shows_its_effect():
    mha, x, formula = MultiHeadAttention(8, 2).double(), rand(3, 5, 8), attention_file.attention
    calls = [noting(mha, name) for name in ("split", "merge", "prepare_mask")] + [noting(attention_file, "attention")]
    try:
        mha(x, x, x, subsequent_mask(5))
    finally:
        attention_file.attention = formula
    assert [len(c) for c in calls] == [3, 1, 1, 1]


def test_dot_products_have_variance_d_k_and_saturate_the_softmax_unless_scaled():
    for d_k, largest in ((16, 0.61), (64, 0.82), (256, 0.93), (1024, 0.95)):
        q, k = torch.randn(100, 32, d_k), torch.randn(100, 32, d_k)
        assert abs((q * k).sum(-1).var() / d_k - 1) < 0.1
        unscaled = attention(q * math.sqrt(d_k), k, k)[1]  # times what it will be divided by
        assert abs(unscaled.amax(-1).mean() - largest) < 0.03
        assert 0.14 < attention(q, k, k)[1].amax(-1).mean() < 0.18


def test_shuffled_words_give_shuffled_results_without_positions_and_other_results_with_them():
    encoder, positions = Encoder(2, 8, 2, 16).double().eval(), PositionalEncoding(8).double().eval()
    x, order = rand(2, 6, 8), torch.tensor([3, 0, 5, 1, 4, 2])
    same(encoder(x[:, order]), encoder(x)[:, order])
    assert differs(encoder(positions(x[:, order])), encoder(positions(x))[:, order])


# --- transformer_layer.py


def test_embeddings_times_sqrt_d_model_are_as_large_as_the_positions():
    embed = Embeddings(64, 500)
    assert abs(embed.embedding.weight.std() - 64 ** -0.5) < 0.003
    ids = torch.tensor([[3, 9, 3]])
    same(embed(ids), embed.embedding.weight[ids] * 8)
    assert 0.5 < embed(torch.arange(500)[None]).std() / PositionalEncoding(64).table.std() < 2


def test_positions_equal_a_literal_loop_over_the_formula():
    for d_model in (1, 2, 5, 8):
        positions = PositionalEncoding(d_model, dropout=0.0)
        output = positions(torch.zeros(2, 5000, d_model))
        for pos in (0, 1, 2, 17, 4999):
            wanted = [(math.cos if i % 2 else math.sin)(pos / 10000 ** ((i - i % 2) / d_model)) for i in range(d_model)]
            same(output[:, pos], torch.tensor([wanted, wanted]), atol=1e-6)


def test_a_shift_of_positions_is_one_rotation_for_all_of_them():
    table = PositionalEncoding(6).table.double()
    sin, cos = table[:, 0::2], table[:, 1::2]
    for k in (1, 7, 300):
        turn = k / 10000 ** (torch.arange(0, 6, 2, dtype=torch.float64) / 6)
        same(sin[k:], sin[:-k] * turn.cos() + cos[:-k] * turn.sin(), atol=1e-6)
        same(cos[k:], cos[:-k] * turn.cos() - sin[:-k] * turn.sin(), atol=1e-6)


def test_positions_longer_than_the_table_are_an_error_with_both_numbers():
    for max_len, length in ((12, 13), (1, 5)):  # a table of one would broadcast
        raises(ValueError, [f" {length} ", f"({max_len})"], PositionalEncoding(8, max_len=max_len),
               torch.zeros(1, length, 8))
    assert PositionalEncoding(8, max_len=12)(torch.zeros(1, 12, 8)).shape == (1, 12, 8)


def test_layer_norm_equals_pytorch():
    for width, fused, eps in itertools.product((1, 2, 5, 16), (False, True), (1e-5, 1e-2)):
        ours, theirs = twins(LayerNorm(width, eps), nn.LayerNorm(width, eps))
        ours.fused = fused
        x = torch.randn(3, 4, width, dtype=torch.float64)
        x[1] = 7.0  # constant rows
        x[2] *= 1e-3
        x.requires_grad_()
        same_with_gradients(ours, [ours(x)], theirs, [theirs(x)], [x])


def test_layer_norm_of_300_is_finite_in_float16():
    for dtype, fused in itertools.product((torch.float16, torch.bfloat16, torch.float32, torch.float64), (False, True)):
        norm, signs = LayerNorm(4).to(dtype), torch.tensor([1, -1, 1, -1]).to(dtype)
        norm.fused = fused
        same(norm(300 * signs), signs, atol=1e-3)


def test_dropout_stands_after_the_sublayer_in_the_feed_forward_and_after_the_positions():
    x = rand(2, 3, 8)  # a dropout of 1 lets nothing through
    same(SublayerConnection(8, 1.0).double()(x, torch.sin), x)
    ff = PositionwiseFeedForward(8, 16, dropout=1.0).double()
    same(ff(x), ff.w_2.bias.expand_as(x))
    same(PositionalEncoding(8, dropout=1.0).double()(x), torch.zeros_like(x))


def test_encoder_and_decoder_layer_equal_pytorch():
    src, tgt, causal = rand(3, 6, 8), rand(3, 4, 8), subsequent_mask(4)
    src_padding, tgt_padding = (torch.arange(n) < torch.tensor([[n], [2], [3]]) for n in (6, 4))
    for norm_first, fused in itertools.product((True, False), (False, True)):
        sizes, order = (8, 2, 16, 0.0), dict(batch_first=True, norm_first=norm_first)
        ours, theirs = twins(EncoderLayer(*sizes, norm_first), nn.TransformerEncoderLayer(*sizes, **order))
        set_fused(ours, fused)
        same_with_gradients(ours, [ours(src, src_padding)], theirs, [theirs(src, None, ~src_padding)], [src])

        ours, theirs = twins(DecoderLayer(*sizes, norm_first), nn.TransformerDecoderLayer(*sizes, **order))
        set_fused(ours, fused)
        output = ours(tgt, src, src_padding, causal & tgt_padding[:, None])
        wanted = theirs(tgt, src, ~causal[0], None, ~tgt_padding, ~src_padding)
        same_with_gradients(ours, [output], theirs, [wanted], [tgt, src])


# --- model.py


def test_encoder_and_decoder_equal_pytorchs_transformer():
    src, tgt, causal = rand(3, 6, 8), rand(3, 4, 8), subsequent_mask(4)
    src_padding, tgt_padding = (torch.arange(n) < torch.tensor([[n], [2], [3]]) for n in (6, 4))
    for norm_first, fused in itertools.product((True, False), (False, True)):
        sizes, order, nothing = (8, 2, 16, 0.0), dict(batch_first=True, norm_first=norm_first), nn.Identity()
        closing = (lambda: nn.LayerNorm(8)) if norm_first else lambda: None  # theirs would close post-norm layers too
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(*sizes, **order), 2, closing(), False)
        decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(*sizes, **order), 2, closing())
        ours, theirs = twins(EncoderDecoder(Encoder(2, *sizes, norm_first), Decoder(2, *sizes, norm_first),
                                            nothing, nothing, nothing),
                             nn.Transformer(8, 2, batch_first=True, custom_encoder=encoder, custom_decoder=decoder))
        set_fused(ours, fused)
        output = ours(src, tgt, src_padding, causal & tgt_padding[:, None])
        wanted = theirs(src, tgt, None, ~causal[0], None, ~src_padding, ~tgt_padding, ~src_padding)
        same_with_gradients(ours, [output], theirs, [wanted], [src, tgt])


def test_pre_norm_has_one_closing_norm_and_post_norm_none():
    def norms(module):
        return sum(isinstance(m, LayerNorm) for m in module.modules())
    for norm_first in (True, False):
        model, classifier = small_model(norm_first=norm_first), small_classifier(norm_first=norm_first)
        assert norms(model.encoder) == norms(classifier.encoder) == 2 * 2 + norm_first
        assert norms(model.decoder) == 2 * 3 + norm_first and norms(model.generator) == 0


def test_every_dropout_has_the_rate_asked_for():
    model, classifier = small_model(dropout=0.37), small_classifier(dropout=0.37)
    for module, count in ((model, 2 + 2 * 4 + 2 * 6), (classifier, 1 + 2 * 4)):
        assert [m.p for m in module.modules() if isinstance(m, nn.Dropout)] == [0.37] * count
    model, ids = small_model(dropout=0.0).train(), torch.tensor([[4, 5, 6]])
    same(model(ids, ids, None, None), model(ids, ids, None, None))


def test_models_return_logits():
    model, classifier, ids = small_model(), small_classifier(), torch.tensor([[4, 5, 6], [7, 4, 5]])
    before = model(ids, ids, None, None), classifier(ids)[0]
    model.generator.weight.data *= 30  # the biases are zero, so logits grow in proportion; probabilities could not
    classifier.classify.weight.data *= 30
    same([model(ids, ids, None, None), classifier(ids)[0]], [30 * x for x in before], atol=1e-9)


def test_the_model_is_embedding_positions_encoder_decoder_and_generator():
    model, src, tgt = small_model(), torch.tensor([[4, 5, 6, 0]]), torch.tensor([[2, 7, 8]])
    src_mask, tgt_mask = make_padding_mask(src), make_target_mask(tgt)
    positions = PositionalEncoding(8).table[:4].double()
    memory = model.encoder(model.src_embed[0](src) + positions, src_mask)
    states = model.decoder(model.tgt_embed[0](tgt) + positions[:3], memory, src_mask, tgt_mask)
    same(model(src, tgt, src_mask, tgt_mask), model.generator(states))
    same(model.decode(model.encode(src, src_mask), src_mask, tgt, tgt_mask), states)


def test_the_classifier_reads_the_first_token_and_returns_each_layers_weights():
    model, ids = small_classifier(), torch.tensor([[4, 5, 6, 0], [7, 8, 0, 0]])
    logits, weights = model(ids, make_padding_mask(ids))
    first = model.encoder(model.embed(ids), make_padding_mask(ids))[:, 0]
    same(logits, first @ model.classify.weight.T + model.classify.bias)
    assert logits.shape == (2, 3) and [w.shape for w in weights] == [(2, 2, 4, 4)] * 2 and differs(*weights)
    assert all((w[0, ..., 3] == 0).all() and (w[1, ..., 2:] == 0).all() for w in weights)
    set_fused(model, True)
    same(model(ids, make_padding_mask(ids))[0], logits)
    assert model(ids)[1] == [None, None]


def test_the_result_of_a_text_does_not_depend_on_its_batch_mates_or_on_more_padding():
    for norm_first in (True, False):
        classifier, model = small_classifier(norm_first=norm_first), small_model(norm_first=norm_first)

        def results(src, tgt):
            masks = make_padding_mask(src), make_target_mask(tgt)
            return classifier(src, masks[0])[0], model(src, tgt, *masks)
        src, tgt = torch.tensor([[4, 5, 6, 0], [7, 8, 9, 10]]), torch.tensor([[2, 7, 8], [2, 4, 0]])
        both, alone = results(src, tgt), results(src[:1, :3], tgt[:1])
        same([both[0][:1], both[1][:1]], list(alone))
        longer = results(F.pad(src, (0, 5)), F.pad(tgt, (0, 4)))
        same([longer[0], longer[1][:, :3]], list(both))


def test_tokens_under_source_padding_change_nothing_and_get_no_weight():
    model, tgt = small_model(), torch.tensor([[2, 4, 5], [2, 6, 0]])
    src = torch.tensor([[4, 5, 6, 0, 0], [7, 0, 0, 0, 0]])
    mask = make_padding_mask(src)
    before = model(src, tgt, mask, make_target_mask(tgt))
    for layer in model.decoder.layers:
        assert layer.cross_attn.attn.shape == (2, 2, 3, 5)
        assert (layer.cross_attn.attn > 0).equal(mask.expand(2, 2, 3, 5))
    same(model(src.where(mask[:, 0, 0], torch.tensor(9)), tgt, mask, make_target_mask(tgt)), before)


def test_the_decoder_cannot_see_the_future():
    for norm_first, t in itertools.product((True, False), range(1, 5)):
        model, src, tgt = small_model(norm_first=norm_first), torch.tensor([[4, 5, 6]]), torch.tensor([[2, 4, 5, 6, 7]])
        changed = tgt.clone()
        changed[0, t:] = 9
        a, b = (model(src, x, make_padding_mask(src), make_target_mask(x)) for x in (tgt, changed))
        same(a[:, :t], b[:, :t])
        assert differs(a[:, t], b[:, t])


def test_fresh_weights():
    sizes = dict(d_model=32, num_heads=4, d_ff=64)
    for model in (small_model(200, **sizes), small_classifier(vocab_size=200, **sizes)):
        for m in model.modules():
            if isinstance(m, nn.Linear):  # Xavier: uniform up to sqrt(6 / (in + out)); its deviation is that / sqrt(3)
                bound = math.sqrt(6 / sum(m.weight.shape))
                assert m.weight.abs().max() <= bound and abs(m.weight.std() * math.sqrt(3) / bound - 1) < 0.15
                assert (m.bias == 0).all()
            elif isinstance(m, nn.Embedding):
                assert abs(m.weight.std() * math.sqrt(32) - 1) < 0.05
        matrices = [p for p in model.parameters() if p.dim() > 1]  # no two start equal or share their numbers
        assert all(differs(a, b) for a, b in itertools.combinations(matrices, 2) if a.shape == b.shape)
        named = list(model.named_parameters(remove_duplicate=False))
        assert len({p.data_ptr() for _, p in named}) == len(named)


def test_weights_of_a_model_with_a_shorter_table_load_into_one_with_a_longer():
    ids = torch.tensor([[4, 5, 6]])
    for make in (small_model, small_classifier):
        short, long = make(max_len=5), make(max_len=12)
        assert not [name for name in short.state_dict() if "table" in name]
        long.load_state_dict(short.state_dict())
        a, b = (m(ids)[0] if make is small_classifier else m(ids, ids, None, None) for m in (short, long))
        same(a, b)


def test_whole_models_run_in_every_float_type_with_blocked_rows():
    ids = torch.tensor([[4, 5, 6, 0], [0, 0, 0, 0]])  # the second text is padding alone
    for dtype, fused in itertools.product((torch.float16, torch.bfloat16, torch.float32, torch.float64), (False, True)):
        for model in (small_model(num_layers=1).to(dtype), small_classifier(num_layers=1).to(dtype)):
            set_fused(model, fused)
            masks = make_padding_mask(ids), make_target_mask(ids)
            with torch.autograd.set_detect_anomaly(True):
                logits = model(ids, ids, *masks) if isinstance(model, EncoderDecoder) else model(ids, masks[0])[0]
                logits.square().mean().backward()
            assert logits.dtype == dtype and logits.isfinite().all()
            assert all(p.grad.isfinite().all() for p in model.parameters())


def test_every_tensor_follows_the_device_of_its_input():
    ids, meta = torch.tensor([[4, 5, 0], [6, 0, 0]]), torch.ones(2, 3, dtype=torch.long, device="meta")
    masks = make_padding_mask(meta), make_target_mask(meta)  # "meta" is a device without numbers
    logits = small_model().to("meta")(meta, meta, *masks), small_classifier().to("meta")(meta, masks[0])[0]
    assert all(x.device.type == "meta" for x in (*masks, *logits, subsequent_mask(3, device="meta")))
    model = small_model()
    wanted = make_target_mask(ids), model(ids, ids, None, make_target_mask(ids)), greedy_decode(model, ids, 4)
    with torch.device("meta"):  # now a tensor made without a word about its device would not mix with the others
        found = make_target_mask(ids), model(ids, ids, None, make_target_mask(ids)), greedy_decode(model, ids, 4)
    same(found, wanted)


def slow_greedy(model, src, max_len, bos=BOS, eos=EOS, pad=PAD):
    """What greedy_decode must return, row by row and word by word, with all of the prefix at every step."""
    rows = []
    for row in src:
        words = []
        while len(words) < max_len and eos not in words:
            tgt = torch.tensor([[bos, *words]])
            logits = model(row[None], tgt, make_padding_mask(row[None], pad), subsequent_mask(tgt.size(1)))
            logits = logits[0, -1].tolist()
            words.append(max(set(range(len(logits))) - {pad, bos}, key=logits.__getitem__))
        rows.append(words)
    length = max(len(words) for words in rows)
    return torch.tensor([words + [pad] * (length - len(words)) for words in rows])


SRC = torch.tensor([[4, 5, 6, 7, 8], [9, 4, 0, 0, 0], [10, 9, 8, 0, 0], [0, 0, 0, 0, 0], [6, 6, 7, 4, 0]])


def eager_model(seed, eos=EOS, **options):
    """A model whose source decides when it ends, and that would like best to say PAD or BOS."""
    torch.manual_seed(seed)
    model = small_model(**options)
    with torch.no_grad():
        for layer in model.decoder.layers:
            for w in (layer.cross_attn.w_q, layer.cross_attn.w_v, layer.cross_attn.w_o):
                w.weight *= 2
        model.generator.weight *= 3
        model.generator.bias[:4], model.generator.bias[eos] = 4.0, 2.0
    return model


def test_greedy_decode_equals_a_slow_loop_over_rows_with_and_without_cache():
    steps = []  # at how many different steps a batch's rows ended
    for norm_first, seed in itertools.product((True, False), (4, 6)):
        model = eager_model(seed, norm_first=norm_first)
        wanted = slow_greedy(model, SRC, 8)
        for use_cache in (True, False):
            decoded = noting(model, "decode")
            same(greedy_decode(model, SRC, 8, use_cache=use_cache), wanted)
            assert len(decoded) == wanted.size(1)  # it stops with the last row
        steps.append(len(set((wanted != PAD).sum(1).tolist())))
    assert max(steps) >= 3, f"no batch's rows ended at three different steps: {steps}; choose other seeds"


def test_greedy_decode_takes_other_special_ids():
    src = torch.where(SRC == PAD, 9, torch.where(SRC == 9, PAD, SRC))
    model = eager_model(0, eos=8)
    ids = dict(bos=5, eos=8, pad=9)
    same(greedy_decode(model, src, 4, **ids), slow_greedy(model, src, 4, **ids))


def test_greedy_decode_encodes_once_and_decodes_until_all_rows_end_or_max_len():
    for word, steps in ((EOS, 1), (5, 9)):
        model = small_model()
        model.generator.bias.data[word] = 1e4
        encoded, decoded = noting(model, "encode"), noting(model, "decode")
        assert greedy_decode(model, SRC, 9).tolist() == [[word] * steps] * len(SRC)
        assert len(encoded) == 1 and len(decoded) == steps


def test_decode_feeds_on_only_the_positions_that_the_cache_does_not_hold():
    model, tgt, cache = small_model(), torch.randint(4, 11, (5, 5)), {}
    memory, src_mask = model.encode(SRC, make_padding_mask(SRC)), make_padding_mask(SRC)
    wanted = model.decode(memory, src_mask, tgt, make_target_mask(tgt))
    source_keys = noting(model.decoder.layers[1].cross_attn.w_k, "forward")
    for start, end in ((0, 1), (1, 2), (2, 5)):
        states = model.decode(memory, src_mask, tgt[:, :end], make_target_mask(tgt[:, :end]), cache)
        same(states, wanted[:, start:end])
    assert len(source_keys) == 1  # made at the first step, reused at the others


def test_greedy_decode_runs_in_evaluation_mode_without_a_graph_and_restores_every_mode():
    model = eager_model(2, dropout=0.5)
    wanted = greedy_decode(model, SRC, 8)
    model.train()
    model.encoder.layers[1].eval()  # somebody's frozen layer
    modes = [m.training for m in model.modules()]
    seen = []
    hook = model.generator.register_forward_hook(lambda m, args, out: seen.append((m.training, out.requires_grad)))
    same(greedy_decode(model, SRC, 8), wanted)
    assert set(seen) == {(False, False)} and torch.is_grad_enabled()
    assert [m.training for m in model.modules()] == modes
    hook.remove()
    model.generator = nn.Linear(7, 7)  # fails at the first step
    raises(RuntimeError, [], greedy_decode, model, SRC, 8)
    assert [m.training for m in model.modules()][:-1] == modes[:-1] and torch.is_grad_enabled()


def test_greedy_decode_respects_max_len_and_the_table():
    model = small_model(max_len=7)
    model.generator.bias.data[UNK] = 1e4  # it never ends by itself
    for max_len, use_cache in itertools.product((1, 3, 7), (True, False)):
        fed = noting(model.decoder, "forward")
        assert greedy_decode(model, SRC, max_len, use_cache=use_cache).shape == (5, max_len)
        assert [x.size(1) for x, *_ in fed] == ([1] * max_len if use_cache else list(range(1, max_len + 1)))
    encoded = noting(model, "encode")
    raises(ValueError, ["(8)", "(7)"], greedy_decode, model, SRC, 8)
    assert not encoded
    raises(ValueError, [" 9 ", "(7)"], greedy_decode, model, torch.full((1, 9), 5), 3)


# --- all files


def test_every_name_of_the_two_articles_is_found_by_grep():
    names = """attention ScaledDotProductAttention MultiHeadAttention MultiHeadedAttention PositionalEncoding LayerNorm
        SublayerConnection PositionwiseFeedForward Embeddings TransformerEncoderLayer EncoderLayer DecoderLayer Encoder
        Decoder TransformerClassifier EncoderDecoder make_model make_padding_mask subsequent_mask generator""".split()
    names += ["set_seed"] if "train" in SOURCES else []
    assert [name for name in names if not re.search(rf"\b{name}\b", "".join(SOURCES.values()))] == []


def test_a_file_imports_only_from_files_to_its_left():
    for i, (name, text) in enumerate(SOURCES.items()):
        imported = re.findall(r"^\s*(?:from|import) (\w+)", text, flags=re.MULTILINE)
        assert not set(imported) & {*list(SOURCES)[i:], "visualize", "test_all", "numpy", "matplotlib"}, name


def test_no_check_is_an_assert_which_python_O_takes_out():
    assert [name for name, text in SOURCES.items() if re.search(r"^\s*assert\b", text, flags=re.MULTILINE)] == []


def test_importing_needs_neither_numpy_nor_matplotlib_and_does_nothing():
    code = f"""
import sys
sys.modules["numpy"] = sys.modules["matplotlib"] = None  # whoever imports them now gets an ImportError
import {", ".join(SOURCES)}, torch
print(torch.cuda.is_initialized())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stdout + done.stderr


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", metavar="WORD", default="", help="only the tests whose name contains WORD (default: all)")
    args = parser.parse_args(argv)
    if not __debug__:
        parser.exit(2, "test_all.py: error: python -O takes out the asserts that the tests are made of\n")
    tests = [(name, test) for name, test in globals().items() if name.startswith("test_") and args.k in name]
    if not tests:
        parser.error(f"no test has {args.k!r} in its name")
    sys.stdout.reconfigure(errors="backslashreplace")
    warnings.simplefilter("error")
    torch.set_num_threads(1)

    failed = 0
    for name, test in tests:
        setup_function()
        try:
            test()
        except (Exception, SystemExit):  # SystemExit: a main() under test may end in parser.error
            failed += 1
            print("FAIL", name)
            traceback.print_exc(file=sys.stdout)
        else:
            print("ok  ", name, flush=True)
    print(f"{len(tests) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
