"""
The parts of one Transformer layer, then the encoder layer and the decoder layer.

But for Embeddings, which turns token ids into vectors, everything here maps (batch, len, d_model) to the same shape.
Start at EncoderLayer and look up each part when you meet it. Notation: see attention.py.
"""
import math

import torch
import torch.nn.functional as F
from torch import nn

from attention import MultiHeadAttention


class Embeddings(nn.Module):
    """(batch, len) token ids -> (batch, len, d_model): a learned vector per token, times sqrt(d_model).

    Why the factor: the entries start with standard deviation 1 / sqrt(d_model), the size that a matrix shared with the
    output layer needs (see Translate.build in train.py). Times sqrt(d_model) it is 1: they are as large as the
    positions that are added next, so that neither drowns the other. (Paper 3.4; article 2, 3.2.)
    """

    def __init__(self, d_model, vocab_size):
        super().__init__()
        self.d_model = d_model
        self.embedding = nn.Embedding(vocab_size, d_model)
        nn.init.normal_(self.embedding.weight, std=d_model ** -0.5)

    def forward(self, ids):
        return self.embedding(ids) * math.sqrt(self.d_model)


class PositionalEncoding(nn.Module):
    """x + PE[:len], then dropout: attention alone has no idea of order.

    PE(pos, 2i) = sin(pos / 10000^(2i / d_model)) and PE(pos, 2i + 1) = cos of the same, a fixed table of (max_len,
    d_model). It is a buffer, so it moves with the model and is not trained; it is not saved either, so parameters fit
    a model with another max_len. For the same reason no checkpoint restores it after `to_empty`: build the model on a
    real device, not on "meta". (Paper 3.5; article 1, 4.4; article 2, 1.2.)
    """

    def __init__(self, d_model, *, max_len=5000, dropout=0.1):
        super().__init__()
        self.max_len = max_len
        self.dropout = nn.Dropout(dropout)
        pos = torch.arange(max_len, dtype=torch.float64)[:, None]
        two_i = torch.arange(0, d_model, 2, dtype=torch.float64)
        angle = pos / 10000 ** (two_i / d_model)  # (max_len, d_model / 2, rounded up)
        table = torch.zeros(max_len, d_model)
        table[:, 0::2] = torch.sin(angle)
        table[:, 1::2] = torch.cos(angle[:, :d_model // 2])  # an odd d_model has one cosine less
        self.register_buffer("table", table, persistent=False)

    def forward(self, x):
        if x.size(1) > self.max_len:
            raise ValueError(f"a sequence of {x.size(1)} tokens is longer than max_len ({self.max_len})")
        return self.dropout(x + self.table[:x.size(1)])


class LayerNorm(nn.Module):
    """Each vector shifted to mean 0 and scaled to standard deviation 1, then times weight plus bias; equal to
    nn.LayerNorm.

    With .fused = True it is PyTorch's kernel. (Article 2, 1.1.)
    """

    def __init__(self, d_model, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model))
        self.fused = False

    def forward(self, x):
        if self.fused:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # the square of 300 overflows float16
        centred = wide - wide.mean(dim=-1, keepdim=True)
        variance = centred.square().mean(dim=-1, keepdim=True)  # divided by n, not n - 1
        return (centred * torch.rsqrt(variance + self.eps) * self.weight + self.bias).to(x.dtype)


class PositionwiseFeedForward(nn.Module):
    """w_2(dropout(relu(w_1(x)))): a small network, the same at every position (paper 3.3; article 2, 3.1)."""

    def __init__(self, d_model, d_ff, dropout=0.1):
        super().__init__()
        self.w_1 = nn.Linear(d_model, d_ff)
        self.w_2 = nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.w_2(self.dropout(torch.relu(self.w_1(x))))


class SublayerConnection(nn.Module):
    """x plus what the sublayer makes of it, with a norm: the only place that knows the norm's order.

    Pre-norm (norm_first) leaves the sum itself untouched, so that gradients reach the first layer through additions
    alone: deep stacks train without care, and the stack needs one closing norm. Post-norm, the paper's order,
    normalises the sum after every sublayer: it wants warm-up, and the last layer is normalised already.
    (Article 2, 1.1; article 1, 4.5.)
    """

    def __init__(self, d_model, dropout=0.1, norm_first=True):
        super().__init__()
        self.norm = LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)
        self.norm_first = norm_first

    def forward(self, x, sublayer):
        if self.norm_first:
            return x + self.dropout(sublayer(self.norm(x)))  # article 2
        return self.norm(x + self.dropout(sublayer(x)))      # article 1 and the paper


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward, each in a SublayerConnection (article 1, 4.5: TransformerEncoderLayer)."""

    def __init__(self, d_model, num_heads, d_ff, dropout=0.1, norm_first=True):
        super().__init__()
        self.self_attn = MultiHeadAttention(d_model, num_heads, dropout)
        self.feed_forward = PositionwiseFeedForward(d_model, d_ff, dropout)
        self.self_attn_residual = SublayerConnection(d_model, dropout, norm_first)
        self.feed_forward_residual = SublayerConnection(d_model, dropout, norm_first)

    def forward(self, x, mask=None):
        """x (batch, len, d_model), mask as in MultiHeadAttention. The attention weights stay in self.self_attn.attn."""
        x = self.self_attn_residual(x, lambda x: self.self_attn(x, x, x, mask)[0])
        return self.feed_forward_residual(x, self.feed_forward)


class DecoderLayer(nn.Module):
    """Self-attention on the target, cross-attention on the encoder's output, feed-forward (article 2, 4.2)."""

    def __init__(self, d_model, num_heads, d_ff, dropout=0.1, norm_first=True):
        super().__init__()
        self.self_attn = MultiHeadAttention(d_model, num_heads, dropout)
        self.cross_attn = MultiHeadAttention(d_model, num_heads, dropout)
        self.feed_forward = PositionwiseFeedForward(d_model, d_ff, dropout)
        self.self_attn_residual = SublayerConnection(d_model, dropout, norm_first)
        self.cross_attn_residual = SublayerConnection(d_model, dropout, norm_first)
        self.feed_forward_residual = SublayerConnection(d_model, dropout, norm_first)

    def forward(self, x, memory, src_mask=None, tgt_mask=None, cache=None):
        """x (batch, target, d_model), memory (batch, source, d_model): the encoder's output. Masks and cache as in
        MultiHeadAttention, src_mask for the cross-attention, tgt_mask for the self-attention."""
        x = self.self_attn_residual(x, lambda x: self.self_attn(x, x, x, tgt_mask, cache)[0])
        x = self.cross_attn_residual(x, lambda x: self.cross_attn(x, memory, memory, src_mask, cache)[0])
        return self.feed_forward_residual(x, self.feed_forward)


def demo():
    """One token's vector on its way through a fresh encoder layer, in both norm orders."""
    torch.manual_seed(0)
    x = PositionalEncoding(64, dropout=0.0)(Embeddings(64, 10)(torch.arange(5)[None]))  # (1, 5, 64)

    def recorder(steps, name):
        """A hook that adds what comes out of a module to the steps; a pre-hook, what goes in."""
        def hook(module, args, output=None):
            result = args if output is None else output
            steps.append((name, result[0] if isinstance(result, tuple) else result))
        return hook

    orders = []  # of each norm order its steps, (name, result)
    for norm_first in True, False:
        layer = EncoderLayer(64, 4, 256, dropout=0.0, norm_first=norm_first)
        steps = [("x", x)]
        for name, sublayer, residual in [("attn", layer.self_attn, layer.self_attn_residual),
                                         ("ff", layer.feed_forward, layer.feed_forward_residual)]:
            sublayer.register_forward_hook(recorder(steps, name))
            if norm_first:
                residual.norm.register_forward_hook(recorder(steps, "norm(x)"))
                residual.register_forward_hook(recorder(steps, f"x + {name}"))
            else:
                residual.norm.register_forward_pre_hook(recorder(steps, f"x + {name}"))
                residual.register_forward_hook(recorder(steps, "norm"))
        layer(x)
        orders.append(steps)

    print("One token's vector of 64 numbers: mean and standard deviation, its size, its cosine with the first x")
    print("    ".join(f"{order:11} mean    std   size cosine" for order in ("pre-norm", "post-norm")))
    for both in zip(*orders):
        print("    ".join(f"{name:10}{v.mean():6.2f}{v.std(correction=0):7.2f}{v.norm():7.2f}"
                          f"{F.cosine_similarity(v, x[0, 2], dim=0):7.2f}"
                          for name, v in ((name, result[0, 2]) for name, result in both)))
    print("In both, the residual keeps x recognisable. Pre-norm never rescales the sum itself, so a stack of layers\n"
          "needs a closing norm; post-norm leaves every sublayer with standard deviation 1.")


if __name__ == "__main__":
    demo()
