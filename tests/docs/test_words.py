"""Each class name means one thing, in package and engine together; docstrings and comments open as sentences do."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "src/multiring"
ENGINE = REPOSITORY / "csrc"
ALIKE = {
    "Engine": "a protocol, and the engine that fulfils it",
    "Work": "the handle that users have, and the engine's that it wraps",
}
"""Classes of Python that share a name with one of the bindings (_native.pyi), and what the one is to the other."""
OF_FRAMEWORKS = {"Outer": ["jax.py", "keras.py", "torch/outer.py"]}
"""Public classes that several front ends have, the same for each framework as `DistributedOptimizer` is."""
BOUND = ("Call", "Description", "LabelName", "NativeCalls", "PlanFacts", "Records", "SignalCounter", "Trials")
"""Classes of the engine that Python has by the bindings alone."""
MIRRORED = {
    **ALIKE,
    **dict.fromkeys(BOUND, "the same class, by the bindings"),
    "Communicator": "what ranks call, and what runs its calls in the engine",
    "DeviceBlocks": "a part of a buffer on a device, as Python finds it and as the engine copies it",
    "DeviceBuffer": "a buffer on a device, as Python finds it and as a work has it",
    "Extent": "where an instruction's elements lie in a slice, in the native engine and in that by MPI",
    "Instruction": "a step of a schedule, as it is planned and as it is run",
    "Schedule": "the instructions of one rank, as they are planned and as they are run",
    "Signature": "what ranks must agree on in a call, in the native engine and in that by MPI",
    "SliceLayout": "all extents in a slice, in the native engine and in that by MPI",
}
"""Names that a class of Python and one of C++ share because they are the same thing, and why that is so."""

FOLDERS = ("src", "csrc", "tests", "benchmarks", "examples", "tools")
OPENINGS = r"(?:of|by|for|so|whom|whose|in (?:which|what)|to whom)\b"
"""A docstring or comment that opens with one of these words makes sense only after a second reading."""
RIDDLE = re.compile(OPENINGS + r"|in\b(?= )", re.IGNORECASE)
COMMENT = re.compile(OPENINGS, re.IGNORECASE)
QUESTION = re.compile(r"(?:How|That|Those|What|When|Where|Whether|Which|Who|Why)\b")
"""A comment of the engine that opens so says what it is about last. Small letters: a clause on the code before it."""
CPP_CLASS = re.compile(r"^\s*(?:struct|class|enum class) (?:alignas\([^)]*\) )?(\w+)(?: final)?(?: : [^;{]*)? \{", re.M)
CPP_ALIAS = re.compile(r"^\s*using (\w+) =", re.M)


def python_classes() -> dict[str, list[str]]:
    """The modules of the package that define a class of each name, nested ones among them."""
    found = defaultdict(list)
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(PACKAGE)))
    return found


def engine_classes() -> dict[str, list[str]]:
    """The files of the engine that define a class, struct or enumeration of each name, nested ones among them."""
    return _found_in_engine(CPP_CLASS)


def _found_in_engine(pattern: re.Pattern[str]) -> dict[str, list[str]]:
    found = defaultdict(list)
    for path in sorted([*ENGINE.rglob("*.hpp"), *ENGINE.rglob("*.cpp")]):
        for name in pattern.findall(path.read_text()):
            found[name].append(str(path.relative_to(ENGINE)))
    return found


def sources(*endings: str) -> Iterator[Path]:
    """The sources with these endings, in the order of their paths."""
    for folder in FOLDERS:
        yield from sorted(path for path in (REPOSITORY / folder).rglob("*") if path.suffix in endings)


def python_comments(text: str) -> Iterator[tuple[int, str]]:
    """Comments with the numbers of their lines; of some on consecutive lines of their own, the first."""
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            is_own = not token.line[:column].strip()
            if not (is_own and last == line - 1):
                yield line, token.string.lstrip("#").strip()
            last = line if is_own else 0


def cpp_comments(text: str) -> Iterator[tuple[int, str]]:
    """The same for C++: a quoted // is taken for a comment, which does no harm."""
    last = -1
    for number, line in enumerate(text.splitlines(), 1):
        before, mark, comment = line.partition("//")
        is_own = bool(mark) and not before.strip()
        if mark and not (is_own and last == number - 1):
            yield number, comment.lstrip("/<").strip()
        last = number if is_own else 0


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """All strings that stand by themselves, with the numbers of their lines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def test_no_class_name_stands_for_two_things() -> None:
    known = python_classes()
    assert len(known) > 200
    twice = {name: modules for name, modules in known.items() if len(modules) > 1 and name not in ALIKE}
    assert twice == OF_FRAMEWORKS
    engine = engine_classes()
    assert len(engine) > 150
    assert {name: files for name, files in engine.items() if len(files) > 1} == {}


def test_python_and_the_engine_share_the_names_of_the_same_things_alone() -> None:
    python, engine = python_classes(), engine_classes()
    assert {name: (python[name], engine[name]) for name in python.keys() & engine.keys() - MIRRORED.keys()} == {}
    assert MIRRORED.keys() - engine.keys() == set()
    assert MIRRORED.keys() - python.keys() == set()
    assert {name: python[name] for name in BOUND if python[name] != ["_native.pyi"]} == {}
    aliases = _found_in_engine(CPP_ALIAS)
    assert len(aliases) > 20
    assert {name: (python[name], aliases[name]) for name in python.keys() & aliases.keys() - MIRRORED.keys()} == {}


def test_no_docstring_opens_with_a_riddle() -> None:
    riddles = []
    for path in sources(".py"):
        for line, text in docstrings(path.read_text()):
            if RIDDLE.match(text):
                riddles.append(f"{path.relative_to(REPOSITORY)}:{line}: {text.splitlines()[0]}")
    assert riddles == []


def test_no_comment_opens_with_a_riddle() -> None:
    riddles = []
    for path in sources(".py", ".hpp", ".cpp"):
        text = path.read_text()
        if path.suffix == ".py" and not re.search(r"#\s*" + OPENINGS, text, re.IGNORECASE):
            continue  # it need not be parsed
        for line, comment in (python_comments if path.suffix == ".py" else cpp_comments)(text):
            if COMMENT.match(comment):
                riddles.append(f"{path.relative_to(REPOSITORY)}:{line}: {comment}")
    assert riddles == []


def test_no_comment_of_the_engine_opens_as_a_question() -> None:
    """A blank comment line begins a paragraph, which is checked as well."""
    questions, checked = [], 0
    for path in sorted([*ENGINE.rglob("*.hpp"), *ENGINE.rglob("*.cpp")]):
        for line, comment in cpp_comments(re.sub(r"^[ ]*//$", "", path.read_text(), flags=re.MULTILINE)):
            checked += 1
            if QUESTION.match(comment):
                questions.append(f"{path.relative_to(REPOSITORY)}:{line}: {comment}")
    assert checked > 1000
    assert questions == []


def test_comments_are_found_where_they_begin() -> None:
    """A line that goes on with a sentence may open with any word."""
    python = "a = 1  # by rank\n# One\n# of many\nb = '# so'\n\n# so far\n"
    assert list(python_comments(python)) == [(1, "by rank"), (2, "One"), (6, "so far")]
    cpp = "int a;  // by rank\n// One\n// of many\nint b;\n///< so far\n"
    assert list(cpp_comments(cpp)) == [(1, "by rank"), (2, "One"), (5, "so far")]
    assert list(python_comments("# One\n# of many\n")) == list(cpp_comments("// One\n// of many\n")) == [(1, "One")]
    assert RIDDLE.match("In a loop")
    assert COMMENT.match("Whose link")
    assert not COMMENT.match("often")
    assert QUESTION.match("Whether it is")
    assert not QUESTION.match("Whatever it is")
