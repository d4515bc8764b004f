"""The demo's model trained with and without a choice of large entries, and what that costs in what is learnt.

    python -m bench.sparse_gradients.training --json bench/results/sparse_training.json
    python -m bench.sparse_gradients.page            the table and the picture of docs/training.md, from that file

examples/train_gpt.py on its own text, on four replicas of one thread each, once with dense gradients and once with each
of SETTINGS, for as many steps.  What is learnt does not depend on how busy the machine is.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import machine
from bench._parser import parser_of
from bench.sparse_gradients import page

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"
REPLICAS, STEPS, RATE = 4, 4400, 1e-3
MODEL: dict[str, Any] = {}  # further options of the script: none, as the demo
SETTINGS = {  # density, and the share of the steps over which it falls to that
    "dense": None,
    "1 %": (0.01, 0.5),
}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of("bench.sparse_gradients.training", __doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run (default %(default)s)")
    parser.add_argument("--rate", type=float, default=RATE, help="highest learning rate (default %(default)s)")
    parser.add_argument("--every", type=int, default=400, help="steps between validations (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    return parser.parse_args(argv)


def log_of(args: argparse.Namespace, setting: tuple[float, float] | None) -> list[dict[str, Any]]:
    """Trains once -> the lines of its log."""
    options = dict(MODEL, dp=REPLICAS, steps=args.steps, lr=args.rate, timeout=3600) | {"validate-every": args.every}
    if setting is not None:
        density, warmup = setting
        options |= {"ok-topk": density, "ok-topk-warmup": max(1, round(warmup * args.steps))}
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--{name}={value}" for name, value in options.items()] + [f"--out={folder}"]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={REPLICAS}"]
        environment = os.environ | dict(OMP_NUM_THREADS="1")
        subprocess.run([*command, str(SCRIPT), *flags], env=environment, stdout=subprocess.DEVNULL, check=True)
        return [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]


def row_of(name: str, log: list[dict[str, Any]], dense: int) -> dict[str, Any]:
    """``held_out``: (step, bits per byte, bytes that rank 0 has sent until then); ``dense``: bytes of a dense step."""
    sent, held_out = 0, []
    for record in log:
        if "loss" in record:
            in_step = record.get("bytes_sent", dense)
            sent += in_step
        else:
            held_out.append([record["step"], record["held_out_bits"], sent])
    return dict(name=name, held_out=held_out, bytes=sent, bytes_a_step=in_step)


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    logs = {}
    for name, setting in SETTINGS.items():
        print(name, file=sys.stderr, flush=True)
        logs[name] = log_of(args, setting)
    dense = max(record.get("bytes_sent", 0) for log in logs.values() for record in log)  # of a warm-up step
    rows = [row_of(name, log, dense) for name, log in logs.items()]
    result = dict(machine=machine.this_machine(), steps=args.steps, rate=args.rate, replicas=REPLICAS, rows=rows)
    print(page.training(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
