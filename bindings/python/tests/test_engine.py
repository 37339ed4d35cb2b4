"""Engines, memory, requests and what goes wrong with them, as users see it."""

import asyncio
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest

import numpy as np

import interpreter
import millstream

LENGTH = 1 << 20


class Tensor:
    """Memory as tensors of torch say it."""

    def __init__(self, array, contiguous=True):
        self.array = array
        self.contiguous = contiguous

    def data_ptr(self):
        return self.array.ctypes.data

    def numel(self):
        return self.array.size

    def element_size(self):
        return self.array.itemsize

    def is_contiguous(self):
        return self.contiguous


class Interface:
    """Memory as arrays that have no buffer protocol say it."""

    def __init__(self, array, **changed):
        self.array = array
        self.__array_interface__ = dict(array.__array_interface__, **changed)


class Pair(unittest.TestCase):
    transports = None

    def setUp(self):
        self.here = millstream.Engine(transports=self.transports)
        self.addCleanup(self.here.close)
        self.there = millstream.Engine(transports=self.transports)
        self.addCleanup(self.there.close)
        self.local = np.arange(LENGTH, dtype=np.uint32).view(np.uint8)[:LENGTH].copy()
        self.remote = np.zeros(LENGTH, np.uint8)
        self.region = self.here.register(self.local)
        self.there.register(self.remote)
        self.segment = self.here.open(self.there.name)
        self.target = self.segment.buffers[0]


class Relayed(unittest.TestCase):
    def test_segments_that_nothing_else_leads_to_are_reached_by_a_relay(self):
        near, far = np.arange(LENGTH, dtype=np.uint8), np.zeros(LENGTH, np.uint8)
        with (
            millstream.Engine(transports=["tcp"]) as there,
            millstream.Engine(transports=["tcp"], settings={"tcp.relay": "true"}) as relay,
            millstream.Engine(transports=["local"], settings={"tcp.relays": relay.name}) as here,
        ):
            there.register(far)
            region = here.register(near)
            segment = here.open(there.name)
            transfer = here.write(segment, region, segment.buffers[0])
            self.assertEqual(transfer.wait(60), LENGTH)
            self.assertEqual(transfer.status[0].transport, "relay")
            np.testing.assert_array_equal(far, near)


class Moving(Pair):
    def test_a_write_and_a_read_move_every_byte(self):
        transfer = self.here.write(self.segment, self.region, self.target)
        self.assertEqual(transfer.wait(10), LENGTH)
        np.testing.assert_array_equal(self.remote, self.local)
        self.assertEqual([status.state for status in transfer.status], ["COMPLETED"])
        self.remote[:] = 7
        self.here.read(self.segment, self.region[16:32], self.target[0:16]).wait(10)
        self.assertEqual(self.local[14:34].tolist(), [0, 0] + [7] * 16 + [8, 0])

    def test_batches_have_many_requests(self):
        batch = self.here.batch()
        for start in range(0, LENGTH, 8192):
            batch.write(self.segment, self.region[start : start + 8192], self.target.address + start)
        self.assertEqual(len(batch), 128)
        transfer = batch.submit(notify=("who", "what"))
        self.assertEqual((len(batch), len(transfer)), (0, 128))
        self.assertEqual(transfer.wait(10), LENGTH)
        np.testing.assert_array_equal(self.remote, self.local)
        self.assertEqual(notifications(self.there), [("who", "what")])

    def test_many_requests_are_added_at_once(self):
        starts = np.arange(0, LENGTH, 8192, dtype=np.uint64)
        here, there = self.region.address, self.target.address
        for lengths in 8192, [8192] * 128, np.full(256, 8192, np.int64)[::2]:
            self.remote[:] = 0
            batch = self.here.batch()
            batch.write_many(self.segment, starts + here, starts + there, lengths)
            self.assertEqual((len(batch), batch.submit().wait(10)), (128, LENGTH))
            np.testing.assert_array_equal(self.remote, self.local)
        self.remote[:] = 7
        expected = self.local.copy()
        expected[16:24] = expected[64:68] = 7
        batch.read_many(self.segment, [here + 16, here + 64], (there, np.int64(there)), [8, 4])
        self.assertEqual(batch.submit().wait(10), 12)
        np.testing.assert_array_equal(self.local, expected)

    def test_of_many_requests_that_do_not_fit_none_is_added(self):
        here, there = [self.region.address] * 2, [self.target.address] * 2
        batch = self.here.batch()
        for sources, targets, lengths, error, words in [
            (here, there[:1], 8, millstream.ArgumentError, "2 addresses here, 1 there and 2 lengths"),
            (here, there, [8], millstream.ArgumentError, "2 addresses here, 2 there and 1 lengths"),
            (here, np.array([1, -1]), 8, millstream.ArgumentError, "-1 is none of what addresses can be"),
            (here, np.ones((2, 1), np.uint64), 8, millstream.ArgumentError, "addresses have 2 dimensions"),
            (here, [1, -1], 8, TypeError, "addresses are an array of 64-bit integers"),
            (here, "ab", 8, TypeError, "addresses are an array"),
            (here, there, [1.5, 2], TypeError, "lengths are an array"),
            (here, np.ones(2, np.int32), 8, None, None),
        ]:
            with self.subTest(words):
                add = lambda: batch.write_many(self.segment, sources, targets, lengths)
                if error is None:
                    # Items of other types are ints of a sequence.
                    add()
                    continue
                with self.assertRaisesRegex(error, words):
                    add()
                self.assertEqual(len(batch), 0)

    def test_an_empty_range_is_no_address_alone(self):
        before = self.local.copy()
        self.remote[:] = 7
        batch = self.here.batch()
        wrong = [(self.region[part], self.target) for part in (slice(0, 0), slice(5, 2))]
        wrong += [(self.region, self.target[part]) for part in (slice(0, 0), slice(5, 2))]
        for call in self.here.read, self.here.write, batch.read, batch.write:
            for here, there in wrong:
                with self.subTest(call), self.assertRaises(millstream.ArgumentError):
                    call(self.segment, here, there)
            with self.assertRaisesRegex(millstream.ArgumentError, "length="):
                call(self.segment, self.region.address, self.target.address)
        self.assertEqual(len(batch), 0)
        for there in self.target[0:0], self.target.address:
            with self.assertRaises(millstream.SubmitError) as raised:
                self.here.read(self.segment, self.region[0:0], there)
            self.assertEqual(raised.exception.kind, "zero_length")
        np.testing.assert_array_equal(self.local, before)
        self.assertTrue((self.remote == 7).all())
        self.here.read(self.segment, self.region.address, self.target.address, 1).wait(10)
        self.assertEqual(self.local[:2].tolist(), [7, before[1]])

    def test_what_is_refused_can_be_submitted_again(self):
        batch, part = self.here.batch(), LENGTH // 4
        for start in range(0, LENGTH, part):
            batch.write(self.segment, self.region[start : start + part], self.target.address + start)
        for values, error in [
            ({"policy": "none"}, millstream.SubmitError),
            ({"transport": "pigeon"}, millstream.SubmitError),
            ({"timeout": -1}, millstream.ArgumentError),
            ({"priority": "high"}, millstream.ArgumentError),
        ]:
            with self.subTest(values):
                with self.assertRaises(error):
                    batch.submit(**values)
                self.assertEqual(len(batch), 4)
        self.assertEqual(batch.submit().wait(10), LENGTH)
        self.assertEqual(len(batch), 0)
        np.testing.assert_array_equal(self.remote, self.local)

    def test_all_kinds_of_memory(self):
        array = np.zeros(64, np.float32)
        objects = [bytearray(256), memoryview(bytearray(256)), array, Tensor(np.zeros(64, np.float32))]
        objects.append(Interface(np.zeros((8, 8), np.float32)))
        for thing in objects:
            with self.subTest(type(thing)), self.here.register(thing) as region:
                self.assertEqual(len(region), 256)
                self.here.read(self.segment, region, self.target[0:256]).wait(10)

    def test_memory_of_the_engine_is_an_array_too(self):
        region = self.here.allocate(4096)
        array = np.frombuffer(region, np.uint8)
        array[:] = 5
        self.assertEqual(region.read(4090), bytes([5] * 6))
        self.here.write(self.segment, region, self.target[0:4096]).wait(10)
        self.assertTrue((self.remote[:4096] == 5).all())
        region.write(1, b"abc")
        self.assertEqual(array[:5].tolist(), [5, 97, 98, 99, 5])
        region.unregister()
        del region
        gc.collect()
        array[:] = 6  # The view keeps the memory.
        self.assertEqual(int(array.sum()), 6 * 4096)

    def test_notifications_and_probes(self):
        self.here.notify(self.segment, "name", "text")
        self.assertEqual(notifications(self.there), [("name", "text")])
        self.assertEqual(self.there.take_notifications(), [])
        self.assertGreater(self.here.probe(self.there.name), 0)
        with self.assertRaises(millstream.SegmentError) as raised:
            self.here.probe("127.0.0.1:1")
        self.assertEqual((raised.exception.code, raised.exception.peer), (-102, "127.0.0.1:1"))

    def test_many_threads_share_an_engine(self):
        failures = []

        def work(number):
            part = LENGTH // 10
            start = number * part
            try:
                for _ in range(50):
                    source = self.region[start : start + part]
                    self.here.write(self.segment, source, self.target.address + start).wait(30)
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])
        whole = LENGTH // 10 * 10
        np.testing.assert_array_equal(self.remote[:whole], self.local[:whole])

    def test_asyncio(self):
        async def main():
            part = 4096
            writes = [
                self.here.write(self.segment, self.region[at : at + part], self.target.address + at)
                for at in range(0, LENGTH, part)
            ]
            return await asyncio.gather(*writes)

        for _ in range(2):  # Each run has a loop of its own.
            self.remote[:] = 0
            self.assertEqual(sum(asyncio.run(main())), LENGTH)
            np.testing.assert_array_equal(self.remote, self.local)


class MovingOverTcp(Moving):
    transports = ["tcp"]


class MovingOverSoftDevices(unittest.TestCase):
    def test_rdma(self):
        with (
            millstream.Engine("127.7.0.1", transports=["rdma:soft"]) as here,
            millstream.Engine("127.7.0.2", transports=["rdma:soft"]) as there,
        ):
            local, remote = bytearray(b"x" * 5000), bytearray(5000)
            there.register(remote)
            segment = here.open(there.name)
            here.write(segment, here.register(local), segment.buffers[0]).wait(30)
            self.assertEqual(remote, local)


class Registering(Pair):
    def refused(self, kind, *arguments, **values):
        with self.assertRaises(kind) as raised:
            self.here.register(*arguments, **values)
        return raised.exception

    def test_what_is_registered_stays_where_it_is(self):
        memory = bytearray(100)
        region = self.here.register(memory)
        with self.assertRaises(BufferError):
            memory.extend(b"more")
        del memory
        gc.collect()
        self.here.read(self.segment, region, self.target[0:100]).wait(10)
        region.unregister()
        with self.assertRaises(millstream.RegisterError) as raised:
            region.unregister()
        self.assertEqual(raised.exception.code, -3)

    def test_a_region_that_is_gone_unregisters_no_other_one(self):
        memory = bytearray(4096)
        first = self.here.register(memory)
        first.unregister()
        second = self.here.register(memory)
        self.assertEqual(first.address, second.address)
        with self.assertRaises(millstream.RegisterError) as raised:
            first.unregister()
        self.assertEqual(raised.exception.code, -3)
        with self.assertRaises(BufferError):
            memory.extend(b"more")
        self.here.read(self.segment, second, self.target[0:4096]).wait(10)
        second.unregister()
        memory.extend(b"more")

    def test_it_can_be_resized_again_once_unregistered(self):
        memory = bytearray(100)
        self.here.register(memory).unregister()
        memory.extend(b"more")
        self.here.register(memory)
        self.here.close()
        memory.extend(b"more")

    def test_what_is_no_memory_is_refused(self):
        for wrong in (5, None, "text", object()):
            with self.subTest(wrong):
                self.refused(TypeError, wrong)
        for read_only in (b"bytes", memoryview(b"bytes"), Interface(self.local, data=(1, True))):
            self.assertIn("read-only", str(self.refused(millstream.ArgumentError, read_only)))
        matrix = np.zeros((64, 64), np.uint8)
        scattered = [matrix[:, ::2], Tensor(matrix, False), Interface(matrix[:, ::2])]
        for thing in scattered:
            with self.subTest(type(thing)):
                self.assertIn("one piece", str(self.refused(millstream.ArgumentError, thing)))

    def test_times_and_texts_have_items_as_long_as_they_are(self):
        for kind in ["<M8[ns]", "<m8[25s]", "U3", "S5", ">i2", "V7", "?", "c16"]:
            array = np.zeros(6, kind)
            with self.subTest(kind), self.here.register(Interface(array)) as region:
                self.assertEqual(len(region), array.nbytes)
        for wrong in ["", "<", "<f", "<f4x", "<M8[ns", "|O8", "<f-4", "<t9", "f4", "<U9999999999999999999"]:
            with self.subTest(wrong):
                self.refused(millstream.ArgumentError, Interface(self.local, typestr=wrong))

    def test_overlapping_and_empty_registrations_are_refused(self):
        error = self.refused(millstream.RegisterError, self.local[100:200])
        self.assertEqual((error.code, error.range), (-7, (self.region.address + 100, 100)))
        self.assertTrue(error.remedy)
        self.assertEqual(self.refused(millstream.RegisterError, bytearray()).code, -1)
        with self.assertRaises(millstream.RegisterError):
            self.here.register_address(8, 4096)

    def test_many_threads_register_the_same_memory(self):
        memory = bytearray(1 << 16)
        others = []

        def work():
            for _ in range(200):
                try:
                    region = self.here.register(memory)
                    with self.assertRaises(BufferError):
                        memory.extend(b"more")  # It is held by this registration.
                    region.unregister()
                except millstream.RegisterError as error:
                    if error.code != -7:
                        others.append(error)
                except Exception as error:
                    others.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(others, [])
        memory.extend(b"more")

    def test_memory_unregistered_amid_a_transfer_is_no_crash(self):
        transfer = self.here.write(self.segment, self.region, self.target)
        self.region.unregister()
        try:
            transfer.wait(10)
        except millstream.TransferError as error:
            self.assertTrue(error.remedy)


class Failing(Pair):
    transports = ["tcp"]

    def test_requests_that_are_wrong_are_refused_with_all_that_is_known(self):
        end = self.target.address + LENGTH
        with self.assertRaises(millstream.SubmitError) as raised:
            self.here.write(self.segment, self.region[0:8], end - 4)
        error = raised.exception
        self.assertEqual((error.code, error.peer, error.range), (-1, self.there.name, (end - 4, 8)))
        self.assertIn("Segment.buffers", error.remedy)
        self.assertIn(error.remedy, str(error))
        other = pickle.loads(pickle.dumps(error))
        self.assertEqual((str(other), other.range, type(other)), (str(error), error.range, type(error)))
        with self.assertRaises(millstream.SubmitError) as raised:
            self.here.write(self.segment, 4096, self.target[0:8])
        self.assertEqual((raised.exception.code, raised.exception.range), (-3, (4096, 8)))
        for wrong in [(self.region[0:8], self.target[0:9]), (self.region[0:4], self.target, 8)]:
            with self.assertRaises(millstream.ArgumentError):
                self.here.write(self.segment, *wrong)
        for wrong in ["x", None, 1.5, -1]:
            with self.subTest(wrong), self.assertRaises(TypeError):
                self.here.write(self.segment, self.region, wrong)
        with self.assertRaises(millstream.SubmitError):
            self.here.batch().submit()
        with self.assertRaises(ValueError):
            self.here.write(self.segment, self.region, self.target).wait(-1)

    def test_requests_have_terms(self):
        terms = {"priority": "latency", "transport": "tcp", "timeout": 60}
        transfer = self.here.write(self.segment, self.region, self.target, **terms)
        self.assertEqual(transfer.wait(10), LENGTH)
        self.assertEqual(transfer.status[0].transport, "tcp")
        self.here.read(self.segment, self.region, self.target, priority="bulk").wait(10)
        for values, kind, expected in [
            ({"transport": "pigeon"}, "unknown_transport", millstream.SubmitError),
            ({"transport": "rdma"}, "not_served", millstream.PathError),
            ({"policy": "none"}, "unknown_policy", millstream.SubmitError),
            ({"intent": "none"}, "unknown_intent", millstream.SubmitError),
            ({"durable": True}, "not_durable", millstream.PathError),
        ]:
            with self.subTest(kind), self.assertRaises(expected) as raised:
                self.here.write(self.segment, self.region, self.target, **values)
            error = raised.exception
            self.assertEqual((error.kind, type(error)), (kind, expected))
            self.assertTrue(error.remedy)
            other = pickle.loads(pickle.dumps(error))
            self.assertEqual((other.kind, other.code), (kind, error.code))
        for wrong in ["high", "", "LATENCY"]:
            with self.subTest(wrong), self.assertRaises(millstream.ArgumentError):
                self.here.write(self.segment, self.region, self.target, priority=wrong)

    def test_deadlines_are_judged_where_tent_chooses(self):
        settings = {"transfer.policy": "tent"}
        with millstream.Engine(transports=["tcp"], settings=settings) as here:
            region, segment = here.allocate(4096), here.open(self.there.name)
            with self.assertRaises(millstream.DeadlineError) as raised:
                here.write(segment, region, segment.buffers[0][0:4096], timeout=0)
            self.assertEqual(raised.exception.kind, "deadline_passed")

    def test_ranges_end_where_addresses_do(self):
        last = (1 << 64) - 1
        self.assertEqual(millstream.Range(last - 9, 10)[9:].address, last)
        self.assertEqual(millstream.Range(last, 0).length, 0)
        for address, length in [(last - 9, 11), (0, 1 << 63), (last, 1 << 62)]:
            with self.subTest(length), self.assertRaises(millstream.ArgumentError):
                millstream.Range(address, length)
        with self.assertRaises(millstream.ArgumentError):
            millstream.Range(last, 1)[1:]

    def test_a_peer_that_is_gone_is_an_error_that_names_it(self):
        name = self.there.name
        self.there.close()
        with self.assertRaises(millstream.Error) as raised:
            self.here.write(self.segment, self.region, self.target).wait(30)
        self.assertEqual(raised.exception.peer, name)
        with self.assertRaises(millstream.SegmentError):
            self.here.open("127.0.0.1:1")

    def test_closed_engines_say_so(self):
        transfer = self.here.write(self.segment, self.region, self.target)
        batch = self.here.batch()
        self.here.close()
        self.here.close()
        self.assertTrue(self.here.closed)
        calls = [
            lambda: self.here.register(bytearray(1)),
            lambda: self.here.register_file("/dev/null"),
            lambda: self.here.unregister_file("nvmeof/127.0.0.1:1/a"),
            lambda: self.here.files,
            lambda: self.here.open(self.there.name),
            lambda: self.here.write(self.segment, self.region, self.target),
            lambda: batch.submit(),
            lambda: transfer.wait(1),
            lambda: transfer.cancel(),
            lambda: self.segment.refresh(),
            lambda: self.region.unregister(),
            lambda: asyncio.run(awaited(transfer)),
        ]
        for number, call in enumerate(calls):
            with self.subTest(number), self.assertRaises(millstream.ClosedError):
                call()

    def test_engines_that_cannot_be_made(self):
        for values in [{"transports": ["pigeon"]}, {"metadata": "bogus://x"}, {"settings": {"no": 1}}]:
            with self.subTest(values), self.assertRaises(millstream.ConfigError):
                millstream.Engine(**values)
        with self.assertRaises(millstream.ConfigError):
            millstream.Engine("192.0.2.1")
        with self.assertRaises(millstream.ArgumentError):
            millstream.Engine("nowhere")

    def test_a_fork_has_no_engine(self):
        transfer, batch = self.here.write(self.segment, self.region, self.target), self.here.batch()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for call in [
                    lambda: self.segment.buffers,
                    lambda: self.segment.locations,
                    lambda: self.here.transports,
                    lambda: transfer.wait(1),
                    lambda: batch.submit(),
                    lambda: self.region.unregister(),
                ]:
                    with self.assertRaises(millstream.ForkError):
                        call()
                self.here.open(self.there.name)
            except millstream.ForkError:
                del self.region, self.segment
                self.here = None  # Nothing waits for threads that are not here.
                gc.collect()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        self.assertEqual(os.waitstatus_to_exitcode(status), 0)
        self.here.write(self.segment, self.region, self.target).wait(10)


class Waiting(unittest.TestCase):
    """Waiting for a peer that does not answer."""

    def setUp(self):
        program = "import millstream; e = millstream.Engine(transports=['tcp']); r = e.allocate(64 << 20); print(e.name, flush=True); input()"
        self.peer = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.addCleanup(self.end)
        self.engine = millstream.Engine(transports=["tcp"])
        self.addCleanup(self.engine.close)
        # More than sockets hold.
        self.region = self.engine.allocate(64 << 20)
        self.segment = self.engine.open(self.peer.stdout.readline().strip())
        self.engine.write(self.segment, self.region, self.segment.buffers[0]).wait(10)
        os.kill(self.peer.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.peer.pid, os.WSTOPPED)
        self.transfer = self.engine.write(self.segment, self.region, self.segment.buffers[0])

    def end(self):
        self.peer.kill()
        self.peer.wait()
        self.peer.stdin.close()
        self.peer.stdout.close()

    def test_a_wait_ends_with_its_time_and_the_transfer_goes_on(self):
        with self.assertRaises(TimeoutError) as raised:
            self.transfer.wait(0.05)
        self.assertIsInstance(raised.exception, millstream.TransferTimeoutError)
        os.kill(self.peer.pid, signal.SIGCONT)
        self.assertEqual(self.transfer.wait(20), 64 << 20)

    def test_keyboard_interrupt_ends_a_wait(self):
        # Whoever runs the tests in the background has it ignored.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, before)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        begun = time.monotonic()
        with self.assertRaises(KeyboardInterrupt):
            # On a busy machine its time may be over before the wait begins.
            timer.start()
            self.transfer.wait(60)
        self.assertLess(time.monotonic() - begun, 30)
        timer.join()

    def test_other_threads_run_meanwhile(self):
        turns = 0
        over = threading.Event()

        def wait():
            with self.assertRaises(TimeoutError):
                self.transfer.wait(0.5)
            over.set()

        thread = threading.Thread(target=wait)
        thread.start()
        while not over.is_set():
            turns += 1
        thread.join()
        self.assertGreater(turns, 10_000)

    def test_a_transfer_that_is_no_longer_awaited_is_canceled(self):
        async def main():
            await asyncio.wait_for(awaited(self.transfer), 0.05)

        with self.assertRaises(asyncio.TimeoutError):
            asyncio.run(main())
        os.kill(self.peer.pid, signal.SIGCONT)
        with self.assertRaises(millstream.TransferError):
            self.transfer.wait(20)

    def test_awaiting_is_canceled_although_the_engine_was_closed(self):
        async def main():
            task = asyncio.ensure_future(awaited(self.transfer))
            await asyncio.sleep(0)
            self.engine.close()
            task.cancel()
            await task

        with self.assertRaises(asyncio.CancelledError):
            asyncio.run(main())

    def test_closing_ends_the_wait_of_another_thread(self):
        raised = []

        def wait():
            try:
                self.transfer.wait(30)
            except millstream.Error as error:
                raised.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        self.engine.close()
        thread.join(20)
        self.assertEqual(len(raised), 1)


class Closing(unittest.TestCase):
    """An engine is closed while another thread is in a call on it."""

    def close_amid_a_call(self, engine, name, asked, release=lambda: None):
        address, answers, failures = engine.address, [], []

        def ask():
            try:
                engine.open(name)
            except millstream.SegmentError as error:
                failures.append(error)

        def close():
            engine.close()
            with socket.socket() as connection:
                answers.append(connection.connect_ex(address) == 0)

        asking, closing = threading.Thread(target=ask), threading.Thread(target=close)
        asking.start()
        asked()
        closing.start()
        timer = threading.Timer(0.3, release)
        timer.start()
        gap = interpreter.longest_gap(lambda: asking.is_alive() or closing.is_alive())
        for thread in asking, closing, timer:
            thread.join()
        self.assertLess(gap, 1)
        self.assertEqual(answers, [False], "it has ended when close returns")
        self.assertEqual(len(failures), 1)
        with self.assertRaises(millstream.ClosedError):
            engine.open(name)

    def test_it_has_ended_when_close_returns(self):
        silent = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(silent.close)
        silent.settimeout(20)
        engine = millstream.Engine(transports=["tcp"], settings={"handshake.call_timeout": "2s"})
        self.addCleanup(engine.close)
        engine.register(bytearray(4096))
        asked = lambda: self.addCleanup(silent.accept()[0].close)
        self.close_amid_a_call(engine, f"127.0.0.1:{silent.getsockname()[1]}", asked)

    def test_other_threads_run_while_it_ends(self):
        server = interpreter.MetadataServer(self, "nobody")
        engine = millstream.Engine(transports=["tcp"], metadata=server.uri, name="here")
        self.addCleanup(engine.close)
        self.assertTrue(server.values)
        asked = lambda: self.assertTrue(server.asked.wait(20))
        self.close_amid_a_call(engine, "nobody", asked, server.release.set)
        self.assertEqual(server.values, {})

    def test_who_closes_it_as_well_waits_until_it_has_ended(self):
        server = interpreter.MetadataServer(self, "nobody")
        engine = millstream.Engine(transports=["tcp"], metadata=server.uri, name="here")
        self.addCleanup(engine.close)

        def ask():
            with self.assertRaises(millstream.SegmentError):
                engine.open("nobody")

        threads = [threading.Thread(target=work) for work in (ask, engine.close)]
        threads[0].start()
        self.assertTrue(server.asked.wait(20))
        threads[1].start()
        while not engine.closed:
            time.sleep(0.001)
        timer = threading.Timer(0.3, server.release.set)
        timer.start()
        engine.close()
        self.assertEqual(server.values, {})
        for thread in [*threads, timer]:
            thread.join()


async def awaited(transfer):
    return await transfer


def notifications(engine):
    """The next that come."""
    for _ in range(1000):
        taken = engine.take_notifications()
        if taken:
            return taken
        time.sleep(0.005)
    return []


class Forking(unittest.TestCase):
    """A process forks while its threads transfer: each child makes engines of its own."""

    def test_forks_of_a_busy_process_have_engines_of_their_own(self):
        over = threading.Event()
        failures = []
        there = millstream.Engine(transports=["tcp"])
        self.addCleanup(there.close)
        memory = there.allocate(LENGTH)

        def work(number):
            try:
                while not over.is_set():
                    with millstream.Engine(transports=["tcp"]) as here:
                        segment = here.open("localhost:" + there.name.split(":")[1])
                        region = here.allocate(LENGTH)
                        for _ in range(5):
                            here.write(segment, region, segment.buffers[0]).wait(30)
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(50):
                child = os.fork()
                if child == 0:
                    self.child(there, memory)
                _, status = os.waitpid(child, 0)
                self.assertEqual(os.waitstatus_to_exitcode(status), 0)
        finally:
            over.set()
            for thread in threads:
                thread.join()
        self.assertEqual(failures, [])

    def child(self, inherited, memory):
        signal.alarm(30)  # One that takes so long hangs.
        code = 1
        try:
            for call in [lambda: inherited.open("x"), lambda: memory.read(0, 1), lambda: inherited.allocate(1)]:
                with self.assertRaises(millstream.ForkError):
                    call()
            for transport in ["tcp", "shm"]:
                with (
                    millstream.Engine(transports=[transport]) as here,
                    millstream.Engine(transports=[transport]) as there,
                ):
                    source, target = here.allocate(LENGTH), there.allocate(LENGTH)
                    source.write(0, bytes([7]) * LENGTH)
                    segment = here.open("localhost:" + there.name.split(":")[1])
                    here.write(segment, source, segment.buffers[0]).wait(20)
                    self.assertEqual(target.read(), bytes([7]) * LENGTH)
            code = 0
        except BaseException as error:
            os.write(2, f"{type(error)}: {error}\n".encode())
        finally:
            os._exit(code)


class Leaking(unittest.TestCase):
    def test_engines_leave_no_descriptors_and_no_threads(self):
        def count():
            gc.collect()
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

        def use():
            with millstream.Engine() as here, millstream.Engine() as there:
                memory = bytearray(4096)
                there.register(memory)
                region = here.allocate(4096)
                segment = here.open(there.name)
                here.write(segment, region, segment.buffers[0]).wait(10)

        use()
        before = count()
        for _ in range(5):
            use()
        after = count()
        for _ in range(400):
            if after <= before:
                break
            time.sleep(0.01)
            after = count()
        self.assertLessEqual(after, before)


if __name__ == "__main__":
    unittest.main()
