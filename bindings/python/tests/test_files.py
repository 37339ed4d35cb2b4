"""Segments that are files, which the command offers."""

import os
import pathlib
import tempfile
import unittest

import millstream
import nodes

LENGTH = 200_000


@unittest.skipUnless(nodes.COMMAND, "MILLSTREAM_TEST_COMMAND offers files")
class Files(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(os.path.realpath(folder.name))
        self.path = self.folder / "offered"
        self.path.write_bytes(bytes([1]) * LENGTH)

    def node(self, *words):
        """What a process of the command says that offers the file."""
        return nodes.node(self, "--protocol", "nvmeof", "--buffer", "1", "--offer-file", str(self.path), *words)

    def engine(self, *transports, **settings):
        settings = {f"nvmeof.{key}": value for key, value in settings.items()}
        engine = millstream.Engine(transports=transports or ["nvmeof"], settings=settings)
        self.addCleanup(engine.close)
        return engine

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
