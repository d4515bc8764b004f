"""One record, as text and as JSON."""

import json

from tpfuse.tools.doctor.report import FAULT, NOTE, Finding, Report

WRONG = Finding("disk", "1 kB free", FAULT, "Free some.")
OLD = Finding("numpy", "1.0", NOTE, "Nobody has tested it.")
FINE = Finding("torch", "2.13")


def test_what_is_wrong_is_marked_and_counted():
    report = Report({"versions": [FINE, OLD], "nothing": [], "devices": [WRONG]})
    assert report.text.splitlines() == [
        "tpfuse doctor: 1 fault, 1 note",
        "",
        "versions",
        "  torch  2.13",
        "? numpy  1.0",
        "         -> Nobody has tested it.",
        "",
        "devices",
        "! disk  1 kB free",
        "        -> Free some.",
    ]


def test_json_has_every_field():
    values = json.loads(json.dumps(Report({"devices": [WRONG]}).json()))
    finding = dict(name="disk", value="1 kB free", status="fault", advice="Free some.")
    assert values == {"ok": False, "sections": {"devices": [finding]}}


def test_a_note_is_no_fault():
    assert Report({"versions": [FINE, OLD]}).ok and not Report({"devices": [WRONG]}).ok
    assert Report({"versions": [FINE]}).text.startswith("tpfuse doctor: all is well\n")


def test_long_values_are_wrapped():
    lines = Report({"ops": [Finding("torch", ", ".join(["linear_fwd"] * 40))]}).text.splitlines()
    assert len(lines) > 5 and max(map(len, lines)) <= 118
