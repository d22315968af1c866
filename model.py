"""
The two models: a classifier (article 1) and an encoder-decoder (article 2), and greedy decoding.

    TransformerClassifier:  ids -> embed -> Encoder -> first token -> Linear -> logits
    EncoderDecoder:         source ids -> embed -> Encoder -> memory
                            target ids -> embed -> Decoder (looks at memory) -> Linear -> logits

Both return logits: the softmax is the loss's business. Notation: see attention.py.
"""
import contextlib

import torch
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
        """(batch, len) ids and their padding mask -> logits (batch, classes), [weights (batch, heads, len, len) per
        layer] (None each when fused)."""
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
            known = cache[self.decoder.layers[0].self_attn][0].size(2)  # its keys are (batch, heads, known, d_k)
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
    """Every Linear: Xavier weights, zero bias. Embeddings keep the deviation that their class gives them."""
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


def greedy_decode(model, src, max_len, *, bos=BOS, eos=EOS, pad=PAD, use_cache=True):
    """(batch, source) ids -> (batch, at most max_len) ids: at each step the likeliest token.

    A row has no BOS; it ends with its EOS, if that was chosen, and PAD after it. PAD and BOS are never chosen, so PAD
    always means "after EOS". A row leaves the batch at its own EOS; the call ends with the last row. The cache changes
    the time, not the result. ValueError if max_len is above the decoder's position table.
    """
    for module in model.tgt_embed.modules():
        if isinstance(module, PositionalEncoding) and max_len > module.max_len:
            raise ValueError(f"greedy_decode: max_len ({max_len}) is above the decoder's max_len ({module.max_len})")

    with evaluating(model):
        src_mask = make_padding_mask(src, pad)
        memory = model.encode(src, src_mask)
        cache = {} if use_cache else None
        result = torch.full((src.size(0), max_len), pad, device=src.device)
        rows = torch.arange(src.size(0), device=src.device)  # which rows of the result are still being written
        tgt = torch.full((src.size(0), 1), bos, device=src.device)
        causal = subsequent_mask(max_len, src.device)

        for step in range(max_len):
            states = model.decode(memory, src_mask, tgt, causal[:, :step + 1, :step + 1], cache)
            logits = model.generator(states[:, -1])  # (rows, tgt_vocab)
            logits[:, [pad, bos]] = float("-inf")
            chosen = logits.argmax(dim=-1)
            result[rows, step] = chosen
            tgt = torch.cat([tgt, chosen[:, None]], dim=1)

            going = chosen != eos
            if not going.all():
                rows, tgt, memory, src_mask = rows[going], tgt[going], memory[going], src_mask[going]
                for module, (k, v) in (cache or {}).items():
                    cache[module] = k[going], v[going]
            if rows.numel() == 0:
                return result[:, :step + 1]
        return result


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
