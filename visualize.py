"""
See what attention does: ten pictures, a map in the terminal, and a report that finds what is wrong with it.

    python visualize.py                                            both toys; pictures and report go to figures/
    python visualize.py --text "the ending was never dull"         another remark for the sentiment model
    python visualize.py --source "8 1 8 2"                         another sequence for the copy model
    python visualize.py --checkpoint checkpoints/translate.pt --source "ein mann schläft ." --data pairs.tsv

01 positions, 02 masks, 03 the formula step by step; 04 the classifier; 05 encoder, 06 decoder and 07 cross-attention of
an encoder-decoder, 08 its cross-attention before and after training; 09 the training; 10 the report as a table. With
--checkpoint those of one model. The report, also in report.txt, measures a few hundred held-out inputs: the toys' own,
or lines of --data. Errors: weight on padding or on the future, nan, rows that do not sum to 1. Hints: the rest.

In every map a row is a query, the token that looks, and a column a key, a token that is looked at; a decoder's row
bears the token that is produced there. Repeated words are numbered (film, film·2), unknown words have a "?".
Reading order: attention_maps, head_statistics, find_problems, Subject, then the pictures.
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
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch

from attention import attention, make_padding_mask, make_target_mask, subsequent_mask
from model import BOS, EOS, PAD, UNK, EncoderDecoder, TransformerClassifier, evaluating, greedy_decode
from train import (TASKS, Parser, Seq2Seq, Sentiment, count_unknown, default_path, file_path, join_tokens,
                   load_or_train, pad, pick_device, print_notice, read_pairs, recipe_options, run, set_seed, shift,
                   tokenize)
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


class Head(NamedTuple):
    """What one head does, over the queries of many inputs. A mean is over those queries that have a choice, and of
    these over those that may look at the key in question; nan if there is none."""
    entropy: float        # mean, divided by that of equal weights on the allowed keys
    first: float          # mean weight on the first key
    first_uniform: float  # the same as a multiple of what equal weights would put there
    last: float
    last_uniform: float
    previous: float       # mean weight on the key at the place before the query's
    same: float
    next: float
    padding: float        # weight on padding, in the worst row
    future: float
    sum_error: float      # what a row's sum is off by, in the worst row; the sum should be 1, for a fully masked row 0
    nan: float            # 1 if there is one among the weights
    apart: list           # for each head of the layer, the mean share of the weight that lies elsewhere


def head_statistics(weights, rows, columns, causal=False):
    """The weights of one layer (batch, heads, query, key), the rest as in Map -> [a Head for each]."""
    nan = weights.isnan().any(3).any(2).any(0).double()
    rounding = 4 * torch.finfo(weights.dtype).eps
    real = rows != PAD                                           # (batch, query), n of them True
    weights = weights.double().transpose(0, 1)[:, real]          # (heads, n, key)
    allowed, padding, future = (keys[real] for keys in key_masks(rows, columns, causal))  # (n, key)
    query = torch.arange(rows.size(1)).expand_as(rows)[real]     # (n) the place of each
    last = ((columns != PAD).sum(1, keepdim=True) - 1).expand_as(rows)[real]
    choices = allowed.sum(1).double()
    free = choices > 1

    def mean_on(key):
        """key (n), a place for each query -> mean weight there (heads), and that as a multiple of the uniform share."""
        here = torch.arange(columns.size(1)) == key[:, None]     # (n, key)
        counted = free & (here & allowed).any(1)
        mean = (weights * here).sum(2)[:, counted].mean(1)
        return mean, mean / (1 / choices[counted]).mean()

    nowhere = torch.full_like(last, -1)
    statistics = [
        (-torch.xlogy(weights, weights).sum(2) / choices.log())[:, free].mean(1),
        *mean_on(0 * query),
        *mean_on(nowhere if causal else last),  # only the last query of a decoder may look at the last key
        *(mean_on(query + offset)[0] for offset in (-1, 0, 1)),
        *((weights * keys).sum(2).amax(1) for keys in (padding, future)),
        ((weights.sum(2) - allowed.any(1).double()).abs() - rounding).clamp(min=0).amax(1),
        nan,
        torch.stack([(weights - head)[:, free].abs().sum(2).mean(1) / 2 for head in weights]),
    ]
    return [Head(*values) for values in zip(*(statistic.tolist() for statistic in statistics))]


LIMITS = {"nan": 0, "sum_error": 1e-4, "padding": 1e-6, "future": 0}  # above is an error
REST = ("{:.2f} of the weight on the %s token. Often harmless: that token matters, or a head with nothing to do rests "
        "there. If all heads do it, positions may be too strong: compare the sizes of what Embeddings and "
        "PositionalEncoding give (article 1, 3.5 and 6.2).")
ADVICE = {
    "nan": "nan among the weights. Look at how attention.py treats a fully masked row, and for inf in the scores and "
           "nan in the loss (article 1, 5 and 6.3).",
    "sum_error": "a row of weights is off its sum, 1 (0 for a fully masked row), by {:.2g}. Look at attention(): the "
                 "softmax goes over the keys, and what is returned is from before dropout (article 1, 3.2 and 4.2).",
    "padding": "up to {:.2g} of a row is on padding: the mask is not applied. Look at whether predict in train.py "
               "passes make_padding_mask on, and every layer passes its mask on (article 1, 5 and 6.2).",
    "future": "up to {:.2g} of a row is on tokens still to come. Look at make_target_mask and subsequent_mask, and at "
              "the way of tgt_mask through the decoder (article 1, 3.3; article 2, 4.2).",
    "uniform": "all weights about equal (entropy {:.2f} of 1), as before training: nothing learned here. Look at "
               "whether the loss falls (learning rate, warm-up, positions) and at the scaling in attention(): divided "
               "by d_k, not by its root, the scores are too small to choose (article 1, 3.2, 5 and 6.2).",
    "first": REST % "first",
    "last": REST % "last",
    "collapsed": "a collapsed layer, each head puts all its weight on one key (entropy at most {:.2f} of 1). Look at "
                 "the scaling in attention(): without the division by sqrt(d_k) the softmax saturates (article 1, 3.2 "
                 "and 6.3).",
    "alike": "heads that look at the same places as another (only {:.2f} of the weight differs). Look at split in "
             "attention.py, or try fewer --heads (article 1, 3.4).",
}


def find_problems(layers, untrained):
    """The Heads of each layer and those before training -> [(name of a problem, layer, head, value)]; layers and heads
    count from 1."""
    problems = []
    for layer, (heads, heads_before) in enumerate(zip(layers, untrained), start=1):
        ordinary = []  # those with no problem of their own
        for number, (head, before) in enumerate(zip(heads, heads_before), start=1):
            values = head._asdict()
            errors = [name for name, limit in LIMITS.items() if values[name] > limit]
            hints = [name for name in ("first", "last") if values[name] > 0.5 and values[f"{name}_uniform"] > 3]
            if head.entropy > 0.95 and abs(head.entropy - before.entropy) < 0.02:
                hints.append("uniform")
            values["uniform"] = head.entropy
            problems += [(name, layer, number, values[name]) for name in errors or hints]  # a hint would distract
            if not errors and not hints:
                ordinary.append(number)
        if len(ordinary) == len(heads) and max(head.entropy for head in heads) < 0.05:
            problems += [("collapsed", layer, number, head.entropy) for number, head in enumerate(heads, start=1)]
            continue
        for a, b in itertools.combinations([number for number in ordinary if heads[number - 1].entropy < 0.9], 2):
            apart = heads[a - 1].apart[b - 1]
            if apart < 0.05:
                problems += [("alike", layer, a, apart), ("alike", layer, b, apart)]
    return problems


class Finding(NamedTuple):
    level: str  # error or hint
    name: str
    text: str


def make_findings(kind, problems, accuracy=0.0):
    """What find_problems found in one kind of attention -> [Finding], one for each name, errors first."""
    findings = []
    for name in [name for name in ADVICE if any(name == problem[0] for problem in problems)]:
        heads = sorted({(layer, head) for problem, layer, head, _ in problems if problem == name})
        places = []
        for layer, group in itertools.groupby(heads, key=lambda place: place[0]):
            numbers = [str(head) for _, head in group]
            places.append(f"layer {layer}, head{'s' * (len(numbers) > 1)} {', '.join(numbers)}")
        worst = max(value for problem, _, _, value in problems if problem == name)
        level = "error" if name in LIMITS else "hint"
        solved = f" The task is solved all the same ({accuracy:.1%})." if level == "hint" and accuracy >= 0.99 else ""
        findings.append(Finding(level, name, f"{kind}, {'; '.join(places)}: {ADVICE[name].format(worst)}{solved}"))
    return findings


COLUMNS = Head._fields[:11]
SHARES = [field for field in COLUMNS if not field.endswith("_uniform")]
LEGEND = """\
entropy: 1 if all keys that a query may look at get the same weight, 0 if one gets all. first, last: the mean weight on
the first and the last token; × uniform: how many times what equal weights would put there. previous, same, next: the
mean weight on the token one place before the query's place, at it, one place after. padding, future, sum error: the
largest weight of a row on padding and on tokens still to come, and the largest error of a row's sum. -: cannot be."""


def heading(field):
    return "× uniform" if field.endswith("_uniform") else field.replace("_", " ")


def statistic_text(field, value):
    if math.isnan(value):
        return "-"
    if field in LIMITS:
        return "0" if value == 0 else f"{value:.0e}" if value < 0.005 else f"{value:.2f}"
    return f"{value:.1f}" if field.endswith("_uniform") else f"{value:.2f}"


def table(kind, layers, untrained):
    """The statistics as lines of text, two for each head."""
    widths = [max(5, len(heading(field))) + 2 for field in COLUMNS]
    yield f"{kind:19}" + "".join(f"{heading(field):>{width}}" for field, width in zip(COLUMNS, widths))
    for layer, pairs in enumerate(map(zip, layers, untrained), start=1):
        for number, pair in enumerate(pairs, start=1):
            for name, head in zip((f"layer {layer}, head {number}", "  before training"), pair):
                texts = [statistic_text(field, getattr(head, field)) for field in COLUMNS]
                yield f"{name:19}" + "".join(f"{text:>{width}}" for text, width in zip(texts, widths))


# ------------------------------------------------------------------------------------------------------ what is seen


class Subject:
    """A model and what is to be seen of it:

    question, answer         a text, and what the model makes of it
    maps, maps_before        {kind: Map} of that text: from the model, and from the model before training
    layers, layers_before    {kind: [the Heads of each layer]} over many inputs, likewise
    findings                 what the report finds in them
    """

    def __init__(self, name, path, device, text=None, source=None, data=None):
        self.path = Path(path or default_path(name))
        self.task, self.model, self.checkpoint = load_or_train(name, path, device)
        known = (Sentiment, TransformerClassifier), (Seq2Seq, EncoderDecoder)
        if not any(isinstance(self.task, task) and isinstance(self.model, model) for task, model in known):
            raise ValueError(f"{self.path}: visualize.py does not know a {type(self.task).__name__} task with a "
                             f"{type(self.model).__name__}, only what is like Sentiment or Seq2Seq")
        self.classifies = isinstance(self.task, Sentiment)
        option, text, other = ("--text", text, source) if self.classifies else ("--source", source, text)
        if other is not None:
            raise ValueError(f"{self.path} holds a {self.checkpoint['task']} model: give it a {option}")
        examples, measured, question = examples_to_measure(self.task, self.model, data)
        if text is None and question is None:
            raise ValueError(f"this model was trained on a file: say what to look at with {option} or --data")

        text = question if text is None else text
        ids = readable_ids(self.task, self.model, text, option)
        unknown, words = count_unknown(ids)
        self.tokens = tokenize(text)[:words]  # those that are read
        if unknown:
            names = [token for token, id in zip(self.tokens, ids) if id == UNK]
            print_notice(f"{unknown} of {words} words are unknown to this model: {', '.join(names[:20])}")
        self.question = join_tokens(self.tokens)
        answer, tab, share = self.task.answers(self.model, [ids])[0].partition("\t")
        self.answer = f"{answer} ({float(share):.1%})" if tab else answer

        self.accuracy = self.checkpoint["metrics"]["accuracy"]
        if data:
            self.task.valid = examples
            self.accuracy = self.task.evaluate(self.model, device)["accuracy"]
        self.summary = (f"{self.path}: measured on {measured}; {self.task.metric} "
                        f"{'on these' if data else 'after training'} {self.accuracy:.1%}")
        if not examples:
            half = ids[:max(1, len(ids) // 2)]
            examples = with_targets(self.task, self.model, [ids, half if self.classifies else half + [EOS]])
        room = min(2, self.task.most_tokens(self.model) - words)  # for some padding: is it looked at?
        self.batch = self.task.batch(with_targets(self.task, self.model, [ids + [PAD] * room]))

        set_seed(self.checkpoint["seed"])
        untrained = self.task.build(self.checkpoint["config"]).to(device)
        self.maps, self.maps_before = (attention_maps(self.task, model, self.batch)
                                       for model in (self.model, untrained))
        self.layers, self.layers_before = (
            {kind: [head_statistics(weights, *seen[1:]) for weights in seen.weights]
             for kind, seen in attention_maps(self.task, model, self.task.batch(examples)).items()}
            for model in (self.model, untrained))
        self.findings = [finding for kind, layers in self.layers.items() for finding in make_findings(
            kind, find_problems(layers, self.layers_before[kind]), self.accuracy)]

    def report(self):
        """Lines of text."""
        yield self.summary
        for kind, layers in self.layers.items():
            yield from ("", *table(kind, layers, self.layers_before[kind]))
        yield ""
        yield from (f"{finding.level}: {finding.text}" for finding in self.findings)
        if not any(finding.level == "error" for finding in self.findings):
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
        tokens = self.task.target.tokens if generated else self.task.vocabulary.tokens
        words = [tokens[id] for id in ids]
        if not generated:
            words = [f"{typed}?" if id == UNK else word
                     for id, word, typed in itertools.zip_longest(ids, words, self.tokens)]
        return numbered(words)


def readable_ids(task, model, text, option, report_cut=None):
    """A text as ids. ValueError if the model cannot read it."""
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
    """-> examples of --data's lines or of a toy's held-out data, words that say how many, a text to draw. A model that
    was trained on a file has none without --data."""
    if data:
        if task.columns is None:
            raise ValueError("--data: this model was trained on examples that its task draws, not on a file")
        pairs = read_pairs(data, task.columns)
        some = pairs[::math.ceil(len(pairs) / MOST_INPUTS)]
        examples, total, what = task.encode_pairs(some, data, task.most_tokens(model)), len(pairs), f"lines of {data}"
        question = min((text for text, _ in some), key=lambda text: abs(len(tokenize(text)) - 10))
    else:
        examples = task.toy_examples()
        if examples is None:
            return [], "the given text and its first half (--data FILE measures more)", None
        total, what, question = len(examples), "held-out examples", task.question
    size = max(len(side) for example in examples for side in example if isinstance(side, list))
    examples = examples[::math.ceil(len(examples) / min(MOST_INPUTS, 1 + MOST_WEIGHTS // size ** 2))]
    return examples, f"{len(examples)} of {total:,} {what}", question


def numbered(words):
    """Words as labels: long ones cut, repeated ones numbered."""
    counts, labels = Counter(), []
    for word in words:
        word = word if len(word) <= 14 else f"{word[:13]}…"
        counts[word] += 1
        labels.append(word if counts[word] == 1 else f"{word}·{counts[word]}")
    return labels


def check_labels(weights, rows, columns):
    if tuple(weights.shape) != (len(rows), len(columns)):
        raise ValueError(f"{len(rows)} row labels and {len(columns)} column labels for a map of (query, key) = "
                         f"{tuple(weights.shape)}")


# ------------------------------------------------------------------------------------------------------ the terminal

SHADES, ASCII_SHADES = "░▒▓█", ".:*#"
SHADED_FROM = 0.10, 0.25, 0.50, 0.75  # the weights


def text_map(weights, rows, columns, encoding, width):
    """A map (query, key) as lines of text, at most width wide; shades that the encoding lacks are ASCII."""
    check_labels(weights, rows, columns)
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
# In inches: the height of a cell that has room for a label, for a number, of one in a map of up to 12 tokens;
LABEL_CELL, NUMBER_CELL, USUAL_CELL = 0.14, 0.25, 0.36
USUAL_MAP, MOST_MAPS = 4.3, 28  # the side of a larger map, of all maps of a picture together
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
    red. texts: what to write into the cells, in place of the numbers that maps of up to 12 tokens bear.
    """
    import matplotlib
    check_labels(values, rows, columns)
    values = values.float()
    hidden = torch.zeros_like(values, dtype=torch.bool) if masked is None else masked & (values <= 0)
    over = values.isnan() | (values > 1.001 * vmax)
    painted = values.clamp(vmin, vmax).masked_fill(over, 2 * vmax).masked_fill(hidden, math.nan)
    ax.patch.set(**MASKED)
    image = ax.imshow(painted.tolist(), cmap=matplotlib.colormaps[cmap].with_extremes(over="red"), vmin=vmin, vmax=vmax,
                      aspect="auto", interpolation="nearest")
    ax.tick_params(length=0, pad=2)
    step = max(1, math.ceil(LABEL_CELL / cell))  # labels that would overlap are left out
    ax.set_xticks(range(0, len(columns), step), columns[::step], rotation=90 if max(map(cells, columns)) > 2 else 0)
    ax.set_yticks(range(0, len(rows), step), rows[::step])
    if texts is None and (max(values.shape) > 12 or cell < NUMBER_CELL):
        return image
    for i, j in itertools.product(range(len(rows)), range(len(columns))):
        text = texts[i][j] if texts else number_text(values[i, j].item(), hidden[i, j])
        if hidden[i, j]:
            style = dict(backgroundcolor=MASKED["facecolor"])
        else:
            red, green, blue, _ = image.cmap(image.norm(painted[i, j].item()))
            style = dict(color="white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "black")
        if text:
            ax.text(j, i, text, ha="center", va="center", fontsize=7, **style)
    return image


def number_text(value, hidden):
    """0.273 -> .27, 0.001 -> 0, -inf -> −∞; nothing for a masked weight."""
    if hidden and value == 0:
        return ""
    text = f"{value:.2f}".replace("-", "−").replace("inf", "∞")
    return {"0.00": "0", "−0.00": "0", "1.00": "1"}.get(text, re.sub(r"\b0\.", ".", text))


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
    words = ["a", "moving", "film", "<pad>"]
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(4, 4, generator=generator) for _ in range(3))
    allowed = make_target_mask(torch.tensor([[4, 5, 6, PAD]]))[0, 0]
    scores = q @ k.T
    output, weights = attention(q, k, v, allowed)
    blocked = (scores / 2).masked_fill(~allowed, -math.inf)
    limit = scores.abs().max().item()
    signed = dict(SIGNED, vmin=-limit, vmax=limit)
    panels = [("Q: what a word looks for", q, signed), ("K: what it is found by", k, signed),
              ("V: what it hands over", v, signed),
              ("1. QKᵀ", scores, signed), ("2. divided by √d_k = 2", scores / 2, signed),
              ("3. masked: padding, future", blocked, dict(signed, masked=~allowed)),
              ("4. softmax: a row sums to 1", weights, dict(masked=~allowed)), ("5. times V", output, signed)]
    figure, axes, bar = axes_grid("softmax(QKᵀ / √d_k) V, step by step", 2, 5, 1.9, 1.9, 0.95, 1.3)
    axes[0][3].text(0, 0.5, "1. every query times every key\n2. smaller numbers, a softer softmax\n"
                    "3. −∞ where a query may not look\n4. each row becomes shares of 1\n"
                    "5. the mean of V by these shares", fontsize=10, linespacing=1.8, va="center")
    for ax in axes[0][3:]:
        ax.set_axis_off()
    for ax, (title, values, style) in zip([*axes[0][:3], *axes[1]], panels):
        keys = title[0] in "1234"  # those of the middle
        image = draw_map(ax, values, words, words if keys else ["1", "2", "3", "4"], **style)
        ax.set_title(title, fontsize=9)
        ax.set(xlabel="looks at (key)" if keys else "d_k", ylabel="looks from (query)" if keys else "")
        if values is weights:
            figure.colorbar(image, cax=bar, label="weight (panel 4)")
    return figure


def draw_grid(title, weights, rows, columns, masked, names, looks_from="", framed_row=None):
    """Weights (layers, heads, query, key) as one map each, on one scale; names: of the layers. framed_row: of the last
    layer."""
    from matplotlib.patches import Rectangle
    layers, heads, queries, keys = weights.shape
    most = max(queries, keys)
    cell = USUAL_CELL if most <= 12 else max(LABEL_CELL, USUAL_MAP / most)
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
            ax.add_patch(Rectangle((-0.5, framed_row - 0.5), keys, 1, fill=False, edgecolor="tab:cyan", linewidth=2.5,
                                   clip_on=False))
    figure.colorbar(image, cax=bar, label="weight")
    return figure


def draw_training(subjects):
    """What train.py recorded: loss and held-out accuracy over the steps."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 3.4 * len(subjects)), layout="constrained")
    for (left, right), subject in zip(figure.subplots(len(subjects), 2, squeeze=False), subjects):
        history = subject.checkpoint["history"]
        steps = [entry["step"] for entry in history]
        left.plot(steps, [entry["train_loss"] for entry in history], "C0o-", label="training", markersize=4)
        for ax, key, name, corner in [(left, "loss", "loss", "upper right"),
                                      (right, "accuracy", subject.task.metric, "lower right")]:
            ax.plot(steps, [entry[key] for entry in history], "C1s--", label="held out", markersize=4)
            ax.set(title=f"{subject.checkpoint['task']}: {name}", xlabel="step", ylabel=name)
            ax.grid(alpha=0.3)
            ax.legend(frameon=False, loc=corner)
        left.set_ylim(bottom=0)
        right.set_ylim(-0.02, 1.02)
    return figure


def draw_heads(subjects):
    """The report as a table, heads x statistics."""
    names, values, texts = [], [], []
    for subject, kind in ((subject, kind) for subject in subjects for kind in subject.layers):
        for layer, pairs in enumerate(map(zip, subject.layers[kind], subject.layers_before[kind]), start=1):
            for number, (head, before) in enumerate(pairs, start=1):
                names.append(f"{kind}, layer {layer}, head {number}")
                row = [(field, getattr(head, field), getattr(before, field)) for field in SHARES]
                values.append([2 if value > LIMITS.get(field, 2) else value for field, value, _ in row])
                texts.append(["" if math.isnan(value) else
                              f"{statistic_text(field, value)} ({statistic_text(field, was)})"
                              for field, value, was in row])
    values = torch.tensor(values)
    cell = min(0.27, MOST_MAPS / len(names))
    title = "what each head does; in brackets: before training; an error would be red"
    figure, axes, bar = axes_grid(title, 1, 1, 0.9 * len(SHARES), cell * len(names), 0, 0)
    ax = axes[0, 0]
    image = draw_map(ax, values.nan_to_num(), names, list(map(heading, SHARES)), values.isnan(), cell, texts)
    ax.tick_params(axis="x", rotation=0)
    figure.colorbar(image, cax=bar, label="share")
    return figure


def draw_all(subjects):
    """The pictures one by one: file name, figure."""
    yield "01_positional_encoding.png", draw_positions()
    yield "02_masks.png", draw_masks()
    yield "03_attention_steps.png", draw_steps()
    for subject in subjects:
        maps = {kind: subject.labelled_map(kind) for kind in subject.maps}
        names = [f"layer {i + 1}" for i in range(len(next(iter(maps.values()))[0]))]
        title = " → ".join(text if len(text) <= 80 else f"{text[:79]}…"
                           for text in (f"“{subject.question}”", subject.answer))
        if subject.classifies:
            read = positions_read(subject.task, subject.model, subject.batch)
            what = "framed: the row that the classifier reads" if len(read) == 1 else \
                f"the classifier reads {len(read)} rows of the last layer"
            yield "04_classifier.png", draw_grid(f"{title}\n{what}", *maps["classifier"], names,
                                                 framed_row=read[0] if len(read) == 1 else None)
            continue
        for file, kind, looks_from in [("05_encoder.png", "encoder", ""), ("06_decoder.png", "decoder", "\nto produce"),
                                       ("07_cross.png", "cross", "\nto produce")]:
            yield file, draw_grid(f"{kind}: {title}", *maps[kind], names, looks_from)
        weights, *labels = maps["cross"]
        both = torch.stack([subject.labelled_map("cross", subject.maps_before)[0], weights], dim=1).flatten(0, 1)
        yield "08_untrained.png", draw_grid(
            f"cross before and after training: {title}", both, *labels,
            [f"{name} {when}" for name in names for when in ("untrained", "trained")], "\nto produce")
    yield "09_training.png", draw_training(subjects)
    yield "10_heads.png", draw_heads(subjects)


def font_families(text):
    """Names of fonts that together can draw the text: matplotlib takes a sign that one lacks from the next. A notice
    names the signs that no installed font has."""
    from matplotlib import font_manager, ft2font
    families = ["DejaVu Sans"]  # comes with matplotlib
    missing = set(map(ord, text)) - set(ft2font.FT2Font(font_manager.findfont("DejaVu Sans")).get_charmap())
    paths = font_manager.findSystemFonts() if missing else []
    # plain ones first, and of these the large ones, which have many signs
    for path in sorted(paths, key=lambda path: ("Regular" not in path, "Serif" in path, -os.path.getsize(path))):
        with contextlib.suppress(OSError, RuntimeError):  # a file that is no font for matplotlib
            font = ft2font.FT2Font(path)
            found = missing.intersection(font.get_charmap())
            if found and not re.search("Last ?Resort|Emoji", font.family_name):
                font_manager.fontManager.addfont(path)  # it may be newer than matplotlib's list
                families.append(font.family_name)
                missing -= found
    if missing:
        print_notice(f"no installed font has {''.join(map(chr, sorted(missing)))[:20]}: boxes in the pictures; for "
                     "Chinese, install for example fonts-noto-cjk")
    return families


def save_pictures(subjects, out):
    """Write the pictures into the folder out, name them on stdout -> their paths. They depend on nothing of the user's
    matplotlib, neither on MPLBACKEND nor on a matplotlibrc."""
    backend = os.environ.pop("MPLBACKEND", None)  # a name that matplotlib does not know would end its import
    try:
        import matplotlib.style
    except ImportError as error:
        print_notice(f"no pictures: {error}; pip install matplotlib")
        return []
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
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
            height, width, _ = picture.shape
            axes = pyplot.figure(path.name, figsize=(width / DPI, height / DPI)).add_axes((0, 0, 1, 1))
            axes.imshow(picture, origin="upper")
            axes.set_axis_off()
        pyplot.show()
        pyplot.close("all")
    except Exception as error:  # a backend is another program, which fails in its own ways
        print_notice(f"--show: no windows ({error}); the pictures are in {paths[0].parent}")


# ------------------------------------------------------------------------------------------------------- the command


def check_toy_text(name, option, text):
    """ValueError if a toy's model, which need not be trained yet, could not read the text."""
    options = recipe_options(name)
    task = TASKS[name].read(options)
    readable_ids(task, task.build(task.config(options)), text, option, report_cut=str)  # it is told after the training


def main(argv=None):
    """Returns the exit status."""
    parser = Parser("visualize.py", __doc__)
    parser.add_argument("--text", help=f"what a classifier reads (default: {TEXT})")
    parser.add_argument("--source", help=f"what the copy or translation model reads (default: {SOURCE})")
    parser.add_argument("--checkpoint", type=file_path, metavar="PATH", help="this model alone; without --text or "
                        "--source it reads one of its held-out inputs (default: checkpoints/sentiment.pt and "
                        "checkpoints/copy.pt, trained first if they are not there)")
    parser.add_argument("--data", type=file_path, metavar="FILE", help="measure on these lines, as train.py reads them "
                        "(default: the toys' held-out data); needs --checkpoint")
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
            check_toy_text("sentiment", "--text", text)
            check_toy_text("copy", "--source", source)
            subjects = [Subject("sentiment", None, device, text=text), Subject("copy", None, device, source=source)]
    except ValueError as error:
        parser.error(str(error))
    out.mkdir(parents=True, exist_ok=True)

    for subject in subjects:
        print(f"{subject.question} -> {subject.answer}")
    subject = subjects[0 if args.source is None and args.text is not None else -1]
    kind = list(subject.maps)[-1]
    weights, rows, columns, _ = subject.labelled_map(kind)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # a notebook's stdout has none
    print(f"\n{kind} attention, layer {len(weights)}, mean of {weights.size(1)} heads; a row looks at the columns\n")
    print(*text_map(weights[-1].mean(0), rows, columns, encoding, shutil.get_terminal_size().columns), sep="\n")
    lines = [line for subject in subjects for line in ("", *subject.report())]
    lines += ["", LEGEND, "", "Attention is not an explanation: a weight says where a head looks, not why the model "
              "answers so."]
    print(*lines, sep="\n", end="\n\n", flush=True)
    (out / "report.txt").write_text("\n".join(lines).lstrip() + "\n", encoding="utf-8", errors="backslashreplace")
    print(out / "report.txt")
    paths = save_pictures(subjects, out)
    if args.show and paths:
        show_pictures(paths)
    return 1 if args.strict and any(f.level == "error" for subject in subjects for f in subject.findings) else 0


if __name__ == "__main__":
    run(main)
