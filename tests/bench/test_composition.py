"""The tables of what works together: made of the tests' own report, and those in the document."""

import json

import pytest

from bench import composition, documents


def test_the_tables_are_those_that_were_measured():
    results, text = json.loads(composition.RESULTS.read_text()), composition.PAGE.read_text()
    for part, made in ((composition.PART, composition.table), (composition.ERRORS, composition.refusals)):
        assert documents.replaced(text, composition.COMMAND, part, made(results)) == text
    assert "not tested" not in composition.table(results)
    assert {(r, c) for r, cells in results.items() for c in cells if cells[c].startswith("refused")} == {
        *composition.REFUSED
    }


def test_a_report_becomes_tables(tmp_path):
    noted = [["GPT-2", "DDP", "2e-07"], ["MainGrad", "DDP", "refused: it: says why"], ["LoRA", "DDP", "1e-07"]]
    properties = "".join(f"<property name='composition' value='{json.dumps(n)}'/>" for n in noted)
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testcase name='a'><properties>{properties}</properties></testcase></testsuites>")
    found = composition.read(report)
    lines = composition.table(found).splitlines()
    assert lines[0].startswith("|  | DDP |") and lines[2].startswith("| GPT-2 | 2e-07 | not tested |")
    assert any(line.startswith("| MainGrad | refused |") for line in lines)
    assert "- MainGrad with DDP: `it: says why`" in composition.refusals(found)
    report.write_text("<testsuites><testcase name='a'><failure/></testcase></testsuites>")
    with pytest.raises(ValueError, match="a failed"):
        composition.read(report)
