"""A page runs the simulator's clock, to the bit; in a browser too, where there is one."""

import argparse
import base64
import json
import re
import zlib

import pytest

from tests.tools.browser import driven
from tpfuse.pipeline.schedules import EVERY
from tpfuse.pipeline.simulator import simulate
from tpfuse.tools.html import MOST
from tpfuse.tools.pipeline import page
from tpfuse.tools.pipeline.command import compare, page_of

TIMES = [0, 0.25, 0.5, 1, 2, 4]
NAMES = "micro_batches", "forward", "input", "weight", "message"
MESSAGES = [0.0, 0.1875, 0.25, 0.375, 0.75, 1.5]
# values of the sliders NAMES, that of messages by its place; 32 micro-batches are more actions than are numbered
SETTINGS = [(8, 1, 1, 1, 2), (4, 1, 1, 1, 2), (16, 1, 1, 1, 2), (32, 1, 1, 1, 2), (8, 2, 1, 1, 2), (8, 1, 4, 0.25, 2)]
SETTINGS += [(8, 1, 1, 0, 2), (8, 0, 1, 1, 0), (8, 1, 1, 1, 5), (16, 0.25, 2, 4, 3), (32, 4, 0.5, 2, 4)]
SETTINGS += SETTINGS[:1]
ARGS = argparse.Namespace(
    stages=4, micro_batches=8, chunks=3, forward=1.5, input=1.1, weight=0.7, communication=0.25, schedule=None
)


@pytest.fixture(scope="module")
def compared():
    return compare(ARGS, None)


def embedded(text):
    """The data of a page."""
    inside = base64.b64decode(re.search(r'id="data">(.*?)</script>', text, re.S)[1])
    return json.loads(zlib.decompress(inside))


def expected(compared, micro_batches, forward, input_, weight, message):
    """The numbers of each schedule, by the simulator; none of one that cannot run so many micro-batches."""
    totals = {}
    cases = embedded(page_of(ARGS, compared))["cases"]
    for case in cases:
        if str(micro_batches) in case["orders"]:
            name, factors = case["name"], (forward, input_, weight)
            order = page_order(name, micro_batches)
            passes = [[s * factor for s in stages] for stages, factor in zip(case["seconds"], factors, strict=True)]
            t = simulate(order, *passes, communication=MESSAGES[message])
            totals[name] = [t.seconds, t.bubble, list(t.in_flight)]
    return totals


def page_order(name, micro_batches):
    args = argparse.Namespace(**vars(ARGS) | dict(micro_batches=micro_batches))
    return compare(args, [name]).timelines[name].order


def test_it_holds_every_schedule_with_its_actions(compared):
    data = embedded(page_of(ARGS, compared))
    assert [case["name"] for case in data["cases"]] == list(EVERY) == data["selected"]
    assert data["counts"] == [4, 8, 16, 32] and data["cases"][0]["messages"] == MESSAGES and data["message"] == 2
    for case in data["cases"]:
        values, order = compared.json()[case["name"]], case["orders"]["8"]
        assert [actions.split() for actions in order["actions"]] == [
            [action["action"] for action in events] for events in values["actions"]
        ]
        assert (order["chunks"], order["copies"]) == (values["stages_a_rank"], values["copies"])
    by_name = {case["name"]: case for case in data["cases"]}
    assert list(by_name["2bw"]["orders"]) == ["8", "16", "32"]  # 4 are too few
    assert by_name["2bw"]["orders"]["8"]["begun"] == [6, 4, 2, 0]  # 2 (p - 1 - r) passes of the step before
    assert [case["name"] for case in data["cases"] if not case["orders"]["8"]["flush"]] == ["2bw", "pipedream"]


def test_it_is_one_small_file_that_fetches_nothing(compared):
    text = page_of(ARGS, compared)
    assert len(text.encode()) < MOST and text.count("</script>") == 2
    assert not re.search(r"http|\bfetch\(|\bimport\b|src=|@import|url\(", text)


def test_one_that_would_be_too_large_is_refused(monkeypatch):
    monkeypatch.setattr("tpfuse.tools.html.MOST", 1000)
    opening = page.Opening("", "", 8, message=0, selected=[])
    with pytest.raises(
        ValueError, match=r"plan: the page would have [\d,]+ bytes, and at most 1,000 are allowed: less"
    ):
        page.render([], opening, "plan", advice=": less")


def test_many_ranks_are_offered_fewer_numbers_of_micro_batches():
    args = argparse.Namespace(**vars(ARGS) | dict(stages=16, micro_batches=32))
    assert embedded(page_of(args, compare(args, ["1f1b", "zbv"])))["counts"] == [16, 32]


# ---- in a browser ----

DRIVE = """
while (!document.body.dataset.totals) await new Promise(then => setTimeout(then, 10)); // until the page is drawn
const set = (id, n) => { const x = document.getElementById(id); x.value = n; x.dispatchEvent(new Event("input")); };
const values = { micro_batches: COUNTS, forward: TIMES, input: TIMES, weight: TIMES, message: [0, 1, 2, 3, 4, 5] };
const totals = () => JSON.parse(document.body.dataset.totals), seen = [], cut = [], names = Object.keys(values);
for (const setting of SETTINGS) {
  names.forEach((id, i) => set(id, values[id].indexOf(setting[i])));
  seen.push(totals());
  cut.push(document.body.dataset.cut);
}
const shown = () => [...document.querySelectorAll("#timelines h2")].map(x => x.textContent);
const before = shown();
document.getElementById("show gpipe").click();
const without = shown(), address = location.hash;
document.getElementById("show gpipe").click();
const press = key => document.getElementById("case 1f1b").dispatchEvent(new KeyboardEvent("keydown", { key }));
const cards = ["ArrowRight", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight", "ArrowUp", "ArrowLeft"].map(key => {
  press(key);
  return document.getElementById("card").innerText;
});
const lit = document.querySelectorAll(".lit .same").length;
set("zoom", 2);
tell({ seen, cut, before, without, again: shown(), address, cards, lit, wide: document.documentElement.scrollWidth,
  text: document.querySelectorAll("section.panel[id]").length });
"""


@pytest.fixture(scope="module")
def seen(compared, tmp_path_factory):
    drive = DRIVE
    for name, constant in dict(COUNTS=[4, 8, 16, 32], TIMES=TIMES, SETTINGS=SETTINGS).items():
        drive = drive.replace(name, json.dumps(constant))
    return driven(page_of(ARGS, compared), drive, tmp_path_factory.mktemp("browser"))


@pytest.mark.slow
def test_a_browser_shows_the_simulators_numbers(seen, compared):
    for setting, totals in zip(SETTINGS, seen["seen"], strict=True):
        assert totals == expected(compared, *setting), setting
    assert seen["seen"][0] == seen["seen"][-1] != seen["seen"][4]


def test_labels_are_whole_and_schedules_can_be_left_out(seen):
    assert set(seen["cut"]) == {""} and seen["wide"] <= 1280
    assert seen["before"] == list(EVERY) == seen["again"]
    assert seen["without"] == [name for name in EVERY if name != "gpipe"] and "gpipe" not in seen["address"]


def test_arrow_keys_choose_passes_and_show_their_micro_batch(seen):
    first, *_, after, above, _ = seen["cards"]
    assert "forward, micro-batch 0" in first and "1f1b" in first
    assert "rank\n3" in after and "backward" in after and "rank\n2" in above
    assert seen["lit"] == 2 * ARGS.stages  # forward and backward on each rank
