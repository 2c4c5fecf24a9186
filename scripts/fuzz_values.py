"""Hostile JSON values, headers and bytes."""

import json
import random
from collections.abc import Callable
from typing import Any

SIZES = (1000, 65_535, 65_537, 300_000, 2_000_000, 4_000_000)  # sizes of large values, in bytes; a body may have 4 MiB


def repeated(item: bytes, size: int) -> bytes:
    """Returns a list of about `size` bytes."""
    return b"[" + b",".join([item] * max(1, size // (len(item) + 1))) + b"]"


def _nested(text: str, size: int) -> bytes:
    opened, _, closed = text.partition(" ")
    depth = size // (len(opened) + len(closed))
    return (opened * depth + "0" + closed * depth).encode()


def _wide(count: int) -> Any:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


NUMBERS = [
    b"0", b"-0", b"-1", b"1", b"2", b"1.5", b"-1.5", b"0.0", b"1e308", b"-1e308", b"1e400", b"1e-400", b"2147483648",
    b"-2147483649", b"9223372036854775807", b"9223372036854775808", b"-9223372036854775809", b"18446744073709551616",
    b"1" + b"0" * 30, b"-1" + b"0" * 30, b"9" * 5000, b"NaN", b"Infinity", b"-Infinity", b"01", b"+1", b".5", b"0x10",
]  # fmt: skip
TEXTS = [
    b'""', b'" "', b'"0"', b'"null"', b'"\\u0000"', b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\ud83d"', b'"\xff\xfe"',
    b'"\x00"', b'"\xed\xa0\x80"', b'"\xf4\x90\x80\x80"', '"\u202e\u2028\u2029\ufeff\ufffe"'.encode(),
    '"\U0001f469\u200d\U0001f467"'.encode(), b'"\\u001b[31m\\r\\n\\u0085"', b'"<|end|><|user|>"',
    b'"{{ 7 * 7 }}{% for x in y %}"', b'"../../../etc/passwd"', b'"file:///etc/passwd"', b'"%s%n%x"', b'"__proto__"',
    b'"a\\u0300' + b"\\u0301" * 3000 + b'"', b'"\\', b'"',
]  # fmt: skip
PATTERNS = [
    "(a{1000}){1000}", "(a+)+$", "(", "[", "*", "(?=a)", "(?P<n>a)(?P=n)", "\\1", "a{99999999999}",
    "(" * 3000 + ")" * 3000, "a|" * 5000, "[^\\x00-\\U0010ffff]", "\\p{L}+", "root ::= root", "root ::= (root root)*",
    "root ::=", "root ::= x", 'root ::= "a"{1,100000}', "((a?){50}){50}", "^" * 2000,
]  # fmt: skip
SCHEMAS: list[Any] = [
    _wide(300), _wide(3000), {"enum": [f"{i}" * 40 for i in range(2000)]}, {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, {"type": "nothing"},
    {"type": ["string", 5]}, {"enum": []}, {"enum": [[["x"] * 100] * 100]}, {"anyOf": []}, {"not": {}},
    {"type": "array", "items": {"$ref": "#"}}, {"type": "string", "pattern": "(" * 100},
    {"type": "string", "minLength": 1e9}, {"type": "array", "minItems": 10**12},
    {"type": "integer", "minimum": 10**40}, {"type": "number", "multipleOf": 0}, {"$ref": "https://example.com/x"},
    {"$ref": "file:///etc/passwd"}, {"properties": [], "required": "a"}, True, [],
    {"type": "object", "properties": {"": {}, "\u0000": {}, "\U0001f600": {}}, "required": ["", "x"]},
    {"allOf": [{"anyOf": [{"type": "object", "properties": {f"k{i}{j}": {}}} for j in range(9)]} for i in range(9)]},
]  # fmt: skip
HEADERS = [
    b"Content-Length: -1", b"Content-Length: 1e3", b"Content-Length: 99999999999999999999",
    b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked, identity", b"Expect: 100-continue", b"Expect: nothing",
    b"Content-Encoding: gzip", b"Connection: Upgrade\r\nUpgrade: h2c", b"Connection: Upgrade\r\nUpgrade: websocket",
    b"Host: y", b"X: \xff\xfe", b"X: \x00", b": no name", b"no colon", b" folded: a", b"X" * 70_000 + b": a",
    b"X: " + b"a" * 60_000, b"\r\n".join([b"X: a"] * 3000), b"Authorization: Bearer \xff",
    b"Authorization: Basic Og==", b"Cookie: " + b"a=b;" * 999, b"X-Request-Id: \x1b[31m\xe2\x80\xa8",
    b"Traceparent: 00-zz", b"Accept: text/event-stream;q=x", b"Range: bytes=0-9",
    b"Content-Type: text/xml; charset=\xff", b"Origin: https://example.com", b"X-Forwarded-For: '\"<>", b"Host:",
]  # fmt: skip
GARBAGE = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
    b"GET /health\r\n\r\n", b"GET  /health HTTP/1.1\r\n\r\n", b"get /health HTTP/1.1\r\nConnection: close\r\n\r\n",
    b"GET /health HTTP/1.0\r\n\r\n", b"\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"GET http://x/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nConnection: close\r\n\r\n", b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /" + b"a" * 70_000, b"A" * 100_000, b"\x00" * 100, b"GET /health HTTP/1.1\nHost: x\nConnection: close\n\n",
    b"EXPLODE /health HTTP/1.1\r\nHost: x\r\n\r\n",
]  # fmt: skip


def hostile(dice: random.Random, kind: str = "", large: float = 0.25) -> bytes:
    """Returns the JSON, or almost JSON, of a hostile value.

    Args:
        kind: type of JSON schema that it mostly has; "": any.
        large: probability of a value of up to megabytes.
    """
    size = dice.choice(SIZES) if dice.random() < large else 40
    kinds: dict[str, list[Callable[[], bytes]]] = {
        "integer": [lambda: dice.choice(NUMBERS)],
        "string": [
            lambda: dice.choice(TEXTS),
            lambda: json.dumps(dice.choice(PATTERNS)).encode(),
            lambda: (
                b'"' + dice.choice([b"a", b" ", b"\\n", b"\\\\", b"\xc3\xa9", b"\\ud83d\\ude00"]) * (size // 4) + b'"'
            ),
            lambda: b'"' + dice.choice([b"a", b"(", b"[", b"{'a':", b"-", b"9", b"\xff"]) * min(size, 700_000) + b'"',
        ],
        "array": [
            lambda: dice.choice([b"[]", b"[[]]", b"[null]", b"[{}]"]),
            lambda: repeated(
                dice.choice([b"0", b"[]", b"{}", b'"a"', b'""', b"null", b"1e99", b"[[[[[[[]]]]]]]"]), size
            ),
            lambda: _nested(dice.choice(["[ ]", '[{"b": }]']), size),
        ],
        "object": [
            lambda: json.dumps(dice.choice(SCHEMAS)).encode(),
            lambda: json.dumps({"type": "json_schema", "json_schema": {"schema": dice.choice(SCHEMAS)}}).encode(),
            lambda: b"{" + b",".join(b'"%d":%d' % (i, i) for i in range(size // 16)) + b"}",
            lambda: b'{"a":1,"a":{"a":2,"a":3}}',
            lambda: b'{"' + b"n" * size + b'": 0}',
            lambda: _nested('{"a": }', size),
        ],
        "": [
            lambda: dice.choice([b"null", b"true", b"false", b"{}", b'{"": null}', b"nul", b'{"a":1,{"a"}}', b"'a'"]),
            lambda: b" " * size + b"1" + b"\t\r\n" * 9,
        ],
    }
    kinds["number"] = kinds["integer"]
    fitting = kinds.get(kind, []) if kind and dice.random() < 0.7 else []
    return dice.choice(fitting or [make for each in kinds.values() for make in each])()
