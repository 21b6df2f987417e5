"""Process that imports one state of another program, within limits of memory and processor time.

It reads an order from its standard input, and writes the answer to its standard output. What it reads may have been made to take a
parser forever; that ends this process, and `import_state` says so.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings

import msgspec

from ciuic.training.state_import import ImportOrder, answer_order


def main() -> None:
    """Answer one order."""
    # Ctrl-C ends it at once; what it would say is said by the process that waits for it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # What libraries print must not get into the answer, and their advice must not reach the user.
    answer_fd = os.dup(1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    answer = answer_order(ImportOrder.decode(sys.stdin.buffer.read()))
    with open(answer_fd, "wb") as file:
        file.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
