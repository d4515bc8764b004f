"""Plans as text, JSON and pictures, and explained.

Spans: tpfuse/tools/plan/report.py and explain.py, which describe the same plans.
"""

import json
import struct

import pytest

from tests.tools.browser import driven
from tests.tools.plan import fake
from tpfuse.tools.ledger.mfu import model_flops
from tpfuse.tools.plan.explain import Scenario, binding, changes, exchanged, formulas, runner_up
from tpfuse.tools.plan.report import PUBLISHED, as_json, cells, draw, label, page_of
from tpfuse.tools.plan.split import Split
from tpfuse.tools.plan.step import STEP_PARTS


@pytest.fixture(scope="module")
def plans():
    return fake.plans(peak={"bfloat16": 1e9}, limit=200.0)


def test_a_table_of_ten(plans):
    lines, steps = plans.text().splitlines(), plans.steps
    assert len(steps) == 10 and all(part in lines[0] for part in STEP_PARTS)
    for i, (line, step) in enumerate(zip(lines[2:12], steps, strict=True)):
        assert line.startswith(f"{i + 1} =" if i and step.seconds <= 1.05 * steps[0].seconds else f"{i + 1} ")
        assert cells(step.split)[0] in line
    assert lines[-1] == str(PUBLISHED)
    assert "a rank may hold 200 B" in lines[-3] and "a tie" in lines[-4]


def test_an_interrupted_search_says_so(plans):
    stopped = plans._replace(result=plans.result._replace(complete=False))
    assert "interrupted: the best so far" in stopped.text()


def test_mfu(plans):
    step = plans.steps[0]
    flops = model_flops(plans.job.config, 64, 8)
    assert plans.mfu(step) == pytest.approx(100 * flops / (step.seconds * 4e9))
    assert fake.plans().mfu(step) is None


def test_numbers(plans):
    values = json.loads(json.dumps(plans.json()))
    best, step = values["plans"][0], plans.steps[0]
    split = {name: best[name] for name in Split._fields}
    assert Split(**split | dict(layers=tuple(split["layers"]))) == step.split
    assert sum(best["parts"].values()) == pytest.approx(best["seconds"]) == pytest.approx(step.seconds)
    assert max(m["total"] for m in best["memory"]) == step.peak and as_json(step)["micro_batches"] == step.micro_batches


def test_labels_of_a_picture_differ(plans):
    labels = [label(step.split) for step in plans.steps]
    assert len(set(labels)) == len(labels) and not any(text.endswith("-") for text in labels)
    assert label(Split(2, 1, 2, "zbv", 2, 4, "smallest", True, True)) == (
        "dp 2 x tp 1 x pp 2, micro-batch 4, smallest, full recompute, FSDP, zbv x 2"
    )


def test_cells():
    assert cells(Split(2, 1, 2, "zbv", 2, 4, "smallest", True, True)) == (
        *("dp 2 x tp 1 x pp 2", 4, "smallest, full recompute", "FSDP", "zbv x 2"),
    )
    assert cells(Split())[-2:] == ("-", "-")


def test_what_ranks_with_pieces_exchange():
    split = Split(1, 2, micro_batch=1, cp=4, cp_kind="keys", sharded=True)
    assert cells(split) == ("dp 1 x cp 4 (keys) x tp 2 x pp 1", 1, "fastest", "FSDP", "-")
    (text,) = exchanged(fake.job(), split)
    assert "each of 4 ranks has 16 of 64 positions; attention exchanges keys" in text
    assert "with heads: they cannot be divided, with keys: 12.3 kB" in text  # 16 rows, 2 x 2 x 8, to 3, of 2, 2 and 4 B
    (text,) = exchanged(fake.job(), split._replace(cp=2, cp_kind="heads"))
    assert "each of 2 ranks has 32 of 64 positions; attention exchanges heads" in text and "heads: 4.10 kB" in text
    assert exchanged(fake.job(), Split()) == []


PASSES = dict(dp=2, pp=2, schedule="zbv", chunks=2)
TOTALS = """
while (!document.body.dataset.totals) await new Promise(then => setTimeout(then, 10)); // until the page is drawn
tell({ totals: JSON.parse(document.body.dataset.totals), cut: document.body.dataset.cut,
  names: [...document.querySelectorAll("td:first-child")].map(cell => cell.innerText.trim()),
  passes: [...document.querySelectorAll("td:nth-child(2)")].map(cell => cell.innerText),
  shown: [...document.querySelectorAll("#timelines h2")].map(x => x.textContent) });
"""


def test_a_page_runs_the_plans_passes(plans, tmp_path):
    """In a browser, to the bit; plans without stages have none."""
    (piped,) = fake.plans(fixed=PASSES, keep=1, limit=200.0).steps
    alone = [step for step in plans.steps if step.split.pp == 1][:2]
    mixed = plans._replace(result=plans.result._replace(steps=[*alone, piped]))
    seen = driven(page_of(mixed), TOTALS, tmp_path)
    names, timeline = (
        [f"{i + 1}: {label(step.split)}" for i, step in enumerate(mixed.steps)],
        mixed.load(piped).timeline(),
    )
    assert seen["totals"] == {names[2]: [timeline.seconds, timeline.bubble, list(timeline.in_flight)]}
    assert seen["names"] == names and seen["passes"][:2] == ["–", "–"] != seen["passes"][1:]
    assert seen["shown"] == [names[2]] and seen["cut"] == ""


def test_explanation(plans):
    (step,) = fake.plans(fixed=dict(pp=2, dp=2), keep=1).steps
    text = formulas(plans, step)
    assert all(part in text for part in STEP_PARTS) and f"{step.micro_batches} micro-batches x" in text
    assert "by the clock less" in text and "of gradients over" in text and "adamw over" in text
    best = plans.steps[0]
    assert runner_up(plans, best).startswith("runner-up: dp")
    alone = plans._replace(result=plans.result._replace(steps=[best]))
    assert runner_up(alone, best) == "no runner-up: no other plan fits"
    faster = best._replace(seconds=0.5 * best.seconds)
    assert binding(best, dict(memory=Scenario("twice the memory", faster))).startswith("memory binds: with twice")
    assert "memory does not bind" in binding(best, dict(memory=Scenario("twice the memory", best)))
    rows = changes(best, dict(a=Scenario("more", best), b=Scenario("less", None), c=Scenario("else", step)))
    assert "the same" in rows and "nothing fits" in rows and cells(step.split)[0] in rows


def test_a_picture(tmp_path):
    """A pipeline's has the best plan's passes below, which makes it taller."""
    pytest.importorskip("matplotlib")
    sizes = {}
    for name, fixed in (("plan", dict(pp=1)), ("pipeline", PASSES)):
        plans, path = fake.plans(fixed=fixed, keep=1), tmp_path / "new" / f"{name}.png"
        assert (plans.timeline() is None) == (name == "plan")
        draw(plans, path)
        sizes[name] = struct.unpack(">II", path.read_bytes()[16:24])  # of a PNG
    assert sizes["plan"][0] == sizes["pipeline"][0] and sizes["plan"][1] < sizes["pipeline"][1]
