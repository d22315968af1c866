"""
Train the Transformer on a task; the best weights go to checkpoints/<task>.pt.

    python train.py                                                          both toys below, in seconds
    python train.py --task sentiment                                         is a film remark positive or negative?
    python train.py --task copy                                              3 1 4 -> 3 1 4: say a sequence again
    python train.py --task sentiment --data reviews.tsv --valid more.tsv     lines of text<TAB>label, or a .csv
    python train.py --task translate --data pairs.tsv --valid more.tsv       lines of source<TAB>target, or a .csv

A .csv has a header with columns named text, review or sentence and label, or source and target. Without --valid, a
tenth of the lines is held out. Ctrl-C saves; the same command with --resume goes on as if nothing had happened.

Reading order: tokenize, a task (Sentiment is the simplest), train, main. In train, skip what has to do with ranks and
with resuming at first. To add a task of your own, write a class like Sentiment and name it in TASKS.
"""
import argparse
import contextlib
import csv
import io
import itertools
import math
import os
import random
import re
import shutil
import signal
import sys
import time
import unicodedata
import zipfile
import zlib
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from attention import make_padding_mask, make_target_mask
from model import BOS, EOS, PAD, UNK, TransformerClassifier, evaluating, greedy_decode, make_model

SPECIAL = ["<pad>", "<unk>", "<bos>", "<eos>"]  # the tokens with the ids PAD, UNK, BOS, EOS


# ---------------------------------------------------------------------------------------------------------- text

CJK = "\u3005-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
WORD = rf"[^\W{CJK}]+"
TOKEN = re.compile(rf"{WORD}(?:['-]{WORD})*|'(?:s|m|d|t|re|ve|ll)\b|[{CJK}]|[^\w\s]")


def tokenize(text):
    """The tokens of a text: words in lower case with their inner apostrophes and hyphens, each other sign apart.

    A Chinese, Japanese or Korean character is a token. An ending that stands apart already ("it 's") stays whole.
    """
    return TOKEN.findall(unicodedata.normalize("NFC", text).lower().replace("’", "'"))


def join_tokens(tokens):
    """Tokens as a line: spaces between them, but for Chinese, Japanese and Korean."""
    return re.sub(rf"(?<=[{CJK}]) (?=[{CJK}])", "", " ".join(tokens))


def make_vocab(sentences, min_count):
    """The special tokens, then those that the tokenized sentences hold at least min_count times, frequent first."""
    counts = Counter(itertools.chain.from_iterable(sentences))
    return SPECIAL + [token for token, count in counts.most_common() if count >= min_count]


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


def read_pairs(path, columns):
    """A file's lines as pairs of strings, and a checksum of the file; lines without text are left out.

    path is a .tsv of two columns, or a .csv with a header; columns are the names that each may have there. ValueError
    for a file that cannot be understood, with the line's number.
    """
    data = Path(path).read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x})") from None
    if str(path).lower().endswith(".csv"):
        rows = read_csv(path, text, columns)
    else:
        rows = [(i, line.split("\t")) for i, line in enumerate(io.StringIO(text), start=1) if line.strip()]
        for i, cells in rows:
            if len(cells) != 2:
                raise ValueError(f"{path}, line {i}: {len(cells) - 1} tabs, expected one: "
                                 f"{columns[0][0]}<TAB>{columns[1][0]}")
        names = [cell.strip().lower() for cell in rows[0][1]] if rows else []
        if rows and names[0] in columns[0] and names[1] in columns[1]:
            del rows[0]  # a header
    pairs = [(first.strip(), second.strip()) for _, (first, second) in rows]
    pairs = [pair for pair in pairs if all(pair)]
    if not pairs:
        raise ValueError(f"{path}: no line with text in it")
    if len(pairs) < len(rows):
        print(f"{path}: {len(rows) - len(pairs)} lines with an empty side left out")
    return pairs, zlib.crc32(data)


def read_csv(path, text, columns):
    """(line number, (first, second)) for each row of a csv with a header."""
    csv.field_size_limit(2 ** 31 - 1)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [name.strip().lower() for name in next(reader, [])]
        where = [next((header.index(name) for name in names if name in header), None) for names in columns]
        if None in where:
            raise ValueError(f"{path}: the first line names no column {' or '.join(columns[where.index(None)])}; "
                             f"it reads: {', '.join(header)[:200]!r}")
        rows = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
    for i, row in rows:
        if len(row) != len(header):
            raise ValueError(f"{path}, line {i}: {len(row)} columns, the header has {len(header)}")
    return [(i, [row[j] for j in where]) for i, row in rows]


def hold_out(pairs, seed):
    """A seeded tenth of the pairs, at least one, apart: training pairs, held-out pairs."""
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed)).tolist()
    size = max(1, len(pairs) // 10)
    return [pairs[i] for i in sorted(order[size:])], [pairs[i] for i in sorted(order[:size])]


def pad(rows):
    """Lists of ids -> (batch, longest), filled up with PAD."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)


# ---------------------------------------------------------------------------------------------------------- tasks


class Task:
    """What the training loop asks of a task. A batch is a tuple of tensors, ids as (batch, len). Beside what stands
    here a task has

        recipe                     the defaults of its options, with the keys of Sentiment.recipe
        measure                    what its accuracy counts
        __init__(vocab)            {name: list of strings}, kept as .vocab and saved in the checkpoint
        read(args)                 class method: the task with its data, .valid and, for batches, .train
        config(args)               the numbers that build the model, saved beside its weights; those called vocab_size,
                                   num_classes, src_vocab and tgt_vocab are the lengths of the lists in .vocab
        build(config)              the model
        batch(examples)            some of .train or .valid as a batch
        predict(model, batch)      logits (targets, classes); what is wanted (targets), -100 where nothing is
        samples(model, turn)       lines that show what the model does with held-out data
    """

    label_smoothing = 0.0
    checksum = 0       # of the data files
    threads = 1        # at small sizes a second thread waits more than it works; None: all
    in_tokens = False  # --batch-size counts tokens, not examples

    def batches(self, args, generator):
        """The batches of one round of training; the held-out data is looked at after each round."""
        return map(self.batch, length_batches(self.train, args.batch_size, generator, self.in_tokens))

    def batches_per_round(self, args):
        return len(length_batches(self.train, args.batch_size, None, self.in_tokens))

    def evaluate(self, model, device):
        """{"loss", "accuracy"} on the held-out data."""
        batches = length_batches(self.valid, 2500 if self.in_tokens else 256, None, self.in_tokens)
        return evaluate_batches(self, model, map(self.batch, batches), device)

    def score(self, metrics):
        """A tuple; the weights with the largest are kept."""
        return metrics["accuracy"], -metrics["loss"]


class Sentiment(Task):
    """Read a film remark, say what its writer thinks (article 1, 4.6)."""

    columns = ("text", "review", "sentence"), ("label",)
    measure = "accuracy"
    recipe = dict(epochs=5, steps=None, batch_size=32, lr=6e-3, warmup=50, dropout=0.0, layers=2, d_model=32, heads=4,
                  d_ff=64, norm="post")
    data_recipe = dict(recipe, epochs=8, batch_size=64, lr=1e-3, warmup=100, dropout=0.5, d_model=128, d_ff=128,
                       norm="pre")
    longest = 256  # tokens of a text that are read; the rest is cut off

    def __init__(self, vocab):
        self.vocab = vocab
        self.words, self.labels = Vocab(vocab["words"]), vocab["labels"]

    @classmethod
    def read(cls, args):
        train, valid, checksum = read_split(args, cls.columns) if args.data else (*toy_remarks(), 0)
        labels = sorted({label for _, label in train})
        if len(labels) < 2:
            raise ValueError(f"{args.data}: all training lines have the label {labels[0]!r}; two are needed")
        for _, label in valid:
            if label not in labels:
                raise ValueError(f"{args.valid or args.data}: no training line has the held-out label {label!r}")
        train, valid = ([(tokenize(text), labels.index(label)) for text, label in pairs] for pairs in (train, valid))
        task = cls({"words": make_vocab((tokens for tokens, _ in train), min_count=2), "labels": labels})
        task.train, task.valid = ([(task.words.encode(tokens[:cls.longest]), label) for tokens, label in examples]
                                  for examples in (train, valid))
        task.checksum = checksum
        cut = sum(len(tokens) > cls.longest for tokens, _ in train + valid)
        if cut:
            print(f"{cut} texts have more than {cls.longest} tokens; only their first {cls.longest} are read")
        return task

    def encode(self, text):
        return self.words.encode(tokenize(text))

    def config(self, args):
        longest = max(len(ids) for ids, _ in self.train + self.valid)
        return dict(vocab_size=len(self.words), num_classes=len(self.labels), max_len=longest, **model_sizes(args))

    def build(self, config):
        return TransformerClassifier(**config)

    def batch(self, examples):
        """Token ids (batch, len), labels (batch)."""
        ids, labels = zip(*examples)
        return pad(ids), torch.tensor(labels)

    def predict(self, model, batch):
        tokens, labels = batch
        return model(tokens, make_padding_mask(tokens))[0], labels

    def samples(self, model, turn):
        ids, _ = self.valid[turn % len(self.valid)]
        tokens = torch.tensor([ids], device=next(model.parameters()).device)
        with evaluating(model):
            logits, _ = model(tokens, make_padding_mask(tokens))
        return [f"{join_tokens(self.words.decode(ids))}  ->  {self.labels[logits.argmax()]}"]


def toy_remarks():
    """All remarks of a tiny grammar as (text, label), a fifth of them held out: training pairs, held-out pairs."""
    subjects = "the film", "this story", "the acting", "the ending"
    verbs = "is", "was", "felt"
    adverbs = "", "very", "really", "so", "truly", "quite", "not", "never", "not very"
    positive = "good", "great", "funny", "moving", "charming"
    negative = "bad", "awful", "boring", "dull", "weak"
    remarks = []
    for subject, verb, adverb, adjective in itertools.product(subjects, verbs, adverbs, positive + negative):
        liked = (adjective in positive) != adverb.startswith(("not", "never"))  # "not bad" is praise
        text = f"{subject} {verb} {adverb} {adjective}".replace("  ", " ")
        remarks.append((text, "positive" if liked else "negative"))
    random.Random(0).shuffle(remarks)
    return remarks[len(remarks) // 5:], remarks[:len(remarks) // 5]


class Seq2Seq(Task):
    """What copying and translating share. A batch is source ids ... EOS and target ids BOS ... EOS, each (batch, len).

    The source has its EOS too: that is where the decoder looks when it is time to stop.
    """

    def build(self, config):
        return make_model(**config)

    def predict(self, model, batch):
        src, tgt = batch
        given, wanted = shift(tgt)
        logits = model(src, given, make_padding_mask(src), make_target_mask(given))
        return logits.flatten(0, 1), wanted.masked_fill(wanted == PAD, -100).flatten()

    def source_ids(self, model, text):
        """A line as ids; ValueError if the model cannot read it."""
        ids, most = self.encode(text), model.src_embed[1].max_len
        if not 1 < len(ids) <= most:
            raise ValueError(f"{len(ids) - 1} tokens; this model reads 1 to {most - 1}")
        return ids

    def say(self, model, rows):
        """Rows of source ids -> for each, the list of tokens that greedy decoding makes of it."""
        device = next(model.parameters()).device
        said = greedy_decode(model, pad(rows).to(device), model.tgt_embed[1].max_len)
        return [self.target.decode(row) for row in said.tolist()]

    def shown(self, model, rows):
        return [f"{join_tokens(self.source.decode(row))}  ->  {join_tokens(tokens)}"
                for row, tokens in zip(rows, self.say(model, rows))]


def shift(tgt):
    """BOS a b c EOS -> what the decoder is given, BOS a b c, and what is wanted of it at each place, a b c EOS."""
    return tgt[:, :-1], tgt[:, 1:]


class Copy(Seq2Seq):
    """Say a sequence of symbols again. Trivial to us; to the model it is the whole of the encoder-decoder: find the
    place in the source by position, hand over what stands there, stop after the last."""

    measure = "exact match"
    recipe = dict(epochs=None, steps=250, batch_size=64, lr=8e-3, warmup=20, dropout=0.0, layers=1, d_model=64,
                  heads=2, d_ff=64, norm="pre")
    most = 10  # symbols in a sequence

    def __init__(self, vocab):
        self.vocab = vocab
        self.source = self.target = Vocab(vocab["symbols"])
        self.valid = self.draw(1000, torch.Generator().manual_seed(0), held_out=True)

    @classmethod
    def read(cls, args):
        return cls({"symbols": SPECIAL + [str(i) for i in range(1, 11)]})

    def encode(self, text):
        symbols, known = text.split(), self.source.tokens[len(SPECIAL):]
        for symbol in symbols:
            if symbol not in known:
                raise ValueError(f"{symbol!r} is not a symbol; the symbols are {' '.join(known)}")
        return self.source.encode(symbols) + [EOS]

    def config(self, args):
        return dict(src_vocab=len(self.source), tgt_vocab=len(self.target), max_len=self.most + 1,  # EOS, or BOS
                    **model_sizes(args))

    def draw(self, size, generator, held_out=False):
        """Random sequences -> source (size, 11), target (size, 12). Held out are those of two or more symbols whose
        sum is a multiple of 10. The last symbol is changed so that held-out rows have such a sum and training rows do
        not. Training takes the longer of two random lengths, since only long sequences have late places to learn, and
        replaces three symbols in ten by the one before: what stands twice can be told apart by its place alone."""
        shortest, draws = (2, 1) if held_out else (1, 2)
        length = torch.randint(shortest, self.most + 1, (size, draws), generator=generator).amax(dim=1, keepdim=True)
        symbols = torch.randint(1, 11, (size, self.most), generator=generator)
        if not held_out:
            symbols = symbols.where(torch.rand(size, self.most, generator=generator) > 0.3, symbols.roll(1, dims=1))
        place = torch.arange(self.most)
        symbols = symbols * (place < length)
        rest = symbols.sum(dim=1, keepdim=True) % 10
        if held_out:
            last = (symbols - rest - 1) % 10 + 1  # makes the sum a multiple of 10
        else:
            last = torch.where(rest == 0, symbols % 10 + 1, symbols)  # where it would be one, the next symbol
        symbols = torch.where((place == length - 1) & (length > 1), last, symbols)

        ids = torch.where(place < length, symbols + len(SPECIAL) - 1, PAD)
        src = F.pad(ids, (0, 1), value=PAD).scatter(1, length, EOS)
        return src, F.pad(src, (1, 0), value=BOS)

    def batches(self, args, generator):
        return (self.draw(args.batch_size, generator) for _ in range(self.batches_per_round(args)))

    def batches_per_round(self, args):
        return 50  # its data has no end, so a round is what we say

    def evaluate(self, model, device):
        """The loss, and the share of held-out sequences that greedy decoding copies without a mistake."""
        src, tgt = (ids.to(device) for ids in self.valid)
        said = greedy_decode(model, src, self.most + 1)
        said = F.pad(said, (0, self.most + 1 - said.size(1)), value=PAD)
        return {"loss": evaluate_batches(self, model, [(src, tgt)], device)["loss"],
                "accuracy": (said == shift(tgt)[1]).all(dim=1).float().mean().item()}

    def samples(self, model, turn):
        sources, _ = self.valid
        return self.shown(model, [sources[turn % len(sources)].tolist()])


class Translate(Seq2Seq):
    """Sentences in one language to sentences in another."""

    columns = ("source",), ("target",)
    measure = "next-word accuracy"
    recipe = dict(epochs=15, steps=None, batch_size=1500, lr=3e-3, warmup=200, dropout=0.15, layers=3, d_model=128,
                  heads=4, d_ff=256, norm="pre")
    longest = 128  # tokens of a side; longer pairs are left out
    label_smoothing = 0.1
    threads = None
    in_tokens = True

    def __init__(self, vocab):
        self.vocab = vocab
        self.source, self.target = Vocab(vocab["source"]), Vocab(vocab["target"])

    @classmethod
    def read(cls, args):
        if not args.data:
            raise ValueError("--task translate needs --data FILE, lines of source<TAB>target")
        train, valid, checksum = read_split(args, cls.columns)
        sources, targets = zip(*((tokenize(source), tokenize(target)) for source, target in train))
        task = cls({"source": make_vocab(sources, min_count=2), "target": make_vocab(targets, min_count=2)})
        task.train, task.valid = task.encode_pairs(train, args.data), task.encode_pairs(valid, args.valid or args.data)
        task.checksum = checksum
        return task

    def encode(self, text):
        return self.source.encode(tokenize(text)) + [EOS]

    def encode_pairs(self, pairs, path):
        encoded = [(self.encode(source), [BOS, *self.target.encode(tokenize(target)), EOS]) for source, target in pairs]
        kept = [(src, tgt) for src, tgt in encoded if len(src) <= self.longest + 1 and len(tgt) <= self.longest + 2]
        if len(kept) < len(pairs):
            print(f"{path}: {len(pairs) - len(kept)} pairs of more than {self.longest} tokens left out")
        if not kept:
            raise ValueError(f"{path}: every pair has more than {self.longest} tokens")
        return kept

    def config(self, args):
        longest = max(max(len(src), len(tgt) - 1) for src, tgt in self.train + self.valid)
        return dict(src_vocab=len(self.source), tgt_vocab=len(self.target), max_len=longest, **model_sizes(args))

    def build(self, config):
        """The target's embedding and the generator are one matrix (paper 3.4): both say how alike two words are."""
        model = make_model(**config)
        model.generator.weight = model.tgt_embed[0].embedding.weight
        return model

    def batch(self, examples):
        return tuple(pad(side) for side in zip(*examples))

    def score(self, metrics):
        return (-metrics["loss"],)

    def samples(self, model, turn):
        return self.shown(model, [src for src, _ in self.valid[:3]])


TASKS = {"sentiment": Sentiment, "copy": Copy, "translate": Translate}


def read_split(args, columns):
    """The pairs of args.data and args.valid, or of args.data alone: training, held-out, and their checksum."""
    train, checksum = read_pairs(args.data, columns)
    if args.valid:
        valid, other = read_pairs(args.valid, columns)
        return train, valid, checksum ^ other
    if len(train) < 2:
        raise ValueError(f"{args.data}: one line with text; two are needed, to train on and to hold out")
    return (*hold_out(train, args.seed), checksum)


def model_sizes(args):
    return dict(d_model=args.d_model, num_heads=args.heads, num_layers=args.layers, d_ff=args.d_ff,
                dropout=args.dropout, norm_first=args.norm == "pre")


def length_batches(examples, size, generator=None, in_tokens=False):
    """The examples, tuples with lists of ids, in batches of like length, so that little is padding; a list of lists.

    A batch has up to size examples or, in_tokens, up to size tokens of a side with its padding. With a generator,
    equally long examples and the batches are shuffled; the number of batches stays.
    """
    def lengths(example):
        return tuple(len(side) for side in example if isinstance(side, list))

    order = range(len(examples)) if generator is None else torch.randperm(len(examples), generator=generator).tolist()
    batches, longest = [[]], 0
    for example in sorted((examples[i] for i in order), key=lengths):
        longest = max(longest, *lengths(example))
        if batches[-1] and (len(batches[-1]) + 1) * (longest if in_tokens else 1) > size:
            batches.append([])
            longest = max(*lengths(example), 0)
        batches[-1].append(example)
    if generator is not None:
        batches = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
    return batches


def target_loss(logits, wanted, label_smoothing=0.0):
    """The mean cross-entropy over the targets that count; 0, not nan, where none does."""
    loss = F.cross_entropy(logits, wanted, reduction="sum", label_smoothing=label_smoothing)
    return loss / (wanted >= 0).sum().clamp(min=1)  # -100, what cross_entropy ignores, does not count


def evaluate_batches(task, model, batches, device):
    """Loss and accuracy over the batches, each target counted once."""
    loss = targets = hits = 0
    with evaluating(model):
        for batch in batches:
            logits, wanted = task.predict(model, [t.to(device) for t in batch])
            loss += F.cross_entropy(logits, wanted, reduction="sum").item()
            targets += (wanted >= 0).sum().item()
            hits += (logits.argmax(dim=-1) == wanted).sum().item()
    return {"loss": loss / targets, "accuracy": hits / targets}


# ---------------------------------------------------------------------------------------------------- checkpoints


def resume_path(path):
    """checkpoints/copy.pt -> checkpoints/copy.resume.pt"""
    return path.with_name(path.name.removesuffix(".pt") + ".resume.pt")  # with_suffix: one file for run.1 and run.2


RESUMED = {"options", "checksum", "model", "optimizer", "scheduler", "step", "in_round", "history", "best", "generator",
           "random"}


def part_path(path):
    """Where a file is written before it takes its name."""
    return path.with_name(f"{path.name}.{os.getpid()}.part")


def save_checkpoint(path, checkpoint):
    """Write a dict of tensors, numbers, strings, lists and dicts; a kill leaves the old file or the new one."""
    if rank_and_ranks()[0] > 0:
        return  # under torchrun one process writes
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    part = part_path(path)
    try:
        part.write_bytes(buffer.getbuffer())
        os.replace(part, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        part.unlink(missing_ok=True)


def read_checkpoint(path, device):
    """The dict that save_checkpoint wrote, its tensors on the device. ValueError for any other file."""
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()  # torch.load does not compare the checksums
        if damaged is None:
            return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # a file of any content comes here, and torch.load says no in many ways
        if isinstance(error, OSError) and error.filename:
            raise  # it cannot be opened
        raise ValueError(f"{path}: not a checkpoint that train.py wrote ({type(error).__name__})") from None
    raise ValueError(f"{path}: damaged; train again")


def load_checkpoint(path, device):
    """The task, the model in evaluation mode and the dict of checkpoints/<task>.pt. ValueError if it is no such."""
    checkpoint = read_checkpoint(path, device)
    try:
        task = TASKS[checkpoint["task"]](checkpoint["vocab"])
        model = task.build(checkpoint["config"])
        model.load_state_dict(checkpoint["model"])
        [entry["loss"] for entry in checkpoint["history"]], checkpoint["metrics"]["accuracy"], int(checkpoint["seed"])
        words = checkpoint["vocab"].values()
        sizes = {checkpoint["config"].get(key) for key in ("vocab_size", "num_classes", "src_vocab", "tgt_vocab")}
        if {type(word) for word in itertools.chain(*words)} != {str} or {*map(len, words)} != sizes - {None}:
            raise ValueError
    except Exception as error:  # as above
        raise ValueError(f"{path}: not a checkpoint that train.py wrote ({type(error).__name__})") from None
    return task, model.to(device).eval(), checkpoint


# ------------------------------------------------------------------------------------------------------- training


def set_seed(seed=42):
    """The same numbers at every run (article 1, 6.5)."""
    random.seed(seed)
    torch.manual_seed(seed)


def pick_device(name):
    """The torch.device of that name; auto is CUDA where there is one, else the CPU, and says which on stderr."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        print(f"device: {name}", file=sys.stderr)
    if name == "cuda" and rank_and_ranks()[1] > 1:
        name = f"cuda:{os.environ['LOCAL_RANK']}"  # torchrun's processes have a GPU each
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except Exception as error:  # what torch raises here differs by device and version
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"--device {name} cannot be used here; try --device cpu ({reason})") from None
    return device


@contextlib.contextmanager
def signals_noted():
    """A list that Ctrl-C and SIGTERM are put into, instead of ending the program; a second one ends it."""
    noted = []

    def note(number, frame):
        noted.append(number)
        signal.signal(number, before[number])

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def warm_up_and_decay(steps, warmup):
    """A function of the step: the rate rises for warmup steps, then falls along half a cosine to 0."""
    def rate(step):
        if step < warmup:
            return (step + 1) / warmup
        return (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2
    return rate


def random_state(device):
    """What decides the dropout from here on."""
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def set_random_state(state, device):
    torch.set_rng_state(state[0].cpu())
    if device.type == "cuda" and len(state) > 1:
        torch.cuda.set_rng_state(state[1].cpu(), device)


def rank_and_ranks():
    """Which of how many processes this is: what torchrun says, 0 of 1 without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 0, 1  # RANK alone may be somebody else's
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def over_all_ranks(loss, wanted, stop, ranks):
    """The loss to differentiate, the mean loss over all ranks' targets, whether any rank was told to stop.

    DistributedDataParallel averages the ranks' gradients, but they have unequally many targets: each loss is weighted
    by its part of them, so that the average is the gradient of the whole batch's mean.
    """
    if ranks == 1:
        return loss, loss.item(), stop
    targets = (wanted >= 0).sum()
    sums = torch.stack([loss.detach() * targets, targets.float(), torch.full_like(loss.detach(), float(stop))])
    torch.distributed.all_reduce(sums)
    return loss * targets * ranks / sums[1], (sums[0] / sums[1]).item(), sums[2].item() > 0


def train(task, model, args, device, path, resumed=None):
    """Train the model on the task; the best weights go to path. Returns the exit status: 0, 1 if the loss became nan,
    128 + its number if a signal ended it. resumed is what an interrupted run left at resume_path(path).

    Under torchrun each of the processes, the ranks, draws the same batches and takes its own rows of each.
    """
    rank, ranks = rank_and_ranks()
    if task.threads:
        torch.set_num_threads(task.threads)
    set_seed(args.seed + rank)  # decides the dropout
    generator = torch.Generator().manual_seed(args.seed)  # draws the data, on the CPU: the same on every device
    for module in model.to(device).train().modules():
        if hasattr(module, "fused"):
            module.fused = args.fused
    steps = args.steps or args.epochs * task.batches_per_round(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98),
                                  fused=device.type in ("cpu", "cuda"))  # not --fused: the optimizer's own
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_decay(steps, args.warmup))
    step, in_round, history, best = 0, 0, [], None  # in_round: batches of this round behind us
    if resumed:
        model.load_state_dict(resumed["model"])
        optimizer.load_state_dict(resumed["optimizer"])
        scheduler.load_state_dict(resumed["scheduler"])
        step, in_round, history, best = (resumed[key] for key in ("step", "in_round", "history", "best"))
        generator.set_state(resumed["generator"].cpu())
        set_random_state(resumed["random"], device)
    parallel = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    config = task.config(args)

    def save_for_resume(data_state):
        save_checkpoint(resume_path(path), dict(
            options=vars(args), checksum=task.checksum, model=model.state_dict(), optimizer=optimizer.state_dict(),
            scheduler=scheduler.state_dict(), step=step, in_round=in_round, history=history, best=best,
            generator=data_state, random=random_state(device)))

    def lost(what):
        progress.end(f"the {what} at step {step}; try a smaller --lr. "
                     f"{f'The best weights so far are in {path}' if best else 'Nothing is saved'}")
        return 1

    print(f"{args.task}: {sum(p.numel() for p in model.parameters()):,} parameters, {steps} steps"
          + (f", going on after step {step}" if step else ""))
    progress = Progress(args.task, step, steps)
    with signals_noted() as signals:
        while step < steps:
            before_round = generator.get_state()
            for batch in itertools.islice(task.batches(args, generator), in_round, in_round + steps - step):
                with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
                    logits, wanted = task.predict(parallel, [t[rank::ranks].to(device) for t in batch])
                    loss = target_loss(logits, wanted, task.label_smoothing)
                loss, mean_loss, stop = over_all_ranks(loss, wanted, bool(signals), ranks)

                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()

                step, in_round = step + 1, in_round + 1
                if not math.isfinite(mean_loss):
                    return lost(f"loss is {mean_loss}")
                progress.update(step, mean_loss, batch)
                if stop and step < steps:  # after the last step there is nothing to go on with
                    save_for_resume(before_round)
                    progress.end(f"stopped at step {step}; to go on: python train.py --task {args.task} --resume"
                                 + (f" --checkpoint {path}" if path != default_path(args.task) else ""))
                    return 128 + (signals or [signal.SIGTERM])[0]

            in_round = 0
            metrics = task.evaluate(model, device)
            history.append({"step": step, "train_loss": progress.mean_loss(), **metrics})
            if not math.isfinite(metrics["loss"]):
                return lost(f"held-out loss is {metrics['loss']}")
            if best is None or task.score(metrics) >= task.score(best["metrics"]):  # as good and trained longer
                weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                best = dict(task=args.task, config=config, vocab=task.vocab, seed=args.seed, step=step, metrics=metrics,
                            model=weights)
            save_checkpoint(path, dict(best, history=history))
            save_for_resume(generator.get_state())
            progress.end(f"held-out loss {metrics['loss']:.3f}  {task.measure} {metrics['accuracy']:.1%}")
            for line in task.samples(model, len(history)):
                print(f"    {line}")

    resume_path(path).unlink(missing_ok=True)
    print(f"{args.task}: {task.measure} {best['metrics']['accuracy']:.1%} on held-out data at step {best['step']}; "
          f"saved to {path}\n")
    return 128 + signals[0] if signals else 0  # it came too late for this task, not for the next


class Progress:
    """A line that renews itself on a terminal; in a file, only the lines that end() finishes."""

    def __init__(self, name, step, steps):
        self.name, self.first, self.step, self.steps = name, step, step, steps
        self.started = time.monotonic()
        self.renewed = 0.0
        self.begin()

    def begin(self):
        self.losses, self.tokens, self.since, self.now = [], 0, time.monotonic(), time.monotonic()

    def update(self, step, loss, batch):
        self.step, self.now = step, time.monotonic()
        self.losses.append(loss)
        self.tokens += sum((ids != PAD).sum().item() for ids in batch if ids.dim() == 2)  # labels are 1-D
        if sys.stdout.isatty() and self.now - self.renewed > 0.1:
            self.renewed = self.now
            print(f"\r{self.line()[:shutil.get_terminal_size().columns - 1]}\x1b[K", end="", flush=True)

    def mean_loss(self):
        return sum(self.losses) / max(1, len(self.losses))

    def line(self):
        speed = self.tokens / max(1e-9, self.now - self.since)
        left = (time.monotonic() - self.started) / max(1, self.step - self.first) * (self.steps - self.step)
        return (f"{self.name}  step {self.step:{len(str(self.steps))}}/{self.steps}  loss {self.mean_loss():.3f}  "
                f"{speed:,.0f} tokens/s  {left // 60:.0f}:{left % 60:02.0f} left")

    def end(self, text):
        print(f"{chr(13) if sys.stdout.isatty() else ''}{self.line()}  {text}", flush=True)
        self.begin()


# ----------------------------------------------------------------------------------------------------- the command


def default_path(name):
    return Path("checkpoints") / f"{name}.pt"


def number(kind, low, high=10 ** 9):
    """An argparse type: an int or a float with low <= it < high."""
    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value < high:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text[:20]!r} is not {what}, at least {low} and below {high}")
        return value
    return parse


def make_parser():
    recipes = {**{name: task.recipe for name, task in TASKS.items()}, "sentiment --data": Sentiment.data_recipe}

    def default(key):
        shown = sorted(f"{name} {recipe[key]}" for name, recipe in recipes.items() if recipe[key] is not None)
        return f"(default: {', '.join(shown)})"

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what to train")
    what.add_argument("--task", choices=["all", *TASKS], default="all", help="all is sentiment and copy (default: all)")
    what.add_argument("--data", metavar="FILE", help="train on this file (default: the toy)")
    what.add_argument("--valid", metavar="FILE", help="held-out data (default: a tenth of --data)")
    what.add_argument("--checkpoint", metavar="PATH", help="where the best weights go (default: checkpoints/<task>.pt)")
    what.add_argument("--resume", action="store_true", help="go on with the interrupted run of this task")
    how = parser.add_argument_group("how to train")
    length = how.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=number(int, 1), help=f"rounds through the data {default('epochs')}")
    length.add_argument("--steps", type=number(int, 1), help=f"or batches in all {default('steps')}")
    how.add_argument("--batch-size", type=number(int, 1, 10 ** 6), metavar="N",
                     help=f"sequences in a batch; translate: tokens of a side {default('batch_size')}")
    how.add_argument("--lr", type=number(float, 1e-9, 10), help=f"the highest learning rate {default('lr')}")
    how.add_argument("--warmup", type=number(int, 0), metavar="STEPS",
                     help=f"steps until it is reached; then it falls to 0 along half a cosine {default('warmup')}")
    how.add_argument("--dropout", type=number(float, 0, 1), help=default("dropout"))
    how.add_argument("--seed", type=number(int, 0, 2 ** 63), help="the same seed, the same weights (default: 42)")
    size = parser.add_argument_group("size of the model")
    size.add_argument("--layers", type=number(int, 1, 1000), help=f"on each side {default('layers')}")
    size.add_argument("--d-model", type=number(int, 1, 10 ** 5), metavar="N", help=default("d_model"))
    size.add_argument("--heads", type=number(int, 1, 10 ** 5), help=default("heads"))
    size.add_argument("--d-ff", type=number(int, 1, 10 ** 5), metavar="N",
                      help=f"width of the feed-forward {default('d_ff')}")
    size.add_argument("--norm", choices=["pre", "post"], help=f"before or after each sublayer {default('norm')}")
    where = parser.add_argument_group("where and in which precision")
    where.add_argument("--device", default="auto", help="auto (CUDA if there), cpu, cuda, cuda:1, ... (default: auto)")
    where.add_argument("--precision", choices=["fp32", "bf16"], help="bf16 is autocast (default: fp32)")
    where.add_argument("--fused", action="store_true", help="PyTorch's kernels for attention and norm instead of the "
                       "formulas (default: off)")
    return parser


def fill_in(args, name, resumed):
    """The options of one task: those given, else its recipe's; when resuming those of the interrupted run, from which
    those given may not differ."""
    given = {key: getattr(args, key) for key in (*Copy.recipe, "data", "valid", "seed", "precision", "fused")}
    given = {key: value for key, value in given.items() if value is not None and value is not False}
    if resumed:
        for key, value in given.items():
            if value != resumed["options"].get(key):
                raise ValueError(f"--{key.replace('_', '-')} {value}: the interrupted run has "
                                 f"{resumed['options'].get(key)}; without --resume a new one begins")
        return argparse.Namespace(**resumed["options"])
    recipe = TASKS[name].data_recipe if name == "sentiment" and args.data else TASKS[name].recipe
    options = dict(recipe, task=name, data=None, valid=None, seed=42, precision="fp32", fused=False)
    if "steps" in given or "epochs" in given:
        options["steps"] = options["epochs"] = None
    return argparse.Namespace(**{**options, **given})


def prepare(name, args, path):
    """Everything that can be wrong with the arguments, the data and the files is found here, before any training:
    the task with its data, the fresh model, the options, what an interrupted run left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is a directory or a device")
    for file in filter(None, (args.data, args.valid)):
        if Path(file).resolve() in (path.resolve(), resume_path(path).resolve()):
            raise ValueError(f"the checkpoint would overwrite {file}")
    part_path(resume_path(path)).touch()
    part_path(resume_path(path)).unlink()
    resumed = None
    if args.resume:
        if not resume_path(path).exists():
            raise ValueError(f"nothing to resume: there is no {resume_path(path)}")
        resumed = read_checkpoint(resume_path(path), "cpu")
        fresh = vars(fill_in(args, name, None))
        if not (isinstance(resumed, dict) and RESUMED <= resumed.keys() and isinstance(resumed["options"], dict)
                and resumed["options"].keys() == fresh.keys() and resumed["options"]["task"] == name):
            raise ValueError(f"{resume_path(path)} is not the state of an interrupted {name} run")
    options = fill_in(args, name, resumed)
    if options.epochs and issubclass(TASKS[name], Copy):
        raise ValueError(f"--epochs: {name} makes its data as it goes; say --steps")
    task = TASKS[name].read(options)
    if resumed and resumed["checksum"] != task.checksum:
        raise ValueError(f"{options.data} has changed since the interrupted run")
    set_seed(options.seed)
    try:
        return task, task.build(task.config(options)), options, resumed
    except RuntimeError as error:
        raise ValueError(f"a model of these sizes cannot be made: {str(error).splitlines()[0]}") from None


def main(argv=None):
    """Returns the exit status."""
    parser = make_parser()
    args = parser.parse_args(argv)
    names = ["sentiment", "copy"] if args.task == "all" else [args.task]
    for option in "data", "valid", "checkpoint", "resume":
        if getattr(args, option) == "":
            parser.error(f"--{option} is empty")
        if getattr(args, option) and args.task == "all":
            parser.error(f"--{option} needs one task: --task {', '.join(TASKS)}")
    if issubclass(TASKS.get(args.task, Task), Copy) and (args.data or args.valid):
        parser.error(f"--task {args.task} makes its own data; --data and --valid are for sentiment and translate")
    if args.valid and not args.data:
        parser.error("--valid needs --data, the file to train on")
    paths = [Path(args.checkpoint) if args.checkpoint else default_path(name) for name in names]
    try:
        device = pick_device(args.device)
        jobs = [prepare(name, args, path) for name, path in zip(names, paths)]
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    except ValueError as error:
        parser.error(str(error))
    rank, ranks = rank_and_ranks()
    if ranks > 1:
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        sys.stdout = sys.stdout if rank == 0 else open(os.devnull, "w")  # and one prints
    for (task, model, options, resumed), path in zip(jobs, paths):
        try:
            status = train(task, model, options, device, path, resumed)
        except OSError as error:
            if error.filename is None:
                raise  # not a checkpoint but stdout, which is run's business
            print(f"train.py: error: {error.filename} could not be written: {error.strerror}", file=sys.stderr)
            status = 2
        if status != 0:
            break
    if ranks > 1:
        torch.distributed.destroy_process_group()
    return status


def load_or_train(name, path, device):
    """load_checkpoint(path) or, where path is None, that of the task's default place, trained first if it is empty."""
    if path is None:
        path = default_path(name)
        if not path.exists():
            print(f"{path} is not there yet; training it first", file=sys.stderr)
            with contextlib.redirect_stdout(sys.stderr):
                status = main(["--task", name, "--device", str(device)])
            if status != 0:
                sys.exit(status)
    return load_checkpoint(Path(path), device)


def run(main):
    """Call a script's main and exit with its status. Output never dies of the terminal's encoding, and a reader who
    closes the pipe or presses Ctrl-C sees no traceback."""
    for name in "stdout", "stderr":
        if getattr(sys, name) is None:  # closed: print(file=None) would go to the other one
            setattr(sys, name, open(os.devnull, "w"))
        getattr(sys, name).reconfigure(errors="backslashreplace")
    try:
        status = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    except OSError as error:  # of stdin or stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the exit would try to flush it again
        status = 141 if isinstance(error, BrokenPipeError) else 2
        if status == 2:
            print(f"{Path(sys.argv[0]).name}: error: {error.strerror}: stdin or stdout", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    run(main)
