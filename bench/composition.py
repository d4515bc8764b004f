"""The table of docs/composition.md: what works together, as tests/test_composition.py found it.

    make composition                                    # runs those tests, then
    python -m bench.composition out/composition.xml     # their junit report -> the table
"""

import json
import pathlib
import sys
from xml.etree import ElementTree

from bench import documents

PAGE, RESULTS = documents.DOCS / "composition.md", pathlib.Path(__file__).with_name("results") / "composition.json"
COMMAND, PART = "bench.composition", "composition"
COLUMNS = ["DDP", "FSDP2", "torch.compile", "recompute", "autocast", "LoRA", "packed documents", "MainGrad"]
MODELS = ["GPT-2", "Llama", "BERT", "parallelize", "own model of layers"]
ROWS = [
    *MODELS,
    "sequence parallelism",
    "overlap",
    "saving smallest",
    "dropout",
    "LoRA",
    "packed documents",
    "autocast",
    "GradScaler",
    "clipping by torch",
    "label smoothing and z-loss",
    "hooks on submodules",
    "deepcopy",
    "save_checkpoint",
    "state_dict in torch's checkpoints",
]
NOT_APPLICABLE = {
    ("BERT", "packed documents"): "BERT has no packed documents",
}
