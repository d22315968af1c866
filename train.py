"""
Train a Transformer on a task; the best weights go to checkpoints/<task>.pt.

    python train.py                                                          both toys below, in seconds
    python train.py --task sentiment                                         is a film remark positive or negative?
    python train.py --task copy                                              3 1 4 -> 3 1 4: repeat a sequence
    python train.py --task sentiment --data reviews.tsv --valid more.tsv     lines of text<TAB>label, or a .csv
    python train.py --task translate --data pairs.tsv --valid more.tsv       lines of source<TAB>target, or a .csv

A .csv has a header with columns named text, review or sentence and label or sentiment, or source and target. Without
--valid, a tenth of the lines is held out. With --data the weights go to checkpoints/<name of the data file>.pt.
--resume continues an interrupted run (Ctrl-C, a kill, a power cut) after its last complete round.

Reading order: train, then a task (Sentiment is the simplest), tokenize, main. To add a task of your own, see Task.
"""
import argparse
import contextlib
import copy
import csv
import functools
import io
import itertools
import math
import os
import random
import re
import shlex
import shutil
import sys
import time
import unicodedata
import zlib
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from attention import make_padding_mask, make_target_mask
from model import BOS, EOS, PAD, UNK, TransformerClassifier, beam_decode, evaluating, greedy_decode, make_model

IGNORE = -100  # the label of positions excluded from the loss, as in F.cross_entropy


# ------------------------------------------------------------------------------------------------------- training


def train(task, model, args, device, path, best=None, state=None):
    """Train the model on the task; the best weights go to path. Returns the exit status: 1 if a loss is not finite.

    Training goes in rounds: an epoch each, or part of a long one (see Task.batches). After each the model is evaluated
    on the validation set and a checkpoint is written. All that is random in a round, batches and dropout, follows from
    (seed, number of the round, rank), so a resumed run ends exactly like an uninterrupted one; best and state are what
    the checkpoint of the interrupted run holds. Under torchrun each process, a rank, trains on its own rows of every
    batch; all of them evaluate.
    """
    rank, ranks = rank_and_ranks()
    for module in model.to(device).train().modules():
        if hasattr(module, "fused"):
            module.fused = args.fused
    steps, config = args.steps or args.epochs * task.batches_per_epoch(args), task.config(args)
    run = Run(model, args, steps)
    if state:
        run.load_state_dict(state)
    parallel = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    print(f"{args.task}: {sum(p.numel() for p in model.parameters()):,} parameters, {steps:,} steps"
          f"{f', resuming after step {run.step:,}' if state else ''}"
          f"{f' are few: warm-up cut to {run.warmup}, more may help' if run.warmup < args.warmup else ''}")

    while run.step < steps:
        number = len(run.history)
        set_seed(args.seed, number, rank)
        progress = Progress(args.task, steps)
        for batch in itertools.islice(task.batches(args, number), steps - run.step):
            with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
                logits, labels = task.predict(parallel, [t[rank::ranks].to(device) for t in batch])
                loss = mean_loss(logits, labels, task.label_smoothing)

            run.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            run.optimizer.step()
            run.scheduler.step()

            run.step += 1
            progress.update(run.step, loss.detach(), batch)

        progress.loss = sum_over_ranks(progress.loss) / ranks
        metrics = {"step": run.step, "train_loss": progress.mean_loss(), **task.evaluate(model, device)}
        if not math.isfinite(metrics["train_loss"] + metrics["loss"]):
            progress.end("the loss is not finite; try a smaller --lr. "
                         + (f"The best weights so far are in {path}" if best else "Nothing is saved"))
            return 1
        run.history.append(metrics)
        if best is None or task.score(metrics) >= task.score(best["metrics"]):  # on a tie those trained longer
            best = dict(task=args.task, config=config, vocab=task.vocab, seed=args.seed, step=run.step,
                        metrics=metrics, model=copy.deepcopy(model.state_dict()))
        unfinished = dict(run=run.state_dict(), options=saved_options(args)) if run.step < steps else {}
        save_checkpoint(path, dict(best, history=run.history, **unfinished))
        progress.end(f"validation loss {metrics['loss']:.3f}  {task.metric} {metrics['accuracy']:.1%}")
        print(f"    {task.sample(model, number)}", flush=True)
    print(f"{args.task}: {task.metric} {best['metrics']['accuracy']:.1%} on the validation set at step "
          f"{best['step']:,}; saved to {path}\nask it: python translate.py --checkpoint {shlex.quote(str(path))} "
          f"{'a text of yours' if args.data else task.question}\n")
    return 0


class Run:
    """The state of training: parameters, optimizer, schedule, step and history."""

    def __init__(self, model, args, steps):
        self.model = model
        fused = next(model.parameters()).device.type in ("cpu", "cuda")  # the optimizer's kernel, not --fused
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), fused=fused)
        self.warmup = args.warmup if args.warmup <= steps // 2 else steps // 5
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warm_up_and_decay(steps, self.warmup))
        self.step, self.history = 0, []

    def state_dict(self):
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scheduler")}
        return dict(parts, step=self.step, history=self.history)

    def load_state_dict(self, state):
        for name in "model", "optimizer", "scheduler":
            getattr(self, name).load_state_dict(state[name])
        self.step, self.history = state["step"], state["history"]


def mean_loss(logits, labels, label_smoothing=0.0):
    """The mean cross-entropy over the labels that are not IGNORE, 0 if there are none. logits (labels, classes).

    Under torchrun: this rank's sum over the number of labels on all ranks, times the number of ranks, because
    DistributedDataParallel averages the gradients. So the result is the gradient of a single process.
    """
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum", label_smoothing=label_smoothing)
    count = sum_over_ranks((labels != IGNORE).sum())
    return loss / count.clamp(min=1) * rank_and_ranks()[1]


def warm_up_and_decay(steps, warmup):
    """A function of the step, the factor of the peak learning rate: linear warm-up, then half a cosine down to 0."""
    def rate(step):
        if step < warmup:
            return (step + 1) / warmup
        return (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
    return rate


class Progress:
    """Loss and speed of one round: a line that renews itself on a terminal; elsewhere only the one of end()."""

    def __init__(self, name, steps):
        self.name, self.steps, self.started, self.renewed = name, steps, time.monotonic(), 0.0
        self.loss, self.batches, self.tokens = 0.0, 0, 0
        isatty = getattr(sys.stdout, "isatty", lambda: False)  # a stdout may be closed, or of any kind
        self.live = isatty() and os.environ.get("TERM") != "dumb"

    def update(self, step, loss, batch):
        """loss is a tensor; its value is read only when a line is printed, because that makes a GPU wait."""
        self.step, self.loss, self.batches, self.now = step, self.loss + loss, self.batches + 1, time.monotonic()
        self.tokens += sum((ids != PAD).sum().item() for ids in batch if ids.dim() == 2)  # labels are 1-D
        if self.live and self.now - self.renewed > 0.1:
            self.renewed = self.now
            print(f"\r{self.line()[:shutil.get_terminal_size().columns - 1]}\x1b[K", end="", flush=True)

    def mean_loss(self):
        return float(self.loss / self.batches)

    def line(self):
        speed = self.tokens / max(1e-9, self.now - self.started)
        left = round((time.monotonic() - self.started) / self.batches * (self.steps - self.step))
        return (f"{self.name}  step {self.step:{len(str(self.steps))}}/{self.steps}  loss {self.mean_loss():.3f}  "
                f"{speed:,.0f} tokens/s  {left // 60}:{left % 60:02} left")

    def end(self, text):
        print(f"{chr(13) if self.live else ''}{self.line()}  {text}", flush=True)


# ---------------------------------------------------------------------------------------------------------- tasks


class Task:
    """What the training loop and the other scripts ask of a task. An example is a list of input ids, and what is
    expected; a batch is a tuple of tensors, ids as (batch, len). Besides what is defined below a task has

        columns                 names that the two columns of its data file may have; None: it has no file
        sides                   the keys of vocab: what is read, what is answered
        recipe, data_recipe     default hyperparameters without and with --data; None: not possible
        metric, question        the name of its accuracy; an example of what to ask its toy
        config(args)            the arguments of build(config), which makes the model; saved beside its weights
        encode(text)            the input ids of a text; a model takes most_tokens(model) of them
        encode_pairs(pairs, path, most), batch(examples)    what read_pairs gives as examples; examples as a batch
        predict(model, batch)   logits (labels, classes) and labels (labels), IGNORE where nothing is expected
        answers(model, rows, beams), expected(example)      lines of output: for rows of ids, of an example

    A task whose examples are random inherits from Copy: it needs symbols, most, draw and a recipe of its own.
    """

    columns = recipe = data_recipe = None
    label_smoothing = 0.0
    labelled = False   # the second column is a label, not a text, and a text that is too long may be cut off
    in_tokens = False  # --batch-size counts tokens, not examples

    def __init__(self, vocab):
        """vocab: {name: list of strings}, saved beside the weights; the first is the input's, the last the output's."""
        self.vocab = vocab
        vocabs = [Vocab(tokens) for tokens in vocab.values()]
        self.source, self.target = vocabs[0], vocabs[-1]

    @classmethod
    def read(cls, args):
        """The task with .train and .valid, lists of examples: the toy's or, with --data, those of files."""
        train, valid = read_split(args, cls)
        texts, targets = zip(*train)
        source, target = cls.sides
        task = cls({source: make_vocab(texts), target: sorted(set(targets)) if cls.labelled else make_vocab(targets)})
        task.train = task.encode_pairs(train, args.data)
        task.valid = task.encode_pairs(valid, args.valid or args.data)
        for name, side in zip(cls.sides, zip(*task.valid)):
            if args.data and isinstance(side[0], list):  # not labels
                unknown, tokens = map(sum, zip(*map(count_unknown, side)))
                print(f"{name}: {len(task.vocab[name]) - len(SPECIAL):,} tokens known, those that occur twice in "
                      f"training; {unknown / tokens:.1%} of the validation tokens are not")
        return task

    def tokenize(self, text):
        return tokenize(text)

    def batches_per_epoch(self, args):
        return len(self.length_batches(self.train, args.batch_size))

    def batches(self, args, number):
        """The batches of a round: an epoch, or an equal part of it if it has more than 500 batches."""
        parts = math.ceil(self.batches_per_epoch(args) / 500)
        epoch, part = divmod(number, parts)
        rng = random.Random(mixed_seed(args.seed, epoch))
        return map(self.batch, self.length_batches(self.train, args.batch_size, rng)[part::parts])

    def length_batches(self, examples, size, rng=None):
        """The examples in batches of similar length, so that little is padding; a list of lists.

        A batch has up to size examples or, in_tokens, up to size tokens of a side with its padding. With rng, a
        random.Random, equally long examples and the batches are shuffled; the number of batches does not change.
        """
        def lengths(example):
            return [len(side) for side in example if isinstance(side, list)]

        order = examples if rng is None else rng.sample(examples, len(examples))
        batches, longest = [], 0
        for example in sorted(order, key=lengths):
            longest = max(longest, *lengths(example))
            if not batches or (len(batches[-1]) + 1) * (longest if self.in_tokens else 1) > size:
                batches.append([])
                longest = max(lengths(example))
            batches[-1].append(example)
        return batches if rng is None else rng.sample(batches, len(batches))

    def evaluate(self, model, device):
        """{"loss", "accuracy"}: means over all labels of the validation set."""
        loss = count = hits = 0
        with evaluating(model):
            for examples in self.length_batches(self.valid, 2500 if self.in_tokens else 256):
                logits, labels = self.predict(model, [t.to(device) for t in self.batch(examples)])
                loss += F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum").item()
                count += (labels != IGNORE).sum().item()
                hits += (logits.argmax(dim=-1) == labels).sum().item()
        return {"loss": loss / count, "accuracy": hits / count}

    def score(self, metrics):
        """A tuple; the weights with the largest are kept."""
        return metrics["accuracy"], -metrics["loss"]

    def sample(self, model, number):
        """A line: text  ->  the model's answer, a space for its tab (what is expected)."""
        example = self.valid[number % len(self.valid)]
        answer, = self.answers(model, [example[0]])
        text = join_tokens(self.source.decode(example[0]))
        return f"{text}  ->  {answer.expandtabs(1)} ({self.expected(example)})"

    def toy_examples(self):
        """The toy's held-out examples; None for a model that was trained on a file."""
        toy = self.read(make_parser().parse_args([])) if self.recipe else None
        return toy.valid if toy and toy.vocab == self.vocab else None

    def model_ids(self, model, text, report_cut=None):
        """The ids of a text for this model. ValueError if there is no token or, unless labelled, there are too many."""
        ids, most = self.encode(text), self.most_tokens(model)
        count = count_unknown(ids)[1]
        if count == 0 or count > most and not self.labelled:
            raise ValueError(f"{count:,} tokens; this model reads 1 to {most}")
        if count > most:
            (report_cut or print_notice)(f"{count:,} tokens; this model reads the first {most}")
        return ids[:most] if self.labelled else ids


class Sentiment(Task):
    """Film remarks are positive or negative (article 1, 4.6), other texts of any other classes."""

    columns = ("text", "review", "sentence"), ("label", "sentiment")
    sides = "words", "labels"
    metric = "accuracy"
    question = "the film was never dull"
    recipe = dict(epochs=6, steps=None, batch_size=40, lr=6e-3, warmup=50, dropout=0.0, layers=2, d_model=32, heads=4,
                  d_ff=64, norm="post")
    data_recipe = dict(recipe, epochs=8, batch_size=64, lr=1e-3, warmup=100, dropout=0.5, d_model=128, d_ff=128,
                       norm="pre")
    labelled = True

    def encode(self, text):
        return self.source.encode(self.tokenize(text))

    def encode_pairs(self, pairs, path, most=256):
        for _, label in pairs:
            if label not in self.target.ids:
                raise ValueError(f"{path}: the label {shorten(label)!r} does not occur in the training set")
        too_long = sum(len(tokens) > most for tokens, _ in pairs)
        if too_long:
            print_notice(f"{path}: {too_long:,} texts have more than {most} tokens; the rest of them is cut off")
        return [(self.source.encode(tokens[:most]), self.target.ids[label]) for tokens, label in pairs]

    def config(self, args):
        longest = max(len(ids) for ids, _ in self.train + self.valid)
        return dict(vocab_size=len(self.source), num_classes=len(self.target), max_len=longest, **model_sizes(args))

    def build(self, config):
        return TransformerClassifier(**config)

    def batch(self, examples):
        """Token ids (batch, len), labels (batch)."""
        rows, labels = zip(*examples)
        return pad(rows), torch.tensor(labels)

    def predict(self, model, batch):
        tokens, labels = batch
        return model(tokens, make_padding_mask(tokens))[0], labels

    def most_tokens(self, model):
        return model.embed[1].max_len

    def answers(self, model, rows, beams=1):
        """For each row label<TAB>probability."""
        tokens = pad(rows).to(next(model.parameters()).device)
        with evaluating(model):
            probability, label = model(tokens, make_padding_mask(tokens))[0].softmax(dim=-1).max(dim=-1)
        return [f"{self.target.tokens[i]}\t{p:.3f}" for i, p in zip(label.tolist(), probability.tolist())]

    def expected(self, example):
        return self.target.tokens[example[1]]


def toy_remarks():
    """All remarks of a tiny grammar as (tokens, label): training pairs, and a fifth of them held out."""
    subjects = "the film", "this story", "the acting", "the ending"
    verbs = "is", "was", "felt"
    adverbs = "", "very", "really", "so", "truly", "quite", "not", "never", "not very"
    positive = "good", "great", "funny", "moving", "charming"
    negative = "bad", "awful", "boring", "dull", "weak"
    remarks = []
    for subject, verb, adverb, adjective in itertools.product(subjects, verbs, adverbs, positive + negative):
        liked = (adjective in positive) != adverb.startswith(("not", "never"))  # "not bad" is praise
        remarks.append((tokenize(f"{subject} {verb} {adverb} {adjective}"), "positive" if liked else "negative"))
    random.Random(0).shuffle(remarks)
    return remarks[len(remarks) // 5:], remarks[:len(remarks) // 5]


class Seq2Seq(Task):
    """What copying and translating share. An example is source ids ... EOS and target ids BOS ... EOS. The source has
    an EOS, too: the decoder attends to it when it is time to stop."""

    def build(self, config):
        return make_model(**config)

    def batch(self, examples):
        """Source ids (batch, source), target ids (batch, target)."""
        return tuple(pad(side) for side in zip(*examples))

    def predict(self, model, batch):
        src, tgt = batch
        decoder_input, labels = shift(tgt)
        logits = model(src, decoder_input, make_padding_mask(src), make_target_mask(decoder_input))
        return logits.flatten(0, 1), labels.masked_fill(labels == PAD, IGNORE).flatten()

    def most_tokens(self, model):
        return model.src_embed[1].max_len - 1  # EOS

    def answers(self, model, rows, beams=1):
        """For each row of source ids what greedy decoding or a beam search makes of it."""
        src, longest = pad(rows).to(next(model.parameters()).device), model.tgt_embed[1].max_len
        ids = greedy_decode(model, src, longest) if beams == 1 else beam_decode(model, src, longest, beams)
        return [join_tokens(self.target.decode(row)) for row in ids.tolist()]

    def expected(self, example):
        return join_tokens(self.target.decode(example[1][1:]))


def shift(tgt):
    """BOS a b c EOS -> the decoder input BOS a b c and, at each of its positions, the label: a b c EOS."""
    return tgt[:, :-1], tgt[:, 1:]


class Copy(Seq2Seq):
    """Repeat a sequence of symbols. Trivial to us, but it exercises the whole encoder-decoder: attend to the right
    place in the source, hand its symbol over, stop after the last.

    Its examples are random, so there is no end to them; a round has 50 batches. A class that inherits from this one
    needs a recipe of its own: this learning rate is too high for most other work.
    """

    metric = "greedy exact match"
    question = "3 1 4 1 5"
    recipe = dict(epochs=None, steps=250, batch_size=64, lr=8e-3, warmup=20, dropout=0.0, layers=1, d_model=64,
                  heads=2, d_ff=64, norm="pre")
    symbols = [str(i) for i in range(1, 11)]
    most = 10  # symbols in a source, and in a target

    @classmethod
    def read(cls, args):
        task = cls({"symbols": [*SPECIAL, *cls.symbols]})
        task.valid = task.examples(random.Random(0), 1000, held_out=True)
        return task

    def draw(self, rng):
        """A random example, source and target as lines of text. The longer of two random lengths, so that late places
        occur often enough; and symbols that repeat the one before, as only their place tells the two apart. By hand:
        lengths 3 and 5, so 5; symbols 3 1 4 1 5, the third repeats: 3 1 1 1 5."""
        length = max(rng.randint(1, self.most), rng.randint(1, self.most))
        symbols = rng.choices(self.symbols, k=length)
        for i in range(1, length):
            if rng.random() < 0.3:
                symbols[i] = symbols[i - 1]
        return " ".join(symbols), " ".join(symbols)

    def examples(self, rng, size, held_out):
        """Examples from one side of the split: a tenth of all sources, chosen by checksum, is held out."""
        examples = []
        for _ in range(1000 * size):
            source, target = self.draw(rng)
            if (zlib.crc32(source.encode()) % 10 == 5) == held_out:  # 5: none of copy's single symbols is held out
                examples.append((self.encode(source), [BOS, *self.encode(target)]))
            if len(examples) == size:
                return examples
        raise ValueError(f"{type(self).__name__}.draw gives too few different sources to hold a tenth of them out")

    def batches(self, args, number):
        rng = random.Random(mixed_seed(args.seed, number))
        return (self.batch(self.examples(rng, args.batch_size, held_out=False)) for _ in range(50))

    def tokenize(self, text):
        return text.split()  # symbols may be any

    def encode(self, text):
        for symbol in self.tokenize(text):
            if self.source.ids.get(symbol, UNK) < len(SPECIAL):
                raise ValueError(f"{shorten(symbol)!r} is not a symbol; the symbols are "
                                 f"{' '.join(self.source.tokens[len(SPECIAL):])}")
        return self.source.encode(self.tokenize(text)) + [EOS]

    def config(self, args):
        return dict(src_vocab=len(self.source), tgt_vocab=len(self.target), max_len=self.most + 1,  # EOS, or BOS
                    **model_sizes(args))

    def evaluate(self, model, device):
        """The teacher-forced loss; the share of sources for which greedy decoding generates exactly the target."""
        answers = self.answers(model, [src for src, _ in self.valid])
        hits = sum(answer == self.expected(example) for answer, example in zip(answers, self.valid))
        return {"loss": super().evaluate(model, device)["loss"], "accuracy": hits / len(self.valid)}


class Translate(Seq2Seq):
    """Sentences in one language to sentences in another."""

    columns = ("source",), ("target",)
    sides = "source", "target"
    metric = "teacher-forced accuracy"
    data_recipe = dict(epochs=15, steps=None, batch_size=1500, lr=3e-3, warmup=200, dropout=0.15, layers=3,
                       d_model=128, heads=4, d_ff=256, norm="pre")
    label_smoothing = 0.1
    in_tokens = True

    def encode(self, text):
        return self.source.encode(self.tokenize(text)) + [EOS]

    def encode_pairs(self, pairs, path, most=128):
        kept = [(self.source.encode(source) + [EOS], [BOS, *self.target.encode(target), EOS])
                for source, target in pairs if max(len(source), len(target)) <= most]
        if not kept:
            raise ValueError(f"{path}: every pair has more than {most} tokens")
        if len(kept) < len(pairs):
            print_notice(f"{path}: {len(pairs) - len(kept):,} pairs with more than {most} tokens on a side left out")
        return kept

    def config(self, args):
        longest = max(max(len(src), len(tgt) - 1) for src, tgt in self.train + self.valid)
        return dict(src_vocab=len(self.source), tgt_vocab=len(self.target), max_len=longest, **model_sizes(args))

    def build(self, config):
        """The target's embedding and the generator are one matrix (paper 3.4): both encode how similar words are."""
        model = make_model(**config)
        model.generator.weight = model.tgt_embed[0].embedding.weight
        return model

    def score(self, metrics):
        return (-metrics["loss"],)


TASKS = {"sentiment": Sentiment, "copy": Copy, "translate": Translate}


def model_sizes(args):
    return dict(d_model=args.d_model, num_heads=args.heads, num_layers=args.layers, d_ff=args.d_ff,
                dropout=args.dropout, norm_first=args.norm == "pre")


# ---------------------------------------------------------------------------------------------------- text and files

SPECIAL = ["<pad>", "<unk>", "<bos>", "<eos>"]  # the tokens with the ids PAD, UNK, BOS, EOS
# Han, kana and full-width signs. Not Hangul: Korean has spaces between its words.
CJK = "\u3001-\u312f\u3190-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff01-\uff9f\U00020000-\U0003ffff"
LETTER = rf"[^\W{CJK}]"
NO_SPACE = re.compile(rf"(?<=\W) | (?=\W)|(?<=[{CJK}]) (?=[\d{CJK}])|(?<=\d) (?=[{CJK}])")


@functools.lru_cache(maxsize=None)
def token_pattern(latin):
    """A regular expression of a token with the signs that are joined to it: marks, joiners, soft hyphens, skin tones,
    tags. latin: for texts below U+0300, which have no marks; it is twice as fast."""
    marks = [] if latin else [i for i in range(0x300, 0x1f000) if unicodedata.category(chr(i))[0] == "M"]
    runs = [[i for _, i in run] for _, run in itertools.groupby(enumerate(marks), lambda pair: pair[1] - pair[0])]
    joined = "\u00ad\u200c\u200d\U0001f3fb-\U0001f3ff\U000e0020-\U000e01ef"
    joined += "".join(f"{chr(run[0])}-{chr(run[-1])}" for run in runs)
    character = rf"[{CJK}][\u0300-\u036f\u3099\u309a\ufe00-\ufe0f\U000e0100-\U000e01ef]*"  # few: all would be slow
    letter = r"\w" if latin else LETTER
    word = rf"{letter}+(?:[{joined}]+{letter}*)*"
    flag, sign = r"[\U0001f1e6-\U0001f1ff]{2}", rf"[^\w\s](?:\u200d[^\w\s]|[{joined}])*"
    return re.compile(rf"{character}|{word}(?:['-]{word})*|'(?:s|m|d|t|re|ve|ll)\b|{flag}|{sign}")


def tokenize(text):
    """The tokens of a text in lower case: words with their marks and their inner apostrophes and hyphens, each Chinese
    or Japanese character, each other sign. A detached English ending ("it 's") stays one token."""
    text = unicodedata.normalize("NFC", text).lower()
    if "’" in text:
        text = re.sub(rf"’(?={LETTER})", "'", text)
    pattern = token_pattern(latin=max(text, default="") < "\u0300")
    return [sys.intern(token) for token in pattern.findall(text)]  # one copy of each word in memory


def join_tokens(tokens):
    """Tokens as a line, with spaces between them; in a Chinese or Japanese line only between words of letters."""
    line = " ".join(tokens)
    return NO_SPACE.sub("", line) if re.search(f"[{CJK}]", line) else line


def shorten(text, most=40):
    """The text, cut for a message."""
    return text if len(text) <= most else f"{text[:most - 1]}…"


def make_vocab(texts):
    """The special tokens, then those that occur at least twice in the tokenized texts, most frequent first."""
    counts = Counter(itertools.chain.from_iterable(texts))
    return SPECIAL + [token for token, count in counts.most_common() if count > 1]


class Vocab:
    """Tokens to ids and back; a token it does not have is UNK."""

    def __init__(self, tokens):
        self.tokens = tokens
        self.ids = {token: i for i, token in enumerate(tokens)}

    def __len__(self):
        return len(self.tokens)

    def encode(self, tokens):
        return [self.ids.get(token, UNK) for token in tokens]

    def decode(self, ids):
        """The tokens of one row of ids, without PAD and EOS."""
        return [self.tokens[i] for i in ids if i not in (PAD, EOS)]


def count_unknown(ids):
    """How many of a text's ids are UNK, and how many are tokens of the text."""
    return sum(i == UNK for i in ids), sum(i not in (PAD, BOS, EOS) for i in ids)


def report_unknown(unknown, words):
    if unknown:
        print_notice(f"{unknown:,} of {words:,} words are unknown to this model")


def pad(rows):
    """Lists of ids -> (batch, longest), filled up with PAD."""
    longest = max(map(len, rows))
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])  # a tensor a row would cost much more


def read_rows(path, **dialect):
    """(line number, cells) of the rows of a .csv or .tsv that are not empty."""
    csv.field_size_limit(1_000_000)
    with open(path, encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True, **dialect)
        try:
            for count, row in enumerate(reader, start=1):
                if count % 50_000 == 0:
                    print_notice(f"{path}: {count:,} lines read")
                if any(cell.strip() for cell in row):
                    yield reader.line_num, row
        except (UnicodeDecodeError, csv.Error) as error:  # bytes are decoded some lines ahead
            raise ValueError(f"{path}, near line {reader.line_num or 1}: {error}") from None


def read_pairs(path, task):
    """The lines of a task's data file as (tokens, tokens), or (tokens, label); those with an empty side are left out.
    A .csv has a header that names the two columns, a .tsv has two columns or such a header."""
    if task.columns is None:
        raise ValueError(f"{path}: {type(task).__name__} draws its examples and reads no file")
    is_csv = str(path).lower().endswith(".csv")
    sign, dialect = (",", {}) if is_csv else ("<TAB>", dict(delimiter="\t", quoting=csv.QUOTE_NONE))
    rows = read_rows(path, **dialect)
    expected = [names[0] for names in task.columns]
    line, first = next(rows, (1, expected))
    header = [cell.strip().lower() for cell in first]
    where = [next((header.index(name) for name in names if name in header), None) for names in task.columns]
    if None not in where:
        expected = header
    elif is_csv:
        raise ValueError(f"{path}: the first line names no column {' or '.join(task.columns[where.index(None)])}; "
                         f"columns are separated by commas, and it reads: {shorten(','.join(header))!r}")
    else:
        where, rows = [0, 1], itertools.chain([(line, first)], rows)
    pairs, left_out = [], 0
    for line, row in rows:
        if len(row) != len(expected):
            raise ValueError(f"{path}, line {line}: {len(row)} column{'s' * (len(row) > 1)}, "
                             f"expected {len(expected)}: {shorten(sign.join(expected))}")
        first, second = (row[i].strip() for i in where)
        if first and second:
            pairs.append((tuple(tokenize(first)), " ".join(second.split()) if task.labelled else tokenize(second)))
        else:
            left_out += 1
    if not pairs:
        raise ValueError(f"{path}: no line with text in it")
    if left_out:
        print_notice(f"{path}: {left_out:,} lines with an empty column left out")
    return pairs


def hold_out(pairs, seed, labelled):
    """Training pairs and validation pairs: a seeded tenth, at least one and at most 2,000 unless equal texts are more.
    Equal texts stay on one side; labelled, one text of each label stays in training."""
    counts = Counter(text for text, _ in pairs)
    in_training = set({label: text for text, label in pairs}.values()) if labelled else set()
    candidates = [text for text in counts if text not in in_training]
    random.Random(seed).shuffle(candidates)
    size = max(min(2000, len(pairs) // 10), min(map(counts.get, candidates), default=0))  # one text at least
    held_out, lines = set(), 0
    for text in candidates:
        if lines + counts[text] <= size:
            held_out.add(text)
            lines += counts[text]
    return [pair for pair in pairs if pair[0] not in held_out], [pair for pair in pairs if pair[0] in held_out]


def read_split(args, task):
    """Training pairs and validation pairs: the toy's, those of args.data and args.valid, or of args.data alone."""
    if not args.data:
        return toy_remarks()
    pairs = read_pairs(args.data, task)
    counts = Counter(label for _, label in pairs) if task.labelled else {}
    if task.labelled and not 2 <= len(counts) <= max(10, len(pairs) / 2):
        raise ValueError(f"{args.data}: {len(counts):,} different labels in {len(pairs):,} lines, expected 2 to "
                         f"{max(10, len(pairs) // 2):,}; are text and label swapped?")
    train, valid = (pairs, read_pairs(args.valid, task)) if args.valid else hold_out(pairs, args.seed, task.labelled)
    if not train or not valid:
        raise ValueError(f"{args.data}: too few different texts to hold some out; name another file with --valid")
    texts = {text for text, _ in train}
    print(f"{args.data}: {len(train):,} lines for training; {len(valid):,} of {args.valid or 'the same file'} for "
          f"validation, {sum(text in texts for text, _ in valid):,} of them also in the training set")
    if counts:
        labels = ", ".join(f"{shorten(label)} {count:,}" for label, count in counts.most_common(10))
        print(f"labels: {labels}{f', {len(counts) - 10:,} more' if len(counts) > 10 else ''}")
    return train, valid


# ------------------------------------------------------------------------------ checkpoints, device, ranks and seeds


CHECKPOINT = {"task", "config", "vocab", "seed", "step", "history", "metrics", "model"}  # of a complete run


def default_path(name):
    return Path("checkpoints") / f"{name}.pt"


def part_path(path):
    """Where a checkpoint is written before it takes its name; if path is a link, beside the file it points to."""
    return Path(f"{os.path.realpath(path)}.{os.getpid()}.part")


def save_checkpoint(path, checkpoint):
    """Write a dict of tensors, numbers, strings, lists and dicts; a kill leaves the old file or the new one."""
    if rank_and_ranks()[0] > 0:
        return  # under torchrun one process writes
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    try:
        with open(part_path(path), "wb") as file:
            file.write(buffer.getbuffer())
            os.fsync(file.fileno())  # else a power cut could leave an empty file under the name
        os.replace(part_path(path), os.path.realpath(path))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # a full disk names no file
    finally:
        part_path(path).unlink(missing_ok=True)


def load_checkpoint(path, device):
    """The task, the model in evaluation mode and the saved dict. ValueError if the file is not a checkpoint."""
    file = io.BytesIO(Path(path).read_bytes())  # an OSError here is not the content's fault
    try:
        checkpoint = torch.load(file, map_location=device, weights_only=True)
        if checkpoint["task"] not in TASKS:
            raise ValueError(f"the task {checkpoint['task']!r} is unknown")
        if not CHECKPOINT <= checkpoint.keys():
            raise ValueError("a key is missing")
        task = TASKS[checkpoint["task"]](checkpoint["vocab"])
        model = task.build(checkpoint["config"])
        model.load_state_dict(checkpoint["model"])
    except Exception as error:  # torch.load refuses in many ways; repr is always one line
        raise ValueError(f"{path}: not a checkpoint that this train.py wrote: {shorten(repr(error), 120)}") from None
    return task, model.to(device).eval(), checkpoint


def load_or_train(name, path, device):
    """load_checkpoint(path) or, where path is None, the task's default checkpoint, trained first if it is missing."""
    if path is None:
        path = default_path(name)
        if not path.exists():
            print_notice(f"{path} is not there yet; training it first")
            with contextlib.redirect_stdout(sys.stderr):
                if main(["--task", name, "--device", str(device)]) != 0:
                    sys.exit(1)
    return load_checkpoint(path, device)


def pick_device(name):
    """The torch.device of that name; auto is CUDA where there is one, else the CPU, and reported on stderr."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        print_notice(f"device: {name}")
    if name.startswith("cuda") and rank_and_ranks()[1] > 1:  # torchrun's processes have a GPU each
        processes, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if name != "cuda" or processes > gpus:
            raise ValueError(f"--device {name}: {processes} processes need a GPU each, of {gpus}; try cuda or cpu")
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except Exception as error:  # what torch raises here differs by device and version
        raise ValueError(f"--device {name} cannot be used here; try --device cpu: {shorten(repr(error), 80)}") from None
    return device


def rank_and_ranks():
    """Which of how many processes this is, as torchrun tells; (0, 1) without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 0, 1  # RANK alone may be somebody else's
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def sum_over_ranks(x):
    """The sum of a tensor over all processes."""
    if rank_and_ranks()[1] > 1:
        torch.distributed.all_reduce(x)
    return x


def mixed_seed(*numbers):
    """One seed derived from several numbers. Not their sum: round 2 of seed 1 must differ from round 1 of seed 2."""
    return random.Random(str(numbers)).getrandbits(63)


def set_seed(*numbers):
    """Seed the global random number generators (article 1, 6.5: set_seed(seed=42))."""
    random.seed(mixed_seed(*numbers))
    torch.manual_seed(mixed_seed(*numbers))


def print_notice(message):
    """A line on stderr, if it is not closed; under torchrun one process prints it."""
    if rank_and_ranks()[0] == 0 and sys.stderr is not None:
        print(message, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------- the options and main


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line; with --device, which every script has."""

    def __init__(self, script, doc):
        super().__init__(prog=script, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--device", default="auto",
                          help="auto (CUDA if there), cpu, cuda, cuda:1, ... (default: auto)")

    def error(self, message):
        print_notice(f"{self.prog}: error: {message} (see --help)")
        sys.exit(2)


def file_path(text):
    """An argparse type: the name of a file or folder; ~ is the home directory."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    return os.path.expanduser(text)


def number(kind, low, below=10 ** 9):
    """An argparse type: an int or a float with low <= it < below."""
    def parse(text):
        with contextlib.suppress(ValueError):
            if low <= kind(text) < below:
                return kind(text)
        raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not {'a whole' if kind is int else 'a'} number "
                                         f"of at least {low} and below {below}")
    return parse


def make_parser():
    recipes = {name: task.recipe for name, task in TASKS.items() if task.recipe}
    recipes.update({f"{name} --data": task.data_recipe for name, task in TASKS.items() if task.data_recipe})
    parser = Parser("train.py", __doc__)
    add = parser.add_argument
    add("--task", choices=["all", *TASKS], default="all", help="all is sentiment and copy (default: all)")
    add("--data", metavar="FILE", type=file_path, help="train on this file (default: the toy)")
    add("--valid", metavar="FILE", type=file_path, help="the validation set (default: a tenth of --data)")
    add("--checkpoint", metavar="PATH", type=file_path,
        help="a .pt file for the best weights (default: checkpoints/<task, or the name of the data file>.pt)")
    add("--resume", action="store_true", help="continue the interrupted run in --checkpoint (default: off)")
    whole = dict(type=number(int, 1), metavar="N")
    for name, form, text in [
            ("--epochs", whole, "passes over the training set"),
            ("--steps", whole, "training steps in all, in place of --epochs"),
            ("--batch-size", whole, "examples in a batch; translate: source or target tokens"),
            ("--lr", dict(type=number(float, 1e-9, 10), metavar="RATE"), "the peak learning rate"),
            ("--warmup", dict(type=number(int, 0), metavar="STEPS"),
             "steps up to the peak; then half a cosine down to 0"),
            ("--dropout", dict(type=number(float, 0, 1), metavar="RATE"), "in every part of the model"),
            ("--layers", whole, "on each side"),
            ("--d-model", whole, "width of a token's vector"),
            ("--heads", whole, "of each attention"),
            ("--d-ff", whole, "width of the feed-forward"),
            ("--norm", dict(choices=["pre", "post"]), "layer norm before or after each sublayer")]:
        key = name[2:].replace("-", "_")
        values = (f"{task} {recipe[key]}" for task, recipe in recipes.items() if recipe[key] is not None)
        add(name, help=f"{text} (default: {', '.join(values)})", **form)
    add("--seed", metavar="N", type=number(int, 0, 2 ** 63), default=42,
        help="the same seed, the same weights (default: 42)")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="bf16: with autocast (default: fp32)")
    add("--fused", action="store_true",
        help="PyTorch's kernels for attention and norm instead of the formulas (default: off)")
    return parser


def with_defaults(argv, defaults):
    """The options: those in argv, the others from defaults."""
    return make_parser().parse_args(argv, argparse.Namespace(**defaults))


def saved_options(args):
    """The options that --resume must not change."""
    return {key: value for key, value in vars(args).items() if key not in ("device", "checkpoint", "resume")}


def prepare(name, typed, argv):
    """Check the options, the data and the files of a task before any training. Returns what train takes, but for the
    device, or None if the run that is to be resumed is complete. typed: the options in argv without the defaults."""
    path = Path(typed.checkpoint or default_path(Path(typed.data).stem if typed.data else name))
    if path.suffix != ".pt":
        raise ValueError(f"--checkpoint {path}: the name must end in .pt")
    if typed.data and path in [default_path(toy) for toy, task in TASKS.items() if task.recipe]:
        raise ValueError(f"{path} is the place of a toy; choose another one with --checkpoint")
    path.parent.mkdir(parents=True, exist_ok=True)
    part_path(path).touch()
    part_path(path).unlink()
    saved = load_checkpoint(path, "cpu")[2] if path.exists() else {}  # never replaces a file of another kind
    if typed.resume and saved.get("task") != name:
        raise ValueError(f"nothing to resume: {path} holds no {name} run")
    if typed.resume and "run" not in saved:
        print(f"{path}: the run is complete, {saved['history'][-1]['step']:,} steps; omit --resume to start a new one")
        return None
    if "run" in saved and not typed.resume:
        print_notice(f"{path} holds an unfinished run (step {saved['run']['step']:,}), which this one replaces after "
                     f"its first round; to continue it instead: {resume_command(saved['task'], path)}")

    defaults = saved["options"] if typed.resume else TASKS[name].data_recipe if typed.data else TASKS[name].recipe
    if defaults is None:
        raise ValueError(f"--task {name} {'takes no --data' if typed.data else 'needs --data FILE'}")
    args = with_defaults(argv, defaults)
    args.task = name
    if typed.epochs and args.steps:
        raise ValueError(f"--epochs {typed.epochs}: this run counts steps ({args.steps}); use --steps alone")
    for key, value in saved_options(args).items() if typed.resume else ():
        if value != saved["options"].get(key, value):  # an option may be newer than that run
            raise ValueError(f"--{key.replace('_', '-')} {value}: the interrupted run has {saved['options'][key]}")
    task = TASKS[name].read(args)
    config = task.config(args)
    set_seed(args.seed)
    model = task.build(config)
    if typed.resume and (task.vocab, config) != (saved["vocab"], saved["config"]):
        raise ValueError(f"{args.data} is not what the interrupted run was trained on: its words or lengths differ")
    if saved and saved["vocab"] != task.vocab:
        print_notice(f"{path} holds a model of other data, which this run replaces after its first round")
    if not typed.resume:
        return task, model, args, path, None, None
    return task, model, args, path, {key: saved[key] for key in CHECKPOINT}, saved["run"]


def resume_command(name, path):
    return f"python train.py --task {name} --checkpoint {shlex.quote(str(path))} --resume"


def main(argv=None):
    """Returns the exit status."""
    rank, ranks = rank_and_ranks()
    if rank > 0:
        sys.stdout = None  # only one process prints
    parser = make_parser()
    typed = parser.parse_args(argv)
    if typed.task == "all" and (typed.data or typed.checkpoint or typed.resume):
        parser.error("--data, --checkpoint and --resume need a single --task")
    if typed.valid and not typed.data and not typed.resume:
        parser.error("--valid needs --data, the file to train on")
    names = ["sentiment", "copy"] if typed.task == "all" else [typed.task]
    try:
        device = pick_device(typed.device)
        jobs = [prepare(name, typed, argv) for name in names]
    except (ValueError, RuntimeError) as error:  # a RuntimeError: there is no memory for the model
        parser.error(str(error).splitlines()[0])

    if ranks > 1:
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    threads, status = torch.get_num_threads(), 0
    for task, model, args, path, best, state in filter(None, jobs):
        if not args.data and args.d_model <= 64 and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # at the size of the toys a second thread waits more than it works
        try:
            status = status or train(task, model, args, device, path, best, state)
        except KeyboardInterrupt:
            saved = load_checkpoint(path, "cpu")[2] if path.exists() else {}
            where = " in the first round; nothing of it is saved"
            if saved.get("options") == saved_options(args):
                where = f" after step {saved['run']['step']:,}; to continue: {resume_command(args.task, path)}"
            raise KeyboardInterrupt(where) from None
        finally:
            torch.set_num_threads(threads)
    if ranks > 1:
        torch.distributed.destroy_process_group()
    return status


def run(main, argv=None):
    """Call a script's main and exit with its status: the one place that handles full disks, closed pipes, legacy
    encodings and streams that are not files."""
    script = Path(main.__code__.co_filename).name
    for stream in sys.stdout, sys.stderr:
        if hasattr(stream, "reconfigure"):  # a notebook's is another kind, a closed one is None
            utf8 = not stream.isatty() and "PYTHONIOENCODING" not in os.environ  # what was read is UTF-8, too
            stream.reconfigure(encoding="utf-8" if utf8 else None, errors="backslashreplace")
    try:
        status = main(argv)
        print(end="", flush=True)
    except KeyboardInterrupt as error:
        print_notice(f"\n{script}: interrupted{error}")
        status = 130
    except OSError as error:
        status = 141 if isinstance(error, BrokenPipeError) else 2
        if status == 2:
            print_notice(f"{script}: error: {error.filename or 'stdin or stdout'}: {error.strerror}")
        if error.filename is None:
            with contextlib.suppress(OSError, AttributeError):  # else the exit would try to flush it again
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


if __name__ == "__main__":
    run(main)
