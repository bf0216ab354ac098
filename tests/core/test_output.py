"""The streams of a command (titan_core.toolkit.output) beside those of the interpreter. Closed ones: test_closed_output."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from titan_core.toolkit.output import write_all

PRINTS = """
import os, sys
from titan_core.toolkit.output import standard_streams
sys.stdout.write("first ")
with standard_streams():
    print("second", end="")
    {}
"""


@pytest.mark.parametrize(("options", "shown"), [(["-u"], b"first second"), ([], b"first ")])
def test_an_unbuffered_interpreter_prints_at_once(options: list[str], shown: bytes) -> None:
    code = PRINTS.format("os._exit(0)")  # what is in a buffer is lost
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(command, capture_output=True, check=True, env=environment)
    assert (done.stdout, done.stderr) == (shown, b"")


def test_a_stream_may_be_closed_or_replaced_within_the_block() -> None:
    code = PRINTS.format("sys.stderr.close(); sys.stdout = None") + "print('third', end='')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"first secondthird", b"")


def test_a_full_pipe_that_does_not_block_is_waited_for() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    data, received = bytes(range(256)) * 4096, b""

    def write() -> None:
        write_all(writer, data)
        os.close(writer)

    thread = threading.Thread(target=write)
    thread.start()
    while part := os.read(reader, 1 << 16):
        received += part
    thread.join()
    os.close(reader)
    assert received == data
