"""Which RDMA devices an engine looks for, seen by a library whose devices cannot be opened."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

LIBRARY = pathlib.Path(__file__).resolve().parents[3] / "crates/lab/src/rdma_library.c"

CODE = """
import sys
import millstream

listen, bind, devices = sys.argv[1:]
settings = {"rdma.devices": devices}
with millstream.Engine(listen, host="127.0.0.1", bind=[bind] if bind else None, settings=settings) as engine:
    assert "tcp" in engine.transports and "rdma" not in engine.transports, engine.transports
"""


class Devices(unittest.TestCase):
    def test_auto_has_those_of_the_system_that_are_named_or_all_where_no_address_is(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        library = pathlib.Path(folder.name) / "libibverbs.so.1"
        names = '-DNAMES="mlx5_0","mlx5_1"'
        subprocess.run(["cc", names, "-shared", "-fPIC", "-o", library, LIBRARY], check=True)
        both = ["opens mlx5_0", "opens mlx5_1"]
        # One that has an address is looked for in one list; one with a name in a list of its own.
        by_address, all_of_them = ["lists", *both], ["lists", "lists", both[0], "lists", both[1]]
        for listen, bind, devices, expected in [
            ("0.0.0.0", "", "", all_of_them),
            ("0.0.0.0", "127.0.0.1", "", by_address),
            ("127.0.0.1", "", "", by_address),
            ("127.0.0.1", "", "all", all_of_them),
            ("127.0.0.1", "127.0.0.1", "missing,mlx5_1", ["lists", "lists", both[1]]),
        ]:
            path = os.pathsep.join(filter(None, [folder.name, os.environ.get("LD_LIBRARY_PATH")]))
            environment = os.environ | {"LD_LIBRARY_PATH": path}
            done = subprocess.run(
                [sys.executable, "-c", CODE, listen, bind, devices],
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
                timeout=200,
            )
            self.assertEqual(done.returncode, 0, done.stderr)
            said = [line for line in done.stderr.splitlines() if line.startswith(("lists", "opens "))]
            self.assertEqual(said, expected, (listen, bind, devices, done.stderr))


if __name__ == "__main__":
    unittest.main()
