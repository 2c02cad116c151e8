"""What looks like credentials, and is left out: of what is told of a failure, and of the dashboard's answers.

A message of somebody else's library, which becomes the cause of a failure, may quote what it was given.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

# All of it is looked for in JSON as it is sent, in lower case. What a message has in double quotes stands there between
# quotes with a backslash, or with more of them where it was escaped already. A quote without one ends the message.
_IN_URL: Final = re.compile(rb"://[^/@\s\"\\]*:[^/\s\"\\]*@")
_BEGIN: Final = re.compile(
    rb"passw|passphrase|pwd|secret|token|credential|sig|authorization|bearer|"
    rb"access|account|api|encryption|master|private|storage"
)
"""What the names below begin with. It is found much faster than they are."""
_NAME: Final = rb"""
    (?: password | passwd | passphrase | secret (?: [._-]? (?: access [._-]? )? key )? | authorization )
"""
_WORD: Final = rb"""
    (?: pwd | token | credentials? | signature | (?<! [a-z] ) sig | account [._-]? key (?: \. [\w.-]{1,100}+ )?
      | (?: access | api | encryption | master | private | storage ) [._-]? key )
"""
"""The name of a secret, or a word like others: `unexpected token: x`."""
_QUOTE: Final = rb"""(?: (?: \\\\ )*+ \\" | ' )"""
# One that opens with so many backslashes before it closes with as many, after any that stand for themselves.
_CLOSE: Final = rb"""(?: (?P=slashes) \\\\ (?P=slashes) \\\\ )* (?P=slashes) \\" """
_VALUE: Final = rb"""
    (?: (?P<slashes> (?: \\\\ )*+ ) \\"
        (?: [^"\\] | (?: \\\\ )++ (?! \\" ) | \\ [^"\\] | (?! %(close)b ) (?: \\\\ )*+ \\" )*+ (?: %(close)b )?
      | ' (?: [^'"\\] | '' | \\\\ (?: \\. | [^"\\] )? | \\ [^\\] )*+ '?
      | (?: (?: bearer | basic | digest | negotiate ) [ ]+ )? (?! ' ) (?: [^\s"\\&;,] | \\\\ | \\u[0-9a-f]{4} )++ )
""" % {b"close": _CLOSE}
_SECRET: Final = re.compile(
    rb"""
    (?: (?: (?: %(name)b | %(word)b ) %(quote)b? \s* = (?! = ) >?
          | (?: %(name)b | %(word)b ) %(quote)b \s* :
          | %(name)b \s* :
          | (?<= [._-] ) %(word)b \s* : (?= \s* [^\s"\\]{12} ) (?= \s* [^\s"\\]* \d )
        )
        (?: \s+ (?! [\w.-]+ [=:] [^\s=] ) )?  # where it is empty, another setting follows
        (?P<value> %(value)b )
      | bearer [ ]+ (?P<bearer> (?= [^\s"\\]* \d ) [\w.~+/=-]{16,} )
    )
    """
    % {b"name": _NAME, b"word": _WORD, b"quote": _QUOTE, b"value": _VALUE},
    re.VERBOSE,
)


def text_without_secrets(text: str) -> str:
    """A message, without what looks like credentials."""
    encoded = msgspec.json.encode(text.encode("utf-8", "replace").decode())  # half a character, say, cannot be sent
    return msgspec.json.decode(json_without_secrets(encoded), type=str)


def json_without_secrets(data: bytes) -> bytes:
    """An answer, without what looks like credentials in any of its messages."""
    if b"@" in data:
        data = _IN_URL.sub(b"://...@", data)
    lowered = data.lower()
    kept, at = [], 0
    for begin in _BEGIN.finditer(lowered):
        found = _SECRET.match(lowered, begin.start()) if begin.start() >= at else None
        if found is not None:
            value = found.start("bearer" if found["value"] is None else "value")
            kept += [data[at:value], b"..."]
            at = found.end()
    return b"".join((*kept, data[at:])) if kept else data
