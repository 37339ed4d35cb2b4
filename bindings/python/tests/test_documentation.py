"""The programs of docs/python.md do what it says, and the benchmark prints its columns."""

import ast
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

from millstream import _native as native

DOCUMENT = pathlib.Path(__file__).resolve().parents[3] / "docs/python.md"


def programs():
    text = DOCUMENT.read_text()
    return dict(re.findall(r"```python file=(\S+)\n(.*?)```", text, re.DOTALL))


class Documentation(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        for name, text in programs().items():
            (self.folder / name).write_text(text)

    def run_program(self, name, *arguments):
        program = [sys.executable, self.folder / name, *arguments]
        done = subprocess.run(program, capture_output=True, text=True, timeout=60, cwd=self.folder)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout

    def test_two_processes(self):
        program = [sys.executable, self.folder / "target.py"]
        with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as target:
            name = target.stdout.readline().strip()
            printed = self.run_program("initiator.py", name)
            self.assertIn(printed, DOCUMENT.read_text())
            self.assertEqual(printed, "4096 bytes written\n[4.0, 5.0, 6.0, 7.0, 0.0]\n")
            target.stdin.write("\n")
            target.stdin.flush()
            self.assertRegex(target.stdout.readline(), r"^\[0.0, 1.0, 2.0, 3.0\] \[(\('initiator', 'done'\))?\]$")

    def test_a_batch(self):
        self.assertEqual(self.run_program("batch.py"), "1048576\n")

    def test_an_error(self):
        first, remedy = self.run_program("error.py").splitlines()
        self.assertEqual(first, "-1 True True")
        self.assertIn("Segment.buffers", remedy)

    def test_files(self):
        self.assertEqual(self.run_program("files.py"), "weights 8192 b'\\x00\\x00\\x01\\x01'\n")

    def test_terms(self):
        self.assertEqual(self.run_program("terms.py"), "over_limit\n")

    def test_every_program_is_tested(self):
        self.assertEqual(set(programs()), {"target.py", "initiator.py", "batch.py", "error.py", "files.py", "terms.py"})

    def test_tests_that_it_names_are_there(self):
        root = DOCUMENT.parents[1]
        tests = [f"bindings/python/tests/test_{name}.py" for name in ("documentation", "engine", "files", "secured")]
        tests.append("bindings/mooncake/tests/test_mooncake.py")
        classes = [node for file in tests for node in ast.parse((root / file).read_text()).body]
        there = {
            f"{node.name}.{part.name}"
            for node in classes
            if isinstance(node, ast.ClassDef)
            for part in node.body
            if isinstance(part, ast.FunctionDef)
        }
        named = set(re.findall(r"\b([A-Z]\w+\.test_\w+)`", DOCUMENT.read_text()))
        self.assertGreater(len(named), 20)
        self.assertEqual(named - there, set())


class Stubs(unittest.TestCase):
    def test_the_native_module_has_what_its_stub_says_and_nothing_else(self):
        stub = ast.parse(pathlib.Path(native.__file__).with_name("_native.pyi").read_text())
        classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
        self.assertEqual(set(classes), {name for name, value in vars(native).items() if isinstance(value, type)})
        for name, node in classes.items():
            said = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            said |= {part.target.id for part in node.body if isinstance(part, ast.AnnAssign)}
            there = {it for it in vars(getattr(native, name)) if not it.startswith("_")}
            with self.subTest(name):
                self.assertEqual({it for it in said if not it.startswith("_")}, there)


class Bench(unittest.TestCase):
    def bench(self, *arguments):
        program = [sys.executable, "-m", "millstream.bench", "--working-set", "8MiB", *arguments]
        return subprocess.run(program, capture_output=True, text=True, timeout=100)

    def test_the_line_of_the_document(self):
        line = re.search(r"-m millstream.bench (.*)", DOCUMENT.read_text())[1]
        done = self.bench(*line.split())
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        head, columns, *rows = done.stdout.splitlines()
        self.assertRegex(head, r"^segment 127.0.0.1:\d+ over shm, 0.1s a row; latencies are of whole batches$")
        names = "op bytes batch threads requests GB/s requests/s p50 us p99 us CPU s/GB"
        self.assertEqual(columns.split(), names.split())
        self.assertEqual([row.split()[:5] for row in rows], [[op, "64", "KiB", "16", "1"] for op in ("write", "read")])

    def test_json_and_threads(self):
        done = self.bench("--json", "--op", "read", "--block-size", "4KiB", "--threads", "3", "--duration", "0.05", "--protocol", "tcp")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        row = json.loads(done.stdout)
        self.assertEqual((row["op"], row["transport"], row["threads"]), ("read", "tcp", 3))
        self.assertEqual(row["bytes"], row["requests"] * 4096)

    def test_what_is_wrong_is_said(self):
        for arguments, says in [
            (["--segment", "127.0.0.1:1"], "remedy"),
            (["--block-size", "zero"], "no size"),
            (["--protocol", "pigeon"], "pigeon"),
            (["--block-size", "16MiB"], "only 8388608 bytes"),
        ]:
            done = self.bench(*arguments)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(says, done.stderr)
            self.assertNotIn("Traceback", done.stderr)


if __name__ == "__main__":
    unittest.main()
