"""A day's results into bench/results/, its winners into tuned.json, and both into docs/measured.md."""

import json
import pathlib
import re

from bench import documents, measured
from bench.gpu_day.part import Part
from bench.gpu_day.parts.suite import outcomes
from bench.gpu_day.plan import parts
from bench.gpu_day.results import DONE, NAME, NOT_REACHED, Broken, load
from tpfuse.kernels.runtime import tuning as _tuning

ROWS = "rows of worth", "other rows", "rows of torch.compile"
KEPT = "counters", "time of each kernel", "CUDA graphs", "training curve", "generation", "correctness"


def report(data: dict) -> dict:
    """Returns what bench.measured reads of a day's data.  ValueError without a card."""
    rows = {name: [r for job in part["jobs"].values() for r in job["rows"]] for name, part in data["parts"].items()}
    of = lambda name: rows.get(name, [])
    card = next((row["card"] for row in of("setup") if "card" in row), None)
    if card is None:
        raise ValueError("the card was never measured, and every share is of it")
    versions = next(row["versions"] for row in of("setup") if "versions" in row)
    rows_of_ops = [row for name in ROWS for row in of(name)]
    tests = outcomes(of("gpu tests"))
    return dict(
        card=card,
        sheet=next(row["sheet"] for row in of("setup") if "card" in row),
        torch=versions.get("torch"),
        triton=versions.get("triton"),
        dry_run=False,
        calls=data["calls"],
        rows=[row for row in rows_of_ops if "op" in row],
        layers=[row for row in of("layers") if "layer" in row],
        host_us={row["provider"]: row["us"] for row in of("host time")},
        tests=tests | dict(failures=[row["test"] for row in of("gpu tests") if row.get("outcome") == "failed"]),
        notes=data["notes"] + [row["note"] for row in rows_of_ops if "note" in row],
        day=[evidence(part, data["parts"].get(part.name), of(part.name)) for part in parts(rehearse=False)],
        **{name.replace(" ", "_"): of(name) for name in KEPT},
    )


def evidence(part: Part, state: dict | None, rows: list[dict]) -> dict:
    if state is None:
        return dict(part=part.name, status=NOT_REACHED, seconds=0.0, headline="")
    headline = part.headline(rows) if state["status"] == DONE or rows else state["error"]
    return dict(part=part.name, status=state["status"], seconds=state["seconds"], headline=headline)


def with_winners(table: dict, data: dict) -> tuple[dict, int]:
    """The tuned table with the entries that a day's tuning found, and how many they are."""
    table, count = json.loads(json.dumps(table)), 0
    for job in data["parts"].get("tuning", {}).get("jobs", {}).values():
        for row in job["rows"]:
            if row.get("entry"):
                kernel = table.setdefault(row["arch"], {}).setdefault(row["kernel"], {})
                kernel[row["bucket"]] = row["entry"]
                count += 1
    by_name = lambda entries: dict(sorted(entries.items()))
    return by_name(
        {arch: by_name({k: by_name(e) for k, e in kernels.items()}) for arch, kernels in table.items()}
    ), count


def fill(folder: pathlib.Path) -> int:
    data = load(folder)
    if data["rehearsed"]:
        raise Broken(f"{folder / NAME} is of a rehearsal: its figures are a CPU's, and are never filled in")
    try:
        result = report(data)
    except ValueError as error:
        raise Broken(f"{folder / NAME}: {error}") from None
    name = re.sub(r"\W+", "_", result["card"]["name"].lower())
    measured.RESULTS.mkdir(exist_ok=True)
    path = measured.RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    table, winners = with_winners(json.loads(_tuning.TABLE.read_text()), data)
    if winners:
        _tuning.TABLE.write_text(json.dumps(table, indent=1) + "\n")
    documents.write(measured.PAGE, measured.COMMAND, measured.parts())
    print(f"{path}: {len(result['rows'])} rows; {_tuning.TABLE}: {winners} winners; {measured.PAGE}: its tables")
    for part in result["day"]:
        if part["status"] != DONE:
            print(f"{part['part']}: {part['status']}")
    return 0
