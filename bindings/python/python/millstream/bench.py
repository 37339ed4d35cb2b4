"""``python -m millstream.bench``: reads and writes of a segment, one row for each way and size.

The columns are those of ``millstream bench transfer``; the requests are made in Python.
"""

import argparse
import json
import subprocess
import sys
import threading
import time

from . import Engine
from .errors import Error

BLOCK_SIZES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20]
UNITS = {"B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def size(text):
    """``64KiB`` as bytes."""
    number = text.rstrip("bBiIkKmMgG")
    unit = text[len(number) :].upper() or "B"
    if not number.isdigit() or unit not in UNITS or int(number) == 0:
        raise argparse.ArgumentTypeError(f"{text} is no size such as 64KiB")
    return int(number) * UNITS[unit]


def seconds(text):
    """``100ms`` as seconds."""
    for unit, scale in (("ms", 1e-3), ("s", 1.0), ("", 1.0)):
        if text.endswith(unit):
            try:
                value = float(text.removesuffix(unit)) * scale
            except ValueError:
                break
            if value > 0:
                return value
            break
    raise argparse.ArgumentTypeError(f"{text} is no time such as 1s or 100ms")


def readable(count):
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count // scale} {unit}" if count % scale == 0 else f"{count / scale:.1f} {unit}"
    return f"{count} B"


def three_digits(figure):
    """A figure with three digits that count."""
    if figure <= 0:
        return f"{figure:.2f}"
    digits = 0
    scaled = figure
    while scaled < 100 and digits < 6:
        scaled *= 10
        digits += 1
    return f"{figure:.{digits}f}"


def arguments():
    parser = argparse.ArgumentParser(prog="python -m millstream.bench", description=__doc__)
    parser.add_argument("--segment", help="its HOST:PORT [default: that of a process started for this]")
    parser.add_argument("--op", choices=["read", "write"], help="what to do [default: write, then read]")
    parser.add_argument("--block-size", type=size, help="bytes of a request [default: 4KiB to 4MiB]")
    parser.add_argument("--batch-size", type=int, default=16, help="requests of a batch [default: 16]")
    parser.add_argument("--threads", type=int, default=1, help="threads that submit batches [default: 1]")
    parser.add_argument("--working-set", type=size, default=64 << 20, help="bytes of each side [default: 64MiB]")
    parser.add_argument("--duration", type=seconds, default=1.0, help="of each row [default: 1s]")
    parser.add_argument("--protocol", default="auto", help="auto, shm, tcp, rdma, rdma:soft, rdma:ibverbs")
    parser.add_argument("--bind", default="127.0.0.1", help="the address of this side")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.batch_size < 1 or chosen.threads < 1:
        parser.error("--batch-size and --threads are at least 1")
    return chosen


def serve(chosen):
    """Offers memory until its standard input ends."""
    with Engine(chosen.bind, transports=[chosen.protocol]) as engine:
        engine.allocate(chosen.working_set)
        print(engine.name, flush=True)
        sys.stdin.read()


class Worker(threading.Thread):
    """Submits a batch, waits until it is done, and submits the next, of the next blocks."""

    def __init__(self, engine, segment, region, chosen, op, block, number):
        super().__init__()
        self.engine, self.segment, self.op, self.block = engine, segment, op, block
        self.batch_size, self.duration = chosen.batch_size, chosen.duration
        self.here, self.there = region.address, segment.buffers[0].address
        self.blocks = min(region.length, segment.buffers[0].length) // block
        self.at = number * self.blocks // chosen.threads
        self.latencies = []
        self.moved = 0
        self.transport = None
        self.failure = None

    def once(self):
        batch = self.engine.batch()
        add = batch.write_many if self.op == "write" else batch.read_many
        numbers = range(self.at, self.at + self.batch_size)
        offsets = [number % self.blocks * self.block for number in numbers]
        here, there = ([start + offset for offset in offsets] for start in (self.here, self.there))
        add(self.segment, here, there, self.block)
        self.at += self.batch_size
        begun = time.perf_counter()
        transfer = batch.submit()
        self.moved += transfer.wait()
        self.latencies.append(time.perf_counter() - begun)
        if self.transport is None:
            self.transport = transfer.status[-1].transport

    def run(self):
        try:
            until = time.perf_counter() + self.duration
            self.once()
            while time.perf_counter() < until:
                self.once()
        except Error as error:
            self.failure = error


def measure(engine, segment, region, chosen, op, block):
    make = lambda number: Worker(engine, segment, region, chosen, op, block, number)
    # Connects.
    make(0).once()
    workers = [make(number) for number in range(chosen.threads)]
    begun, cpu = time.perf_counter(), time.process_time()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    elapsed, cpu = time.perf_counter() - begun, time.process_time() - cpu
    for worker in workers:
        if worker.failure is not None:
            raise worker.failure
    latencies = sorted(latency for worker in workers for latency in worker.latencies)
    moved = sum(worker.moved for worker in workers)
    quantile = lambda part: latencies[min(int(len(latencies) * part), len(latencies) - 1)] * 1e6
    return {
        "op": op,
        "transport": workers[0].transport,
        "block_size": block,
        "batch_size": chosen.batch_size,
        "threads": chosen.threads,
        "working_set": chosen.working_set,
        "seconds": elapsed,
        "bytes": moved,
        "requests": len(latencies) * chosen.batch_size,
        "gb_per_s": moved / 1e9 / elapsed,
        "requests_per_s": len(latencies) * chosen.batch_size / elapsed,
        "latency_us": {"p50": quantile(0.5), "p99": quantile(0.99), "p999": quantile(0.999)},
        "cpu_s_per_gb": cpu / (moved / 1e9),
    }


def print_row(row):
    latency = row["latency_us"]
    print(
        f"{row['op']:<6}{readable(row['block_size']):>9}{row['batch_size']:>7}{row['threads']:>9}"
        f"{row['requests']:>11}{three_digits(row['gb_per_s']):>8}{row['requests_per_s']:>12.0f}"
        f"{three_digits(latency['p50']):>9}{three_digits(latency['p99']):>9}"
        f"{three_digits(row['cpu_s_per_gb']):>10}",
        flush=True,
    )


def run(chosen, name):
    rows = []
    with Engine(chosen.bind, transports=[chosen.protocol]) as engine:
        segment = engine.open(name)
        if not segment.buffers:
            sys.exit(f"segment {name} has no memory to read or write")
        region = engine.allocate(chosen.working_set, remote=False)
        region.write(0, bytes(range(256)) * 16)
        room = min(chosen.working_set, segment.buffers[0].length)
        blocks = [chosen.block_size] if chosen.block_size else BLOCK_SIZES
        blocks = [block for block in blocks if block <= room]
        if not blocks:
            sys.exit(f"--block-size: the buffer of segment {name} has only {room} bytes")
        if not chosen.json:
            transport = next((transport for transport, taken, _ in segment.paths() if taken), "nothing")
            print(
                f"segment {name} over {transport}, {chosen.duration:g}s a row; latencies are of whole batches"
            )
            print(
                f"{'op':<6}{'bytes':>9}{'batch':>7}{'threads':>9}{'requests':>11}{'GB/s':>8}{'requests/s':>12}"
                f"{'p50 us':>9}{'p99 us':>9}{'CPU s/GB':>10}"
            )
        for op in [chosen.op] if chosen.op else ["write", "read"]:
            for block in blocks:
                row = measure(engine, segment, region, chosen, op, block)
                rows.append(row)
                if not chosen.json:
                    print_row(row)
    if chosen.json:
        print(json.dumps(rows[0] if len(rows) == 1 else {"rows": rows}))


def main():
    chosen = arguments()
    try:
        if chosen.serve:
            return serve(chosen)
        if chosen.segment:
            return run(chosen, chosen.segment)
        program = [sys.executable, "-m", "millstream.bench", "--serve", "--protocol", chosen.protocol]
        program += ["--bind", chosen.bind, "--working-set", str(chosen.working_set)]
        with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
            name = peer.stdout.readline().strip()
            if not name:
                sys.exit("the process to measure against did not start")
            run(chosen, name)
            peer.stdin.close()
    except Error as error:
        sys.exit(f"python -m millstream.bench: {error}")


if __name__ == "__main__":
    main()
