"""The program of a standby: it imports what a script imports, waits until it is to be a rank, and runs the script.

It is started by its path, by the Python that is to run the script, so it needs nothing but the standard library:
``python OPTIONS standby.py DESCRIPTOR train.py ARGUMENTS``, or ``-m module`` in the place of ``train.py``. The
descriptor is a socket to the agent of its host (`standbys.py`). A standby says there that it is ``ready``, with the
reason if it cannot be forked, in ``failed`` why it could not import all, and in ``unfit`` why it cannot stand in for a
fresh interpreter. One that was to be a rank ends where a file that was imported has changed, which it says in
``stale``. `FORK` lets it fork another one, which has the descriptors that come with the word: its standard
streams and its own socket to the agent. Any other message is what only the rank knows of its environment, with the
descriptors of the job's secret and of the rank's report: the standby says ``begun``, closes the socket and runs the
script.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import gc
import importlib.machinery
import importlib.util
import io
import json
import os
import random
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import ModuleType, TracebackType
from typing import Any, NoReturn

DESCRIPTORS = ("MULTIRING_SECRET_FD", "MULTIRING_REPORT_FD")
"""Variables that name descriptors, which travel beside the message in this order."""

MOST_DESCRIPTORS = 4
"""Most descriptors of a message: three standard streams and a socket, or `DESCRIPTORS`."""

_ALWAYS_THERE = ("RANK", "LOCAL_RANK", "MULTIRING_RANK", "MULTIRING_LOCAL_RANK", "MULTIRING_REPLACEMENT", *DESCRIPTORS)

UNKNOWN = frozenset((*_ALWAYS_THERE, "MASTER_ADDR", "MASTER_PORT"))
"""The variables that hang on which rank it is to be."""

LATER = {
    "multiring": (
        *("multiring.api", "multiring.job.given", "multiring.job.growth"),
        *("multiring.job.rendezvous", "multiring.job.status"),
    ),
    "torch": ("multiring.torch.create", "torch._dynamo"),
}
"""Modules that a rank imports later, as it joins or makes an optimizer, by a module that it has imported for that."""

FORK = b"fork"
MESSAGE_BYTES = 1 << 14
TEXT_LENGTH = 500

SETTLE_SECONDS = 0.05
"""Time that a thread which was joined may take to be gone."""

TRIAL_SECONDS = 5.0
"""Seconds for a child that ends at once: libraries may hang in it where threads were left behind."""

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

_libc = ctypes.PyDLL(None)


class AwaitedRank:
    """Rank that this process is to be, once whoever starts it says so."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        self._lock = threading.RLock()
        self._is_known = False
        self._agent = os.getppid()
        self._at_start = _Traces()
        _Environment.place = self
        _show_environment_as(_Environment)

    def say(self, kind: str, text: str = "") -> None:
        """Tell the agent, unless it is gone: then the kernel is about to end this process."""
        try:
            said = {"kind": kind, "text": text[:TEXT_LENGTH], "process": os.getpid()}
            self._socket.send(json.dumps(said).encode())
        except ConnectionError:
            os._exit(0)

    def wait(self) -> None:
        """Return once it is known; the environment then is that of the rank. What is forked meanwhile waits as well."""
        with self._lock:  # an import may have started a thread that asks
            if self._is_known:
                return
            imported = _imported_files()
            why_not = self._at_start.why_not_to_fork()
            if not why_not:
                gc.collect()
                gc.freeze()  # or each collection in what is forked would copy the pages of all that is imported
            self.say("ready", why_not)
            data, descriptors, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, MOST_DESCRIPTORS)
            while data == FORK:
                self._fork(descriptors)
                data, descriptors, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, MOST_DESCRIPTORS)
            if not data:  # nobody will need it
                os._exit(0)
            changed = [path for path, state in imported.items() if _state(path) != state]
            if changed:
                self.say("stale", changed[0])
                os._exit(0)
            _show_environment_as(os._Environ)
            os.environ.update(json.loads(data))
            for name, descriptor in zip(DESCRIPTORS, descriptors, strict=True):
                os.set_inheritable(descriptor, True)
                os.environ[name] = str(descriptor)
            self._is_known = True

    def _fork(self, descriptors: Sequence[int]) -> None:
        """Fork a process that waits as this one does, a child of the agent's; it returns in both."""
        _show_environment_as(os._Environ)  # what libraries ask for in a child of theirs is not waited for
        is_new = False
        try:
            between = os.fork()
            if between == 0:  # its child becomes the agent's when it ends
                is_new = _fork_and_end()
            else:
                os.waitpid(between, 0)
        except OSError:  # no more processes: the agent sees that the socket is closed
            pass
        _show_environment_as(_Environment)
        if not is_new:
            for descriptor in descriptors:
                os.close(descriptor)
            return
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._agent:
            os._exit(1)
        os.setsid()
        *streams, told = descriptors
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
            os.close(descriptor)
        self._socket.close()
        self._socket = socket.socket(fileno=told)
        _forget_the_parent()
        self.say("ready")

    def begin(self) -> None:
        """Wait, then let the agent know that what happens from now on is the script's."""
        self.wait()
        self.say("begun")
        self._socket.close()


class _Traces:
    """Traces of imports that two processes cannot share."""

    def __init__(self) -> None:
        self._chance = random.getstate()
        self._open = set(_open_descriptors())

    def why_not_to_fork(self) -> str:
        """Return how a fork would differ from an interpreter that has done the imports itself; empty if not at all."""
        opened = [text for number, text in _open_descriptors().items() if number not in self._open]
        if opened:
            return f"what it imports has opened {opened[0]}"
        if random.getstate() != self._chance:
            return "what it imports has drawn from the generator of random, or has seeded it"
        with open("/proc/self/maps") as maps:
            shared = [line for line in maps if line.split()[1].startswith("rw") and line.split()[1].endswith("s")]
        if shared:
            return f"what it imports shares memory: {shared[0].split(maxsplit=5)[-1].strip()}"
        if _has_children():
            return "what it imports has started a process"
        if _threads() > 1 and not _fork_for_trial():
            return f"a child that was forked from it did not end within {TRIAL_SECONDS:g} s"
        if _threads() > 1:
            return f"what it imports has started threads ({_threads() - 1})"
        return ""


def _imported_files() -> dict[str, tuple[int, ...]]:
    """The files of the modules that are loaded, and their states: those of Python and of what is installed left out."""
    installed = (os.path.dirname(os.__file__), os.path.join(sys.prefix, "lib"))
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return {path: _state(path) for path in files if isinstance(path, str) and not path.startswith(installed)}


def _state(path: str) -> tuple[int, ...]:
    """Return a state of a file that changes when it is written; empty if it cannot be looked at."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _open_descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # that of the list itself
            continue
    return found


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _threads() -> int:
    """Number of threads; the kernel lists one that was joined for a moment longer."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while (found := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    return found


def _fork_for_trial() -> bool:
    """Fork a child that ends at once, as libraries that can be forked (OpenBLAS) end their threads before; False if it
    hangs."""
    child = _libc.fork()  # os.fork warns of threads
    if child == 0:
        _libc._exit(0)
    deadline = time.monotonic() + TRIAL_SECONDS
    while child > 0 and os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.001)
    return True


def _fork_and_end() -> bool:
    """End this process, once it has a child; return there, when another process has become its parent."""
    own = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    while os.getppid() == own:
        time.sleep(0.001)
    return True


def _forget_the_parent() -> None:
    """Undo what libraries hold because this process was forked, and draw other random numbers than its parent would."""
    if (reports := sys.modules.get("multiring.job.reports")) is not None:
        reports.tell_in_child()
    if (numpy := sys.modules.get("numpy.random.mtrand")) is not None:  # random does it itself
        generator = numpy._rand
        if generator._bit_generator._seed_seq is not None:  # else an import has seeded it
            generator.seed()


def _show_environment_as(kind: type[os._Environ[Any]]) -> None:
    for environment in (os.environ, os.environb):
        environment.__class__ = kind


class _Environment(os._Environ):  # type: ignore[type-arg]
    """The environment before the rank is known: whoever asks for what hangs on that waits until it is.

    Who asks for all names is told those too. Who asks for all ``items`` at once is not: it looks for names of its own
    (tqdm does, and hence torch), and is not kept waiting.
    """

    place: AwaitedRank

    # No super(): while it waits its class is that of any environment again.
    def __getitem__(self, key: Any) -> Any:
        self._wait_for(key)
        return os._Environ.__getitem__(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._wait_for(key)
        os._Environ.__setitem__(self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._wait_for(key)
        os._Environ.__delitem__(self, key)

    def __iter__(self) -> Iterator[Any]:
        known = list(os._Environ.__iter__(self))
        is_text = self is os.environ
        return iter([*known, *(name if is_text else os.fsencode(name) for name in _ALWAYS_THERE)])

    def items(self) -> Any:
        return {name: os._Environ.__getitem__(self, name) for name in os._Environ.__iter__(self)}.items()

    def _wait_for(self, key: Any) -> None:
        if (os.fsdecode(key) if isinstance(key, bytes) else key) in UNKNOWN:
            self.place.wait()


def main() -> None:
    """Stand by, then be the rank."""
    place, words = AwaitedRank(int(sys.argv[1])), sys.argv[2:]
    is_module = words[0] == "-m"
    sys.orig_argv = [*sys.orig_argv[: len(sys.orig_argv) - len(sys.argv)], *words]
    sys.argv = ["-m", *words[2:]] if is_module else words
    folder = os.getcwd() if is_module else os.path.dirname(os.path.realpath(words[0]))
    if sys.path[0] == os.path.dirname(os.path.realpath(__file__)):  # else an option keeps such folders out
        sys.path[0] = folder
        hidden = _hidden_modules(folder)
        if hidden:
            place.say(
                "unfit", f"{', '.join(hidden)} in {folder} bears the name of a module that a standby needs itself"
            )
            os._exit(0)
    path = "" if is_module else _absolute(words[0])
    sys.modules["__main__"] = own = _main_module(path)
    try:
        _import_ahead(words[1] if is_module else "", path)
        _import_what_comes_later()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the script will raise it again, where it meets it
        place.say("failed", f"{type(error).__name__}: {error}")
    place.begin()
    try:
        if is_module:
            sys.argv[0] = "-m"
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        else:
            _run_script(own, path)
    except BaseException as error:
        _hide_from_traceback(error)
        raise


def _hidden_modules(folder: str) -> list[str]:
    """Files of the script's folder that it would import, where this program has imported the standard library's."""
    found = set(os.listdir(folder)) if os.path.isdir(folder) else set()
    loaded = {name for name in sys.modules if name in sys.stdlib_module_names}
    files = {f"{name}.py" for name in loaded} & found
    packages = {name for name in loaded & found if os.path.isfile(os.path.join(folder, name, "__init__.py"))}
    return sorted(files | packages)


def _absolute(script: str) -> str:
    """Return the absolute path of a script as Python makes it: no link is followed, and nothing is left out."""
    return os.path.join(os.getcwd(), script)


def _main_module(path: str) -> ModuleType:
    """Return the future ``__main__``: of the script at ``path``, or without one of a module, which runpy completes."""
    own = ModuleType("__main__")
    vars(own).update(__builtins__=builtins)
    if "__annotations__" in globals():  # a version of Python gives it to all that it runs, or to none
        vars(own).update(__annotations__={})
    if path:
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        vars(own).update(__file__=path, __cached__=None, __loader__=loader)
    return own


def _import_ahead(module: str, path: str) -> None:
    """Carry out the statements of a module, or else of the script at ``path``, up to the first that does not only
    import."""
    scratch: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins, "__package__": None}
    source: str | bytes | None
    if module:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{module}.__main__")
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return
        source, path = spec.loader.get_source(spec.name), spec.origin or ""
        scratch["__package__"], sys.argv[0] = spec.parent, path
    else:
        with io.open_code(path) as file:
            source = file.read()
    scratch["__file__"] = path
    for statement in ast.parse(source or "", path).body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if not _only_imports([statement]):
            return
        code = compile(ast.Module([_without_annotation(statement)], []), path, "exec", dont_inherit=True)
        try:
            exec(code, scratch)
        except NameError as error:
            if error.name not in code.co_names:
                raise
            return  # a function or class above, which is not made here


def _import_what_comes_later() -> None:
    for name, modules in LATER.items():
        if name in sys.modules:
            for module in modules:
                if importlib.util.find_spec(module) is not None:  # torch before 2.0 lacks one
                    importlib.import_module(module)


def _without_annotation(statement: ast.stmt) -> ast.stmt:
    """The same, unless it annotates a name: its value, as nobody may evaluate what it is annotated with."""
    if not isinstance(statement, ast.AnnAssign):
        return statement
    if statement.value is None:
        return ast.copy_location(ast.Pass(), statement)
    return ast.copy_location(ast.Assign([statement.target], statement.value), statement)


def _only_imports(statements: Sequence[ast.stmt]) -> bool:
    """True if these import, choose what to import and give names to values, and call nothing that may change more."""
    return all(map(_only_imports_one, statements))


def _only_imports_one(statement: ast.stmt) -> bool:
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Expr(ast.Constant()):
            return True
        case ast.Assign(targets, value):
            return all(isinstance(target, ast.Name) for target in targets) and _calls_nothing(value)
        case ast.AnnAssign(ast.Name(), annotation, value):
            return _calls_nothing(annotation) and (value is None or _calls_nothing(value))
        case ast.If(test, body, orelse):
            return _calls_nothing(test) and _only_imports([*body, *orelse])
        case ast.Try(body, handlers, orelse, finalbody):
            caught = [each for handler in handlers for each in handler.body]
            return _only_imports([*body, *caught, *orelse, *finalbody])
    return False


def _calls_nothing(expression: ast.expr) -> bool:
    return not any(isinstance(each, ast.Call | ast.Await) for each in ast.walk(expression))


def _run_script(own: ModuleType, path: str) -> None:
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        _leave(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}")
    exec(compile(source, path, "exec", dont_inherit=True), vars(own))


def _leave(text: str) -> NoReturn:
    """End as Python does that cannot begin."""
    print(text, file=sys.stderr)
    sys.exit(2)


def _hide_from_traceback(error: BaseException) -> None:
    """Let what shows an exception see no frame of this file; it still passes through them."""
    rest = error.__traceback__
    while rest is not None and rest.tb_frame.f_code.co_filename == __file__:
        rest = rest.tb_next
    hook = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, _: TracebackType | None) -> None:
        sys.excepthook, sys.last_traceback = hook, rest
        hook(kind, value.with_traceback(rest), rest)

    sys.excepthook = show


if __name__ == "__main__":
    main()
