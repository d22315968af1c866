"""
Say what a trained encoder-decoder makes of a source: copy symbols, or translate sentences.

    python translate.py 3 1 4 1 5                                                  prints 3 1 4 1 5
    python translate.py --evaluate                                                 exact match on held-out sequences
    python translate.py --checkpoint checkpoints/translate.pt ein mann schläft .   prints the translation
    python translate.py --checkpoint checkpoints/translate.pt < in.txt > out.txt   one result a line, in order

Results go to stdout, everything else to stderr. A line that cannot be read is named on stderr and leaves an empty
line; the exit status is 2 then.
"""
import argparse
import itertools
import sys

from train import Copy, Seq2Seq, default_path, join_tokens, load_or_train, pick_device, run

BLOCK = 1000  # lines of a file that are read before the first is answered, so that they can be sorted by length
BATCH = 100   # lines that are decoded together


def answer(task, model, rows):
    """Rows of source ids -> their results as lines, in order; an empty row gives an empty line."""
    lines = [""] * len(rows)
    order = sorted((i for i, ids in enumerate(rows) if ids), key=lambda i: len(rows[i]))
    for start in range(0, len(order), BATCH):
        some = order[start:start + BATCH]
        for i, tokens in zip(some, task.say(model, [rows[i] for i in some])):
            lines[i] = join_tokens(tokens)
    return lines


def answer_stream(task, model, stream, block):
    """Answer each line of a binary stream on stdout, block lines at a time. Returns the exit status."""
    status = 0
    numbered = enumerate(stream, start=1)
    while lines := list(itertools.islice(numbered, block)):
        rows = []
        for number, line in lines:
            try:
                text = line.decode("utf-8-sig")
                rows.append(task.source_ids(model, text) if text.strip() else [])
            except ValueError as error:  # also what decode raises
                print(f"translate.py: line {number}: {error}", file=sys.stderr)
                rows.append([])
                status = 2
        for result in answer(task, model, rows):
            print(result, flush=block == 1)
    return status


def main(argv=None):
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="*", help="the source (default: the lines of stdin)")
    parser.add_argument("--checkpoint", metavar="PATH", help="of a copy or translate model (default: "
                        "checkpoints/copy.pt, trained first if it is not there)")
    parser.add_argument("--evaluate", action="store_true", help="greedy exact match of a copy model on 1,000 held-out "
                        "sequences (default: off)")
    parser.add_argument("--device", default="auto", help="auto (CUDA if there), cpu, cuda, cuda:1, ... (default: auto)")
    args = parser.parse_args(argv)
    if args.evaluate and args.text:
        parser.error("--evaluate takes no text")
    try:
        device = pick_device(args.device)
        task, model, checkpoint = load_or_train("copy", args.checkpoint, device)
        if not isinstance(task, Seq2Seq):
            path = args.checkpoint or default_path("copy")
            raise ValueError(f"{path} holds a {checkpoint['task']} model, not one of copy or translate")
        if args.evaluate and not isinstance(task, Copy):
            raise ValueError("--evaluate needs a copy model; a translation's held-out sentences are not in its file")
        row = task.source_ids(model, " ".join(args.text)) if args.text else []
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    except ValueError as error:
        parser.error(str(error))

    if args.evaluate:
        accuracy = task.evaluate(model, device)["accuracy"]
        print(f"{task.measure} {accuracy:.1%} on {len(task.valid[0]):,} held-out sequences")
        return 0
    if args.text:
        print(answer(task, model, [row])[0])
        return 0
    if sys.stdin is None:
        parser.error("no text and no stdin")
    return answer_stream(task, model, sys.stdin.buffer, block=1 if sys.stdin.isatty() else BLOCK)


if __name__ == "__main__":
    run(main)
