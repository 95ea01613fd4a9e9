"""Byte planes: docs/format.md, section 7, "Byte planes"."""


class Broken(Exception):
    pass


def need(holds, what):
    if not holds:
        raise Broken(what)


def decode(frame, length):
    """The plain bytes, `length` of them, that a frame of codec 2 stands for."""
    kind, at = frame[0], 1
    need(kind < 8, "kind")
    width = 1 << (kind & 3)
    count = length // width
    headers = [(frame[at + 5 * i], number(frame[at + 5 * i + 1:at + 5 * i + 5])) for i in range(width)]
    at += 5 * width
    planes = []
    for how, stored in headers:
        planes.append(plane(how, frame[at:at + stored], count))
        at += stored
    plain, bits = bytearray(), 8 * width
    for index in range(count):
        value = number(bytes(one[index] for one in planes))
        if kind & 4:
            value = value >> 1 | (value & 1) << bits - 1
        plain += value.to_bytes(width, "little")
    plain += frame[at:]
    need(len(plain) == length, "length")
    return bytes(plain)


def number(raw):
    return int.from_bytes(raw, "little")


def plane(how, body, count):
    if how == 3:
        return groups(body, count)
    if how == 0:
        need(len(body) == count, "raw plane")
        return body
    if how == 1:
        need(len(body) == 1, "plane of one byte")
        return body * count
    need(how == 2, "how")
    return coded(body, count)


def coded(body, count):
    lengths = [half for byte in body[:128] for half in (byte & 15, byte >> 4)]
    need(sum(2.0 ** -length for length in lengths if length) == 1.0, "code is not complete")
    codes, code, before = {}, 0, 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(lengths) if length):
        code <<= length - before
        codes[length, code] = symbol
        code, before = code + 1, length
    ends = [number(body[at:at + 4]) for at in (128, 132, 136)] + [len(body) - 140]
    part, out, start = -(-count // 4), bytearray(), 0
    for stream, end in enumerate(ends):
        out += symbols(codes, body[140 + start:140 + end], max(0, min(part, count - stream * part)))
        start = end
    return bytes(out)


def symbols(codes, stream, count):
    bits = (byte >> place & 1 for byte in stream for place in range(8))
    out = bytearray()
    for _ in range(count):
        code = length = 0
        while (length, code) not in codes:
            code, length = code << 1 | next(bits), length + 1
            need(length <= 11, "no such code")
        out.append(codes[length, code])
    rest = list(bits)
    need(len(rest) < 8 and not any(rest), "stream is too long")
    return out


def groups(body, count):
    log, at = body[0], 1
    need(1 <= log <= 3, "group length")
    elements, bits = 1 << log, 8 >> log
    escape = (1 << bits) - 1
    stands_for, at = body[at:at + escape], at + escape
    how, stored = body[at], number(body[at + 1:at + 5])
    need(how < 3, "groups within groups")
    at += 5
    grouped, at = plane(how, body[at:at + stored], -(-count // elements)), at + stored
    escapes, how = number(body[at:at + 4]), body[at + 4]
    need(how < 3, "groups within groups")
    escaped = iter(plane(how, body[at + 5:], escapes) if escapes else b"")
    codes = [group >> place * bits & escape for group in grouped for place in range(elements)][:count]
    return bytes(next(escaped) if code == escape else stands_for[code] for code in codes)
