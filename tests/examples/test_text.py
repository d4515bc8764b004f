"""The training examples' text: samples are a function of seed, step and number; held-out text is apart."""

import numpy as np
import pytest
import torch

from tests.examples.launch import example

texts = example("_text")


def test_paragraphs_are_the_text():
    raw = b"one\n\ntwo\nlines\n \nx\0a long paragraph of its own\0\n\n"
    text = texts.Text(np.frombuffer(raw, np.uint8), b"", "")
    found = [raw[start:end] for start, end in texts.paragraphs(text, 10)]
    assert found == [b"one\n\n", b"two\nlines\n", b" \n", b"x\0", b"a long par", b"agraph of ", b"its own\0", b"\n\n"]
    drawn = texts.documents(texts.paragraphs(text, 10), 64, 1, 2)
    assert np.array_equal(drawn, texts.documents(texts.paragraphs(text, 10), 64, 1, 2))
    assert not np.array_equal(drawn, texts.documents(texts.paragraphs(text, 10), 64, 1, 3))


def test_samples_are_a_function_of_seed_step_and_number():
    text = texts.Text(np.arange(1000) % 251, b"", "")
    draw = lambda step, samples, seed=0: texts.sample(text, 16, 12, seed, step, samples)
    whole = draw(3, range(12))
    assert whole.shape == (12, 16) and whole.dtype == torch.int64
    assert torch.equal(whole, torch.cat([draw(3, range(i, i + 4)) for i in (0, 4, 8)]))
    assert not torch.equal(whole, draw(4, range(12))) and not torch.equal(whole, draw(3, range(12), seed=1))


def test_every_held_out_byte_but_the_first_is_guessed_once():
    held_out = bytes(range(31))
    text = texts.Text(None, held_out, "")
    guessed = torch.cat([ids[:, 1:].reshape(-1) for ids in texts.windows(text, 7, 2)])
    assert guessed.tolist() == list(held_out[1:])


@pytest.mark.parametrize("count", [1, 3, 40])
def test_train_and_held_out_text_are_apart(tmp_path, count):
    for i in range(count):
        (tmp_path / f"{i:02}.txt").write_text(f"<{i:02}>" * 200)
    text = texts.read_text(tmp_path, 8, 16)
    again = texts.read_text(tmp_path, 8, 16)
    assert text.fingerprint == again.fingerprint and text.held_out == again.held_out
    assert (len(text.held_out) - 1) % 15 == 0
    train = bytes(text.train)
    names = [f"<{i:02}>".encode() for i in range(count)]
    both = [name for name in names if name in train and name in text.held_out]
    assert both == [] if count == 40 else len(both) <= 1
    assert len(train) + len(text.held_out) <= 800 * count + count
