"""A page counts as the ledger does, at sizes that it was not fitted at, in a browser too where there is one."""

import base64
import json
import re
import zlib
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from tests.tools.browser import driven
from tpfuse.kernels.runtime.launch import pretending
from tpfuse.models import GPTConfig
from tpfuse.tools.html import MOST
from tpfuse.tools.ledger import page
from tpfuse.tools.ledger.coefficients import Axes, SizeFunction
from tpfuse.tools.ledger.dryrun import Plan, fake_world, ranks_of
from tpfuse.tools.ledger.layer import PLAIN, compare
from tpfuse.tools.ledger.presets import load_config

SUBJECT = page.Subject("bert-large", load_config("bert-large"), Plan(), 8, 512, "sm_90")
# batch, seq, tp, cp, width: none is a size of the fit, but where there is one sequence
SETTINGS = [(4, 256, 1, 1, 1024), (8, 256, 1, 1, 2048), (16, 256, 1, 1, 1024), (4, 512, 1, 1, 2048)]
SETTINGS += [(8, 256, 2, 1, 1024), (16, 512, 2, 1, 2048), (1, 256, 1, 1, 1024), (1, 512, 2, 1, 2048)]
SETTINGS += [(8, 512, 1, 2, 1024), (4, 256, 1, 2, 2048), (8, 256, 2, 2, 1024), (32, 256, 2, 2, 1024)]
NAMES = "batch", "seq", "tp", "cp", "width"


@pytest.fixture(scope="module")
def data():
    """Of the variants that SETTINGS name."""
    every, named = page._variants, {(*split, batch > 1) for batch, _, *split in SETTINGS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "RANKS", (1, 2))
        patch.setattr(page, "WIDTHS", (Fraction(1), Fraction(2)))
        patch.setattr(page, "_variants", lambda subject: {v: s for v, s in every(subject).items() if v in named})
        return page.gather(SUBJECT)


def counted(batch, seq, tp, cp, width):
    """Bytes, sent bytes and flops by column, as --json has them."""
    factor = width // 1024
    config = replace(SUBJECT.config, hidden_size=width, num_heads=16 * factor, ffn_size=4096 * factor)
    with pretending("sm_90"), fake_world(tp, cp=cp) as mesh:
        ranks = ranks_of(Plan(tp, cp=cp), mesh)
        columns = compare(config, batch=batch, seq=seq, tp=ranks).json()
    return {title: [c["bytes"], c["total"]["wire"], c["total"]["flops"]] for title, c in columns.items()}


def embedded(data, batch, seq, *setting):
    """The same from a page's functions."""
    extra = lambda kind, more: dict(denominator=more) if kind == "polynomial" else dict(keys=tuple(more))
    functions = [SizeFunction(kind, tuple(values), **extra(kind, more)) for kind, values, more in data["functions"]]
    sums = {}
    key = "x".join(map(str, (*setting, min(batch, 2))))
    for title, (_, rows) in data["variants"][key].items():
        by_count = zip(*(data["rows"][row] for row in rows), strict=True)
        read, written, _, flops, wire, _ = (sum(functions[n].evaluate((batch, seq)) for n in ns) for ns in by_count)
        sums[title] = [read + written, wire, flops]
    return sums


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_functions_give_the_ledgers_totals_at_other_sizes(data, setting):
    axes = Axes.around(8, 512, positions=512)
    assert setting[0] == 1 or setting[:2] not in axes.fitted
    assert embedded(data, *setting) == counted(*setting)


def test_every_op_has_a_stretch_and_unfused_ones_are_plain_torchs(data):
    for columns in data["variants"].values():
        for title, (number, _) in columns.items():
            stretches = {op[3] for op in data["structures"][number]}
            assert all(stretches)
            if title == PLAIN:
                assert stretches == {"attention", "after attention", "mlp", "after mlp"}
            elif title.startswith("tpfuse"):
                assert stretches <= {"vectors", "attention", "after attention", "mlp", "after mlp"}


def test_a_page_is_one_small_file_that_fetches_nothing(data):
    text = page.render(dict(data, model=dict(data["model"], name="</script><script>alert(1)")))
    assert len(text.encode()) < MOST
    assert not re.search(r"http|\bfetch\(|\bimport\b|src=|@import|url\(", text)
    assert text.count("</script>") == 2
    inside = base64.b64decode(re.search(r'id="data">(.*?)</script>', text, re.S)[1])
    assert json.loads(zlib.decompress(inside))["model"]["name"] == "</script><script>alert(1)"


@pytest.mark.parametrize("batch, seq", [(1, 128), (3, 384), (2, 16384), (128, 100)])
def test_axes_go_through_the_size_asked_for(batch, seq):
    axes = Axes.around(batch, seq, positions=1 << 20)
    assert batch in axes.batch and seq in axes.seq
    assert all(b == 2 * a for values in axes for a, b in zip(values, values[1:]))


def test_a_width_that_would_have_half_a_head_is_left_out():
    odd = GPTConfig(vocab_size=64, max_positions=64, hidden_size=96, num_layers=1, num_heads=3)
    assert [config.hidden_size for config in page._widths(odd)] == [96, 192]


def only_one_variant(monkeypatch):
    monkeypatch.setattr(page, "RANKS", (1,))
    monkeypatch.setattr(page, "WIDTHS", (Fraction(1),))


def planted(read):
    """``compare``, in which each op reads ``read(batch, seq)`` bytes."""

    def run(config, *, batch, seq, **options):
        comparison = compare(config, batch=batch, seq=seq, **options)
        more = lambda e: e._replace(read=read(batch, seq))
        columns = [c._replace(entries=[(part, more(e)) for part, e in c.entries]) for c in comparison.columns]
        return comparison._replace(columns=columns)

    return run


def test_counts_that_are_no_function_are_refused(monkeypatch, tmp_path):
    only_one_variant(monkeypatch)
    monkeypatch.setattr(page, "compare", planted(lambda batch, seq: batch * batch * seq))
    with pytest.raises(
        ValueError, match=r"ledger: plain torch, tp 1, cp 1, width 1024: read of addmm is no exact function"
    ):
        page.write(SUBJECT, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_counts_by_rows_and_sizes_that_fill_no_tiles_have_functions_too(monkeypatch):
    only_one_variant(monkeypatch)
    monkeypatch.setattr(page, "compare", planted(lambda batch, seq: min(batch * seq, 2048)))
    gathered = page.gather(SUBJECT._replace(batch=3, seq=100))
    assert {"rows"} < {kind for kind, *_ in gathered["functions"]}
    assert gathered["axes"]["batch"] == (1, 3, 6, 12, 24, 48)


def test_an_op_outside_of_stretches_is_refused(monkeypatch, tmp_path):
    only_one_variant(monkeypatch)
    run = planted(lambda *_: 0)

    def without(config, **options):
        comparison = run(config, **options)
        columns = [c._replace(entries=[("", e._replace(stretch="")) for _, e in c.entries]) for c in comparison.columns]
        return comparison._replace(columns=columns)

    monkeypatch.setattr(page, "compare", without)
    with pytest.raises(ValueError, match="addmm in forward belongs to no stretch"):
        page.write(SUBJECT, tmp_path / "page.html")


@pytest.mark.slow
def test_a_split_that_cannot_be_is_shown_and_one_asked_for_is_an_error(monkeypatch, tmp_path):
    only_one_variant(monkeypatch)
    monkeypatch.setattr(page, "RANKS", (3,))
    assert "3" in page.gather(SUBJECT)["variants"]["3x1x1024x2"]
    with pytest.raises(ValueError):
        page.write(SUBJECT._replace(plan=Plan(3)), tmp_path / "page.html")


# ---- in a browser ----

DRIVE = """
while (!document.body.dataset.columns) await new Promise(then => setTimeout(then, 10)); // until the page is drawn
const set = (id, n) => { const x = document.getElementById(id); x.value = n; x.dispatchEvent(new Event("input")); };
const shown = () => JSON.parse(document.body.dataset.columns);
const settings = SETTINGS, names = NAMES, axes = AXES, seen = [];
const choose = setting => names.forEach((id, i) => set(id, axes[id].indexOf(setting[i])));
for (const setting of settings) {
  choose(setting);
  seen.push(shown());
}
choose([8, 512, 1, 1, 1024]);
const boxes = () => [...document.querySelectorAll("[id^='fuse ']")], states = [shown()["as chosen"]];
for (const step of [0, 1]) {
  for (let i = 0; i < boxes().length; i++) { boxes()[i].click(); states.push(shown()["as chosen"]); }
}
const focusable = [...document.querySelectorAll(".op, input, select, .action")].every(x => x.tabIndex === 0);
document.getElementById("op3").click();
tell({ seen, states, focusable, boxes: boxes().length, cut: document.body.dataset.cut,
  card: document.getElementById("card").innerText, plain: shown()["plain torch"],
  wide: document.documentElement.scrollWidth });
"""


@pytest.fixture(scope="module")
def seen(data, tmp_path_factory):
    drive = DRIVE
    for name, constant in dict(SETTINGS=SETTINGS, NAMES=NAMES, AXES=data["axes"]).items():
        drive = drive.replace(name, json.dumps(constant))
    return driven(page.render(data), drive, tmp_path_factory.mktemp("browser"))


@pytest.mark.slow
def test_a_browser_shows_the_ledgers_totals(seen):
    for setting, columns in zip(SETTINGS, seen["seen"], strict=True):
        assert {title: numbers for title, numbers in columns.items() if title != "as chosen"} == counted(*setting)
        assert columns["as chosen"] == columns["tpfuse fastest"]


def test_stretches_unfused_are_plain_torch_and_fused_again_what_they_were(seen):
    count, states = seen["boxes"], seen["states"]
    assert count == 4 and states[count] == seen["plain"] != states[0] == states[-1]
    assert len(set(map(tuple, states[: count + 1]))) == count + 1


def test_labels_are_whole_and_controls_are_reached_by_key(seen):
    assert seen["cut"] == "" and seen["wide"] <= 1280 and seen["focusable"]
    assert "flops a byte" in seen["card"] and "waits for" in seen["card"]


def test_the_command_writes_it(monkeypatch, tmp_path, capsys):
    from tpfuse.__main__ import main

    only_one_variant(monkeypatch)
    path = tmp_path / "deep" / "page.html"
    assert main(["ledger", "bert-base", "--batch", "4", "--seq", "256", "--html", str(path)]) == 0
    assert "plain torch" in capsys.readouterr().out and path.read_text().startswith("<!doctype html>")
    assert torch.distributed.is_initialized() is False
