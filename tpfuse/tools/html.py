"""Pages of HTML in one file, which ask nothing of the network: a template and its data, which its script inflates."""

import base64
import json
import zlib
from pathlib import Path

from ..kernels.runtime.errors import check

MOST = 200_000  # bytes of a page

Json = dict[str, object]


def render(template: Path, data: Json, command: str, *, advice: str = "") -> str:
    """Returns the template with its data, deflated, in place of ``{{data}}``.

    ValueError, which names ``command`` and gives ``advice``, where the page would have MOST bytes or more.
    """
    embedded = base64.b64encode(zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 9)).decode()
    text = template.read_text(encoding="utf-8").replace("{{data}}", embedded)
    size = len(text.encode())
    check(size < MOST, f"{command}: the page would have {size:,} bytes, and at most {MOST:,} are allowed{advice}")
    return text


def write(text: str, path: Path) -> None:
    """Writes a page, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
