"""The conversation of generate.py --chat: one process reads and writes, all generate.

Ctrl-C ends an answer, Ctrl-D (or the end of a piped input) the conversation.
"""

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import _common as common
import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.models import GPT

PROMPT = "> "
CTRL_C = b"\x03"


def tokenizer_of(directory: Path):
    """Returns the directory's tokenizer; ValueError where it has no chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"--chat: the tokenizer of {directory} has no chat template; take a model that was tuned to chat, or give"
            " prompts without --chat"
        )
    return tokenizer


def chat(model: GPT, tokenizer, ends: list[int], options: dict) -> None:
    """Answers line by line; ``options`` are generate's, ``max_new_tokens`` among them."""
    messages: list[dict[str, str]] = []
    while (line := together(read_line)) is not None:
        messages.append(dict(role="user", content=line))
        ids = fitting(tokenizer, messages, model.config.max_positions)
        if not ids:
            common.say(f"(that is more than the model's {model.config.max_positions} positions)")
            messages.clear()
            continue
        answer = answered(model, tokenizer, ids, ends=ends, options=options)
        messages.append(dict(role="assistant", content=answer))
    common.say()


def answered(model: GPT, tokenizer, ids: list[int], *, ends: list[int], options: dict) -> str:
    """Writes an answer as it comes, and returns it."""
    streamer = None
    if common.RANK == 0:
        from transformers import TextStreamer

        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    room = model.config.max_positions - len(ids)
    options = options | dict(max_new_tokens=min(options["max_new_tokens"], room), eos_token_id=ends)
    if options.get("stop_strings"):
        options["tokenizer"] = tokenizer
    with interrupts() as interrupted:
        prompt = torch.tensor([ids], device=model.embedding.weight.device)
        on_prompt = Progress() if common.RANK == 0 else None
        listening = dict(streamer=streamer, on_prompt=on_prompt, on_token=lambda _: interrupted())
        tokens: Tensor = model.generate(prompt, **options, **listening)
    if interrupted():
        common.say()
    return tokenizer.decode(tokens[0, len(ids) :], skip_special_tokens=True)


def templated(tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """Returns the tokens of a conversation, up to where its next answer begins."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def fitting(tokenizer, messages: list[dict[str, str]], most: int) -> list[int]:
    """Returns the conversation as tokens with room for an answer, its oldest turns forgotten where it is too long; none
    where the last message alone is."""
    while messages:
        ids = templated(tokenizer, messages)
        if len(ids) < most:
            return ids
        del messages[:2]
    return []


def read_line() -> str | None:
    """Returns what was written at the prompt, which is not empty; None at the end."""
    try:
        while not (line := input(PROMPT).strip()):
            pass
        return line
    except (EOFError, KeyboardInterrupt):
        return None


def together(read) -> str | None:
    """Returns what the first process reads, on all of them."""
    line = [read() if common.RANK == 0 else None]
    dist.broadcast_object_list(line, src=0)
    return line[0]


# ---- Ctrl-C


@contextlib.contextmanager
def interrupts() -> Iterator:
    """Inside, Ctrl-C ends no process: what is yielded says whether it came.

    torchrun would end all processes at the signal, so a terminal sends the character in its place, which the first
    process reads; without one the signal is caught.
    """
    came: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    terminal = sys.stdin.fileno() if common.RANK == 0 and sys.stdin.isatty() else None

    def interrupted() -> bool:
        if terminal is not None and not came and select.select([terminal], [], [], 0)[0]:
            came.extend([signal.SIGINT] * (CTRL_C in os.read(terminal, 1024)))
        return bool(came)

    try:
        with contextlib.nullcontext() if terminal is None else characters(terminal):
            yield interrupted
            terminal = None
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def characters(terminal: int) -> Iterator[None]:
    """Inside, a terminal hands on each key at once, Ctrl-C too, and shows none."""
    import termios

    previous = termios.tcgetattr(terminal)
    plain = termios.tcgetattr(terminal)
    plain[3] &= ~(termios.ISIG | termios.ICANON | termios.ECHO)
    termios.tcsetattr(terminal, termios.TCSADRAIN, plain)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, previous)


class Progress:
    """``generate``'s on_prompt: a bar while a long prompt is read, which comes in several pieces."""

    def __init__(self):
        self.bar = None

    def __call__(self, finished: int, columns: int) -> None:
        if self.bar is None and finished < columns:
            from tqdm import tqdm

            self.bar = tqdm(total=columns, desc="reading the prompt", unit=" tokens", leave=False)
        if self.bar is not None:
            self.bar.update(finished - self.bar.n)
            if finished == columns:
                self.bar.close()
