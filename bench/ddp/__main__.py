"""Runs the bench; its package says what it measures."""

import json

from bench import machine
from bench._link import at_rates
from bench.ddp import arguments, page, run


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    rows = []
    for ranks in args.ranks:
        rows += at_rates(args.rate, ranks, lambda gbit, ends: run.measure(args, gbit, ends))
    result = dict(machine=machine.this_machine(), arguments=vars(args) | dict(json=None), rows=rows)
    print("\n\n".join((page.overlap([result]), page.settings([result]))))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
