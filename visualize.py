"""
See what attention does: ten pictures, a map in the terminal, and a report that finds what is wrong with it.

    python visualize.py                                            both toys; pictures and report go to figures/
    python visualize.py --text "the ending was never dull"         another remark for the sentiment model
    python visualize.py --source "8 1 8 2"                         another sequence for the copy model
    python visualize.py --checkpoint checkpoints/translate.pt --source "ein mann schläft ." --data pairs.tsv

01 positions, 02 masks, 03 the formula step by step; 04 the classifier; 05 encoder, 06 decoder and 07 cross-attention of
an encoder-decoder, 08 its cross-attention before and after training; 09 the training; 10 the report as a table. The
report, also in report.txt, measures a few hundred inputs, of the toys' validation sets or of --data. Errors: attention
weight on padding or on the future, nan, rows that do not sum to 1. Hints: the rest.

In every map a row is a query, the token that looks, and a column a key, a token that is looked at; a decoder's row
bears the token that is produced there. Repeated words are numbered (film, film·2), unknown words have a "?".
Start at attention_maps, head_statistics, find_problems and Subject; then the pictures.
"""
import contextlib
import itertools
import math
import os
import re
import shutil
import sys
import unicodedata
import warnings
from collections import namedtuple
from pathlib import Path

import torch

from attention import attention, make_padding_mask, make_target_mask, subsequent_mask
from model import BOS, PAD, UNK, EncoderDecoder, TransformerClassifier, evaluating, greedy_decode
from train import (TASKS, Parser, Seq2Seq, Sentiment, count_unknown, default_path, file_path, join_tokens,
                   load_or_train, pad, pick_device, print_notice, read_pairs, report_unknown, run, set_seed,
                   shift, shorten, with_defaults)
from transformer_layer import PositionalEncoding

TEXT, SOURCE = "the film was not very bad", "3 1 4 1 5 9 2 5"  # held out in training
MOST_INPUTS = 300         # that are measured
MOST_WEIGHTS = 4_000_000  # of a head, over all inputs: where they are long, fewer are measured


# ------------------------------------------------------------------------------------------------------- the weights

# The attention of one kind over a batch: weights (batch, heads, query, key) for each layer; the ids (batch, query) that
# the queries stand for and the ids (batch, key) that are looked at, PAD where there is no token; whether it is causal.
Map = namedtuple("Map", ["weights", "rows", "columns", "causal"])


def attention_maps(task, model, batch):
    """One pass over a batch -> {"classifier": Map} or {"encoder": Map, "decoder": Map, "cross": Map}.

    The task's own predict makes the pass, so that a fault there shows. (Not greedy_decode: attn holds the weights of
    the last call, and with a cache that is one row.)
    """
    device = next(model.parameters()).device
    with evaluating(model):
        task.predict(model, [t.to(device) for t in batch])
    if isinstance(model, TransformerClassifier):
        kinds = {"classifier": ([layer.self_attn for layer in model.encoder.layers], batch[0], batch[0])}
    else:
        src, (decoder_input, labels) = batch[0], shift(batch[1])
        kinds = {"encoder": ([layer.self_attn for layer in model.encoder.layers], src, src),
                 "decoder": ([layer.self_attn for layer in model.decoder.layers], labels, decoder_input),
                 "cross": ([layer.cross_attn for layer in model.decoder.layers], labels, src)}
    return {kind: Map([module.attn.cpu() for module in modules], rows, columns, causal=kind == "decoder")
            for kind, (modules, rows, columns) in kinds.items()}


def key_masks(rows, columns, causal):
    """(batch, query) and (batch, key) ids -> allowed, padding, future, each (batch, query, key): a key is one of them.
    Not made with attention.py's masks, so that a fault in those is found too."""
    padding = (columns == PAD)[:, None, :].expand(-1, rows.size(1), -1)
    future = torch.arange(columns.size(1)) > torch.arange(rows.size(1))[:, None]
    future = future & ~padding if causal else torch.zeros_like(padding)
    return ~padding & ~future, padding, future


def reads_first_row(task, model, batch):
    """Whether a classifier's answer depends on the first row of the encoder's output alone, as TransformerClassifier's
    does: it stays if that row takes the place of all others."""
    with evaluating(model):
        before, _ = task.predict(model, batch)
        hook = model.encoder.register_forward_hook(lambda module, inputs, output: output[:, :1].expand_as(output))
        after, _ = task.predict(model, batch)
        hook.remove()
    return before.equal(after)


# -------------------------------------------------------------------------------------------------------- the report

LEGEND = """\
entropy: 1 if all keys that a query may look at get the same weight, 0 if one gets all. uniform: the mean weight that a
key would have if all had the same. first, last, previous, same, next: the mean weight on the first and the last token,
one place before the query's, at it, one after. padding, future, sum_error: in the worst row, the weight on padding and
on tokens still to come, and how far the sum of the row is off. -: no query, or only a decoder's last, can look there.

Attention is not an explanation: a weight says where a head looks, not why the model answers as it does."""
STATISTICS = "entropy", "uniform", "first", "last", "previous", "same", "next", "padding", "future", "sum_error"
# What one head does, over many inputs: its kind of attention, layer and number (from 1), the statistics that LEGEND
# explains, how many weights are nan, and for each head of the layer the mean share of the weight that lies elsewhere.
Head = namedtuple("Head", ["kind", "layer", "number", *STATISTICS, "nan", "apart"])


def head_statistics(kind, layer, weights, rows, columns, causal):
    """The weights of one layer (batch, heads, query, key), the rest as in Map -> [a Head for each]."""
    nan = weights.isnan().sum((0, 2, 3))
    rounding = 4 * torch.finfo(weights.dtype).eps
    real = rows != PAD                                           # (batch, query), n of them True
    weights = weights.double().transpose(0, 1)[:, real]          # (heads, n, key)
    allowed, padding, future = (keys[real] for keys in key_masks(rows, columns, causal))  # (n, key)
    query = torch.arange(rows.size(1)).expand_as(rows)[real]     # (n) the place of each
    last = ((columns != PAD).sum(1, keepdim=True) - 1).expand_as(rows)[real]
    choices = allowed.sum(1).double()
    free = choices > 1

    def mean_on(key):
        """key (n), a place for each query -> the mean weight there (heads), over the queries that have a choice and may
        look there; nan if there is none."""
        here = torch.arange(columns.size(1)) == key[:, None]     # (n, key)
        counted = free & (here & allowed).any(1)
        return (weights * here).sum(2)[:, counted].mean(1)

    statistics = [
        (-torch.xlogy(weights, weights).sum(2) / choices.log())[:, free].mean(1),
        (1 / choices[free]).mean().expand(len(weights)),
        mean_on(0 * query),
        mean_on(0 * query - 1 if causal else last),  # only the last query of a decoder may look at the last key
        *(mean_on(query + offset) for offset in (-1, 0, 1)),
        *((weights * keys).sum(2).amax(1) for keys in (padding, future)),
        ((weights.sum(2) - allowed.any(1).double()).abs() - rounding).clamp(min=0).amax(1),
        nan,
        torch.stack([(weights - head)[:, free].abs().sum(2).mean(1) / 2 for head in weights]),
    ]
    return [Head(kind, layer, number, *values)
            for number, values in enumerate(zip(*(statistic.tolist() for statistic in statistics)), start=1)]


def measure_heads(maps):
    """{kind: Map} -> [Head], layer by layer."""
    return [head for kind, (layers, *ids) in maps.items() for layer, weights in enumerate(layers, start=1)
            for head in head_statistics(kind, layer, weights, *ids)]


LIMITS = {"nan": 0, "sum_error": 1e-4, "padding": 1e-6, "future": 0}  # above is an error
REST = (" of the weight is on the %s token. Often harmless: that token matters, or an idle head rests there. If all "
        "heads do it, the positions may be too strong beside the embeddings (article 1, 3.5 and 6.2).")
ADVICE = {
    "nan": "nan among the attention weights. Look at what attention.py does with a fully masked row, and for inf in "
           "the scores or nan in the loss (article 1, 5 and 6.3).",
    "sum_error": "a row of weights is off its sum, 1 (0 if fully masked), by {sum_error:.2g}. Look at attention(): the "
                 "softmax goes over the keys, and what is returned is from before dropout (article 1, 3.2, 4.2).",
    "padding": "up to {padding:.2g} of a row is on padding: the mask is not applied. Check that predict in train.py "
               "passes make_padding_mask on, and that every layer passes its mask on (article 1, 5 and 6.2).",
    "future": "up to {future:.2g} of a row is on tokens still to come. Look at make_target_mask and subsequent_mask, "
              "and follow tgt_mask through the decoder (article 1, 3.3; article 2, 4.2).",
    "flat": "weights about equal (entropy {entropy:.2f} of 1), as before training. Does the loss fall? Look at the "
            "scaling in attention(): divided by d_k, not by its root, the scores are too small (article 1, 3.2, 6.2).",
    "first": "{first:.2f}" + REST % "first",
    "last": "{last:.2f}" + REST % "last",
    "collapsed": "each head of the layer puts all its weight on one key (entropy at most {entropy:.2f} of 1). Look at "
                 "the scaling in attention(): not divided by sqrt(d_k), the softmax saturates (article 1, 3.2, 6.3).",
    "alike": "heads that look at the same places as another (less than 0.05 of the weight differs). Look at split in "
             "attention.py, or try fewer --heads (article 1, 3.4).",
}


def find_problems(pairs):
    """Pairs of a Head and the same before training -> [(name of a problem, Head)]."""
    problems = []
    for _, group in itertools.groupby(pairs, key=lambda pair: pair[0][:2]):  # the heads of a layer
        layer, ordinary = list(group), []
        for head, before in layer:
            found = [name for name, limit in LIMITS.items() if getattr(head, name) > limit]
            if not found:  # beside an error, a hint would distract
                found = [place for place in ("first", "last") if getattr(head, place) > max(0.5, 3 * head.uniform)]
                if head.entropy > 0.95 and abs(head.entropy - before.entropy) < 0.02:
                    found.append("flat")
            problems += [(name, head) for name in found]
            if not found:
                ordinary.append(head)
        if len(ordinary) == len(layer) and max(head.entropy for head in ordinary) < 0.05:
            problems += [("collapsed", head) for head in ordinary]
        else:
            choosing = [head for head in ordinary if head.entropy < 0.9]
            problems += [("alike", head) for head in choosing if any(
                head.apart[other.number - 1] < 0.05 for other in choosing if other is not head)]
    return problems


def make_findings(problems, accuracy=0.0):
    """What find_problems found -> lines of text, one for each kind of attention and problem, errors first."""
    findings = []
    for kind, name in itertools.product(dict.fromkeys(head.kind for _, head in problems), ADVICE):
        heads = [head for problem, head in problems if (head.kind, problem) == (kind, name)]
        if not heads:
            continue
        places = []
        for layer, group in itertools.groupby(heads, key=lambda head: head.layer):
            numbers = [str(head.number) for head in group]
            places.append(f"layer {layer}, head{'s' * (len(numbers) > 1)} {', '.join(numbers)}")
        worst = {field: max(getattr(head, field) for head in heads) for field in STATISTICS}
        level = "error" if name in LIMITS else "hint"
        finding = f"{level}: {kind}, {'; '.join(places)}: {ADVICE[name].format(**worst)}"
        if level == "hint" and accuracy >= 0.99:
            finding += f" The task is solved all the same ({accuracy:.1%})."
        findings.append(finding)
    if not any(name in LIMITS for name, _ in problems):
        findings.append("no error: nothing on padding, nothing on the future, no nan, every row sums to 1")
    return findings


def statistics_text(head):
    """The statistics of a Head, each as it is written."""
    values = [(field, getattr(head, field)) for field in STATISTICS]
    return ["-" if math.isnan(value) else f"{value:.2g}" if field in LIMITS else f"{value:.2f}"
            for field, value in values]


def table(pairs):
    """The statistics as lines of text: for each kind of attention a blank line and a heading, for each head two."""
    def line(name, texts):
        return f"{name:19}" + "".join(f"{text:>10}" for text in texts)

    for kind, group in itertools.groupby(pairs, key=lambda pair: pair[0].kind):
        yield from ("", line(kind, STATISTICS))
        for head, before in group:
            yield line(f"layer {head.layer}, head {head.number}", statistics_text(head))
            yield line("  before training", statistics_text(before))


# ------------------------------------------------------------------------------------------------------ what is seen


class Subject:
    """A model and what is to be seen of it: question and answer; maps, what labelled_maps makes of that question, and
    maps_before, the same before training; framed: does a classifier read the first row alone? heads, pairs of a Head
    over many inputs and that before training; report."""

    def __init__(self, name, path, device, text=None, source=None, data=None):
        self.task, model, self.checkpoint = load_or_train(name, path, device)
        task, path = self.task, path or default_path(name)
        classifies = isinstance(task, Sentiment) and isinstance(model, TransformerClassifier)
        if not classifies and not (isinstance(task, Seq2Seq) and isinstance(model, EncoderDecoder)):
            raise ValueError(f"{path}: visualize.py does not know a {type(task).__name__} task with a "
                             f"{type(model).__name__}, only what is like Sentiment or Seq2Seq")
        option, text, other = ("--text", text, source) if classifies else ("--source", source, text)
        if other is not None:
            raise ValueError(f"{path} holds a {self.checkpoint['task']} model: give it a {option} alone")
        examples, measured, example = examples_to_measure(task, model, data)
        text = example if text is None else text
        if text is None:
            raise ValueError(f"this model was trained on a file: say what to look at with {option} or --data")

        ids = task.model_ids(model, text)
        unknown, words = count_unknown(ids)
        report_unknown(unknown, words)
        self.tokens = task.tokenize(text)[:words]  # those that are read
        self.question = join_tokens(self.tokens)
        answer, tab, share = task.answers(model, [ids])[0].partition("\t")
        self.answer = f"{answer} ({float(share):.1%})" if tab else answer

        row = ids + [PAD] * min(2, task.most_tokens(model) - len(self.tokens))  # is padding looked at?
        target = 0  # a label, which predict does not use
        if not classifies:
            target = [BOS, *greedy_decode(model, pad([row]).to(device), model.tgt_embed[1].max_len)[0].tolist()]
        drawn = task.batch([(row, target)])
        batch = task.batch(examples) if examples else drawn
        set_seed(self.checkpoint["seed"])
        models = model, task.build(self.checkpoint["config"]).to(device)  # trained, untrained
        self.maps, self.maps_before = (self.labelled_maps(attention_maps(task, each, drawn))
                                       for each in models)
        self.heads = list(zip(*(measure_heads(attention_maps(task, each, batch)) for each in models)))
        self.framed = classifies and reads_first_row(task, model, [t.to(device) for t in drawn])
        accuracy, when = self.checkpoint["metrics"]["accuracy"], "after training"
        if data:
            task.valid = examples
            accuracy, when = task.evaluate(model, device)["accuracy"], "on these"
        self.report = "\n".join([
            f"{path}: measured on {measured}; {task.metric} {when} {accuracy:.1%}",
            *table(self.heads), "", *make_findings(find_problems(self.heads), accuracy)])

    def labelled_maps(self, maps):
        """{kind: Map} of one text -> {kind: (weights (layers, heads, query, key), labels of the rows, of the columns,
        masked (query, key))}. Padding is cut off, but where it is looked at it stays: that is the fault to see."""
        labelled = {}
        for kind, (layers, rows, columns, causal) in maps.items():
            real = rows[0] != PAD
            weights = torch.stack([weights[0][:, real] for weights in layers])
            kept = (columns[0] != PAD) | (weights > 0).flatten(0, 2).any(0)
            allowed, _, _ = key_masks(rows, columns, causal)
            labelled[kind] = (weights[..., kept], self.labels(rows[0][real], kind in ("decoder", "cross")),
                              self.labels(columns[0][kept], kind == "decoder"), ~allowed[0][real][:, kept])
        return labelled

    def labels(self, ids, generated):
        """The tokens of a row of ids that was generated or read, each label once; what was typed in place of <unk>."""
        if generated:
            return numbered(self.task.target.tokens[i] for i in ids.tolist())
        return numbered(f"{typed}?" if i == UNK else self.task.source.tokens[i]
                        for i, typed in itertools.zip_longest(ids.tolist(), self.tokens))


def examples_to_measure(task, model, data):
    """-> examples from --data or a toy's validation set, words that say how many, a text to draw. A model that was
    trained on a file has none without --data."""
    longest = task.most_tokens(model)
    most = min(MOST_INPUTS, 1 + MOST_WEIGHTS // (longest + 1) ** 2)  # + 1: EOS
    if data:
        pairs = read_pairs(data, task)
        some = pairs[::math.ceil(len(pairs) / most)]
        text = join_tokens(min((tokens for tokens, _ in some), key=lambda tokens: abs(len(tokens) - 10)))
        examples = task.encode_pairs(some, data, longest)
        return examples, f"{len(examples)} of {len(pairs):,} lines of {data}", text
    examples = task.toy_examples()
    if examples is None:
        return None, "the given text alone (--data FILE measures more)", None
    some = examples[::math.ceil(len(examples) / most)]
    return some, f"{len(some)} of {len(examples):,} validation examples", task.question


def numbered(words):
    """Words as labels: long ones cut, repeated ones numbered."""
    words = [shorten(word, 14) for word in words]
    counts = [words[:i].count(word) for i, word in enumerate(words, start=1)]
    return [word if count == 1 else f"{word}·{count}" for word, count in zip(words, counts)]


SHADES, ASCII_SHADES = "░▒▓█", ".:*#"
SHADED_FROM = 0.10, 0.25, 0.50, 0.75  # the weights


def text_map(weights, rows, columns, encoding, width):
    """A map (query, key) as lines of text, at most width wide; ASCII shades if the encoding lacks the others."""
    rows, columns = ([label.encode(encoding, "backslashreplace").decode(encoding) for label in labels]
                     for labels in (rows, columns))
    shades = SHADES if SHADES.encode(encoding, "ignore").decode(encoding) == SHADES else ASCII_SHADES
    left = max(map(cells, rows)) + 1
    narrowest = max(cells(label[:1]) for label in columns) + 1
    cell = max(narrowest, min(max(map(cells, columns)) + 1, (width - left) // len(columns)))
    fitting = max(1, (width - left) // cell)
    yield (" " * left + "".join(fill(label, cell - 1) + " " for label in columns[:fitting])).rstrip()
    for label, row in zip(rows, weights.tolist()):
        levels = [sum(weight >= limit for limit in SHADED_FROM) for weight in row[:fitting]]
        yield (fill(label, left) + "".join((" " + shades)[level] * (cell - 1) + " " for level in levels)).rstrip()
    yield ", ".join(f"{shade} from {limit:.2f}" for shade, limit in zip(shades, SHADED_FROM))
    if fitting < len(columns):
        yield f"the last {len(columns) - fitting} of {len(columns)} columns do not fit into the terminal's width"
    for label in [label for label in columns if label.endswith("·2")][:1]:
        yield f"{label} is the second {label[:-2]}"


def cells(text):
    """The width of a text in a terminal: a CJK character is as wide as two others, a mark or a joiner has none."""
    return sum(0 if unicodedata.category(sign) in ("Mn", "Me", "Cf") else
               2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in text)


def fill(text, width):
    """The text, cut or filled up to that width."""
    while cells(text) > width:
        text = text[:-1]
    return text + " " * (width - cells(text))


# ------------------------------------------------------------------------------------------------------ the pictures

MASKED = dict(facecolor="0.93", edgecolor="0.7", hatch="////", linewidth=0)
SIGNED = dict(cmap="RdBu_r", vmin=-1, vmax=1)  # colours for numbers round 0
# In inches: a cell that has room for a label, for a number, a usual one; the side of a map, of all maps of a picture
LABEL_CELL, NUMBER_CELL, USUAL_CELL, MAP, MAPS = 0.14, 0.25, 0.36, 4.3, 28
DPI = 100


def new_figure(title, width, height):
    """A figure of that size in inches; its parts make room for each other."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title)
    return figure


def draw_map(ax, values, rows, columns, masked=False, cell=0.4, texts=None, cmap="magma_r", vmin=0, vmax=1):
    """One map (query, key) with its labels; returns the image. Masked cells without weight are hatched; nan and what is
    above the scale is red. cell: the height of a cell in inches; texts: written into the cells in place of numbers."""
    import matplotlib
    if tuple(values.shape) != (len(rows), len(columns)):
        raise ValueError(f"{len(rows)} row labels and {len(columns)} column labels for a map of (query, key) = "
                         f"{tuple(values.shape)}")
    hidden = masked & (values <= 0)
    painted = values.nan_to_num(2 * vmax).masked_fill(hidden, math.nan)
    ax.patch.set(**MASKED)
    image = ax.imshow(painted.tolist(), cmap=matplotlib.colormaps[cmap].with_extremes(over="red"), vmin=vmin,
                      vmax=1.001 * vmax, aspect="auto", interpolation="nearest")  # a weight of 1 may be rounded up
    ax.tick_params(length=0, pad=2)
    step = max(1, math.ceil(LABEL_CELL / cell))  # labels that would overlap are left out
    ax.set_xticks(range(0, len(columns), step), columns[::step], rotation=90 if max(map(cells, columns)) > 2 else 0)
    ax.set_yticks(range(0, len(rows), step), rows[::step])
    if texts is None and cell < NUMBER_CELL:
        return image
    numbers = [[f"{round(value, 2) + 0:.2f}".replace(".00", "") for value in row] for row in values.tolist()]  # no -0
    brightness = image.to_rgba(image.get_array())[..., :3] @ (0.299, 0.587, 0.114)
    for i, j in (~hidden).nonzero().tolist():
        ax.text(j, i, (texts or numbers)[i][j], ha="center", va="center", fontsize=7,
                color="white" if brightness[i, j] < 0.5 else "black")
    return image


def draw_positions():
    small, large = (PositionalEncoding(d_model, max_len=100).table for d_model in (20, 64))  # (position, dimension)
    figure = new_figure("positional encoding", 13, 4.3)
    waves, whole, alike = figure.subplots(1, 3)
    for dim, line in zip(range(4, 8), ("C0-", "C0--", "C1-", "C1--")):
        waves.plot(small[:, dim].tolist(), line, label=str(dim))
    waves.set(title="dimensions 4 to 7 of 20: sine and cosine", xlabel="position", ylabel="value", ylim=(-1.1, 1.6))
    waves.legend(title="dimension", loc="upper center", ncols=4, frameon=False)
    similarity = large @ large.T / 32  # each position has the length sqrt(32)
    for ax, values, name, title in [(whole, large, "dimension", "the whole table, 64 dimensions"),
                                    (alike, similarity, "position", "similarity of every two positions (cosine)")]:
        image = ax.imshow(values.tolist(), aspect="auto", interpolation="nearest", **SIGNED)
        ax.set(title=title, xlabel=name, ylabel="position")
    figure.colorbar(image, ax=[whole, alike], label="value, similarity", aspect=30)
    return figure


def draw_masks():
    """The masks of a batch of two sentences, (batch, 1, query, key)."""
    from matplotlib.patches import Patch
    ids = torch.tensor([[4, 5, 6, 7], [8, 9, PAD, PAD]])
    masks = {"padding: make_padding_mask": make_padding_mask(ids), "causal: subsequent_mask": subsequent_mask(4)[None],
             "both: make_target_mask": make_target_mask(ids)}
    figure = new_figure("the masks of two sentences in one batch", 9, 6)
    axes = figure.subplots(2, 3)
    for i, words in enumerate((["I", "love", "this", "film"], ["so", "dull", "<pad>", "<pad>·2"])):
        for ax, (name, mask) in zip(axes[i], masks.items()):
            allowed = mask.expand(2, 1, 4, 4)[i, 0]
            image = draw_map(ax, allowed.float(), words, words, ~allowed, cmap="Blues", vmax=2)
            ax.set(title=name, xlabel="looks at (key)", ylabel="looks from (query)")
    figure.legend(handles=[Patch(facecolor=image.cmap(0.5), label="may look"), Patch(**MASKED, label="masked")],
                  loc="outside right", frameon=False, handlelength=1)
    return figure


def draw_steps():
    """The formula on one sentence, with random Q, K and V of d_k = 4."""
    words, dims = ["a", "moving", "film", "<pad>"], ["1", "2", "3", "4"]
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(4, 4, generator=generator) for _ in range(3))
    masked = ~make_target_mask(torch.tensor([[4, 5, 6, PAD]]))[0, 0]
    scores = q @ k.T
    output, weights = attention(q, k, v, ~masked)
    limit = scores.abs().max().item()
    signed = dict(SIGNED, vmin=-limit, vmax=limit)
    figure = new_figure("softmax(QKᵀ / √d_k) V, step by step", 14, 6)
    axes = figure.subplot_mosaic("QKVtt;12345")
    axes["t"].set_axis_off()
    axes["t"].text(0, 0.5, "1. every query times every key\n2. smaller numbers, a softer softmax\n"
                   "3. −∞ (hatched) for padding and the future\n4. each row becomes shares of 1\n"
                   "5. the mean of V by these shares", fontsize=10, linespacing=1.8, va="center")
    for title, values, columns, style in [
            ("Q: what a word looks for", q, dims, signed),
            ("K: what it is found by", k, dims, signed),
            ("V: what it hands over", v, dims, signed),
            ("1. QKᵀ", scores, words, signed),
            ("2. divided by √d_k = 2", scores / 2, words, signed),
            ("3. masked", (scores / 2).masked_fill(masked, -math.inf), words, dict(signed, masked=masked)),
            ("4. softmax: a row sums to 1", weights, words, dict(masked=masked)),
            ("5. times V", output, dims, signed)]:
        ax = axes[title[0]]
        image = draw_map(ax, values, words, columns, **style)
        ax.set(title=title, xlabel="d_k")
        if columns is words:
            ax.set(xlabel="looks at (key)", ylabel="looks from (query)")
        if values is weights:
            figure.colorbar(image, ax=ax, label="attention weight")
    return figure


def draw_grid(kind, title, names, weights, rows, columns, masked, framed=False):
    """Weights (layers, heads, query, key) as one map each, on one scale; names: of the layers; framed: the first row of
    the last layer."""
    layers, heads, queries, keys = weights.shape
    cell = max(LABEL_CELL, min(USUAL_CELL, MAP / max(queries, keys)))
    cell = min(cell, MAPS / (heads * keys), MAPS / (layers * queries))
    width, height = max(1, keys * cell), max(1, queries * cell)
    left, below = (1 + 0.085 * max(map(cells, labels)) for labels in (rows, columns))  # a letter's width
    figure = new_figure(title, heads * width + left + 0.8, layers * height + below)
    figure.supxlabel("looks at (key)", fontsize="medium")
    figure.supylabel("looks from (query)" + " to produce" * (kind in ("decoder", "cross")), fontsize="medium")
    axes = figure.subplots(layers, heads, squeeze=False, sharex=True, sharey=True)
    for i, h in itertools.product(range(layers), range(heads)):
        image = draw_map(axes[i, h], weights[i, h], rows, columns, masked, cell)
        axes[i, h].set(title=f"head {h + 1}" * (i == 0), ylabel=names[i] * (h == 0))
    for ax in axes[-1] if framed else ():
        ax.axhspan(-0.5, 0.5, fill=False, ec="tab:cyan", linewidth=2.5, clip_on=False)
    figure.colorbar(image, ax=axes[0, -1], label="attention weight")
    return figure


def draw_training(subjects):
    """What train.py recorded: the loss, and the accuracy on the validation set."""
    figure = new_figure("training", 9, 3.4 * len(subjects))
    for (left, right), subject in zip(figure.subplots(len(subjects), 2, squeeze=False), subjects):
        history = subject.checkpoint["history"]
        steps = [entry["step"] for entry in history]
        left.plot(steps, [entry["train_loss"] for entry in history], "C0o-", label="training set", markersize=4)
        for ax, key, name in (left, "loss", "loss"), (right, "accuracy", subject.task.metric):
            ax.plot(steps, [entry[key] for entry in history], "C1s--", label="validation set", markersize=4)
            ax.set(title=f"{subject.checkpoint['task']}: {name}", xlabel="step", ylabel=name)
            ax.grid(alpha=0.3)
            ax.legend(frameon=False, loc="center right")
        left.set_ylim(bottom=0)
        right.set_ylim(-0.02, 1.02)
    return figure


def draw_heads(subjects):
    """The report as a table, heads x statistics."""
    pairs = [pair for subject in subjects for pair in subject.heads]
    names = [f"{head.kind}, layer {head.layer}, head {head.number}" for head, _ in pairs]
    texts = [[f"{now} ({before})" for now, before in zip(*map(statistics_text, pair))] for pair in pairs]
    values = torch.tensor([[getattr(head, field) for field in STATISTICS] for head, _ in pairs])
    errors = values > torch.tensor([LIMITS.get(field, math.inf) for field in STATISTICS])
    painted = values.nan_to_num().masked_fill(errors, 2)
    cell = min(0.27, MAPS / len(names))
    figure = new_figure("what each head does; in brackets: before training; an error would be red",
                        0.9 * len(STATISTICS) + 3, cell * len(names) + 0.8)
    ax = figure.subplots()
    image = draw_map(ax, painted, names, STATISTICS, values.isnan(), cell, texts)
    ax.tick_params(axis="x", rotation=0)
    figure.colorbar(image, ax=ax, label="share")
    return figure


def draw_all(subjects):
    """The pictures one by one: file name, figure."""
    yield "01_positional_encoding.png", draw_positions()
    yield "02_masks.png", draw_masks()
    yield "03_attention_steps.png", draw_steps()
    files = {"classifier": "04_classifier.png", "encoder": "05_encoder.png", "decoder": "06_decoder.png",
             "cross": "07_cross.png"}
    for subject in subjects:
        title = f"{shorten(f'“{subject.question}”', 80)} → {shorten(subject.answer, 80)}"
        for kind in subject.maps:
            weights, *labels = subject.maps[kind]
            layers = [f"layer {i + 1}" for i in range(len(weights))]
            what = f"{kind}: {title}" + "\nframed: the row that the classifier reads" * subject.framed
            yield files[kind], draw_grid(kind, what, layers, weights, *labels, subject.framed)
            if kind == "cross":
                both = torch.stack([subject.maps_before[kind][0], weights], dim=1).flatten(0, 1)
                names = [f"{layer}\n{when}" for layer in layers for when in ("untrained", "trained")]
                yield "08_untrained.png", draw_grid(kind, f"cross before and after training: {title}", names,
                                                    both, *labels)
    yield "09_training.png", draw_training(subjects)
    yield "10_heads.png", draw_heads(subjects)


def font_families(text):
    """Fonts that together can draw the text: matplotlib takes a sign that one lacks from the next."""
    from matplotlib import font_manager, ft2font
    families = ["DejaVu Sans"]  # comes with matplotlib
    missing = set(map(ord, text)) - set(ft2font.FT2Font(font_manager.findfont("DejaVu Sans")).get_charmap())
    paths = font_manager.findSystemFonts() if missing else []
    # plain ones first, and of these the large ones, which have many signs
    for path in sorted(paths, key=lambda path: ("Regular" not in path, "Serif" in path, -os.path.getsize(path))):
        with contextlib.suppress(OSError, RuntimeError):  # a file that is no font for matplotlib
            font = ft2font.FT2Font(path)
            signs = missing.intersection(font.get_charmap())
            if signs and not re.search("Last ?Resort|Emoji", font.family_name):
                font_manager.fontManager.addfont(path)  # it may be newer than matplotlib's list
                families.append(font.family_name)
                missing -= signs
    if missing:
        print_notice(f"no installed font has {''.join(map(chr, sorted(missing)))[:20]}: boxes in the pictures; for "
                     "Chinese, install for example fonts-noto-cjk")
    return families


def save_pictures(subjects, out):
    """Write the pictures into the folder out, name them on stdout -> their paths. Neither MPLBACKEND nor a matplotlibrc
    changes them."""
    os.environ.pop("MPLBACKEND", None)  # a name that matplotlib does not know would end its import
    try:
        import matplotlib.style
    except ImportError as error:
        print_notice(f"no pictures: {error}; pip install matplotlib")
        return []
    paths = []
    with matplotlib.style.context("default"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph|Matplotlib currently does not support")  # our notice said it
        families = font_families("".join(subject.question + subject.answer for subject in subjects))
        matplotlib.rcParams.update({"font.family": families, "font.size": 9, "axes.titlesize": "medium",
                                    "text.parse_math": False, "hatch.linewidth": 0.5})
        for file, figure in draw_all(subjects):
            figure.savefig(out / file, dpi=DPI, bbox_inches="tight")
            print(out / file, flush=True)
            paths.append(out / file)
    return paths


def show_pictures(paths):
    """Each picture in a window of its own, until these are closed."""
    try:
        from matplotlib import pyplot
        if pyplot.get_backend().lower() == "agg":
            raise RuntimeError("there is no display")
        for path in paths:
            picture = pyplot.imread(path)
            figure = pyplot.figure(path.name, figsize=(picture.shape[1] / DPI, picture.shape[0] / DPI))
            figure.add_axes((0, 0, 1, 1), frame_on=False, xticks=[], yticks=[]).imshow(picture, origin="upper")
        pyplot.show()
        pyplot.close("all")
    except Exception as error:  # a backend is another program, which fails in its own ways
        print_notice(f"--show: no windows ({error}); the pictures are in {paths[0].parent}")


# ------------------------------------------------------------------------------------------------------- the command


def main(argv=None):
    """Returns the exit status."""
    parser = Parser("visualize.py", __doc__)
    add = parser.add_argument
    add("--text", help=f"what a classifier reads (default: {TEXT})")
    add("--source", help=f"what the copy or translation model reads (default: {SOURCE})")
    add("--checkpoint", type=file_path, metavar="PATH", help="this model alone; without --text or --source it reads a "
        "validation example (default: the toys in checkpoints/, trained first if they are not there)")
    add("--data", type=file_path, metavar="FILE", help="measure the model in --checkpoint on these lines, as train.py "
        "reads them (default: the toys' validation sets)")
    add("--out", type=file_path, metavar="DIR", default="figures", help="where the files go (default: figures)")
    add("--show", action="store_true", help="open the pictures in windows too (default: off)")
    add("--strict", action="store_true", help="exit status 1 if there is an error (default: off)")
    args = parser.parse_args(argv)
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        parser.error(f"--out: {out} is not a directory")
    if args.data and not args.checkpoint:
        parser.error("--data needs --checkpoint, the model that was trained on such lines")
    try:
        device = pick_device(args.device)
        if args.checkpoint:
            subjects = [Subject(None, args.checkpoint, device, args.text, args.source, args.data)]
        else:
            text, source = TEXT if args.text is None else args.text, SOURCE if args.source is None else args.source
            for name, asked in ("sentiment", text), ("copy", source):
                options = with_defaults([], TASKS[name].recipe)  # known before the toys are trained: can it be read?
                task = TASKS[name].read(options)
                task.model_ids(task.build(task.config(options)), asked, report_cut=str)
            subjects = [Subject("sentiment", None, device, text=text), Subject("copy", None, device, source=source)]
    except ValueError as error:
        parser.error(str(error))
    out.mkdir(parents=True, exist_ok=True)

    for subject in subjects:
        print(f"{subject.question} -> {subject.answer}")
    subject = subjects[0 if args.source is None and args.text is not None else -1]
    kind = list(subject.maps)[-1]
    weights, rows, columns, _ = subject.maps[kind]
    print(f"\n{kind} attention, layer {len(weights)}, mean of {weights.size(1)} heads; a row looks at the columns\n")
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # a notebook's stdout has none
    print(*text_map(weights[-1].mean(0), rows, columns, encoding, shutil.get_terminal_size().columns), "", sep="\n")
    report = "\n\n".join([*(subject.report for subject in subjects), LEGEND])
    print(report, end="\n\n", flush=True)
    (out / "report.txt").write_text(report + "\n", encoding="utf-8", errors="backslashreplace")
    print(out / "report.txt")
    paths = save_pictures(subjects, out)
    if args.show and paths:
        show_pictures(paths)
    return 1 if args.strict and "\nerror: " in report else 0


if __name__ == "__main__":
    run(main)
