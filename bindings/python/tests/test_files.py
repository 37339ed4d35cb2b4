"""Segments that are files, which the command offers, or an engine of Python."""

import os
import pathlib
import tempfile
import threading
import unittest

import millstream
import nodes

LENGTH = 200_000


class WithFile(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(os.path.realpath(folder.name))
        self.path = self.folder / "offered"
        self.path.write_bytes(bytes([1]) * LENGTH)

    def engine(self, *transports, **settings):
        settings = {f"nvmeof.{key}": value for key, value in settings.items()}
        engine = millstream.Engine(transports=transports or ["nvmeof"], settings=settings)
        self.addCleanup(engine.close)
        return engine


class Offered(WithFile):
    def test_a_file_is_written_and_read_by_another_engine(self):
        there, here = self.engine(), self.engine()
        name = there.register_file(self.path, writable=True)
        self.assertEqual((name, there.files), (f"nvmeof/{there.name}/offered", [name]))
        segment = here.open(name)
        [whole] = segment.buffers
        self.assertEqual((whole.address, whole.length), (0, LENGTH))
        region = here.allocate(LENGTH)
        region.write(0, bytes([7]) * LENGTH)
        self.assertEqual(here.write(segment, region[0:5000], whole[1000:6000], durable=True).wait(60), 5000)
        expected = bytes([1]) * 1000 + bytes([7]) * 5000 + bytes([1]) * (LENGTH - 6000)
        self.assertEqual(self.path.read_bytes(), expected)
        self.assertEqual(here.read(segment, region, whole).wait(60), LENGTH)
        self.assertEqual(region.read(), expected)

    def test_auto_has_files_once_one_is_named(self):
        there, here, third = self.engine("auto"), self.engine("auto"), self.engine("auto", "nvmeof")
        for engine, expected in (there, False), (here, False), (third, True):
            self.assertEqual("nvmeof" in engine.transports, expected)
        name = there.register_file(self.path)
        self.assertIn("nvmeof", there.transports)
        for engine in here, third:
            segment, region = engine.open(name), engine.allocate(LENGTH)
            self.assertEqual(engine.transports.count("nvmeof"), 1)
            engine.read(segment, region, segment.buffers[0]).wait(60)
            self.assertEqual(region.read(), bytes([1]) * LENGTH)

    def test_many_threads_name_the_first_file(self):
        # Each engine has one moment in which a thread could install what another one is installing.
        for _ in range(10):
            engine, failures, begin = self.engine("auto"), [], threading.Barrier(8)

            def register(number):
                begin.wait(60)
                try:
                    engine.register_file(self.path, name=str(number))
                except Exception as error:
                    failures.append(error)

            threads = [threading.Thread(target=register, args=(number,)) for number in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertEqual(failures, [])
            self.assertEqual(engine.files, [f"nvmeof/{engine.name}/{number}" for number in range(8)])
            engine.close()

    def test_a_file_is_for_reading_unless_said_and_as_long_as_said(self):
        there, here = self.engine(), self.engine()
        segment, region = here.open(there.register_file(str(self.path), length=5000)), here.allocate(6000)
        self.assertEqual(segment.buffers[0].length, 5000)
        with self.assertRaisesRegex(millstream.TransferError, "offered for reading only"):
            here.write(segment, region[0:5000], segment.buffers[0]).wait(60)
        self.assertEqual(self.path.read_bytes(), bytes([1]) * LENGTH)
        with self.assertRaises(millstream.SubmitError):
            here.read(segment, region[0:5001], 0)
        there.register_file(self.path, name="longer", length=LENGTH + 1, writable=True)
        self.assertEqual(self.path.read_bytes(), bytes([1]) * LENGTH + b"\0")

    def test_a_file_that_is_mapped_elsewhere_is_opened_there(self):
        mapped = self.folder / "mapped"
        mapped.write_bytes(bytes([2]) * LENGTH)
        name = self.engine().register_file(self.path, local_path_map={"shop": mapped, "other": "/nowhere"})
        for settings, byte in ({"server_name": "shop", "mapped_folders": self.folder}, 2), ({"server_name": "shop"}, 1):
            engine = self.engine(**settings)
            segment, region = engine.open(name), engine.allocate(LENGTH)
            engine.read(segment, region, segment.buffers[0]).wait(60)
            self.assertEqual(region.read(), bytes([byte]) * LENGTH)

    def test_a_file_is_taken_back(self):
        there, here = self.engine(), self.engine()
        name = there.register_file(self.path)
        segment, region = here.open(name), here.allocate(1)
        here.read(segment, region, 0).wait(60)
        there.unregister_file(name)
        self.assertEqual(there.files, [])
        with self.assertRaisesRegex(millstream.TransferError, "not registered any more"):
            here.read(segment, region, 0).wait(60)

    def test_what_cannot_be_offered_is_said(self):
        engine, missing = self.engine("auto"), self.folder / "missing"
        name = engine.register_file(self.path)
        for register, code, reason in [
            (lambda: engine.register_file(missing), -1, f"cannot offer file {missing}: No such file"),
            (lambda: engine.register_file(self.folder), -1, "irectory"),
            (lambda: engine.register_file(self.path, name="a/b"), -1, "no name of a file"),
            (lambda: engine.register_file(self.path), -7, "is registered as"),
            (lambda: engine.unregister_file(f"{name}s"), -3, f"{name}s"),
            (lambda: self.engine("tcp").register_file(self.path), -202, "need the transport nvmeof"),
        ]:
            with self.subTest(reason), self.assertRaises(millstream.RegisterError) as raised:
                register()
            self.assertIn(reason, str(raised.exception))
            self.assertEqual(raised.exception.code, code)
            self.assertTrue(raised.exception.remedy)
        for server, path, reason in ("", "/x", "one word"), ("a b", "/x", "one word"), ("shop", "x", "begins with /"):
            with self.subTest(server), self.assertRaisesRegex(millstream.ArgumentError, f"local_path_map: .*{reason}"):
                engine.register_file(self.path, name="again", local_path_map={server: path})
        self.assertEqual(engine.files, [name])
        missing.write_bytes(b"x")
        engine.register_file(missing)


@unittest.skipUnless(nodes.COMMAND, "MILLSTREAM_TEST_COMMAND offers files")
class Files(WithFile):
    def node(self, *words):
        """What a process of the command says that offers the file."""
        return nodes.node(self, "--protocol", "nvmeof", "--buffer", "1", "--offer-file", str(self.path), *words)

    def test_bytes_move_to_a_file_and_back(self):
        engine = self.engine("auto", "nvmeof")
        segment = engine.open(self.node()["files"][0])
        [whole] = segment.buffers
        self.assertEqual((whole.address, whole.length), (0, LENGTH))
        region = engine.allocate(LENGTH)
        region.write(0, bytes([7]) * LENGTH)
        expected = bytearray([1]) * LENGTH
        for at, durable in (1000, False), (100_000, True):
            transfer = engine.write(segment, region[0:5000], whole[at : at + 5000], durable=durable)
            self.assertEqual(transfer.wait(60), 5000)
            self.assertEqual(transfer.status[0].transport, "nvmeof")
            expected[at : at + 5000] = bytes([7]) * 5000
        batch = engine.batch()
        batch.write(segment, region[0:1], LENGTH - 1)
        self.assertEqual(batch.submit(durable=True).wait(60), 1)
        expected[-1] = 7
        self.assertEqual(self.path.read_bytes(), expected)
        self.assertEqual(engine.read(segment, region, whole).wait(60), LENGTH)
        self.assertEqual(region.read(), expected)

    def test_of_durable_requests_with_one_to_memory_none_is_done(self):
        engine = self.engine("tcp", "nvmeof")
        node = self.node("--protocol", "tcp")
        file, memory = (engine.open(name) for name in (node["files"][0], node["segment"]))
        region = engine.allocate(1)
        batch = engine.batch()
        batch.write(file, region, 0)
        batch.write(memory, region, memory.buffers[0])
        with self.assertRaises(millstream.PathError) as raised:
            batch.submit(durable=True)
        self.assertEqual(raised.exception.kind, "not_durable")
        self.assertEqual(self.path.read_bytes(), bytes([1]) * LENGTH)

    def test_a_file_that_is_mapped_here_is_opened_here(self):
        there = self.folder / "there"
        there.write_bytes(bytes([2]) * LENGTH)
        name = self.node("--map-file", f"{self.path}@shop={there}")["files"][0]
        engine = self.engine(server_name="shop", mapped_folders=self.folder)
        segment, region = engine.open(name), engine.allocate(LENGTH)
        engine.read(segment, region, segment.buffers[0]).wait(60)
        self.assertEqual(region.read(), bytes([2]) * LENGTH)

    def test_what_is_not_there_is_said(self):
        name = self.node()["files"][0]
        engine = self.engine("tcp")
        segment = engine.open(name)
        with self.assertRaises(millstream.PathError) as raised:
            engine.read(segment, engine.allocate(1), 0)
        self.assertIn("nvmeof", str(raised.exception))


if __name__ == "__main__":
    unittest.main()
