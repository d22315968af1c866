"""
See what attention does: ten pictures, a map in the terminal, and a report that finds what is wrong with it.

    python visualize.py                                            both toys; pictures and report go to figures/
    python visualize.py --text "the ending was never dull"         another remark for the sentiment model
    python visualize.py --source "8 1 8 2"                         another sequence for the copy model
    python visualize.py --checkpoint checkpoints/translate.pt --source "ein mann schläft ." --data pairs.tsv

01 positions, 02 masks, 03 the formula step by step; 04 the classifier; 05 encoder, 06 decoder and 07 cross-attention of
an encoder-decoder, 08 its cross-attention before and after training; 09 the training; 10 the report as a table. With
--checkpoint those of one model. The report, also in report.txt, measures a few hundred held-out inputs: the toys' own,
or the lines of --data. Errors: weight on padding or on the future, nan, rows that do not sum to 1. Hints: the rest.

In every map a row is a query, the token that looks, and a column a key, a token that is looked at; a decoder's row
bears the token that is produced there. Repeated words are numbered (film, film·2), unknown words have a "?".
Reading order: look, measure, find, Subject, then the pictures.
"""
import argparse
import contextlib
import itertools
import math
import re
import shutil
import sys
import tempfile
import unicodedata
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from attention import attention, make_padding_mask, make_target_mask, subsequent_mask
from model import BOS, EOS, PAD, UNK, evaluating, greedy_decode
from train import (TASKS, Copy, Sentiment, default_path, fill_in, join_tokens, load_or_train, make_parser, pad,
                   pick_device, read_pairs, run, set_seed, shift, tokenize)
from transformer_layer import PositionalEncoding

TEXT, SOURCE = "the film was not very bad", "3 1 4 1 5 9 2 5"  # held out in training
MOST = 300  # inputs that are measured
MOST_WEIGHTS = 4_000_000  # of a head, over all of them: fewer inputs where they are long


# ------------------------------------------------------------------------------------------------------- the weights


class Map(NamedTuple):
    """The attention of one kind over a batch; ids are PAD where there is no token."""
    weights: list          # (batch, heads, query, key) for each layer
    rows: torch.Tensor     # (batch, query) ids that the queries stand for
    columns: torch.Tensor  # (batch, key) ids that are looked at
    causal: bool


def look(task, model, batch):
    """One pass over a batch -> logits, {"sentiment": Map} or {"encoder": Map, "decoder": Map, "cross": Map}.

    The task's own predict makes the pass, so that a fault there shows. (Not greedy_decode: attn holds the weights of
    the last call, and with a cache that is one row.)
    """
    device = next(model.parameters()).device
    with evaluating(model):
        logits, _ = task.predict(model, [t.to(device) for t in batch])
    if isinstance(task, Sentiment):
        kinds = {"sentiment": ([layer.self_attn for layer in model.encoder.layers], batch[0], batch[0])}
    else:
        src, (given, wanted) = batch[0], shift(batch[1])
        kinds = {"encoder": ([layer.self_attn for layer in model.encoder.layers], src, src),
                 "decoder": ([layer.self_attn for layer in model.decoder.layers], wanted, given),
                 "cross": ([layer.cross_attn for layer in model.decoder.layers], wanted, src)}
    return logits.cpu(), {kind: Map([module.attn.cpu() for module in modules], rows.cpu(), columns.cpu(),
                                    kind == "decoder") for kind, (modules, rows, columns) in kinds.items()}


def sort_keys(rows, columns, causal):
    """(batch, query) and (batch, key) ids -> allowed, padding, future, each (batch, query, key): a key is one of them.
    Not made with attention.py's masks, so that a fault in those is found too."""
    padding = (columns == PAD)[:, None, :].expand(-1, rows.size(1), -1)
    future = torch.arange(columns.size(1)) > torch.arange(rows.size(1))[:, None]
    future = future & ~padding if causal else torch.zeros_like(padding)
    return ~padding & ~future, padding, future


# -------------------------------------------------------------------------------------------------------- the report


def measure(weights, rows, columns, causal=False):
    """What each head does: {measure: (heads)}. weights (batch, heads, query, key), the rest as in Map.

    entropy is divided by that of equal weights on the allowed keys. first, last, previous, same, next: the mean mass on
    the key at that place, over the queries that have a choice and may look there; "first x", "last x" as a multiple of
    the uniform share. padding, future, sum off (what a row's sum is off by): the worst row. apart (heads, heads): the
    mean share of their mass in which two heads differ.
    """
    result, rounding = {"nan": weights.isnan().any(3).any(2).any(0).double()}, 4 * torch.finfo(weights.dtype).eps
    real = rows != PAD                                           # (batch, query), n of them True
    weights = weights.double().transpose(0, 1)[:, real]          # (heads, n, key)
    allowed, padding, future = (keys[real] for keys in sort_keys(rows, columns, causal))  # (n, key)
    query = torch.arange(rows.size(1)).expand_as(rows)[real]     # (n)
    last = ((columns != PAD).sum(1, keepdim=True) - 1).expand_as(rows)[real]
    choices = allowed.sum(1).double()
    free = choices > 1

    entropy = -torch.xlogy(weights, weights).sum(2)
    result["entropy"] = (entropy / choices.log())[:, free].mean(1)
    for name, key in dict(first=0 * query, last=last, previous=query - 1, same=query, next=query + 1).items():
        here = torch.arange(columns.size(1)) == key[:, None]     # (n, key)
        there = free & (here & allowed).any(1)
        there &= not (causal and name == "last")                 # where only the last query may look
        result[name] = (weights * here).sum(2)[:, there].mean(1)
        if name in ("first", "last"):
            result[f"{name} x"] = result[name] / (1 / choices[there]).mean()
    for name, keys in ("padding", padding), ("future", future):
        result[name] = (weights * keys).sum(2).amax(1)
    result["sum off"] = ((weights.sum(2) - allowed.any(1).double()).abs() - rounding).clamp(min=0).amax(1)
    result["apart"] = torch.stack([(weights - head)[:, free].abs().sum(2).mean(1) / 2 for head in weights])
    return result


class Finding(NamedTuple):
    level: str  # error or hint
    name: str
    text: str


LIMITS = {"nan": 0, "sum off": 1e-4, "padding": 1e-6, "future": 0}  # above is an error
REST = ("{:.2f} of the mass on the %s token. Often harmless: that token matters, or a head with nothing to do rests "
        "there. If all heads do it, positions may be too strong: compare the sizes of what Embeddings and "
        "PositionalEncoding give (article 1, 3.5 and 6.2).")
ADVICE = {
    "nan": "nan among the weights. Look at open_blocked_rows in attention.py, and for inf in the scores and nan in the "
           "loss (article 1, 5 and 6.3).",
    "sum off": "a row of weights is off its sum, 1 (0 for a blocked row), by {:.2g}. Look at attention(): the softmax "
               "goes over the keys, and what is returned is from before dropout (article 1, 3.2 and 4.2).",
    "padding": "up to {:.2g} of a row is on padding: the mask is not in force. Look at whether predict in train.py "
               "hands make_padding_mask on, and every layer hands on its mask (article 1, 5 and 6.2).",
    "future": "up to {:.2g} of a row is on tokens still to come. Look at make_target_mask and subsequent_mask, and at "
              "the way of tgt_mask through the decoder (article 1, 3.3; article 2, 4.2).",
    "uniform": "all weights about equal (entropy {:.2f} of 1), as before training: nothing learned here. Look at "
               "whether the loss falls: learning rate, warm-up, positions (article 1, 5 and 6.2).",
    "first": REST % "first",
    "last": REST % "last",
    "collapsed": "a collapsed layer, each head puts all its mass on one key (entropy at most {:.2f} of 1). Look at the "
                 "division by sqrt(d_k) in attention(): without it the softmax saturates (article 1, 3.2 and 6.3).",
    "alike": "heads that look at the same places as another (only {:.2f} of the mass differs). Look at split in "
             "attention.py, or try fewer --heads (article 1, 3.4).",
}


def find(kind, layers, untrained, accuracy=0.0):
    """The measures of each layer and those before training -> [Finding], errors first. accuracy is the model's."""
    places, worst = defaultdict(lambda: defaultdict(set)), defaultdict(float)

    def note(name, layer, heads, value):
        places[name][layer].update(h + 1 for h in heads)
        worst[name] = max(worst[name], value)

    for layer, (now, before) in enumerate(zip(layers, untrained), start=1):
        plain = []  # heads of which there is nothing to say yet
        for h in range(len(now["nan"])):
            value = {name: values[h].item() for name, values in now.items() if name != "apart"}
            errors = [name for name, limit in LIMITS.items() if value[name] > limit]
            hints = [name for name in ("first", "last") if value[name] > 0.5 and value[f"{name} x"] > 3]
            if value["entropy"] > 0.95 and abs(value["entropy"] - before["entropy"][h]) < 0.02:
                hints.append("uniform")
            for name in errors or hints:  # on top of an error a hint would distract
                note(name, layer, [h], value["entropy" if name == "uniform" else name])
            if not errors and not hints:
                plain.append(h)
        if len(plain) == len(now["nan"]) and now["entropy"].max() < 0.05:
            note("collapsed", layer, plain, now["entropy"].max().item())
            continue
        for a, b in itertools.combinations([h for h in plain if now["entropy"][h] < 0.9], 2):
            if now["apart"][a, b] < 0.05:
                note("alike", layer, [a, b], now["apart"][a, b].item())

    findings = []
    for name in [name for name in ADVICE if name in places]:
        where = "; ".join(f"layer {layer}, head{'s' * (len(heads) > 1)} {', '.join(map(str, sorted(heads)))}"
                          for layer, heads in places[name].items())
        level = "error" if name in LIMITS else "hint"
        solved = f" The task is solved all the same ({accuracy:.1%})." if level == "hint" and accuracy >= 0.99 else ""
        findings.append(Finding(level, name, f"{kind}, {where}: {ADVICE[name].format(worst[name])}{solved}"))
    return findings


SHARES = "entropy", "first", "last", "previous", "same", "next", "padding", "future", "sum off"
COLUMNS = "entropy", "first", "first x", "last", "last x", *SHARES[3:]


def shown(name, value):
    if name in LIMITS and not math.isnan(value):
        return "0" if value == 0 else f"{value:.0e}" if value < 0.005 else f"{value:.2f}"
    return "-" if math.isnan(value) else f"{value:.1f}" if name.endswith(" x") else f"{value:.2f}"


def table(kind, layers, untrained):
    """The measures as lines of text, two for each head."""
    yield f"{kind:19}" + "".join(f"{name:>9}" for name in COLUMNS)
    for layer, pair in enumerate(zip(layers, untrained), start=1):
        for h in range(len(pair[0]["nan"])):
            for name, values in zip((f"layer {layer}, head {h + 1}", "  before training"), pair):
                yield f"{name:19}" + "".join(f"{shown(column, values[column][h].item()):>9}" for column in COLUMNS)


# ------------------------------------------------------------------------------------------------------ what is seen


class Subject:
    """A model and what is to be seen of it: .maps of one text, .before, those of the model before training; .layers and
    .untrained, {kind: [measures of each layer]} over many inputs; .findings."""

    def __init__(self, name, path, device, text=None, source=None, data=None):
        self.path = Path(path or default_path(name))
        self.task, self.model, self.checkpoint = load_or_train(name, path, device)
        self.accuracy = self.checkpoint["metrics"]["accuracy"]
        if (source if option(self.task) == "--text" else text) is not None:
            raise ValueError(f"{self.path} holds a {self.checkpoint['task']} model: give it a {option(self.task)}")
        text = text if source is None else source
        self.text, examples, self.over = choose(self.task, self.model, text, data)
        ids = read(self.task, self.model, self.text)
        room = min(2, longest(self.model) - len(ids))
        batch = as_batch(self.task, self.model, [ids + [PAD] * room])  # some padding: is it looked at?
        if examples is None:
            half = ids[:max(1, len(ids) // 2)]
            examples = as_batch(self.task, self.model, [ids, half if option(self.task) == "--text" else half + [EOS]])

        set_seed(self.checkpoint["seed"])
        fresh = self.task.build(self.checkpoint["config"]).to(device)
        self.logits, self.maps = look(self.task, self.model, batch)
        self.before = look(self.task, fresh, batch)[1]
        self.layers, self.untrained = (
            {kind: [measure(weights, *seen[1:]) for weights in seen.weights]
             for kind, seen in look(self.task, model, examples)[1].items()} for model in (self.model, fresh))
        self.findings = [finding for kind, layers in self.layers.items()
                         for finding in find(kind, layers, self.untrained[kind], self.accuracy)]

    def report(self):
        """Lines of text."""
        yield f"{self.path}: {self.task.measure} {self.accuracy:.1%} after training; measured here: {self.over}"
        for kind, layers in self.layers.items():
            yield from ("", *table(kind, layers, self.untrained[kind]))
        yield ""
        yield from (f"{finding.level}: {finding.text}" for finding in self.findings)
        if not any(finding.level == "error" for finding in self.findings):
            yield "no error: nothing on padding, nothing on the future, no nan, every row sums to 1"

    def cut(self, kind, maps=None, glyphs=None):
        """A map of the text: weights (layers, heads, query, key), labels of rows and of columns, blocked (query, key).
        Padding is cut off, but where it is looked at it stays: that is the fault to see."""
        seen = (maps or self.maps)[kind]
        real = seen.rows[0] != PAD
        weights = torch.stack([weights[0][:, real] for weights in seen.weights])
        kept = (seen.columns[0] != PAD) | (weights != 0).any(0).any(0).any(0)
        blocked = ~sort_keys(*seen[1:])[0][0]
        sides = (seen.rows[0][real], kind in ("decoder", "cross")), (seen.columns[0][kept], kind == "decoder")
        labels = []
        for ids, produced in sides:
            vocab = getattr(self.task, "words", None) or (self.task.target if produced else self.task.source)
            words = [vocab.tokens[id] for id in ids.tolist()]
            if not produced:  # what was typed in place of <unk>
                words = [f"{typed}?" if id == UNK else word
                         for id, word, typed in itertools.zip_longest(ids.tolist(), words, tokenize(self.text))]
            labels.append(tell_apart(word.translate(glyphs or {}) for word in words))
        return weights[..., kept], *labels, blocked[real][:, kept]


def option(task):
    return "--text" if isinstance(task, Sentiment) else "--source"


def longest(model):
    """How many tokens the model can read."""
    return (model.src_embed if hasattr(model, "src_embed") else model.embed)[1].max_len


def read(task, model, text):
    """A text as ids. ValueError if the model cannot read it."""
    try:
        ids = task.encode(text) if option(task) == "--text" else task.source_ids(model, text)
        if not 1 <= len(ids) <= longest(model):
            raise ValueError(f"{len(ids)} tokens; this model reads 1 to {longest(model)}")
    except ValueError as error:
        raise ValueError(f"{option(task)}: {error}") from None
    return ids


def as_batch(task, model, rows):
    """Rows of ids as a batch of the task; what greedy decoding makes of them is the target."""
    ids = pad(rows)
    if option(task) == "--text":
        return ids, torch.zeros(len(rows), dtype=torch.long)
    said = greedy_decode(model, ids.to(next(model.parameters()).device), model.tgt_embed[1].max_len)
    return ids, F.pad(said.cpu(), (1, 0), value=BOS)


def choose(task, model, text, data):
    """The text to draw, a batch of inputs to measure (None: only the text is known), and what they are."""
    if isinstance(task, Copy):
        if data:
            raise ValueError("--data: the copy task makes its own data")
        return SOURCE if text is None else text, [side[:MOST] for side in task.valid], f"{MOST} held-out sequences"
    toy, most = Sentiment.read(argparse.Namespace(data=None)), longest(model)
    if data:
        pairs, _ = read_pairs(data, task.columns)
        if text is None:
            text = min((first for first, _ in pairs), key=lambda first: abs(len(tokenize(first)) - 10))
        if option(task) == "--text":
            examples = [(task.encode(first)[:most], 0) for first, _ in pairs]
        else:
            examples = [(src, tgt) for src, tgt in task.encode_pairs(pairs, data)
                        if max(len(src), len(tgt) - 1) <= most]
        if not examples:
            raise ValueError(f"{data}: every line has more tokens than this model reads ({most - 1})")
    elif task.vocab == toy.vocab:
        text, examples = TEXT if text is None else text, toy.valid
    elif text is None:
        raise ValueError(f"this model was trained on a file: say what to look at with {option(task)} or --data")
    else:
        return text, None, "the given text and its first half; more with --data FILE"
    size = max(len(side) for example in examples for side in example if isinstance(side, list))
    examples = examples[::math.ceil(len(examples) / min(MOST, 1 + MOST_WEIGHTS // size ** 2))]
    return text, task.batch(examples), f"{len(examples)} {f'lines of {data}' if data else 'held-out remarks'}"


def tell_apart(words):
    """Words as labels: long ones cut, repeated ones numbered."""
    seen, labels = Counter(), []
    for word in words:
        word = word if len(word) <= 14 else f"{word[:13]}…"
        seen[word] += 1
        labels.append(word if seen[word] == 1 else f"{word}·{seen[word]}")
    return labels


def check_labels(weights, rows, columns):
    if tuple(weights.shape) != (len(rows), len(columns)):
        raise ValueError(f"{len(rows)} row labels and {len(columns)} column labels for a map of (query, key) = "
                         f"{tuple(weights.shape)}")


# ------------------------------------------------------------------------------------------------------ the terminal


def text_map(weights, rows, columns, encoding, width):
    """A map (query, key) as lines of text, at most width wide; in ASCII where the encoding cannot do more."""
    check_labels(weights, rows, columns)
    shades = " ░▒▓█"
    try:
        "".join([shades, *rows, *columns]).encode(encoding)
    except UnicodeEncodeError:
        shades = " .:*#"
        rows, columns = ([label.replace("·", ".").encode("ascii", "replace").decode() for label in labels]
                         for labels in (rows, columns))
    left = max(map(cells, rows)) + 1
    cell = max(2, min(max(map(cells, columns)) + 1, (width - left) // len(columns)))
    columns = columns[:max(1, (width - left) // cell)]
    limits = [weights.max().item() * share for share in (1 / 8, 1 / 4, 1 / 2, 3 / 4)]
    yield " " * left + "".join(fill(label, cell - 1) + " " for label in columns).rstrip()
    for label, row in zip(rows, weights.tolist()):
        levels = [sum(weight >= limit for limit in limits) for weight in row[:len(columns)]]
        yield (fill(label, left) + "".join(shades[level] * (cell - 1) + " " for level in levels)).rstrip()
    yield f"({', '.join(f'{shade} from {limit:.2f}' for shade, limit in zip(shades[1:], limits))})"


def cells(text):
    """The width of a text, where a CJK character is as wide as two others."""
    return sum(1 + (unicodedata.east_asian_width(sign) in "WF") for sign in text)


def fill(text, width):
    """The text, cut or filled up to that width."""
    while cells(text) > width:
        text = text[:-1]
    return text + " " * (width - cells(text))


# ------------------------------------------------------------------------------------------------------ the pictures
# new_figure makes a figure: matplotlib's Figure, or pyplot.figure where windows are wanted.

BLOCKED = dict(facecolor="0.93", edgecolor="0.7", hatch="////", linewidth=0)
SIGNED = dict(cmap="RdBu_r", vmin=-1, vmax=1)  # colours for numbers round 0


def sheet(new_figure, title, rows, columns, width, height, left, bottom, shared=False):
    """A figure, its rows x columns axes, width by height inches each, and narrow axes for a colour bar. left and bottom
    are the inches that labels need: at all axes or, shared, only at the edge."""
    apart_x, apart_y = (0.15, 0.35) if shared else (left, bottom + 0.35)
    wide = left + columns * (width + apart_x) - apart_x + 1
    high = bottom + rows * (height + apart_y) - apart_y + 0.7 + 0.2 * title.count("\n")
    total = max(wide, 0.085 * max(map(cells, title.split("\n"))) + 0.3)
    figure = new_figure(figsize=(total, high))

    def place(x, y, width, height):
        return figure.add_axes((x / total, y / high, width / total, height / high))

    axes = [[place(left + j * (width + apart_x), bottom + i * (height + apart_y), width, height)
             for j in range(columns)] for i in reversed(range(rows))]
    tall = min(3, rows * height)
    bar = place(wide - 0.85, bottom + ((rows - 1) * apart_y + rows * height - tall) / 2, 0.15, tall)
    figure.suptitle(title, fontsize=11, y=1 - 0.1 / high, va="top")
    return figure, axes, bar


def draw_map(ax, values, rows, columns, blocked=None, cell=0.4, texts=None, cmap="magma_r", vmin=0, vmax=1):
    """One map (query, key) with its labels; cell: its cells' height in inches. Returns the image, for a colour bar.

    Blocked cells that hold no weight are left out, so that the hatched ground shows; nan and what is above the scale is
    red. texts: what to write into the cells, in place of the numbers that maps of up to 12 tokens bear.
    """
    import matplotlib
    check_labels(values, rows, columns)
    values = values.float()
    hidden = torch.zeros_like(values, dtype=torch.bool) if blocked is None else blocked & (values <= 0)
    painted = values.nan_to_num(nan=math.inf).clamp(vmin, 2 * vmax)
    painted = painted.where(painted > 1.001 * vmax, painted.clamp(max=vmax)).masked_fill(hidden, math.nan)
    ax.patch.set(**BLOCKED)
    image = ax.imshow(painted.tolist(), cmap=matplotlib.colormaps[cmap].with_extremes(over="red"), vmin=vmin, vmax=vmax,
                      aspect="auto", interpolation="nearest")
    ax.tick_params(length=0, pad=2)
    step = max(1, math.ceil(0.14 / cell))  # labels that would overlap are left out
    ax.set_xticks(range(0, len(columns), step), columns[::step], rotation=90 if max(map(cells, columns)) > 2 else 0)
    ax.set_yticks(range(0, len(rows), step), rows[::step])
    if texts or max(values.shape) <= 12 and cell >= 0.25:
        for (i, row), j in itertools.product(enumerate(painted.tolist()), range(len(columns))):
            style = dict(backgroundcolor=BLOCKED["facecolor"])
            if not hidden[i, j]:
                red, green, blue, _ = image.cmap(image.norm(row[j]))
                style = dict(color="white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "black")
            if text := texts[i][j] if texts else number(values[i, j].item(), hidden[i, j]):
                ax.text(j, i, text, ha="center", va="center", fontsize=7, **style)
    return image


def number(value, hidden):
    """0.273 -> .27, 0.001 -> 0, -inf -> −∞; nothing for a blocked weight."""
    if hidden and value == 0:
        return ""
    text = f"{value:.2f}".replace("-", "−").replace("inf", "∞")
    return {"0.00": "0", "−0.00": "0", "1.00": "1"}.get(text, re.sub(r"\b0\.", ".", text))


def draw_positions(new_figure):
    small, large = (PositionalEncoding(d_model, max_len=100).table for d_model in (20, 64))  # (position, dimension)
    figure = new_figure(figsize=(13, 4), layout="constrained")
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


def draw_masks(new_figure):
    """The masks of a batch of two sentences, (batch, 1, query, key)."""
    from matplotlib.patches import Patch
    ids = torch.tensor([[4, 5, 6, 7], [8, 9, PAD, PAD]])
    masks = {"padding: make_padding_mask": make_padding_mask(ids), "causal: subsequent_mask": subsequent_mask(4)[None],
             "both: make_target_mask": make_target_mask(ids)}
    figure, axes, bar = sheet(new_figure, "the masks of two sentences in one batch", 2, 3, 1.8, 1.8, 0.95, 0.95)
    for i, words in enumerate((["I", "love", "this", "film"], ["so", "dull", "<pad>", "<pad>·2"])):
        for ax, (name, mask) in zip(axes[i], masks.items()):
            allowed = mask.expand(2, 1, 4, 4)[i, 0]
            image = draw_map(ax, allowed.float(), words, words, ~allowed, cmap="Blues", vmax=2)
            ax.set_title(name, fontsize=9)
            ax.set(xlabel="looks at (key)", ylabel="looks from (query)")
    bar.set_axis_off()
    bar.legend(handles=[Patch(facecolor=image.cmap(0.5), label="may look"), Patch(**BLOCKED, label="blocked")],
               loc="center left", bbox_to_anchor=(-0.6, 0.5), frameon=False, handlelength=1)
    return figure


def draw_steps(new_figure):
    """The formula on one sentence, with random Q, K and V of d_k = 4."""
    words, width = ["a", "moving", "film", "<pad>"], ["1", "2", "3", "4"]
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(4, 4, generator=generator) for _ in range(3))
    allowed = make_target_mask(torch.tensor([[4, 5, 6, PAD]]))[0, 0]
    scores = q @ k.T
    output, weights = attention(q, k, v, allowed)
    masked = (scores / 2).masked_fill(~allowed, -math.inf)
    limit = scores.abs().max().item()
    signed = dict(SIGNED, vmin=-limit, vmax=limit)
    panels = [("Q: what a word looks for", q, signed), ("K: what it is found by", k, signed),
              ("V: what it hands over", v, signed), None, None,
              ("1. QKᵀ", scores, signed), ("2. divided by √d_k = 2", scores / 2, signed),
              ("3. masked: padding, future", masked, dict(signed, blocked=~allowed)),
              ("4. softmax: a row sums to 1", weights, dict(blocked=~allowed)), ("5. times V", output, signed)]
    figure, axes, bar = sheet(new_figure, "softmax(QKᵀ / √d_k) V, step by step", 2, 5, 1.9, 1.9, 0.95, 0.95)
    axes[0][3].text(0, 0.5, "1. every query times every key\n2. smaller numbers, a softer softmax\n"
                    "3. −∞ where a query may not look\n4. each row becomes shares of 1\n"
                    "5. the mean of V by these shares", fontsize=10, linespacing=1.8, va="center")
    for ax, panel in zip(itertools.chain(*axes), panels):
        if panel is None:
            ax.set_axis_off()
            continue
        title, values, style = panel
        keys = title[0] in "1234"
        image = draw_map(ax, values, words, words if keys else width, **style)
        ax.set_title(title, fontsize=9)
        ax.set(xlabel="looks at (key)" if keys else "d_k", ylabel="looks from (query)" if keys else "")
        if values is weights:
            figure.colorbar(image, cax=bar, label="weight (panel 4)")
    return figure


def draw_grid(new_figure, title, weights, rows, columns, blocked, names, looks_from="", framed=None):
    """Weights (layers, heads, query, key) as one map each, on one scale; names: of the layers."""
    layers, heads, queries, keys = weights.shape
    cell = 0.36 if max(queries, keys) <= 12 else max(0.14, 4.3 / max(queries, keys))
    cell = min(cell, 28 / (heads * keys), 28 / (layers * queries))
    width = max(keys * cell, 0.085 * max(len(f"{name}, head {heads}") for name in names))
    figure, axes, bar = sheet(new_figure, title, layers, heads, width, max(1.3, queries * cell),
                              0.65 + 0.085 * max(map(cells, rows)), 0.4 + 0.085 * max(map(cells, columns)), shared=True)
    for i, h in itertools.product(range(layers), range(heads)):
        ax = axes[i][h]
        image = draw_map(ax, weights[i, h], rows, columns, blocked, cell)
        ax.set_title(f"{names[i]}, head {h + 1}", fontsize=9)
        ax.set_xlabel("looks at (key)") if i == layers - 1 else ax.set_xticks([])
        ax.set_ylabel(f"looks from (query){looks_from}") if h == 0 else ax.set_yticks([])
        if i == framed:
            ax.plot([-0.5, keys - 0.5, keys - 0.5, -0.5, -0.5], [-0.5, -0.5, 0.5, 0.5, -0.5], color="tab:cyan",
                    linewidth=2.5, clip_on=False)
    figure.colorbar(image, cax=bar, label="weight")
    return figure


def draw_training(new_figure, subjects):
    """What train.py recorded: loss and held-out accuracy over the steps."""
    figure = new_figure(figsize=(9, 3.4 * len(subjects)), layout="constrained")
    for (left, right), subject in zip(figure.subplots(len(subjects), 2, squeeze=False), subjects):
        history = subject.checkpoint["history"]
        steps = [entry["step"] for entry in history]
        left.plot(steps, [entry["train_loss"] for entry in history], "C0o-", label="training", markersize=4)
        for ax, name, title, corner in [(left, "loss", "loss", "upper right"),
                                        (right, "accuracy", subject.task.measure, "lower right")]:
            ax.plot(steps, [entry[name] for entry in history], "C1s--", label="held out", markersize=4)
            ax.set(title=f"{subject.checkpoint['task']}: {title}", xlabel="step", ylabel=title)
            ax.grid(alpha=0.3)
            ax.legend(frameon=False, loc=corner)
        left.set_ylim(bottom=0)
        right.set_ylim(-0.02, 1.02)
    return figure


def draw_heads(new_figure, subjects):
    """The report as a table, heads x measures."""
    names, values, texts = [], [], []
    for subject, kind in ((subject, kind) for subject in subjects for kind in subject.layers):
        for layer, (now, before) in enumerate(zip(subject.layers[kind], subject.untrained[kind]), start=1):
            for h in range(len(now["nan"])):
                names.append(f"{kind}, layer {layer}, head {h + 1}")
                row = [(name, now[name][h].item(), before[name][h].item()) for name in SHARES]
                values.append([2 if value > LIMITS.get(name, 2) else value for name, value, _ in row])
                texts.append(["" if math.isnan(value) else f"{shown(name, value)} ({shown(name, was)})"
                              for name, value, was in row])
    values = torch.tensor(values)
    cell = min(0.27, 28 / len(names))
    title = "what each head does; in brackets: before training; an error would be red"
    figure, ((ax,),), bar = sheet(new_figure, title, 1, 1, 0.9 * len(SHARES), cell * len(names), 2.1, 0.3)
    image = draw_map(ax, values.nan_to_num(), names, SHARES, values.isnan(), cell, texts)
    ax.tick_params(axis="x", rotation=0)
    figure.colorbar(image, cax=bar, label="share")
    return figure


def draw_all(new_figure, subjects, glyphs):
    """The pictures one by one: file name, figure. glyphs replaces what no font has."""
    produce = "\nto produce"

    def quote(tokens):
        text = join_tokens(tokens).translate(glyphs)
        return f"“{text if len(text) <= 80 else text[:79] + '…'}”"

    yield "01_positional_encoding.png", draw_positions(new_figure)
    yield "02_masks.png", draw_masks(new_figure)
    yield "03_attention_steps.png", draw_steps(new_figure)
    for subject in subjects:
        maps = {kind: subject.cut(kind, glyphs=glyphs) for kind in subject.maps}
        names = [f"layer {i + 1}" for i in range(len(next(iter(maps.values()))[0]))]
        title = quote(tokenize(subject.text))
        if "sentiment" in maps:
            share, label = subject.logits[0].softmax(0).max(0)
            title += (f": {subject.task.labels[label].translate(glyphs)}, probability {share:.1%}\n"
                      f"framed: the row that the classifier reads")
            yield "04_sentiment.png", draw_grid(new_figure, title, *maps["sentiment"], names, framed=len(names) - 1)
            continue
        title += f" → {quote(subject.task.target.decode(subject.maps['cross'].rows[0].tolist()))}"
        for file, kind, looks_from in [("05_encoder.png", "encoder", ""), ("06_decoder.png", "decoder", produce),
                                       ("07_cross.png", "cross", produce)]:
            yield file, draw_grid(new_figure, f"{kind}: {title}", *maps[kind], names, looks_from)
        weights, *labels = maps["cross"]
        both = torch.stack([subject.cut("cross", subject.before)[0], weights], dim=1).flatten(0, 1)
        yield "08_untrained.png", draw_grid(
            new_figure, f"cross before and after training: {title}", both, *labels,
            [f"{name} {when}" for name in names for when in ("untrained", "trained")], produce)
    yield "09_training.png", draw_training(new_figure, subjects)
    yield "10_heads.png", draw_heads(new_figure, subjects)


def find_fonts(text):
    """Names of the installed fonts that together can draw the text, and {ord: "□"} for what none of them has."""
    from matplotlib import font_manager, ft2font

    def without(path):
        with contextlib.suppress(RuntimeError):  # a file that is no font
            return missing - set(ft2font.FT2Font(path).get_charmap())
        return missing

    names, missing = ["DejaVu Sans"], {ord(sign) for sign in text}
    missing = without(font_manager.findfont("DejaVu Sans"))  # comes with matplotlib
    known = font_manager.fontManager.ttflist
    if missing:  # fonts that were installed after matplotlib had listed them
        for path in set(font_manager.findSystemFonts()) - {font.fname for font in known}:
            with contextlib.suppress(Exception):  # of whatever kind: then it is no font for us
                font_manager.fontManager.addfont(path)
    fonts = {font.name: font.fname for font in known if missing and not re.search("Last ?Resort|Emoji", font.name)}
    for name in sorted(fonts, key=lambda name: len(without(fonts[name]))):  # those that have the most come first
        if missing and without(fonts[name]) != missing:
            names.append(name)
            missing = without(fonts[name])
    return names, {sign: "□" for sign in missing}


def save_pictures(subjects, out, show):
    """Write the pictures into the folder out and name them on stdout; then show them in windows, if wanted."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        print(f"no pictures: {error}; pip install matplotlib", file=sys.stderr)
        return
    new_figure = Figure
    if show:
        from matplotlib import pyplot
        if pyplot.get_backend().lower() == "agg":
            print(f"--show: there is no display; the pictures are in {out}", file=sys.stderr)
        else:
            new_figure = pyplot.figure
    words = []
    for subject in subjects:
        words += tokenize(subject.text) + subject.task.vocab.get("labels", [])
        words += itertools.chain(*(rows + columns for _, rows, columns, _ in map(subject.cut, subject.maps)))
    names, glyphs = find_fonts("".join(words))
    if glyphs:
        print(f"no installed font has {''.join(map(chr, sorted(glyphs)))[:20]}: drawn as □; for Chinese, install for "
              "example fonts-noto-cjk", file=sys.stderr)
    style = {"font.family": names, "font.size": 9, "text.parse_math": False, "hatch.linewidth": 0.5}
    with matplotlib.rc_context(style):
        for file, figure in draw_all(new_figure, subjects, glyphs):
            figure.savefig(out / file, dpi=100)
            print(out / file, flush=True)
        if new_figure is not Figure:
            pyplot.show()
            pyplot.close("all")


# ------------------------------------------------------------------------------------------------------- the command


def main(argv=None):
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help=f"what the sentiment model reads (default: {TEXT})")
    parser.add_argument("--source", help=f"what the copy or translation model reads (default: {SOURCE})")
    parser.add_argument("--checkpoint", metavar="PATH", help="this model alone (default: checkpoints/sentiment.pt and "
                        "checkpoints/copy.pt, trained first if they are not there)")
    parser.add_argument("--data", metavar="FILE", help="measure on these lines, as train.py reads them (default: the "
                        "toys' held-out data); needs --checkpoint")
    parser.add_argument("--out", metavar="DIR", default="figures", help="where the files go (default: figures)")
    parser.add_argument("--show", action="store_true", help="open windows too (default: off)")
    parser.add_argument("--strict", action="store_true", help="exit status 1 if there is an error (default: off)")
    parser.add_argument("--device", default="auto", help="auto (CUDA if there), cpu, cuda, cuda:1, ... (default: auto)")
    args = parser.parse_args(argv)
    out = Path(args.out)
    if args.checkpoint == "" or args.data == "":
        parser.error("--checkpoint or --data is empty")
    if args.data and not args.checkpoint:
        parser.error("--data needs --checkpoint, the model that was trained on such lines")
    if args.checkpoint and args.text is not None and args.source is not None:
        parser.error("--checkpoint is one model: it takes --text or --source")
    try:
        device = pick_device(args.device)
        if args.checkpoint:
            subjects = [Subject(None, args.checkpoint, device, args.text, args.source, args.data)]
        else:
            for name, text in ("sentiment", args.text), ("copy", args.source):
                if text is not None and not default_path(name).exists():  # better said before the training
                    options = fill_in(make_parser().parse_args([]), name, None)
                    task = TASKS[name].read(options)
                    read(task, task.build(task.config(options)), text)
            subjects = [Subject("sentiment", None, device, text=args.text),
                        Subject("copy", None, device, source=args.source)]
        if out.exists() and not out.is_dir():
            raise ValueError(f"--out: {out} is not a directory")
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    except ValueError as error:
        parser.error(str(error))

    subject = subjects[0 if args.source is None and args.text is not None else -1]
    kind = list(subject.maps)[-1]
    weights, rows, columns, _ = subject.cut(kind)
    print(f"{kind} attention, layer {len(weights)}, mean of {weights.size(1)} heads; a row looks at the columns\n")
    print(*text_map(weights[-1].mean(0), rows, columns, sys.stdout.encoding or "utf-8",
                    shutil.get_terminal_size().columns), sep="\n", end="\n\n")
    lines = [line for subject in subjects for line in (*subject.report(), "")]
    lines.append("Attention is not an explanation: a weight says where a head looks, not why the model answers so.")
    print(*lines, sep="\n", end="\n\n", flush=True)
    try:
        (out / "report.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(out / "report.txt")
        save_pictures(subjects, out, args.show)
    except BrokenPipeError:
        raise  # a reader that is gone is run's business
    except OSError as error:
        print(f"visualize.py: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return 1 if args.strict and any(f.level == "error" for subject in subjects for f in subject.findings) else 0


if __name__ == "__main__":
    run(main)
