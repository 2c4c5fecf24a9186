"""Makes hostile requests from a server's own description (/openapi.json), so that a new field is covered at once.

A case depends only on the description, the seed and its number. The first cases put a hostile value into each field
once; later ones mix fields, whole bodies, methods, paths and broken HTTP.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from scripts.fuzz_values import GARBAGE, HEADERS, SIZES, TEXTS, hostile, repeated

MARK = "@hostile@"  # replaced by JSON that json.dumps would not write
MAX_DEPTH = 9  # depth of fields within fields
LENGTHS = ("max_tokens", "max_output_tokens")  # bounded, so that a case costs little
Step = tuple[str, Any]  # ("option", index), ("item", None) or ("name", property)


@dataclass(frozen=True)
class Case:
    """Bytes to send on one connection.

    Attributes:
        parts: sent one after the other, with a pause between them.
        replies: expected number of whole answers; None: at least one, which may be of the HTTP layer.
        leaves: the client closes without reading, so that an answer is not required.
        methods, path: of the expected answers, if they are described.
    """

    name: str
    parts: tuple[bytes, ...]
    replies: int | None = 1
    leaves: bool = False
    pause_s: float = 0.0
    method: str = "get"
    path: str = ""


# ---- fields --------------------------------------------------------------------------------------------------------


class Bodies:
    """The bodies of a description's routes: finds their fields, and builds bodies that contain a field."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.operations = [(method, path) for path, methods in document["paths"].items() for method in methods]
        self.schemas = {
            path: methods["post"]["requestBody"]["content"]["application/json"]["schema"]
            for path, methods in document["paths"].items()
            if "requestBody" in methods.get("post", {})
        }
        self.fields = [(path, place) for path, schema in self.schemas.items() for place in self.places(schema)]

    def _resolved(self, node: Any) -> dict[str, Any]:
        while isinstance(node, dict) and "$ref" in node:
            found: Any = self.document
            for name in node["$ref"].removeprefix("#/").split("/"):
                found = found[name]
            node = found
        return node if isinstance(node, dict) else {}

    def places(self, node: Any, depth: int = 0) -> Iterator[tuple[Step, ...]]:
        """Yields the way to every field below a schema, and the empty way to the value itself."""
        node = self._resolved(node)
        yield ()
        for step, child in self._children(node) if depth < MAX_DEPTH else ():
            for rest in self.places(child, depth + 1):
                if rest or step[0] != "option":  # an option is at the same place as its choice
                    yield (step, *rest)

    def _children(self, node: dict[str, Any]) -> Iterator[tuple[Step, Any]]:
        yield from ((("option", i), each) for i, each in enumerate(_options(node)))
        if isinstance(node.get("items"), dict):
            yield ("item", None), node["items"]
        if isinstance(node.get("additionalProperties"), dict):
            yield ("name", "other"), node["additionalProperties"]
        yield from ((("name", name), each) for name, each in node.get("properties", {}).items())

    def types(self, node: Any) -> list[str]:
        """Returns the types that the value of a schema may have."""
        node = self._resolved(node)
        own = node.get("type", [])
        return [
            *([own] if isinstance(own, str) else own),
            *(kind for each in _options(node) for kind in self.types(each)),
        ]

    def example(self, node: Any, dice: random.Random, optional: float = 0.0, depth: int = 0) -> Any:
        """Returns a value that the schema mostly allows, with each optional property at a probability."""
        node = self._resolved(node)
        if "const" in node or "enum" in node:
            return dice.choice(node.get("enum") or [node.get("const")])
        if options := _options(node):
            usual = [each for each in options if each.get("type") == "string"]
            chosen = dice.choice(usual if usual and dice.random() < 0.7 else options)
            return self.example(chosen, dice, optional, depth)
        kind = node.get("type", "string")
        kind = dice.choice(kind) if isinstance(kind, list) else kind
        if kind == "object":
            required, names = node.get("required", ()), node.get("properties", {})
            more = 0.0 if depth > MAX_DEPTH else optional
            taken = [name for name in names if name in required or name == "content" or dice.random() < more]
            return {name: self.example(names[name], dice, optional, depth + 1) for name in taken}
        if kind == "array":
            count = max(node.get("minItems", 0), dice.choice([1, 1, 2]) if depth < MAX_DEPTH else 0)
            return [self.example(node.get("items", {}), dice, optional, depth + 1) for _ in range(min(count, 20))]
        least = node.get("minimum", 0)
        values: dict[str, Any] = {
            "integer": least + dice.choice([0, 1, 2]),
            "number": least + dice.choice([0.0, 0.5, 1]),
            "boolean": dice.random() < 0.5,
            "null": None,
        }
        return values.get(kind, dice.choice(["a", "The sky", "r-1", "now"]))

    def schema_at(self, path: str, place: tuple[Step, ...]) -> Any:
        node = self.schemas[path]
        for step in place:
            node = dict(self._children(self._resolved(node)))[step]
        return self._resolved(node)

    def hostile(self, path: str, place: tuple[Step, ...], dice: random.Random) -> bytes:
        """Returns a hostile value for a place, often one of a type that the schema allows there."""
        node = self.schema_at(path, place)
        kind = dice.choice([each for each in self.types(node) if each not in ("null", "boolean")] or [""])
        if dice.random() < 0.2:  # a value that is just allowed, or just not
            bounds = [node[name] + more for name in ("minimum", "maximum") if name in node for more in (-1, 0, 1)]
            return json.dumps(dice.choice([*bounds, self.example(node, dice, 0.5)])).encode()
        lists = [each for each in (node, *map(self._resolved, _options(node))) if "items" in each]
        if lists and dice.random() < 0.3:
            one = json.dumps(self.example(dice.choice(lists)["items"], dice, 0.2)).encode()
            return repeated(one, dice.choice([100, 1000, *SIZES]))
        return hostile(dice, kind)

    def build(self, node: Any, place: tuple[Step, ...], leaf: Any, dice: random.Random) -> Any:
        """Returns a value that has `leaf` at a place."""
        if not place:
            return leaf
        node, (kind, key) = self._resolved(node), place[0]
        children = dict(self._children(node))
        inner = self.build(children[place[0]], place[1:], leaf, dice)
        if kind == "option":
            return inner
        if kind == "item":
            return [inner]
        whole = self.example({**node, "type": "object", "anyOf": [], "oneOf": []}, dice)
        return {**whole, key: inner}

    def body(self, path: str, places: dict[tuple[Step, ...], bytes], dice: random.Random) -> bytes:
        """Returns a body with raw JSON at each of some places; of a field of the body, the last place counts."""
        marks = {f"{MARK}{i}": raw for i, raw in enumerate(places.values())}
        values = [self.build(self.schemas[path], place, mark, dice) for place, mark in zip(places, marks, strict=True)]
        whole: Any = values[0]
        for place, value in zip(places, values, strict=True):
            if place and isinstance(whole, dict) and isinstance(value, dict):
                whole = {**whole, place[0][1]: value.get(place[0][1])}
        if isinstance(whole, dict):
            whole = self._bounded(path, whole)
            if ("name", "stream") not in next(iter(places)) and dice.random() < 0.3:
                whole = {**whole, "stream": True}
        body = json.dumps(whole).encode()
        for mark, raw in marks.items():
            body = body.replace(json.dumps(mark).encode(), raw)
        return body

    def _bounded(self, path: str, value: dict[str, Any]) -> dict[str, Any]:
        names = [name for name in LENGTHS if name in self._resolved(self.schemas[path]).get("properties", {})]
        return dict.fromkeys(names[:1], 4) | value


def _options(node: dict[str, Any]) -> list[Any]:
    return list(node.get("anyOf") or node.get("oneOf") or ())


# ---- cases ---------------------------------------------------------------------------------------------------------


def request(method: str, path: str, body: bytes = b"", *headers: bytes, close: bool = True) -> bytes:
    lines = [f"{method} {path} HTTP/1.1".encode("utf-8", "surrogateescape"), b"Host: x", *headers]
    if body:
        lines += [b"Content-Type: application/json", b"Content-Length: %d" % len(body)]
    return b"\r\n".join([*lines, *([b"Connection: close"] if close else []), b"", b""]) + body


class Cases:
    """The cases of a seed, by number."""

    def __init__(self, document: dict[str, Any], seed: int) -> None:
        self.bodies, self.seed = Bodies(document), seed
        self._order = list(self.bodies.fields)
        random.Random(seed).shuffle(self._order)

    def __len__(self) -> int:
        """Returns the number of fields, which is how many cases cover each of them once."""
        return len(self._order)

    def case(self, number: int) -> Case:
        dice = random.Random(f"{self.seed}/{number}")
        if number < len(self._order):
            return self._field(*self._order[number], dice)
        kinds = {
            self._any_field: 50,
            self._several: 20,
            self._whole: 20,
            self._sample: 10,
            self._route: 10,
            self._http: 30,
        }
        return dice.choices(list(kinds), list(kinds.values()))[0](dice)

    def _post(self, path: str, body: bytes, name: str) -> Case:
        return Case(f"POST {path} {name}", (request("POST", path, body),), method="post", path=path)

    def _field(self, path: str, place: tuple[Step, ...], dice: random.Random) -> Case:
        return self._fields(path, [place], dice)

    def _fields(self, path: str, places: list[tuple[Step, ...]], dice: random.Random) -> Case:
        values = {place: self.bodies.hostile(path, place, dice) for place in places}
        name = ", ".join(f"{_name(place)} = {_short(raw)}" for place, raw in values.items())
        return self._post(path, self.bodies.body(path, values, dice), name)

    def _any_field(self, dice: random.Random) -> Case:
        return self._field(*dice.choice(self._order), dice)

    def _several(self, dice: random.Random) -> Case:
        path = dice.choice(self._order)[0]
        places = [place for other, place in self._order if other == path and place]
        return self._fields(path, dice.sample(places, min(dice.choice([2, 3, 6]), len(places))), dice)

    def _sample(self, dice: random.Random) -> Case:
        """Fields that are allowed, in combinations that may not be."""
        path = dice.choice(list(self.bodies.schemas))
        value = self.bodies.example(self.bodies.schemas[path], dice, dice.choice([0.05, 0.2, 0.5]))
        return self._post(path, json.dumps(self.bodies._bounded(path, value)).encode(), "sample")

    def _whole(self, dice: random.Random) -> Case:
        """A body that is damaged as a whole."""
        path = dice.choice(list(self.bodies.schemas))
        value = self.bodies.example(self.bodies.schemas[path], dice, 0.1)
        body = json.dumps(self.bodies._bounded(path, value)).encode()
        cut, name = dice.randrange(len(body)), dice.choice(list(value) or ["model"])
        damages: dict[str, Callable[[], bytes]] = {
            "cut": lambda: body[:cut],
            "one byte changed": lambda: body[:cut] + bytes([dice.randrange(256)]) + body[cut + 1 :],
            "a field omitted": lambda: json.dumps({k: v for k, v in value.items() if k != name}).encode(),
            "a field twice": lambda: b'{"%s":%s,' % (name.encode(), hostile(dice, large=0.05)) + body[1:],
            "an unknown field": lambda: b'{"x%d":%s,' % (cut, hostile(dice)) + body[1:],
            "an unknown name": lambda: b"{" + dice.choice(TEXTS[:22]) + b":1," + body[1:],
            "many unknown fields": lambda: b"{" + b"".join(b'"x%d":0,' % i for i in range(20_000)) + body[1:],
            "UTF-16": lambda: body.decode().encode("utf-16"),
            "a byte order mark": lambda: b"\xef\xbb\xbf" + body,
            "white space": lambda: b" " * dice.choice([9, 70_000, 4_100_000]) + body,
            "over 4 MiB": lambda: body + b" " * (4 << 20),
            "two values": lambda: body + body,
            "another value": lambda: hostile(dice, large=0.3),
            "nothing": lambda: b"",
        }
        kind = dice.choice(list(damages))
        return self._post(path, damages[kind](), kind)

    def _route(self, dice: random.Random) -> Case:
        """A method or path that does not exist, or a query."""
        _, path = dice.choice(self.bodies.operations)
        path = path.replace("{name}", dice.choice(["x", "%00", "..%2f..", "a/b", "%F0%9F%98%80", "x" * 3000]))
        method = dice.choice(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"])
        path = dice.choice([path, path, f"{path}/", f"/{path}", f"{path}?a=%00&b[]=\udcff", path.upper(), f"{path}%20"])
        path += dice.choice(["", "", "", "?" + "q" * 9000, "/" + "a" * 9000, "#x", "%", ";x=1"])
        body = dice.choice([b"", b"{}", b"[]", b"\xff"])
        return Case(f"{method} {path[:80]!r}", (request(method, path, body),), None, method=method.lower())

    # ---- HTTP

    def _http(self, dice: random.Random) -> Case:
        kinds = (self._slow, self._chunked, self._pipelined, self._quits, self._header, self._flood, self._garbage)
        return dice.choice(kinds)(dice)

    def _good(self, dice: random.Random) -> tuple[str, bytes]:
        path = dice.choice(list(self.bodies.schemas))
        body = self.bodies._bounded(path, self.bodies.example(self.bodies.schemas[path], dice))
        if dice.random() < 0.4:
            body["stream"] = True
        return path, json.dumps(body).encode()

    def _slow(self, dice: random.Random) -> Case:
        path, body = self._good(dice)
        whole = request("POST", path, body)
        cuts = sorted(dice.randrange(len(whole)) for _ in range(dice.choice([1, 5, 20])))
        parts = tuple(whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True))
        return Case(f"POST {path} in {len(parts)} parts", parts, pause_s=0.01, method="post", path=path)

    def _chunked(self, dice: random.Random) -> Case:
        path, body = self._good(dice)
        size = dice.choice([1, 3, 100])
        pieces = [body[i : i + size] for i in range(0, len(body), size)]
        extension = dice.choice([b"", b";a=b", b";" + b"x" * 300])
        coded = b"".join(b"%x%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in pieces) + b"0\r\n"
        end = dice.choice([b"\r\n", b"X-Trailer: a\r\n\r\n"])
        head = request("POST", path, b"", b"Transfer-Encoding: chunked")
        if dice.random() < 0.3:
            head, end = head, dice.choice([b"zz\r\n", b"-5\r\n", b"ffffffffffffffffff\r\n", b"\r\nGET / HTTP/1.1\r\n"])
            return Case(f"POST {path} with broken chunks", (head + coded[:-3] + end,), None)
        return Case(f"POST {path} in chunks of {size}", (head + coded + end,), method="post", path=path)

    def _pipelined(self, dice: random.Random) -> Case:
        count = dice.choice([2, 3, 20])
        bodies = [self._good(dice) for _ in range(count)]
        sent = [request("POST", path, body, close=i == count - 1) for i, (path, body) in enumerate(bodies)]
        parts = tuple(sent) if dice.random() < 0.5 else (b"".join(sent),)
        if dice.random() < 0.3:  # a header, and its body in a packet of its own
            parts = tuple(part for each in sent for part in each.partition(b"\r\n\r\n") if part)
        return Case(f"{count} pipelined requests in {len(parts)} parts", parts, count, pause_s=0.005)

    def _quits(self, dice: random.Random) -> Case:
        path, body = self._good(dice)
        whole = request("POST", path, body)
        cut = dice.choice([0, 5, 40, len(whole) - 3, len(whole), len(whole)])
        return Case(f"POST {path}, left after {cut} of {len(whole)} bytes", (whole[:cut],), 0, leaves=True)

    def _header(self, dice: random.Random) -> Case:
        odd = dice.choice(HEADERS)
        path, body = self._good(dice)
        return Case(f"POST {path} with {_short(odd)}", (request("POST", path, body, odd),), None)

    def _flood(self, dice: random.Random) -> Case:
        line = dice.choice([b"", b"X: a\r\n", b"X: " + b"a" * 1000 + b"\r\n", b"a"])
        start = b"GET /health HTTP/1.1\r\n" + (b"" if line.endswith(b"\n") else b"X: ")
        count = dice.choice([1, 20, 400])
        parts = (start, *[(line or b"a") * (65_536 // max(1, len(line)))] * count)
        return Case(f"a header of {count} times 64 KiB", parts, None)

    def _garbage(self, dice: random.Random) -> Case:
        sent = dice.choice([*GARBAGE, dice.randbytes(300) + b"\r\n\r\n"])
        return Case(f"bytes {_short(sent)}", (sent,), None)


def _name(place: tuple[Step, ...]) -> str:
    return "".join(f".{key}" if kind == "name" else "[]" * (kind == "item") for kind, key in place) or "body"


def _short(raw: bytes) -> str:
    shown = raw[:60].decode("utf-8", "backslashreplace").replace("\n", "\\n").encode("unicode_escape").decode()
    return shown if len(raw) <= 60 else f"{shown}... ({len(raw)} bytes)"
