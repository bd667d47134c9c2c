"""What may be chosen on the command line of the training, and what follows from it.

Knows nothing of what the options do.
"""

import argparse
import dataclasses
import os
from pathlib import Path

import torch
from packing import BatchSize
from reasoner import Shape
from tokenizer import VOCAB_SIZE

RESERVED_S = 40.0  # of a timed piece, for the last checks, generation and export


def parse_options(about: str) -> argparse.Namespace:
    """The options of sys.argv; the first line of `about` heads the help."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the checkpoint, the log and the model")
    add("--resume", type=Path, help="folder of the checkpoint to go on from")
    add("--minutes", type=float, default=9.0, help="of this call, from start to end")
    add("--reserve", type=float, default=RESERVED_S, help="seconds of them for what comes last")
    add("--until", type=float, default=1.0, help="how far this call goes; 1: to the end")
    add("--steps", type=int, default=0, help="steps of the whole training, instead of minutes")
    add("--seed", type=int, default=1)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--workers", type=int, default=default_workers())
    add("--batch-tokens", type=int, default=131_072)
    add("--rate", type=float, default=4e-3, help="peak learning rate")
    add("--log-every", type=int, default=20, help="steps")
    add("--check-every", type=float, default=60.0, help="seconds")
    add("--problems", type=int, default=128, help="held-out problems of each family")
    for field in dataclasses.fields(Shape):
        if field.type is int and field.name != "vocab_size":
            add(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    return parser.parse_args()


def shape_of(options: argparse.Namespace) -> Shape:
    """The model's shape: the defaults, and what the options say else."""
    chosen = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(Shape)
        if hasattr(options, field.name)
    }
    return Shape(vocab_size=VOCAB_SIZE, **chosen)


def batch_size(num_tokens: int, context: int) -> BatchSize:
    """Room for documents of 512 tokens on average, and for padding."""
    return BatchSize(num_tokens, num_tokens // 512 + -(-num_tokens // context), context)


def default_workers() -> int:
    """All cores but two, and no more than are needed to keep up with one card."""
    return max(1, min(8, len(os.sched_getaffinity(0)) - 2))
