"""The table of configurations in docs/supported.md, by the sweep of tests/models/config/sweep.py.

    python -m bench.configurations      # a minute a family or two; writes the table

A slow test holds each row to the sweep.
"""

from bench import documents
from bench._parser import parser_of
from tests.models.config import sweep
from tpfuse.models.families import FAMILIES

PAGE, COMMAND, PART = documents.DOCS / "supported.md", "bench.configurations", "configurations"
HEADS = "model_type", "tried", *sweep.VERDICTS


def main() -> None:
    parser_of("bench.configurations", __doc__).parse_args()
    sweep.quiet()
    documents.write(PAGE, COMMAND, {PART: documents.table(HEADS, map(sweep.row, FAMILIES))})


if __name__ == "__main__":
    main()
