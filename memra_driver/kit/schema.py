"""Whether a value of JSON keeps a schema: the keywords of JSON Schema that the kit's manifest uses, and no others."""

from __future__ import annotations

import math
import re
from typing import Any

Rule = dict[str, Any]

_TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
    "null": type(None),
}  # fmt: skip
KEYWORDS = {
    "$ref", "type", "const", "enum", "minimum", "maximum", "pattern", "maxLength", "items", "minItems", "maxItems",
    "properties", "required", "additionalProperties", "allOf", "if", "then",
}  # fmt: skip
_ANYTHING: Rule = {}


def violation(value: Any, schema: Rule) -> str:
    """The first rule of the schema that the value breaks, and where, in words; "" where it breaks none."""
    problem = _problem(value, schema, schema)
    return problem and f"the manifest{problem}"


def _problem(value: Any, rule: Rule, root: Rule) -> str:
    """What is wrong with the value, behind the path that leads to it."""
    if "$ref" in rule:
        rule = root["$defs"][rule["$ref"].removeprefix("#/$defs/")]
    kinds = rule.get("type", ())
    if kinds and not any(_is(value, kind) for kind in ((kinds,) if isinstance(kinds, str) else kinds)):
        return f" is {_shown(value)}; it takes {kinds if isinstance(kinds, str) else ' or '.join(kinds)}"
    if "const" in rule and not (value == rule["const"] and type(value) is type(rule["const"])):
        return f" is {_shown(value)}, not {_shown(rule['const'])}"
    if "enum" in rule and value not in rule["enum"]:
        return f" is {_shown(value)}; it takes one of {', '.join(map(_shown, rule['enum']))}"
    if isinstance(value, str):
        found = _of_text(value, rule)
    elif isinstance(value, list):
        found = _of_list(value, rule, root)
    elif isinstance(value, dict):
        found = _of_map(value, rule, root)
    else:
        found = _of_number(value, rule)
    for each in () if found else rule.get("allOf", ()):
        if "if" not in each or not _problem(value, each["if"], root):
            found = found or _problem(value, each["then"] if "if" in each else each, root)
    return found


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind]) and not (isinstance(value, float) and not math.isfinite(value))


def _of_number(value: Any, rule: Rule) -> str:
    least, most = rule.get("minimum", -math.inf), rule.get("maximum", math.inf)
    if isinstance(value, bool | None) or least <= value <= most:
        return ""
    return f" is {_shown(value)}; it must lie in {least} .. {most}"


def _of_text(value: str, rule: Rule) -> str:
    if len(value) > rule.get("maxLength", math.inf):
        return f" has {len(value)} characters; at most {rule['maxLength']}"
    if "pattern" in rule and not re.fullmatch(rule["pattern"], value):  # ours all begin with ^ and end with $
        return f" is {_shown(value)}, which is not of the form {rule['pattern']}"
    return ""


def _of_list(value: list[Any], rule: Rule, root: Rule) -> str:
    least, most = rule.get("minItems", 0), rule.get("maxItems", math.inf)
    if not least <= len(value) <= most:
        return f" has {len(value)} entries; {least} .. {most} are allowed"
    items = rule.get("items", _ANYTHING)
    for i, each in enumerate(value):
        if problem := _problem(each, items, root):
            return f"[{i}]{problem}"
    return ""


def _of_map(value: dict[str, Any], rule: Rule, root: Rule) -> str:
    if missing := [name for name in rule.get("required", ()) if name not in value]:
        return f" lacks {', '.join(missing)}"
    known, others = rule.get("properties", _ANYTHING), rule.get("additionalProperties", _ANYTHING)
    for name, each in value.items():
        if name not in known and others is False:
            return f" has {_shown(name)}, which it may not"
        if problem := _problem(each, known.get(name, others), root):
            return f".{name[:40]}{problem}"
    return ""


def _shown(value: Any) -> str:
    """Short enough for a message, whatever it is."""
    text = f"a number of {value.bit_length()} bits" if isinstance(value, int) and abs(value) >> 70 else ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
