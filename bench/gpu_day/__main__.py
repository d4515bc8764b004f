"""python -m bench.gpu_day: see the package's docstring."""

import sys

from bench.gpu_day import arguments
from bench.gpu_day.day import Day
from bench.gpu_day.results import Broken


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    try:
        if args.fill is not None:
            from bench.gpu_day.fill import fill

            return fill(args.fill)
        return Day(args.out, 60 * args.minutes, args.rehearse, args.resume).run()
    except Broken as error:
        print(f"bench.gpu_day: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
