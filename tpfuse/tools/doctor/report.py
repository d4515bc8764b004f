"""The doctor's findings, as text and as JSON."""

import textwrap
from typing import Any, NamedTuple

OK, NOTE, FAULT = "ok", "note", "fault"
_MARKS = {OK: " ", NOTE: "?", FAULT: "!"}
_WIDTH = 118


class Finding(NamedTuple):
    """One line of the report; what is not ok has an advice of one sentence."""

    name: str
    value: str
    status: str = OK
    advice: str = ""


class Report:
    """Findings by section.  ``ok``: there is no fault; ``text`` is for people, :meth:`json` for programs."""

    def __init__(self, sections: dict[str, list[Finding]]):
        self.sections = sections

    @property
    def ok(self) -> bool:
        return self._count(FAULT) == 0

    @property
    def text(self) -> str:
        sections = (_section(title, findings) for title, findings in self.sections.items() if findings)
        return "\n\n".join([self._summary(), *sections])

    def json(self) -> dict[str, Any]:
        """Returns {"ok": bool, "sections": {title: [{"name", "value", "status", "advice"}, ..]}}."""
        sections = {title: [f._asdict() for f in findings] for title, findings in self.sections.items()}
        return dict(ok=self.ok, sections=sections)

    def __repr__(self) -> str:
        return self.text

    def _count(self, status: str) -> int:
        return sum(f.status == status for findings in self.sections.values() for f in findings)

    def _summary(self) -> str:
        counts = [(self._count(FAULT), "fault"), (self._count(NOTE), "note")]
        numbers = [f"{n} {word}{'s' * (n != 1)}" for n, word in counts if n]
        return f"tpfuse doctor: {', '.join(numbers) or 'all is well'}"


def _section(title: str, findings: list[Finding]) -> str:
    width = min(max(len(f.name) for f in findings), 28)
    return "\n".join([title, *(line for f in findings for line in _lines(f, width))])


def _lines(f: Finding, width: int) -> list[str]:
    head, indent = f"{_MARKS[f.status]} {f.name:{width}}  ", " " * (width + 4)
    lines = textwrap.wrap(f.value, _WIDTH, initial_indent=head, subsequent_indent=indent, break_long_words=False)
    advice = textwrap.wrap(f.advice, _WIDTH, initial_indent=f"{indent}-> ", subsequent_indent=f"{indent}   ")
    return [*(lines or [head.rstrip()]), *advice]
