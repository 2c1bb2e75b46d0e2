"""What holds for every test."""

from __future__ import annotations

import signal

# A shell that starts the suite in the background ignores Ctrl-C for it, and what it starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
