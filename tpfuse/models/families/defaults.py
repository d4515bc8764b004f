"""What transformers takes for a key that a config.json leaves out, and which keys may be null, by model_type.

``python -m bench.defaults`` writes the table, and a test holds it to the config classes of the installed release.
"""

import json
import pathlib
from typing import Any

DEFAULTS: dict[str, dict[str, Any]] = json.loads(pathlib.Path(__file__).with_suffix(".json").read_text())
