"""What tests need that look whether the threads of an interpreter go on."""

import http.server
import threading
import time
import urllib.parse


def longest_gap(busy):
    """For how long this thread was kept from running at most, as long as it is ``busy``: seconds."""
    longest, last = 0, time.monotonic()
    while busy():
        time.sleep(0.005)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return longest


class MetadataServer:
    """A metadata server in a thread of this interpreter. Who asks for a key with ``slow`` in it waits for ``release``."""

    def __init__(self, test, slow):
        self.values, self.asked, self.release = {}, threading.Event(), threading.Event()
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *arguments):
                pass

            def key(self):
                return urllib.parse.parse_qs(urllib.parse.urlparse(self.path).query)["key"][0]

            def answer(self, value):
                self.send_response(404 if value is None else 200)
                self.send_header("Content-Length", str(len(value or b"")))
                self.end_headers()
                if value:
                    self.wfile.write(value)

            def do_GET(self):
                if slow in self.key():
                    owner.asked.set()
                    owner.release.wait(20)
                self.answer(owner.values.get(self.key()))

            def do_PUT(self):
                owner.values[self.key()] = self.rfile.read(int(self.headers["Content-Length"]))
                self.answer(b"")

            def do_DELETE(self):
                self.answer(owner.values.pop(self.key(), None))

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        test.addCleanup(server.server_close)
        thread = threading.Thread(target=server.serve_forever)
        test.addCleanup(thread.join)
        test.addCleanup(server.shutdown)
        # Nobody is to wait for it for ever, whatever fails.
        test.addCleanup(self.release.set)
        thread.start()
        self.uri = f"http://127.0.0.1:{server.server_address[1]}/metadata"
