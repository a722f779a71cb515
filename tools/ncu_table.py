#!/usr/bin/env python3
"""A table of what `ncu --csv` wrote (tools/ncu.sh): time, bytes and throughput of each kernel; with the JSON of
`pare bench --json` for the same call also the share of the bound, and the bytes against the ledger's.

    tools/ncu_table.py FILE.csv [--bench BENCH.json]

Reads both of ncu's layouts: a line for each metric (default page), and a column for each (--page raw).  A call of the op
is taken to launch each of its kernels as often as they appear, over the rarest one.  Of 100 % are the instructions that
could be issued (issue) and the cycles of the tensor cores; B/request are the bytes of a request to the L2 cache.
"""
import argparse
import csv
import json
import statistics
import sys

from registers import short_name

TIME, READ, WRITTEN = "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum"
REGISTERS = "launch__registers_per_thread"
SM, WARPS = "sm__throughput.avg.pct_of_peak_sustained_elapsed", "sm__warps_active.avg.pct_of_peak_sustained_active"
ISSUED = "sm__inst_issued.avg.pct_of_peak_sustained_active"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
REQUESTS, SECTORS = "lts__t_requests_srcunit_tex.sum", "lts__t_sectors_srcunit_tex.sum"  # of L2, a sector 32 bytes
UNITS = {"s": 1, "second": 1, "sec": 1, "ms": 1e-3, "msecond": 1e-3, "us": 1e-6, "usecond": 1e-6, "ns": 1e-9, "nsecond": 1e-9,
         "byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}


def number(text, unit):
    """None where ncu could not read the counter."""
    try:
        return float(text.replace(",", "")) * UNITS.get(unit, 1)
    except ValueError:
        return None


def read(path):
    """[(kernel, {metric: value})], one a launch"""
    with open(path, newline="") as f:
        lines = [line for line in f if line.startswith('"')]  # ncu's messages begin with ==, the program's with anything
    rows = [r for r in csv.reader(lines)]
    start = next((i for i, r in enumerate(rows) if "Kernel Name" in r), None)
    if start is None:
        sys.exit(f"ncu_table: {path} holds no kernel: nothing matched, or ncu failed (see its messages there)")
    launches, head = {}, None
    units = []
    for row in rows[start:]:
        if "Kernel Name" in row:  # also where several files were put together
            head, units = row, []
            block = len(launches)
            continue
        if len(row) != len(head):
            continue
        cells = dict(zip(head, row))
        if not cells["ID"]:  # the raw page's line of units
            units = row
            continue
        _, values = launches.setdefault((block, cells["ID"]), (cells["Kernel Name"], {}))
        if "Metric Name" in cells:
            values[cells["Metric Name"]] = number(cells["Metric Value"], cells["Metric Unit"])
        else:
            for i, (name, text) in enumerate(zip(head, row)):
                if "__" in name:
                    values[name] = number(text, units[i] if units else "")
    return list(launches.values())


def median(launches, metric):
    values = [v[metric] for v in launches if v.get(metric) is not None]
    return statistics.median(values) if values else None


def cell(value, pattern, scale=1):
    return "-" if value is None else format(value * scale, pattern)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv")
    parser.add_argument("--bench", help="output of `pare bench --op NAME --shape ... --json`")
    o = parser.parse_args()
    kernels = {}
    for name, values in read(o.csv):
        kernels.setdefault(short_name(name), []).append(values)
    print(f"{'kernel':44} {'launches':>8} {'us':>10} {'MB':>9} {'GB/s':>8} {'SM %':>6} {'warps %':>8} {'registers':>9} "
          f"{'issue %':>8} {'tensor %':>8} {'B/request':>9}")
    calls = min(len(v) for v in kernels.values())
    seconds = moved = 0.0
    for name, launches in sorted(kernels.items(), key=lambda k: -sum(v.get(TIME) or 0 for v in k[1])):
        t, read_, written = (median(launches, m) for m in (TIME, READ, WRITTEN))
        both = None if read_ is None or written is None else read_ + written
        rate = both / t if both is not None and t else None
        sectors, requests = median(launches, SECTORS), median(launches, REQUESTS)
        width = 32 * sectors / requests if sectors is not None and requests else None
        print(f"{name:44} {len(launches):8} {cell(t, '10.2f', 1e6):>10} {cell(both, '9.2f', 1e-6):>9} "
              f"{cell(rate, '8.0f', 1e-9):>8} {cell(median(launches, SM), '6.1f'):>6} "
              f"{cell(median(launches, WARPS), '8.1f'):>8} {cell(median(launches, REGISTERS), '9.0f'):>9} "
              f"{cell(median(launches, ISSUED), '8.1f'):>8} {cell(median(launches, TENSOR), '8.1f'):>8} "
              f"{cell(width, '9.1f'):>9}")
        seconds += (t or 0) * len(launches) / calls
        moved = None if moved is None or both is None else moved + both * len(launches) / calls
    if not o.bench:
        return
    row = json.load(open(o.bench))["rows"][0]
    ledger = row["bytes_read"] + row["bytes_written"]
    print(f"\na call of {row['op']}: {seconds * 1e6:.2f} us in kernels, {row['seconds']['median'] * 1e6:.2f} us in pare bench")
    if row["bound_seconds"] and seconds:
        print(f"  {100 * row['bound_seconds'] / seconds:.1f} % of its bound, {row['bound_seconds'] * 1e6:.2f} us")
    if moved is not None:
        print(f"  moves {moved * 1e-6:.2f} MB, {moved / ledger:.2f} times the ledger's {ledger * 1e-6:.2f} MB")


if __name__ == "__main__":
    main()
