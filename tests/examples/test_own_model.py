"""A model of one's own: the same losses at every split, under torchrun and plain python."""

import re

import pytest

from tests.examples.launch import ok, run

SMALL = "--steps", "4", "--width", "32", "--seq", "32", "--batch", "4", "--data"
DROPOUT = "--dropout", "0.2"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"line {i}: {'abcdefgh'[i % 8] * (i % 5)}\n" for i in range(2000)))
    return str(path)


def losses(said: str) -> list[float]:
    found = [float(x) for x in re.findall(r"step +\d+: ([0-9.]+) bits per byte", said)]
    assert len(found) == 2 and found[1] < found[0]
    return found


@pytest.mark.parametrize("procs, split", [(2, []), pytest.param(4, ["--tp", "2"], marks=pytest.mark.slow)])
def test_the_losses_do_not_depend_on_the_split(text, procs, split):
    alone = losses(ok("own_model.py", *SMALL, text, *DROPOUT, procs=0))
    assert losses(ok("own_model.py", *SMALL, text, *DROPOUT, *split, procs=procs)) == pytest.approx(alone, abs=2e-4)


WRONG = [
    (["--batch", "3", "--tp", "1"], "--batch 3 is not divisible by the 2 replicas"),
    (["--tp", "3"], "--tp 3 does not divide the 2 processes"),
    (["--heads", "3"], "is not divisible by num_heads=3"),
]


@pytest.mark.slow
@pytest.mark.parametrize("flags, message", WRONG)
def test_what_is_wrong_is_one_line(text, flags, message):
    done = run("own_model.py", *SMALL, text, *flags, procs=2)
    assert done.returncode != 0 and message in done.stderr
