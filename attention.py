"""
Scaled dot-product attention, multi-head attention, and the masks that both understand.

Notation, here and in every file:

    batch, len     sequences in a batch, tokens in a sequence
    query, key     as sizes: how many positions look, how many are looked at
    weights        attention weights, a row per query; what a model learns is called its parameters
    d_model        width of a token's vector
    heads, d_k     number of heads, width of one head: heads * d_k = d_model
    Q, K, V        what a position looks for, what it offers to be found by, what it hands over when found

A mask is boolean and True means "may look", as in F.scaled_dot_product_attention.
"""
import math

import torch
import torch.nn.functional as F
from torch import nn


def attention(query, key, value, mask=None, dropout=None):
    """softmax(Q K^T / sqrt(d_k)) V: the output (..., query, d_v) and the attention weights (..., query, key).

    query (..., query, d_k), key (..., key, d_k), value (..., key, d_v). mask broadcasts to (..., query, key), True
    where a query may look. A row of weights sums to 1; a fully masked row has zero weights and zero output. dropout is
    a module; the weights that come back are those before it. (Paper 3.2.1; article 1, 3.2; article 2, 2.1.)
    """
    scores = (query / math.sqrt(query.size(-1))) @ key.transpose(-2, -1)  # scaled first: Q K^T alone overflows float16
    if mask is not None:
        mask, nowhere = open_blocked_rows(mask)
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = F.softmax(scores, dim=-1)  # (..., query, key)
    if mask is not None:
        weights = weights.masked_fill(nowhere, 0.0)
    dropped = weights if dropout is None else dropout(weights)
    return dropped @ value, weights


def open_blocked_rows(mask):
    """The mask with its fully masked rows set to True, and (..., query, 1), True at those rows.

    The softmax of a fully masked row, of -inf alone, is nan. So a query that may look nowhere looks everywhere first,
    and its result is zeroed afterwards: no nan arises in between, in the values or in the gradients.
    """
    mask = as_bool(mask)
    nowhere = ~mask.any(dim=-1, keepdim=True)
    return mask | nowhere, nowhere


def as_bool(mask):
    """The mask as booleans. ValueError for anything but 0 and 1: an additive mask (0 and -inf) means the opposite."""
    if mask.dtype == torch.bool:
        return mask
    if not ((mask == 0) | (mask == 1)).all():
        raise ValueError(f"a mask holds True / False or 1 / 0 (True = may look); this {mask.dtype} mask of shape "
                         f"{tuple(mask.shape)} holds other values")
    return mask != 0


class ScaledDotProductAttention(nn.Module):
    """attention() with its dropout, as a module (article 1, 4.2).

    With .fused = True the same output comes from PyTorch's fused kernel, which never builds the weights: they are
    None then. The formula stays the default, so that a change in attention() shows its effect.
    """

    def __init__(self, dropout=0.1):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.fused = False

    def forward(self, query, key, value, mask=None):
        """Shapes as in attention()."""
        if not self.fused:
            return attention(query, key, value, mask, self.dropout)
        dropout_p = self.dropout.p if self.dropout.training else 0.0
        if mask is None:
            return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p), None
        mask, nowhere = open_blocked_rows(mask)
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout_p)
        return output.masked_fill(nowhere, 0.0), None


class MultiHeadAttention(nn.Module):
    """Attention in several heads side by side (paper 3.2.2; article 1, 4.3; article 2, 2.2: MultiHeadedAttention).

    One head can look in one direction at a time. So d_model is cut into heads of width d_k, each attends by itself,
    and w_o mixes what they found. Its three uses: encoder self-attention (query, key, value all x), decoder
    self-attention (the same under a causal mask), cross-attention (query from the decoder, key and value from the
    encoder's output).
    """

    def __init__(self, d_model, num_heads, dropout=0.1):
        super().__init__()
        if d_model < 1 or num_heads < 1 or d_model % num_heads != 0:
            raise ValueError(f"d_model ({d_model}) must be a positive multiple of num_heads ({num_heads})")
        self.d_model, self.num_heads, self.d_k = d_model, num_heads, d_model // num_heads
        self.w_q = nn.Linear(d_model, d_model)
        self.w_k = nn.Linear(d_model, d_model)  # its bias adds one number to a whole row of scores: softmax ignores it
        self.w_v = nn.Linear(d_model, d_model)
        self.w_o = nn.Linear(d_model, d_model)
        self.attention = ScaledDotProductAttention(dropout)
        self.attn = None  # the last call's weights, for plots

    def forward(self, query, key, value, mask=None, cache=None):
        """(batch, query, d_model), twice (batch, key, d_model) -> output (batch, query, d_model),
        weights (batch, heads, query, key), None when fused.

        mask: see prepare_mask. cache: a dict for decoding step by step, keyed by module. Self-attention (key is
        query) appends the new positions to the keys and values kept there; cross-attention computes them once.
        """
        q = self.split(self.w_q(query))  # (batch, heads, query, d_k)
        if cache is None:
            k, v = self.keys_and_values(key, value)  # (batch, heads, key, d_k)
        else:
            if self not in cache:
                cache[self] = self.keys_and_values(key, value)
            elif key is query:  # the same object, not equal values: self-attention
                new = self.keys_and_values(key, value)
                cache[self] = [torch.cat(both, dim=2) for both in zip(cache[self], new)]
            k, v = cache[self]

        if mask is not None:
            mask = self.prepare_mask(mask, q.size(0), q.size(2), k.size(2))
        output, weights = self.attention(q, k, v, mask)  # (batch, heads, query, d_k)
        self.attn = None if weights is None else weights.detach()  # else the whole step's graph stays in memory
        return self.w_o(self.merge(output)), weights

    def keys_and_values(self, key, value):
        """Twice (batch, key, d_model) -> twice (batch, heads, key, d_k)."""
        return self.split(self.w_k(key)), self.split(self.w_v(value))

    def split(self, x):
        """(batch, len, d_model) -> (batch, heads, len, d_k)

        First cut each vector into heads, then swap: viewing straight into (batch, heads, len, d_k) would cut the
        *sequence* into pieces and deal out other tokens' numbers.
        """
        return x.view(x.size(0), x.size(1), self.num_heads, self.d_k).transpose(1, 2)

    def merge(self, x):
        """(batch, heads, len, d_k) -> (batch, len, d_model), the inverse of split."""
        x = x.transpose(1, 2)  # only the strides change, so a view from here would raise: copy first
        return x.contiguous().view(x.size(0), x.size(1), self.d_model)

    def prepare_mask(self, mask, batch, query, key):
        """A mask as 4-D booleans that broadcast to (batch, heads, query, key).

        2-D is (batch, key), 3-D (batch or 1, query or 1, key), 4-D (batch or 1, heads or 1, query or 1, key).
        Any other rank or size is a ValueError, never a guess. A causal mask is 3-D (see subsequent_mask): as 2-D it
        would read as (batch, key).
        """
        allowed = {2: [{batch}, {key}],
                   3: [{batch, 1}, {query, 1}, {key}],
                   4: [{batch, 1}, {self.num_heads, 1}, {query, 1}, {key}]}.get(mask.dim())  # None for any other rank
        if allowed is None or any(size not in sizes for size, sizes in zip(mask.shape, allowed)):
            raise ValueError(f"mask of shape {tuple(mask.shape)} does not fit attention of shape (batch, heads, query, "
                             f"key) = {(batch, self.num_heads, query, key)}; it may be (batch, key), (batch or 1, "
                             f"query or 1, key) or (batch or 1, heads or 1, query or 1, key)")
        mask = as_bool(mask)
        if mask.dim() == 2:
            return mask[:, None, None, :]
        return mask[:, None] if mask.dim() == 3 else mask


def make_padding_mask(ids, pad_idx=0):
    """(batch, len) token ids -> (batch, 1, 1, len), True where there is a real token (article 1, 3.3 and 5)."""
    return (ids != pad_idx)[:, None, None, :]


def subsequent_mask(size, device=None):
    """(1, size, size), True where key <= query: a position sees itself and the past (article 2, 4.2)."""
    return torch.ones(1, size, size, dtype=torch.bool, device=device).tril()


def make_target_mask(ids, pad_idx=0):
    """(batch, len) token ids -> (batch, 1, len, len): no padding and no future."""
    return make_padding_mask(ids, pad_idx) & subsequent_mask(ids.size(1), ids.device)


def demo():
    """One head, three tokens, numbers small enough to redo on paper."""
    q = torch.tensor([[2., 0, 2, 0], [0, 2, 0, 0], [2, 2, 0, 0]])
    k = torch.tensor([[1., 1, 0, 1], [0, 1, 0, 1], [1, 0, 1, 0]])
    v = torch.tensor([[1., 0], [0, 1], [2, 2]])
    mask = subsequent_mask(3)[0]
    scores = q @ k.T
    output, weights = attention(q, k, v, mask)
    for name, x in [("Q: what a token looks for", q), ("K: what it offers", k), ("V: what it hands over", v),
                    ("scores = Q K^T: row i is query i", scores), ("scaled = scores / sqrt(4)", scores / 2),
                    ("masked: the future is -inf", (scores / 2).masked_fill(~mask, float("-inf"))),
                    ("weights = softmax: e^x / (sum of e^x in the row)", weights), ("output = weights V", output)]:
        rows = ["".join(f"{value:9.4g}" for value in row) for row in x.tolist()]
        print(f"{name}  {tuple(x.shape)}", *rows, sep="\n")


if __name__ == "__main__":
    demo()
