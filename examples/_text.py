"""Text as bytes: read, held out in part, and sampled as a function of seed and step alone."""

import gzip
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

END = 0  # the byte between two files, which text does not hold
HELD_OUT = 1 << 16  # bytes to validate on, at most


class Text(NamedTuple):
    """A text to train on and a text to validate on."""

    train: np.ndarray  # uint8
    held_out: bytes  # whole windows of it, see windows()
    fingerprint: str


def standard_library() -> list[Path]:
    """Returns the sources of this Python; no tests, no installed packages, no tables of character sets."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]  # not walked at all: they may hold most files
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def read_text(data: Path | None, max_mb: float, seq: int) -> Text:
    """Every 16th file is held out, or of fewer files the last 16th."""
    if data is None:
        files = standard_library()
    elif data.is_dir():
        files = sorted(path for path in data.rglob("*") if path.is_file())
    elif data.is_file():
        files = [data]
    else:
        raise ValueError(f"--data {data} is neither a file nor a folder")
    texts, room = [], int(max_mb * 1e6)
    for path in files:
        if room > 0:
            texts.append(path.read_bytes()[:room])
            room -= len(texts[-1])
    if len(texts) < 16:  # cut the whole at 15/16
        joined = bytes([END]).join(texts)
        train, held_out = joined[: len(joined) * 15 // 16], joined[len(joined) * 15 // 16 :]
    else:
        train, held_out = (
            bytes([END]).join(t for i, t in enumerate(texts) if (i % 16 == 8) == held) for held in (False, True)
        )
    count = min(HELD_OUT, len(held_out) - 1) // (seq - 1)
    if len(train) < seq or count < 1:
        raise ValueError(
            f"--data {data}: {len(train)} bytes to train on and {len(held_out)} held out are too few for --seq {seq}"
        )
    held_out = held_out[: count * (seq - 1) + 1]
    return Text(np.frombuffer(train, np.uint8), held_out, hashlib.sha256(train + held_out).hexdigest()[:16])


def sample(text: Text, seq: int, batch: int, seed: int, step: int, samples: range) -> Tensor:
    """Returns some of the ``batch`` samples of a step, int64 [len(samples), seq].

    A sample is a function of seed, step and its own number alone.
    """
    draws = np.random.Philox(key=seed, counter=[0, 0, 0, step]).random_raw(batch)
    starts = (draws % np.uint64(len(text.train) - seq + 1)).astype(np.int64)
    return torch.from_numpy(np.stack([text.train[starts[i] : starts[i] + seq] for i in samples])).long()


def paragraphs(text: Text, longest: int) -> np.ndarray:
    """Returns int64 [N, 2]: where each document of the training text begins and ends.

    A document is a paragraph with the blank line after it, of two bytes at least (one to read and one to guess), and
    cut where it is longer than ``longest``.
    """
    spans = [match.span() for match in re.finditer(rb"[^\0]+?(?:\n\s*\n|\0|\Z)", text.train.tobytes())]
    pieces = [(i, min(i + longest, end)) for start, end in spans for i in range(start, end, longest)]
    return np.array([(start, end) for start, end in pieces if end - start >= 2], dtype=np.int64)


def documents(spans: np.ndarray, room: int, seed: int, step: int) -> np.ndarray:
    """Returns the spans of a step's documents, as many as ``room`` bytes hold: a function of seed and step alone."""
    draws = np.random.Philox(key=seed, counter=[0, 0, 0, step]).random_raw(room // 2)  # none is shorter than two bytes
    drawn = spans[(draws % np.uint64(len(spans))).astype(np.int64)]
    return drawn[: np.searchsorted((drawn[:, 1] - drawn[:, 0]).cumsum(), room, side="right")]


def windows(text: Text, seq: int, batch: int) -> Iterator[Tensor]:
    """Yields the held-out text, int64 [batch or fewer, seq].

    Windows overlap by one byte, so that every byte but the first is guessed once.
    """
    held_out = np.frombuffer(text.held_out, np.uint8)
    rows = np.lib.stride_tricks.sliding_window_view(held_out, seq)[:: seq - 1]
    for i in range(0, len(rows), batch):
        yield torch.from_numpy(rows[i : i + batch].copy()).long()


def gzip_bits(text: Text) -> float:
    """Returns the bits per byte of gzip -9 on the same bytes."""
    return 8 * len(gzip.compress(text.held_out, 9)) / len(text.held_out)
