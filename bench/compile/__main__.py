"""Registers, spills, shared memory and instructions of every kernel as it would be launched, compiled without a GPU.

python -m bench.compile                        every call on every arch; --write keeps the table in table.md
python -m bench.compile linear --arch sm_90    one op; linear --write replaces its part of table.md
python -m bench.compile --default --json       one call of each op, as JSON lines

Of sm_90 it also prints how long each pipe is busy with the main loop, and what share of the roofline that leaves.
"""

import json
import os

from bench._parser import parser_of
from bench.compile._pool import ARCHS, HERE, OPS, compile_all

CELLS = "op", "call", "arch", "kernel", "registers", "spill_bytes", "shared_bytes", "instructions"


def line(row: dict) -> str:
    opcodes = " ".join(f"{k} {v}" for k, v in row["opcodes"].items() if v)
    per_element = "" if row["instructions_an_element"] is None else row["instructions_an_element"]
    return "| " + " | ".join(map(str, (*(row[k] for k in CELLS), per_element, opcodes, row["digest"]))) + " |"


def table(lines: list[str]) -> str:
    import triton

    head = [
        f"Compiled by Triton {triton.__version__}: `python -m bench.compile --write`.  Instructions are those of the",
        "largest loop, or of a kernel without one; on gfx942 of the whole kernel.  Registers and spill bytes are a",
        "thread's, shared bytes a block's.  The digest is of what was compiled: where it is the same, so is the rest.",
        "",
        f"| {' | '.join(CELLS).replace('_', ' ')} | an element | opcodes | digest |",
        "|---" * (len(CELLS) + 3) + "|",
    ]
    return "\n".join((*head, *lines)) + "\n"


def other_rows(ops: list[str]) -> list[str]:
    """Returns the lines of table.md that are of none of ``ops``."""
    lines = [row for row in (HERE / "table.md").read_text().splitlines() if row.startswith("| ")][1:]
    return [row for row in lines if row.split(" | ")[0][2:] not in ops]


def accounts(rows: list[dict]) -> str:
    """The clocks of _account.py beside each kernel compiled for sm_90."""
    rows = [row for row in rows if row["account"]]
    if not rows:
        return ""
    lines = [
        "",
        "Clocks of one scheduler of an H100 for a turn of the main loop, and the share of the roofline (tensor cores,",
        "without products HBM) that it can reach: with the roofline's pipe waiting for the others, and never waiting.",
        "",
        f"| op | call | kernel | {' | '.join(name.replace('_', ' ') for name in rows[0]['account'])} |",
        "|---" * (3 + len(rows[0]["account"])) + "|",
    ]
    cells = ((row["op"], row["call"], row["kernel"], *row["account"].values()) for row in rows)
    return "\n".join((*lines, *("| " + " | ".join(map(str, values)) + " |" for values in cells)))


def main() -> None:
    os.environ.pop("TRITON_INTERPRET", None)  # before any kernel is defined, here and in the workers
    parser = parser_of("bench.compile", __doc__)
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"any of {', '.join(OPS)} (default: all)")
    parser.add_argument("--arch", action="append", choices=ARCHS, help="may be given more than once (default: all)")
    parser.add_argument("--default", action="store_true", help="only the first call of each op")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: as many as cores)")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--write", action="store_true", help="keep the table in bench/compile/table.md")
    args = parser.parse_args()
    if unknown := sorted(set(args.ops) - set(OPS)):
        parser.error(f"no op {', '.join(unknown)}; there are {', '.join(OPS)}")
    if args.write and (args.arch or args.default):
        parser.error("--write keeps all of an op's rows: give it no --arch and no --default")
    ops = args.ops or OPS
    rows = compile_all(ops, args.arch or list(ARCHS), default=args.default, jobs=args.jobs)
    lines = [line(row) for row in rows]
    if args.json:
        print("\n".join(json.dumps(row | dict(line=line(row))) for row in rows))
    else:
        print(table(lines) + accounts(rows))
    if args.write:  # ops in the table's order, an op's rows in its own
        rows_of_table = sorted((*other_rows(ops), *lines), key=lambda row: row.split(" | ")[0])
        (HERE / "table.md").write_text(table(rows_of_table))


if __name__ == "__main__":
    main()
