"""What is there beside the contract (contract.py): bad calls, forks, interrupts, and what is missing."""

import contextlib
import gc
import mmap
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import numpy as np

import mooncake.engine as module
from mooncake.engine import TransferEngine

# What tests of both packages need.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "python/tests"))

import interpreter

HOST = "127.0.0.1"
LENGTH = 64 << 20


def engine():
    made = TransferEngine()
    assert made.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0
    return made


@contextlib.contextmanager
def told():
    """The lines that come to stderr, which are there once it has ended."""
    lines = []
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            lines += file.read().decode().splitlines()


class BadCalls(unittest.TestCase):
    def test_without_initialize_there_are_codes_where_the_original_crashes(self):
        made = TransferEngine()
        codes = [
            made.get_rpc_port(),
            made.register_memory(4096, 10),
            made.unregister_memory(4096),
            made.batch_register_memory([4096], [10]),
            made.transfer_sync_write("127.0.0.1:9", 1, 2, 3),
            made.batch_transfer_sync_read("127.0.0.1:9", [1], [2], [3]),
            made.transfer_check_status(1),
            made.get_batch_transfer_status([1]),
            made.send_probe("127.0.0.1:9"),
            made.write_bytes_to_buffer(4096, b"a", 1),
            made.free_managed_buffer(4096, 1),
        ]
        self.assertEqual(codes, [-1] * len(codes))
        zeros = [
            made.allocate_managed_buffer(10),
            made.get_first_buffer_address("127.0.0.1:9"),
            made.batch_transfer_async_write("127.0.0.1:9", [1], [2], [3]),
            made.transfer_submit_write("127.0.0.1:9", 1, 2, 3),
            made.get_batch_transfer_status([]),
        ]
        self.assertEqual(zeros, [0] * len(zeros))
        self.assertEqual(made.get_notifies(), [])

    def test_engines_that_cannot_be_made(self):
        for metadata in ["bogus://x", "http://127.0.0.1:9/metadata"]:
            self.assertEqual(TransferEngine().initialize(HOST, metadata, "tcp", ""), -1)

    def test_numbers_of_no_batch(self):
        made = engine()
        self.assertEqual([made.transfer_check_status(n) for n in (0, 5, (1 << 64) - 1)], [-1] * 3)
        self.assertEqual(made.get_batch_transfer_status([0]), -1)

    def test_addresses_where_nothing_is(self):
        made = engine()
        self.assertEqual(made.register_memory(4096, 10), -1)
        self.assertEqual(made.write_bytes_to_buffer(4096, b"abc", 3), -1)
        at = made.allocate_managed_buffer(10)
        self.assertEqual(made.write_bytes_to_buffer(at, b"abc", 4), -1)
        with self.assertRaises(ValueError):
            made.read_bytes_from_buffer(4096, 3)
        own = f"{HOST}:{made.get_rpc_port()}"
        for here in (1, 4096, (1 << 64) - 8):
            self.assertEqual(made.transfer_sync_write(own, here, at, 8), -1)
            self.assertEqual(made.transfer_sync_read(own, here, at, 8), -1)

    def test_memory_that_cannot_be_written_is_not_registered(self):
        made = engine()
        memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ)
        at = np.frombuffer(memory, np.uint8).ctypes.data
        self.assertEqual(made.register_memory(at, 4096), -1)
        self.assertEqual(made.batch_register_memory([at], [4096]), -1)

    def test_what_is_missing_says_what_to_do(self):
        made = engine()
        calls = [
            made.get_engine,
            made.get_engine_ptr,
            lambda: made.transfer_write_on_cuda("x", 1, 2, 3, stream_ptr=4),
            lambda: made.batch_transfer_read_on_cuda("x", [1], [2], [3]),
            module.create_rpc_client,
            lambda: module.create_rpc_server("address"),
            module.RpcInterface,
            module.CoroRPCInterface,
            module.InnerTransferEngine,
            lambda: module.SharedSegment.create("x", 1, 1, 0),
        ]
        for call in calls:
            with self.assertRaisesRegex(NotImplementedError, "Millstream; .*(use|call)"):
                call()

    def test_subclasses(self):
        class Mine(TransferEngine):
            pass

        self.assertEqual(Mine().get_batch_transfer_status([]), 0)


class Devices(unittest.TestCase):
    """Which RDMA devices an engine looks for, seen by a library whose devices cannot be opened."""

    def test_all_of_the_system_or_those_that_are_named(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        source = pathlib.Path(__file__).resolve().parents[3] / "crates/lab/src/rdma_library.c"
        library = pathlib.Path(folder.name) / "libibverbs.so.1"
        names = '-DNAMES="mlx5_0","mlx5_1"'
        subprocess.run(["cc", names, "-shared", "-fPIC", "-o", library, source], check=True)
        both = ["mlx5_0", "mlx5_1"]
        for protocol, named, setting, expected in [
            ("rdma", "", "", both),
            ("rdma", "", "all", both),
            ("rdma", "", "missing,mlx5_1", ["mlx5_1"]),
            ("rdma", " mlx5_0 , missing", "mlx5_1", ["mlx5_0"]),
            ("tcp", "", "all", []),
        ]:
            code = (
                "from mooncake.engine import TransferEngine\n"
                f"assert TransferEngine().initialize({HOST!r}, 'P2PHANDSHAKE', {protocol!r}, {named!r}) == 0"
            )
            path = os.pathsep.join(filter(None, [folder.name, os.environ.get("LD_LIBRARY_PATH")]))
            environment = os.environ | {"LD_LIBRARY_PATH": path, "MC_TE_FILTERS": setting}
            environment.pop("MC_FORCE_TCP", None)
            done = subprocess.run(
                [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=environment, timeout=200
            )
            self.assertEqual(done.returncode, 0, done.stderr)
            tried = [line.removeprefix("opens ") for line in done.stderr.splitlines() if line.startswith("opens ")]
            self.assertEqual(tried, expected, (protocol, named, setting, done.stderr))


class Addresses(unittest.TestCase):
    """Which ranges of a target can be written: those within one piece of registered memory."""

    def test_addresses(self):
        for protocol in ("tcp", "shm"):
            if protocol == "tcp":
                os.environ["MC_FORCE_TCP"] = "1"
            try:
                here, there = engine(), engine()
            finally:
                os.environ.pop("MC_FORCE_TCP", None)
            self.check(protocol, here, there)

    def check(self, protocol, here, there):
        nobody = f"{HOST}:{there.get_rpc_port()}"
        memory = np.zeros(1 << 20, np.uint8)
        at, length = memory.ctypes.data, 1 << 16
        source = np.full(1 << 20, 1, np.uint8)
        self.assertEqual(here.transfer_sync_write(nobody, source.ctypes.data, at, 8), -1, "nothing is registered")
        self.assertEqual(there.batch_register_memory([at, at + length], [length, length]), 0)
        cases = {
            "exactly": (at, length, 0),
            "within": (at + 100, 100, 0),
            "one byte": (at + length - 1, 1, 0),
            "no byte": (at, 0, 0),
            "outside": (at + 4 * length, 100, -1),
            "partly, at the end": (at + 2 * length - 50, 100, -1),
            "partly, at the beginning": (at - 50, 100, -1),
            "around the end of addresses": ((1 << 64) - 50, 100, -1),
            "adjacent memory": (at + length - 50, 100, -1),
            "much more": (at, 1 << 20, -1),
        }
        for what, (address, count, code) in cases.items():
            with self.subTest(protocol, what=what):
                memory[:] = 0
                found = here.transfer_sync_write(nobody, source.ctypes.data, address, count)
                self.assertEqual(found, code)
                self.assertEqual(int(memory.sum()), count if code == 0 else 0)


class Visibility(unittest.TestCase):
    """What codes say of bytes over TCP: the original's cases that a program can observe."""

    SIZE = 8 << 20

    def setUp(self):
        # What goes through shared memory is another matter.
        os.environ["MC_FORCE_TCP"] = "1"
        self.addCleanup(os.environ.pop, "MC_FORCE_TCP", None)
        self.here, self.there = engine(), engine()
        self.segment = f"{HOST}:{self.there.get_rpc_port()}"
        self.remote, self.local = np.zeros(self.SIZE, np.uint8), np.ones(self.SIZE, np.uint8)
        self.assertEqual(self.there.register_memory(self.remote.ctypes.data, self.SIZE), 0)
        self.assertEqual(self.here.register_memory(self.local.ctypes.data, self.SIZE), 0)

    def write(self, length, source=None):
        source = self.local if source is None else source
        return self.here.transfer_sync_write(self.segment, source.ctypes.data, self.remote.ctypes.data, length)

    def read(self, length):
        return self.here.transfer_sync_read(self.segment, self.local.ctypes.data, self.remote.ctypes.data, length)

    def test_a_write_that_is_done_is_seen(self):
        for value, length in enumerate([1, 7, 4096, 65536, 100_000, self.SIZE] * 5, 2):
            self.local[:length] = value
            self.assertEqual(self.write(length), 0)
            self.assertTrue((self.remote[:length] == value).all())
            self.local[:length] = 0
            self.assertEqual(self.read(length), 0)
            self.assertTrue((self.local[:length] == value).all())

    def test_what_the_peer_rejects_fails_and_moves_nothing(self):
        self.assertEqual(self.write(8), 0)
        self.remote[:] = 0
        self.assertEqual(self.there.unregister_memory(self.remote.ctypes.data), 0)
        for length in [1, 8, 4096, self.SIZE]:
            self.assertEqual((self.write(length), self.read(length)), (-1, -1))
        self.assertEqual((int(self.remote.max()), int(self.local.min())), (0, 1))
        self.assertEqual(self.there.register_memory(self.remote.ctypes.data, self.SIZE), 0)
        self.assertEqual(self.write(self.SIZE), 0)

    def test_the_source_of_a_write_that_has_failed_may_go(self):
        memory = mmap.mmap(-1, self.SIZE)
        source = np.frombuffer(memory, np.uint8)
        self.assertEqual(self.here.register_memory(source.ctypes.data, self.SIZE), 0)
        self.assertEqual(self.write(8, source), 0)
        self.assertEqual(self.there.unregister_memory(self.remote.ctypes.data), 0)
        self.assertEqual(self.write(self.SIZE, source), -1)
        self.assertEqual(self.here.unregister_memory(source.ctypes.data), 0)
        del source
        memory.close()  # Whoever reads it now crashes.

    def test_an_initiator_of_the_first_framing_is_served(self):
        os.environ["MC_TCP_PROTO"] = "1"
        try:
            self.here = engine()
        finally:
            del os.environ["MC_TCP_PROTO"]
        self.assertEqual(self.here.register_memory(self.local.ctypes.data, self.SIZE), 0)
        self.local[:] = 9
        self.assertEqual(self.write(self.SIZE), 0)
        # It was sent, and nobody says when it has come.
        until = time.monotonic() + 20
        while int(self.remote[-1]) != 9 and time.monotonic() < until:
            self.assertEqual(self.here.send_probe(self.segment), 0)
        self.assertTrue((self.remote == 9).all())

    def test_more_than_connections_hold_waits(self):
        at, there = self.local.ctypes.data, self.remote.ctypes.data
        self.local[:] = np.arange(self.SIZE, dtype=np.uint32).astype(np.uint8)
        part = self.SIZE // 4096
        ours, theirs = [[base + number * part for number in range(4096)] for base in (at, there)]
        numbers = [
            self.here.batch_transfer_async_write(self.segment, ours, theirs, [part] * 4096) for _ in range(10)
        ]
        self.assertNotIn(0, numbers)
        self.assertEqual(self.here.get_batch_transfer_status(numbers), 0)
        np.testing.assert_array_equal(self.remote, self.local)

    def test_the_source_of_an_engine_that_has_ended_may_go(self):
        memory = mmap.mmap(-1, self.SIZE)
        source = np.frombuffer(memory, np.uint8)
        self.assertEqual(self.here.register_memory(source.ctypes.data, self.SIZE), 0)
        for _ in range(20):
            length = self.SIZE
            lists = ([source.ctypes.data], [self.remote.ctypes.data], [length])
            self.assertGreater(self.here.batch_transfer_async_write(self.segment, *lists), 0)
        self.here = None
        self.remote[:] = 0
        del source
        memory.close()  # Whoever reads it now crashes.
        # And nothing arrives any more, as another engine sees, which is served behind what was on its way.
        other = engine()
        self.assertEqual(other.transfer_sync_read(self.segment, self.local.ctypes.data, self.remote.ctypes.data, 8), 0)
        self.assertEqual(int(self.remote.max()), 0)

    def test_threads_submit_while_the_engine_ends(self):
        codes = set()

        def work():
            mine = self.here
            for _ in range(30):
                codes.add(mine.transfer_sync_write(self.segment, self.local.ctypes.data, self.remote.ctypes.data, 65536))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        # Another one takes its place, and it ends once nobody is in a call.
        self.assertEqual(self.here.initialize(HOST, "P2PHANDSHAKE", "tcp", ""), 0)
        for thread in threads:
            thread.join()
        self.assertEqual(codes, {0})


class Ending(unittest.TestCase):
    """Another engine takes the place of one that has a call."""

    def test_other_threads_run_while_it_ends(self):
        server = interpreter.MetadataServer(self, "nobody")
        made, codes = TransferEngine(), []
        self.assertEqual(made.initialize(HOST, server.uri, "tcp", ""), 0)
        self.assertTrue(server.values)
        work = lambda: codes.append(made.transfer_sync_write("nobody", 1, 2, 3))
        thread = threading.Thread(target=work)
        thread.start()
        self.assertTrue(server.asked.wait(20))
        self.assertEqual(made.initialize(HOST, "P2PHANDSHAKE", "tcp", ""), 0)
        server.release.set()
        gap = interpreter.longest_gap(thread.is_alive)
        thread.join()
        self.assertLess(gap, 1)
        self.assertEqual((codes, server.values), ([-1], {}))


FORKS = """
import os, signal, threading
from mooncake.engine import TransferEngine

def engine():
    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return made

inherited, over = engine(), threading.Event()

def work():
    while not over.is_set():
        inherited.transfer_sync_write("127.0.0.1:9", 1, 2, 3)  # It is told on stderr why not.
        TransferEngine().initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")

def child():
    signal.alarm(30)
    assert inherited.get_rpc_port() == -1 and inherited.transfer_sync_write("127.0.0.1:9", 1, 2, 3) == -1
    here, there = engine(), engine()
    ours, theirs = here.allocate_managed_buffer(1 << 20), there.allocate_managed_buffer(1 << 20)
    assert here.write_bytes_to_buffer(ours, b"abc" * 9, 27) == 0
    assert here.transfer_sync_write(f"127.0.0.1:{there.get_rpc_port()}", ours, theirs, 1 << 20) == 0
    assert there.read_bytes_from_buffer(theirs, 27) == b"abc" * 9
    assert inherited.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert inherited.get_rpc_port() > 0

threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for _ in range(50):
    forked = os.fork()
    if forked == 0:
        code = 1
        try:
            child()
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(forked, 0)[1] != 0:
        os._exit(1)
over.set()
for thread in threads:
    thread.join()
"""


class Forking(unittest.TestCase):
    def test_forks_of_a_busy_process_have_engines_of_their_own(self):
        done = subprocess.run([sys.executable, "-c", FORKS], stderr=subprocess.DEVNULL, timeout=200)
        self.assertEqual(done.returncode, 0)


class Processes(unittest.TestCase):
    def setUp(self):
        program = (
            "import sys, mooncake.engine as m; e = m.TransferEngine(); e.initialize('127.0.0.1', 'P2PHANDSHAKE', 'tcp', ''); "
            f"print(e.get_rpc_port(), e.allocate_managed_buffer({LENGTH}), flush=True); sys.stdin.read()"
        )
        self.peer = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # What goes through memory is not held up by a process that does not run.
            env=dict(os.environ, MC_FORCE_TCP="1"),
        )
        self.addCleanup(self.end)
        port, self.there = self.peer.stdout.readline().split()
        self.segment, self.there = f"{HOST}:{port}", int(self.there)
        self.engine = engine()
        self.memory = np.ones(LENGTH, np.uint8)
        self.at = self.memory.ctypes.data
        self.assertEqual(self.engine.register_memory(self.at, LENGTH), 0)

    def end(self):
        self.peer.kill()
        self.peer.wait()
        self.peer.stdin.close()
        self.peer.stdout.close()

    def stop_peer(self):
        self.assertEqual(self.engine.transfer_sync_write(self.segment, self.at, self.there, 8), 0)
        os.kill(self.peer.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.peer.pid, os.WSTOPPED)

    def write(self):
        return self.engine.transfer_sync_write(self.segment, self.at, self.there, LENGTH)

    def test_keyboard_interrupt_ends_a_call(self):
        self.stop_peer()
        # Whoever runs the tests in the background has it ignored.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, before)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        begun = time.monotonic()
        with self.assertRaises(KeyboardInterrupt):
            # On a busy machine its time may be over before the call begins.
            timer.start()
            self.write()
        self.assertLess(time.monotonic() - begun, 20)
        timer.join()

    def test_other_threads_run_during_a_call(self):
        self.stop_peer()
        codes = []
        thread = threading.Thread(target=lambda: codes.append(self.write()))
        thread.start()
        turns = 0
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            turns += 1
        os.kill(self.peer.pid, signal.SIGCONT)
        thread.join()
        self.assertEqual(codes, [0])
        self.assertGreater(turns, 10_000)

    def test_a_fork_has_codes(self):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                codes = [self.write(), self.engine.get_rpc_port(), self.engine.send_probe(self.segment)]
                self.engine = None
                code = 0 if codes == [-1] * 3 else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        self.assertEqual(os.waitstatus_to_exitcode(status), 0)
        self.assertEqual(self.write(), 0)

    def test_a_job_is_pending_until_it_is_done(self):
        self.stop_peer()
        number = self.engine.transfer_submit_write(self.segment, self.at, self.there, LENGTH)
        self.assertEqual(self.engine.transfer_check_status(number), 0)
        os.kill(self.peer.pid, signal.SIGCONT)
        self.assertEqual(self.engine.get_batch_transfer_status([number]), 0)
        self.assertEqual(self.engine.transfer_check_status(number), -1, "it is free")


class Restarting(unittest.TestCase):
    """A peer ends, and another one may take its place: its port, and its memory's address."""

    ADDRESS, SIZE = 1 << 40, 4096

    PEER = f"""
import ctypes, mmap, sys
from mooncake.engine import TransferEngine

library = ctypes.CDLL(None)
library.mmap.restype = ctypes.c_void_p
library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
FIXED_NOREPLACE = 0x100000
flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | FIXED_NOREPLACE
assert library.mmap({ADDRESS}, {SIZE}, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == {ADDRESS}
made = TransferEngine()
assert made.initialize({HOST!r}, "P2PHANDSHAKE", "tcp", "") == 0
assert made.register_memory({ADDRESS}, {SIZE}) == 0
print(made.get_rpc_port(), flush=True)
sys.stdin.readline()
print(made.read_bytes_from_buffer({ADDRESS}, 8).hex(), flush=True)
"""

    def setUp(self):
        # What goes through shared memory is another matter.
        os.environ["MC_FORCE_TCP"] = "1"
        self.addCleanup(os.environ.pop, "MC_FORCE_TCP", None)
        self.peer, self.port = self.start()
        self.engine = engine()
        self.memory = np.full(self.SIZE, 7, np.uint8)
        self.assertEqual(self.engine.register_memory(self.memory.ctypes.data, self.SIZE), 0)
        # It leaves a connection that rests.
        self.assertEqual(self.write(), 0)

    def start(self, **settings):
        peer = subprocess.Popen(
            [sys.executable, "-c", self.PEER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | settings,
        )
        self.addCleanup(self.end, peer)
        return peer, peer.stdout.readline().strip()

    def end(self, peer):
        peer.kill()
        peer.wait()
        peer.stdin.close()
        peer.stdout.close()

    def write(self):
        name = f"{HOST}:{self.port}"
        return self.engine.transfer_sync_write(name, self.memory.ctypes.data, self.ADDRESS, self.SIZE)

    def test_a_call_is_made_again_for_the_process_that_is_there_now(self):
        for turn in range(3):
            self.end(self.peer)
            self.peer, port = self.start(MC_MIN_RPC_PORT=self.port, MC_MAX_RPC_PORT=self.port)
            self.assertEqual(port, self.port)
            self.memory[:] = turn
            with told() as lines:
                code = self.write()
            self.assertEqual((code, lines), (0, []))
            # That one leaves a connection, too.
            self.assertEqual(self.write(), 0)
        self.peer.stdin.write("\n")
        self.peer.stdin.flush()
        self.assertEqual(self.peer.stdout.readline().strip(), "02" * 8)

    def test_why_a_call_fails_is_said(self):
        self.end(self.peer)
        for _ in range(3):
            with told() as lines:
                self.assertEqual(self.write(), -1)
            self.assertRegex("\n".join(lines), rf"^millstream: -\d+: .*{self.port}")

    def test_why_a_batch_fails_is_said_by_who_asks_for_it(self):
        self.end(self.peer)
        place = (f"{HOST}:{self.port}", self.memory.ctypes.data, self.ADDRESS, self.SIZE)
        with told() as lines:
            number = self.engine.transfer_submit_write(*place)
            if number:
                self.assertEqual(self.engine.get_batch_transfer_status([number]), -1)
        self.assertRegex("\n".join(lines), rf"^millstream: -\d+: .*{self.port}")
        with told() as lines:
            self.assertEqual(self.engine.transfer_check_status(1 << 40), -1)
        self.assertRegex("\n".join(lines), "^millstream: -1: there is no batch")


class Leaking(unittest.TestCase):
    def test_engines_leave_no_descriptors_and_no_threads(self):
        def count():
            gc.collect()
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

        def use():
            here, there = engine(), engine()
            far = there.allocate_managed_buffer(4096)
            near = here.allocate_managed_buffer(4096)
            name = f"{HOST}:{there.get_rpc_port()}"
            self.assertEqual(here.transfer_sync_write(name, near, far, 4096), 0)
            self.assertEqual(here.transfer_sync_write(name, near, 4096, 8), -1)
            self.assertEqual(here.register_memory(4096, 10), -1)
            self.assertNotEqual(here.transfer_submit_write(name, near, far, 4096), 0)

        use()
        before = count()
        for _ in range(5):
            use()
        after = count()
        for _ in range(1000):
            if after <= before:
                break
            time.sleep(0.01)
            after = count()
        self.assertLessEqual(after, before)


if __name__ == "__main__":
    unittest.main()
