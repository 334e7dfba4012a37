"""Runs `examples/llm/finetune.py` with a tokenizer that needs no package: `python -m tests.finetune_run OPTIONS`."""

import sys

from tests.byte_tokenizer import ByteTokenizer
from tests.example_runs import EXAMPLES

sys.path.insert(0, str(EXAMPLES / "llm"))
import finetune
import training


def main(*argv: str) -> None:
    """Does what the example does."""
    args = finetune.parse_args(argv)
    training.start(cluster=args.cluster)
    finetune.run(args, ByteTokenizer())


if __name__ == "__main__":
    main(*sys.argv[1:])
