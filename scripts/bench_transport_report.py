"""What bench_transport.py prints at the end and writes to a file: targets beside what was found, and tables."""

import json
import statistics

from bench_transport_machine import spread

BIG, BATCH = "16 MiB of random bytes", "the batch, Arrow bytes"
OURS, BARE = "ring", "ring (bare link, no API)"
RAY, FASTAPI, UNIX = "ray put/get", "fastapi", "unix socket"
CODEC = "ours, straight into the slot, to packed columns"
HOW_TO_READ = (
    '* "ring" is the product, `OperatorChannel.send` to `SidecarHub.receive` and release, with the codec: rows are',
    "  checked, encoded as Arrow, decoded and checked again, leased and counted. A small message is one row of one",
    "  ragged column; the round trip is that of scores. That is what a user's experience pays.",
    '* "ring (bare link, no API)" is the transport alone, for raw bytes: the ring\'s own writer and reader, record',
    "  header with CRC, thread locks, semaphores, and the look at whether the channel still stands. It has no codec,",
    "  leases or counters. All other rows carry raw bytes too, so this is the row to compare them with.",
    "* End to end, where the codec is the same for everybody, a Unix socket is not far behind: most of the time is",
    "  encoding, decoding and reading.",
)
WHICH_ROW = (
    "Which row a target is judged on: whatever compares with a peer or with memcpy, and the latency and rate of",
    "1 KiB, are targets for raw bytes, which is what every peer carries here; so they are judged on the bare link, the",
    "codec held constant (none). Beside it stands what the API takes with the codec, with its own verdict. Processor",
    "time, encoding, decoding and end to end are judged on the product with its codec.",
)
#: What stands behind this line of a page is by hand, and is kept when the page is written again.
KEPT = "<!-- kept -->\n"
SHORT = {OURS: "ring, with the codec", BARE: "bare link, raw bytes"}


class Table:
    """Verdicts: what was wanted, the row that it is judged on, and the other row of ours beside it."""

    def __init__(self):
        self.made = []

    def add(self, what, values, wanted=None, at_least=True, digits=2, row=OURS, beside=None):
        """`values` of the row that judges; `beside` of the other one, None where there is none."""
        if not values:
            return
        sign = "no target" if wanted is None else f"{'at least' if at_least else 'at most'} {wanted:g}"
        made = {"what": what, "wanted": sign, "row": SHORT[row]}
        made |= _judged(values, wanted, at_least, digits)
        if beside:
            made["beside"] = {"row": SHORT[OURS if row == BARE else BARE], **_judged(beside, wanted, at_least, digits)}
        self.made.append(made)


def _judged(values, wanted, at_least, digits):
    middle = statistics.median(values)
    met = wanted is None or (middle >= wanted if at_least else middle <= wanted)
    return {
        "found": spread(values, digits=digits), "verdict": "shown" if wanted is None else "met" if met else "missed"
    }  # fmt: skip


def verdicts(results):
    """One {what, wanted, row, found, verdict, beside} for each target whose rows are there."""
    table = Table()
    for title, short in ((BIG, "16 MiB"), (BATCH, "the batch")):
        _throughput(results.get(title, {}), short, table)
    _latency(results.get("latency", {}), table)
    if "idle reader" in results:
        table.add("idle reader, share of a core", [results["idle reader"]], 0.01, False, 4)
    end, codec = results.get("end to end", {}), results.get("codecs", {}).get(CODEC)
    if OURS in end:
        table.add("end to end, experiences/s", end[OURS][0], 20000, digits=0)
        for name in (UNIX, RAY, FASTAPI):
            if name in end:
                target = {UNIX: None, RAY: 1.3, FASTAPI: 3}[name]
                table.add(f"end to end over {name}, the same Arrow bytes", _over(end[OURS][0], end[name][0]), target)
    if codec:
        table.add("encode a batch, ms", [v * 1e3 for v in codec[0]], 8, False)
        table.add("decode a batch, ms", [v * 1e3 for v in codec[1]], 0.5, False)
    return table.made


def _over(ours, theirs, inverse=False):
    """Ratios round by round against the other's median: ours / theirs, or theirs / ours where less is better."""
    middle = statistics.median(theirs)
    return [middle / v if inverse else v / middle for v in ours]


def _throughput(rows, short, table):
    if OURS not in rows:
        return
    ours = rows[OURS]
    bare = rows.get(BARE, ours)

    def add(what, of, *target):
        if BARE in rows:
            table.add(f"{short}, {what}", of(bare), *target, row=BARE, beside=of(ours))
        else:
            table.add(f"{short}, {what}", of(ours), *target)

    add("of memcpy", lambda row: row[1], 0.8)
    best = max(
        (name for name in rows if name not in (OURS, BARE)),
        key=lambda name: statistics.median(rows[name][1]),
        default=None,
    )
    if best is not None:
        # Of memcpy, not GB/s: each round against the copy right before it, so that the machine's drift is out.
        theirs = rows[best][1]
        add(f"over the best peer ({best})", lambda row: _over(row[1], theirs), 1)
        for judged, values in ((table.made[-1], bare[1]), (table.made[-1].get("beside"), ours[1])):
            if judged and judged["verdict"] == "missed" and max(values) >= min(theirs):
                judged["verdict"] = "missed, within the spread"
    for name, target in ((RAY, 2 if short == "16 MiB" else 3), (FASTAPI, 10)):
        if name in rows:
            add(f"over {name}", lambda row, name=name: _over(row[0], rows[name][0]), target)
    beside = bare if BARE in rows else ([],) * 4
    table.add(f"{short}, writer CPU s/GB", ours[2], 0.25, False, beside=beside[2])
    table.add(f"{short}, reader CPU s/GB", ours[3], 0.20, False, beside=beside[3])


def _latency(rows, table):
    bare, ours = rows.get(BARE), rows.get(OURS)
    if bare is None or ours is None:
        return

    def add(what, of, *target, **how):
        table.add(f"1 KiB {what}", of(bare), *target, row=BARE, beside=of(ours), **how)

    for key, words, limits in (
        ("hot", "hot one way", (25, 100)), ("idle", "idle one way", (150, 500)),
        ("hot_rtt", "reply round trip", (50, 150)),
    ):  # fmt: skip
        for place, name in ((0, "p50"), (1, "p99")):
            add(f"{words} {name}, us", lambda row, k=key, p=place: [v[p] for v in row[k]], limits[place], False, 0)
    add("messages/s", lambda row: row["rate"], 100_000, digits=0)
    add("messages/s, lengths vary", lambda row: row.get("rate, lengths vary", []), None, digits=0)
    for name, target in ((RAY, 40), (FASTAPI, 50)):
        if name not in rows:
            continue
        theirs = rows[name]
        for key, words in (("hot", "hot one way"), ("hot_rtt", "hot round trip"), ("idle", "idle one way")):
            middles = [v[0] for v in theirs[key]]
            add(
                f"{words}, under {name}",
                lambda row, k=key, m=middles: _over([v[0] for v in row[k]], m, True),
                target if key == "hot" else None,
            )
        add(f"messages/s over {name}", lambda row, r=theirs["rate"]: _over(row["rate"], r), 10)


def target_lines(made):
    """The table of targets."""
    lines = ["| what | wanted | judged on | found | | the other row | found | |", "|---|---|---|---|---|---|---|---|"]
    for v in made:
        other = v.get("beside")
        beside = f"{other['row']} | {other['found']} | {other['verdict']}" if other else "| |"
        lines.append(f"| {v['what']} | {v['wanted']} | {v['row']} | {v['found']} | {v['verdict']} | {beside} |")
    return lines


def report(results, where):
    """Write WHERE.md and WHERE.json; sections that were not measured are left out."""
    lines = ["# Transport benchmark", "", f"`{results['command']}`, {results['machine']}, {results['seconds']} s."]
    lines += ["Medians over rounds (min..max). See the script for what each column means.", ""]
    if results["load"]:
        loads = [load for pair in results["load"].values() for load in pair]
        lines += [f"Load average at the ends of the sections: {min(loads):.1f} to {max(loads):.1f}.", ""]
    if results["cut"]:
        lines += [f"This run was cut; not measured, or not wholly: {', '.join(results['cut'])}.", ""]
    lines += [*HOW_TO_READ, "", "## Targets", "", *WHICH_ROW, "", *target_lines(results["verdicts"]), ""]
    for title in (BIG, BATCH):
        if title in results:
            lines += [f"## Throughput: {title}", "", "| peer | GB/s | of memcpy | writer CPU s/GB | reader CPU s/GB |"]
            lines += ["|---|---|---|---|---|"]
            lines += [f"| {n} | {' | '.join(spread(column) for column in row)} |" for n, row in results[title].items()]
            lines.append("")
    if "latency" in results:
        lines += _latency_lines(results["latency"])
    if results.get("end to end"):
        lines += [
            "## End to end: torch to torch, the codec held constant (the same Arrow bytes)", "",
            "| peer | experiences/s | writer CPU ms/batch |", "|---|---|---|",
        ]  # fmt: skip
        for name, row in results["end to end"].items():
            lines.append(f"| {name} | {spread(row[0], digits=0)} | {spread(row[1], 1e3, 1)} |")
        lines.append("")
    if results.get("codecs"):
        lines += [
            "## Codecs: one batch, one core, milliseconds", "", "| codec | encode | decode | MB |", "|---|---|---|---|"
        ]  # fmt: skip
        for name, (encode, decode, size) in results["codecs"].items():
            lines.append(f"| {name} | {spread(encode, 1e3)} | {spread(decode, 1e3)} | {size / 1e6:.2f} |")
    where.parent.mkdir(parents=True, exist_ok=True)
    page = where.with_suffix(".md")
    kept = page.read_text().partition(KEPT)[2] if page.exists() else ""
    page.write_text("\n".join(lines).rstrip() + (f"\n\n{KEPT}{kept}" if kept else "\n"))
    write_json(results, where.with_suffix(".json"))


def write_json(results, path):
    """All samples and verdicts; whole or not at all, as the run may be cut here too."""
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(json.dumps(results, indent=1) + "\n")
    beside.replace(path)


def _latency_lines(rows):
    lines = [
        "## Latency of 1 KiB, microseconds (p50 / p99 of each round)", "",
        "| peer | hot one way | hot round trip | idle one way | idle round trip | messages/s |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, row in rows.items():
        cells = [
            f"{spread([v[0] for v in row[k]], digits=0)} / {spread([v[1] for v in row[k]], digits=0)}"
            for k in ("hot", "hot_rtt", "idle", "idle_rtt")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {spread(row['rate'], digits=0)} |")
    return [*lines, ""]
