"""A program for ``mooncake.engine`` that calls every method and prints what it returns.

It runs with the original and with Millstream, and what it prints is the same. Lines begin with "= ". ``CONTRACT_TARGET``
is the interpreter of the other process, whose module may be the other one.
"""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import mooncake.engine as module
from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode

HOST = "127.0.0.1"
LENGTH = 8 << 20
NOBODY = f"{HOST}:9"


def say(what, value):
    print("=", what, value, flush=True)


def start():
    """An engine with memory."""
    engine = TransferEngine()
    if engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") != 0:
        sys.exit("the engine did not start")
    memory = np.zeros(LENGTH, np.uint8)
    return engine, memory


def serve():
    """The target: tells where it is, what messages have come, and the bytes that it has."""
    engine, memory = start()
    if engine.register_memory(memory.ctypes.data, LENGTH) != 0:
        sys.exit("the memory was not registered")
    print("ready", f"{HOST}:{engine.get_rpc_port()}", memory.ctypes.data, flush=True)
    for line in sys.stdin:
        if line.strip() == "notifies":
            notes = engine.get_notifies()
            print("ready", [(note.name, note.msg) for note in notes], flush=True)
        else:
            first, last = (int(word) for word in line.split())
            print("ready", memory[first:last].tobytes().hex(), flush=True)
    os._exit(0)


class Target:
    def __init__(self):
        python = os.environ.get("CONTRACT_TARGET", sys.executable)
        program = [python, "-W", "ignore", __file__, "serve"]
        self.process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.segment, address = self.answer().split()
        self.address = int(address)

    def answer(self):
        for line in self.process.stdout:
            if line.startswith("ready "):
                return line.removeprefix("ready ").strip()
        sys.exit("the target is gone")

    def ask(self, what):
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.answer()

    def notifies(self):
        for _ in range(200):
            told = self.ask("notifies")
            if told != "[]":
                return told
            time.sleep(0.01)
        return "[]"


def constants():
    flags = ["CUDA", "EFA", "HIP", "INTRA_NVLINK", "MNNVL", "MUSA"]
    say("flags", [getattr(module, f"SUPPORT_{flag}") for flag in flags])
    say("names", sorted(name for name in dir(module) if not name.startswith("_")))
    read, write = TransferOpcode.Read, TransferOpcode.Write
    say("opcodes", [int(read), int(write), read.name, write.value, str(read), repr(write)])
    say("opcodes are equal", [module.Read == read, module.Write == read, read == 0, TransferOpcode(1) == write])
    say("opcode of the class", TransferEngine.TransferOpcode is TransferOpcode)
    say("members", list(TransferOpcode.__members__))
    say("hashes", [hash(read), hash(write)])
    note = TransferNotify("name", "msg")
    note.msg += "!"
    say("notify", [note.name, note.msg, TransferNotify().name])
    say("methods", sorted(name for name in dir(TransferEngine) if not name.startswith("_") and "on_cuda" not in name))


def wrong_types(engine):
    calls = {
        "register_memory of a text": lambda: engine.register_memory("x", 1),
        "register_memory of a negative": lambda: engine.register_memory(-1, 1),
        "register_memory of a float": lambda: engine.register_memory(1.0, 1),
        "register_memory of nothing": lambda: engine.register_memory(None, 1),
        "register_memory beyond 64 bits": lambda: engine.register_memory(1 << 64, 1),
        "register_memory without a length": lambda: engine.register_memory(1),
        "initialize of one": lambda: engine.initialize("a"),
        "write_bytes_to_buffer of an int": lambda: engine.write_bytes_to_buffer(1, 2, 3),
        "transfer_sync with an int": lambda: engine.transfer_sync("a", 1, 2, 3, 1),
        "batch of a text": lambda: engine.batch_transfer_sync_write("a", "1", [1], [1]),
        "batch of an int": lambda: engine.batch_transfer_sync_write("a", 1, [1], [1]),
        "a peer that is no text": lambda: engine.transfer_sync_write(1, 2, 3, 4),
        "notify of one": lambda: TransferNotify("a"),
        "opcode of a text": lambda: TransferOpcode("x"),
    }
    for what, call in calls.items():
        try:
            say(what, call())
        except Exception as error:
            say(what, type(error).__name__)


def registration(engine, memory):
    at = memory.ctypes.data
    say("register_memory", engine.register_memory(at, 4096))
    say("the same again", engine.register_memory(at, 4096))
    say("overlapping", engine.register_memory(at + 100, 4096))
    say("adjacent", engine.register_memory(buffer_addr=at + 4096, capacity=4096, location="cpu:0"))
    say("no bytes", engine.register_memory(at + 8192, 0))
    say("unregister_memory", engine.unregister_memory(at))
    say("unregister_memory again", engine.unregister_memory(at))
    say("unregister_memory amid", engine.unregister_memory(at + 5000))
    say("batch, one overlapping", engine.batch_register_memory([at, at + 4096], [4096, 4096]))
    say("nothing of it was done", engine.unregister_memory(at))
    say("batch", engine.batch_register_memory([at, at + 8192], [4096, 4096]))
    say("batch of nothing", engine.batch_register_memory([], []))
    say("batch with more lengths", engine.batch_register_memory([at + 16384], [1, 2]))
    say("batch_unregister_memory", engine.batch_unregister_memory([at, at + 8192]))
    say("batch_unregister_memory again", engine.batch_unregister_memory([at, at + 4096]))
    say("the others were", engine.unregister_memory(at + 4096))
    say("batch_unregister_memory of nothing", engine.batch_unregister_memory([]))
    say("the last", engine.unregister_memory(at + 16384))


def buffers(engine):
    at = engine.allocate_managed_buffer(10_000)
    say("allocate_managed_buffer", at > 0)
    say("write_bytes_to_buffer", engine.write_bytes_to_buffer(at, b"\x00abc", 4))
    say("read_bytes_from_buffer", engine.read_bytes_from_buffer(at, 4))
    say("a text", [engine.write_bytes_to_buffer(at, "text", 3), engine.read_bytes_from_buffer(at, 4)])
    say("a bytearray", engine.write_bytes_to_buffer(at, bytearray(b"xy"), 2))
    say("free_managed_buffer", engine.free_managed_buffer(at, 10_000))
    say("free_managed_buffer of another", engine.free_managed_buffer(1, 10))
    say("allocate_managed_buffer of nothing", engine.allocate_managed_buffer(0) > 0)


def transfers(engine, memory, target):
    at, there = memory.ctypes.data, target.address
    memory[:] = np.arange(LENGTH, dtype=np.uint32).astype(np.uint8)
    say("transfer_sync_write", engine.transfer_sync_write(target.segment, at + 7, there, 100))
    say("bytes", target.ask("0 101"))
    say("transfer_sync_read", engine.transfer_sync_read(target.segment, at, there, 4))
    say("bytes here", memory[:6].tolist())
    long = (LENGTH // 2, LENGTH // 2)
    say("long", engine.transfer_sync_write(target.segment, at, there + long[0], long[1]))
    say("with a hint", engine.transfer_sync_write(target.segment, at, there, 8, "tcp"))
    say("by names", engine.transfer_sync_read(
        target_hostname=target.segment, buffer=at, peer_buffer_address=there, length=8, transport_hint=""
    ))
    say("no bytes", engine.transfer_sync_write(target.segment, at, there, 0))
    say("no bytes nowhere", engine.transfer_sync_write(target.segment, at, 1, 0))
    say("no bytes to nobody", engine.transfer_sync_write(NOBODY, at, there, 0))
    say("nobody", engine.transfer_sync_write(NOBODY, at, there, 8))
    say("no name", engine.transfer_sync_write("", at, there, 8))
    say("exactly to the end", engine.transfer_sync_write(target.segment, at, there + LENGTH - 8, 8))
    say("beyond the end", engine.transfer_sync_write(target.segment, at, there + LENGTH - 4, 8))
    say("before the beginning", engine.transfer_sync_write(target.segment, at, there - 4, 8))
    say("outside", engine.transfer_sync_write(target.segment, at, 4096, 8))
    say("around the end of addresses", engine.transfer_sync_write(target.segment, at, (1 << 64) - 4, 8))
    say("read beyond the end", engine.transfer_sync_read(target.segment, at, there + LENGTH - 4, 8))
    say("of ourselves", engine.transfer_sync_write(f"{HOST}:{engine.get_rpc_port()}", at, at + 64, 8))
    note = TransferNotify("who", "what")
    say("transfer_sync", engine.transfer_sync(target.segment, at, there, 8, TransferOpcode.Write, note))
    say("notified", target.notifies())
    say("transfer_sync, read", engine.transfer_sync(target.segment, at, there, 8, module.Read, None, ""))
    other = np.full(3_000_000, 9, np.uint8)
    say("unregistered", engine.transfer_sync_write(target.segment, other.ctypes.data, there, other.size))
    say("bytes of it", target.ask("2999998 3000002"))
    other[:] = 1
    say("unregistered, read", engine.transfer_sync_read(target.segment, other.ctypes.data, there, other.size))
    say("bytes of that", [int(other.min()), int(other.max())])
    say("nothing there here", engine.transfer_sync_write(target.segment, 1, there, 8))


def batches(engine, memory, target):
    at, there = memory.ctypes.data, target.address
    ours = [at + number * 65536 for number in range(128)]
    theirs = [there + number * 65536 for number in range(128)]
    lengths = [65536] * 128
    memory[:] = np.arange(LENGTH, dtype=np.uint32).view(np.uint8)[:LENGTH]
    say("batch_transfer_sync_write", engine.batch_transfer_sync_write(target.segment, ours, theirs, lengths))
    say("bytes", target.ask("65530 65550"))
    say("batch_transfer_sync_read", engine.batch_transfer_sync_read(target.segment, ours, theirs, lengths))
    arrays = [np.array(numbers, np.uint64) for numbers in (ours, theirs, lengths)]
    say("arrays", engine.batch_transfer_sync_write(target.segment, *arrays))
    say("nothing", engine.batch_transfer_sync_write(target.segment, [], [], []))
    for what, lists in {
        "too many addresses": ([at], [there, there], [1]),
        "too few lengths": ([at, at], [there, there], [1]),
        "too many lengths": ([at], [there], [1, 1]),
    }.items():
        say(what, engine.batch_transfer_sync_write(target.segment, *lists))
    say("one is wrong", engine.batch_transfer_sync_write(target.segment, [at, at], [there, 1], [8, 8]))
    say("one has no bytes", engine.batch_transfer_sync_write(target.segment, [at, at], [there, there], [8, 0]))
    say("nobody", engine.batch_transfer_sync_read(NOBODY, [at], [there], [8]))
    note = TransferNotify("of a batch", "all of it")
    say("batch_transfer_sync", engine.batch_transfer_sync(target.segment, ours, theirs, lengths, module.Write, note))
    say("notified", target.notifies())
    numbers = [
        engine.batch_transfer_async_write(target.segment, ours, theirs, lengths),
        engine.batch_transfer_async_read(target.segment, ours, theirs, lengths),
        engine.batch_transfer_async(target.segment, ours[:2], theirs[:2], lengths[:2], module.Read),
    ]
    say("async", [number > 0 for number in numbers])
    say("get_batch_transfer_status", engine.get_batch_transfer_status(numbers))
    say("of none", engine.get_batch_transfer_status([]))
    wrong = engine.batch_transfer_async_write(target.segment, [at], [1], [8])
    say("async, wrong", [wrong > 0, engine.get_batch_transfer_status([wrong])])
    say("async, nobody", engine.batch_transfer_async_write(NOBODY, [at], [there], [8]))
    say("async, nobody, read", engine.batch_transfer_async_read(NOBODY, [at], [there], [8]))
    say("async, nothing", engine.batch_transfer_async_write(target.segment, [], [], []) > 0)
    for what, address in {"right": there, "wrong": 1}.items():
        number = engine.transfer_submit_write(target.segment, at, address, 8)
        code = 0
        while code == 0:
            code = engine.transfer_check_status(number)
        say(f"transfer_submit_write, {what}", [number > 0, code])
    say("transfer_submit_write, nobody", engine.transfer_submit_write(NOBODY, at, there, 8))
    other = np.full(1000, 3, np.uint8)
    number = engine.batch_transfer_async_read(target.segment, [other.ctypes.data], [there], [1000])
    say("async, unregistered", engine.get_batch_transfer_status([number]))
    say("bytes of it", other[:8].tolist())


def others(engine, target):
    say("get_first_buffer_address", engine.get_first_buffer_address(target.segment) == target.address)
    say("of nobody", engine.get_first_buffer_address(NOBODY))
    say("send_probe", engine.send_probe(target.segment))
    say("send_probe to nobody", engine.send_probe(NOBODY))
    say("send_probe to no name", engine.send_probe("x"))
    say("warmup_efa_segment", engine.warmup_efa_segment(target.segment))
    say("get_notifies", engine.get_notifies())
    say("get_local_topology", json.loads(engine.get_local_topology()))
    say("get_local_topology of a device", json.loads(engine.get_local_topology("mlx5_0")))
    say("get_rpc_port", 15000 <= engine.get_rpc_port() <= 17000)


def engines():
    for values in [
        (HOST, "http://127.0.0.1:9/metadata", "tcp", ""),
        (HOST, "P2PHANDSHAKE", "tcp", ""),
        (f"{HOST}:1234", "P2PHANDSHAKE", "tcp", ""),
        (HOST, "P2PHANDSHAKE", "rdma", ""),
        ("no.such.host.invalid", "P2PHANDSHAKE", "tcp", ""),
    ]:
        say(f"initialize{values}", TransferEngine().initialize(*values))
    say("initialize_ext", TransferEngine().initialize_ext(HOST, "P2PHANDSHAKE", "tcp", "", "P2PHANDSHAKE"))
    again = TransferEngine()
    values = (HOST, "P2PHANDSHAKE", "tcp", "")
    say("initialize twice", [again.initialize(*values), again.initialize(*values)])


def as_vllm_does(engine, memory, target):
    """Ten threads write groups of blocks, and each group is done or not."""
    at, there = memory.ctypes.data, target.address
    part = LENGTH // 10

    def group(number):
        starts = range(number * part, (number + 1) * part - 4096, 4096)
        codes = set()
        for _ in range(5):
            codes.add(engine.batch_transfer_sync_write(
                target.segment, [at + start for start in starts], [there + start for start in starts],
                [4096] * len(starts),
            ))
        return codes

    memory[:] = 17
    with ThreadPoolExecutor(10) as pool:
        say("groups of ten threads", list(pool.map(group, range(10))))
    say("bytes", target.ask("100 104"))


def as_sglang_does(memory, target):
    """An engine of a worker: registered piece by piece, probed when a session has failed."""
    engine = TransferEngine()
    say("initialize", engine.initialize(HOST, "P2PHANDSHAKE", "rdma", ""))
    pieces = [memory.ctypes.data, memory.ctypes.data + 4096]
    say("batch_register_memory", engine.batch_register_memory(pieces, [4096, 4096]))
    session = f"{HOST}:{engine.get_rpc_port()}"
    say("transfer_sync", engine.transfer_sync_write(target.segment, pieces[0], target.address, 4096))
    batch = (target.segment, pieces, [target.address, target.address + 4096], [4096, 4096])
    say("batch_transfer_sync", engine.batch_transfer_sync_write(*batch))
    target.process.kill()
    target.process.wait()
    say("a session that has failed", engine.transfer_sync_write(target.segment, pieces[0], target.address, 4096) < 0)
    say("send_probe", engine.send_probe(target.segment))
    say("send_probe to itself", engine.send_probe(session))
    say("batch_unregister_memory", engine.batch_unregister_memory(pieces))


def main():
    if sys.argv[1:] == ["serve"]:
        serve()
    constants()
    target = Target()
    engine, memory = start()
    wrong_types(engine)
    registration(engine, np.zeros(1 << 16, np.uint8))
    say("the memory", engine.register_memory(memory.ctypes.data, LENGTH))
    buffers(engine)
    transfers(engine, memory, target)
    batches(engine, memory, target)
    others(engine, target)
    engines()
    as_vllm_does(engine, memory, target)
    as_sglang_does(np.zeros(8192, np.uint8), target)
    sys.stdout.flush()
    os._exit(0)


main()
