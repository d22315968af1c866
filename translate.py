"""
Ask a trained model, whichever it is, or score it.

    python translate.py 3 1 4 1 5                                                            the copy: 3 1 4 1 5
    python translate.py --checkpoint checkpoints/sentiment.pt the film was never dull        positive<TAB>0.998
    python translate.py --checkpoint checkpoints/captions.pt --beams 4 ein mann schläft .    the translation
    python translate.py --checkpoint checkpoints/captions.pt < in.txt > out.txt              a line each, in order
    python translate.py --checkpoint checkpoints/captions.pt --evaluate --data test.tsv      accuracy, loss, BLEU

The arguments are one text. Results go to stdout, everything else to stderr. A line that cannot be read is named on
stderr and leaves an empty line; the exit status is 2 then.
"""
import itertools
import sys
from collections import Counter

from model import EOS
from train import (Parser, Seq2Seq, count_unknown, file_path, load_or_train, number, pick_device, print_notice,
                   read_pairs, report_unknown, run, tokenize)

BLOCK = 1000        # lines of a file that are read before the first is answered, so that they can be sorted by length
BATCH = 100         # lines that are answered together
LONGEST = 1_000_000  # characters of a line; longer ones are not even looked at


def answer(task, model, rows, beams):
    """Rows of ids -> the model's answers as lines, in order; an empty row gives an empty line."""
    lines = [""] * len(rows)
    order = sorted((i for i, ids in enumerate(rows) if ids), key=lambda i: len(rows[i]))
    for start in range(0, len(order), BATCH):
        chosen = order[start:start + BATCH]
        for i, line in zip(chosen, task.answers(model, [rows[i] for i in chosen], beams)):
            lines[i] = line
    return lines


def answer_lines(task, model, stream, block, beams):
    """Answer each line of a stream on stdout, block lines at a time. Returns the exit status."""
    status, unknown, words, cut = 0, 0, 0, []
    numbered = enumerate(stream, start=1)
    while lines := list(itertools.islice(numbered, block)):
        rows = []
        for i, line in lines:
            try:
                if len(line) > LONGEST:
                    raise ValueError(f"{len(line):,} characters; a line may have {LONGEST:,}")
                text = line if isinstance(line, str) else line.decode("utf-8-sig")
                rows.append(task.model_ids(model, text, cut.append) if text.strip() else [])
            except ValueError as error:  # also what decode raises
                print_notice(f"translate.py: line {i}: {error}")
                rows.append([])
                status = 2
            counts = count_unknown(rows[-1])
            unknown, words = unknown + counts[0], words + counts[1]
        for line in answer(task, model, rows, beams):
            print(line, flush=block == 1)
    report_unknown(unknown, words)
    if cut:
        print_notice(f"{len(cut):,} texts were cut off; the first has {cut[0]}")
    return status


def evaluate(task, model, device, pairs, beams):
    """Lines with the model's metrics on task.valid; pairs: the same examples as text."""
    rows = [example[0] for example in task.valid]
    metrics = task.evaluate(model, device)
    yield f"{task.metric} {metrics['accuracy']:.1%}, loss {metrics['loss']:.3f} on {len(rows):,} examples"
    if isinstance(task, Seq2Seq):
        if pairs:
            yield bleu(task, model, pairs, beams)
    else:
        labels = [task.expected(example) for example in task.valid]
        hits = Counter(label for label, line in zip(labels, answer(task, model, rows, beams))
                       if line.split("\t")[0] == label)
        for label, count in sorted(Counter(labels).items()):
            yield f"{label}: recall {hits[label] / count:.1%} of {count:,}"


def bleu(task, model, pairs, beams):
    """A line with the BLEU of the tokens in lower case; a source that the model cannot read counts as empty."""
    try:
        import sacrebleu
    except ImportError:
        return "no BLEU: pip install sacrebleu"
    most = task.most_tokens(model)
    rows = [task.source.encode(source) + [EOS] if len(source) <= most else [] for source, _ in pairs]
    generated = [" ".join(tokenize(line)) for line in answer(task, model, rows, beams)]
    targets = [" ".join(target) for _, target in pairs]
    score = sacrebleu.corpus_bleu(generated, [targets], tokenize="none", force=True)  # force: no warning
    return f"BLEU {score.score:.1f} with {beams} beam{'s' * (beams > 1)} (sacrebleu, lower-case tokens, tokenize none)"


def main(argv=None):
    """Returns the exit status."""
    parser = Parser("translate.py", __doc__)
    parser.add_argument("text", nargs="*", help="one text to answer (default: the lines of stdin)")
    parser.add_argument("--checkpoint", metavar="PATH", type=file_path, help="the model (default: checkpoints/copy.pt, "
                        "trained first if it is not there)")
    parser.add_argument("--beams", type=number(int, 1, 1000), default=1, metavar="N",
                        help="sequences that a beam search keeps; 1 is greedy decoding (default: 1)")
    parser.add_argument("--evaluate", action="store_true", help="score the model: a toy on its held-out examples, any "
                        "other on --data (default: off)")
    parser.add_argument("--data", metavar="FILE", type=file_path, help="for --evaluate, a file as train.py reads it, "
                        "best one that had no part in the training (default: the toy's held-out examples)")
    args = parser.parse_args(argv)
    if args.evaluate and args.text:
        parser.error("--evaluate takes no text")
    if args.data and not args.evaluate:
        parser.error("--data is for --evaluate")
    try:
        device = pick_device(args.device)
        task, model, _ = load_or_train("copy", args.checkpoint, device)
        pairs = read_pairs(args.data, task) if args.data else []
        if args.evaluate:
            task.valid = task.encode_pairs(pairs, args.data, task.most_tokens(model)) if pairs else task.toy_examples()
            if not task.valid:
                raise ValueError(f"{args.checkpoint} was trained on a file: --evaluate needs --data FILE")
        row = task.model_ids(model, " ".join(args.text)) if args.text else []
    except ValueError as error:
        parser.error(str(error))

    if args.evaluate:
        print(*evaluate(task, model, device, pairs, args.beams), sep="\n")
        return 0
    if args.text:
        print(answer(task, model, [row], args.beams)[0])
        report_unknown(*count_unknown(row))
        return 0
    if sys.stdin is None:
        parser.error("no text and no stdin")
    if sys.stdin.isatty():
        print_notice("one text a line; Ctrl-D ends")
    stream = getattr(sys.stdin, "buffer", sys.stdin)  # a notebook's has no buffer, its lines are text
    return answer_lines(task, model, stream, 1 if sys.stdin.isatty() else BLOCK, args.beams)


if __name__ == "__main__":
    run(main)
