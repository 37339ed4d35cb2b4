"""Processes of the command, with which tests talk."""

import json
import os
import subprocess

COMMAND = os.environ.get("MILLSTREAM_TEST_COMMAND")


def node(test, *words):
    """What a `node` of the command says once it serves. It ends with the test."""
    process = subprocess.Popen([COMMAND, "node", *words], stdout=subprocess.PIPE, text=True)
    test.addCleanup(process.wait)
    test.addCleanup(process.kill)
    test.addCleanup(process.stdout.close)
    line = process.stdout.readline()
    test.assertTrue(line.startswith("ready "), line)
    return json.loads(line.removeprefix("ready "))
