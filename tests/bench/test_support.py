"""The table of what is supported: made of the tests' own report, and the one in the document."""

import json

import pytest

from bench import documents, support


def test_the_table_of_what_is_supported_is_the_one_that_was_measured():
    results, text = json.loads(support.RESULTS.read_text()), support.PAGE.read_text()
    assert documents.replaced(text, support.COMMAND, support.PART, support.table(results)) == text
    assert all(cell["error"] <= 1e-10 for features in results.values() for cell in features.values())
    assert "not tested" not in support.table(results)


def test_a_report_becomes_a_table(tmp_path):
    """Of several numbers of a cell the largest, of all R; no table where a test failed."""
    noted = [["llama", "logits", 2, 3e-15], ["llama", "logits", 4, 1e-15], ["bert", "saved and loaded", 1, 0.0]]
    properties = "".join(f"<property name='parity' value='{json.dumps(n)}'/>" for n in noted)
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testcase name='a'><properties>{properties}</properties></testcase></testsuites>")
    found = support.read(report)
    assert found["llama"] == {"logits": {"error": 3e-15, "R": [2, 4]}}
    lines = support.table(found).splitlines()
    cells = dict(zip(support.FAMILIES, (line.strip() for line in lines[2].split("|")[2:-1]), strict=True))
    assert cells == dict.fromkeys(support.FAMILIES, "not tested") | {"llama": "3e-15"}
    assert lines[-1].count("| equal |") == 1 and "| – |" in lines[-3]
    report.write_text("<testsuites><testcase name='a'><failure/></testcase></testsuites>")
    with pytest.raises(ValueError, match="a failed"):
        support.read(report)
