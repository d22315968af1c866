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
from collections import Counter, namedtuple
from pathlib import Path
from typing import NamedTuple

import torch

from attention import attention, make_padding_mask, make_target_mask, subsequent_mask
from model import BOS, PAD, UNK, EncoderDecoder, TransformerClassifier, evaluating, greedy_decode
from train import (TASKS, Parser, Seq2Seq, Sentiment, count_unknown, default_path, file_path, join_tokens,
                   load_or_train, pad, pick_device, print_notice, read_pairs, run, set_seed, shift, shorten,
                   tokenize, with_defaults)
from transformer_layer import PositionalEncoding

TEXT, SOURCE = "the film was not very bad", "3 1 4 1 5 9 2 5"  # held out in training
MOST_INPUTS = 300         # that are measured
MOST_WEIGHTS = 4_000_000  # of a head, over all inputs: where they are long, fewer are measured


# ------------------------------------------------------------------------------------------------------- the weights


class Map(NamedTuple):
    """The attention of one kind over a batch; ids are PAD where there is no token."""
    weights: list          # (batch, heads, query, key) for each layer
    rows: torch.Tensor     # (batch, query) ids that the queries stand for
    columns: torch.Tensor  # (batch, key) ids that are looked at
    causal: bool


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


def positions_read(task, model, batch):
    """The positions of the encoder's output that a classifier's answer depends on, by its gradient: [0] as long as
    TransformerClassifier takes the first."""
    device = next(model.parameters()).device
    outputs = []
    hook = model.encoder.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    with evaluating(model), torch.enable_grad():
        logits, _ = task.predict(model, [t.to(device) for t in batch])
    hook.remove()
    gradient, = torch.autograd.grad(logits.max(), outputs)  # (1, len, d_model)
    return gradient[0].any(dim=1).nonzero().flatten().tolist()


# -------------------------------------------------------------------------------------------------------- the report

HEADINGS = {"entropy": "entropy", "first": "first", "first_uniform": "× uniform", "last": "last",
            "last_uniform": "× uniform", "previous": "previous", "same": "same", "next": "next", "padding": "padding",
            "future": "future", "sum_error": "sum error"}
LEGEND = """\
entropy: 1 if all keys that a query may look at get the same weight, 0 if one gets all. first, last: mean weight on the
first and the last token; × uniform: how many times what equal weights would put there. previous, same, next: mean
weight on the token one place before the query's, at it, one after. padding, future, sum error: in the worst row, the
weight on padding and on tokens still to come, and how far the sum of the row is off. -: no query can look there.

Attention is not an explanation: a weight says where a head looks, not why the model answers as it does."""
# What one head does, over many inputs: its kind of attention, layer and number (from 1), the numbers that LEGEND tells
# of, how many weights are nan, and for each head of the layer the mean share of the weight that lies elsewhere.
Head = namedtuple("Head", ["kind", "layer", "number", *HEADINGS, "nan", "apart"])


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
        """key (n), a place for each query -> mean weight there (heads), and that as a multiple of the uniform share;
        the mean is over the queries that have a choice and may look there, nan if there is none."""
        here = torch.arange(columns.size(1)) == key[:, None]     # (n, key)
        counted = free & (here & allowed).any(1)
        mean = (weights * here).sum(2)[:, counted].mean(1)
        return mean, mean / (1 / choices[counted]).mean()

    statistics = [
        (-torch.xlogy(weights, weights).sum(2) / choices.log())[:, free].mean(1),
        *mean_on(0 * query),
        *mean_on(0 * query - 1 if causal else last),  # only the last query of a decoder may look at the last key
        *(mean_on(query + offset)[0] for offset in (-1, 0, 1)),
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
REST = ("{:.2f} of the attention weight is on the %s token. Often harmless: that token matters, or an idle head rests "
        "there. If all heads do it, the positions may be too strong: compare the sizes of what Embeddings and "
        "PositionalEncoding give (article 1, 3.5 and 6.2).")
ADVICE = {
    "nan": "nan among the attention weights. Look at what attention.py does with a fully masked row, and for inf in "
           "the scores or nan in the loss (article 1, 5 and 6.3).",
    "sum_error": "a row of attention weights is off its sum, 1 (0 if fully masked), by {:.2g}. Look at attention(): "
                 "the softmax goes over the keys, and what is returned is from before dropout (article 1, 3.2, 4.2).",
    "padding": "up to {:.2g} of a row is on padding: the mask is not applied. Check that predict in train.py passes "
               "make_padding_mask on, and that every layer passes its mask on (article 1, 5 and 6.2).",
    "future": "up to {:.2g} of a row is on tokens still to come. Look at make_target_mask and subsequent_mask, and "
              "follow tgt_mask through the decoder (article 1, 3.3; article 2, 4.2).",
    "uniform": "attention weights about equal (entropy {:.2f} of 1), as before training: nothing learned. Does the "
               "loss fall (learning rate, warm-up, positions)? Look at the scaling in attention(): divided by d_k, not "
               "by its root, the scores are too small to choose (article 1, 3.2, 5 and 6.2).",
    "first": REST % "first",
    "last": REST % "last",
    "collapsed": "a collapsed layer: each head puts all its weight on one key (entropy at most {:.2f} of 1). Look at "
                 "the scaling in attention(): not divided by sqrt(d_k), the softmax saturates (article 1, 3.2, 6.3).",
    "alike": "heads that look at the same places as another (only {:.2f} of the weight differs). Look at split in "
             "attention.py, or try fewer --heads (article 1, 3.4).",
}


def find_problems(heads, untrained):
    """The Heads of a model and those before training -> [(name of a problem, Head, value)]."""
    problems = []
    for _, pairs in itertools.groupby(zip(heads, untrained), key=lambda pair: pair[0][:2]):  # of one kind and layer
        pairs, ordinary = list(pairs), []
        for head, before in pairs:
            found = [(name, getattr(head, name)) for name, limit in LIMITS.items() if getattr(head, name) > limit]
            if not found:  # beside an error, a hint would distract
                if head.first > 0.5 and head.first_uniform > 3:
                    found.append(("first", head.first))
                if head.last > 0.5 and head.last_uniform > 3:
                    found.append(("last", head.last))
                if head.entropy > 0.95 and abs(head.entropy - before.entropy) < 0.02:
                    found.append(("uniform", head.entropy))
            problems += [(name, head, value) for name, value in found]
            if not found:
                ordinary.append(head)
        if len(ordinary) == len(pairs) and max(head.entropy for head in ordinary) < 0.05:
            problems += [("collapsed", head, head.entropy) for head in ordinary]
            continue
        for a, b in itertools.combinations([head for head in ordinary if head.entropy < 0.9], 2):
            apart = a.apart[b.number - 1]
            if apart < 0.05:
                problems += [("alike", a, apart), ("alike", b, apart)]
    return problems


def make_findings(problems, accuracy=0.0):
    """What find_problems found -> lines of text, one for each kind of attention and problem, errors first."""
    findings = []
    for kind, name in itertools.product(dict.fromkeys(head.kind for _, head, _ in problems), ADVICE):
        found = [(head, value) for problem, head, value in problems if (head.kind, problem) == (kind, name)]
        if not found:
            continue
        layers = {}
        for head, _ in found:
            layers.setdefault(head.layer, set()).add(head.number)
        places = "; ".join(f"layer {layer}, head{'s' * (len(numbers) > 1)} {', '.join(map(str, sorted(numbers)))}"
                           for layer, numbers in layers.items())
        level = "error" if name in LIMITS else "hint"
        finding = f"{level}: {kind}, {places}: {ADVICE[name].format(max(value for _, value in found))}"
        if level == "hint" and accuracy >= 0.99:
            finding += f" The task is solved all the same ({accuracy:.1%})."
        findings.append(finding)
    return findings


def statistic_text(field, value):
    if math.isnan(value):
        return "-"
    if field in LIMITS:
        return f"{value:.2g}"
    return f"{value:.1f}" if field.endswith("_uniform") else f"{value:.2f}"


def table(heads, untrained):
    """The statistics as lines of text: for each kind of attention a blank line and a heading, for each head two."""
    widths = [max(5, len(text)) + 2 for text in HEADINGS.values()]

    def line(name, texts):
        return f"{name:19}" + "".join(f"{text:>{width}}" for text, width in zip(texts, widths))

    for kind, pairs in itertools.groupby(zip(heads, untrained), key=lambda pair: pair[0].kind):
        yield from ("", line(kind, HEADINGS.values()))
        for head, before in pairs:
            for name, seen in (f"layer {head.layer}, head {head.number}", head), ("  before training", before):
                yield line(name, [statistic_text(field, getattr(seen, field)) for field in HEADINGS])


# ------------------------------------------------------------------------------------------------------ what is seen


class Subject:
    """A model and what is to be seen of it: question and answer; maps, {kind: Map} of that question; heads, the Heads
    over many inputs; maps_before and heads_before, the same before training; findings, lines of the report."""

    def __init__(self, name, path, device, text=None, source=None, data=None):
        self.path = Path(path or default_path(name))
        self.task, self.model, self.checkpoint = load_or_train(name, path, device)
        self.classifies = isinstance(self.task, Sentiment) and isinstance(self.model, TransformerClassifier)
        if not self.classifies and not (isinstance(self.task, Seq2Seq) and isinstance(self.model, EncoderDecoder)):
            raise ValueError(f"{self.path}: visualize.py does not know a {type(self.task).__name__} task with a "
                             f"{type(self.model).__name__}, only what is like Sentiment or Seq2Seq")
        option, text, other = ("--text", text, source) if self.classifies else ("--source", source, text)
        if other is not None:
            raise ValueError(f"{self.path} holds a {self.checkpoint['task']} model: give it a {option}")
        examples, measured, question = examples_to_measure(self.task, self.model, data)
        if text is None and question is None:
            raise ValueError(f"this model was trained on a file: say what to look at with {option} or --data")

        ids = self.ask(question if text is None else text, option)
        self.accuracy, when = self.checkpoint["metrics"]["accuracy"], "after training"
        if data:
            self.task.valid = examples
            self.accuracy, when = self.task.evaluate(self.model, device)["accuracy"], "on these"
        self.summary = f"{self.path}: measured on {measured}; {self.task.metric} {when} {self.accuracy:.1%}"
        if not examples:
            examples = with_targets(self.task, self.model, [ids, ids[len(ids) // 2:]])
        room = min(2, self.task.most_tokens(self.model) - len(self.tokens))  # for some padding: is it looked at?
        self.batch = self.task.batch(with_targets(self.task, self.model, [ids + [PAD] * room]))

        set_seed(self.checkpoint["seed"])
        models = self.model, self.task.build(self.checkpoint["config"]).to(device)  # trained, untrained
        self.maps, self.maps_before = (attention_maps(self.task, model, self.batch) for model in models)
        batch = self.task.batch(examples)
        self.heads, self.heads_before = (measure_heads(attention_maps(self.task, model, batch)) for model in models)
        self.findings = make_findings(find_problems(self.heads, self.heads_before), self.accuracy)
        self.has_errors = any(finding.startswith("error") for finding in self.findings)

    def ask(self, text, option):
        """Set tokens (those that are read), question and answer; tell of unknown words. Returns the text's ids."""
        ids = readable_ids(self.task, self.model, text, option)
        unknown, words = count_unknown(ids)
        self.tokens = tokenize(text)[:words]
        if unknown:
            names = [token for token, i in zip(self.tokens, ids) if i == UNK]
            print_notice(f"{unknown} of {words} words are unknown to this model: {', '.join(names[:20])}")
        self.question = join_tokens(self.tokens)
        answer, tab, share = self.task.answers(self.model, [ids])[0].partition("\t")
        self.answer = f"{answer} ({float(share):.1%})" if tab else answer
        return ids

    def report(self):
        """Lines of text."""
        yield from (self.summary, *table(self.heads, self.heads_before), "", *self.findings)
        if not self.has_errors:
            yield "no error: nothing on padding, nothing on the future, no nan, every row sums to 1"

    def labelled_map(self, kind, maps=None):
        """A map of the text: weights (layers, heads, query, key), labels of rows and of columns, masked (query, key).
        Padding is cut off, but where it is looked at it stays: that is the fault to see."""
        seen = (maps or self.maps)[kind]
        real = seen.rows[0] != PAD
        weights = torch.stack([weights[0][:, real] for weights in seen.weights])
        kept = (seen.columns[0] != PAD) | (weights != 0).any(0).any(0).any(0)
        allowed, _, _ = key_masks(*seen[1:])
        rows = self.labels(seen.rows[0][real].tolist(), generated=kind in ("decoder", "cross"))
        columns = self.labels(seen.columns[0][kept].tolist(), generated=kind == "decoder")
        return weights[..., kept], rows, columns, ~allowed[0][real][:, kept]

    def labels(self, ids, generated):
        """The tokens of a row of ids that was generated or read, each label once; what was typed in place of <unk>."""
        tokens = self.task.target.tokens if generated else self.task.source.tokens
        words = [tokens[i] for i in ids]
        if not generated:
            words = [f"{typed}?" if i == UNK else word
                     for i, word, typed in itertools.zip_longest(ids, words, self.tokens)]
        return numbered(words)


def readable_ids(task, model, text, option, report_cut=None):
    """A text as ids. ValueError with the option's name if the model cannot read it."""
    try:
        return task.model_ids(model, text, report_cut)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def with_targets(task, model, rows):
    """Rows of ids -> examples of the task, those of an encoder-decoder with what greedy decoding generates."""
    if isinstance(task, Sentiment):
        return [(row, 0) for row in rows]  # the label does not matter
    src = pad(rows).to(next(model.parameters()).device)
    generated = greedy_decode(model, src, model.tgt_embed[1].max_len)
    return [(row, [BOS, *ids]) for row, ids in zip(rows, generated.tolist())]


def examples_to_measure(task, model, data):
    """-> examples from --data or a toy's validation set, words that say how many, a text to draw. A model that was
    trained on a file has none without --data."""
    if data:
        pairs = read_pairs(data, task)
        some = pairs[::math.ceil(len(pairs) / MOST_INPUTS)]
        examples, total, what = task.encode_pairs(some, data, task.most_tokens(model)), len(pairs), f"lines of {data}"
        question = join_tokens(min((tokens for tokens, _ in some), key=lambda tokens: abs(len(tokens) - 10)))
    else:
        examples, what = task.toy_examples(), "validation examples"
        if examples is None:
            return [], "the given text and its second half (--data FILE measures more)", None
        total, question = len(examples), task.question
    size = max(len(side) for example in examples for side in example if isinstance(side, list))
    examples = examples[::math.ceil(len(examples) / min(MOST_INPUTS, 1 + MOST_WEIGHTS // size ** 2))]
    return examples, f"{len(examples)} of {total:,} {what}", question


def numbered(words):
    """Words as labels: long ones cut, repeated ones numbered."""
    counts, labels = Counter(), []
    for word in (shorten(word, 14) for word in words):
        counts[word] += 1
        labels.append(word if counts[word] == 1 else f"{word}·{counts[word]}")
    return labels


SHADES, ASCII_SHADES = "░▒▓█", ".:*#"
SHADED_FROM = 0.10, 0.25, 0.50, 0.75  # the weights


def text_map(weights, rows, columns, encoding, width):
    """A map (query, key) as lines of text, at most width wide; shades that the encoding lacks are ASCII."""
    rows, columns = ([label.encode(encoding, "backslashreplace").decode(encoding) for label in labels]
                     for labels in (rows, columns))
    shades = SHADES if SHADES.encode(encoding, "replace").decode(encoding) == SHADES else ASCII_SHADES
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
MOST_NUMBERED = 12  # tokens of a map that bears its numbers; a larger one is squeezed into the same side
# In inches: a cell that has room for a label, for a number; a usual one; all maps of a picture together
LABEL_CELL, NUMBER_CELL, USUAL_CELL, MOST_MAPS = 0.14, 0.25, 0.36, 28
DPI = 100


def axes_grid(title, rows, columns, width, height, apart_x, apart_y):
    """A figure, its rows x columns axes, width by height inches each, and narrow axes for a colour bar. Labels and
    title stand outside of the figure: savefig(bbox_inches="tight") takes them in."""
    from matplotlib.figure import Figure
    total, high = columns * (width + apart_x) - apart_x, rows * (height + apart_y) - apart_y
    figure = Figure(figsize=(total, high))
    axes = figure.subplots(rows, columns, squeeze=False, gridspec_kw=dict(
        left=0, right=1, bottom=0, top=1, wspace=apart_x / width, hspace=apart_y / height))
    bar_height = min(3, rows * height)
    bar = figure.add_axes((1 + 0.15 / total, 0.5 - bar_height / high / 2, 0.15 / total, bar_height / high))
    figure.suptitle(title, fontsize=11, y=1 + 0.4 / high, va="bottom")
    return figure, axes, bar


def draw_map(ax, values, rows, columns, masked=None, cell=0.4, texts=None, cmap="magma_r", vmin=0, vmax=1):
    """One map (query, key) with its labels; cell: its cells' height in inches. Returns the image, for a colour bar.

    Masked cells that hold no weight are left out, so that the hatched ground shows; nan and what is above the scale is
    red. texts: what to write into the cells, in place of the numbers that small maps bear.
    """
    import matplotlib
    if tuple(values.shape) != (len(rows), len(columns)):
        raise ValueError(f"{len(rows)} row labels and {len(columns)} column labels for a map of (query, key) = "
                         f"{tuple(values.shape)}")
    values = values.float()
    hidden = torch.zeros_like(values, dtype=torch.bool) if masked is None else masked & (values <= 0)
    painted = values.nan_to_num(2 * vmax).masked_fill(hidden, math.nan)
    ax.patch.set(**MASKED)
    image = ax.imshow(painted.tolist(), cmap=matplotlib.colormaps[cmap].with_extremes(over="red"), vmin=vmin,
                      vmax=1.001 * vmax, aspect="auto", interpolation="nearest")  # a weight of 1 may be rounded up
    ax.tick_params(length=0, pad=2)
    step = max(1, math.ceil(LABEL_CELL / cell))  # labels that would overlap are left out
    ax.set_xticks(range(0, len(columns), step), columns[::step], rotation=90 if max(map(cells, columns)) > 2 else 0)
    ax.set_yticks(range(0, len(rows), step), rows[::step])
    if texts is None and (max(values.shape) > MOST_NUMBERED or cell < NUMBER_CELL):
        return image
    brightness = image.to_rgba(image.get_array())[..., :3] @ (0.299, 0.587, 0.114)
    for i, j in itertools.product(range(len(rows)), range(len(columns))):
        number = f"{round(values[i, j].item(), 2) + 0:.2f}".replace(".00", "")  # 0.273 -> .27, -0.001 -> 0, -inf -> −∞
        number = re.sub(r"\b0\.", ".", number).replace("-", "−").replace("inf", "∞")
        style = dict(color="white" if brightness[i, j] < 0.5 else "black")
        if hidden[i, j]:
            style = dict(backgroundcolor=MASKED["facecolor"])
        if not hidden[i, j] or values[i, j] < 0:  # of what is masked the scores
            ax.text(j, i, texts[i][j] if texts else number, ha="center", va="center", fontsize=7, **style)
    return image


def draw_positions():
    from matplotlib.figure import Figure
    small, large = (PositionalEncoding(d_model, max_len=100).table for d_model in (20, 64))  # (position, dimension)
    figure = Figure(figsize=(13, 4), layout="constrained")
    waves, whole, alike = figure.subplots(1, 3)
    for dim, line in zip(range(4, 8), ("C0-", "C0--", "C1-", "C1--")):
        waves.plot(small[:, dim].tolist(), line, label=str(dim))
    waves.set(title="dimensions 4 to 7 of 20: sine and cosine", xlabel="position", ylabel="value", ylim=(-1.1, 1.6))
    waves.legend(title="dimension", loc="upper center", ncols=4, frameon=False)
    similarity = large @ large.T / 32  # each position has the length sqrt(32)
    for ax, values, name in (whole, large, "dimension"), (alike, similarity, "position"):
        image = ax.imshow(values.tolist(), aspect="auto", interpolation="nearest", **SIGNED)
        ax.set(xlabel=name, ylabel="position")
    whole.set_title("the whole table, 64 dimensions")
    alike.set_title("similarity of every two positions (cosine)")
    figure.colorbar(image, ax=[whole, alike], label="value, similarity", aspect=30)
    return figure


def draw_masks():
    """The masks of a batch of two sentences, (batch, 1, query, key)."""
    from matplotlib.patches import Patch
    ids = torch.tensor([[4, 5, 6, 7], [8, 9, PAD, PAD]])
    masks = {"padding: make_padding_mask": make_padding_mask(ids), "causal: subsequent_mask": subsequent_mask(4)[None],
             "both: make_target_mask": make_target_mask(ids)}
    figure, axes, bar = axes_grid("the masks of two sentences in one batch", 2, 3, 1.8, 1.8, 0.95, 1.3)
    for i, words in enumerate((["I", "love", "this", "film"], ["so", "dull", "<pad>", "<pad>·2"])):
        for ax, (name, mask) in zip(axes[i], masks.items()):
            allowed = mask.expand(2, 1, 4, 4)[i, 0]
            image = draw_map(ax, allowed.float(), words, words, ~allowed, cmap="Blues", vmax=2)
            ax.set_title(name, fontsize=9)
            ax.set(xlabel="looks at (key)", ylabel="looks from (query)")
    bar.set_axis_off()
    bar.legend(handles=[Patch(facecolor=image.cmap(0.5), label="may look"), Patch(**MASKED, label="masked")],
               loc="center left", bbox_to_anchor=(0, 0.5), frameon=False, handlelength=1)
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
    figure, axes, bar = axes_grid("softmax(QKᵀ / √d_k) V, step by step", 2, 5, 1.9, 1.9, 0.95, 1.3)
    axes[0][3].text(0, 0.5, "1. every query times every key\n2. smaller numbers, a softer softmax\n"
                    "3. −∞ where a query may not look\n4. each row becomes shares of 1\n"
                    "5. the mean of V by these shares", fontsize=10, linespacing=1.8, va="center")
    for ax in axes[0][3:]:
        ax.set_axis_off()
    for ax, title, values, columns, style in [
            (axes[0][0], "Q: what a word looks for", q, dims, signed),
            (axes[0][1], "K: what it is found by", k, dims, signed),
            (axes[0][2], "V: what it hands over", v, dims, signed),
            (axes[1][0], "1. QKᵀ", scores, words, signed),
            (axes[1][1], "2. divided by √d_k = 2", scores / 2, words, signed),
            (axes[1][2], "3. masked: padding, future", (scores / 2).masked_fill(masked, -math.inf), words,
             dict(signed, masked=masked)),
            (axes[1][3], "4. softmax: a row sums to 1", weights, words, dict(masked=masked)),
            (axes[1][4], "5. times V", output, dims, signed)]:
        image = draw_map(ax, values, words, columns, **style)
        ax.set_title(title, fontsize=9)
        if columns is words:
            ax.set(xlabel="looks at (key)", ylabel="looks from (query)")
        else:
            ax.set_xlabel("d_k")
        if values is weights:
            figure.colorbar(image, cax=bar, label="attention weight (panel 4)")
    return figure


def draw_grid(title, weights, rows, columns, masked, names, looks_from="", framed_row=None):
    """Weights (layers, heads, query, key) as one map each, on one scale; names: of the layers. framed_row: of the last
    layer."""
    layers, heads, queries, keys = weights.shape
    cell = max(LABEL_CELL, USUAL_CELL * min(1, MOST_NUMBERED / max(queries, keys)))
    cell = min(cell, MOST_MAPS / (heads * keys), MOST_MAPS / (layers * queries))
    width = max(keys * cell, 0.085 * len(f"{names[-1]}, head {heads}"))  # a letter of the title is so wide
    figure, axes, bar = axes_grid(title, layers, heads, width, max(1.3, queries * cell), 0.15, 0.35)
    for i, h in itertools.product(range(layers), range(heads)):
        ax = axes[i, h]
        image = draw_map(ax, weights[i, h], rows, columns, masked, cell)
        ax.set_title(f"{names[i]}, head {h + 1}", fontsize=9)
        ax.set_xlabel("looks at (key)") if i == layers - 1 else ax.set_xticks([])
        ax.set_ylabel(f"looks from (query){looks_from}") if h == 0 else ax.set_yticks([])
        if i == layers - 1 and framed_row is not None:
            ax.axhspan(framed_row - 0.5, framed_row + 0.5, fill=False, ec="tab:cyan", linewidth=2.5, clip_on=False)
    figure.colorbar(image, cax=bar, label="attention weight")
    return figure


def draw_training(subjects):
    """What train.py recorded: the loss, and the accuracy on the validation set."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 3.4 * len(subjects)), layout="constrained")
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
    fields = [field for field in HEADINGS if not field.endswith("_uniform")]
    names, values, texts = [], [], []
    for head, before in [pair for subject in subjects for pair in zip(subject.heads, subject.heads_before)]:
        names.append(f"{head.kind}, layer {head.layer}, head {head.number}")
        row = [(field, getattr(head, field), getattr(before, field)) for field in fields]
        values.append([2 if value > LIMITS.get(field, 2) else value for field, value, _ in row])
        texts.append([f"{statistic_text(field, value)} ({statistic_text(field, was)})" for field, value, was in row])
    values = torch.tensor(values)
    cell = min(0.27, MOST_MAPS / len(names))
    title = "what each head does; in brackets: before training; an error would be red"
    figure, axes, bar = axes_grid(title, 1, 1, 0.9 * len(fields), cell * len(names), 0, 0)
    headings = [HEADINGS[field] for field in fields]
    image = draw_map(axes[0, 0], values.nan_to_num(), names, headings, values.isnan(), cell, texts)
    axes[0, 0].tick_params(axis="x", rotation=0)
    figure.colorbar(image, cax=bar, label="share")
    return figure


def draw_all(subjects):
    """The pictures one by one: file name, figure."""
    yield "01_positional_encoding.png", draw_positions()
    yield "02_masks.png", draw_masks()
    yield "03_attention_steps.png", draw_steps()
    for subject in subjects:
        maps = {kind: subject.labelled_map(kind) for kind in subject.maps}
        layers = [f"layer {i + 1}" for i in range(len(next(iter(maps.values()))[0]))]
        title = f"{shorten(f'“{subject.question}”', 80)} → {shorten(subject.answer, 80)}"
        if subject.classifies:
            read = positions_read(subject.task, subject.model, subject.batch)
            if len(read) == 1:
                framed, what = read[0], "framed: the row that the classifier reads"
            else:
                framed, what = None, f"the classifier reads {len(read)} rows of the last layer"
            yield "04_classifier.png", draw_grid(f"{title}\n{what}", *maps["classifier"], layers, framed_row=framed)
        else:
            yield "05_encoder.png", draw_grid(f"encoder: {title}", *maps["encoder"], layers)
            yield "06_decoder.png", draw_grid(f"decoder: {title}", *maps["decoder"], layers, "\nto produce")
            yield "07_cross.png", draw_grid(f"cross: {title}", *maps["cross"], layers, "\nto produce")
            weights, *labels = maps["cross"]
            before, *_ = subject.labelled_map("cross", subject.maps_before)
            both = torch.stack([before, weights], dim=1).flatten(0, 1)
            names = [f"{layer} {when}" for layer in layers for when in ("untrained", "trained")]
            yield "08_untrained.png", draw_grid(f"cross before and after training: {title}", both, *labels, names,
                                                "\nto produce")
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
            if missing.intersection(font.get_charmap()) and not re.search("Last ?Resort|Emoji", font.family_name):
                font_manager.fontManager.addfont(path)  # it may be newer than matplotlib's list
                families.append(font.family_name)
                missing -= set(font.get_charmap())
    if missing:
        print_notice(f"no installed font has {''.join(map(chr, sorted(missing)))[:20]}: boxes in the pictures; for "
                     "Chinese, install for example fonts-noto-cjk")
    return families


def save_pictures(subjects, out):
    """Write the pictures into the folder out, name them on stdout -> their paths. Neither MPLBACKEND nor a matplotlibrc
    changes them."""
    backend = os.environ.pop("MPLBACKEND", "")  # a name that matplotlib does not know would end its import
    try:
        import matplotlib.style
    except ImportError as error:
        print_notice(f"no pictures: {error}; pip install matplotlib")
        return []
    finally:
        os.environ["MPLBACKEND"] = backend  # empty is as good as none
    paths = []
    with matplotlib.style.context("default"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph|Matplotlib currently does not support")  # our notice said it
        families = font_families("".join(subject.question + subject.answer for subject in subjects))
        matplotlib.rcParams.update({"font.family": families, "font.size": 9, "text.parse_math": False,
                                    "hatch.linewidth": 0.5})
        for file, figure in draw_all(subjects):
            figure.savefig(out / file, dpi=DPI, bbox_inches="tight")
            print(out / file, flush=True)
            paths.append(out / file)
    return paths


def show_pictures(paths):
    """Each picture in a window of its own, until these are closed."""
    try:
        import matplotlib
        if os.environ.get("MPLBACKEND"):
            matplotlib.use(os.environ["MPLBACKEND"])
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
    parser.add_argument("--text", help=f"what a classifier reads (default: {TEXT})")
    parser.add_argument("--source", help=f"what the copy or translation model reads (default: {SOURCE})")
    parser.add_argument("--checkpoint", type=file_path, metavar="PATH", help="this model alone; without --text or "
                        "--source it reads a validation example (default: checkpoints/sentiment.pt and "
                        "checkpoints/copy.pt, trained first if they are not there)")
    parser.add_argument("--data", type=file_path, metavar="FILE", help="measure on these lines, as train.py reads them "
                        "(default: the toys' validation sets); needs --checkpoint")
    parser.add_argument("--out", type=file_path, metavar="DIR", default="figures", help="where the files go (default: "
                        "figures)")
    parser.add_argument("--show", action="store_true", help="open the pictures in windows too (default: off)")
    parser.add_argument("--strict", action="store_true", help="exit status 1 if there is an error (default: off)")
    args = parser.parse_args(argv)
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        parser.error(f"--out: {out} is not a directory")
    if args.data and not args.checkpoint:
        parser.error("--data needs --checkpoint, the model that was trained on such lines")
    if args.checkpoint and args.text is not None and args.source is not None:
        parser.error("--checkpoint is one model: it takes --text or --source")
    try:
        device = pick_device(args.device)
        if args.checkpoint:
            subjects = [Subject(None, args.checkpoint, device, args.text, args.source, args.data)]
        else:
            text, source = TEXT if args.text is None else args.text, SOURCE if args.source is None else args.source
            for name, asked, option in ("sentiment", text, "--text"), ("copy", source, "--source"):
                options = with_defaults([], TASKS[name].recipe)  # known before the toys are trained: can it be read?
                task = TASKS[name].read(options)
                readable_ids(task, task.build(task.config(options)), asked, option, report_cut=str)
            subjects = [Subject("sentiment", None, device, text=text), Subject("copy", None, device, source=source)]
    except ValueError as error:
        parser.error(str(error))
    out.mkdir(parents=True, exist_ok=True)

    for subject in subjects:
        print(f"{subject.question} -> {subject.answer}")
    subject = subjects[0 if args.source is None and args.text is not None else -1]
    kind = list(subject.maps)[-1]
    weights, rows, columns, _ = subject.labelled_map(kind)
    print(f"\n{kind} attention, layer {len(weights)}, mean of {weights.size(1)} heads; a row looks at the columns\n")
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # a notebook's stdout has none
    print(*text_map(weights[-1].mean(0), rows, columns, encoding, shutil.get_terminal_size().columns), "", sep="\n")
    report = "\n\n".join([*("\n".join(subject.report()) for subject in subjects), LEGEND])
    print(report, end="\n\n", flush=True)
    (out / "report.txt").write_text(report + "\n", encoding="utf-8", errors="backslashreplace")
    print(out / "report.txt")
    paths = save_pictures(subjects, out)
    if args.show and paths:
        show_pictures(paths)
    return 1 if args.strict and any(subject.has_errors for subject in subjects) else 0


if __name__ == "__main__":
    run(main)
