"""Runs the bench; its package says what it measures."""

import json

from bench import machine, measured
from bench.pipeline import arguments, run
from tpfuse.tools.ledger.processes import on_ranks


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    result, here = on_ranks(args.ranks, run.run, args), dict(machine=machine.this_machine())
    result |= here | dict(arguments=vars(args) | dict(json=None))
    if result["sleeping"]:
        result["sleeping"] |= here
    print("\n\n".join(filter(None, (measured.pipeline([result]), measured.sleeping(result)))))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
