"""The faults of a module that `mutate.py` plants: one changed operator, constant, condition or return value, or one
removed statement."""

import ast
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SWAPS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.And: (ast.Or,), ast.Or: (ast.And,),
    ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div,), ast.Div: (ast.Mult,), ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,), ast.Pow: (ast.Mult,), ast.BitAnd: (ast.BitOr,), ast.BitOr: (ast.BitAnd,),
    ast.BitXor: (ast.BitAnd,), ast.LShift: (ast.RShift,), ast.RShift: (ast.LShift,),
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "amax": "amin", "amin": "amax", "argmax": "argmin"}
UNTOUCHED = {"annotation", "returns", "decorator_list", "type_comment"}  # fields that decide nothing, or no test could
UNTOUCHED_NODES = (ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Fault:
    """One change of a module."""

    line: int
    column: int
    before: str
    after: str
    source: str  # the whole module with the change
    lines: range  # lines of the changed statement; without its body if it has one


def faults(source: str) -> list[Fault]:
    """Every fault of a module, in the order of its lines."""
    tree = ast.parse(source)
    statements = [_head(node) for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    found = []
    for holder, key, node, changed in _changes(tree):
        before = ast.unparse(node)
        _put(holder, key, changed)
        ast.fix_missing_locations(tree)
        after, whole = ast.unparse(changed), ast.unparse(tree)
        _put(holder, key, node)
        lines = min((lines for lines in statements if node.lineno in lines), key=len)
        found.append(Fault(node.lineno, node.col_offset, _line(before), _line(after), whole, lines))
    return sorted(found, key=lambda fault: fault.line)


def _head(node: ast.stmt) -> range:
    body = getattr(node, "body", None) or getattr(node, "cases", None)
    last = max(node.lineno, _first_line(body[0]) - 1) if body else node.end_lineno or node.lineno
    return range(node.lineno, last + 1)


def _first_line(node: Any) -> int:
    return node.pattern.lineno if isinstance(node, ast.match_case) else node.lineno


def _put(holder: Any, key: str | int, value: ast.AST) -> None:
    if isinstance(key, int):
        holder[key] = value
    else:
        setattr(holder, key, value)


def _line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def _changes(tree: ast.AST) -> Iterator[tuple[Any, str | int, Any, Any]]:
    """Yields (holder, field or index, node, replacement), from the outside in."""
    for field, value in ast.iter_fields(tree):
        if field in UNTOUCHED:
            continue
        children = list(enumerate(value)) if isinstance(value, list) else [(field, value)]
        for key, node in children:
            if not isinstance(node, ast.AST) or isinstance(node, UNTOUCHED_NODES):
                continue
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                continue
            for changed in _changed(node):
                yield (value if isinstance(value, list) else tree), key, node, changed
            if not isinstance(node, ast.Raise):  # whether it is raised matters; its words are tested as they are
                yield from _changes(node)


def _changed(node: ast.AST) -> Iterator[ast.AST]:
    def with_field(**fields: Any) -> ast.AST:
        made = copy.copy(node)
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    match node:
        case ast.Compare(ops=ops):
            for i, operator in enumerate(ops):
                for other in SWAPS[type(operator)]:
                    yield with_field(ops=[*ops[:i], other(), *ops[i + 1 :]])
        case ast.BoolOp(op=operator):
            yield with_field(op=SWAPS[type(operator)][0]())
        case ast.BinOp(op=operator, left=left, right=right):
            text = any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (left, right))
            for other in () if text else SWAPS.get(type(operator), ()):
                yield with_field(op=other())
        case ast.AugAssign(op=operator):
            for other in SWAPS.get(type(operator), ()):
                yield with_field(op=other())
            yield ast.copy_location(ast.Pass(), node)
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield with_field(value=not value)
        case ast.Constant(value=int(value)):
            yield with_field(value=value + 1)
            yield with_field(value=value - 1)
        case ast.Constant(value=float(value)):
            yield with_field(value=2 * value if value else 1.0)
        case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Compare):
            yield with_field(test=ast.copy_location(ast.UnaryOp(ast.Not(), test), test))
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield with_field(value=ast.copy_location(ast.Constant(None), value))
        case ast.Expr(value=ast.Constant()):
            pass  # a docstring
        case ast.Expr() | ast.Raise() | ast.Continue() | ast.Break() | ast.Delete():
            yield ast.copy_location(ast.Pass(), node)
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.copy_location(ast.Pass(), node)
        case ast.Call(func=ast.Name(id=name) as called) if name in NAMES:
            yield with_field(func=ast.copy_location(ast.Name(NAMES[name], called.ctx), called))
        case ast.Call(func=ast.Attribute(attr=name) as called) if name in NAMES:
            yield with_field(func=ast.copy_location(ast.Attribute(called.value, NAMES[name], called.ctx), called))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def sample(module: str, source: str, limit: int, seed: int) -> list[Fault]:
    """A number of faults of a module, the same ones every time, and more of them with a greater limit; 0 takes all."""
    found = faults(source)
    random.Random(f"{seed} {module}").shuffle(found)
    return sorted(found[: limit or None], key=lambda fault: fault.line)
