"""Registers, spills, shared memory and instructions of every kernel as it would be launched, compiled without a GPU.

python -m bench.compile                        every call on every arch; --write keeps the table in table.md
python -m bench.compile linear --arch sm_90    one op
python -m bench.compile --default --json       one call of each op, as JSON lines

Of sm_90 it also prints how long each pipe is busy with the main loop, and what share of the roofline that leaves.
"""

import argparse
import json
import os

from bench.compile._pool import ARCHS, HERE, OPS, compile_all, wanted


def line(row: dict) -> str:
    opcodes = " ".join(f"{k} {v}" for k, v in row["opcodes"].items() if v)
    each = "" if row["instructions_an_element"] is None else row["instructions_an_element"]
    cells = (
        row[k] for k in ("op", "call", "arch", "kernel", "registers", "spill_bytes", "shared_bytes", "instructions")
    )
    return "| " + " | ".join(map(str, (*cells, each, opcodes))) + " |"


def table(rows: list[dict]) -> str:
    import triton

    lines = [
        f"Compiled by Triton {triton.__version__}: `python -m bench.compile --write`.  Instructions are those of the",
        "largest loop, or of a kernel without one; on gfx942 of the whole kernel.  Registers and spill bytes are a",
        "thread's, shared bytes a block's.",
        "",
        "| op | call | arch | kernel | registers | spill bytes | shared bytes | instructions | an element | opcodes |",
        "|---" * 10 + "|",
    ]
    return "\n".join((*lines, *map(line, rows))) + "\n"


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
    parser = argparse.ArgumentParser(
        prog="python -m bench.compile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"any of {', '.join(OPS)} (default: all)")
    parser.add_argument("--arch", action="append", choices=ARCHS, help="may be given more than once (default: all)")
    parser.add_argument("--default", action="store_true", help="only the first call of each op")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: as many as cores)")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--write", action="store_true", help="keep the table in bench/compile/table.md")
    args = parser.parse_args()
    if unknown := sorted(set(args.ops) - set(OPS)):
        parser.error(f"no op {', '.join(unknown)}; there are {', '.join(OPS)}")
    if args.write and (args.ops or args.arch or args.default):
        parser.error("--write keeps the whole table: give it no op, no --arch and no --default")
    rows = compile_all(wanted(args.ops or OPS, args.arch or list(ARCHS), args.default), args.jobs)
    if args.json:
        print("\n".join(json.dumps(row | dict(line=line(row))) for row in rows))
    else:
        print(table(rows) + accounts(rows))
    if args.write:
        (HERE / "table.md").write_text(table(rows))


if __name__ == "__main__":
    main()
