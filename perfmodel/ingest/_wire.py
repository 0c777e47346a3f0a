"""Protocol buffers' wire format: a message as its fields, without a schema compiler.

https://protobuf.dev/programming-guides/encoding: a field is a varint of number and wire type, then a varint (0),
8 bytes (1), a length and bytes (2), or 4 bytes (5).
"""

from collections import defaultdict
from typing import Final

from perfmodel.errors import TableError

Field = int | bytes
_VARINT, _I64, _BYTES, _I32 = 0, 1, 2, 5
_WIDTH: Final = {_I64: 8, _I32: 4}


def fields(data: bytes, where: object) -> dict[int, list[Field]]:
    """Values by field number, in order; numbers for varints, bytes for all else.

    Raises:
        TableError: bytes that are no message, or end within one.
    """
    found: dict[int, list[Field]] = defaultdict(list)
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at, where)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(data, at, where)
            found[number].append(value)
            continue
        if wire == _BYTES:
            size, at = _varint(data, at, where)
        elif wire in _WIDTH:
            size = _WIDTH[wire]
        else:
            raise TableError(f"{where}: not a protocol buffer (wire type {wire} at byte {at}); record it again")
        if at + size > end:
            raise TableError(f"{where}: it ends within a field (byte {end} of {at + size}); was the file cut short?")
        found[number].append(data[at : at + size])
        at += size
    return found


def _varint(data: bytes, at: int, where: object) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise TableError(f"{where}: a number is cut short at byte {at}; was the file cut short?")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def signed(value: int) -> int:
    """A varint as the 64-bit two's complement number it stands for."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def integer(message: dict[int, list[Field]], number: int, default: int = 0) -> int:
    """A whole-number field (the last one counts); the default where it is missing or of another wire type."""
    values = message.get(number)
    return signed(values[-1]) if values and isinstance(values[-1], int) else default


def submessages(message: dict[int, list[Field]], number: int) -> list[bytes]:
    """The bytes of a repeated message."""
    return [value for value in message.get(number, ()) if isinstance(value, bytes)]


def text(message: dict[int, list[Field]], number: int) -> str:
    """A text field; what is no UTF-8 in it is replaced."""
    values = submessages(message, number)
    return values[-1].decode("utf-8", "replace") if values else ""


def integers(message: dict[int, list[Field]], number: int, where: object) -> list[int]:
    """A repeated whole-number field, packed or not."""
    found: list[int] = []
    for value in message.get(number, ()):
        if isinstance(value, int):
            found.append(signed(value))
            continue
        at = 0
        while at < len(value):
            one, at = _varint(value, at, where)
            found.append(signed(one))
    return found
