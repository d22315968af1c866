"""
Every property this project promises, as tests. The order is that of the files.

    python test_all.py            all of them; the last line is "N passed, N failed", the exit status 1 on a failure
    python test_all.py -k mask    those whose name contains "mask"
    pytest test_all.py            the same tests, for those who have pytest
    python test_all.py --drills   ten bugs that learners really make, injected: what the loss says, which tests notice
    python test_all.py --bench    how fast, beside PyTorch's own modules

The reference is PyTorch with the same weights: nn.MultiheadAttention, nn.LayerNorm, nn.Transformer. Values and
gradients agree to 1e-10 in float64. Where there is no reference, a test spells the thing out in slow loops.
"""
import argparse
import contextlib
import functools
import inspect
import io
import itertools
import math
import os
import random
import re
import runpy
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import train
import translate
import visualize
from attention import (MultiHeadAttention, ScaledDotProductAttention, attention, make_padding_mask, make_target_mask,
                       subsequent_mask)
from model import (BOS, EOS, PAD, UNK, Decoder, Encoder, EncoderDecoder, TransformerClassifier, beam_decode,
                   greedy_decode, make_model, print_shapes)
from transformer_layer import (DecoderLayer, Embeddings, EncoderLayer, LayerNorm, PositionalEncoding,
                               PositionwiseFeedForward, SublayerConnection)

HERE = Path(__file__).resolve().parent
SOURCES = {name: (HERE / f"{name}.py").read_text("utf-8")  # in reading order
           for name in ("attention", "transformer_layer", "model", "train", "translate", "visualize")}
FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64
swapped = mock.patch.object  # with swapped(owner, name, value): inside, owner.name is value


def slow(test):
    """A decorator for tests that train, draw or start processes: --drills leaves them out."""
    test.slow = True
    return test


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


def counted(owner, name):
    """Inside: owner.name works as before, and is a mock that knows its calls."""
    return swapped(owner, name, wraps=getattr(owner, name))


def packed(ours, get=lambda parameter: parameter):
    """get(parameter) for every parameter of our module, in the order and the packing of its counterpart in PyTorch."""
    if isinstance(ours, MultiHeadAttention):
        qkv = ours.w_q, ours.w_k, ours.w_v
        return [torch.cat([get(w.weight) for w in qkv]), torch.cat([get(w.bias) for w in qkv]),
                get(ours.w_o.weight), get(ours.w_o.bias)]
    own = [get(parameter) for parameter in ours.parameters(recurse=False)]
    return own + [x for part in ours.children() for x in packed(part, get)]


def compare(ours, our_inputs, theirs, their_inputs):
    """Asserts that with the same random weights, in float64, our module and PyTorch's have the same outputs, and the
    same gradients of all parameters and inputs."""
    with torch.no_grad():
        for p in ours.double().parameters():
            p.normal_(std=0.5)
        for p, value in zip(theirs.double().parameters(), packed(ours)):
            p.copy_(value)
    same(list(theirs.parameters()), packed(ours))

    our_output, their_output = (x if isinstance(x, tuple) else (x,) for x in (ours(*our_inputs), theirs(*their_inputs)))
    pairs = [(a, b) for a, b in zip(our_output, their_output) if a is not None]  # the weights are None when fused
    our_output, their_output = zip(*pairs)
    same(our_output, their_output)
    inputs = list({x for x in our_inputs if x is not None and x.requires_grad})
    direction = [torch.randn_like(x) for x in our_output]
    ours_first = [*inputs, *ours.parameters()]
    gradient = dict(zip(ours_first, torch.autograd.grad(our_output, ours_first, direction)))
    same([gradient[x] for x in inputs] + packed(ours, gradient.get),
         torch.autograd.grad(their_output, [*inputs, *theirs.parameters()], direction))


def small_model(vocab=11, **options):
    """A tiny encoder-decoder in float64 and evaluation mode."""
    sizes = dict(num_layers=2, d_model=8, num_heads=2, d_ff=16, max_len=12)
    return make_model(vocab, vocab, **{**sizes, **options}).double().eval()


def small_classifier(**options):
    sizes = dict(vocab_size=11, d_model=8, num_heads=2, num_layers=2, d_ff=16, num_classes=3, max_len=12)
    return TransformerClassifier(**{**sizes, **options}).double().eval()


def run_model(model, src, tgt):
    """The logits of either model, under the masks that belong to the ids; the classifier reads src alone."""
    if isinstance(model, TransformerClassifier):
        return model(src, make_padding_mask(src))[0]
    return model(src, tgt, make_padding_mask(src), make_target_mask(tgt))


def set_fused(model, fused):
    for module in model.modules():
        if hasattr(module, "fused"):
            module.fused = fused


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
    with swapped(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin))), contextlib.redirect_stdout(out), \
            contextlib.redirect_stderr(err):
        try:
            train.run(main, list(argv))
        except SystemExit as error:
            status = error.code
    return status, out.getvalue(), err.getvalue()


def on_cpu(main, line, *more, **options):
    """main with a line of options, on the CPU -> exit status, stdout, stderr."""
    return call(main, "--device", "cpu", *line.split(), *more, **options)


SMALL = "--layers 1 --d-model 16 --heads 2 --d-ff 16 "


def run_train(line, status=0, small=SMALL):
    """A run of train.py with a small model that must end with this status -> what it printed on stdout, on stderr."""
    found, out, err = on_cpu(train.main, small + line)
    assert found == status, (found, err)
    return out, err


@functools.lru_cache(maxsize=None)
def trained_toys():
    """Both toys trained by `python train.py` -> {name: bytes of the checkpoint}, what was printed."""
    with working_directory() as directory:
        out, _ = run_train("--task all", small="")
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


def padded_batch():
    """For the comparisons with PyTorch: source (3, 6, 8) and target (3, 4, 8), both transposed views and so not
    contiguous, their padding masks, a causal mask."""
    src_padding, tgt_padding = (torch.arange(n) < torch.tensor([[n], [2], [3]]) for n in (6, 4))
    return rand(6, 3, 8).transpose(0, 1), rand(8, 4, 3).transpose(0, 2), src_padding, tgt_padding, subsequent_mask(4)


def test_attention_equals_pytorch_for_random_shapes_and_masks():
    ours, theirs = ScaledDotProductAttention(0.0), nn.Module()
    theirs.forward = F.scaled_dot_product_attention
    for trial in range(60):
        lead = [random.randint(1, 3) for _ in range(random.randint(0, 2))]
        query, key, d_k, d_v = (random.randint(1, 6) for _ in range(4))
        shape = [random.choice([size, 1]) for size in (*lead, query)] + [key]  # axes of size 1 broadcast
        mask = None if trial % 3 == 0 else torch.rand(shape) < 0.5
        if mask is not None:
            mask[..., 0] = True  # PyTorch's answer to a blocked row depends on its version
        inputs = rand(*lead, query, d_k), rand(*lead, key, d_k), rand(*lead, key, d_v), mask
        compare(ours, inputs, theirs, inputs)


def test_multi_head_attention_equals_pytorch_in_its_three_uses():  # self, causal self, cross
    src, tgt, src_padding, tgt_padding, _ = padded_batch()
    for training, fused, cross, padded, ordered in itertools.product((True, False), repeat=5):
        sizes = 8, 2, 0.0 if training else 0.3
        ours, theirs = MultiHeadAttention(*sizes), nn.MultiheadAttention(*sizes, batch_first=True)
        set_fused(ours, fused)
        source, padding = (src, src_padding) if cross else (tgt, tgt_padding)
        causal = subsequent_mask(6)[:, :4, :source.size(1)]
        mask = {(False, False): None, (True, False): padding, (False, True): causal,
                (True, True): causal & padding[:, None]}[padded, ordered]
        compare(ours.train(training), (tgt, source, source, mask), theirs.train(training),  # there, True = drop
                (tgt, source, source, ~padding if padded else None, True, ~causal[0] if ordered else None, False))


def test_multi_head_attention_equals_a_slow_loop():  # over samples, heads and queries
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


def test_merge_undoes_split():
    mha, x = MultiHeadAttention(8, 2), rand(3, 5, 8)
    heads = mha.split(x)
    assert heads.shape == (3, 2, 5, 4)
    same(heads[:, 1], x[:, :, 4:])  # a head holds its own slice of every token
    same(mha.merge(heads), x)


def test_d_model_that_does_not_divide_into_heads_is_an_error():
    for d_model, heads in ((10, 4), (8, 0), (8, -2), (0, 2), (-8, 2)):
        raises(ValueError, [f"({d_model})", f"({heads})"], MultiHeadAttention, d_model, heads)
    assert MultiHeadAttention(1, 1).d_k == 1


def test_padding_causal_and_target_masks():
    ids, causal = torch.tensor([[5, 0, 7], [0, 0, 4]]), [[True, False, False], [True, True, False], [True, True, True]]
    assert make_padding_mask(ids).tolist() == [[[[True, False, True]]], [[[False, False, True]]]]
    assert make_padding_mask(ids, pad_idx=7).tolist() == [[[[True, True, False]]], [[[True, True, True]]]]
    assert [subsequent_mask(size).tolist() for size in (1, 3)] == [[[[True]]], [causal]]
    assert make_target_mask(ids).tolist() == [[[[True, False, False], [True, False, False], [True, False, True]]],
                                              [[[False, False, False], [False, False, False], [False, False, True]]]]
    assert make_target_mask(ids, pad_idx=9).tolist() == [[causal]] * 2


def test_a_query_that_may_look_nowhere_gets_zeros_and_the_gradient_of_finite_differences():
    mask = torch.ones(3, 4, 5, dtype=torch.bool)
    mask[0, 1] = mask[2] = False
    blocked = ~mask.any(-1)
    mha, x, source = MultiHeadAttention(8, 2).double().eval(), rand(3, 4, 8), rand(3, 5, 8)
    assert (attention(x, source, source, mask)[1][blocked] == 0).all()
    assert torch.autograd.gradcheck(lambda *qkv: attention(*qkv, mask), (x[..., :3], source[..., :3], source[..., 4:]))
    for fused in (False, True):
        mha.attention.fused = fused
        output = mha.attention(x, source, source, mask)[0]
        assert (output[blocked] == 0).all() and (output[~blocked] != 0).all()
        same(mha(x, source, source, mask)[0][blocked], mha.w_o.bias.expand(5, 8))  # w_o of zeros


def test_masks_of_every_allowed_rank_and_type_block_what_they_say():
    batch, heads, query, key = 2, 2, 4, 5  # batch = heads: a (batch, key) mask must not mask heads
    mha, x, source = MultiHeadAttention(8, heads).double().eval(), rand(batch, query, 8), rand(batch, key, 8)
    shapes = [(batch, key), *itertools.product((batch, 1), (query, 1), (key,)),
              *itertools.product((batch, 1), (heads, 1), (query, 1), (key,))]
    for shape, dtype in itertools.product(shapes, (torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32)):
        mask = (torch.rand(shape) < 0.6).to(dtype)
        whole = mask[:, None, None] if mask.dim() == 2 else mask[:, None] if mask.dim() == 3 else mask
        set_fused(mha, False)
        output, weights = mha(x, source, source, mask)
        assert (weights > 0).equal(whole.bool().expand(batch, heads, query, key))
        same(attention(mha.split(mha.w_q(x)), *mha.keys_and_values(source, source), whole)[1], weights)
        set_fused(mha, True)
        same(mha(x, source, source, mask)[0], output)


def test_a_mask_that_does_not_fit_or_is_additive_is_an_error_with_its_shape():
    mha, x, source = MultiHeadAttention(8, 2), torch.randn(3, 4, 8), torch.randn(3, 5, 8)
    for shape in ((), (5,), (4, 5), (1, 5), (3, 1), (3, 4), (2, 4, 5), (3, 5, 4), (3, 4, 1), (3, 3, 4, 5), (3, 2, 4, 1),
                  (3, 2, 5, 5), (2, 2, 4, 5), (1, 3, 2, 4, 5)):
        raises(ValueError, [shape, (3, 2, 4, 5)], mha, x, source, source, torch.ones(shape, dtype=torch.bool))
    alone = torch.randn(1, 5, 8)  # a (len, len) mask with a batch of one: once turned 5 positions into 25
    raises(ValueError, [(5, 5)], mha, alone, alone, alone, subsequent_mask(5)[0])
    for value, call in itertools.product((-math.inf, -1e9, 2.0, math.nan), (mha, attention)):
        additive = torch.tensor([[[0.0, 0.0, 0.0, 0.0, value]]])
        raises(ValueError, ["True = may look", (1, 1, 5)], call, x, source, source, additive)


def test_weights_are_those_before_dropout_stored_detached_and_none_when_fused():
    mha, x = MultiHeadAttention(8, 2, dropout=0.5).double(), rand(3, 5, 8)
    for fused, mask in itertools.product((False, True, False), (None, subsequent_mask(5))):  # read at every call
        mha.attention.fused = fused
        output, weights = mha.train()(x, x, x, mask)
        assert differs(output, mha(x, x, x, mask)[0])  # the output is from after dropout
        if fused:
            assert weights is None and mha.attn is None
        else:
            assert mha.attn.equal(weights) and weights.requires_grad and not mha.attn.requires_grad
            same(weights.sum(-1), torch.ones(3, 2, 5, dtype=torch.float64))
            same(weights, mha.eval()(x, x, x, mask)[1])


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
    torch.manual_seed(1)  # whatever came before: a script that needs a seed sets it
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(HERE / script), run_name="__main__")
    return out.getvalue()


def test_attention_py_works_an_example_that_paper_and_pencil_repeat():
    lines = printed("attention.py").splitlines()
    titles = lines[::4]  # each with three rows below
    q, k, v, scores, scaled, masked, weights, output = shown = [
        torch.tensor([[float(x) for x in row.split()] for row in lines[i:i + 3]]) for i in range(1, 32, 4)]
    assert [title[0] for title in titles] == [*"QKVssmwo"]
    assert [title.split("  ")[-1] for title in titles] == [str(tuple(x.shape)) for x in shown]
    assert q.tolist() == [[2, 0, 2, 0], [0, 2, 0, 0], [2, 2, 0, 0]]
    assert k.tolist() == [[1, 1, 0, 1], [0, 1, 0, 1], [1, 0, 1, 0]] and v.tolist() == [[1, 0], [0, 1], [2, 2]]
    assert scores.equal(q @ k.T) and scaled.equal(scores / 2)
    assert masked.equal(scaled.where(torch.ones(3, 3).tril() == 1, torch.tensor(-math.inf)))
    same(weights, masked.exp() / masked.exp().sum(dim=1, keepdim=True), atol=1e-4)
    same(output, weights @ v, atol=2e-4)


# --- transformer_layer.py


def test_transformer_layer_py_follows_a_vector_through_both_norm_orders():
    _, heads, *rows, _, _ = printed("transformer_layer.py").splitlines()
    torch.manual_seed(0)
    x = PositionalEncoding(64, dropout=0.0)(Embeddings(64, 10)(torch.arange(5)[None]))
    for norm_first, half in (True, slice(None, 41)), (False, slice(41, None)):
        layer, now, steps = EncoderLayer(64, 4, 256, 0.0, norm_first), x, [("x", x)]
        for name, sublayer, norm in [("attn", lambda x: layer.self_attn(x, x, x)[0], layer.self_attn_residual.norm),
                                     ("ff", layer.feed_forward, layer.feed_forward_residual.norm)]:
            change = sublayer(norm(now) if norm_first else now)
            middle = [(name, change), (f"x + {name}", now + change)]
            steps += [("norm(x)", norm(now)), *middle] if norm_first else [*middle, ("norm", norm(now + change))]
            now = steps[-1][1]
        assert heads[half].split() == ["pre-norm" if norm_first else "post-norm", "mean", "std", "size", "cosine"]
        assert [row[half][:10].strip() for row in rows] == [name for name, _ in steps]
        for row, (_, result) in zip(rows, steps):
            v = result[0, 2]
            numbers = v.mean(), v.std(correction=0), v.norm(), v @ x[0, 2] / v.norm() / x[0, 2].norm()
            same(torch.tensor([float(number) for number in row[half][10:].split()]), torch.stack(numbers), atol=0.0051)


def test_embeddings_times_sqrt_d_model_are_as_large_as_the_positions():
    embed, ids = Embeddings(64, 500), torch.tensor([[3, 9, 3]])
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
        ours, x = LayerNorm(width, eps), torch.randn(3, 4, width, dtype=torch.float64)
        x[1] = 7.0  # constant rows
        x[2] *= 1e-3
        set_fused(ours, fused)
        compare(ours, [x.requires_grad_()], nn.LayerNorm(width, eps), [x])


def test_every_float_type_stays_finite_and_keeps_its_type():
    mask = subsequent_mask(4).clone()
    mask[0, 2] = False
    for dtype, fused in itertools.product(FLOATS, (False, True)):
        norm, sdpa = LayerNorm(4).to(dtype), ScaledDotProductAttention(0.0)
        norm.fused = sdpa.fused = fused
        signs = torch.tensor([1, -1, 1, -1], dtype=dtype)
        same(norm(300 * signs), signs, atol=1e-3)  # the square of 300 overflows float16
        q = torch.full((1, 2, 4, 64), 60.0, dtype=dtype, requires_grad=True)  # q k = 230,400 does too; divided by
        k = (q * signs[:, None]).detach()                                     # sqrt(64) it is 28,800
        for m in (None, mask):
            output, weights = sdpa(q, k, k, m)
            output.sum().backward()
            assert output.dtype == dtype and output.isfinite().all() and q.grad.isfinite().all()
            assert fused or weights.dtype == dtype and set(weights.float().sum(-1).flatten().tolist()) <= {0.0, 1.0}


def test_a_dropout_of_one_leaves_what_lies_beside_or_after_it_alone_and_in_evaluation_everything():
    x, ff, sdpa = rand(2, 3, 8), PositionwiseFeedForward(8, 16, 1.0).double(), ScaledDotProductAttention(1.0)
    pre, post = (SublayerConnection(8, 1.0, norm_first).double() for norm_first in (True, False))
    same(pre(x, lambda x: x + torch.arange(8)), x)
    same(post(x, lambda x: x + torch.arange(8)), post.norm(x))
    same(ff(x), ff.w_2.bias.expand_as(x))
    same(PositionalEncoding(8, dropout=1.0).double()(x), torch.zeros_like(x))
    for fused, mask in itertools.product((False, True), (None, subsequent_mask(3))):
        set_fused(sdpa, fused)
        same(sdpa.train()(x, x, x, mask)[0], torch.zeros_like(x))
        same(sdpa.eval()(x, x, x, mask)[0], attention(x, x, x, mask)[0])


# --- model.py


def test_model_py_prints_the_shapes_on_the_way_and_counts_every_parameter():
    sizes = dict(d_model=32, num_heads=4, num_layers=1, d_ff=64, max_len=10)
    models = TransformerClassifier(20, num_classes=2, **sizes), make_model(20, 20, **sizes)
    blocks = re.split(r"^(?=\w)", printed("model.py"), flags=re.M)[1:]
    assert len(blocks) == len(models)
    for model, block, reads in zip(models, blocks, ("(2, 7)", "(2, 7) and (2, 5)")):
        title, *lines = block.splitlines()
        total, shown = sum(p.numel() for p in model.parameters()), 0
        assert title == f"{type(model).__name__}, {total:,} parameters, reads {reads}"
        for name, kind, *shapes, count in map(str.split, lines):
            module, length = model.get_submodule(name), 5 if name.startswith(("tgt", "dec", "gen")) else 7
            weights = f" and {(2, 4, length, 7 if 'cross' in name else length)}" if kind == "MultiHeadAttention" else ""
            output = {"classify": (2, 2), "generator": (2, 5, 20)}.get(name, (2, length, 32))
            learned = sum(p.numel() for p in module.parameters())
            assert (kind, count) == (type(module).__name__, f"{learned:,}"), name
            assert " ".join(shapes) == f"{output}{weights}", name
            shown += learned
        assert shown == total


def test_print_shapes_leaves_the_model_as_it_was():
    model, ids = small_model().train(), torch.tensor([[4, 5, 6]])
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_shapes(model, [ids, ids], [None, None])
        printed_once = out.getvalue()
        model(ids, ids, None, None)  # no hook is left
    assert printed_once and out.getvalue() == printed_once and all(module.training for module in model.modules())


def test_defaults_are_those_that_the_text_promises():
    layer = dict(dropout=0.1, norm_first=True)
    decoding = dict(bos=2, eos=3, pad=0, unk=1, use_cache=True)
    for function, wanted in {
            attention: dict(mask=None, dropout=None), ScaledDotProductAttention: dict(dropout=0.1),
            MultiHeadAttention: dict(dropout=0.1), make_padding_mask: dict(pad_idx=0),
            make_target_mask: dict(pad_idx=0), PositionalEncoding: dict(max_len=5000, dropout=0.1),
            LayerNorm: dict(eps=1e-5), PositionwiseFeedForward: dict(dropout=0.1), SublayerConnection: layer,
            EncoderLayer: layer, DecoderLayer: layer, Encoder: layer, Decoder: layer,
            TransformerClassifier: dict(dropout=0.1, norm_first=False),  # as in article 1
            make_model: dict(layer, num_layers=6, d_model=512, num_heads=8, d_ff=2048, max_len=5000),
            greedy_decode: decoding, beam_decode: dict(decoding, beams=4)}.items():
        options = inspect.signature(function).parameters.values()
        found = {option.name: option.default for option in options if option.default is not option.empty}
        assert found == wanted, (function.__name__, found)
    assert not ScaledDotProductAttention().fused and not LayerNorm(8).fused  # the formula, unless asked otherwise


def test_encoder_and_decoder_equal_pytorchs_with_one_closing_norm_in_pre_norm_and_none_in_post_norm():
    src, tgt, src_padding, tgt_padding, causal = padded_batch()
    for norm_first, fused in itertools.product((True, False), (False, True)):
        sizes, order, nothing = (8, 2, 16, 0.0), dict(batch_first=True, norm_first=norm_first), nn.Identity()
        closing = (lambda: nn.LayerNorm(8)) if norm_first else lambda: None  # theirs would close post-norm layers too
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(*sizes, **order), 2, closing(), False)
        decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(*sizes, **order), 2, closing())
        ours = EncoderDecoder(Encoder(2, *sizes, norm_first), Decoder(2, *sizes, norm_first), nothing, nothing, nothing)
        set_fused(ours, fused)
        compare(ours, (src, tgt, src_padding, causal & tgt_padding[:, None]),
                nn.Transformer(8, 2, batch_first=True, custom_encoder=encoder, custom_decoder=decoder),
                (src, tgt, None, ~causal[0], None, ~src_padding, ~tgt_padding, ~src_padding))


def test_every_dropout_has_the_rate_and_every_sublayer_the_norm_order_asked_for():
    for norm_first in (True, False):
        options = dict(dropout=0.37, norm_first=norm_first)
        for model, count in ((small_model(**options), 2 + 2 * 4 + 2 * 6), (small_classifier(**options), 1 + 2 * 4)):
            assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.37] * count
            assert {m.norm_first for m in model.modules() if isinstance(m, SublayerConnection)} == {norm_first}
    model, ids = small_model(dropout=0.0).train(), torch.tensor([[4, 5, 6]])
    same(model(ids, ids, None, None), model(ids, ids, None, None))


def test_the_model_is_embedding_positions_encoder_decoder_and_a_linear_generator():
    model, src, tgt = small_model(), torch.tensor([[4, 5, 6, 0]]), torch.tensor([[2, 7, 8]])
    src_mask, tgt_mask = make_padding_mask(src), make_target_mask(tgt)
    positions = PositionalEncoding(8).table[:4].double()
    memory = model.encoder(model.src_embed[0](src) + positions, src_mask)
    states = model.decoder(model.tgt_embed[0](tgt) + positions[:3], memory, src_mask, tgt_mask)
    same(model.decode(model.encode(src, src_mask), src_mask, tgt, tgt_mask), states)
    same(model(src, tgt, src_mask, tgt_mask), states @ model.generator.weight.T + model.generator.bias)  # logits


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


def test_the_result_of_a_text_does_not_depend_on_its_batch_mates_or_on_padding():
    src, tgt = torch.tensor([[4, 5, 6, 0], [7, 8, 9, 10]]), torch.tensor([[2, 7, 8], [2, 4, 0]])
    longer_src, longer_tgt = F.pad(src, (0, 5)), F.pad(tgt, (0, 4))
    for norm_first, make in itertools.product((True, False), (small_classifier, small_model)):
        model = make(norm_first=norm_first)
        both = run_model(model, src, tgt)
        same(run_model(model, src[:1, :3], tgt[:1]), both[:1])
        same(run_model(model, longer_src, longer_tgt)[:, :3], both)  # three classes, or the first three positions
    for layer in model.decoder.layers:
        assert (layer.cross_attn.attn > 0).equal(make_padding_mask(longer_src).expand(2, 2, 7, 9))


def test_the_decoder_cannot_see_the_future():
    src, tgt = torch.tensor([[4, 5, 6]]), torch.tensor([[2, 4, 5, 6, 7]])
    for norm_first, t in itertools.product((True, False), range(1, 5)):
        model, changed = small_model(norm_first=norm_first), tgt.clone()
        changed[0, t:] = 9
        before, after = run_model(model, src, tgt), run_model(model, src, changed)
        same(before[:, :t], after[:, :t])
        assert differs(before[:, t], after[:, t])


def test_fresh_matrices_have_their_deviation_and_no_two_are_equal_or_shared():
    sizes = dict(d_model=32, num_heads=4, d_ff=64)
    for model in (small_model(200, **sizes), small_classifier(vocab_size=200, **sizes)):
        for m in model.modules():
            if isinstance(m, nn.Linear):  # Xavier: uniform up to sqrt(6 / (in + out)); its deviation is that / sqrt(3)
                bound = math.sqrt(6 / sum(m.weight.shape))
                assert m.weight.abs().max() <= bound and abs(m.weight.std() * math.sqrt(3) / bound - 1) < 0.15
                assert (m.bias == 0).all()
            elif isinstance(m, nn.Embedding):
                assert abs(m.weight.std() * math.sqrt(32) - 1) < 0.05
        matrices = [p for _, p in model.named_parameters(remove_duplicate=False) if p.dim() > 1]
        assert all(differs(a, b) for a, b in itertools.combinations(matrices, 2) if a.shape == b.shape)


def test_weights_of_a_model_with_a_shorter_table_load_into_one_with_a_longer():
    ids = torch.tensor([[4, 5, 6]])
    for make in (small_model, small_classifier):
        short, long = make(max_len=5), make(max_len=12)
        assert not [name for name in short.state_dict() if "table" in name]
        long.load_state_dict(short.state_dict())
        same(run_model(short, ids, ids), run_model(long, ids, ids))


def test_blocked_rows_give_no_nan_in_any_float_type_even_in_between():
    ids = torch.tensor([[4, 5, 6, 0], [0, 0, 0, 0]])  # the second text is padding alone; a loss may ignore it
    for dtype, fused, make, read in itertools.product(FLOATS, (False, True), (small_model, small_classifier), (1, 2)):
        model = make(num_layers=1).to(dtype)
        set_fused(model, fused)
        with torch.autograd.set_detect_anomaly(True):
            logits = run_model(model, ids, ids)
            logits[:read].square().mean().backward()
        assert logits.dtype == dtype and logits.isfinite().all()
        assert all(p.grad.isfinite().all() for p in model.parameters())


def test_every_tensor_follows_the_device_of_its_input():
    ids, models, results = torch.tensor([[4, 5, 0], [6, 0, 0]]), (small_model(), small_classifier()), []
    for default in "cpu", "meta":  # a tensor made on the default device would not mix with the others
        with torch.device(default):
            results.append([*(run_model(model, ids, ids) for model in models),
                            greedy_decode(models[0], ids, 4), beam_decode(models[0], ids, 4)])
    same(*results)
    ids = ids.to("meta")  # a device without numbers
    assert all(run_model(model.to("meta"), ids, ids).device.type == "meta" for model in models)
    assert subsequent_mask(3, device="meta").device.type == "meta"


def slow_decode(model, src, max_len, beams=1, bos=BOS, eos=EOS, pad=PAD, unk=UNK):
    """What the two decoders must return: row by row and beam by beam, with all of the prefix at every step."""
    rows, allowed = [], [i for i in range(model.generator.out_features) if i not in (pad, bos, unk)]
    for row in src:
        kept = [([], 0.0)]  # the beams: their tokens, and the sum of the log-probabilities
        for step in range(max_len):
            done, going = ([beam for beam in kept if (eos in beam[0]) == ended] for ended in (True, False))
            if not going:
                break
            source, prefixes = row.expand(len(going), -1), torch.tensor([[bos, *tokens] for tokens, _ in going])
            logits = model(source, prefixes, make_padding_mask(source, pad), subsequent_mask(step + 1))[:, -1]
            grown = [(tokens + [token], total + log_p)
                     for (tokens, total), log_ps in zip(going, logits[:, allowed].log_softmax(dim=-1).tolist())
                     for token, log_p in zip(allowed, log_ps)]
            kept = done + sorted(grown, key=lambda beam: -beam[1])[:beams - len(done)]
        rows.append(max(kept, key=lambda beam: beam[1] / len(beam[0]))[0])
    length = max(len(tokens) for tokens in rows)
    return torch.tensor([tokens + [pad] * (length - len(tokens)) for tokens in rows])


SRC = torch.tensor([[4, 5, 6, 7, 8], [9, 4, 0, 0, 0], [10, 9, 8, 0, 0], [0, 0, 0, 0, 0], [6, 6, 7, 4, 0]])


def eager_model(seed, bos=BOS, eos=EOS, pad=PAD, unk=UNK, **options):
    """A model whose source decides when it ends, and that likes PAD, BOS and UNK best."""
    torch.manual_seed(seed)
    model = small_model(**options)
    with torch.no_grad():
        for layer in model.decoder.layers:
            for w in (layer.cross_attn.w_q, layer.cross_attn.w_v, layer.cross_attn.w_o):
                w.weight *= 2
        model.generator.weight *= 3
        model.generator.bias[[pad, bos, unk]], model.generator.bias[eos] = 4.0, 2.0
    return model


def test_greedy_and_beam_decode_equal_a_slow_loop_with_and_without_cache_and_each_row_alone():
    steps = []  # at how many different steps a batch's rows ended
    cases = *itertools.product((True, False), (4, 6), (1, 3)), (True, 4, 12)  # 12 beams: at first, 8 tokens for them
    for norm_first, seed, beams in cases:
        model = eager_model(seed, norm_first=norm_first)
        wanted = slow_decode(model, SRC, 6, beams)
        steps.append(len(set((wanted != PAD).sum(1).tolist())))
        decoders = [functools.partial(beam_decode, beams=beams)] + ([greedy_decode] if beams == 1 else [])
        for decode_all, use_cache in itertools.product(decoders, (True, False)):
            with counted(model, "decode") as decode:
                same(decode_all(model, SRC, 6, use_cache=use_cache), wanted)
            assert beams > 1 or decode.call_count == wanted.size(1)
        for decode_all, (row, tokens) in itertools.product(decoders, zip(SRC, wanted)):  # it stops with the last row
            row = row[row != PAD] if row.any() else row
            same(decode_all(model, row[None], 6), tokens[tokens != PAD][None])
    assert max(steps) >= 3, f"no batch's rows ended at three different steps: {steps}; choose other seeds"


def test_beam_decode_finds_the_best_of_all_sequences_when_there_is_a_beam_for_each():
    allowed, lengths = [EOS, 4, 5, 6], set()
    everything = [s for n in (1, 2, 3) for s in itertools.product(allowed, repeat=n)
                  if EOS not in s[:-1] and (n == 3 or s[-1] == EOS)]

    def mean_log_probability(s):
        logits = run_model(model, row[None], torch.tensor([[BOS, *s[:-1]]]))[0][:, allowed]
        return logits.log_softmax(dim=-1)[range(len(s)), [allowed.index(token) for token in s]].mean()
    for norm_first, seed, row in itertools.product((True, False), (0, 1), torch.tensor([[4, 5, 6, 6], [5, 6, 0, 0]])):
        model = eager_model(seed, vocab=7, norm_first=norm_first).requires_grad_(False)
        best = max(everything, key=mean_log_probability)
        lengths.add(len(best))
        for use_cache in True, False:
            assert beam_decode(model, row[None], 3, len(everything), use_cache=use_cache).tolist() == [[*best]]
    assert lengths == {1, 2, 3}


def test_a_finished_beam_keeps_its_slot_and_the_largest_mean_of_log_probabilities_wins():
    def chances(eos, four, five):
        p = torch.full((11,), (1 - eos - four - five) / 5)
        p[EOS], p[4], p[5] = eos, four, five
        return p.log()
    # the second step has two sequences likelier than EOS alone (mean -1.386), of which one goes on to the end
    for chance, best in ((0.14, [EOS]), (0.172, [4] * 6)):  # mean of the six: -1.51, -1.38
        steps = iter([chances(0.25, 0.60, 0.03), chances(0.001, 0.50, 0.48), *[chances(0.001, chance, 0.13)] * 4])
        model = small_model()
        with swapped(model.generator, "forward", lambda states: next(steps).repeat(len(states), 1)):
            assert beam_decode(model, SRC[:1], 6, beams=2).tolist() == [best]
        assert not list(steps)


def test_a_slot_that_is_empty_at_first_is_used_later():
    # five beams, but EOS, 4, 5 and 6 alone may begin; then 5 4, 4 4, 4 5 and 6 6 need all slots that EOS leaves free
    p = torch.full((7, 7), 1e-6)  # rows: the token before
    p[BOS, [EOS, 4, 5, 6]], p[4, [4, 5]], p[5, 4], p[6, 6] = torch.tensor([0.01, 0.40, 0.39, 0.12]), 0.5, 1.0, 1.0
    model = small_model(vocab=7)
    with swapped(model, "decode", lambda memory, src_mask, tgt, *rest: F.one_hot(tgt[:, -1:], 7).float()), \
            swapped(model.generator, "forward", lambda before: before @ p.log()):
        assert beam_decode(model, torch.tensor([[4, 5]]), 6, beams=5).tolist() == [[6] * 6]


def test_the_beam_search_ends_when_every_beam_is_finished():
    for vocab, steps in ((6, 2), (4, 1)):  # EOS, 4 and 5, then 4 EOS and 5 EOS; or EOS alone, in one of three slots
        model = small_model(vocab)
        model.generator.bias.data[EOS] = 1e4
        with counted(model, "decode") as decode:
            assert beam_decode(model, torch.tensor([[0, 3]]), 9, beams=3).tolist() == [[EOS]]
        assert decode.call_count == steps


def test_both_decoders_tell_close_logits_apart_in_bfloat16():
    logits, model = torch.zeros(11, dtype=torch.bfloat16), small_model()
    logits[7] = 0.004  # as log-probabilities, of -2.08 and -2.08, bfloat16 cannot tell them apart
    with swapped(model.generator, "forward", lambda states: logits.repeat(len(states), 1)):
        for decode_all in (greedy_decode, beam_decode):
            assert decode_all(model, SRC[:1], 3).tolist() == [[7, 7, 7]]


def test_both_decoders_take_other_special_ids():
    ids = dict(bos=5, eos=8, pad=9, unk=4)
    src, model = torch.where(SRC == PAD, 9, torch.where(SRC == 9, PAD, SRC)), eager_model(0, **ids)
    same(greedy_decode(model, src, 4, **ids), slow_decode(model, src, 4, **ids))
    same(beam_decode(model, src, 4, 3, **ids), slow_decode(model, src, 4, 3, **ids))


def test_decode_feeds_on_only_the_positions_that_the_cache_does_not_hold():
    model, tgt, cache = small_model(), torch.randint(4, 11, (5, 5)), {}
    memory, src_mask = model.encode(SRC, make_padding_mask(SRC)), make_padding_mask(SRC)
    wanted = model.decode(memory, src_mask, tgt, make_target_mask(tgt))
    with counted(model.decoder.layers[1].cross_attn.w_k, "forward") as source_keys:
        for start, end in ((0, 1), (1, 2), (2, 5)):
            states = model.decode(memory, src_mask, tgt[:, :end], make_target_mask(tgt[:, :end]), cache)
            same(states, wanted[:, start:end])
    assert source_keys.call_count == 1  # made at the first step, reused at the others


def test_both_decoders_run_in_evaluation_mode_without_a_graph_and_restore_every_mode():
    for decode_all in (greedy_decode, beam_decode):
        model, seen = eager_model(2, dropout=0.5), []
        wanted = decode_all(model, SRC, 8)
        model.train()
        model.encoder.layers[1].eval()  # somebody's frozen layer
        modes = [m.training for m in model.modules()]
        model.generator.register_forward_hook(lambda m, args, out: seen.append((m.training, out.requires_grad)))
        same(decode_all(model, SRC, 8), wanted)
        model.generator = nn.Linear(7, 7)  # fails at the first step
        raises(RuntimeError, [], decode_all, model, SRC, 8)
        assert set(seen) == {(False, False)} and torch.is_grad_enabled()
        assert [m.training for m in model.modules()] == modes


def test_both_decoders_encode_once_and_end_at_max_len_fed_with_one_position_a_step_by_the_cache():
    model = small_model(max_len=7)
    model.generator.bias.data[EOS] = -1e4  # it never ends by itself
    for decode_all, max_len, use_cache in itertools.product((greedy_decode, beam_decode), (0, 1, 3, 7), (True, False)):
        with counted(model, "encode") as encode, counted(model.decoder, "forward") as decoder:
            assert decode_all(model, SRC, max_len, use_cache=use_cache).shape == (5, max_len)
        fed = [call.args[0].size(1) for call in decoder.call_args_list]
        assert fed == ([1] * max_len if use_cache else list(range(1, max_len + 1)))
        assert encode.call_count == 1


def test_decoding_or_reading_more_than_the_table_holds_is_an_error_and_so_is_no_beam():
    model, nine = small_model(max_len=7), torch.full((1, 9), 5)
    with counted(model.encoder, "forward") as encoder:
        for decode_all in (greedy_decode, beam_decode):
            raises(ValueError, ["(8)", "(7)"], decode_all, model, SRC, 8)
            raises(ValueError, [" 9 ", "(7)"], decode_all, model, nine, 3)
        for beams in (0, -1):
            raises(ValueError, f"beams ({beams})", beam_decode, model, SRC, 3, beams)
    assert not encoder.called


# --- train.py: text and files


PAIRS = "".join(f"{a} {b}\t{b.upper()} {a.upper()}\n" for a in "abcde" for b in "vwxyz")


def write(name, text):
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return name


def refused(main, message, line, *more):
    """Asserts that main ends with status 2 and one line on stderr, which holds the message -> what it printed."""
    status, out, err = on_cpu(main, line, *more)
    script = Path(main.__code__.co_filename).name
    assert status == 2 and err.startswith(f"{script}: error: ") and message in err, (line, more, err)
    assert err.count("\n") == 1 and len(err) < 400, err
    return out


def saved(path):
    return torch.load(path, weights_only=True)


def test_a_token_is_a_word_with_its_marks_a_cjk_character_or_a_sign():
    for text, tokens in [("It's a well-known FILM!", ["it's", "a", "well-known", "film", "!"]),
                         ("don’t", ["don't"]), ("a boy 's hat -", ["a", "boy", "'s", "hat", "-"]),
                         ("'quoted'", ["'", "quoted", "'"]), ("cafe\u0301", ["café"]), (" \t\n\u3000", []), ("", []),
                         ("我爱ABC电影。", ["我", "爱", "abc", "电", "影", "。"]), ("葛\U000e0100城", ["葛\U000e0100", "城"]),
                         ("‘好’的", ["‘", "好", "’", "的"]), ("カタカナ", ["カ", "タ", "カ", "ナ"]),
                         ("나는 한국어ㅋㅋ", ["나는", "한국어ㅋㅋ"]), ("good\u3000film \U0001f600", ["good", "film", "\U0001f600"]),
                         ("हिन्दी में", ["हिन्दी", "में"]), ("می‌روم", ["می‌روم"]), ("İyi", ["i̇yi"]),
                         ("ภาษาไทยนี้", ["ภาษาไทยนี้"]), ("x\u0300", ["x\u0300"]), ("👍🏽!", ["👍🏽", "!"]),
                         ("שָׁלוֹם مُدَرِّس", ["שָׁלוֹם", "مُدَرِّس"]), ("co\u00adop", ["co\u00adop"]),
                         ("𞤀𞥄𞤁", ["𞤢𞥄𞤣"]), ("👩‍👩‍👧 ❤️", ["👩‍👩‍👧", "❤️"]), ("🇩🇪🇫🇷", ["🇩🇪", "🇫🇷"]), ("1️⃣", ["1️⃣"])]:
        assert train.tokenize(text) == tokens, text


def test_tokens_of_a_line_join_to_the_line():
    for text in ["a film", "나는 학교에 간다 .", "你好，世界。", "他说：“你好。”——‘好’……", "我有3个苹果，25%是红的。", "これは「本」です！",
                 "a film 我爱电影", "12:30见"]:
        assert train.join_tokens(train.tokenize(text)) == text


def test_vocab_keeps_what_occurs_twice_and_calls_the_rest_unknown():
    vocab = train.Vocab(train.make_vocab([["b", "a", "b"], ["a", "b", "c"]]))
    assert vocab.tokens == ["<pad>", "<unk>", "<bos>", "<eos>", "b", "a"]  # with the ids PAD, UNK, BOS, EOS
    assert vocab.encode(["a", "b", "c"]) == [5, 4, UNK] and vocab.decode([5, 4, UNK, EOS, PAD]) == ["a", "b", "<unk>"]
    assert train.count_unknown([BOS, 5, UNK, UNK, EOS, PAD]) == (2, 3)
    assert [train.shorten("x" * n) for n in (40, 41)] == ["x" * 40, "x" * 39 + "…"]


def test_data_files_are_read_as_pairs():
    for name, data in [("plain.tsv", "good film\tyes\nbad \"film\tno\n"),
                       ("cr.tsv", "good film\tyes\rbad \"film\tno\r"),
                       ("bom-crlf.tsv", "\ufeffgood film\tyes\r\n\r\nbad \"film\tno\r\n"),
                       ("header.tsv", "sentence\tlabel\ngood film\tyes\nbad \"film\tno"),
                       ("other-way.tsv", "Label\tid\treview\nyes\t1\tgood film\nno\t2\tbad \"film\n"),
                       ("holes.tsv", " good film \t yes \n\tno\nbad \"film\tno\n \u3000\tno\nbad film\t\n \t \n"),
                       ("wide.tsv", f"id\ttext\tlabel\n{'x' * 900_000}\tgood film\tyes\n\tbad \"film\tno\n"),
                       ("imdb.csv", 'review,sentiment\n"good\nfilm",yes\n"bad ""film",no\n'),
                       ("some.CSV", 'Label , Review,id\r\nyes,good film,1\r\nno,"bad ""film",2\r\n')]:
        with working_directory(), contextlib.redirect_stderr(io.StringIO()) as err:
            pairs = train.read_pairs(write(name, data), train.Sentiment)
            assert pairs == [(("good", "film"), "yes"), (("bad", '"', "film"), "no")], name
            assert ("3 lines with an empty column left out" in err.getvalue()) == (name == "holes.tsv")
    with working_directory():  # a label is on one line, without a tab
        assert train.read_pairs(write("x.csv", 'text,label\na,"so\t\nso"\n'), train.Sentiment) == [(("a",), "so so")]


def test_bad_data_files_are_one_line_with_the_place():
    for name, data, message in [("empty.tsv", "", "no line with text"), ("empty.csv", "", "no line with text"),
                                ("one.tsv", "a\tyes\nb\n", "line 2: 1 column, expected 2: text<TAB>label"),
                                ("wide.tsv", f"a\tyes\n{'x' * 1_000_001}\tno\n", "near line 2: field larger than"),
                                ("latin.tsv", b"a\tb\ncaf\xe9\tyes\n", "near line 1: 'utf-8' codec can't decode"),
                                ("no-header.csv", "good film,yes\n", "no column text or review or sentence"),
                                ("no-label.csv", "text,stars\na,5\n", "no column label or sentiment; columns are"),
                                ("long.csv", f"{'x' * 99},a\n", f"'{'x' * 39}…'"),
                                ("comma.csv", "text,label\na, b,yes\n", "line 2: 3 columns, expected 2: text,label"),
                                ("open.csv", 'text,label\ngood,"yes\nbad,no\n', "near line 3: unexpected end")]:
        with working_directory():
            raises(ValueError, [name, message], train.read_pairs, write(name, data), train.Sentiment)


def test_a_long_file_shows_that_it_is_read():
    with working_directory(), contextlib.redirect_stderr(io.StringIO()) as err:
        assert len(train.read_pairs(write("long.tsv", "a\tb\n" * 100_001), train.Sentiment)) == 100_001
    assert err.getvalue().split("\n") == ["long.tsv: 50,000 lines read", "long.tsv: 100,000 lines read", ""]


def test_a_seeded_tenth_is_held_out_and_equal_texts_stay_together():
    pairs = [(f"{i % 40}", "x") for i in range(60)]
    rest, held = train.hold_out(pairs, 1, labelled=False)
    assert len(held) == 6 and sorted(rest + held) == sorted(pairs) and not set(rest) & set(held)
    assert train.hold_out(pairs, 1, False) == (rest, held) != train.hold_out(pairs, 2, False)
    assert len(train.hold_out(pairs[:2], 1, False)[1]) == 1
    assert len(train.hold_out([(str(i), "x") for i in range(30_000)], 1, False)[1]) == 2000
    assert len(train.hold_out([("a", "x")] * 9 + [("b", "x")] * 2, 1, False)[1]) == 2  # the rarer, though over a tenth


def test_the_only_examples_of_a_class_are_in_training():
    pairs = [(str(i), "ab"[i % 2]) for i in range(18)] + [("18", "c")]
    for seed in range(30):
        assert {label for _, label in train.hold_out(pairs, seed, labelled=True)[0]} == {*"abc"}
    assert train.hold_out(pairs[:2], 0, labelled=True)[1] == []


def test_one_label_or_over_ten_labels_on_over_half_the_lines_are_refused():
    with working_directory(), contextlib.redirect_stdout(io.StringIO()):
        args = argparse.Namespace(data="data.tsv", valid=None, seed=0)
        for lines, most in (12, 10), (40, 20):
            for labels in 1, 2, most, most + 1:
                write("data.tsv", "".join(f"text {i}\tlabel {i % labels}\n" for i in range(lines)))
                train.read_split(args, argparse.Namespace(columns=train.Sentiment.columns, labelled=False))
                if 2 <= labels <= most:
                    train.read_split(args, train.Sentiment)
                else:
                    raises(ValueError, f"{labels} different labels in {lines} lines, expected 2 to {most};",
                           train.read_split, args, train.Sentiment)


def test_what_was_read_is_told_before_training():
    lines = [f"good film w{i}\tpos\nbad film w{i}\tneg\n" for i in range(20)]
    with working_directory():
        write("data.tsv", "".join(lines) + "one more\tPos\n" + "".join("good " * n + "\tpos\n" for n in (256, 257)))
        write("valid.tsv", "good film w1\tpos\nbad new words\tneg\n")
        out, err = run_train("--task sentiment --data data.tsv --valid valid.tsv --steps 1")
        assert out.split("\n")[:3] == [
            "data.tsv: 43 lines for training; 2 of valid.tsv for validation, 1 of them also in the training set",
            "labels: pos 22, neg 20, Pos 1",
            "words: 23 tokens known, those that occur twice in training; 33.3% of the validation tokens are not"], out
        assert "data.tsv: 1 texts have more than 256 tokens; the rest of them is cut off\n" in err
        write("pairs.tsv", PAIRS + f"{'a ' * 129}\tx\n{'a ' * 128}\tA\nc\t\n")
        out, err = run_train("--task translate --data pairs.tsv --valid pairs.tsv --steps 1")
        assert "pairs.tsv: 27 lines for training; 27 of pairs.tsv for validation, 27 of them" in out
        assert "source: 10 tokens known" in out and "target: 10 tokens known" in out
        assert "1 pairs with more than 128 tokens on a side" in err and "1 lines with an empty column left out" in err
        assert saved("checkpoints/pairs.pt")["config"]["max_len"] == 129  # the longest and EOS


# --- train.py: tasks


def toy(name):
    """A toy task that is read, and its options."""
    args = train.with_defaults([], train.TASKS[name].recipe)
    return train.TASKS[name].read(args), args


@contextlib.contextmanager
def quick_copy():
    """Inside, copy has 20 held-out examples and rounds of 3 batches."""
    examples, batches = train.Copy.examples, train.Copy.batches
    with swapped(train.Copy, "batches", lambda *args: itertools.islice(batches(*args), 3)), \
            swapped(train.Copy, "examples", lambda task, rng, size, held_out:
                    examples(task, rng, 20 if held_out else size, held_out)):
        yield


def test_toy_remarks_negate_and_hold_out_whole_sentences():
    training, held = train.toy_remarks()
    labels = {" ".join(tokens): label for tokens, label in training + held}
    assert labels["the film was not great"] == labels["the film was bad"] == "negative"
    assert labels["the film was not bad"] == labels["the film was great"] == "positive"
    assert len(labels) == len(training) + len(held) == 1080 and len(held) > 200


def test_copy_draws_long_sequences_that_repeat_symbols_between_bos_and_eos():
    examples = toy("copy")[0].examples(random.Random(1), 4000, held_out=False)
    assert all(src[-1] == EOS and tgt == [BOS, *src] for src, tgt in examples)
    sources = [src[:-1] for src, _ in examples]
    neighbours = [pair for src in sources for pair in zip(src, src[1:])]
    assert abs(statistics.mean(map(len, sources)) - 7.15) < 0.15  # the mean of the longer of two lengths up to 10
    assert abs(statistics.mean(a == b for a, b in neighbours) - (0.3 + 0.7 * 0.1)) < 0.02
    assert {len(src) for src in sources} == {*range(1, 11)} and set(sum(sources, [])) == {*range(4, 14)}


def test_copy_never_trains_on_what_it_is_judged_by():
    task, args = toy("copy")
    held_out = {tuple(src) for src, _ in task.valid}
    trained = {(*row[:row.index(EOS)], EOS) for number in range(5) for src, _ in task.batches(args, number)
               for row in src.tolist()}
    assert len(task.valid) == 1000 and len(held_out) > 900 and not held_out & trained
    assert {(symbol, EOS) for symbol in range(4, 14)} <= trained  # each single symbol, too
    assert [len(src) for src, _ in task.batches(args, 0)] == [64] * 50


def test_the_label_is_the_decoder_input_one_step_later():
    decoder_input, labels = train.shift(torch.tensor([[BOS, 7, 8, 9, EOS]]))
    assert decoder_input.tolist() == [[BOS, 7, 8, 9]] and labels.tolist() == [[7, 8, 9, EOS]]


def test_predict_passes_the_padding_on_so_that_batch_mates_change_nothing():
    task, args = toy("sentiment")
    model = task.build(task.config(args)).double().eval()
    short, long = sorted(task.valid, key=lambda example: len(example[0]))[::len(task.valid) - 1]
    alone, both = (task.predict(model, task.batch(examples))[0] for examples in ([short], [short, long]))
    assert len(short[0]) < len(long[0])
    same(alone[0], both[0])


def test_padding_is_in_neither_loss_nor_accuracy():
    task, args = toy("copy")
    model = task.build(task.config(args)).eval()
    task.valid = task.valid[:50]
    losses, hits = [], []
    for src, tgt in task.valid:  # one by one, so nothing is padded
        src, tgt = torch.tensor([src]), torch.tensor([tgt])
        logits = model(src, tgt[:, :-1], make_padding_mask(src), make_target_mask(tgt[:, :-1])).flatten(0, 1)
        losses += F.cross_entropy(logits, tgt[0, 1:], reduction="none").tolist()
        hits += (logits.argmax(dim=-1) == tgt[0, 1:]).tolist()
    found = train.Task.evaluate(task, model, "cpu")
    assert abs(found["loss"] - statistics.mean(losses)) < 1e-5 and found["accuracy"] == sum(hits) / len(hits) > 0


def test_exact_match_takes_targets_of_any_length():
    task, _ = toy("copy")
    task.valid = [(task.encode("1 2 3"), [BOS, *task.encode(target)]) for target in ("1 2 3", "1 2", "3")]
    with swapped(train.Copy, "answers", lambda *args: ["1 2 3", "1 2", "1"]), \
            swapped(train.Task, "evaluate", lambda *args: {"loss": 2.0, "accuracy": 0.0}):
        assert task.evaluate(None, "cpu") == {"loss": 2.0, "accuracy": 2 / 3}


def test_length_batches_hold_each_example_once_and_little_padding():
    rng = random.Random(0)
    lengths = [rng.randint(1, 39) for _ in range(500)]
    examples = [([i] * n, [i] * (n + 1)) for i, n in enumerate(lengths)]
    counts_tokens, counts_examples = train.Translate({"": []}), train.Sentiment({"": []})
    plain = counts_tokens.length_batches(examples, 300)
    mixed, again, other = (counts_tokens.length_batches(examples, 300, random.Random(seed)) for seed in (1, 1, 2))
    assert len(plain) == len(mixed) and plain != mixed == again != other
    for batches in plain, mixed:
        assert sorted(example for batch in batches for example in batch) == sorted(examples)
        assert all(len(batch) * max(len(tgt) for _, tgt in batch) <= 300 for batch in batches)
        assert sum(len(batch) * max(len(src) for src, _ in batch) for batch in batches) < 1.1 * sum(lengths)
    assert list(map(len, counts_examples.length_batches(examples, 64))) == [64] * 7 + [52]
    assert list(map(len, counts_tokens.length_batches([([1] * 9, 0)] * 3, 5))) == [1] * 3  # too long: alone


def test_an_epoch_of_more_than_500_batches_is_several_rounds():
    task = train.Sentiment({"words": train.SPECIAL, "labels": ["a", "b"]})
    args = argparse.Namespace(batch_size=2, seed=3)
    task.train = [([i // 2 + 4] * 3, 0) for i in range(2002)]

    def ids(number):
        return [tokens[0, 0].item() for tokens, _ in task.batches(args, number)]
    first, second = [ids(number) for number in range(3)], [ids(number) for number in range(3, 6)]
    assert [len(part) for part in first] == [334, 334, 333] and first == [ids(number) for number in range(3)]
    assert len(sum(first, [])) == len(sum(second, [])) == 1001 and first != second
    task.train = task.train[:1000]
    assert len(ids(0)) == 500


def test_models_of_file_tasks():
    with working_directory(), contextlib.redirect_stdout(io.StringIO()):
        args = train.with_defaults(["--data", write("pairs.tsv", PAIRS)], train.Translate.data_recipe)
        task = train.Translate.read(args)
    model = task.build(task.config(args))
    assert model.generator.weight is model.tgt_embed[0].embedding.weight  # one matrix (paper 3.4)
    assert task.score({"loss": 1.0, "accuracy": 0.0}) > task.score({"loss": 2.0, "accuracy": 1.0})
    raises(ValueError, "x.tsv: every pair has more than 2 tokens", task.encode_pairs, [("abc", "d")], "x.tsv", 2)
    task = toy("sentiment")[0]
    assert task.score({"loss": 2.0, "accuracy": 0.9}) > task.score({"loss": 1.0, "accuracy": 0.8})


def test_a_sample_shows_text_answer_and_label_and_goes_round_the_validation_set():
    copy, sentiment = toy("copy")[0], toy("sentiment")[0]
    copy.valid = [(copy.encode(text), [BOS, *copy.encode("7 7")]) for text in ("1 2", "3", "4")]
    sentiment.valid = [(sentiment.encode("the film is good"), 1), (sentiment.encode("so dull"), 0)]
    for task, number, line in [(copy, 1, "3  ->  a 0.9 (7 7)"), (copy, 3, "1 2  ->  a 0.9 (7 7)"),
                               (sentiment, 1, "so dull  ->  a 0.9 (negative)")]:
        with swapped(task, "answers", lambda model, rows: ["a\t0.9"]):
            assert task.sample(None, number) == line


# --- train.py: the loop


def test_loss_is_pytorchs_mean_over_the_labels_that_count():
    logits, labels = torch.randn(6, 5, requires_grad=True), torch.tensor([0, 3, -100, 4, -100, 1])
    for smoothing in 0.0, 0.1:
        same(train.mean_loss(logits, labels, smoothing),
             F.cross_entropy(logits, labels, label_smoothing=smoothing), atol=1e-6)
    loss = train.mean_loss(logits, torch.full((6,), -100), 0.1)  # a batch without labels: no nan
    loss.backward()
    assert loss.item() == 0 and logits.grad.abs().sum() == 0


def test_ranks_of_unequal_shares_make_the_gradient_of_the_whole_batch():
    logits, labels = rand(5, 7), torch.tensor([1, -100, 3, 0, 6])
    whole = train.mean_loss(logits, labels, 0.1)
    slices = [slice(rank, None, 2) for rank in range(2)]  # of 3 and 1 labels
    with swapped(torch.distributed, "all_reduce", lambda count: count.fill_(4)), \
            swapped(train, "rank_and_ranks", lambda: (0, 2)):
        shares = [train.mean_loss(logits[rows], labels[rows], 0.1) for rows in slices]
    same(torch.autograd.grad(sum(shares) / 2, logits), torch.autograd.grad(whole, logits))


def test_the_rate_warms_up_and_falls_to_zero():
    rate = train.warm_up_and_decay(steps=100, warmup=20)
    assert rate(0) == 1 / 20 and rate(19) == rate(20) == 1 == max(map(rate, range(101))) and rate(100) == 0
    assert abs(rate(60) - 0.5) < 1e-12 and rate(30) > 0.96 and rate(90) < 0.04  # a cosine is flat at both ends
    assert train.warm_up_and_decay(steps=10, warmup=0)(0) == 1
    args = argparse.Namespace(lr=0.5, warmup=50)
    assert [train.Run(nn.Linear(1, 1), args, steps).warmup for steps in (100, 99, 1)] == [50, 19, 0]


@slow
def test_training_equals_a_plain_loop():
    for name, smoothing, options in ("copy", 0.0, "--batch-size 8"), ("translate", 0.1, "--data pairs.tsv"):
        argv = f"{SMALL} --task {name} --steps 3 --warmup 1 --lr 0.01 --dropout 0.1 {options}".split()
        with working_directory(), quick_copy(), contextlib.redirect_stdout(io.StringIO()):
            write("pairs.tsv", PAIRS * 40)
            task, model, args, path, *_ = train.prepare(name, train.make_parser().parse_args(argv), argv)
            plain = task.build(task.config(args)).double()
            plain.load_state_dict(model.double().state_dict())
            assert train.train(task, model.eval(), args, torch.device("cpu"), path) == 0
            same(list(saved(path)["model"].values()), list(model.state_dict().values()), atol=0)
        optimizer, norms = torch.optim.AdamW(plain.parameters(), betas=(0.9, 0.98)), []
        train.set_seed(args.seed, 0, 0)
        for rate, (src, tgt) in zip([0.01, 0.01, 0.005], task.batches(args, 0)):
            optimizer.param_groups[0]["lr"] = rate
            logits = plain(src, tgt[:, :-1], make_padding_mask(src), make_target_mask(tgt[:, :-1])).flatten(0, 1)
            loss = F.cross_entropy(logits, tgt[:, 1:].flatten(), ignore_index=PAD, label_smoothing=smoothing)
            optimizer.zero_grad()
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
            optimizer.step()
        assert max(norms) > 1  # something is clipped
        same(list(model.parameters()), list(plain.parameters()))


def test_progress_counts_tokens_and_renews_its_line_on_a_terminal_only():
    for terminal, name, live in (True, "xterm", True), (True, "dumb", False), (False, "xterm", False):
        out, clock = io.StringIO(), [10.0]
        out.isatty = lambda: terminal
        with contextlib.redirect_stdout(out), mock.patch.dict(os.environ, TERM=name, COLUMNS="40"), \
                swapped(time, "monotonic", lambda: clock[0]):
            progress = train.Progress("copy", 14)
            for step, clock[0] in (5, 10.05), (6, 10.1), (7, 10.25):
                progress.update(step, torch.tensor(2.0), [torch.tensor([[5, 6, PAD]]), torch.tensor([1])])
            clock[0] = 70.0
            progress.end("done")
        renewed = "".join(f"\r{f'copy  step  {line}':.39}\x1b[K" for line in  # cut to the width; not each within 0.1 s
                          ("5/14  loss 2.000  40 tokens/s", "7/14  loss 2.000  24 tokens/s"))
        end = "copy  step  7/14  loss 2.000  24 tokens/s  2:20 left  done\n"
        assert out.getvalue() == (f"{renewed}\r{end}" if live else end)


@slow
def test_both_toys_solve_their_task_and_their_checkpoints_rebuild_the_model():
    out = trained_toys()[1]
    with with_toys():
        for name, metric in ("sentiment", "accuracy"), ("copy", "greedy exact match"):
            assert f"{name}: {metric} 100.0% on the validation set" in out
            assert f"python translate.py --checkpoint checkpoints/{name}.pt {train.TASKS[name].question}\n" in out
            plain = saved(f"checkpoints/{name}.pt")
            assert plain.keys() == {"task", "config", "vocab", "seed", "step", "history", "metrics", "model"}
            task, model, _ = train.load_checkpoint(train.default_path(name), "cpu")
            same(list(model.state_dict().values()), list(plain["model"].values()), atol=0)
            task.valid = task.toy_examples()
            assert not model.training and abs(task.evaluate(model, "cpu")["loss"] - plain["metrics"]["loss"]) < 1e-6


def same_runs(a, b):
    """Asserts that two checkpoints hold the same weights and the same history, bit for bit."""
    assert a["history"] == b["history"] and a["step"] == b["step"] and a.keys() == b.keys()
    assert all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"])


@slow
def test_the_best_weights_are_kept_not_the_last():
    losses = iter([3.0, 1.0, 1.0, 2.0])
    with working_directory(), quick_copy(), counted(train, "save_checkpoint") as save, \
            swapped(train.Copy, "evaluate", lambda *args: {"loss": next(losses), "accuracy": 0.5}):
        run_train("--task copy --steps 12 --batch-size 1")
        checkpoint = saved("checkpoints/copy.pt")
    assert checkpoint["step"] == 9 and checkpoint["metrics"]["loss"] == 1.0  # of equals the one that trained longer
    assert [(entry["loss"], entry["step"]) for entry in checkpoint["history"]] == [(3, 3), (1, 6), (1, 9), (2, 12)]
    weights = [call.args[1]["model"]["generator.weight"] for call in save.call_args_list]  # as saved after each round
    assert [torch.equal(w, checkpoint["model"]["generator.weight"]) for w in weights] == [False, False, True, True]


def weights_after(line):
    """All weights of a copy model as one tensor, trained in a thread, as in a notebook's or a server's."""
    with working_directory(), quick_copy(), contextlib.redirect_stdout(io.StringIO()):
        argv = f"--device cpu --task copy {SMALL} {line}".split()
        thread = threading.Thread(target=train.main, args=(argv,))
        thread.start()
        thread.join()
        return torch.cat([w.flatten() for w in saved("checkpoints/copy.pt")["model"].values()])


@slow
def test_the_same_seed_gives_the_same_weights():
    first, again, other = (weights_after(f"--steps 2 --dropout 0.1 --seed {seed}") for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert len({train.mixed_seed(a, b) for a in range(20) for b in range(20)}) == 400
    first, again, other = ((train.set_seed(seed), random.random(), torch.rand(1))[1:] for seed in (1, 1, 2))
    assert first == again and first[0] != other[0] and first[1] != other[1]


@slow
def test_fused_trains_to_the_formulas_weights_and_bf16_close_to_them():
    with counted(train, "Run") as run:
        formula, bf16, fused = (weights_after(f"--steps 8 --lr 5e-4 {option}")
                                for option in ("", "--precision bf16", "--fused"))
    assert (fused - formula).abs().max() < 1e-3 and 1e-6 < (bf16 - formula).abs().mean() < 3e-3
    switches = [[module.fused for module in call.args[0].modules() if hasattr(module, "fused")]
                for call in run.call_args_list]
    assert switches == [[False] * 10] * 2 + [[True] * 10]  # 3 attentions and 7 norms of one layer on each side


def interrupted_at(step):
    """A Progress that is interrupted at that step."""
    class Interrupted(train.Progress):
        def update(self, now, *rest):
            super().update(now, *rest)
            if now == step:
                raise KeyboardInterrupt
    return Interrupted


@slow
def test_a_resumed_run_equals_one_that_was_never_interrupted():
    for task, options in [("copy", "--steps 8"), ("sentiment", "--epochs 3 --batch-size 200"),
                          ("translate", "--data pairs.tsv --epochs 3 --batch-size 12")]:
        with working_directory(), quick_copy():
            write("pairs.tsv", PAIRS)
            options += f" --task {task} --dropout 0.2 --checkpoint"
            run_train(f"{options} whole.pt")
            whole = saved("whole.pt")
            first, second, *_, last = (entry["step"] for entry in whole["history"])
            with swapped(train, "Progress", interrupted_at(second - 1)):
                err = run_train(f"{options} parts.pt", status=130)[1]
            resume = f"--task {task} --checkpoint parts.pt --resume"
            assert f"train.py: interrupted after step {first}; to continue: python train.py {resume}\n" in err
            assert len(saved("parts.pt")["history"]) == 1 and {"run", "options"} < saved("parts.pt").keys()
            for message in f"resuming after step {first}", f"parts.pt: the run is complete, {last} ":
                assert message in run_train(resume, small="")[0]
                same_runs(whole, saved("parts.pt"))


def train_as_a_rank():
    """What each of the two processes of the next test does."""
    def predict(task, model, batch):
        if not share:
            share.extend([len(batch[0]), torch.initial_seed()])
        return right(task, model, batch)
    share, right, dropout = [], train.Copy.predict, "--steps 6 --batch-size 8 --dropout 0.3"
    with quick_copy(), swapped(train.Copy, "predict", predict):
        for progress, line in [(train.Progress, "--steps 1 --batch-size 7 --checkpoint two.pt"),
                               (train.Progress, f"{dropout} --checkpoint whole.pt"),
                               (interrupted_at(5), f"{dropout} --checkpoint parts.pt"),
                               (train.Progress, "--resume --checkpoint parts.pt")]:
            os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
            with swapped(train, "Progress", progress):
                try:
                    train.main(f"--device cpu --task copy {SMALL} {line}".split())
                except KeyboardInterrupt:
                    torch.distributed.destroy_process_group()
    write(f"share-{os.environ['RANK']}", f"{share[0]} {share[1]}")


@slow
def test_two_processes_make_the_run_of_one_and_resume_it():
    with working_directory(), quick_copy():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = dict(os.environ, TORCHELASTIC_RUN_ID="x", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                           OMP_NUM_THREADS="1", PYTHONPATH=str(HERE), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        code = "import test_all; test_all.train_as_a_rank()"
        command = sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", "-c", code  # of torch 2.6 itself
        processes = [subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                      env=dict(environment, RANK=rank, LOCAL_RANK=rank)) for rank in "01"]
        try:
            results = [process.communicate(timeout=120) for process in processes]
        finally:
            for process in processes:
                process.kill()  # does nothing to one that has ended
        assert [process.returncode for process in processes] == [0, 0], results
        assert results[0][0].count("parameters") == 4 and results[1] == ("", ""), results  # one of them prints
        shares = [Path(f"share-{rank}").read_text().split() for rank in "01"]
        assert [rows for rows, _ in shares] == ["4", "3"] and shares[0][1] != shares[1][1]  # rows, dropout
        same_runs(saved("whole.pt"), saved("parts.pt"))
        run_train("--task copy --steps 1 --batch-size 7 --checkpoint one.pt")
        one, two = saved("one.pt"), saved("two.pt")
        assert abs(one["history"][0]["train_loss"] - two["history"][0]["train_loss"]) < 1e-6
        # but for keys' biases, whose gradient is 0 but for rounding, of which Adam makes a whole step
        for name in one["model"]:
            assert "w_k.bias" in name or torch.allclose(one["model"][name], two["model"][name], atol=1e-4), name
        with swapped(train, "rank_and_ranks", lambda: (1, 2)):
            train.save_checkpoint("rank-1.pt", {})
        assert {path.suffix for path in Path().iterdir()} == {".pt", ""} and not os.path.exists("rank-1.pt")


@slow
def test_resume_refuses_what_is_not_the_interrupted_run():
    options = "--task translate --data pairs.tsv --epochs 2 --batch-size 24"
    with working_directory():
        write("pairs.tsv", PAIRS)
        with swapped(train, "Progress", interrupted_at(5)):
            run_train(f"{options} --checkpoint x.pt", status=130)
        with swapped(train, "Progress", interrupted_at(2)):
            _, err = run_train(f"{options} --checkpoint first.pt", status=130)
        assert "interrupted in the first round; nothing of it is saved" in err
        for line, message in [("--d-model 32", "--d-model 32: the interrupted run has 16"),
                              ("--fused", "--fused True: the interrupted run has False"),
                              ("--steps 9", "--steps 9: the interrupted run has None"),
                              ("--task sentiment", "nothing to resume: x.pt holds no sentiment run")]:
            refused(train.main, message, f"--task translate --checkpoint x.pt --resume {line}")
        write("pairs.tsv", PAIRS + "f g\tF G\nf g\tF G\n" * 9)
        _, err = run_train("--task translate --checkpoint x.pt --resume", status=2)
        assert "pairs.tsv is not what the interrupted run was trained on" in err
        _, err = run_train(f"{options} --checkpoint x.pt")
        assert "x.pt holds an unfinished run (step 4), which this one replaces" in err
        assert "python train.py --task translate --checkpoint x.pt --resume" in err


@slow
def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_weights():
    losses = iter([1.0] * 4 + [math.nan] * 2)
    with working_directory(), quick_copy():
        with swapped(train, "mean_loss", lambda logits, *rest: logits.mean() * 0 + next(losses)):
            out, _ = run_train("--task copy --steps 6", status=1)
        assert out.count("not finite") == 1 and "best weights so far are in checkpoints/copy.pt" in out
        before = Path("checkpoints/copy.pt").read_bytes()
        assert saved("checkpoints/copy.pt")["step"] == 3
        with swapped(train.Copy, "evaluate", lambda *args: {"loss": math.nan, "accuracy": 0.0}):
            out, _ = run_train("--task copy --steps 2", status=1)
        assert "Nothing is saved" in out and Path("checkpoints/copy.pt").read_bytes() == before


@slow
def test_toys_take_one_thread_larger_models_and_the_users_word_more():
    asked, before = [], torch.get_num_threads()
    with working_directory(), swapped(train, "train", lambda *args: asked.append(torch.get_num_threads()) or 0), \
            mock.patch.dict(os.environ):
        os.environ.pop("OMP_NUM_THREADS", None)
        torch.set_num_threads(2)
        for size, environment in (64, {}), (128, {}), (64, {"OMP_NUM_THREADS": "2"}):
            os.environ.update(environment)
            run_train(f"--task copy --d-model {size}")
            assert torch.get_num_threads() == 2
        torch.set_num_threads(before)
    assert asked == [1, 2, 2]


# --- train.py: files, devices, options


@slow
def test_a_failed_write_keeps_the_old_checkpoint():
    with working_directory(), quick_copy():
        run_train("--task copy --steps 1")
        before = Path("checkpoints/copy.pt").read_bytes()
        with swapped(os, "replace", side_effect=OSError(28, "No space left on device")):
            _, err = run_train("--task copy --steps 2", status=2)
        assert "train.py: error: checkpoints/copy.pt: No space left on device\n" in err
        assert os.listdir("checkpoints") == ["copy.pt"] and Path("checkpoints/copy.pt").read_bytes() == before


@slow
def test_a_checkpoint_goes_where_a_link_or_a_tilde_points_and_never_over_a_foreign_file():
    line = "--task copy --steps 1 --checkpoint"
    with working_directory() as directory, quick_copy(), \
            mock.patch.dict(os.environ, HOME=str(directory), USERPROFILE=str(directory)):
        os.mkdir("real")
        os.symlink("real/target.pt", "link.pt")
        for place, target in [("link.pt", "real/target.pt"), ("~/home.pt", "home.pt"), ("new/deep.pt", "new/deep.pt")]:
            for _ in range(2):  # the second replaces the first
                run_train(f"{line} {place}")
                assert saved(target)["task"] == "copy"
        assert os.path.islink("link.pt") and not os.path.exists("~")
        write("notes.pt", "my notes")
        for place, message in [("notes.pt", "not a checkpoint"), ("notes.txt", "must end in .pt"), ("", "is empty"),
                               ("x" * 260 + ".pt", "name too long"), ("real/target.pt/x.pt", "target.pt")]:
            assert refused(train.main, message, line, place) == ""
        assert Path("notes.pt").read_text() == "my notes"


@slow
def test_each_data_file_has_a_checkpoint_of_its_own():
    with working_directory():
        for name in "pairs.de-en.tsv", "copy.tsv":
            write(name, PAIRS)
        out, _ = run_train("--task translate --steps 1 --data pairs.de-en.tsv")
        assert os.listdir("checkpoints") == ["pairs.de-en.pt"]
        assert "saved to checkpoints/pairs.de-en.pt\nask it: python translate.py --checkpoint checkpoints/pairs" in out
        write("pairs.de-en.tsv", "other words\tmore words\n" * 9 + PAIRS)
        _, err = run_train("--task translate --steps 1 --data pairs.de-en.tsv")
        assert "checkpoints/pairs.de-en.pt holds a model of other data, which this run replaces" in err
        refused(train.main, "checkpoints/copy.pt is the place of a toy", "--task translate --data copy.tsv")


def test_wrong_arguments_of_train_are_one_line_before_any_work():
    with working_directory() as directory:
        for name, text in [("one.tsv", "a b\tyes\n"), ("two.tsv", "a b\tyes\nc d\tno\n"),
                           ("odd.tsv", f"a b\t{'maybe ' * 50}\n"),
                           ("swapped.tsv", "".join(f"{'pn'[i % 2]}\treview {i}\n" for i in range(30)))]:
            write(name, text)
        before = sorted(directory.rglob("*"))
        for line, message in [
                ("--task poem", "invalid choice"), ("--device nonsense", "try --device cpu"),
                ("--data two.tsv", "need a single --task"), ("--task copy --data two.tsv", "copy takes no --data"),
                ("--resume", "--resume need a single --task"), ("--checkpoint x.pt", "need a single --task"),
                ("--task copy --resume", "nothing to resume"),
                ("--task copy --epochs 3", "this run counts steps (250)"),
                ("--task sentiment --steps 3 --epochs 3", "use --steps alone"), ("--task translate", "needs --data"),
                ("--task sentiment --valid two.tsv", "--valid needs --data"), ("--task copy --data=", "is empty"),
                ("--task sentiment --data nowhere.tsv", "nowhere.tsv: No such file"),
                ("--task sentiment --data two.tsv", "too few different texts"),  # nothing to hold out
                ("--task translate --data one.tsv", "too few different texts"),  # nothing to train on
                ("--task sentiment --data swapped.tsv", "30 different labels in 30 lines, expected 2 to 15; are"),
                ("--task sentiment --data two.tsv --valid odd.tsv", "label 'maybe maybe maybe maybe maybe maybe may…'"),
                ("--task copy --d-model 31", "d_model (31) must be a positive multiple of num_heads (2)"),
                ("--task copy --d-model 99999998", "can't allocate memory"),
                *((f"--{option} 0", "of at least 1") for option in
                  ("epochs", "steps", "batch-size", "layers", "d-model", "heads", "d-ff")),
                ("--steps 1.5", "whole number"), ("--steps 9999999999", "and below"), ("--lr nan", "number"),
                ("--lr 0", "number"), ("--lr 10", "below 10"), ("--dropout 1", "below 1"), ("--dropout x", "number"),
                ("--warmup -1", "of at least 0"), ("--seed -1", "of at least 0"), (f"--seed {2 ** 63}", "below"),
                ("--norm mid", "invalid choice")]:
            refused(train.main, message, line)
        assert [path for path in sorted(directory.rglob("*")) if path.name != "checkpoints"] == before


def test_what_is_typed_counts_before_the_recipe():
    assert train.with_defaults([], train.Sentiment.recipe).seed == 42
    line = f"--seed {2 ** 63 - 1} --dropout 0 --warmup 0 --steps 7"
    typed = train.with_defaults(line.split(), train.Sentiment.data_recipe)
    assert (typed.seed, typed.dropout, typed.warmup, typed.steps, typed.lr) == (2 ** 63 - 1, 0, 0, 7, 1e-3)


def test_recipes_are_those_that_the_readme_measured():
    names = "epochs steps batch_size lr warmup dropout layers d_model heads d_ff norm".split()
    for recipe, values in [(train.Sentiment.recipe, (6, None, 40, 6e-3, 50, 0, 2, 32, 4, 64, "post")),
                           (train.Sentiment.data_recipe, (8, None, 64, 1e-3, 100, 0.5, 2, 128, 4, 128, "pre")),
                           (train.Copy.recipe, (None, 250, 64, 8e-3, 20, 0, 1, 64, 2, 64, "pre")),
                           (train.Translate.data_recipe, (15, None, 1500, 3e-3, 200, 0.15, 3, 128, 4, 256, "pre"))]:
        assert recipe == dict(zip(names, values))
    assert train.Copy.data_recipe is train.Translate.recipe is None


def test_devices():
    def auto(gpu):
        with swapped(torch.cuda, "is_available", lambda: gpu), contextlib.redirect_stderr(io.StringIO()) as err:
            return train.pick_device("auto"), err.getvalue()

    with swapped(torch.cuda, "_lazy_init", side_effect=RuntimeError("no\nGPU")) as started:  # also where there is one
        assert train.pick_device("cpu") == torch.device("cpu") and auto(False) == (torch.device("cpu"), "device: cpu\n")
        assert not started.called  # the CPU never touches CUDA
        for name in "nonsense", "cuda:99", "meta", "cpu:x":
            raises(ValueError, f"--device {name} cannot be used here; try --device cpu: ", train.pick_device, name)
        raises(ValueError, r"RuntimeError('no\nGPU')", train.pick_device, "cuda:99")  # one line
    ranks = dict(TORCHELASTIC_RUN_ID="x", RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    with swapped(torch.cuda, "device_count", lambda: 2), swapped(torch, "zeros", lambda *size, device: torch.ones(())):
        assert auto(True) == (torch.device("cuda"), "device: cuda\n")
        with mock.patch.dict(os.environ, ranks):
            assert train.pick_device("cuda") == torch.device("cuda:1")
            assert train.pick_device("cpu") == torch.device("cpu")
            raises(ValueError, "2 processes need a GPU each, of 2; try cuda or cpu", train.pick_device, "cuda:0")
            os.environ["LOCAL_WORLD_SIZE"] = "3"
            raises(ValueError, "3 processes need", train.pick_device, "cuda")
    with mock.patch.dict(os.environ, RANK="1", WORLD_SIZE="abc"):
        os.environ.pop("TORCHELASTIC_RUN_ID", None)
        assert train.rank_and_ranks() == (0, 1)  # without torchrun RANK means nothing


@slow
def test_a_closed_pipe_and_a_full_disk_end_the_process_without_a_traceback():  # not even when the exit flushes again
    with with_toys():
        for line, shell, status, message in [
                ("--device cpu --evaluate", "| true; exit ${PIPESTATUS[0]}", 141, ""),
                ("--device cpu 1", ">/dev/full", 2, "translate.py: error: stdin or stdout: No space left on device\n")]:
            done = subprocess.run(["bash", "-c", f"'{sys.executable}' -W error '{HERE}/translate.py' {line} {shell}"],
                                  capture_output=True, text=True,
                                  env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""})
            assert (done.returncode, done.stdout, done.stderr) == (status, "", message)


def test_what_is_read_as_utf8_is_written_as_utf8_unless_a_terminal_or_the_user_decides():
    def main(argv=None):
        print("€")
        return 0
    for terminal, variables, written in [(False, {}, "€\n".encode()), (True, {}, b"\\u20ac\n"),
                                         (False, {"PYTHONIOENCODING": "latin-1"}, b"\\u20ac\n")]:
        out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
        out.isatty = lambda: terminal
        with mock.patch.dict(os.environ), swapped(sys, "stdout", out):
            os.environ.pop("PYTHONIOENCODING", None)
            os.environ.update(variables)
            raises(SystemExit, "0", train.run, main)
        assert out.buffer.getvalue() == written


def test_run_meets_every_kind_of_stream_and_error():
    def failing(error):
        def main(argv=None):
            raise error
        return main

    closed, broken = io.StringIO(), BrokenPipeError(32, "Broken pipe")
    closed.write = mock.Mock(side_effect=broken)
    for error, status, message in [(OSError(28, "No space", "x.pt"), 2, "test_all.py: error: x.pt: No space\n"),
                                   (OSError(9, "Bad file descriptor"), 2,
                                    "test_all.py: error: stdin or stdout: Bad file descriptor\n"),
                                   (broken, 141, ""),
                                   (KeyboardInterrupt("; goes on"), 130, "test_all.py: interrupted; goes on\n")]:
        found, _, err = call(failing(error))
        assert (found, err.lstrip("\n")) == (status, message)
    argv = f"--device cpu --task copy --steps 1 {SMALL}".split()
    with working_directory(), quick_copy(), contextlib.redirect_stderr(io.StringIO()) as err:
        anything = argparse.Namespace(write=lambda text: None, flush=lambda: None)  # print asks for no more
        for stdout, status in (closed, "141"), (None, "0"), (anything, "0"):
            with swapped(sys, "stdout", stdout):
                raises(SystemExit, status, train.run, train.main, argv)
        assert err.getvalue() == ""
        with swapped(sys, "stderr", None), contextlib.redirect_stdout(io.StringIO()) as out:
            raises(SystemExit, "0", train.run, train.main, argv[2:])
        assert "device:" not in out.getvalue()  # which --device auto says on stderr


# --- translate.py


@slow
def test_translate_answers_its_arguments():
    with with_toys():
        sentiment = "--checkpoint checkpoints/sentiment.pt"
        for line, answer, message in [
                ("3 1 4 1 5", "3 1 4 1 5", ""), (f"{sentiment} the film was never dull", "positive\t(0.9..|1.000)", ""),
                (f"{sentiment} the film was not very bad at all", r"positive\t[01]\.\d\d\d",
                 "8 tokens; this model reads the first 6\n"),
                (f"{sentiment} I really loved it", r"(posi|nega)tive\t[01]\.\d\d\d",
                 "3 of 4 words are unknown to this model\n")]:
            status, out, err = on_cpu(translate.main, line)
            assert status == 0 and re.fullmatch(answer + "\n", out) and err == message, (line, out, err)
        with counted(train, "beam_decode") as search:
            assert on_cpu(translate.main, "--beams 3", "3 1", "4") == (0, "3 1 4\n", "")
        assert search.call_args.args[3] == 3


@slow
def test_translate_answers_each_line_in_order_and_names_the_bad_ones():
    lines = ["10 9 8", "", "1 2 x", "7", "1 2 3 4 5 6 7 8 9 10 1", "  2   2 ", "\ufeff4 4\r", "1 " * 500_001]
    more = [" ".join(str(1 + (i * j) % 10) for j in range(1, 2 + i % 10)) for i in range(120)]  # over a batch
    stdin = "\n".join([*lines, "\udcff", *more]).encode(errors="surrogateescape")  # a byte that is not UTF-8
    with with_toys():
        status, out, err = on_cpu(translate.main, "", stdin=stdin)
        assert out.split("\n") == ["10 9 8", "", "", "7", "", "2 2", "4 4", "", "", *more, ""]
        assert status == 2 and re.findall(r"^translate.py: line (\d+): ", err, flags=re.M) == ["3", "5", "8", "9"]
        assert "1,000,003 characters" in err  # with its end
        texts = b"the film was good\n\nso dull today\nthe film was never ever bad at all\n"
        status, out, err = on_cpu(translate.main, "--checkpoint checkpoints/sentiment.pt", stdin=texts)
        assert status == 0 and [line.split("\t")[0] for line in out.split("\n")[:3]] == ["positive", "", "negative"]
        assert err == ("2 of 13 words are unknown to this model\n"
                       "1 texts were cut off; the first has 8 tokens; this model reads the first 6\n")


@slow
def test_translate_answers_a_terminal_line_by_line_and_takes_a_stdin_of_text_or_none():
    class Typed:  # a notebook's has no buffer
        def __iter__(self):
            for line in "1 2\n", "3\n":
                yield line
                assert out.buffer.getvalue().decode().endswith(line)  # answered before the next is read

        def isatty(self):
            return True
    with with_toys(), contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())) as out, \
            contextlib.redirect_stderr(io.StringIO()) as err:
        with swapped(sys, "stdin", Typed()):
            assert translate.main(["--device", "cpu"]) == 0
        with swapped(sys, "stdin", None):
            raises(SystemExit, "2", translate.main, ["--device", "cpu"])
    assert err.getvalue() == ("one text a line; Ctrl-D ends\n"
                              "translate.py: error: no text and no stdin (see --help)\n")


@slow
def test_translate_scores_a_model():
    with with_toys():
        def evaluated(line):
            return on_cpu(translate.main, f"--evaluate {line}")[1].splitlines()
        assert re.fullmatch(r"greedy exact match 100\.0%, loss 0\.00\d on 1,000 examples", *evaluated(""))
        lines = evaluated("--checkpoint checkpoints/sentiment.pt")
        assert re.fullmatch(r"accuracy 100\.0%, loss 0\.\d\d\d on 216 examples", lines[0])
        assert lines[1:] == ["negative: recall 100.0% of 122", "positive: recall 100.0% of 94"]
        write("three.tsv", "the film was good\tpositive\nthe film was bad\tpositive\nthis story is dull\tnegative\n")
        lines = evaluated("--checkpoint checkpoints/sentiment.pt --data three.tsv")
        assert lines[0].startswith("accuracy 66.7%, loss") and lines[1:] == ["negative: recall 100.0% of 1",
                                                                            "positive: recall 50.0% of 2"]


@slow
def test_a_translation_is_learned_from_pairs_in_a_file_and_scored_with_bleu():
    def corpus_bleu(generated, targets, **options):
        assert options == {"tokenize": "none", "force": True}
        return argparse.Namespace(score=100 * sum(a == b for a, b in zip(generated, *targets)) / len(generated))
    with working_directory():
        write("pairs.tsv", PAIRS)
        run_train("--task translate --data pairs.tsv --valid pairs.tsv --steps 60 --warmup 10 --batch-size 200 "
                  "--dropout 0 --d-model 32 --heads 4 --d-ff 256")
        model = "--checkpoint checkpoints/pairs.pt"
        assert on_cpu(translate.main, model, "a v") == (0, "v a\n", "")
        write("pairs.tsv", PAIRS + "a b c d\tA B\n")  # too long for the model: left out of the loss, wrong for BLEU
        line = f"{model} --evaluate --data pairs.tsv --beams 2"
        with mock.patch.dict(sys.modules, sacrebleu=argparse.Namespace(corpus_bleu=corpus_bleu)):
            status, out, _ = on_cpu(translate.main, line)
        assert status == 0 and re.match(r"teacher-forced accuracy 100.0%, loss \d.\d{3} on 25 examples\n"
                                        r"BLEU 96.2 with 2 beams", out)
        with mock.patch.dict(sys.modules, sacrebleu=None):
            assert "no BLEU: pip install sacrebleu" in on_cpu(translate.main, line)[1]


@slow
def test_translate_trains_a_missing_default_checkpoint_first_and_says_so():
    with working_directory(), swapped(train, "train", return_value=1) as asked:
        status, out, err = on_cpu(translate.main, "1")
    assert status == 1 and out == "" and "not there yet; training it first" in err
    assert type(asked.call_args.args[0]) is train.Copy


@slow
def test_wrong_arguments_of_translate_are_one_line():
    with with_toys():
        write("text.pt", "hello")
        write("short.pt", Path("checkpoints/copy.pt").read_bytes()[:5000])
        whole = saved("checkpoints/copy.pt")
        for name, content in [("foreign", {"model": {"weight": torch.zeros(3)}}), ("code", nn.Linear(2, 2)),
                              ("poem", dict(whole, task="poem")), ("config", dict(whole, config={})),
                              ("part", {key: whole[key] for key in whole if key != "history"})]:
            torch.save(content, f"{name}.pt")
        write("pairs.tsv", PAIRS)
        run_train("--task translate --data pairs.tsv --steps 1")
        for line, message in [("3 11", "'11' is not a symbol; the symbols are 1 2 3 4 5 6 7 8 9 10"),
                              ("0", "not a symbol"), ("-1", "not a symbol"), ("<eos>", "not a symbol"),
                              ("1 " * 11, "11 tokens; this model reads 1 to 10"), ("--beams 0", "of at least 1"),
                              ("--evaluate 3", "takes no text"), ("--data pairs.tsv 1", "is for --evaluate"),
                              ("--evaluate --data pairs.tsv", "pairs.tsv: Copy draws its examples"),
                              ("--evaluate --checkpoint checkpoints/pairs.pt", "--evaluate needs --data FILE"),
                              ("--checkpoint nowhere.pt 3", "nowhere.pt: No such file"),
                              ("--checkpoint= 3", "is empty"), ("--checkpoint . 3", "directory"),
                              ("--device nonsense 3", "try --device cpu"),
                              *((f"--checkpoint {name}.pt 3", f"{name}.pt: not a checkpoint that") for name in
                                ("text", "short", "foreign", "code", "config")),
                              ("--checkpoint poem.pt 3", "the task 'poem' is unknown"),
                              ("--checkpoint part.pt 3", "a key is missing")]:
            assert refused(translate.main, message, line) == ""
        refused(translate.main, "0 tokens", "", " ")


# --- visualize.py

ORDINARY = visualize.Head("cross", 1, 1, entropy=0.5, uniform=0.15, first=0.2, last=0.2, previous=0.2, same=0.2,
                          next=0.2, padding=0.0, future=0.0, sum_error=0.0, nan=0, apart=[0.3, 0.3])


def found(weights, before=None, causal=False, rows=None, columns=None):
    """The names of what the report finds in hand-made weights (batch, heads, query, key). Without ids every query and
    key is a token; before, the weights before training, are random if not given."""
    batch, _, query, key = weights.shape
    rows, columns = (torch.tensor([ids] * batch) for ids in (rows or [5] * query, columns or [5] * key))
    before = random_weights(*weights.shape) if before is None else before
    heads = (visualize.measure_heads({"encoder": visualize.Map([w], rows, columns, causal)}) for w in (weights, before))
    return sorted({name for name, _ in visualize.find_problems(zip(*heads))})


def random_weights(*shape, mask=None):
    """Rows that sum to 1, of which nothing can be said."""
    scores = 2 * torch.randn(shape, dtype=torch.float64)
    return (scores if mask is None else scores.masked_fill(~mask, float("-inf"))).softmax(-1)


def test_report_finds_weight_on_padding_and_on_the_future_broken_rows_and_nan_and_nothing_in_ordinary_weights():
    for dtype in torch.float16, torch.bfloat16, torch.float64:
        assert found(random_weights(2, 3, 9, 9).to(dtype)) == []
    assert found(random_weights(3, 4, 6, 6, mask=subsequent_mask(6)), causal=True) == []
    weights = random_weights(2, 2, 3, 4, mask=torch.tensor([True, True, True, False]))
    weights[0, :, 2] = 0.0  # a row of padding does not count
    assert found(weights, rows=[5, 6, PAD], columns=[5, 6, 7, PAD]) == []
    assert found(torch.zeros(1, 2, 3, 3), columns=[PAD] * 3) == []  # fully masked

    def changed(row):
        weights = random_weights(2, 2, 5, 4, mask=subsequent_mask(5)[..., :4])
        weights[1, 0, 1] = torch.tensor(row)  # one row of one head
        return weights

    assert found(changed([0.7, 0.3 - 1e-9, 1e-9, 0.0]), causal=True) == ["future"]
    assert found(changed([0.7, 0.3 - 1e-9, 1e-9, 0.0])) == []  # an encoder may look ahead
    assert found(random_weights(2, 2, 5, 4), columns=[5, 6, 7, PAD]) == ["padding"]
    assert found(changed([0.6, 0.3, 0.0, 0.0])) == found(torch.zeros(1, 2, 3, 3)) == ["sum_error"]
    assert found(changed([0.6, float("nan"), 0.0, 0.0])) == ["nan"]


def test_report_finds_flat_collapsed_and_equal_heads_and_those_that_rest():
    flat, identity = torch.full((2, 4, 6, 6), 1 / 6), torch.eye(6).expand(2, 3, 6, 6)
    equal = random_weights(2, 3, 6, 6)
    equal[:, 2] = equal[:, 0]
    first = torch.full((1, 2, 8, 8), 0.2 / 7)
    first[..., 0] = 0.8
    for weights, before, names in [(flat, flat, ["flat"]), (flat, None, []),  # training made them so
                                   (identity, None, ["collapsed"]), (equal, None, ["alike"]),
                                   (torch.cat([identity, random_weights(2, 1, 6, 6).float()], 1), None, ["alike"]),
                                   (first, None, ["first"]), (first.flip(3), None, ["last"])]:
        assert found(weights, before) == names, names


def test_problems_begin_at_their_limits():
    for changes, before, names in [
            (dict(first=0.51), 0, ["first"]), (dict(first=0.49), 0, []), (dict(first=0.89, uniform=0.3), 0, []),
            (dict(last=0.51), 0, ["last"]), (dict(last=0.91, uniform=0.3), 0, ["last"]),
            (dict(padding=2e-6), 0, ["padding"]), (dict(padding=9e-7), 0, []), (dict(future=1e-12), 0, ["future"]),
            (dict(sum_error=2e-4), 0, ["sum_error"]), (dict(sum_error=9e-5), 0, []), (dict(nan=1), 0, ["nan"]),
            (dict(padding=1.0, first=0.9), 0, ["padding"]),  # on top of it no hint
            (dict(entropy=0.96), 0.975, ["flat"]), (dict(entropy=0.96), 0.93, []), (dict(entropy=0.94), 0.94, [])]:
        problems = visualize.find_problems([(ORDINARY._replace(**changes), ORDINARY._replace(entropy=before))])
        assert [name for name, _ in problems] == names, changes
    for entropies, apart, names in [((0.04, 0.03), 0.3, ["collapsed"] * 2), ((0.04, 0.06), 0.3, []),
                                    ((0.89, 0.5), 0.049, ["alike"] * 2), ((0.89, 0.5), 0.051, []),
                                    ((0.91, 0.5), 0.0, []), ((0.04, 0.03), 0.0, ["collapsed"] * 2)]:
        heads = [ORDINARY._replace(number=i + 1, entropy=entropy, apart=[1, apart] if i == 0 else [apart, 1])
                 for i, entropy in enumerate(entropies)]
        heads.append(ORDINARY._replace(layer=2, nan=1))  # does not count: another layer
        problems = visualize.find_problems(zip(heads, heads))
        assert [(name, head.layer) for name, head in problems] == [*((name, 1) for name in names), ("nan", 2)], names


def test_findings_say_where_how_much_and_whether_the_task_is_solved():
    head = ORDINARY._replace(padding=3e-6)
    problems = [("first", head._replace(number=3, first=0.7)), ("first", head._replace(number=10, first=0.8)),
                ("first", head._replace(layer=2, first=0.6)), ("first", head._replace(kind="decoder"))]
    error, hint, other = visualize.make_findings([*problems, ("padding", head._replace(number=2))], accuracy=0.99)
    assert error.startswith("error: cross, layer 1, head 2: up to 3e-06 of a row") and "solved" not in error
    assert hint.startswith("hint: cross, layer 1, heads 3, 10; layer 2, head 1: 0.80 of the weight is on the first")
    assert hint.endswith("The task is solved all the same (99.0%).") and other.startswith("hint: decoder, layer 1,")
    hint, _, last = visualize.make_findings(problems, accuracy=0.98)
    assert "solved" not in hint and last.startswith("no error: ")


def test_statistics_are_those_of_a_slow_loop():
    rows = torch.tensor([[5, 6, 7], [5, 6, PAD], [5, PAD, PAD]])
    columns = torch.tensor([[5, 6, 7, 8, PAD], [5, 6, PAD, PAD, PAD], [5, PAD, PAD, PAD, PAD]])
    weights = random_weights(3, 2, 3, 5, mask=(columns != PAD)[:, None, None])
    weights[0, 1, 2] = torch.tensor([0.1, 0.2, 0.3, 0.1, 0.2])  # padding, and a sum of 0.9
    mean = statistics.mean
    for h, head in enumerate(visualize.head_statistics("cross", 1, weights, rows, columns, False)):
        queries = [(weights[b, h, q].tolist(), weights[b, 1 - h, q].tolist(), q, 4 - 2 * b)  # with the number of keys
                   for b in range(2) for q in range(3 - b)]  # with one key, the third has no choice: it does not count
        apart = mean(sum(abs(x - y) for x, y in zip(row, other)) / 2 for row, other, *_ in queries)
        expected = visualize.Head(
            "cross", 1, h + 1, nan=0, future=0, apart=[0, apart] if h == 0 else [apart, 0],
            entropy=mean(-sum(w * math.log(w) for w in row if w) / math.log(n) for row, _, _, n in queries),
            uniform=mean(1 / n for *_, n in queries), first=mean(row[0] for row, *_ in queries),
            last=mean(row[n - 1] for row, _, _, n in queries), same=mean(row[q] for row, _, q, _ in queries),
            previous=mean(row[q - 1] for row, _, q, _ in queries if q > 0),
            next=mean(row[q + 1] for row, _, q, n in queries if q + 1 < n),
            padding=max(sum(row[n:]) for row, _, _, n in queries),
            sum_error=max(abs(sum(row) - 1) for row, *_ in queries))
        for value, right in zip([*head[1:-1], *head.apart], [*expected[1:-1], *expected.apart]):
            assert abs(value - right) < 1e-9, (head, expected)


def test_statistics_are_written_short_and_in_columns():
    head = ORDINARY._replace(entropy=0.126, last=float("nan"), padding=0.00123, future=1.0, sum_error=3.21e-6)
    lines = list(visualize.table([(head, ORDINARY), (head._replace(layer=2), ORDINARY)]))
    assert lines[0] == "" and lines[1].split() == ["cross", *visualize.STATISTICS] and len(lines) == 6
    assert re.split("  +", lines[2]) == ["layer 1, head 1", "0.13", "0.15", "0.20", "-", *["0.20"] * 3, "0.0012", "1",
                                         "3.2e-06"]
    assert lines[3].split() == ["before", "training", "0.50", "0.15", *["0.20"] * 5, "0", "0", "0"]
    assert {len(line) for line in lines[1:]} == {119} and lines[4].startswith("layer 2, head 1 ")
    assert all(name in visualize.LEGEND for name in visualize.STATISTICS)


def subject(name, **options):
    return visualize.Subject(name, None, torch.device("cpu"), **options)


@slow
def test_a_model_without_its_mask_is_found_out():
    with with_toys(), swapped(MultiHeadAttention, "prepare_mask", lambda self, mask, *sizes: torch.ones_like(mask)), \
            swapped(visualize, "save_pictures", lambda *args: []):
        status, out, err = call(visualize.main, "--strict", "--device", "cpu", "--text", "the film was dull")
        errors = re.findall(r"^error: (\w+),.*(padding|still to come)", out, re.M)
        assert errors == [("classifier", "padding"), ("encoder", "padding"), ("decoder", "padding"),
                          ("decoder", "still to come"), ("cross", "padding")]
        assert status == 1 and "error: classifier, layer 1, heads 1, 2, 3, 4; layer 2, heads" in out
        assert "no error" not in out and "\nclassifier attention, layer 2, mean of 4 heads" in out


@slow
def test_maps_show_the_text_what_is_generated_every_head_unknown_words_and_padding_that_is_looked_at():
    def mean_of_all(self, tokens, mask=None):
        return self.classify(self.encoder(self.embed(tokens), mask).mean(1)), []

    with with_toys(), swapped(visualize, "draw_grid", lambda *args: args), \
            contextlib.redirect_stderr(io.StringIO()) as err:
        seen, words = subject("copy", source="7 7 3"), ["7", "7·2", "3", "<eos>"]
        seen.answer = "x" * 81
        pictures = dict(visualize.draw_all([seen]))
        kind, title, names, cross, rows, columns, masked, framed = pictures["07_cross.png"]
        assert (kind, title, names, framed) == ("cross", f"cross: “7 7 3” → {'x' * 79}…", ["layer 1"], False)
        assert cross.shape == (1, 2, 4, 4) and not masked.any() and rows == columns == words
        *_, weights, rows, columns, masked, _ = pictures["06_decoder.png"]
        assert rows == words and columns == ["<bos>", *words[:3]] and torch.equal(masked, ~subsequent_mask(4)[0])
        assert not weights[..., masked].any()
        _, title, names, weights, *_ = pictures["08_untrained.png"]
        assert title.startswith("cross before and after") and names == ["layer 1\nuntrained", "layer 1\ntrained"]
        same(list(weights), [seen.maps_before["cross"][0][0], cross[0]])

        seen, words = subject("sentiment", text="I really loved it"), ["i?", "really", "loved?", "it?"]
        assert err.getvalue() == "3 of 4 words are unknown to this model\n"
        _, title, _, _, rows, columns, _, framed = dict(visualize.draw_all([seen]))["04_classifier.png"]
        assert re.match(r"classifier: “i really loved it” → negative \(.*%\)\nframed: the row that the", title)
        assert rows == columns == words and framed
        with swapped(TransformerClassifier, "forward", mean_of_all):
            assert not subject("sentiment", text="so dull").framed
        with swapped(train, "make_padding_mask", lambda ids: torch.ones_like(ids)[:, None, None]):
            columns = subject("sentiment", text="I really loved it").maps["classifier"][2]
            assert columns == [*words, "<pad>", "<pad>·2"]


def test_symbols_of_a_task_of_ones_own_and_weights_that_are_nan_are_drawn():
    class Signs(train.Copy):
        symbols = "A", "->"
    task, args = Signs.read(None), train.with_defaults([], train.Copy.recipe)
    config = task.config(args)
    model, checkpoint = task.build(config), dict(task="copy", config=config, seed=0, metrics={"accuracy": 0.0})
    with swapped(visualize, "load_or_train", lambda *args: (task, model, checkpoint)), \
            swapped(visualize, "draw_grid", lambda *args: args), \
            swapped(visualize, "draw_training", lambda *args: None):
        seen = subject("copy", source="A -> A")
        assert seen.question == "A -> A" and seen.maps["encoder"][1] == ["A", "->", "A·2", "<eos>"]
        model.encoder.norm.weight.data.fill_(math.nan)
        seen = subject("copy", source="A -> A")
        assert "error: cross, layer 1, heads 1, 2: nan" in seen.report
        *_, weights, rows, columns, _, _ = dict(visualize.draw_all([seen]))["07_cross.png"]
        assert weights.shape[2:] == (len(rows), len(columns)) and columns == ["A", "->", "A·2", "<eos>"]


@slow
def test_pictures_and_report_are_the_same_whatever_the_users_matplotlib_and_name_what_is_measured():
    names = [f"{name}.png" for name in """01_positional_encoding 02_masks 03_attention_steps 04_classifier 05_encoder
                                          06_decoder 07_cross 08_untrained 09_training 10_heads""".split()]
    with with_toys(), swapped(visualize, "draw_all", lambda subjects: [(names[1], visualize.draw_masks())]), \
            contextlib.redirect_stdout(io.StringIO()), mock.patch.dict(os.environ):
        Path("matplotlibrc").write_text("text.usetex: True\nimage.origin: lower\nfigure.autolayout: True\n"
                                        "font.size: 20\nsavefig.facecolor: red\n", encoding="utf-8")
        argv = ["--device", "cpu", "--out", "a/b", "--text", "so dull", "--source", "3 1 3"]
        strict = ["-W", "error", "-W", "ignore::DeprecationWarning"]  # old matplotlibs have some
        done = subprocess.run([sys.executable, *strict, HERE / "visualize.py", *argv], capture_output=True,
                              encoding="utf-8", env={**os.environ, "MPLBACKEND": "nonsense", "PYTHONUTF8": "1"})
        assert done.returncode == 0 and done.stderr == "", done.stderr
        files, out = {path.name: path.read_bytes() for path in Path("a/b").iterdir()}, done.stdout
        visualize.save_pictures([], Path())
        assert Path(names[1]).read_bytes() == files[names[1]]
    assert sorted(files) == [*names, "report.txt"]
    assert out.splitlines()[-11:] == [str(Path("a/b", name)) for name in ["report.txt", *names]]
    assert all(files[name].startswith(b"\x89PNG") and len(files[name]) > 5000 for name in names)
    assert re.match(r"so dull -> negative \(\d+\.\d%\)\n3 1 3 -> 3 1 3\n\ncross attention, layer 1, mean of 2", out)
    assert re.search(r"\n {6}3 +1 +3·2 +<eos>\n3 .*\n1 .*\n3·2 .*\n<eos> .*\n░ from 0.10", out)
    report = files["report.txt"].decode()
    for text in ["sentiment.pt: measured on 216 of 216 validation examples; accuracy after training 100.0%\n\nclassif",
                 "copy.pt: measured on 250 of 1,000 validation examples; greedy exact match after training 100.0%",
                 "every row sums to 1\n\ncheckpoints", visualize.LEGEND]:
        assert text in report, text
    assert report.startswith("checkpoints") and report in out and "\nerror:" not in report


def test_pictures_are_shown_in_windows_and_without_a_display_it_is_said():
    from matplotlib import pyplot
    def show():
        shown.extend([*pyplot.get_figlabels(), pyplot.gca().get_position().bounds])
    shown = []
    with working_directory(), swapped(pyplot, "show", show), contextlib.redirect_stderr(io.StringIO()) as err:
        visualize.new_figure("t", 1, 1).savefig("t.png")
        pyplot.switch_backend("agg")
        visualize.show_pictures([Path("t.png")])
        assert err.getvalue() == "--show: no windows (there is no display); the pictures are in .\n" and not shown
        with swapped(pyplot, "get_backend", lambda: "windows"):
            visualize.show_pictures([Path("t.png")])
        assert shown == ["t.png", (0, 0, 1, 1)] and not pyplot.get_fignums()


def test_terminal_map_has_a_fixed_scale_fits_and_tells_what_is_cut():
    legend = "░ from 0.10, ▒ from 0.25, ▓ from 0.50, █ from 0.75"
    weights = [[0.0, 0.1, 0.2], [0.25, 0.5, 0.75], [0.09, 0.49, 1.0]]
    for weights, rows, columns, encoding, width, lines in [
            (weights, ["a", "bb", "c"], ["x", "yyy", "x·2"], "utf-8", 80,
             ["   x   yyy x·2", "a      ░░░ ░░░", "bb ▒▒▒ ▓▓▓ ███", "c      ▒▒▒ ███", legend, "x·2 is the second x"]),
            ([[0.0, 0.0]], ["a"], ["x", "y"], "utf-8", 80, ["  x y", "a", legend]),  # a map of zeros is empty
            ([[0.9] * 3], ["abc"], ["wörd"] * 3, "utf-8", 11, ["    w w w", "abc █ █ █", legend]),
            ([[0.9] * 9], ["我"], ["x", *["我我"] * 8], "utf-8", 13, [
                "   x  我 我", "我 ██ ██ ██", legend, "the last 6 of 9 columns do not fit into the terminal's width"]),
            ([[0.9]], ["กิ"], ["x\u200d"], "utf-8", 80, ["  x\u200d", "กิ █", legend]),  # one wide, each
            ([[0.9, 0.3]], ["schöner"], ["ö", "我"], "cp1252", 80, [
                r"        ö      \u6211", "schöner ###### ::::::",
                ". from 0.10, : from 0.25, * from 0.50, # from 0.75"])]:
        assert list(visualize.text_map(torch.tensor(weights), rows, columns, encoding, width)) == lines
    assert visualize.fill("我我我", 5) == "我我 "


def test_rows_are_queries_labels_unique_masked_cells_not_painted_and_numbers_readable():
    assert visualize.numbered(["film", "a", "film", "film"]) == ["film", "a", "film·2", "film·3"]
    assert visualize.numbered(["x" * 14, "x" * 20, "x" * 21]) == ["x" * 14, "x" * 13 + "…", "x" * 13 + "…·2"]
    for rows, columns in ["ab", "abc"], ["abc", "ab"]:
        raises(ValueError, f"{len(rows)} row labels and {len(columns)} column labels", visualize.draw_map,
               None, torch.rand(3, 3), rows, columns)
    ax = visualize.new_figure("", 4, 4).subplots()
    masked = torch.tensor([[False, True], [False, True], [False, True]])
    values = torch.tensor([[1.0, 0.0], [-0.001, 0.3], [float("nan"), -math.inf]])
    image = visualize.draw_map(ax, values, ["a", "b", "c"], ["d", "eee"], masked, vmin=-1)
    painted = image.to_rgba(image.get_array(), bytes=True)
    assert painted[..., 3].tolist() == [[255, 0], [255, 255], [255, 0]] and tuple(painted[2, 0][:3]) == (255, 0, 0)
    assert ax.patch.get_hatch()  # is what shows
    assert [(text.get_text(), text.get_color(), text.get_position()) for text in ax.texts] == [
        ("1", "white", (0, 0)), ("0", "white", (0, 1)), ("0.30", "white", (1, 1)), ("nan", "white", (0, 2))]
    for axis, labels, rotation in (ax.yaxis, ["a", "b", "c"], 0), (ax.xaxis, ["d", "eee"], 90):
        assert [label.get_text() for label in axis.get_ticklabels()] == labels
        assert {label.get_rotation() for label in axis.get_ticklabels()} == {rotation}
    for cell, ticks, texts in (0.25, 12, 144), (0.24, 12, 0), (0.1, 6, 0):
        ax = visualize.new_figure("", 4, 4).subplots()
        visualize.draw_map(ax, torch.rand(12, 12), ["a"] * 12, ["b"] * 12, cell=cell)
        assert (len(ax.get_xticks()), len(ax.get_yticks()), len(ax.texts)) == (ticks, ticks, texts), cell


def test_maps_stand_in_a_grid_of_square_cells_labels_at_its_edge_and_the_row_that_the_classifier_reads_framed():
    for kind, shape, width, height in [("classifier", (2, 3, 6, 9), 9 * 0.36, 6 * 0.36),
                                       ("cross", (2, 2, 20, 20), 4.3, 4.3), ("decoder", (4, 1, 99, 99), 7, 7),
                                       ("encoder", (1, 4, 99, 99), 7, 7), ("encoder", (1, 3, 1, 2), 1, 1)]:
        layers, heads, queries, keys = shape
        names = [f"layer {i}" for i in range(layers)]
        figure = visualize.draw_grid(kind, "t", names, torch.rand(shape), ["a"] * queries, ["c"] * keys,
                                     torch.zeros(queries, keys).bool(), framed=kind == "classifier")
        figure.draw_without_rendering()
        *maps, _ = figure.axes  # a colour bar
        for ax in maps:
            box = ax.get_window_extent()
            assert abs(box.width / 100 - width) < 0.2 > abs(box.height / 100 - height), (kind, shape)
        assert [(ax.get_title(), ax.get_ylabel(), len(ax.patches)) for ax in maps] == [
            (f"head {h + 1}" * (name == names[0]), name * (h == 0), kind == "classifier" and name == names[-1])
            for name in names for h in range(heads)]
        assert {text.get_text() for text in figure.texts} == {
            "t", "looks at (key)", "looks from (query)" + " to produce" * (kind in ("cross", "decoder"))}
        frames = [patch.get_window_extent().transformed(ax.transData.inverted()) for ax in maps for patch in ax.patches]
        assert all([round(y, 6) for y in sorted((frame.y0, frame.y1))] == [-0.5, 0.5] for frame in frames)


def test_the_first_three_pictures_show_what_they_tell():
    def shown(figure):
        return [torch.tensor(ax.images[0].get_array().filled(0)) for ax in figure.axes if ax.images]

    waves = visualize.draw_positions()
    lines = [list(line.get_ydata()) for line in waves.axes[0].lines]
    assert lines == PositionalEncoding(20, max_len=100).table[:, 4:8].T.tolist()
    whole, alike = shown(waves)
    same([alike, alike.diagonal()], [whole @ whole.T / 32, torch.ones(100).double()], atol=1e-6)
    every, causal = torch.ones(4, 4).double(), torch.ones(4, 4).tril().double()
    padded = torch.tensor([1.0, 1, 0, 0]).double().expand(4, 4)
    masks = visualize.draw_masks()
    same(shown(masks), [every, causal, causal, padded, causal, causal * padded])
    assert [text.get_text() for text in masks.legends[0].texts] == ["may look", "masked"]
    steps = visualize.draw_steps()
    axes = ["d_k"] * 3 + ["looks at (key)"] * 4 + ["d_k"]
    assert [ax.get_xlabel() for ax in steps.axes if ax.images] == axes
    q, k, v, scores, scaled, masked, weights, output = shown(steps)
    allowed = causal * torch.tensor([1, 1, 1, 0])
    softmax = scaled.masked_fill(allowed == 0, -math.inf).softmax(1)
    same([scores, scaled, masked, weights, output], [q @ k.T, scores / 2, scaled * allowed, softmax, weights @ v], 1e-5)


def test_training_and_heads_are_drawn_as_they_are():
    history = [dict(step=2, train_loss=3.0, loss=2.5, accuracy=0.25),
               dict(step=4, train_loss=1.0, loss=1.5, accuracy=1.0)]
    seen = argparse.Namespace(task=argparse.Namespace(metric="share"), checkpoint={"task": "t", "history": history},
                              heads=[(ORDINARY._replace(padding=0.5, last=float("nan")), ORDINARY)])
    figure = visualize.draw_training([seen])
    assert visualize.draw_training([seen] * 2).get_figheight() == 2 * figure.get_figheight()
    left, right = figure.axes
    lines = [[list(map(tuple, line.get_xydata())) for line in ax.lines] for ax in (left, right)]
    assert lines == [[[(2, 3.0), (4, 1.0)], [(2, 2.5), (4, 1.5)]], [[(2, 0.25), (4, 1.0)]]]
    assert (left.get_title(), right.get_title(), left.get_ylim()[0]) == ("t: loss", "t: share", 0)
    assert [text.get_text() for text in left.get_legend().texts] == ["training set", "validation set"]
    ax = visualize.draw_heads([seen]).axes[0]
    assert [label.get_text() for label in [*ax.get_yticklabels(), *ax.get_xticklabels()]] == [
        "cross, layer 1, head 1", *visualize.STATISTICS]
    assert [text.get_text() for text in ax.texts] == [
        "0.50 (0.50)", "0.15 (0.15)", *["0.20 (0.20)"] * 4, "0.5 (0)", "0 (0)", "0 (0)"]
    colours = ax.images[0].to_rgba(ax.images[0].get_array(), bytes=True)[0]
    assert [i for i in range(10) if tuple(colours[i][:3]) == (255, 0, 0)] == [7] and colours[3][3] == 0


@slow
def test_visualize_says_what_is_wrong_before_any_work():
    def complain(argv, message):
        status, out, err = call(visualize.main, "--device", "cpu", *argv.split())
        assert status == 2 and not out and err.count("\n") == 1 and message in err, (argv, err)

    with working_directory():  # before the toys are trained
        complain("--source 3,11", "'3,11' is not a symbol")
        complain("--text=", "0 tokens; this model reads 1 to 6")
        assert not os.listdir()
    with with_toys():
        Path("file").write_text("x", encoding="utf-8")
        copy, sentiment = "--checkpoint checkpoints/copy.pt", "--checkpoint checkpoints/sentiment.pt"
        for argv, message in [
                ("--out file", "file is not a directory"), ("--out=", "--out"), ("--device nonsense", "nonsense"),
                ("--data file", "--data needs --checkpoint"), (f"{copy} --data file", "file: Copy draws its examples"),
                (f"{sentiment} --data file", "file"), ("--checkpoint file", "not a checkpoint"),
                ("--checkpoint=", "empty"), ("--checkpoint none.pt", "none.pt: No such file"),
                (f"{copy} --source=", "0 tokens"), (f"{copy} --text good", "give it a --source"),
                (f"{copy} --text 1 --source 1", "a --source alone"), (f"{sentiment} --source 1", "give it a --text")]:
            complain(argv, message)
        with swapped(visualize, "load_or_train", lambda *args: (train.Task({"a": []}), small_classifier(), {})):
            complain(copy, "does not know a Task task with a TransformerClassifier")
        assert not Path("figures").exists()


@slow
def test_a_model_of_other_data_is_drawn_and_measured_on_it_on_fewer_lines_where_they_are_long():
    words = "a e i o u".split()
    def evaluate(task, *args):
        return {"loss": 1.0, "accuracy": len(task.valid) / 10}

    with working_directory(), swapped(visualize, "save_pictures", lambda *args: []), \
            swapped(train.Task, "evaluate", evaluate), \
            swapped(visualize, "MOST_WEIGHTS", 18):  # 18 // 4**2 + 1 inputs of 3 tokens, 18 // 3**2 + 1 of 2
        for task, option, target, count in [("translate", "--source", "{1}x {0}x {1}x", 2),
                                            ("sentiment", "--text", "{1}", 3)]:
            data, ask = f"{task}.tsv", ("--device", "cpu", "--checkpoint", f"{task}.pt")
            Path(data).write_text("".join(f"{a} {b}\t{target.format(a, b)}\n" for a in words for b in words), "utf-8")
            run_train(f"--task {task} --data {data} --steps 2 --checkpoint {task}.pt --d-model 8")
            measured = f"measured on {count} of 25 lines of {data}; {train.TASKS[task].metric} on these {count}0.0%\n"
            for argv, message in [(["--data", data], measured),
                                  ([option, "a u"], "measured on the given text alone")]:
                status, out, err = call(visualize.main, *ask, *argv)
                assert status == 0 and message in out and "\nerror" not in out, (out, err)
            status, out, err = call(visualize.main, *ask)
            assert status == 2 and f"{option} or --data" in err
        seen = visualize.Subject(None, "translate.pt", torch.device("cpu"), source="a u")
        _, rows, columns, _ = seen.maps["cross"]  # each in words of its own language
        assert columns == ["a", "u", "<eos>"] and all(re.match("[aeiou]x|<eos>", label) for label in rows)


def test_fonts_are_chosen_by_the_signs_that_are_missing():
    from matplotlib import font_manager, ft2font
    signs = {"DejaVu": "abc", "Bold": "这电影", "Serif Regular": "这电影", "Emoji Regular": "这电影",
             "Small Regular": "影", "Large Regular": "电这", "Other Regular": "x"}
    added = []

    def font(path):
        return argparse.Namespace(family_name=path, get_charmap=lambda: dict.fromkeys(map(ord, signs[path])))

    with swapped(ft2font, "FT2Font", font), swapped(font_manager, "findfont", lambda name: "DejaVu"), \
            swapped(font_manager, "findSystemFonts", lambda: list(signs)), \
            swapped(font_manager.fontManager, "addfont", added.append), \
            swapped(os.path, "getsize", lambda path: len(signs[path])):
        assert visualize.font_families("这电影ab") == ["DejaVu Sans", *added]
        assert added == ["Large Regular", "Small Regular"]


@slow
def test_missing_glyphs_files_that_are_no_fonts_and_paths_that_are_not_utf8_do_no_harm():
    from matplotlib import font_manager

    def draw_one(subjects):
        yield "one.png", visualize.draw_grid("classifier", subjects[0].question, ["layer 1", "layer 2"],
                                             *subjects[0].maps["classifier"])

    with with_toys(), swapped(font_manager, "findSystemFonts", lambda: [__file__]), \
            swapped(visualize, "draw_all", draw_one), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", DeprecationWarning)
        os.rename("checkpoints/sentiment.pt", "b\udce8.pt")
        status, out, err = call(visualize.main, *"--device cpu --checkpoint b\udce8.pt --out b\udce8".split(),
                                "--text", "这 电 $")
        assert status == 0 and err.count("\n") == 2 and "\nno installed font has 电这: boxes" in err, err
        assert "这?" in out and Path("b\udce8/one.png").stat().st_size > 1000
        assert Path("b\udce8/report.txt").read_text("utf-8").startswith(r"b\udce8.pt: measured on 216 of 216")


@slow
def test_without_matplotlib_the_report_still_comes():
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] != "matplotlib"}
    with mock.patch.dict(sys.modules, {**kept, "matplotlib": None}, clear=True), with_toys():
        status, out, err = call(visualize.main, "--device", "cpu", "--show")
        assert status == 0 and err.count("\n") == 1 and "no pictures" in err and "█" in out
        assert [path.name for path in Path("figures").iterdir()] == ["report.txt"]


# --- all files


def test_help_names_every_option_with_its_default():
    for script in (train, translate, visualize, sys.modules[__name__]):
        status, out, _ = call(script.main, "--help")
        options = re.findall(r"^  (-.*(?:\n   .*)*)", out, flags=re.M)  # each with the lines below that go on
        silent = [option.split()[0] for option in options if "default" not in option]
        assert status == 0 and len(options) > 2 and silent == ["-h,"], (script.__name__, silent)
        if script is train:
            assert "(default: sentiment 6, sentiment --data 8, translate --data 15)" in " ".join(out.split())


def test_every_name_of_the_two_articles_is_found_by_grep():
    names = """attention ScaledDotProductAttention MultiHeadAttention MultiHeadedAttention PositionalEncoding LayerNorm
        SublayerConnection PositionwiseFeedForward Embeddings TransformerEncoderLayer EncoderLayer DecoderLayer Encoder
        Decoder TransformerClassifier EncoderDecoder make_model make_padding_mask subsequent_mask generator
        clones set_seed""".split()
    assert [name for name in names if not re.search(rf"\b{name}\b", "".join(SOURCES.values()))] == []


def test_a_file_imports_only_from_files_to_its_left_and_checks_nothing_with_assert():  # python -O takes asserts out
    names = list(SOURCES)
    for i, (name, text) in enumerate(SOURCES.items()):
        imported = set(re.findall(r"^\s*(?:from|import) (\w+)", text, flags=re.MULTILINE))
        assert not imported & {*names[i:], "test_all", "numpy"}, name
        assert not imported & ({"translate"} if name == "visualize" else {"matplotlib"}), name
        assert not re.search(r"^\s*assert\b", text, flags=re.MULTILINE), name


def test_importing_needs_neither_numpy_nor_matplotlib_and_does_nothing():
    code = ("import sys; sys.modules['numpy'] = sys.modules['matplotlib'] = None; "  # their import now fails
            f"import {', '.join(SOURCES)}, torch; print(torch.cuda.is_initialized())")
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stdout + done.stderr


# --- drills: ten bugs that learners really make, injected


def mask_axis(right, self, mask, batch, query, key):
    mask = right(self, mask, batch, query, key)
    return mask.transpose(-2, -1) if mask.size(-2) == 1 and query == key else mask


def article_2s_layer_norm(right, self, x):
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) * self.weight + self.bias


# name: (what is wrong, the right function, what takes its place and is called with it first, tests that must notice it)
DRILLS = {
    "no-scale": ("scores not divided by sqrt(d_k)",
                 attention, lambda right, query, *rest: right(query * math.sqrt(query.size(-1)), *rest),
                 [test_multi_head_attention_equals_a_slow_loop,
                  test_dot_products_have_variance_d_k_and_saturate_the_softmax_unless_scaled]),
    "split-view": ("heads split by a plain view",
                   MultiHeadAttention.split, lambda right, self, x: x.reshape(len(x), self.num_heads, -1, self.d_k),
                   [test_merge_undoes_split, test_multi_head_attention_equals_a_slow_loop]),
    "merge": ("heads merged without the transpose",
              MultiHeadAttention.merge, lambda right, self, x: x.reshape(x.size(0), x.size(2), self.d_model),
              [test_merge_undoes_split, test_multi_head_attention_equals_a_slow_loop]),
    "mask-axis": ("padding mask on the query axis, where it fits",
                  MultiHeadAttention.prepare_mask, mask_axis,
                  [test_multi_head_attention_equals_pytorch_in_its_three_uses,
                   test_the_result_of_a_text_does_not_depend_on_its_batch_mates_or_on_padding]),
    "mask-inverted": ("True read as 'masked'",
                      MultiHeadAttention.prepare_mask, lambda right, self, *args: ~right(self, *args),
                      [test_multi_head_attention_equals_pytorch_in_its_three_uses,
                       test_masks_of_every_allowed_rank_and_type_block_what_they_say]),
    "no-causal": ("target mask without the causal half",
                  make_target_mask, lambda right, ids, pad_idx=0: make_padding_mask(ids, pad_idx),
                  [test_padding_causal_and_target_masks, test_the_decoder_cannot_see_the_future]),
    "no-shift": ("labels not shifted: the decoder input is the label",
                 train.shift, lambda right, tgt: (tgt[:, :-1], tgt[:, :-1]),
                 [test_the_label_is_the_decoder_input_one_step_later]),
    "bos-pad": ("decoding starts from PAD, not BOS",
                greedy_decode, lambda right, *args, **options: right(*args, **{"bos": PAD, **options}),
                [test_greedy_and_beam_decode_equal_a_slow_loop_with_and_without_cache_and_each_row_alone]),
    "no-positions": ("positions left out",
                     PositionalEncoding.forward, lambda right, self, x: self.dropout(x),
                     [test_positions_equal_a_literal_loop_over_the_formula,
                      test_shuffled_words_give_shuffled_results_without_positions_and_other_results_with_them]),
    "layernorm": ("n - 1 deviation, eps outside the root (article 2)",
                  LayerNorm.forward, article_2s_layer_norm,
                  [test_layer_norm_equals_pytorch])}


def homes(function):
    """(owner, name) for every name by which our files look this function up: "from attention import ..." copies it."""
    owners = [module for name, module in sys.modules.items() if name in SOURCES or name == __name__]
    owners += [MultiHeadAttention, PositionalEncoding, LayerNorm]
    return [(owner, name) for owner in owners for name, value in vars(owner).items() if value is function]


@contextlib.contextmanager
def drilled(name):
    """Inside: this bug is in."""
    _, right, wrong, _ = DRILLS[name]
    with contextlib.ExitStack() as bugs:
        for owner, key in homes(right):
            bugs.enter_context(swapped(owner, key, lambda *args, **options: wrong(right, *args, **options)))
        yield


def caught_by(tests):
    """Those of the tests that fail now."""
    failed = []
    for test in tests:
        setup_function()
        try:
            test()
        except Exception:
            failed.append(test)
    return failed


def test_every_drill_is_caught_by_its_tests_and_undone_afterwards():
    assert len(DRILLS) == 10
    assert caught_by({test for *_, tests in DRILLS.values() for test in tests}) == []
    for name, (_, right, _, tests) in DRILLS.items():
        before = homes(right)
        with drilled(name):
            assert caught_by(tests) == tests and homes(right) == [], name
        assert before and homes(right) == before, name


def drills(names, seed):
    """Trains the copy task with each injected bug, and prints what the usual figures and the quick tests make of it."""
    tests = [test for name, test in globals().items() if name.startswith("test_") and not hasattr(test, "slow")]
    print(f"The copy task on held-out data. Below each injected bug, which of {len(tests)} quick tests notice it.\n\n"
          f"{'drill':14} {'loss':>6} {'teacher-forced accuracy':>24} {'greedy exact match':>19}   injected bug")
    for name in ["unbroken", *names]:
        what, _, _, own = DRILLS.get(name, ("none", None, None, []))
        with working_directory(), drilled(name) if own else contextlib.nullcontext(), \
                swapped(train.Copy, "score", lambda task, metrics: (-metrics["loss"],)):  # as one who trusts the loss
            run_train(f"--task copy --seed {seed}", small="")
            task, model, checkpoint = train.load_checkpoint(train.default_path("copy"), "cpu")
            task.valid = task.toy_examples()
            with swapped(train.Task, "length_batches", lambda task, examples, size: [examples]):
                forced = train.Task.evaluate(task, model, "cpu")  # lengths are mixed, as they are in training
            failed = sorted(caught_by(tests), key=lambda test: test not in own)
        print(f"{name:14} {forced['loss']:6.3f} {forced['accuracy']:24.3f} {checkpoint['metrics']['accuracy']:19.3f}   "
              f"{what}")
        more = f"  +{len(failed) - 2} more" if len(failed) > 2 else ""
        print("\n".join(f"      {test.__name__}" for test in failed[:2]) + more if failed else "      none", flush=True)
    return 0


# --- bench: how fast, against PyTorch's own modules


def ratio(ours, theirs, rounds=5):
    """Our CPU seconds over theirs: the median over rounds that run both, in turn first."""
    measured = []
    for i in range(rounds):
        seconds = {}
        for run in (ours, theirs) if i % 2 else (theirs, ours):
            started = time.process_time()
            run()
            seconds[run] = time.process_time() - started
        measured.append(seconds[ours] / seconds[theirs])
    return statistics.median(measured)


def training_step(module, inputs):
    """A function without arguments: forward, backward, Adam."""
    optimizer = torch.optim.Adam(module.parameters(), fused=True)

    def step():
        optimizer.zero_grad()
        output = module(*inputs)
        (output[0] if isinstance(output, tuple) else output).sum().backward()
        optimizer.step()
    return step


class Transformer(nn.Transformer):
    """nn.Transformer between embeddings and a generator."""

    def __init__(self, vocab, num_layers):
        super().__init__(512, 8, num_layers, num_layers, 2048, 0.0, batch_first=True, norm_first=True)
        self.embeds = nn.ModuleList(nn.Sequential(Embeddings(512, vocab), PositionalEncoding(512, dropout=0.0))
                                    for _ in range(2))
        self.generator = nn.Linear(512, vocab)

    def forward(self, src, tgt, src_padding, tgt_padding, causal):
        src, tgt = self.embeds[0](src), self.embeds[1](tgt)
        return self.generator(super().forward(src, tgt, None, causal, None, src_padding, tgt_padding, src_padding))


def comparisons():
    """(name, reference, a call of ours, a call of theirs, the ratio to stay below)."""
    def training(name, fused, target, ours, our_inputs, theirs, their_inputs):
        set_fused(ours, fused)
        return (f"{name}, {'fused' if fused else 'formula'}", f"nn.{type(theirs).__name__}",
                training_step(ours, our_inputs), training_step(theirs, their_inputs), target)

    for fused, batch, length, target in ((False, 32, 128, 1.05), (True, 32, 128, 0.95), (True, 8, 1024, 0.90)):
        x, mask = torch.randn(batch, length, 512), torch.arange(length) < length * (1 + torch.rand(batch, 1)) / 2
        yield training(f"MultiHeadAttention, padding, ({batch}, {length})", fused, target,
                       MultiHeadAttention(512, 8, 0.0), (x, x, x, mask),
                       nn.MultiheadAttention(512, 8, 0.0, batch_first=True), (x, x, x, ~mask, not fused, None, False))

    x, memory, causal = torch.randn(16, 64, 512), torch.randn(16, 64, 512), subsequent_mask(64)
    for norm_first, fused in itertools.product((True, False), (False, True)):
        for ours, theirs, our_inputs, their_inputs in (
                (EncoderLayer, nn.TransformerEncoderLayer, (x,), (x,)),
                (DecoderLayer, nn.TransformerDecoderLayer, (x, memory, None, causal), (x, memory, ~causal[0]))):
            yield training(f"{ours.__name__}, {'pre' if norm_first else 'post'}-norm", fused, 1.05 if fused else 1.25,
                           ours(512, 8, 2048, 0.0, norm_first), our_inputs,
                           theirs(512, 8, 2048, 0.0, batch_first=True, norm_first=norm_first), their_inputs)

    for (batch, length), fused in itertools.product(((80, 10), (16, 64)), (False, True)):
        src, tgt = torch.randint(4, 1000, (2, batch, length))
        yield training(f"seq2seq, 2 + 2 layers, ({batch}, {length})", fused, 1.00 if fused else 1.20,
                       make_model(1000, 1000, num_layers=2, dropout=0.0),
                       (src, tgt, make_padding_mask(src), make_target_mask(tgt)),
                       Transformer(1000, 2), (src, tgt, src == PAD, tgt == PAD, ~subsequent_mask(length)[0]))

    model, src = make_model(1000, 1000, num_layers=2, dropout=0.0), torch.randint(4, 1000, (16, 10))
    model.generator.bias.data[EOS] = -1e9  # it never ends by itself
    for length, target in ((32, 0.55), (128, 0.30)):
        yield (f"greedy_decode with cache, {length} tokens", "without cache",
               lambda: greedy_decode(model, src[:1], length),
               lambda: greedy_decode(model, src[:1], length, use_cache=False), target)
    yield ("beam_decode with 4 beams, 16 x 32 tokens", "greedy_decode",
           lambda: beam_decode(model, src, 32), lambda: greedy_decode(model, src, 32), 4.00)


def bench():
    """Prints every ratio and its target. One thread, float32, d_model 512, no dropout; a training step, or decoding."""
    warnings.simplefilter("ignore")  # nn.Transformer warns about norm_first
    print(f"{'ours':54} {'reference':28} {'ratio':>6} {'target':>8}")
    for name, reference, ours, theirs, target in comparisons():
        print(f"{name:54} {reference:28} {ratio(ours, theirs):6.2f} {f'<= {target:.2f}':>8}", flush=True)
    return 0


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", metavar="WORD", default="", help="only the tests whose name contains WORD (default: all)")
    parser.add_argument("--drills", nargs="?", const="all", metavar="NAME", choices=["all", *DRILLS],
                        help="train with injected bugs and see which tests notice: all, or one of "
                             f"{', '.join(DRILLS)} (default: off)")
    parser.add_argument("--seed", type=int, default=42, help="of the drills' training (default: 42)")
    parser.add_argument("--bench", action="store_true",
                        help="measure our speed against PyTorch's modules, for minutes (default: off)")
    args = parser.parse_args(argv)
    if not __debug__:
        parser.exit(2, "test_all.py: error: python -O takes out the asserts that the tests are made of\n")
    tests = [(name, test) for name, test in globals().items() if name.startswith("test_") and args.k in name]
    if not tests:
        parser.error(f"no test has {args.k!r} in its name")
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="matplotlib|pyparsing")  # old one on new one
    torch.set_num_threads(1)
    if args.drills:
        return drills(DRILLS if args.drills == "all" else [args.drills], args.seed)
    if args.bench:
        return bench()

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
    train.run(main)
