"""Runs the bench; its package says what it measures."""

import json

from bench import machine
from bench._link import at_rates
from bench.context import arguments, page, run


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    rows = at_rates(args.rate, 2, lambda gbit, ends: run.measure(args, gbit, ends))
    arguments_given = vars(args) | dict(json=None)
    result = dict(machine=machine.this_machine(), arguments=arguments_given, rows=rows, memory=run.memory(args.lengths))
    print("\n\n".join((page.memory(result), page.speed([result]))))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
