"""Runs the bench; its package says what it compares."""

import json
import sys

from bench.bits import arguments, cost, rows
from tpfuse.tools.ledger.processes import on_ranks


def main(argv: list[str] | None = None) -> int:
    """Returns 1 where bits differ, or where messages are not as long as expected."""
    args = arguments(argv)
    if args.cost:
        costs = on_ranks(max(cost.RANKS), cost.costs, args)
        text, same = cost.text(costs), all(c.sent[1] == c.expected for c in costs)
        values = [c._asdict() for c in costs]
    else:
        table = on_ranks(max(layout.size for layout in rows.LAYOUTS), rows.rows, args)
        text, same = rows.text(table), all(row.same for row in table)
        values = [row._asdict() | dict(layout=str(row.layout)) for row in table]
    print(text)
    if args.json:
        args.json.write_text(json.dumps(values, indent=1))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
