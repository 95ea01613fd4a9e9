"""Byte planes: docs/format.md, section 7, "Byte planes"."""


class Broken(Exception):
    pass


def need(holds, what):
    if not holds:
        raise Broken(what)


def decode(frame, length):
    """The plain bytes, `length` of them, that a frame of codec 2 stands for."""
    kind = frame[0]
    need(kind < 8, "kind")
    width, bits = 1 << (kind & 3), 8 << (kind & 3)
    values, rest = numbers(frame, width, length)
    if kind & 4:
        values = [value >> 1 | (value & 1) << bits - 1 for value in values]
    return b"".join(value.to_bytes(width, "little") for value in values) + rest


def difference(frame, base, length):
    """The same for codec 3: the numbers are zigzagged differences to those of `base`."""
    kind = frame[0]
    need(kind & ~11 == 0 and len(base) == length, "kind or base")
    width, bits = 1 << (kind & 3), 8 << (kind & 3)
    top = 1 << bits - 1

    def order(value):
        """A float's bits, such that they are in order as integers in two's complement. Its own inverse."""
        return value ^ (top - 1) if kind & 8 and value & top else value

    values, rest = numbers(frame, width, length)
    plain = bytearray()
    for index, value in enumerate(values):
        step = value >> 1 if value % 2 == 0 else -(value >> 1) - 1
        before = order(number(base[index * width:(index + 1) * width]))
        plain += order((before + step) % (1 << bits)).to_bytes(width, "little")
    return bytes(plain) + rest


def derived(frame, base, length):
    """The same for codec 4: the floats of `base`, rounded to the upper half."""
    need(frame == b"\1" and len(base) == 2 * length, "rule or base")
    plain = bytearray()
    for index in range(length // 2):
        bits = number(base[4 * index:4 * index + 4])
        nan = bits & 0x7FFFFFFF > 0x7F800000
        plain += (0x7FC0 if nan else bits + 0x7FFF + (bits >> 16 & 1) >> 16).to_bytes(2, "little")
    return bytes(plain)


def numbers(frame, width, length):
    """The numbers in the planes after a frame's first byte, and the bytes after them."""
    count, at = length // width, 1
    headers = [(frame[at + 5 * i], number(frame[at + 5 * i + 1:at + 5 * i + 5])) for i in range(width)]
    at += 5 * width
    planes = []
    for how, stored in headers:
        planes.append(plane(how, frame[at:at + stored], count))
        at += stored
    rest = frame[at:]
    need(len(rest) == length - count * width, "length")
    return [number(bytes(one[index] for one in planes)) for index in range(count)], rest


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
