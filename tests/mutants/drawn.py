"""Faults drawn by machine: one place of `jzero/` is changed at random, whatever the tests look at."""

from __future__ import annotations

import ast
import copy
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
NO_FAULTS = ("cast", "gcd", "getLogger", "isinstance", "max", "min", "one_of", "picked", "TypeVar")
"""Calls whose arguments have an order that nobody sees, or that are never right in another."""

NO_CODE = (ast.Assert, ast.JoinedStr, ast.Raise)


class Fault(NamedTuple):
    """A change of one place.

    Attributes:
      file: The file, below the repository's root.
      function: The classes and functions around it, with dots between.
      line: Its first line.
      last: Its last line.
      kind: What was done.
      old: The text before.
      new: The text after.
      begin: Where the text begins in the file, in bytes.
      lines: Its lines with the fault, without what is between words.
    """

    file: str
    function: str
    line: int
    last: int
    kind: str
    old: str
    new: str
    begin: int
    lines: str

    def applied(self, text: str) -> str:
        """Returns the text of the file with the fault."""
        encoded, old = text.encode(), self.old.encode()
        return (encoded[: self.begin] + self.new.encode() + encoded[self.begin + len(old) :]).decode()

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.kind}) {_short(self.old)} -> {_short(self.new)}"


def _short(text: str) -> str:
    return f"`{' '.join(text.split())[:80]}`"


def draw(root: Path, files: list[Path], number: int, seed: int) -> list[Fault]:
    """Draws lines of code, each as likely as any other, and a fault on each: first its kind, then its place.

    Args:
      root: The repository's root.
      files: Where faults are made.
      number: How many faults.
      seed: The same seed draws the same faults of the same code.
    """
    by_line: dict[tuple[str, int], list[Fault]] = {}
    for file in sorted(files):
        for fault in faults_of(root, file):
            by_line.setdefault((fault.file, fault.line), []).append(fault)
    chosen = random.Random(seed)
    faults = []
    for line in chosen.sample(sorted(by_line), min(number, len(by_line))):
        kind = chosen.choice(sorted({fault.kind for fault in by_line[line]}))
        faults.append(chosen.choice([fault for fault in by_line[line] if fault.kind == kind]))
    return faults


def faults_of(root: Path, file: Path) -> Iterator[Fault]:
    """All faults of a file."""
    text = file.read_bytes()
    starts = [0]
    for line in text.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    for function, node, kind, changed in _changes(ast.parse(text), "", {}):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        new = ast.unparse(changed)
        if isinstance(changed, ast.expr) and not isinstance(changed, (ast.Constant, ast.Name, ast.Call)):
            new = f"({new})"
        old = text[begin:end].decode()
        place = function, node.lineno, node.end_lineno
        around = text[starts[node.lineno - 1] : begin].decode(), text[end : starts[node.end_lineno] - 1].decode()
        lines = " ".join(new.join(around).split())
        yield Fault(str(file.relative_to(root)), *place, kind, old, new, begin, lines)


def _changes(node: ast.AST, function: str, same: dict[str, list[str]]) -> Iterator[tuple[str, ast.AST, str, ast.AST]]:
    """Places below a node, with the function around, and what takes their place.

    Args:
      node: Where to look.
      function: The classes and functions around it.
      same: Names of parameters by the text of their type, of the function around.
    """
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        function = f"{function}.{node.name}".strip(".")
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        same = {}
        for parameter in node.args.posonlyargs + node.args.args + node.args.kwonlyargs:
            if parameter.annotation:
                same.setdefault(ast.unparse(parameter.annotation), []).append(parameter.arg)
    yield from ((function, *change) for change in _changes_of(node, same))
    for name, value in ast.iter_fields(node):
        # Types are not run, classes or not; texts of messages are no code, and f-strings have no places of their own on
        # Python 3.11.
        # An assertion only checks: a weaker one changes nothing.
        if name in ("annotation", "returns", "decorator_list") or isinstance(node, NO_CODE):
            continue
        if name == "keywords" and (_is_drawing(node) or isinstance(node, ast.ClassDef)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _has_no_faults(child):
                yield from _changes(child, function, same)


def _is_drawing(node: ast.AST) -> bool:
    """Whether a node draws a part of a picture, whose looks are keywords: a matter of taste."""
    return isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("axes.", "figure."))


def _has_no_faults(node: ast.AST) -> bool:
    """Whether a node is for the type checker, or a text."""
    if isinstance(node, ast.keyword):
        return node.arg == "strict"  # which only checks
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).rpartition(".")[2] in NO_FAULTS
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _changes_of(node: ast.AST, same: dict[str, list[str]]) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    """What can become of a node itself."""
    yield from _changed_operators(node)
    yield from _changed_calls(node)
    match node:
        case ast.Constant(value=bool(value)):
            yield node, "constant", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield node, "constant", ast.Constant(value + 1)
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) | ast.comprehension(ifs=[test]):
            yield test, "negated condition", ast.UnaryOp(ast.Not(), test)
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield node, "dropped statement", ast.Pass()
        case ast.Name(id=name, ctx=ast.Load()):
            others = next((names for names in same.values() if name in names), [])
            for other in sorted(set(others) - {name}):
                yield node, "neighbour", ast.Name(other, ast.Load())


def _changed_operators(node: ast.AST) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    match node:
        case ast.Compare(ops=[op]):
            yield node, "comparison", _with(node, ops=[COMPARISONS[type(op)]()])
        case ast.BinOp(op=op, left=left, right=right) if type(op) in ARITHMETIC:
            if not any(isinstance(x, ast.JoinedStr) or isinstance(getattr(x, "value", 0), str) for x in (left, right)):
                yield node, "arithmetic", _with(node, op=ARITHMETIC[type(op)]())
        case ast.BoolOp(op=op):
            yield node, "and for or", _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield node, "sign", operand


def _changed_calls(node: ast.AST) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    if not isinstance(node, ast.Call):
        return
    args, keywords = node.args, node.keywords
    for i, (first, second) in enumerate(itertools.pairwise(args)):
        are_two = ast.dump(first) != ast.dump(second)
        if are_two and not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
            yield node, "swapped arguments", _with(node, args=[*args[:i], second, first, *args[i + 2 :]])
    for i, keyword in enumerate(keywords):
        if keyword.arg and not _is_drawing(node) and not _has_no_faults(keyword):
            yield node, "dropped keyword", _with(node, keywords=keywords[:i] + keywords[i + 1 :])


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed
