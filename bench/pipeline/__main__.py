"""Runs the bench; its package says what it measures."""

import json

import torch.multiprocessing as mp

from bench import machine, measured
from bench.pipeline import arguments, run
from bench.port import free_port


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run.run, (args, free_port(), results), nprocs=args.ranks)
    result, here = results.get(), dict(machine=machine.this_machine())
    result |= here | dict(arguments=vars(args) | dict(json=None))
    if result["sleeping"]:
        result["sleeping"] |= here
    print("\n\n".join(filter(None, (measured.pipeline([result]), measured.sleeping(result)))))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
