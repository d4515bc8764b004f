"""The table of docs/supported.md: model family x feature, and the parity with transformers that the tests reached.

    make support                                   # runs the models' tests, then
    python -m bench.support out/support.xml        # their junit report -> bench/results/support.json and the table
    python -m bench.support                        # the table from that file alone

A number is the largest relative error against transformers in fp64, over all cases and R of the tests that recorded one
for the cell (the property "parity": see tests/models/conftest.py).
"""

import json
import pathlib
import sys

from bench import documents

PAGE, RESULTS = documents.DOCS / "supported.md", pathlib.Path(__file__).with_name("results") / "support.json"
COMMAND, PART = "bench.support", "support"
FAMILIES = {"gpt2": "GPT-2", "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "bert": "BERT"}
FAMILIES |= {"gpt_neox": "GPT-NeoX", "phi3": "Phi-3", "starcoder2": "StarCoder2"}
FAMILIES |= {"gemma2": "Gemma 2", "gemma3_text": "Gemma 3", "olmo2": "OLMo 2"}
FAMILIES |= {"roberta": "RoBERTa", "distilbert": "DistilBERT", "modernbert": "ModernBERT"}
FEATURES = [
    "logits",
    "loss",
    "gradients",
    "tied head",
    "untied head",
    "kv heads > R",
    "kv heads = R",
    "kv heads < R",
    "sliding window",
    "sequence parallelism on",
    "sequence parallelism off",
    "packed documents",
    "generated tokens",
    "sampled tokens",
    "saved and loaded",
]
GROUPED = ["kv heads > R", "kv heads = R", "kv heads < R"]
_ENCODER = {*GROUPED, "sliding window", "packed documents", "generated tokens", "sampled tokens"}
NO_PART_OF = {  # a family
    "gpt2": {*GROUPED, "sliding window"},
    "llama": {"sliding window"},
    "gpt_neox": {*GROUPED, "sliding window"},
    "olmo2": {"sliding window"},
    **dict.fromkeys(("bert", "roberta", "distilbert"), _ENCODER),
    "modernbert": _ENCODER - {"sliding window", "packed documents"},
}


def read(report: pathlib.Path) -> dict[str, dict[str, dict]]:
    """A junit report -> {family: {feature: {"error": the largest, "R": sizes}}}.  ValueError where a test failed."""
    cells: dict[str, dict[str, dict]] = {}
    for family, feature, ranks, error in documents.properties(report, "parity"):
        cell = cells.setdefault(family, {}).setdefault(feature, {"error": 0.0, "R": []})
        cell["error"] = max(cell["error"], error)
        cell["R"] = sorted({*cell["R"], ranks})
    return {
        family: {f: cells.get(family, {}).get(f) for f in FEATURES if f in cells.get(family, {})} for family in FAMILIES
    }


def table(results: dict[str, dict[str, dict]]) -> str:
    """Markdown."""
    rows = [[feature, *(_cell(results, family, feature) for family in FAMILIES)] for feature in FEATURES]
    return documents.table(("", *FAMILIES.values()), rows)


def _cell(results: dict[str, dict[str, dict]], family: str, feature: str) -> str:
    if feature in NO_PART_OF.get(family, ()):
        return "–"
    cell = results.get(family, {}).get(feature)
    return "not tested" if cell is None else "equal" if cell["error"] == 0 else f"{cell['error']:.0e}"


def main() -> None:
    if sys.argv[1:]:
        RESULTS.write_text(json.dumps(read(pathlib.Path(sys.argv[1])), indent=1) + "\n")
    documents.write(PAGE, COMMAND, {PART: table(json.loads(RESULTS.read_text()))})


if __name__ == "__main__":
    main()
