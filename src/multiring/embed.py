"""The side of Python of ``multiring.h``: what ``libmultiring.so`` runs, and what a compiler has to be told of it.

``python -m multiring.embed`` prints the compiler's flags.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def flags() -> str:
    """Return the flags with which a C or C++ compiler compiles and links a program that includes ``multiring.h``."""
    from multiring import _native

    library = Path(_native.__file__).parent / "lib"  # an editable installation has it elsewhere than this file
    return f"-I{Path(__file__).parent / 'include'} -L{library} -Wl,-rpath,{library} -lmultiring"


def where() -> str:
    """The shared library of this Python, and on a second line the path on which it finds modules."""
    name, folder, multiarch = (sysconfig.get_config_var(key) or "" for key in ("INSTSONAME", "LIBDIR", "MULTIARCH"))
    candidates = [Path(folder) / name, Path(folder) / multiarch / name]  # the second is Debian's
    library = next((path for path in candidates if path.is_file()), name)
    return f"{library}\n{[entry for entry in sys.path if entry]!r}"


def init(table: int) -> None:
    """Join the job for a program that is not written in Python, and fill its table of functions."""
    from multiring import _native

    try:
        from multiring import api
        from multiring.runtime.comm import group_of

        communicator = api.init()
        group_of(communicator).publish()
    except Exception as error:  # the program is told: nobody above could catch it
        _native.answer_c(table, type(error).__name__, str(error))
    else:
        _native.fill_c(table, communicator.rank, communicator.size)


def shutdown(table: int) -> None:
    """Leave the job for it."""
    from multiring import _native

    try:
        from multiring import api

        api.shutdown()
    except Exception as error:  # as above
        _native.answer_c(table, type(error).__name__, str(error))
    else:
        _native.clear_c(table)


if __name__ == "__main__":
    print(where() if sys.argv[1:] == ["--where"] else flags())
