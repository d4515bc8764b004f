"""The tables of docs/measured.md, and a row of the README, made from the results in bench/results/; a figure without a
result says so.

python -m bench.measured
"""

import itertools
import json
import pathlib
from collections.abc import Callable
from typing import Any

from bench import documents, machine
from bench.documents import table
from tpfuse.tools.bench.definition import discover

PAGE = documents.DOCS / "measured.md"
README = documents.DOCS.parent / "README.md"
RESULTS = pathlib.Path(__file__).with_name("results")
COMMAND = "bench.measured"
NOT_YET = "not measured yet"
Case = tuple[str, ...]  # cells that tell the rows of a table apart
TIMED = dict(events="launched from Python", graph="as a CUDA graph")


def reports() -> list[dict]:
    """One for every GPU; other results lie in the same folder."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    return [report for report in results if "layers" in report and not report["dry_run"]]


# ---- figures: each takes a report and returns text, or None where the report has nothing to say ----


def pick(report: dict, op: str, mode: str, provider: str, fits=lambda shape: True) -> dict[str, dict]:
    """Shape -> row."""
    rows = [row for row in report["rows"] if (row["op"], row["mode"], row["provider"]) == (op, mode, provider)]
    return {row["shape"]: row for row in rows if fits(tuple(map(int, row["shape"].split("x"))))}


def span(values: list[float], form: str) -> str | None:
    if not values:
        return None
    low, high = (form.format(value) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def ratios(
    report: dict, op: str, mode: str, over: str, under: str, key: str = "p50_us", fits=lambda shape: True
) -> list[float]:
    """One provider's figure over another's, at every shape that has both."""
    above, below = pick(report, op, mode, over, fits), pick(report, op, mode, under, fits)
    return [above[shape][key] / below[shape][key] for shape in above if shape in below]


def norm_bandwidth(report: dict, fits) -> str | None:
    name = "reduce_bias_dropout_add_norm"
    shares = [
        [row["gbs"] / report["card"]["copy_gbs"] for row in pick(report, name, m, "tpfuse", fits).values()]
        for m in ("fwd", "bwd")
    ]
    return " / ".join(span([100 * share for share in mode], "{:.0f} %") for mode in shares) if all(shares) else None


def gelu_gemm(report: dict) -> str | None:
    return span(ratios(report, "linear_gelu", "fwd", "tpfuse", "gemm", fits=lambda shape: shape[2] >= 4096), "{:.2f}x")


def attention_flash(report: dict) -> str | None:
    parts = [
        span(ratios(report, "attention", mode, "flash", "tpfuse", fits=lambda shape: shape[4] == 128), "{:.2f}x")
        for mode in ("fwd", "bwd")
    ]
    return " / ".join(parts) if all(parts) else None


def loss_head(report: dict) -> str | None:
    keys = "p50_us", "peak_mib"
    parts = [
        span(
            ratios(report, "linear_cross_entropy", "step", "tpfuse", "torch", key, lambda s: s[-1] >= 128000), "{:.2f}x"
        )
        for key in keys
    ]
    return " / ".join(parts) if all(parts) else None


def layer_times(report: dict, layer: str) -> dict[tuple[str, str], dict]:
    """(provider, how it was timed) -> row"""
    return {(row["provider"], row["timed"]): row for row in report["layers"] if row["layer"] == layer}


def bert_layer(report: dict) -> str | None:
    times = layer_times(report, "BERT-large layer")
    timings = [timed for timed in TIMED if {("compile", timed), ("tpfuse", timed)} <= set(times)]
    ms = lambda provider, timed: times[provider, timed]["p50_ms"]
    parts = [f"{ms('compile', timed) / ms('tpfuse', timed):.2f}x {TIMED[timed]}" for timed in timings]
    return f"{', '.join(parts)}; {min(ms('tpfuse', timed) for timed in timings):.2f} ms" if parts else None


def gpt_block(report: dict) -> str | None:
    rows = [row for (name, _), row in layer_times(report, "GPT 2.7B block").items() if name == "tpfuse"]
    best = max(rows, key=lambda row: row["tflops"], default=None)
    if best is None:
        return None
    mfu = f"MFU {100 * best['mfu']:.0f} % of the data sheet's rate, " if best.get("mfu") else ""
    return f"{best['tflops']:.0f} TFLOP/s, {mfu}{100 * best['matrix_share']:.0f} % of the measured matrix rate"


def host_time(report: dict) -> str | None:
    return f"{report['host_us']['tpfuse']:.0f} us" if "tpfuse" in report["host_us"] else None


FLASH = "attention with dropout, causal, head width 128: speed over SDPA's flash backend, forward / backward"
FIGURES = {
    "fused norm, forward / backward, D 1K to 16K, of measured copy bandwidth": lambda r: norm_bandwidth(
        r, lambda s: s[2] <= 16384
    ),
    "the same at 32K": lambda r: norm_bandwidth(r, lambda s: s[2] > 16384),
    "GEMM + bias + gelu + pre-activation, K >= 4096: time over the bare GEMM's": gelu_gemm,
    FLASH: attention_flash,
    "linear_cross_entropy, V = 128K: time / peak memory over torch's": loss_head,
    "BERT-large layer (B = 8, S = 512, dropout 0.1), forward + backward: speed over torch.compile": bert_layer,
    "GPT block of 2.7B class (width 2560, S = 2048), forward + backward: model FLOPs": gpt_block,
    "host time of a fused op, forward, launch included": host_time,
}


# ---- text ----


def summary(reports: list[dict]) -> str:
    """A row a figure, a column a GPU."""
    heads = "", *([report["card"]["name"] for report in reports] or ["GPU"])
    cells = lambda figure: [figure(report) or NOT_YET for report in reports] or [NOT_YET]
    return table(heads, [[name, *cells(figure)] for name, figure in FIGURES.items()])


def ops(reports: list[dict]) -> str:
    """Every op at its shapes: tpfuse's time and share of the roofline, and how much faster it is than the others."""
    rows = {op: [(report, row) for report in reports for row in report["rows"] if row["op"] == op] for op in discover()}
    lines = {
        op: [_line(report, row) for report, row in pairs if row["provider"] == "tpfuse"] for op, pairs in rows.items()
    }
    heads = "op", "GPU", "shape", "mode", "p50 us", "GB/s", "of the roofline", "torch / tpfuse", "compile / tpfuse"
    absent = [op for op, cells in lines.items() if not cells]
    parts = [table((*heads, "error"), rows)] if (rows := list(itertools.chain(*lines.values()))) else []
    return "\n\n".join([*parts, *([f"Ops {NOT_YET}: {', '.join(absent)}."] if absent else [])])


def _line(report: dict, row: dict) -> list[str]:
    same_shape = lambda shape: "x".join(map(str, shape)) == row["shape"]
    faster = [
        span(ratios(report, row["op"], row["mode"], peer, "tpfuse", fits=same_shape), "{:.2f}") or ""
        for peer in ("torch", "compile")
    ]
    number = lambda key, form, times=1: "" if row[key] is None else form.format(times * row[key])
    share = "cache" if row.get("bound") == "cache" else number("roofline", "{:.0f} %", 100)
    cells = row["op"], report["card"]["name"], row["shape"], row["mode"]
    speeds = number("p50_us", "{:.1f}"), number("gbs", "{:.0f}"), share, *faster, number("error", "{:.1e}")
    return [*cells, *speeds]


def layers(reports: list[dict]) -> str:
    heads = "layer, forward + backward", "GPU", "", *(f"{timed}, ms" for timed in TIMED.values())
    rows = []
    for report in reports:
        for layer in dict.fromkeys(row["layer"] for row in report["layers"]):
            times = layer_times(report, layer)
            for name in dict.fromkeys(name for name, _ in times):
                cells = [f"{times[name, t]['p50_ms']:.2f}" if (name, t) in times else "" for t in TIMED]
                rows.append([layer, report["card"]["name"], name, *cells])
    return table(heads, rows)


def evidence(reports: list[dict]) -> str:
    """Each part of a day on a GPU: how it ended, and what it found in a few words."""
    parts = [(report["card"]["name"], part) for report in reports for part in report.get("day", [])]
    rows = [(part["part"], card, part["status"], part["headline"].replace("|", "/")) for card, part in parts]
    return table(("part", "GPU", "status", ""), rows)


def gpu(reports: list[dict]) -> str:
    sections = [layers(reports), *([evidence(reports)] if any("day" in report for report in reports) else [])]
    return "\n\n".join([summary(reports), *(sections if reports else []), ops(reports)])


# ---- CPU: one training step, and messages behind GEMMs ----


def of_kinds(name: str) -> list[dict]:
    """Returns the results of a bench, one for each kind of processor: NAME.json, then NAME.KIND.json."""
    paths = itertools.chain(*(sorted(RESULTS.glob(form)) for form in (f"{name}.json", f"{name}.*.json")))
    return [whole_result(path.stem) for path in paths]


def quartiles(values: list[float] | None) -> str:
    return NOT_YET if values is None else documents.spread(values)


def by_kind(kinds: list[dict], of_case: Callable[[dict], Case], value: Callable[[dict], Any]) -> dict[Case, list[Any]]:
    """Returns a value of each case that any result has on each kind of processor; None where it is missing."""
    each = [{of_case(row): value(row) for row in result["rows"]} for result in kinds]
    cases = dict.fromkeys(case for values in each for case in values)
    return {case: [values.get(case) for values in each] for case in cases}


def earliest(kinds: list[dict], of_case: Callable[[dict], Case], value: Callable[[dict], Any]) -> dict[Case, Any]:
    """Returns a value of each case, of the first kind of processor that has it."""
    return {of_case(row): value(row) for result in reversed(kinds) for row in result["rows"]}


def ratio(value: float | None) -> str:
    return NOT_YET if value is None else f"{value:.2f}"


def train_step(kinds: list[dict]) -> str:
    """A row a kind of block, dtype, dropout and provider, a column of speeds for each kind of processor; memory is the
    first's that has the row."""
    columns = machine.heads("tokens/s relative to DTensor (quartiles)", kinds)
    heads = "blocks", "dtype", "attention dropout", "", *columns, "saved bytes / sbh, per layer and rank"
    heads += ("peak memory of a step, MiB",)
    of_case = lambda row: (row["kind"], row["dtype"], f"{row['attention_dropout']:g}", row["provider"])
    speeds = by_kind(kinds, of_case, lambda row: row["speed"])
    memory = earliest(kinds, of_case, lambda row: (f"{row['saved_sbh']:.1f}", f"{row['peak_rss_mib']:.0f}"))
    lines = [(*case, *map(quartiles, each), *memory[case]) for case, each in speeds.items()]
    claims = {" ".join(c): [q[1] for q in each if q] for c, each in speeds.items() if c[3].startswith("tpfuse")}
    return with_machines(table(heads, lines), kinds, claims)


def with_machines(text: str, kinds: list[dict], claims: dict[str, list[float]] | None = None) -> str:
    """Returns a table with its machines below it, and claims that depend on them."""
    return "\n\n".join(filter(None, [text, machine.caption(kinds), machine.flips(claims or {})]))


def generate(kinds: list[dict]) -> str:
    """A row a call, a column of times for each kind of processor; CPU times and tokens are those of the first that has
    the row."""
    label = lambda row: f"prompt of {row['prompt']}" if row["name"] == "prefill" else f"{row['new']} tokens"
    of_case = lambda row: (row["model"], row["dtype"], label(row), str(row["batch"]), row["row"])
    walls = by_kind(kinds, of_case, lambda row: row["wall"])
    others = earliest(kinds, of_case, lambda row: (f"{row['cpu'][1]:.2f}", f"{100 * row['same_tokens']:.0f} %"))
    heads = "model", "dtype", "", "prompts", "", *machine.heads("wall time (quartiles)", kinds)
    lines = [(*case, *map(quartiles, each), *others[case]) for case, each in walls.items()]
    claims = {" ".join(case): [q[1] for q in each if q] for case, each in walls.items()}
    return with_machines(table((*heads, "CPU time", "same tokens"), lines), kinds, claims)


def overlap(kinds: list[dict]) -> str:
    """Milliseconds of the first kind of processor, and ratios of each; within one machine there is no link whose share
    could be hidden."""
    times = "off", "on", "auto", "DTensor", "compute", "communication"
    of_case = lambda row: (str(row["gbit"]), row["part"], str(row["backward"]))
    over_off, over_dtensor = (
        by_kind(kinds, of_case, lambda row, name=name: row[name]) for name in ("auto_over_off", "over_dtensor")
    )
    lines = []
    for row in kinds[0]["rows"]:
        direction = "forward + backward" if row["backward"] else "forward"
        part = row["part"] if row["part"] == "train step" else f"{row['part']}, {direction}"
        cells = [f"{row['gbit']:g}" if row["gbit"] else "one machine", part]
        cells += [f"{1e3 * row['seconds'][name]:.0f}" for name in times]
        cells += [f"{100 * row['hidden']:.0f} %", f"{row['limit']:.2f}"] if row["gbit"] else ["–", "–"]
        lines.append([*cells, *map(ratio, over_off[of_case(row)]), *map(ratio, over_dtensor[of_case(row)])])
    ratios = *machine.heads("auto / off", kinds), *machine.heads("auto / DTensor", kinds)
    return with_machines(table(("Gbit/s", "", *times, "hidden", "limit", *ratios), lines), kinds)


def host(kinds: list[dict]) -> str:
    """Microseconds of the host and kernels started, forward + backward, on the first kind of processor, and the host's
    time over torch's on each; "torch: .." rows stand beside the others."""
    mark = "torch: "
    plain, ours = (
        [{row["call"]: row for row in result["rows"] if row["call"].startswith(mark) == is_torch} for result in kinds]
        for is_torch in (True, False)
    )
    both = lambda row: [" + ".join(f"{n:.0f}" for n in row[key]) for key in ("us", "kernels")]
    lines = []
    for call, row in ours[0].items():
        peers = [rows.get(mark + call) for rows in plain]
        pairs = [(rows.get(call), peer) for rows, peer in zip(ours, peers, strict=True)]
        over = [ratio(sum(row["us"]) / sum(peer["us"]) if row and peer else None) for row, peer in pairs]
        cells = [*both(peers[0]), *over] if peers[0] else [""] * (2 + len(kinds))
        lines.append([call, *both(row), *cells])
    heads = (
        "",
        "host, us",
        "kernels",
        "plain torch: host, us",
        "kernels",
        *machine.heads("host time over torch's", kinds),
    )
    return with_machines(table(heads, lines), kinds)


# ---- pipelines ----


def pipeline(kinds: list[dict]) -> str:
    """A row a schedule and who runs it, a column of speeds for each kind of processor."""
    kinds = [result for result in kinds if result.get("rows")]
    if not kinds:
        return f"Training under each schedule: {NOT_YET}."
    heads = "schedule", "", *machine.heads("tokens/s over tpfuse's 1F1B (quartiles)", kinds)
    of_case = lambda row: (row["schedule"], row["provider"])
    speeds, lines, claims = by_kind(kinds, of_case, lambda row: row["speed"]), [], {}
    for row in sorted(kinds[0]["rows"], key=lambda row: row["bubble"], reverse=True):
        each, memory = speeds[of_case(row)], (f"{100 * row['bubble']:.1f}", f"{row['saved_bytes'] / 2**20:.1f}")
        lines.append((*of_case(row), *map(quartiles, each), *memory))
        both = zip(speeds.get((row["schedule"], "tpfuse"), ()), speeds.get((row["schedule"], "torch"), ()))
        claims[f"{row['schedule']}, tpfuse over torch"] = [a[1] / b[1] for a, b in both if a and b]
    text = table((*heads, "bubble %, simulated", "saved at the peak, MiB"), lines)
    return with_machines(text, kinds, claims)


def sleeping(result: dict) -> str:
    """A row a schedule: the real runtime with sleeping stages beside the simulator."""
    if not result.get("sleeping"):
        return f"Sleeping stages: {NOT_YET}."
    heads = "schedule", "the fastest step, s (the slowest)", "simulated, s", "difference", "bubble %", "simulated"
    lines = []
    for row in result["sleeping"]["rows"]:
        cells = row["schedule"], f"{row['seconds']:.3f} ({row['spread'][1]:.3f})", f"{row['simulated']:.3f}"
        shares = f"{100 * row['bubble']:.1f}", f"{100 * row['simulated_bubble']:.1f}"
        lines.append((*cells, f"{100 * row['difference']:+.1f} %", *shares))
    return table(heads, lines)


def sleeping_in_short(result: dict) -> str:
    """The row of the README."""
    label, cell = "bubble of 1F1B / ZBV; largest difference of a schedule from the simulator", NOT_YET
    if result.get("sleeping"):
        rows = {row["schedule"]: row for row in result["sleeping"]["rows"]}
        worst = max(abs(row["difference"]) for row in rows.values())
        bubbles = " / ".join(f"{100 * rows[name]['bubble']:.1f} %" for name in ("1f1b", "zbv"))
        cell = f"{bubbles}; {100 * worst:.1f} %"
    return table(("four ranks that sleep in place of computing", ""), [(label, cell)])


def whole_result(name: str) -> dict:
    """All that a bench has written; {} before it has run."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def parts() -> dict[str, str]:
    """The name of each table of the page -> its text."""
    slept = whole_result("pipeline")
    tables = {
        "train_step": train_step(of_kinds("train_step")),
        "gpu": gpu(reports()),
        "pipeline": pipeline(of_kinds("pipeline")),
        "sleeping": with_machines(sleeping(slept), [slept.get("sleeping", {})]),
    }
    makers = dict(generate=generate, host=host, overlap=overlap, overlap_wide=overlap)
    return tables | {name: make(of_kinds(name)) for name, make in makers.items()}


def short() -> dict[str, str]:
    """The tables of the README, as :func:`parts`."""
    return {"pipeline": sleeping_in_short(whole_result("pipeline"))}


if __name__ == "__main__":
    documents.write(PAGE, COMMAND, parts())
    documents.write(README, COMMAND, short())
