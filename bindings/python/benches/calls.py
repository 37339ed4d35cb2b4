"""What a call from Python costs over the Rust API, and what a second thread gets done while bytes move.

    VENV/bin/python bindings/python/benches/calls.py [--millstream target/release/millstream] [--rounds 5]

VENV is a virtual environment with the wheel of ``cargo xtask wheel``. Single requests over ``shm`` are measured by
``millstream bench transfer``, which says how long a request takes, and by calls in a row here, by turns. Then a
thread counts in a loop alone, and while another one waits for WRITEs of 64 MiB over ``tcp``, for half a second each, by turns:
its progress beside the other is what the lock of the interpreter and the machine's processors leave to it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time

import numpy

import millstream

SIZES = {"64B": 64, "4KiB": 4096}
AIM_US = 2.0
#: Calls in a row, of which the mean is taken; the median of many such is what counts.
CALLS = 500


def rust(program, size):
    """The median of a request in Rust, from its submission to its end."""
    arguments = ["--op", "write", "--block-size", size, "--batch-size", "1", "--duration", "300ms", "--protocol", "shm"]
    command = [program, "bench", "transfer", "--working-set", "1MiB", "--json"]
    done = subprocess.run(command + arguments, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)["latency_us"]["p50"]


def target():
    """What a process of its own serves, until its input ends."""
    with millstream.Engine(transports=["shm"]) as engine:
        region = engine.allocate(1 << 20)
        print(engine.name, flush=True)
        sys.stdin.read()
        del region


def python(length):
    """The time of a call in Python that writes and waits, with the loop around it."""
    peer = subprocess.Popen([sys.executable, __file__, "--target"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        with millstream.Engine(transports=["shm"]) as engine:
            region = engine.allocate(length)
            segment = engine.open(peer.stdout.readline().strip())
            there = segment.buffers[0].address
            times, end = [], time.perf_counter() + 0.3
            while time.perf_counter() < end:
                start = time.perf_counter()
                for _ in range(CALLS):
                    engine.write(segment, region, there).wait(10)
                times.append((time.perf_counter() - start) / CALLS * 1e6)
            return statistics.median(times)
    finally:
        peer.stdin.close()
        peer.wait()


def calls(program, rounds):
    for size, length in SIZES.items():
        found = {rust: [], python: []}
        for turn in range(rounds):
            for way in [rust, python] if turn % 2 else [python, rust]:
                found[way].append(rust(program, size) if way is rust else python(length))
        there, here = (statistics.median(found[way]) for way in (rust, python))
        print(f"WRITE {size:>5} over shm: Rust {there:.2f} us, Python {here:.2f} us, more {here - there:.2f} us (aim {AIM_US})")


def counted(seconds):
    count, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        count += 1
    return count


def progress(rounds, length=64 << 20, seconds=0.5):
    here, there = (numpy.ones(length, numpy.uint8) for _ in range(2))
    with millstream.Engine(transports=["tcp"]) as target, millstream.Engine(transports=["tcp"]) as engine:
        target.register(there)
        region = engine.register(here)
        segment = engine.open(target.name)
        end, moved = threading.Event(), 0

        def move():
            nonlocal moved
            while not end.is_set():
                moved += engine.write(segment, region, segment.buffers[0]).wait(60)

        ratios, rates = [], []
        for _ in range(rounds):
            alone = counted(seconds)
            end.clear()
            moved, start = 0, time.perf_counter()
            mover = threading.Thread(target=move)
            mover.start()
            beside = counted(seconds)
            end.set()
            mover.join()
            rates.append(moved / (time.perf_counter() - start) / 1e9)
            ratios.append(beside / alone)
    cores = len(os.sched_getaffinity(0))
    print(f"a second thread on {cores} cores: {statistics.median(ratios):.2f} of what it does alone, beside {statistics.median(rates):.2f} GB/s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millstream", default="target/release/millstream", help="the command")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--target", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.target:
        return target()
    calls(arguments.millstream, arguments.rounds)
    progress(arguments.rounds)


main()
