"""Protocol buffers' wire format: a message as its fields, without a schema compiler.

https://protobuf.dev/programming-guides/encoding: a field is a varint of number and wire type, then
a varint (0), 8 bytes (1), a length and bytes (2), or 4 bytes (5).
"""

from collections import defaultdict
from typing import Final

from perfmodel.errors import TableError

Field = int | bytes
# Wire types of protobuf (protobuf.dev, "Encoding").
_VARINT: Final = 0
_I64: Final = 1
_BYTES: Final = 2
_I32: Final = 5
_WIDTH: Final = {_I64: 8, _I32: 4}


def fields(data: bytes, place: object) -> dict[int, list[Field]]:
    """Values by field number, in order; numbers for varints, bytes for all else.

    Raises:
        TableError: bytes that are not a message, or end within one.
    """
    values: dict[int, list[Field]] = defaultdict(list)
    position = 0
    end = len(data)
    while position < end:
        key, position = _varint(data, position, place)
        number = key >> 3
        wire = key & 7
        if wire == _VARINT:
            value, position = _varint(data, position, place)
            values[number].append(value)
            continue
        # Texts, messages and packed numbers look alike: which it is only the reader of the field
        # knows.
        if wire == _BYTES:
            size, position = _varint(data, position, place)
        elif wire in _WIDTH:
            size = _WIDTH[wire]
        else:
            raise TableError(
                f"{place}: this is not a protocol buffer (wire type {wire} at byte {position}); record it again"
            )
        if position + size > end:
            raise TableError(
                f"{place}: it ends within a field (byte {end} of {position + size}); was the file cut short?"
            )
        values[number].append(data[position : position + size])
        position += size
    return values


def _varint(data: bytes, position: int, place: object) -> tuple[int, int]:
    value = shift = 0
    while True:
        # Seven bits a byte, lowest first, and the top bit set on all but the last.
        if position >= len(data) or shift > 63:
            raise TableError(
                f"{place}: a number is cut short at byte {position}; copy the whole file again"
            )
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def signed(value: int) -> int:
    """The signed 64-bit number that a varint encodes."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def integer(message: dict[int, list[Field]], number: int, default: int = 0) -> int:
    """A whole-number field (the last one counts); the default where it is missing or of another
    wire type."""
    values = message.get(number)
    return signed(values[-1]) if values and isinstance(values[-1], int) else default


def submessages(message: dict[int, list[Field]], number: int) -> list[bytes]:
    """The bytes of a repeated message."""
    return [value for value in message.get(number, ()) if isinstance(value, bytes)]


def text(message: dict[int, list[Field]], number: int) -> str:
    """A text field; bytes that are not UTF-8 are replaced."""
    values = submessages(message, number)
    return values[-1].decode("utf-8", "replace") if values else ""


def integers(message: dict[int, list[Field]], number: int, place: object) -> list[int]:
    """A repeated whole-number field, packed or not."""
    decoded: list[int] = []
    for value in message.get(number, ()):
        if isinstance(value, int):
            decoded.append(signed(value))
            continue
        position = 0
        while position < len(value):
            varint, position = _varint(value, position, place)
            decoded.append(signed(varint))
    return decoded
