"""A process with Mooncake's transfer engine, which does what lines of its input say.

Each line is answered by one: `ok`, `ok` and a value, or `failed` and what the engine returned. The example
`tcp_peer` of the crate `millstream-transfer` does the same with this project's engine.
"""

import os
import sys

import numpy as np
from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode

HOST = os.environ["MC_TCP_BIND_ADDRESS"]
LENGTH = int(sys.argv[1])
STORE = sys.argv[2]
# What the segment is called, where the store has names.
NAME = HOST if STORE == "P2PHANDSHAKE" else sys.argv[3]
# What a batch of several requests leaves free between two of them, at the target.
GAP = 64


# Bytes of all patterns: a prime number, so that none repeats where anything is aligned.
PERIOD = 1_000_003
TABLE = ((np.arange(PERIOD, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(56)).astype(np.uint8)


def pattern(seed, length):
    start = seed % PERIOD
    return np.resize(np.concatenate((TABLE[start:], TABLE[:start])), length)


def transfer(engine, memory, words):
    opcode, segment = words[0], words[1]
    near, far, length, count = (int(word) for word in words[2:6])
    base = memory.ctypes.data
    sources = [base + near + i * length for i in range(count)]
    targets = [far + i * (length + GAP) for i in range(count)]
    code = TransferOpcode.Write if opcode == "write" else TransferOpcode.Read
    if len(words) > 6:
        notify = TransferNotify(words[6], words[7])
        return engine.batch_transfer_sync(segment, sources, targets, [length] * count, code, notify)
    if count == 1:
        return engine.transfer_sync(segment, sources[0], targets[0], length, code)
    return engine.batch_transfer_sync(segment, sources, targets, [length] * count, code)


def check(memory, seed, offset, length, count, gap):
    wrong = 0
    expected = pattern(seed, length * count)
    for i in range(count):
        found = memory[offset + i * (length + gap):][:length]
        wrong += int((found != expected[i * length:][:length]).sum())
    return wrong


def main():
    memory = np.zeros(LENGTH, dtype=np.uint8)
    engine = TransferEngine()
    if engine.initialize(NAME, STORE, "tcp", "") != 0:
        sys.exit("the engine did not start")
    if engine.register_memory(memory.ctypes.data, LENGTH) != 0:
        sys.exit("the memory was not registered")
    segment = f"{HOST}:{engine.get_rpc_port()}" if STORE == "P2PHANDSHAKE" else NAME
    print(f"ready {segment} {memory.ctypes.data}", flush=True)
    for line in sys.stdin:
        words = line.split()
        numbers = [int(word) for word in words[1:] if word.isdigit()]
        reply = "ok"
        if words[0] == "transfer":
            code = transfer(engine, memory, words[1:])
            reply = "ok" if code == 0 else f"failed {code}"
        elif words[0] == "fill":
            seed, offset, length = numbers
            memory[offset:offset + length] = pattern(seed, length)
        elif words[0] == "clear":
            memory[:] = 0
        elif words[0] == "check":
            reply = f"ok {check(memory, *numbers)}"
        elif words[0] == "check_zero":
            offset, length = numbers
            reply = f"ok {int(np.count_nonzero(memory[offset:offset + length]))}"
        elif words[0] == "probe":
            code = engine.send_probe(words[1])
            reply = "ok" if code == 0 else f"failed {code}"
        elif words[0] == "notifies":
            notes = engine.get_notifies()
            reply = " ".join(["ok"] + [f"{note.name}={note.msg}" for note in notes])
        else:
            reply = f"failed no command {words[0]}"
        print(reply, flush=True)
    # Its threads end with the process.
    os._exit(0)


main()
