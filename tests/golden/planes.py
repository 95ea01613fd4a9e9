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
    kind, classes = frame[0], frame[1]
    need(kind & ~11 == 0 and len(base) == length and 1 <= classes <= 4, "kind, base or classes")
    width, bits = 1 << (kind & 3), 8 << (kind & 3)
    bounds = frame[2:1 + classes]
    need(list(bounds) == sorted(set(bounds)) and 0 not in bounds, "bounds")
    before = [number(base[at:at + width]) for at in range(0, length // width * width, width)]
    of = [sum(bound <= value << 1 >> bits - 8 & 255 for bound in bounds) for value in before]
    values, rest = numbers(frame[1 + len(bounds):], width, length, of if classes > 1 else None, classes)
    return moved(values, before, bits, kind & 8) + rest


def moved(steps, before, bits, floats):
    """The numbers that are so many zigzagged steps after those `before`."""
    top = 1 << bits - 1

    def order(value):
        """A float's bits, such that they are in order as integers in two's complement. Its own inverse."""
        return value ^ (top - 1) if floats and value & top else value

    plain = bytearray()
    for value, old in zip(steps, before):
        step = value >> 1 if value % 2 == 0 else -(value >> 1) - 1
        plain += order((order(old) + step) % (1 << bits)).to_bytes(bits // 8, "little")
    return bytes(plain)


def derived(frame, base, length):
    """The same for codec 4: the floats of `base`, rounded to the upper half."""
    need(frame == b"\1" and len(base) == 2 * length, "rule or base")
    plain = bytearray()
    for index in range(length // 2):
        bits = number(base[4 * index:4 * index + 4])
        nan = bits & 0x7FFFFFFF > 0x7F800000
        plain += (0x7FC0 if nan else bits + 0x7FFF + (bits >> 16 & 1) >> 16).to_bytes(2, "little")
    return bytes(plain)


def numbers(frame, width, length, of=None, classes=0):
    """The numbers in the planes after a frame's first byte, and the bytes after them; `of`: the class of each number."""
    count, at = length // width, 1
    headers = [(frame[at + 5 * i], number(frame[at + 5 * i + 1:at + 5 * i + 5])) for i in range(width)]
    at += 5 * width
    planes = []
    for how, stored in headers:
        planes.append(plane(how, frame[at:at + stored], count, of, classes))
        at += stored
    rest = frame[at:]
    need(len(rest) == length - count * width, "length")
    return [number(bytes(one[index] for one in planes)) for index in range(count)], rest


def number(raw):
    return int.from_bytes(raw, "little")


def plane(how, body, count, of=None, classes=0):
    if how == 4:
        need(of is not None, "classes")
        return classed(body, of, classes)
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


def classed(body, of, classes):
    streams, at = [], 0
    for one in range(classes):
        how, stored = body[at], number(body[at + 1:at + 5])
        need(how < 3, "class within a class")
        streams.append(iter(plane(how, body[at + 5:at + 5 + stored], of.count(one))))
        at += 5 + stored
    need(at == len(body), "bytes after the classes")
    return bytes(next(streams[one]) for one in of)


def groups(body, count, nested=False):
    log, at = body[0], 1
    need(1 <= log <= 3, "group length")
    elements, bits = 1 << log, 8 >> log
    escape = (1 << bits) - 1
    stands_for, at = body[at:at + escape], at + escape
    how, stored = body[at], number(body[at + 1:at + 5])
    need(how < 3 or how == 3 and not nested, "groups within groups within groups")
    at += 5
    some, at = -(-count // elements), at + stored
    grouped = groups(body[at - stored:at], some, True) if how == 3 else plane(how, body[at - stored:at], some)
    escapes, how = number(body[at:at + 4]), body[at + 4]
    need(how < 3, "groups within groups")
    escaped = iter(plane(how, body[at + 5:], escapes) if escapes else b"")
    codes = [group >> place * bits & escape for group in grouped for place in range(elements)][:count]
    return bytes(next(escaped) if code == escape else stands_for[code] for code in codes)
