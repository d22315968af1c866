"""
Every property this project promises, as tests. The order is that of the files.

    python test_all.py            all of them; the last line is "N passed, N failed", the exit status 1 on a failure
    python test_all.py -k mask    those whose name contains "mask"
    pytest test_all.py            the same tests, for those who have pytest

The reference is PyTorch with the same weights: nn.MultiheadAttention, nn.LayerNorm, nn.Transformer. Values and
gradients agree to 1e-10 in float64. Where there is no reference, a test spells the thing out in slow loops.
"""
import argparse
import contextlib
import functools
import io
import itertools
import math
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import attention as attention_file
import train
import translate
from attention import (MultiHeadAttention, ScaledDotProductAttention, attention, make_padding_mask, make_target_mask,
                       subsequent_mask)
from model import BOS, EOS, PAD, UNK, Decoder, Encoder, EncoderDecoder, TransformerClassifier, greedy_decode, make_model
from transformer_layer import (DecoderLayer, Embeddings, EncoderLayer, LayerNorm, PositionalEncoding,
                               PositionwiseFeedForward, SublayerConnection)

HERE = Path(__file__).resolve().parent
SOURCES = {name: (HERE / f"{name}.py").read_text("utf-8")
           for name in ("attention", "transformer_layer", "model", "train", "translate")}  # the order of import


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
    """Asserts that call(...) raises this error and that its message holds the words, a string or several."""
    words = [words] if isinstance(words, str) else words
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


@contextlib.contextmanager
def swapped(owner, name, value):
    """Inside: owner.name is value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def working_directory():
    """A fresh directory to write in, left and removed afterwards."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        try:
            yield Path(directory)
        finally:
            os.chdir(before)


def call(main, *argv, stdin=b""):
    """main([...]) as a user would call it -> exit status, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    source = io.TextIOWrapper(io.BytesIO(stdin))
    before, sys.stdin = sys.stdin, source
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = main(list(argv))
            except SystemExit as error:
                status = error.code
    finally:
        sys.stdin = before
    return status, out.getvalue(), err.getvalue()


def run_train(*argv):
    """A run of train.py that must end well -> what it printed."""
    status, out, err = call(train.main, "--device", "cpu", *argv)
    assert status == 0, err
    return out


@functools.lru_cache(maxsize=None)
def trained_toys():
    """Both toys trained by `python train.py` -> {name: bytes of the checkpoint}, what was printed."""
    with working_directory() as directory:
        out = run_train()
        return {name: (directory / "checkpoints" / f"{name}.pt").read_bytes() for name in ("sentiment", "copy")}, out


@contextlib.contextmanager
def with_toys():
    """A working directory with the trained toys in checkpoints/."""
    toys, _ = trained_toys()
    with working_directory() as directory:
        (directory / "checkpoints").mkdir()
        for name, data in toys.items():
            (directory / "checkpoints" / f"{name}.pt").write_bytes(data)
        yield directory


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


def printed(script):
    """What `python script` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(HERE / script), run_name="__main__")
    return out.getvalue()


def test_attention_py_works_an_example_that_paper_and_pencil_repeat():
    rows = [line.split() for line in printed("attention.py").splitlines() if line.startswith("  ")]
    numbers = [[float(x) for x in row] for row in rows]
    q, k, v, scores, scaled, masked, weights, output = (numbers[3 * i:3 * i + 3] for i in range(8))
    for i, j in itertools.product(range(3), range(3)):
        assert scores[i][j] == sum(a * b for a, b in zip(q[i], k[j])) and scaled[i][j] == scores[i][j] / 2
        assert masked[i][j] == (scaled[i][j] if j <= i else -math.inf)
        assert abs(weights[i][j] - math.exp(masked[i][j]) / sum(map(math.exp, masked[i]))) < 1e-4
    for i, j in itertools.product(range(3), range(2)):
        assert abs(output[i][j] - sum(weights[i][m] * v[m][j] for m in range(3))) < 2e-4


# --- transformer_layer.py


def test_transformer_layer_py_follows_a_vector_through_both_norm_orders():
    lines = printed("transformer_layer.py").splitlines()
    first, last = lines[2].split(), lines[8].split()
    assert lines[1].split().count("cosine") == 2 and first == first[:5] * 2 and first[4] == "1.00"
    assert last[-5] == "norm" and float(last[-4]) == 0 and last[-3:-1] == ["1.00", "8.00"]  # post-norm's end
    assert all(float(line.split()[-1]) > 0.85 for line in (lines[4], lines[8]))  # the residual keeps x


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


def test_model_py_prints_the_shapes_on_the_way_and_counts_every_parameter():
    for block in printed("model.py").split("EncoderDecoder"):
        total, *parts = (int(number.replace(",", "")) for number in re.findall(r"[\d,]+(?= parameters|$)", block, re.M))
        assert total == sum(parts)
        assert "(2, 7, 32) and (2, 4, 7, 7)" in block
    assert "(2, 5, 32) and (2, 4, 5, 7)" in block and "(2, 5, 20)" in block


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


# --- train.py


PAIRS = "".join(f"{a} {b}\t{b.upper()} {a.upper()}\n" for a in "abcde" for b in "vwxyz")
SMALL = "--layers", "1", "--d-model", "16", "--heads", "2", "--d-ff", "16"


def test_tokens_are_words_signs_and_cjk_characters():
    for text, tokens in [("It's a well-known FILM!", ["it's", "a", "well-known", "film", "!"]),
                         ("don’t", ["don't"]),
                         ("a boy 's hat -", ["a", "boy", "'s", "hat", "-"]),
                         ("'quoted'", ["'", "quoted", "'"]),
                         ("我爱ABC电影。", ["我", "爱", "abc", "电", "影", "。"]),
                         ("カタカナ 한글", ["カ", "タ", "カ", "ナ", "한", "글"]),
                         ("cafe\u0301", ["café"]),
                         ("good\u3000film \U0001f600", ["good", "film", "\U0001f600"]),
                         (" \t\n\u3000", [])]:
        assert train.tokenize(text) == tokens, text


def test_tokens_join_with_spaces_but_for_cjk():
    assert train.join_tokens(["a", "film", "我", "爱", "电", "影"]) == "a film 我爱电影"


def test_vocab_keeps_frequent_tokens_and_calls_the_others_unknown():
    vocab = train.Vocab(train.make_vocab([["b", "a", "b"], ["a", "b", "c"]], min_count=2))
    assert vocab.tokens == ["<pad>", "<unk>", "<bos>", "<eos>", "b", "a"]
    assert vocab.encode(["a", "b", "c"]) == [5, 4, UNK]
    assert vocab.decode([5, 4, UNK, EOS, PAD]) == ["a", "b", "<unk>"]


def test_special_tokens_have_the_ids_of_the_constants():
    assert [train.SPECIAL[i] for i in (PAD, UNK, BOS, EOS)] == ["<pad>", "<unk>", "<bos>", "<eos>"]


def test_data_files_are_read_as_pairs():
    columns = train.Sentiment.columns
    for name, data in [("plain.tsv", b"good film\tyes\nbad \"film\tno\n"),
                       ("bom-crlf.tsv", b"\xef\xbb\xbfgood film\tyes\r\n\r\nbad \"film\tno\r\n"),
                       ("header.tsv", b"sentence\tlabel\ngood film\tyes\nbad \"film\tno"),
                       ("holes.tsv", b"good film\tyes\n\tno\nbad \"film\tno\n \xe3\x80\x80\tno\nbad film\t\n"),
                       ("some.csv", b'Label , Review,id\r\nyes,good film,1\r\nno,"bad ""film",2\r\n')]:
        with working_directory(), contextlib.redirect_stdout(io.StringIO()):
            Path(name).write_bytes(data)
            assert train.read_pairs(name, columns)[0] == [("good film", "yes"), ('bad "film', "no")], name


def test_a_field_of_a_csv_may_hold_line_breaks():
    with working_directory():
        Path("some.csv").write_text('text,label\n"one\ntwo",yes\n', encoding="utf-8")
        assert train.read_pairs("some.csv", train.Sentiment.columns)[0] == [("one\ntwo", "yes")]


def test_bad_data_files_are_one_line_with_the_place():
    for name, data, message in [("empty.tsv", b"", "no line with text"),
                                ("blank.tsv", b" \n\t\n", "no line with text"),
                                ("one-column.tsv", b"a\tyes\nb\n", "line 2: 0 tabs"),
                                ("three.tsv", b"a\tb\tyes\n", "line 1: 2 tabs"),
                                ("latin.tsv", b"caf\xe9\tyes\n", "not UTF-8"),
                                ("packed.tsv", b"\x1f\x8b\x08\x00", "not UTF-8"),
                                ("no-header.csv", b"good film,yes\n", "no column text or review or sentence"),
                                ("no-label.csv", b"text,stars\na,5\n", "no column label; it reads: text, stars"),
                                ("short.csv", b"text,label\na,yes\nb\n", "line 3: 1 columns"),
                                ("empty.csv", b"", "no column")]:
        with working_directory():
            Path(name).write_bytes(data)
            raises(ValueError, message, train.read_pairs, name, train.Sentiment.columns)
            raises(ValueError, name, train.read_pairs, name, train.Sentiment.columns)


def test_a_seeded_tenth_is_held_out():
    pairs = [(str(i), "x") for i in range(50)]
    rest, held = train.hold_out(pairs, seed=1)
    assert len(held) == 5 and sorted(rest + held) == sorted(pairs)
    assert train.hold_out(pairs, seed=1) == (rest, held) != train.hold_out(pairs, seed=2)
    assert len(train.hold_out(pairs[:2], seed=1)[1]) == 1


def test_toy_remarks_negate_and_hold_out_whole_sentences():
    training, held = train.toy_remarks()
    labels = dict(training + held)
    assert labels["the film was not great"] == labels["the film was bad"] == "negative"
    assert labels["the film was not bad"] == labels["the film was great"] == "positive"
    assert not set(training) & set(held) and len(held) > 200


def test_copy_batches_are_what_they_should_be():
    src, tgt = train.Copy.read(None).draw(500, torch.Generator().manual_seed(0))
    for source, target in zip(src.tolist(), tgt.tolist()):
        symbols = source[:source.index(EOS)]
        assert 1 <= len(symbols) <= 10 and all(4 <= symbol <= 13 for symbol in symbols)
        assert source == symbols + [EOS] + [PAD] * (10 - len(symbols))
        assert target == [BOS] + source


def test_copy_never_trains_on_what_it_is_judged_by():
    task = train.Copy.read(None)

    def held_out(src):
        rows = [[i - 3 for i in row if i > EOS] for row in src.tolist()]
        return [len(row) > 1 and sum(row) % 10 == 0 for row in rows]
    assert all(held_out(task.valid[0]))
    assert not any(held_out(task.draw(5000, torch.Generator().manual_seed(1))[0]))


def test_the_label_is_the_input_one_step_later():
    given, wanted = train.shift(torch.tensor([[BOS, 7, 8, 9, EOS]]))
    assert given.tolist() == [[BOS, 7, 8, 9]] and wanted.tolist() == [[7, 8, 9, EOS]]


def test_padding_is_in_neither_loss_nor_accuracy():
    torch.manual_seed(0)
    task = train.Copy.read(None)
    model = make_model(14, 14, num_layers=1, d_model=16, num_heads=2, d_ff=16, max_len=20)
    src, tgt = task.draw(8, torch.Generator().manual_seed(0))
    longer = [F.pad(ids, (0, 5), value=PAD) for ids in (src, tgt)]
    a, b = (train.evaluate_batches(task, model, [batch], "cpu") for batch in ([src, tgt], longer))
    assert abs(a["loss"] - b["loss"]) < 1e-6 and a["accuracy"] == b["accuracy"]


def test_a_batch_without_targets_gives_no_nan():
    logits = torch.randn(3, 5, requires_grad=True)
    loss = train.target_loss(logits, torch.full((3,), -100), label_smoothing=0.1)
    loss.backward()
    assert loss.item() == 0 and logits.grad.abs().sum() == 0


def test_loss_is_pytorchs_mean_over_the_real_targets():
    logits, wanted = torch.randn(6, 5), torch.tensor([0, 3, -100, 4, -100, 1])
    for smoothing in 0.0, 0.1:
        assert torch.allclose(train.target_loss(logits, wanted, smoothing),
                              F.cross_entropy(logits, wanted, label_smoothing=smoothing))


def test_ranks_of_unequal_shares_make_the_gradient_of_the_whole_batch():
    logits, wanted = rand(5, 7), torch.tensor([1, -100, 3, 0, 6])
    whole = train.target_loss(logits, wanted, 0.1)
    slices = [slice(rank, None, 2) for rank in range(2)]  # of 3 and 1 targets
    losses = [train.target_loss(logits[rows], wanted[rows], 0.1) for rows in slices]
    shared = torch.tensor([3 * losses[0].item() + losses[1].item(), 4.0, 1.0])  # what all_reduce adds up
    with swapped(torch.distributed, "all_reduce", lambda sums: sums.copy_(shared)):
        shares = [train.share(loss, wanted[rows], False, 2) for loss, rows in zip(losses, slices)]
    same(torch.autograd.grad(sum(loss for loss, _, _ in shares) / 2, logits), torch.autograd.grad(whole, logits))
    assert all(abs(mean - whole.item()) < 1e-6 and stop for _, mean, stop in shares)  # one that was told to stop stops all


def test_length_batches_hold_each_example_once_and_little_padding():
    lengths = torch.randint(1, 40, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    examples = [([i] * n, [i] * (n + 1)) for i, n in enumerate(lengths)]
    plain = train.length_batches(examples, 300, in_tokens=True)
    mixed = train.length_batches(examples, 300, torch.Generator().manual_seed(1), in_tokens=True)
    assert len(plain) == len(mixed) and plain != mixed
    for batches in plain, mixed:
        assert sorted(example for batch in batches for example in batch) == sorted(examples)
        assert all(len(batch) * max(len(tgt) for _, tgt in batch) <= 300 for batch in batches)
        padded = sum(len(batch) * max(len(src) for src, _ in batch) for batch in batches)
        assert padded < 1.1 * sum(lengths)
    assert [len(batch) for batch in train.length_batches(examples, 64)] == [64] * 7 + [52]


def test_the_rate_warms_up_and_falls_to_zero():
    rate = train.warm_up_and_decay(steps=100, warmup=20)
    assert rate(0) == 1 / 20 and rate(19) == 1 and rate(60) == 0.5 and rate(100) == 0
    assert max(map(rate, range(101))) == 1
    assert train.warm_up_and_decay(steps=10, warmup=0)(0) == 1


def test_a_device_that_is_not_there_is_one_clear_line():
    for name in "nonsense", "cuda:99", "meta", "cpu:x":
        raises(ValueError, "try --device cpu", train.pick_device, name)


def test_the_device_cpu_never_touches_cuda():
    assert train.pick_device("cpu") == torch.device("cpu")
    assert not torch.cuda.is_initialized()


def test_both_toys_reach_all_of_their_held_out_data():
    _, out = trained_toys()
    assert "sentiment: accuracy 100.0% on held-out data" in out
    assert "copy: exact match 100.0% on held-out data" in out


def test_a_finished_run_leaves_one_file_per_task():
    with working_directory() as directory:
        run_train("--task", "copy", "--steps", "3", *SMALL)
        assert [path.name for path in (directory / "checkpoints").iterdir()] == ["copy.pt"]


def test_a_checkpoint_is_a_plain_dict_and_rebuilds_its_model():
    with with_toys():
        for name in "sentiment", "copy":
            plain = torch.load(f"checkpoints/{name}.pt", weights_only=True)
            assert set(plain) == {"task", "config", "vocab", "seed", "step", "history", "metrics", "model"}
            task, model, checkpoint = train.load_checkpoint(Path(f"checkpoints/{name}.pt"), "cpu")
            assert not model.training and all(torch.equal(a, b) for a, b in
                                              zip(model.state_dict().values(), plain["model"].values()))
            if name == "sentiment":
                task = train.Sentiment.read(argparse.Namespace(data=None))
            metrics = task.evaluate(model, "cpu")
            assert abs(metrics["loss"] - checkpoint["metrics"]["loss"]) < 1e-6


def test_the_best_weights_are_kept_not_the_last():
    losses = iter([3.0, 1.0, 2.0])
    with working_directory(), swapped(train.Copy, "evaluate", lambda *a: {"loss": next(losses), "accuracy": 0.5}):
        run_train("--task", "copy", "--steps", "150", "--batch-size", "1", *SMALL)
        checkpoint = torch.load("checkpoints/copy.pt", weights_only=True)
    assert checkpoint["step"] == 100 and checkpoint["metrics"]["loss"] == 1.0
    assert [entry["loss"] for entry in checkpoint["history"]] == [3.0, 1.0, 2.0]


def test_the_same_seed_gives_the_same_weights():
    def weights(seed):
        with working_directory():
            run_train("--task", "copy", "--steps", "4", "--dropout", "0.1", "--seed", seed, *SMALL)
            return torch.load("checkpoints/copy.pt", weights_only=True)["model"]
    first, again, other = weights("1"), weights("1"), weights("2")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def interrupted_at(step, number):
    """A Progress whose update sends this process a signal at that step."""
    class Interrupting(train.Progress):
        def update(self, now, *rest):
            super().update(now, *rest)
            if now == step:
                os.kill(os.getpid(), number)
    return Interrupting


def test_a_resumed_run_equals_one_that_was_never_interrupted():
    for task in ["--task", "copy", "--steps", "70"], ["--task", "sentiment", "--epochs", "2", "--batch-size", "64"], \
            ["--task", "translate", "--data", "pairs.tsv", "--epochs", "3", "--batch-size", "12"]:
        with working_directory():
            Path("pairs.tsv").write_text(PAIRS, encoding="utf-8")
            options = [*task, "--dropout", "0.2", *SMALL]
            run_train(*options, "--checkpoint", "whole.pt")
            for step, number in [(5, signal.SIGINT), (17, signal.SIGTERM)]:
                with swapped(train, "Progress", interrupted_at(step, number)):
                    more = ["--resume"] if step > 5 else options
                    status, out, _ = call(train.main, "--device", "cpu", *task[:2], *more, "--checkpoint", "parts.pt")
                assert status == 128 + number and f"stopped at step {step + 1}" in out  # a step begun is finished
                assert Path("parts.resume.pt").exists()
            run_train(*task[:2], "--resume", "--checkpoint", "parts.pt")
            whole, parts = (torch.load(path, weights_only=True) for path in ("whole.pt", "parts.pt"))
            assert whole.pop("model").keys() == parts["model"].keys()
            whole = torch.load("whole.pt", weights_only=True)
            assert all(torch.equal(whole["model"][name], parts["model"][name]) for name in whole["model"])
            assert [entry["loss"] for entry in whole["history"]] == [entry["loss"] for entry in parts["history"]]
            assert not Path("parts.resume.pt").exists()


def test_resume_refuses_other_sizes_and_other_data():
    with working_directory():
        Path("pairs.tsv").write_text(PAIRS, encoding="utf-8")
        options = ["--task", "translate", "--data", "pairs.tsv", "--batch-size", "50", *SMALL]
        with swapped(train, "Progress", interrupted_at(2, signal.SIGINT)):
            call(train.main, "--device", "cpu", *options)
        status, _, err = call(train.main, "--device", "cpu", "--task", "translate", "--resume", "--d-model", "32")
        assert status == 2 and "--d-model 32: the interrupted run has 16" in err
        Path("pairs.tsv").write_text(PAIRS + "a\tb\n", encoding="utf-8")
        status, _, err = call(train.main, "--device", "cpu", "--task", "translate", "--resume")
        assert status == 2 and "pairs.tsv has changed" in err


def test_a_loss_that_is_nan_stops_and_keeps_the_last_good_weights():
    losses = iter([1.0] * 60 + [math.nan])
    def target_loss(logits, *rest):
        return logits.mean() * 0 + next(losses)
    with working_directory(), swapped(train, "target_loss", target_loss):
        status, out, _ = call(train.main, "--device", "cpu", "--task", "copy", "--steps", "100", *SMALL)
        assert status == 1 and "nan at step 61" in out
        assert torch.load("checkpoints/copy.pt", weights_only=True)["step"] == 50


def test_a_failed_write_keeps_the_old_checkpoint():
    def fail(*args):
        raise OSError(28, "No space left on device")
    with with_toys() as directory, swapped(os, "replace", fail):
        before = Path("checkpoints/copy.pt").read_bytes()
        status, _, err = call(train.main, "--device", "cpu", "--task", "copy", "--steps", "2", *SMALL)
        assert status == 2 and "No space left" in err.splitlines()[-1]
        assert Path("checkpoints/copy.pt").read_bytes() == before
        assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == ["copy.pt", "sentiment.pt"]


def test_fused_trains_to_the_formulas_weights_and_bf16_close_to_them():
    def weights(*option):
        with working_directory():
            run_train("--task", "copy", "--steps", "8", *SMALL, *option)
            model = torch.load("checkpoints/copy.pt", weights_only=True)["model"]
            return torch.cat([w.flatten() for w in model.values()])
    formula, fused, bf16 = weights(), weights("--fused"), weights("--precision", "bf16")
    assert (fused - formula).abs().max() < 1e-3 and 1e-6 < (bf16 - formula).abs().mean() < 3e-3


def test_fused_reaches_every_attention_and_norm():
    seen = []
    with working_directory(), swapped(train.Copy, "evaluate", lambda task, model, device: seen.append(model) or {
            "loss": 1.0, "accuracy": 0.0}):
        run_train("--task", "copy", "--steps", "1", "--fused")
    switches = [module.fused for module in seen[0].modules() if hasattr(module, "fused")]
    assert len(switches) == 3 + 7 and all(switches)  # attentions and norms of one layer on each side


def test_wrong_arguments_of_train_end_before_any_work():
    with working_directory() as directory:
        for name, text in [("pairs.tsv", PAIRS), ("one-class.tsv", "a b\tyes\nc d\tyes\n"), ("one.tsv", "a b\tyes\n"),
                           ("two.tsv", "a b\tyes\nc d\tno\n" * 5), ("odd.tsv", "a b\tmaybe\n"), ("file", "")]:
            (directory / name).write_text(text, encoding="utf-8")
        before = sorted(directory.rglob("*"))
        for line, message in [
                ("--task poem", "invalid choice"),
                ("--device nonsense", "try --device cpu"),
                ("--data two.tsv", "--data needs one task"),
                ("--resume", "--resume needs one task"),
                ("--checkpoint x.pt", "--checkpoint needs one task"),
                ("--task copy --data two.tsv", "makes its own data"),
                ("--task copy --epochs 3", "say --steps"),
                ("--task copy --steps 3 --epochs 3", "not allowed with"),
                ("--task copy --resume", "nothing to resume"),
                ("--task sentiment --valid two.tsv", "--valid needs --data"),
                ("--task sentiment --data nowhere.tsv", "nowhere.tsv: No such file"),
                ("--task sentiment --data one-class.tsv", "all training lines have the label 'yes'"),
                ("--task sentiment --data one.tsv", "one line with text"),
                ("--task sentiment --data two.tsv --valid odd.tsv", "label 'maybe'"),
                ("--task translate", "needs --data"),
                ("--task translate --data .", "directory"),
                ("--task copy --d-model 31", "d_model (31) must be a positive multiple of num_heads (2)"),
                ("--task copy --checkpoint .", "directory"),
                ("--task copy --checkpoint file/x.pt", "file"),
                ("--steps 0", "at least 1"), ("--steps 1.5", "whole number"), ("--batch-size -1", "at least 1"),
                ("--lr nan", "number"), ("--lr 0", "number"), ("--lr inf", "number"), ("--dropout 1", "below 1"),
                ("--dropout x", "number"), ("--warmup -1", "at least 0"), ("--seed -1", "at least 0"),
                ("--layers 0", "at least 1"), ("--heads 0", "at least 1"), ("--norm mid", "invalid choice")]:
            status, out, err = call(train.main, "--device", "cpu", *line.split())
            assert status == 2 and message in err.splitlines()[-1], (line, err)
        assert [path for path in sorted(directory.rglob("*")) if path.name != "checkpoints"] == before


def test_help_names_every_option_with_its_default():
    status, out, _ = call(train.main, "--help")
    assert status == 0
    for action in train.make_parser()._actions:
        if action.dest != "help":
            words = " ".join(out[out.index("\n  " + action.option_strings[0]):].split("\n  --")[1].split())
            assert "default: " in words or not action.nargs is None, action.option_strings


def test_a_task_learns_from_pairs_in_a_file():
    with working_directory():
        Path("pairs.tsv").write_text(PAIRS, encoding="utf-8")
        run_train("--task", "translate", "--data", "pairs.tsv", "--valid", "pairs.tsv", "--steps", "60",
                  "--warmup", "10", "--batch-size", "200", "--dropout", "0", "--layers", "1", "--d-model", "32")
        status, out, _ = call(translate.main, "--device", "cpu", "--checkpoint", "checkpoints/translate.pt", "a v")
        assert (status, out) == (0, "v a\n")


# --- translate.py


def test_translate_copies_the_symbols_of_its_arguments():
    with with_toys():
        assert call(translate.main, "--device", "cpu", "3", "1", "4", "1", "5") == (0, "3 1 4 1 5\n", "")


def test_translate_answers_each_line_in_order_and_names_the_bad_ones():
    lines = ["10 9 8", "", "1 2 x", "7", "1 2 3 4 5 6 7 8 9 10 1", "  2   2 ", "\ufeff4 4\r"]
    with with_toys():
        status, out, err = call(translate.main, "--device", "cpu", stdin="\n".join(lines).encode() + b"\n\xff\n6")
    assert out.split("\n") == ["10 9 8", "", "", "7", "", "2 2", "4 4", "", "6", ""]
    assert status == 2 and [line[:21] for line in err.splitlines()] == [f"translate.py: line {i}:" for i in (3, 5, 8)]


def test_translate_gives_a_file_the_same_answers_in_any_block():
    lines = [" ".join(str(1 + (i * j) % 10) for j in range(1, 2 + i % 10)) for i in range(120)]
    with with_toys():
        task, model, _ = train.load_or_train("copy", None, "cpu")
        rows = [task.source_ids(model, line) for line in lines]
        assert translate.answer(task, model, rows) == lines  # more than one batch
        assert [translate.answer(task, model, [row])[0] for row in rows[:20]] == lines[:20]


def test_translate_evaluates_on_held_out_sequences():
    with with_toys():
        assert call(translate.main, "--device", "cpu", "--evaluate") == (
            0, "exact match 100.0% on 1,000 held-out sequences\n", "")


def test_translate_trains_a_missing_default_checkpoint_first_and_says_so():
    asked = []
    with working_directory(), swapped(train, "train", lambda *args: asked.append(args[0]) or 1):
        status, out, err = call(translate.main, "--device", "cpu", "1")
    assert status == 1 and out == "" and "not there yet; training it first" in err and type(asked[0]) is train.Copy


def test_wrong_arguments_of_translate_are_one_line():
    with with_toys():
        Path("text.pt").write_text("hello")
        damaged = bytearray(Path("checkpoints/copy.pt").read_bytes())
        damaged[len(damaged) // 2] ^= 1
        Path("damaged.pt").write_bytes(damaged)
        Path("short.pt").write_bytes(damaged[:5000])
        torch.save({"model": {"weight": torch.zeros(3)}}, "foreign.pt")
        torch.save(torch.nn.Linear(2, 2), "code.pt")
        for argv, message in [(["3", "11"], "'11' is not a symbol; the symbols are 1 2 3 4 5 6 7 8 9 10"),
                              (["0"], "not a symbol"), (["-1"], "not a symbol"), ([" "], "0 tokens"),
                              (["1"] * 11, "11 tokens; this model reads 1 to 10"),
                              (["--evaluate", "3"], "takes no text"),
                              (["--checkpoint", "nowhere.pt", "3"], "nowhere.pt: No such file"),
                              (["--checkpoint", ".", "3"], "directory"),
                              (["--checkpoint", "checkpoints/sentiment.pt", "3"], "holds a sentiment model"),
                              (["--checkpoint", "text.pt", "3"], "not a checkpoint"),
                              (["--checkpoint", "damaged.pt", "3"], "damaged"),
                              (["--checkpoint", "short.pt", "3"], "not a checkpoint"),
                              (["--checkpoint", "foreign.pt", "3"], "not a checkpoint"),
                              (["--checkpoint", "code.pt", "3"], "not a checkpoint"),
                              (["--device", "nonsense", "3"], "try --device cpu")]:
            status, out, err = call(translate.main, "--device", "cpu", *argv)
            assert status == 2 and out == "" and message in err.splitlines()[-1], (argv, err)


# --- all files


def test_every_name_of_the_two_articles_is_found_by_grep():
    names = """attention ScaledDotProductAttention MultiHeadAttention MultiHeadedAttention PositionalEncoding LayerNorm
        SublayerConnection PositionwiseFeedForward Embeddings TransformerEncoderLayer EncoderLayer DecoderLayer Encoder
        Decoder TransformerClassifier EncoderDecoder make_model make_padding_mask subsequent_mask generator
        clones set_seed""".split()
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
