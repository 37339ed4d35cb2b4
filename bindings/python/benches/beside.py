"""Millstream's transfers from Python beside those of Mooncake, NIXL and a plain socket, by turns, over TCP on loopback.

    python3.11 bindings/python/benches/beside.py --millstream VENV [--mooncake VENV] [--nixl VENV] [--rounds 5]

Each VENV is a virtual environment with numpy and the system's wheel in it: ``millstream`` of ``cargo xtask wheel``,
``mooncake-transfer-engine-non-cuda``, ``nixl-cu12``. Each system has two processes; both walk through 256 MiB. In each round
each system has its turn at each row, while the processes of all others stand still (SIGSTOP): NIXL's threads look for progress
without end. The order of the turns rotates. Bytes are compared before, and what crosses the interface is counted: a row in which
less than all of the payload did is marked.
"""

import argparse
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import zlib

HOST = "127.0.0.1"
ROOM = 256 << 20
ROWS = [(4 << 10, 1), (64 << 10, 1), (1 << 20, 1), (16 << 20, 1), (4 << 10, 128), (64 << 10, 128)]
#: System: whose binding it uses, and that of its target.
SYSTEMS = {
    "millstream": ("millstream", "millstream"),
    "mooncake": ("mooncake", "mooncake"),
    "millstream to mooncake": ("millstream", "mooncake"),
    "nixl": ("nixl", "nixl"),
    "nixl without thread": ("nixl", "nixl"),
    "socket": ("socket", "socket"),
}


def memory():
    import numpy

    return numpy.random.default_rng(os.getpid()).integers(0, 256, ROOM, dtype=numpy.uint8)


class Millstream:
    def __init__(self, there=None):
        import millstream

        self.engine = millstream.Engine(HOST, transports=["tcp"])
        self.memory = memory()
        self.region = self.engine.register(self.memory)
        self.here = self.memory.ctypes.data
        if there:
            self.segment = self.engine.open(there["name"])
            self.there = there["address"]

    def hello(self):
        return {"name": self.engine.name, "address": self.here}

    def transfer(self, op, offsets, size):
        here, there = self.here, self.there
        if len(offsets) == 1:
            begin = self.engine.write if op == "write" else self.engine.read
            at = offsets[0]
            begin(self.segment, self.region[at : at + size], there + at).wait()
            return
        import numpy

        batch = self.engine.batch()
        add = batch.write_many if op == "write" else batch.read_many
        places = numpy.array(offsets, dtype=numpy.uint64)
        add(self.segment, places + here, places + there, size)
        batch.submit().wait()


class Mooncake:
    def __init__(self, there=None):
        from mooncake.engine import TransferEngine

        self.engine = TransferEngine()
        assert self.engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0
        self.memory = memory()
        self.here = self.memory.ctypes.data
        assert self.engine.register_memory(self.here, ROOM) == 0
        if there:
            self.name, self.there = there["name"], there["address"]

    def hello(self):
        return {"name": f"{HOST}:{self.engine.get_rpc_port()}", "address": self.here}

    def transfer(self, op, offsets, size):
        engine, here, there = self.engine, self.here, self.there
        if len(offsets) == 1:
            one = engine.transfer_sync_write if op == "write" else engine.transfer_sync_read
            code = one(self.name, here + offsets[0], there + offsets[0], size)
        else:
            many = engine.batch_transfer_sync_write if op == "write" else engine.batch_transfer_sync_read
            places = [here + at for at in offsets], [there + at for at in offsets]
            code = many(self.name, *places, [size] * len(offsets))
        assert code == 0, code


class Nixl:
    def __init__(self, there=None, thread=True):
        import base64
        import logging

        logging.disable(logging.INFO)
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        config = nixl_agent_config(enable_prog_thread=thread, backends=[])
        self.agent = nixl_agent("initiator" if there else "target", config)
        self.agent.create_backend("UCX", {})
        self.memory = memory()
        self.here = self.memory.ctypes.data
        self.registered = self.agent.register_memory([(self.here, ROOM, 0, "")], "DRAM")
        self.lists = {}
        if there:
            peer = self.agent.add_remote_agent(base64.b64decode(there["name"]))
            self.peer = peer.decode() if isinstance(peer, bytes) else peer
            self.there = there["address"]

    def hello(self):
        import base64

        name = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return {"name": name, "address": self.here}

    def prepared(self, size):
        import numpy

        def ranges(start):
            count = ROOM // size
            starts = numpy.uint64(start) + numpy.arange(count, dtype=numpy.uint64) * numpy.uint64(size)
            return numpy.stack([starts, *(numpy.full(count, it, numpy.uint64) for it in (size, 0))], axis=1)

        if size not in self.lists:
            here = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", ranges(self.here), "DRAM")
            self.lists[size] = here, self.agent.prep_xfer_dlist(self.peer, ranges(self.there), "DRAM")
        return self.lists[size]

    def transfer(self, op, offsets, size):
        import numpy

        here, there = self.prepared(size)
        numbers = numpy.array([at // size for at in offsets], dtype=numpy.int32)
        handle = self.agent.make_prepped_xfer(op.upper(), here, numbers, there, numbers)
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        self.agent.release_xfer_handle(handle)
        assert state == "DONE", state


class Socket:
    """A stream, received where it belongs, and a byte back: what the kernel gives without any protocol."""

    def __init__(self, there=None):
        self.memory = memory()
        self.bytes = memoryview(self.memory)
        self.here = self.memory.ctypes.data
        if there:
            host, port = there["name"].split(":")
            self.stream = socket.create_connection((host, int(port)))
            self.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return
        self.listener = socket.create_server((HOST, 0))
        threading.Thread(target=self.serve, daemon=True).start()

    def hello(self):
        return {"name": "{}:{}".format(*self.listener.getsockname()), "address": self.here}

    def receive(self, stream, offsets, size):
        for at in offsets:
            end = at + size
            while at < end:
                at += stream.recv_into(self.bytes[at:end])

    def serve(self):
        stream = self.listener.accept()[0]
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while request := stream.recv(20, socket.MSG_WAITALL):
            op, first, size, count = request[:1], *(int.from_bytes(request[at : at + 6], "big") for at in (1, 7, 13))
            offsets = [(first + number * size) % ROOM for number in range(count)]
            if op == b"w":
                self.receive(stream, offsets, size)
                stream.sendall(b".")
            else:
                for at in offsets:
                    stream.sendall(self.bytes[at : at + size])

    def transfer(self, op, offsets, size):
        numbers = b"".join(it.to_bytes(6, "big") for it in (offsets[0], size, len(offsets)))
        self.stream.sendall(op[:1].encode() + numbers + b"\0")
        if op == "write":
            for at in offsets:
                self.stream.sendall(self.bytes[at : at + size])
            self.stream.recv(1)
        else:
            self.receive(self.stream, offsets, size)


def binding(name, there=None):
    if name == "nixl without thread":
        return Nixl(there, thread=False)
    return {"millstream": Millstream, "mooncake": Mooncake, "nixl": Nixl, "socket": Socket}[name](there)


def sent():
    with open("/sys/class/net/lo/statistics/tx_bytes") as file:
        return int(file.read())


def measure(side, op, size, count, seconds):
    places = ROOM // size
    at, times = side.__dict__.get("at", 0), []
    until = time.perf_counter() + seconds
    while True:
        offsets = [(at + number) % places * size for number in range(count)]
        at += count
        begun = time.perf_counter()
        side.transfer(op, offsets, size)
        ended = time.perf_counter()
        times.append(ended - begun)
        if ended >= until:
            break
    side.at = at
    return times


def processor():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def process():
    """One side: answers a line of JSON with one."""
    name, there = sys.argv[2], json.loads(sys.argv[3])
    side = binding(name, there)
    print(json.dumps({"hello": None if there else side.hello()}), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        if "sum" in task:
            answer = zlib.crc32(side.memory)
        elif "processor" in task:
            answer = processor()
        elif "fill" in task:
            side.transfer("write" if task["fill"] else "read", [0], ROOM)
            answer = True
        else:
            begun, before, carried = time.perf_counter(), processor(), sent()
            times = measure(side, *task["measure"])
            answer = time.perf_counter() - begun, processor() - before, sent() - carried, times
        print(json.dumps({"answer": answer}), flush=True)
    os._exit(0)


class Side:
    def __init__(self, python, name, there=None, core=None):
        program = [python, __file__, "--side", name, json.dumps(there)]
        environment = dict(os.environ, UCX_TLS="tcp", UCX_NET_DEVICES="lo", NIXL_LOG_LEVEL="ERROR")
        environment.update(UCX_WARN_UNUSED_ENV_VARS="n", MC_TCP_BIND_ADDRESS=HOST, MC_LOG_LEVEL="ERROR")
        environment.update(MC_FORCE_TCP="1", GLOG_minloglevel="2")
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(program, stdin=pipe, stdout=pipe, text=True, env=environment)
        if core is not None:
            os.sched_setaffinity(self.process.pid, {core})
        self.hello = self.answer("hello")

    def answer(self, what="answer"):
        # The systems print to stdout too.
        for line in self.process.stdout:
            if line.startswith(f'{{"{what}"'):
                return json.loads(line)[what]
        sys.exit(f"{self.process.args[3]} ended")

    def ask(self, **task):
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        return self.answer()


class Pair:
    def __init__(self, name, pythons, cores):
        ours, theirs = SYSTEMS[name]
        self.name = name
        self.target = Side(pythons[theirs], theirs, None, cores[0])
        ours = name if theirs == "nixl" else ours
        self.initiator = Side(pythons[ours.split()[0]], ours, self.target.hello, cores[1])
        for write in (True, False):
            self.initiator.ask(fill=write)
            sums = self.target.ask(sum=1), self.initiator.ask(sum=1)
            assert sums[0] == sums[1], f"{name}: not the bytes that were sent"
        self.signal(signal.SIGSTOP)

    def signal(self, number):
        for side in (self.target, self.initiator):
            side.process.send_signal(number)

    def turn(self, op, size, count, seconds):
        self.signal(signal.SIGCONT)
        self.initiator.ask(measure=(op, size, count, seconds / 10))
        before = self.target.ask(processor=1)
        elapsed, used, carried, times = self.initiator.ask(measure=(op, size, count, seconds))
        used += self.target.ask(processor=1) - before
        self.signal(signal.SIGSTOP)
        moved, times = size * count * len(times), sorted(times)
        at = lambda part: times[min(int(len(times) * part), len(times) - 1)] * 1e6
        return moved / 1e9 / elapsed, at(0.5), at(0.99), used / (moved / 1e9), carried / moved


def shape(text):
    size, count = text.split("x")
    return int(size) << 10, int(count)


def readable(size):
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def main():
    parser = argparse.ArgumentParser()
    for name in ("millstream", "mooncake", "nixl"):
        parser.add_argument(f"--{name}", metavar="VENV")
    parser.add_argument("--rows", metavar="KIBxCOUNT", type=shape, nargs="+", default=ROWS, help="as 4x1 64x1 4x128")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--pin", action="store_true", help="the two ends to the first two processors")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    pythons = {name: getattr(chosen, name) for name in ("millstream", "mooncake", "nixl")}
    pythons = {name: os.path.join(venv, "bin/python") for name, venv in pythons.items() if venv}
    pythons["socket"] = next(iter(pythons.values()))
    known = [name for name, sides in SYSTEMS.items() if set(sides) <= set(pythons)]
    cores = sorted(os.sched_getaffinity(0))[:2] if chosen.pin else [None, None]
    pairs = [Pair(name, pythons, cores) for name in known]
    found = {}
    for number in range(chosen.rounds):
        for size, count in chosen.rows:
            for op in ("write", "read"):
                for pair in pairs[number % len(pairs) :] + pairs[: number % len(pairs)]:
                    row = pair.turn(op, size, count, chosen.seconds)
                    found.setdefault((op, size, count), {}).setdefault(pair.name, []).append(row)
    rows = []
    for (op, size, count), systems in found.items():
        for name, turns in systems.items():
            speed, p50, p99, used, carried = (statistics.median(column) for column in zip(*turns))
            rows.append({"op": op, "size": size, "count": count, "system": name, "gb_per_s": speed})
            rows[-1].update(p50_us=p50, p99_us=p99, cpu_s_per_gb=used, carried=carried)
    if chosen.json:
        print(json.dumps(rows))
    else:
        print("| request | " + " | ".join(known) + " |\n| --- |" + " --- |" * len(known))
        print("GB/s; p50 and p99 in us; seconds of processor per GB of both ends")
        for op, size, count in found:
            cells = []
            for row in rows:
                if (row["op"], row["size"], row["count"]) == (op, size, count):
                    mark = "" if row["carried"] >= 1 else " (not all on the interface)"
                    cell = "{gb_per_s:.3f}; {p50_us:.1f} {p99_us:.0f}; {cpu_s_per_gb:.2f}".format(**row)
                    cells.append(cell + mark)
            print(f"| {op.upper()} {readable(size)} x {count} | " + " | ".join(cells) + " |")
    for pair in pairs:
        pair.signal(signal.SIGCONT)
        pair.signal(signal.SIGKILL)


if __name__ == "__main__":
    process() if sys.argv[1:2] == ["--side"] else main()
