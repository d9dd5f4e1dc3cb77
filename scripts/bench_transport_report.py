"""What bench_transport.py prints at the end and writes to a file: targets beside what was found, and tables."""

import json
import statistics

from bench_transport_machine import spread

BIG, BATCH = "16 MiB of random bytes", "the batch, Arrow bytes"
OURS, BARE = "ring", "ring (bare link, no API)"
RAY, FASTAPI, UNIX = "ray put/get", "fastapi", "unix socket"
CODEC = "ours, straight into the slot, to packed columns"
HOW_TO_READ = (
    '* "ring" is the product, `OperatorChannel.send` to `SidecarHub.receive` and release: codec, checks, leases and',
    "  counters. Its round trip is that of scores; a small message is one row of one ragged column.",
    '* "ring (bare link, no API)" is its protocol alone. The other links carry raw bytes without codec, checks or',
    "  leases: that is the row to compare them with.",
    "* What the API adds is processor time for each message: much beside 1 KiB, little beside a batch of 8 MB.",
    "* End to end, where the codec is the same for everybody, a Unix socket is not far behind: most of the time is",
    "  encoding, decoding and reading.",
)


def verdicts(results):
    """One {what, found, wanted, verdict} for each target whose rows are there; "met", "missed" or "shown"."""
    made = []

    def add(what, values, wanted=None, at_least=True, digits=2):
        if not values:
            return
        middle = statistics.median(values)
        met = wanted is None or (middle >= wanted if at_least else middle <= wanted)
        sign = "" if wanted is None else f"{'at least' if at_least else 'at most'} {wanted:g}"
        verdict = "shown" if wanted is None else "met" if met else "missed"
        found = spread(values, digits=digits)
        made.append({"what": what, "found": found, "wanted": sign or "no target", "verdict": verdict})

    for title, short in ((BIG, "16 MiB"), (BATCH, "the batch")):
        _throughput(results[title], short, add, made)
    _latency(results["latency"], add)
    add("idle reader, share of a core", [results["idle reader"]], 0.01, False, 4)
    end, codec = results["end to end"], results["codecs"].get(CODEC)
    if OURS in end:
        add("end to end, experiences/s", end[OURS][0], 20000, digits=0)
        for name in (UNIX, RAY, FASTAPI):
            if name in end:
                target = {UNIX: None, RAY: 1.3, FASTAPI: 3}[name]
                add(f"end to end over {name}, the same Arrow bytes", _over(end[OURS][0], end[name][0]), target)
    if codec:
        add("encode a batch, ms", [v * 1e3 for v in codec[0]], 8, False)
        add("decode a batch, ms", [v * 1e3 for v in codec[1]], 0.5, False)
    return made


def _over(ours, theirs, inverse=False):
    """Ratios round by round against the other's median: ours / theirs, or theirs / ours where less is better."""
    middle = statistics.median(theirs)
    return [middle / v if inverse else v / middle for v in ours]


def _throughput(rows, short, add, made):
    if OURS not in rows:
        return
    add(f"{short}, of memcpy", rows[OURS][1], 0.8)
    best = max(
        (name for name in rows if name not in (OURS, BARE)),
        key=lambda name: statistics.median(rows[name][1]),
        default=None,
    )
    if best is not None:
        # Of memcpy, not GB/s: each round against the copy right before it, so that the machine's drift is out.
        add(f"{short}, over the best peer ({best})", _over(rows[OURS][1], rows[best][1]), 1)
        if made[-1]["verdict"] == "missed" and max(rows[OURS][1]) >= min(rows[best][1]):
            made[-1]["verdict"] = "missed, within the spread"
    add(f"{short}, writer CPU s/GB", rows[OURS][2], 0.25, False)
    add(f"{short}, reader CPU s/GB", rows[OURS][3], 0.20, False)
    for name, target in ((RAY, 2 if short == "16 MiB" else 3), (FASTAPI, 10)):
        if name in rows:
            add(f"{short}, over {name}", _over(rows[OURS][0], rows[name][0]), target)


def _latency(rows, add):
    if OURS not in rows:
        return
    ours = rows[OURS]
    for key, words, limits in (
        ("hot", "hot one way", (25, 100)),
        ("idle", "idle one way", (150, 500)),
        ("hot_rtt", "round trip of scores", (50, 150)),
    ):
        for place, name in ((0, "p50"), (1, "p99")):
            add(f"1 KiB {words} {name}, us", [v[place] for v in ours[key]], limits[place], False, 0)
    add("1 KiB, messages/s", ours["rate"], 100_000, digits=0)
    add("1 KiB, messages/s, lengths vary", ours.get("rate, lengths vary"), None, digits=0)
    for name, target in ((RAY, 40), (FASTAPI, 50)):
        if name in rows:
            for key, words in (("hot", "hot one way"), ("hot_rtt", "hot round trip"), ("idle", "idle one way")):
                mine, theirs = [v[0] for v in ours[key]], [v[0] for v in rows[name][key]]
                add(f"1 KiB {words}, under {name}", _over(mine, theirs, True), target if key == "hot" else None)
            add(f"1 KiB, messages/s over {name}", _over(ours["rate"], rows[name]["rate"]), 10)


def report(results, where):
    """Write WHERE.md and WHERE.json."""
    lines = ["# Transport benchmark", "", f"`{results['command']}`, {results['machine']}, {results['seconds']} s."]
    lines += ["Medians over rounds (min..max). See the script for what each column means.", "", *HOW_TO_READ, ""]
    lines += ["## Targets", "", "| what | found | wanted | |", "|---|---|---|---|"]
    lines += [f"| {v['what']} | {v['found']} | {v['wanted']} | {v['verdict']} |" for v in results["verdicts"]] + [""]
    for title in (BIG, BATCH):
        lines += [f"## Throughput: {title}", "", "| peer | GB/s | of memcpy | writer CPU s/GB | reader CPU s/GB |"]
        lines += ["|---|---|---|---|---|"]
        lines += [f"| {n} | {' | '.join(spread(column) for column in row)} |" for n, row in results[title].items()]
        lines.append("")
    lines += [
        "## Latency of 1 KiB, microseconds (p50 / p99 of each round)", "",
        "| peer | hot one way | hot round trip | idle one way | idle round trip | messages/s |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, row in results["latency"].items():
        cells = [
            f"{spread([v[0] for v in row[k]], digits=0)} / {spread([v[1] for v in row[k]], digits=0)}"
            for k in ("hot", "hot_rtt", "idle", "idle_rtt")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {spread(row['rate'], digits=0)} |")
    lines += [
        "", "## End to end: torch to torch, the codec held constant (the same Arrow bytes)", "",
        "| peer | experiences/s | writer CPU ms/batch |", "|---|---|---|",
    ]  # fmt: skip
    lines += [f"| {n} | {spread(r[0], digits=0)} | {spread(r[1], 1e3, 1)} |" for n, r in results["end to end"].items()]
    lines += [
        "", "## Codecs: one batch, one core, milliseconds", "", "| codec | encode | decode | MB |", "|---|---|---|---|"
    ]  # fmt: skip
    lines += [
        f"| {n} | {spread(e, 1e3)} | {spread(d, 1e3)} | {size / 1e6:.2f} |"
        for n, (e, d, size) in results["codecs"].items()
    ]
    where.parent.mkdir(parents=True, exist_ok=True)
    where.with_suffix(".md").write_text("\n".join(lines) + "\n")
    where.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
