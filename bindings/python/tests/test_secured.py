"""Engines with a token and certificates: towards an engine of the command, and why it does not work otherwise."""

import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

import millstream
import nodes

HOST = "127.0.0.1"
TOKEN = "the token of this cluster"


def openssl(*words):
    subprocess.run(["openssl", *words], check=True, capture_output=True)


@unittest.skipUnless(nodes.COMMAND and shutil.which("openssl"), "MILLSTREAM_TEST_COMMAND and openssl make peers and certificates")
class Secured(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        for authority in ["ours", "theirs"]:
            files = ["-keyout", cls.folder / f"{authority}.key", "-out", cls.folder / f"{authority}.pem"]
            openssl("req", "-x509", *cls.new_key(), *files, "-subj", f"/CN={authority}", "-days", "30")

    @staticmethod
    def new_key():
        return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]

    def identity(self, name, host=HOST, token=TOKEN, authority="ours"):
        """Settings of an engine with a certificate for this host."""
        place = lambda kind: str(self.folder / f"{name}.{kind}")
        names = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{host}"]
        openssl("req", *self.new_key(), "-keyout", place("key"), "-out", place("request"), *names)
        signing = ["-CA", str(self.folder / f"{authority}.pem"), "-CAkey", str(self.folder / f"{authority}.key")]
        signing += ["-CAcreateserial", "-copy_extensions", "copy", "-days", "30"]
        openssl("x509", "-req", "-in", place("request"), "-out", place("pem"), *signing)
        pathlib.Path(place("token")).write_text(token)
        os.chmod(place("token"), 0o600)
        return {
            "security.certificate_file": place("pem"),
            "security.key_file": place("key"),
            "security.ca_file": str(self.folder / "ours.pem"),
            "security.token_file": place("token"),
        }

    def node(self, settings):
        """The name of the segment of an engine of the command."""
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        return nodes.node(self, "--bind", HOST, "--protocol", "tcp", "--buffer", "64KiB", *words)["segment"]

    def engine(self, settings):
        engine = millstream.Engine(HOST, transports=["tcp"], settings=settings)
        self.addCleanup(engine.close)
        return engine

    def test_bytes_move_and_come_back(self):
        engine = self.engine(self.identity("python"))
        segment = engine.open(self.node(self.identity("command")))
        region = engine.allocate(65536)
        region.write(0, bytes([7]) * 65536)
        transfer = engine.write(segment, region, segment.buffers[0])
        self.assertEqual(transfer.wait(60), 65536)
        self.assertEqual(transfer.status[0].transport, "tcp")
        region.write(0, bytes(65536))
        engine.read(segment, region, segment.buffers[0]).wait(60)
        self.assertEqual(region.read(), bytes([7]) * 65536)

    def test_two_engines_in_python(self):
        here, there = self.engine(self.identity("here")), self.engine(self.identity("there"))
        there.allocate(4096)
        segment = here.open(there.name)
        self.assertEqual(here.write(segment, here.allocate(4096), segment.buffers[0]).wait(60), 4096)

    def test_what_is_wrong_is_said(self):
        good = self.node(self.identity("good"))
        misnamed = self.node(self.identity("misnamed", host="127.250.0.9"))
        for name, settings, reason in [
            (good, self.identity("other", token="another token, as long"), "its token is another than ours"),
            (misnamed, self.identity("caller"), f"it was called {HOST}, and its certificate is for 127.250.0.9"),
            (good, self.identity("foreign", authority="theirs"), "no authority that it trusts vouches for our certificate"),
            (good, {}, "only who prove by a certificate who they are"),
        ]:
            with self.subTest(reason), self.assertRaises(millstream.SegmentError) as raised:
                self.engine(settings).open(name)
            self.assertIn(reason, str(raised.exception))
            self.assertEqual(raised.exception.peer, name)

    def test_settings_that_are_wrong_make_no_engine(self):
        whole = self.identity("whole")
        for wrong, reason in [
            ({"security.key_file": whole["security.key_file"]}, "go together"),
            ({"security.token_file": "/nonexistent"}, "/nonexistent"),
            (whole | {"security.key_file": whole["security.certificate_file"]}, "private key"),
        ]:
            with self.subTest(reason), self.assertRaises(millstream.ConfigError) as raised:
                self.engine(wrong)
            self.assertIn(reason, str(raised.exception))


if __name__ == "__main__":
    unittest.main()
