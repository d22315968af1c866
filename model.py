"""
The two models: a classifier (article 1) and an encoder-decoder (article 2), greedy decoding and beam search.

    TransformerClassifier:  ids -> embed -> Encoder -> first token -> Linear -> logits
    EncoderDecoder:         source ids -> embed -> Encoder -> memory
                            target ids -> embed -> Decoder (looks at memory) -> Linear -> logits

Both return logits: the softmax is the loss's business. Notation: see attention.py.
"""
import contextlib

import torch
import torch.nn.functional as F
from torch import nn

from attention import MultiHeadAttention, make_padding_mask, make_target_mask, subsequent_mask
from transformer_layer import (DecoderLayer, Embeddings, EncoderLayer, LayerNorm, PositionalEncoding,
                               PositionwiseFeedForward)

PAD, UNK, BOS, EOS = range(4)  # the first four ids of every vocabulary: padding, unknown word, begin, end


class Encoder(nn.Module):
    """num_layers encoder layers, and one closing norm when norm_first (article 2, 4.1).

    The layers are made one by one, not as deep copies (article 2: clones), which would start equal.
    """

    def __init__(self, num_layers, d_model, num_heads, d_ff, dropout=0.1, norm_first=True):
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(d_model, num_heads, d_ff, dropout, norm_first)
                                    for _ in range(num_layers))
        self.norm = LayerNorm(d_model) if norm_first else nn.Identity()  # post-norm layers end normalised

    def forward(self, x, mask=None):
        """x (batch, len, d_model) -> the same shape."""
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


class Decoder(nn.Module):
    """num_layers decoder layers, and one closing norm when norm_first (article 2, 4.2)."""

    def __init__(self, num_layers, d_model, num_heads, d_ff, dropout=0.1, norm_first=True):
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(d_model, num_heads, d_ff, dropout, norm_first)
                                    for _ in range(num_layers))
        self.norm = LayerNorm(d_model) if norm_first else nn.Identity()

    def forward(self, x, memory, src_mask=None, tgt_mask=None, cache=None):
        """x (batch, target, d_model), memory (batch, source, d_model) -> (batch, target, d_model)."""
        for layer in self.layers:
            x = layer(x, memory, src_mask, tgt_mask, cache)
        return self.norm(x)

    def cached_length(self, cache):
        """How many target positions a cache holds that is not empty."""
        keys, _ = cache[self.layers[0].self_attn]  # (batch, heads, positions, d_k), as many in every layer
        return keys.size(2)


class TransformerClassifier(nn.Module):
    """Encoder and a linear layer on the first token (article 1, 4.6)."""

    def __init__(self, vocab_size, d_model, num_heads, num_layers, d_ff, num_classes, *, max_len, dropout=0.1,
                 norm_first=False):
        super().__init__()
        self.embed = nn.Sequential(Embeddings(d_model, vocab_size),
                                   PositionalEncoding(d_model, max_len=max_len, dropout=dropout))
        self.encoder = Encoder(num_layers, d_model, num_heads, d_ff, dropout, norm_first)
        self.classify = nn.Linear(d_model, num_classes)
        init_weights(self)

    def forward(self, tokens, mask=None):
        """(batch, len) ids and their padding mask -> logits (batch, classes), [attention weights (batch, heads, len,
        len) per layer] (None each when fused)."""
        x = self.encoder(self.embed(tokens), mask)  # (batch, len, d_model)
        return self.classify(x[:, 0]), [layer.self_attn.attn for layer in self.encoder.layers]


class EncoderDecoder(nn.Module):
    """The whole Transformer, wired from its five parts (article 2, 5)."""

    def __init__(self, encoder, decoder, src_embed, tgt_embed, generator):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.src_embed, self.tgt_embed = src_embed, tgt_embed
        self.generator = generator

    def encode(self, src, src_mask):
        """(batch, source) ids -> memory (batch, source, d_model)."""
        return self.encoder(self.src_embed(src), src_mask)

    def decode(self, memory, src_mask, tgt, tgt_mask, cache=None):
        """(batch, target) ids -> states (batch, target, d_model). With a cache, only the states of the positions
        that it does not hold yet; tgt and tgt_mask are given whole all the same."""
        x = self.tgt_embed(tgt)
        if cache:  # not at the first step: the dict is still empty
            known = self.decoder.cached_length(cache)
            x, tgt_mask = x[:, known:], tgt_mask[..., known:, :]
        return self.decoder(x, memory, src_mask, tgt_mask, cache)

    def forward(self, src, tgt, src_mask, tgt_mask):
        """(batch, source) and (batch, target) ids -> logits (batch, target, tgt_vocab): at each target position, what
        comes next."""
        return self.generator(self.decode(self.encode(src, src_mask), src_mask, tgt, tgt_mask))


def make_model(src_vocab, tgt_vocab, *, num_layers=6, d_model=512, num_heads=8, d_ff=2048, dropout=0.1, max_len=5000,
               norm_first=True):
    """An EncoderDecoder of these sizes, freshly initialised (article 2, 5). The defaults are the paper's base model,
    but for the norm's order."""
    def embed(vocab_size):
        return nn.Sequential(Embeddings(d_model, vocab_size),
                             PositionalEncoding(d_model, max_len=max_len, dropout=dropout))

    sizes = num_layers, d_model, num_heads, d_ff, dropout, norm_first
    model = EncoderDecoder(Encoder(*sizes), Decoder(*sizes), embed(src_vocab), embed(tgt_vocab),
                           nn.Linear(d_model, tgt_vocab))
    init_weights(model)
    return model


def init_weights(model):
    """Every Linear: Xavier weights, zero bias. Embeddings keep the standard deviation that their class gives them."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)


@contextlib.contextmanager
def evaluating(model):
    """Inside: evaluation mode and no graph. Afterwards every module is back in the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def check_max_len(model, max_len):
    """ValueError if max_len is above the decoder's position table."""
    for module in model.tgt_embed.modules():
        if isinstance(module, PositionalEncoding) and max_len > module.max_len:
            raise ValueError(f"decoding: max_len ({max_len}) is above the decoder's max_len ({module.max_len})")


def next_logits(model, memory, src_mask, tgt, cache, forbidden):
    """Logits of the token after tgt, (rows, tgt_vocab). Those of the forbidden ids are -inf."""
    states = model.decode(memory, src_mask, tgt, subsequent_mask(tgt.size(1), tgt.device), cache)
    logits = model.generator(states[:, -1])
    logits[:, forbidden] = float("-inf")
    return logits


def select_rows(cache, rows):
    """The cache of these rows alone, in this order: rows are indices, or True at those to keep. None stays None."""
    return None if cache is None else {module: (k[rows], v[rows]) for module, (k, v) in cache.items()}


def greedy_decode(model, src, max_len, *, bos=BOS, eos=EOS, pad=PAD, unk=UNK, use_cache=True):
    """(batch, source) ids -> (batch, at most max_len) ids: at each step the likeliest token.

    A row has no BOS; it ends with its EOS, if that was chosen, and PAD after it. PAD, BOS and UNK are never chosen, so
    PAD always means "after EOS". A row leaves the batch at its own EOS; the call ends with the last row. The cache
    changes the time, not the result. ValueError if max_len is above the decoder's position table.
    """
    check_max_len(model, max_len)
    with evaluating(model):
        src_mask = make_padding_mask(src, pad)
        memory = model.encode(src, src_mask)
        cache = {} if use_cache else None
        result = torch.full((src.size(0), max_len), pad, device=src.device)
        rows = torch.arange(src.size(0), device=src.device)  # which rows of the result are still being written
        tgt = torch.full((src.size(0), 1), bos, device=src.device)

        for step in range(max_len):
            chosen = next_logits(model, memory, src_mask, tgt, cache, [pad, bos, unk]).argmax(dim=-1)  # (rows,)
            result[rows, step] = chosen
            tgt = torch.cat([tgt, chosen[:, None]], dim=1)

            going = chosen != eos
            if not going.all():
                rows, tgt, memory, src_mask = rows[going], tgt[going], memory[going], src_mask[going]
                cache = select_rows(cache, going)
            if rows.numel() == 0:
                return result[:, :step + 1]
        return result


def beam_decode(model, src, max_len, beams=4, *, bos=BOS, eos=EOS, pad=PAD, unk=UNK, use_cache=True):
    """(batch, source) ids -> (batch, at most max_len) ids: of the sequences that a beam search meets, the best.

    A row's beams are its `beams` likeliest sequences so far. Each grows by every token, and the likeliest results are
    the next beams; a finished one keeps its slot unchanged. The best has the largest sum of log-probabilities per
    token, EOS included: the sum alone would favour short ones. At max_len a sequence counts without EOS. One beam is
    greedy_decode, and the rest is as there: the form of the result, the forbidden tokens, the cache, the ValueError.
    """
    if beams < 1:
        raise ValueError(f"beam_decode: beams ({beams}) must be at least 1")
    check_max_len(model, max_len)
    with evaluating(model):
        src_mask = make_padding_mask(src, pad)
        memory = model.encode(src, src_mask).repeat_interleave(beams, dim=0)  # a text's beams stand side by side
        src_mask = src_mask.repeat_interleave(beams, dim=0)
        cache = {} if use_cache else None
        result = torch.full((src.size(0), max_len), pad, device=src.device)
        rows = torch.arange(src.size(0), device=src.device)  # which rows of the result are still being written
        tgt = torch.full((src.size(0), beams, 1), bos, device=src.device)
        total = torch.full((src.size(0), beams), float("-inf"), device=src.device)  # -inf: an empty slot
        total[:, 0] = 0.0  # one beam at first
        finished = torch.zeros_like(total, dtype=torch.bool)

        for step in range(max_len):
            logits = next_logits(model, memory, src_mask, tgt.flatten(0, 1), cache, [pad, bos, unk])
            log_p = F.log_softmax(logits.float(), dim=-1).unflatten(0, total.shape)  # (rows, beams, tgt_vocab)
            scores = total[:, :, None] + log_p
            scores[finished] = float("-inf")  # a finished beam goes on in one way, with PAD, and before all others
            scores[..., pad][finished] = float("inf")
            best, place = scores.flatten(1).topk(beams)  # (rows, beams), like the next five
            parent, token = place // scores.size(2), place % scores.size(2)
            old = torch.arange(rows.numel(), device=src.device)[:, None], parent
            total = torch.where(finished[old], total[old], best)
            finished = finished[old] | ((token == eos) & total.isfinite())
            tgt = torch.cat([tgt[old], token[:, :, None]], dim=2)  # (rows, beams, step + 2)

            going = (total.isfinite() & ~finished).any(dim=1) & (step + 1 < max_len)
            winner = (total / (tgt[:, :, 1:] != pad).sum(dim=2)).argmax(dim=1)
            result[rows[~going], :step + 1] = tgt[~going, winner[~going], 1:]
            kept = (old[0] * beams + parent)[going].flatten()
            memory, src_mask, cache = memory[kept], src_mask[kept], select_rows(cache, kept)
            rows, tgt, total, finished = rows[going], tgt[going], total[going], finished[going]
            if rows.numel() == 0:
                break
        return result[:, (result != pad).any(dim=0)]


def print_shapes(model, ids, masks):
    """One forward pass of the model, module by module: the name, what comes out, how many numbers it learns. ids and
    masks are lists, in the order of its forward."""
    def show(name, module):
        def hook(_, args, output):
            shapes = [tuple(t.shape) for t in (output if isinstance(output, tuple) else (output,)) if t is not None]
            learned = sum(p.numel() for p in module.parameters())
            print(f"  {name:46}{type(module).__name__:24}{' and '.join(map(str, shapes)):27}{learned:6,}")
        return hook

    parts = Embeddings, PositionalEncoding, LayerNorm, MultiHeadAttention, PositionwiseFeedForward
    hooks = [module.register_forward_hook(show(name, module)) for name, module in model.named_modules()
             if isinstance(module, parts) or name in ("classify", "generator")]
    print(f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters, "
          f"reads {' and '.join(str(tuple(t.shape)) for t in ids)}")
    with evaluating(model):
        model(*ids, *masks)
    for hook in hooks:
        hook.remove()


def demo():
    """The shapes on the way through both models: a batch of 2, sources of 7 tokens, targets of 5."""
    tokens, tgt = torch.randint(4, 20, (2, 7)), torch.randint(4, 20, (2, 5))
    sizes = dict(d_model=32, num_heads=4, num_layers=1, d_ff=64, max_len=10)
    print_shapes(TransformerClassifier(20, num_classes=2, **sizes), [tokens], [make_padding_mask(tokens)])
    print_shapes(make_model(20, 20, **sizes), [tokens, tgt], [make_padding_mask(tokens), make_target_mask(tgt)])


if __name__ == "__main__":
    demo()
