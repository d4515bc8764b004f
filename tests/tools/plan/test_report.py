"""Plans as text, numbers and pictures."""

import json
import struct

import pytest

from tests.tools.plan import fake
from tpfuse.tools.ledger.mfu import model_flops
from tpfuse.tools.plan.explain import Changed, binding, changes, formulas, runner_up
from tpfuse.tools.plan.report import Planned, Scale, as_json, draw, words
from tpfuse.tools.plan.search import search
from tpfuse.tools.plan.spans import Spans
from tpfuse.tools.plan.split import Split
from tpfuse.tools.plan.step import STEP_PARTS, Load


@pytest.fixture(scope="module")
def planned():
    job = fake.job(4, 8)
    return Planned(job, Scale(4, 1e9, 200.0), search(job, 4, fake.means(limit=200.0)))


def test_a_table_of_ten(planned):
    lines, steps = planned.text().splitlines(), planned.found.steps
    assert len(steps) == 10 and all(part in lines[0] for part in STEP_PARTS)
    for i, (line, step) in enumerate(zip(lines[2:12], steps, strict=True)):
        assert line.startswith(f"{i + 1} =" if i and step.seconds <= 1.05 * steps[0].seconds else f"{i + 1} ")
        assert words(step.split)[0] in line
    assert "a rank may hold 200 B" in lines[-2] and "a tie" in lines[-3]


def test_an_interrupted_search_says_so(planned):
    stopped = planned._replace(found=planned.found._replace(complete=False))
    assert "interrupted: the best so far" in stopped.text()


def test_mfu(planned):
    step = planned.found.steps[0]
    flops = model_flops(planned.job.config, 64, 8)
    assert planned.mfu(step) == pytest.approx(100 * flops / (step.seconds * 4e9))
    assert planned._replace(scale=planned.scale._replace(peak=None)).mfu(step) is None


def test_numbers(planned):
    values = json.loads(json.dumps(planned.json()))
    best, step = values["plans"][0], planned.found.steps[0]
    split = {name: best[name] for name in Split._fields}
    assert Split(**split | dict(layers=tuple(split["layers"]))) == step.split
    assert sum(best["parts"].values()) == pytest.approx(best["seconds"]) == pytest.approx(step.seconds)
    assert max(m["total"] for m in best["memory"]) == step.peak and as_json(step)["micro_batches"] == step.micro_batches


def test_words():
    assert words(Split(2, 1, 2, "zbv", 2, 4, "smallest", True, True)) == (
        *("dp 2 x tp 1 x pp 2", 4, "smallest, full recompute", "FSDP", "zbv x 2"),
    )
    assert words(Split())[-2:] == ("-", "-")


def test_why(planned):
    (step,) = search(planned.job, 4, fake.means(), fixed=dict(pp=2, dp=2), keep=1).steps
    text = formulas(planned, step)
    assert all(part in text for part in STEP_PARTS) and f"{step.micro_batches} micro-batches x" in text
    assert "by the clock less" in text and "of gradients over" in text and "adamw over" in text
    first = planned.found.steps[0]
    assert runner_up(planned, first).startswith("runner-up: dp")
    alone = planned._replace(found=planned.found._replace(steps=[first]))
    assert runner_up(alone, first) == "no runner-up: no other plan fits"
    faster = first._replace(seconds=0.5 * first.seconds)
    assert binding(first, dict(memory=Changed("twice the memory", faster))).startswith("memory binds: with twice")
    assert "memory does not bind" in binding(first, dict(memory=Changed("twice the memory", first)))
    rows = changes(first, dict(a=Changed("more", first), b=Changed("less", None), c=Changed("else", step)))
    assert "the same" in rows and "nothing fits" in rows and words(step.split)[0] in rows


def test_a_picture(planned, tmp_path):
    """Of a pipeline with the best plan's passes below, which makes it taller."""
    pytest.importorskip("matplotlib")
    step, means = planned.found.steps[0], fake.means()
    staged = step._replace(split=step.split._replace(dp=2, tp=1, pp=2, schedule="zbv", chunks=2, layers=(1,) * 4))
    spans = Spans(means.costs(planned.job, staged.split), split=True)
    timeline = Load(planned.job, staged.split, means, spans).timeline()
    sizes = {}
    for name, passes in (("plan", None), ("pipeline", timeline)):
        path = tmp_path / "new" / f"{name}.png"
        draw(planned._replace(found=planned.found._replace(steps=[staged])), path, passes)
        sizes[name] = struct.unpack(">II", path.read_bytes()[16:24])  # of a PNG
    assert sizes["plan"][0] == sizes["pipeline"][0] and sizes["plan"][1] < sizes["pipeline"][1]
