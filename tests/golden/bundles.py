"""Bundles: docs/format.md, section 7, "Bundle"."""

import math
import struct

import planes
from zstandard import ZstdDecompressor

WEIGHTS, FIRST, SECOND = range(3)


def need(holds, what):
    if not holds:
        raise planes.Broken(what)


def part(frame, base, length):
    """The plain bytes, `length` of them, that a frame of codec 5 stands for."""
    need(len(frame) == 4, "offset")
    return base[planes.number(frame):][:length]


def decode(frame, base, length):
    """The same for codecs 6 to 13; `base` is None for 6."""
    count = frame[0]
    need(count in (2, 3) and length % (4 * count) == 0, "members")
    need(base is None or len(base) == length, "base")
    one, at, bodies = length // count, 1 + 5 * count, []
    for member in range(count):
        how, stored = frame[1 + 5 * member], planes.number(frame[2 + 5 * member:6 + 5 * member])
        bodies.append((how, frame[at:at + stored]))
        at += stored
    need(at == len(frame), "bytes after the members")
    before = [base[one * member:one * (member + 1)] for member in range(count)] if base else None
    now = [None] * count
    for member in (FIRST, SECOND, WEIGHTS) if count == 3 else (FIRST, WEIGHTS):
        how, body = bodies[member]
        now[member] = decode_member(how, body, member, now, before, one)
    return b"".join(now)


def decode_member(how, body, member, now, before, length):
    if how == 0:
        need(len(body) == length, "raw member")
        return body
    if how == 1:
        return planes.decode(body, length)
    need(before is not None and how < 5, "how")
    if how == 2:
        return planes.difference(body, before[member], length)
    predicted, body = predict(body[0], struct.unpack("<3d", body[1:25]), member, now, before), body[25:]
    if how == 3:
        return planes.difference(body, predicted, length)
    steps = ZstdDecompressor().decompress(body, max_output_size=length)
    need(len(steps) == length, "sparse differences")
    words = lambda raw: [planes.number(raw[at:at + 4]) for at in range(0, length, 4)]
    return planes.moved(words(steps), words(predicted), 32, floats=True)


def narrow(number):
    """The nearest 32-bit float."""
    if math.isnan(number) or math.isinf(number):
        return number
    try:
        return struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)


def divided(number, by):
    """As IEEE 754 divides."""
    if by:
        return number / by
    return math.nan if number == 0 or math.isnan(number) else math.copysign(math.inf, number) * math.copysign(1, by)


def predict(rule, coefficients, member, now, before):
    c0, c1, c2 = coefficients
    of = lambda raw: struct.unpack(f"<{len(raw) // 4}f", raw)
    need(member == (SECOND if rule == 1 else WEIGHTS) and 1 <= rule <= 4, "rule")
    m, next_m = of(before[FIRST]), of(now[FIRST])
    own = of(before[member])
    next_v = of(now[SECOND]) if rule == 2 else own
    out = []
    for x, m, next_m, next_v in zip(own, m, next_m, next_v):
        kept = narrow(x * c0)
        if rule == 1:
            gradient = m + (next_m - m) * c1
            value = kept + c2 * (gradient * gradient)
        elif rule == 2:
            value = kept - divided(c1 * next_m, (math.sqrt(next_v) if next_v >= 0 else math.nan) + c2)
        elif rule == 3:
            value = kept - c1 * next_m - c2 * m
        else:
            direction = next_m - c2 * m
            value = kept - c1 * ((direction > 0) - (direction < 0))
        out.append(narrow(value))
    return b"".join(b"\0\0\0\0" if math.isnan(value) else struct.pack("<f", value) for value in out)
