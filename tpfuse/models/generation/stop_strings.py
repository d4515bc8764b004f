"""Ends a sequence whose last token completes one of some strings, as transformers' StopStringCriteria decides.

A string counts where it occurs in the joined text of the last tokens and ends inside the last one, however tokens cut
it: "stop" ends "st" + "op" and "s" + "topper", not "stop" + "s".  As many tokens are joined as the longest string has
characters, those of the prompt too.  Text is bytes where the tokenizer's tokens are, since one may be a part of a
character.

What a token adds to a text is asked of the tokenizer when the token first comes: a vocabulary of 100 000 has few that
do.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor

_BEFORE = "abcdef"  # a text that a token is put behind: at the start of one tokenizers drop a space
Text = str | bytes


class StopStrings:
    """Called with ids [B, S], returns for each sequence whether it ends with one of the strings.

    ``tokenizer`` is one of transformers', or has its ``convert_ids_to_tokens``, ``convert_tokens_to_string`` and
    ``__call__``.
    """

    def __init__(self, tokenizer: Any, strings: list[str]):
        self.tokenizer, self.kind = tokenizer, _kind(tokenizer)
        self.strings: list[Any] = [s.encode() if self.kind else s for s in strings]
        self.most = max(map(len, self.strings))
        self.pieces: dict[int, Text | None] = {}
        ids = tokenizer(_BEFORE, add_special_tokens=False)["input_ids"]
        self.context = [tokenizer.convert_ids_to_tokens(i) for i in ids]

    def __call__(self, ids: Tensor) -> list[bool]:
        return [self._ends(row) for row in ids[:, -self.most :].tolist()]

    def _ends(self, ids: list[int]) -> bool:
        *earlier, final = self._last_pieces(ids) or [""]
        if not final:
            return False
        text: Any = type(final)().join(earlier)  # type: ignore[arg-type]
        start, text = len(text), text + final
        return any(text.find(s, max(0, start - len(s) + 1)) >= 0 for s in self.strings)

    def _last_pieces(self, ids: list[int]) -> list[Text]:
        """Returns what the last tokens add to a text, back to one that is none of the tokenizer's."""
        pieces: list[Text] = []
        for i in reversed(ids):
            if i not in self.pieces:
                self.pieces[i] = self._piece(i)
            piece = self.pieces[i]
            if piece is None:
                break
            pieces.insert(0, piece)
        return pieces

    def _piece(self, i: int) -> Text | None:
        token = self.tokenizer.convert_ids_to_tokens(i) if 0 <= i < len(self.tokenizer) else None
        if token is None:
            return None
        if self.kind == "ByteLevel" and all(c in _BYTES for c in token):
            return bytes(_BYTES[c] for c in token)
        if self.kind == "ByteFallback" and re.fullmatch("<0x[0-9a-fA-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        text_of = self.tokenizer.convert_tokens_to_string
        _, match, piece = text_of([*self.context, token]).partition(_BEFORE)
        piece = piece if match else text_of([token])  # a vocabulary without these letters
        return piece.encode() if self.kind else piece


def _kind(tokenizer: Any) -> str | None:
    """Returns how a tokenizer writes bytes: as characters of their own, as <0x41>, or not at all (None)."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return None
    try:
        kinds = set(_types(json.loads(decoder.__getstate__())))
    except (TypeError, ValueError, AttributeError):  # a decoder that does not say what it is made of
        kinds = {type(decoder).__name__}
    return next((kind for kind in ("ByteFallback", "ByteLevel") if kind in kinds), None)


def _types(config: Any) -> Iterator[str]:
    """Yields every "type" in a decoder's configuration, nested ones too."""
    if isinstance(config, dict):
        if isinstance(config.get("type"), str):
            yield config["type"]
    for value in config.values() if isinstance(config, dict) else config if isinstance(config, list) else ():
        yield from _types(value)


def _byte_characters() -> dict[str, int]:
    """Returns the character that stands for each byte in a byte-level vocabulary: itself where it is printable, else
    the next character from 256 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unprintable = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(unprintable)}


_BYTES = _byte_characters()
