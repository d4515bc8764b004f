"""The tables of docs/composition.md: what works together, and the errors of what does not, as tests/test_composition.py
found them.

make composition                                    # runs those tests, then
python -m bench.composition out/composition.xml     # their junit report -> bench/results/composition.json, the table
python -m bench.composition                         # the table from that file alone
"""

import json
import pathlib
import sys

from bench import documents

PAGE, RESULTS = documents.DOCS / "composition.md", pathlib.Path(__file__).with_name("results") / "composition.json"
COMMAND, PART, ERRORS = "bench.composition", "composition", "refusals"
COLUMNS = [
    "DDP", "FSDP2", "torch.compile", "recompute", "autocast", "LoRA", "packed documents", "MainGrad",
    "context parallelism", "bitwise",
]  # fmt: skip
EQUAL = "0e+00"  # an error: the same bits
MODELS = ["GPT-2", "Llama", "Mixtral", "BERT", "parallelize", "own model of layers"]
ROWS = [
    *MODELS,
    "torch.compile",
    "recompute",
    "sequence parallelism",
    "overlap",
    "saving smallest",
    "dropout",
    "LoRA",
    "packed documents",
    "autocast",
    "MainGrad",
    "context parallelism",
    "bitwise",
    "GradScaler",
    "clipping by torch",
    "label smoothing and z-loss",
    "hooks on submodules",
    "deepcopy",
    "save_checkpoint",
    "state_dict in torch's checkpoints",
]
# Rows of one run, whose features do not meet: each is on in it, and the cells have one number.
AT_ONCE = [
    ("overlap", "GradScaler", "clipping by torch", "label smoothing and z-loss"),
    ("sequence parallelism", "saving smallest", "dropout"),
    ("hooks on submodules", "deepcopy", "save_checkpoint", "state_dict in torch's checkpoints"),
]
# The same under torch.compile, where a run is dear: a model with a feature too.
AT_ONCE_COMPILED = [
    ("GPT-2", "MainGrad", *AT_ONCE[0]),
    *AT_ONCE[1:],
    ("Llama", "packed documents"),
    ("BERT", "recompute"),
]
AT_ONCE_BITWISE = [("GradScaler", "label smoothing and z-loss"), AT_ONCE[1], AT_ONCE[2][:-1]]  # others stand alone
AT_ONCE_OF = {"torch.compile": AT_ONCE_COMPILED, "bitwise": AT_ONCE_BITWISE}
REFUSED = {  # words of the error
    ("overlap", "bitwise"): "overlap='pairwise' adds in another order than bitwise",
    ("bitwise", "context parallelism"): "cp= is not built for bitwise=4",
    ("state_dict in torch's checkpoints", "bitwise"): "in slices of whole leaves, which no DTensor has",
    ("MainGrad", "DDP"): "leave DistributedDataParallel off and give MainGrad the data-parallel group",
    ("MainGrad", "FSDP2"): "as_dtensor: the model's gradients are in main_grad",
}
NOT_APPLICABLE = {
    ("BERT", "packed documents"): "BERT takes no packed documents",
    ("parallelize", "packed documents"): "transformers' forward has no such argument",
    ("own model of layers", "packed documents"): "a matter of the model's own forward",
    (
        "clipping by torch",
        "bitwise",
    ): "on one rank it is torch's own; tpfuse.clip_grad_norm_ has the same bits everywhere",
}


def read(report: pathlib.Path) -> dict[str, dict[str, str]]:
    """A junit report -> {row: {column: the largest error, or "refused: " and why}}.  ValueError where a test failed."""
    results: dict[str, dict[str, str]] = {}
    for row, column, outcome in documents.properties(report, "composition"):
        results.setdefault(row, {})[column] = outcome
    return results


def table(results: dict[str, dict[str, str]]) -> str:
    """Markdown."""
    return documents.table(
        ("", *COLUMNS), [[row, *(_cell(results, row, column) for column in COLUMNS)] for row in ROWS]
    )


def _cell(results: dict[str, dict[str, str]], row: str, column: str) -> str:
    if row == column or (row, column) in NOT_APPLICABLE:
        return "–"
    outcome = results.get(row, {}).get(column) or results.get(column, {}).get(row) or "not tested"
    return "equal" if outcome == EQUAL else outcome.partition(":")[0]


def refusals(results: dict[str, dict[str, str]]) -> str:
    """Markdown: what is refused and what does not apply, and why."""
    outcomes = [(row, column, outcome) for row, cells in results.items() for column, outcome in cells.items()]
    lines = [f"- {r} with {c}: `{why.partition(': ')[2]}`" for r, c, why in outcomes if why.startswith("refused")]
    return "\n".join(lines + [f"- {r} with {c} (–): {why}." for (r, c), why in NOT_APPLICABLE.items()])


def main() -> None:
    if sys.argv[1:]:
        RESULTS.write_text(json.dumps(read(pathlib.Path(sys.argv[1])), indent=1) + "\n")
    results = json.loads(RESULTS.read_text())
    documents.write(PAGE, COMMAND, {PART: table(results), ERRORS: refusals(results)})


if __name__ == "__main__":
    main()
