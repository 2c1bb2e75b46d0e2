"""Scripts for Horovod, rewritten by the tables and lists of docs/migrating.md, run on two ranks.

A rule is what stands in code on the left of a row, or of the arrow of an item, and on the right, in their order. `x`
and the like stand for anything, `...` for any value of an argument. Rows whose right side does not begin with code are
for people.
"""

from __future__ import annotations

import ast
import copy
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forking_launcher
import pytest
from forking_launcher import TORCH

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "migrating.md").read_text()
SECTION = PAGE.partition("## From Horovod")[2].partition("\n## ")[0]


def tables() -> Iterator[list[tuple[str, str]]]:
    """The rows of each table, headings first, and the items of each list, after what stands above it."""
    above = ""
    for block in SECTION.strip().split("\n\n"):
        lines = re.sub(r"\n  ", " ", block).splitlines()
        if block.startswith("| "):
            left_and_right = (re.findall(r"(?<=\| ).*?(?= \|)", line) for line in lines if line.startswith("| "))
            yield [(left, right) for left, right in left_and_right]
        elif block.startswith("- "):
            heading = re.sub("^Arguments of (.*):$", r"argument of \1", above)
            yield [(heading, ""), *((left, right) for left, _, right in (line[2:].partition(" → ") for line in lines))]
        above = block


TABLES = list(tables())
STAND_IN = {"x", "y", "f", "k", "model", "optimizer"}

CALLS = """
import horovod.torch as hvd
import torch

hvd.init()
assert hvd.is_initialized() and not hvd.mpi_built() and not hvd.cuda_built() and not hvd.mpi_threads_supported()
rank, size = hvd.rank(), hvd.size()
mine = torch.arange(4.0) + rank
total = torch.arange(4.0) * size + sum(range(size))
mean = hvd.allreduce(mine, name="mean")
assert torch.equal(mean, total / size)
mean = hvd.allreduce(mine, op=hvd.Average)
assert torch.equal(mean, total / size)
found = hvd.allreduce(mine, op=hvd.Sum, name="sum")
assert torch.equal(found, total)
found = hvd.allreduce(mine, average=False)
assert torch.equal(found, total)
first = hvd.broadcast(mine, root_rank=1)
assert torch.equal(first, torch.arange(4.0) + 1)
assert torch.equal(mine, torch.arange(4.0) + rank)  # none of these changed it
assert torch.equal(hvd.allgather(mine[: rank + 1]), torch.tensor([0.0, 1.0, 2.0]))
assert hvd.allgather_object({"rank": rank}) == [{"rank": each} for each in range(size)]
assert hvd.broadcast_object("of %d" % rank, root_rank=1) == "of 1"
place = mine.clone()
hvd.allreduce_(place)
assert torch.equal(place, total / size)
place = mine.clone()
hvd.allreduce_(place, op=hvd.Sum, process_set=hvd.global_process_set)
assert torch.equal(place, total)
place = mine.clone()
handle = hvd.allreduce_async_(place, name="later")
hvd.synchronize(handle)
assert torch.equal(place, total / size)
hvd.broadcast_(place, root_rank=0)
hvd.barrier()
assert hvd.local_rank() == rank and hvd.local_size() == size
print("right on rank %d" % rank)
hvd.shutdown()
"""


class Rewriter(ast.NodeTransformer):
    """Carries the rules out from the outside in: a statement, then the expressions in it."""

    def __init__(self) -> None:
        self._rules: list[tuple[ast.AST, list[ast.stmt]]] = []
        self._left_out: dict[str, set[str]] = {"any function": set(), "`DistributedOptimizer`": set()}
        for (heading, _), *rows in TABLES:
            if heading.startswith("argument of "):
                names = {left.strip("`").partition("=")[0] for left, _ in rows}
                self._left_out[heading.removeprefix("argument of ")] = names
                assert all(right.startswith("leave it out") for _, right in rows)
            else:
                self._rules += [pair for left, right in rows for pair in _pairs(left, right)]

    def visit(self, node: ast.AST) -> Any:
        for candidate in (node, self._shorter(node)):
            for old, new in self._rules:
                bound: dict[str, ast.AST] = {}
                if _match(old, candidate, bound):
                    return self._filled(new, bound, isinstance(node, ast.expr))
        return self.generic_visit(node)

    def _shorter(self, node: ast.AST) -> ast.AST:
        """Without the arguments that are to be left out."""
        found = copy.deepcopy(node)
        call = found if isinstance(found, ast.Call) else getattr(found, "value", None)
        if isinstance(call, ast.Call) and (name := ast.unparse(call.func)).startswith("hvd."):
            of_this = self._left_out.get(f"`{name.removeprefix('hvd.')}`", set()) | self._left_out["any function"]
            call.keywords = [each for each in call.keywords if each.arg not in of_this]
        return found

    def _filled(self, new: list[ast.stmt], bound: dict[str, ast.AST], is_expression: bool) -> Any:
        own = {name: self.visit(node) for name, node in bound.items()}

        class Filled(ast.NodeTransformer):
            def visit_Name(self, name: ast.Name) -> Any:
                if name.id not in own:
                    return name
                made = copy.deepcopy(own[name.id])
                made.ctx = name.ctx
                return made

        made = [Filled().visit(copy.deepcopy(statement)) for statement in new]
        return made[0].value if is_expression else made


def _pairs(left: str, right: str) -> list[tuple[Any, Any]]:
    """Old and new code."""
    olds, news = (re.findall(r"`([^`]+)`", cell) for cell in (left, right))
    if right == "nothing":
        return [(_parsed(old), []) for old in olds]
    if not right.startswith("`"):
        return []
    return [(_parsed(old), ast.parse(new).body) for old, new in zip(olds, news, strict=False) if _is_code(old, new)]


def _is_code(*texts: str) -> bool:
    try:
        return bool([ast.parse(text) for text in texts])
    except SyntaxError:
        return False


def _parsed(text: str) -> ast.AST:
    (statement,) = ast.parse(text).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def _match(old: Any, node: Any, bound: dict[str, ast.AST]) -> bool:
    if isinstance(old, ast.Name) and old.id in STAND_IN:
        bound[old.id] = node
        return isinstance(node, ast.expr)
    if isinstance(old, list):
        return len(old) == len(node) and all(_match(a, b, bound) for a, b in zip(old, node, strict=True))
    if not isinstance(old, ast.AST):
        return bool(old == node)
    return type(old) is type(node) and all(
        _match(value, getattr(node, name), bound) for name, value in ast.iter_fields(old)
    )


def migrated(script: str) -> str:
    tree = ast.fix_missing_locations(Rewriter().visit(ast.parse(script)))
    return f"import contextlib\n{ast.unparse(tree)}\n"


def run_on_two(text: str, file: Path) -> str:
    file.write_text(text)
    done = forking_launcher.run("run", "-n", "2", str(file), imports=TORCH, environment=os.environ, timeout=200)
    assert done.returncode == 0, f"{text}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(240)
def test_a_training_script(tmp_path: Path) -> None:
    text = migrated((HERE / "horovod_digits.py").read_text())
    assert re.findall(r"\b(?:hvd|import horovod|horovod\.\w+)\b", text) == []
    printed = run_on_two(text, tmp_path / "digits.py")
    found = re.findall(
        r"rank (\d) of 2: (loss [\d.]+, accuracy ([\d.]+), samples \[750, 750\], total 3, epochs 8)", printed
    )
    assert sorted(rank for rank, _, _ in found) == ["0", "1"], printed
    assert len({values for _, values, _ in found}) == 1  # the ranks agree
    assert float(found[0][2]) > 0.85


@pytest.mark.timeout(240)
def test_the_calls_of_the_tables(tmp_path: Path) -> None:
    text = migrated(CALLS)
    assert "hvd" not in text
    assert run_on_two(text, tmp_path / "calls.py").count("right on rank") == 2
