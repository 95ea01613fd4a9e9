"""A reader of Towline repositories in a directory, written from docs/format.md and nothing else.

    reader.py list REPOSITORY              prints the names, sorted
    reader.py facts REPOSITORY NAME        prints what is told of a step, as JSON
    reader.py restore REPOSITORY NAME DEST puts a folder's contents, or a file under its own name, into DEST
    reader.py kept REPOSITORY              prints what is kept of removed and replaced names: name, version, entry that took it
    reader.py back REPOSITORY NAME VERSION DEST  puts one of those into DEST
"""

import json
import math
import os
import re
import struct
import sys
import unicodedata

import bundles
import planes
from blake3 import blake3
from zstandard import ZstdDecompressor

BASE32 = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
NAME = re.compile(r"[A-Za-z0-9._+=-]+(/[A-Za-z0-9._+=-]+)*")


class Damaged(Exception):
    pass


class Unsupported(Exception):
    pass


def need(holds, what):
    if not holds:
        raise Damaged(what)


def know(holds, what):
    if not holds:
        raise Unsupported(what + ": use a newer program")


class Wire:
    """Section 4."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, n):
        need(self.at + n <= len(self.data), "bytes end too early")
        self.at += n
        return self.data[self.at - n:self.at]

    def fixed(self, n):
        return int.from_bytes(self.take(n), "little")

    def var(self, bits=64):
        value, shift = 0, 0
        while True:
            byte = self.fixed(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                need(byte or not shift, "needless byte")
                need(value < 1 << bits, "integer overflows")
                return value
            shift += 7
            need(shift < 70, "integer is too long")

    def svar(self):
        value = self.var()
        return value >> 1 if value % 2 == 0 else -(value >> 1) - 1

    def bytes(self):
        return self.take(self.var())

    def text(self):
        return self.bytes().decode()

    def flag(self):
        value = self.fixed(1)
        need(value < 2, "flag")
        return value == 1

    def list(self, read):
        count = self.var()
        need(count <= len(self.data) - self.at, "count is impossible")
        return [read() for _ in range(count)]

    def owned(self):
        return self.take(16), self.take(16)

    def finish(self):
        need(self.at == len(self.data), "bytes are left over")


def opened(kind, data, latest=1):
    """Section 5: the plain body."""
    need(len(data) >= 48 and data[:5] == b"TWLN" + kind, "no such envelope")
    version, encryption, compression = data[5:8]
    know(1 <= version <= latest and encryption == 0 and compression in (0, 1), "version, encryption or compression")
    need(blake3(data[:-32]).digest() == data[-32:], "digest of an envelope")
    plain = int.from_bytes(data[8:16], "little")
    need(plain <= 4 << 30, "body is impossibly long")
    body = data[16:-32]
    if compression:
        body = ZstdDecompressor().decompress(body, max_output_size=plain + 1)
    need(len(body) == plain, "length of a body")
    return body


def ulid(raw):
    number = int.from_bytes(raw, "big")
    return "".join(BASE32[number >> 5 * place & 31] for place in reversed(range(26)))


class Repository:
    def __init__(self, root):
        self.root = root
        body = Wire(opened(b"R", self.get("repository")))
        self.id = ulid(body.take(16))
        body.svar()
        know(body.list(body.text) == [], "features")
        body.finish()
        self.refs, self.removed, self.seq = self.fold()

    def get(self, key, start=0, length=-1):
        with open(os.path.join(self.root, key), "rb") as file:
            file.seek(start)
            return file.read(length)

    def find(self, key):
        try:
            return self.get(key)
        except FileNotFoundError:
            return None

    def object(self, family, owned):
        return self.get(f"{family}/{ulid(owned[0])}/{ulid(owned[1])}")

    def fold(self):
        """Section 11. Only refs and removed are kept: what else the state holds is for writers."""
        while True:
            before = self.boundary()
            first = self.find(f"snapshot/{before:020}")
            refs, removed, seq = snapshot(first, before) if first else ({}, {}, 0)
            if first or before == 0:
                began = seq
                while (entry := self.find(f"log/{seq + 1:020}")) is not None:
                    seq += 1
                    apply(refs, removed, entry, seq)
                if self.boundary() <= began:
                    return refs, removed, seq
            else:
                need(self.boundary() != before, "the boundary's snapshot is missing")

    def boundary(self):
        number, floor = 0, 0
        while (found := self.find(f"boundary/{number + 1:020}")) is not None:
            body = Wire(opened(b"B", found))
            number, floor = number + 1, body.var()
            body.finish()
        return floor

    def saved(self, name):
        """Section 15, steps 1 and 2."""
        if name not in self.refs:
            raise KeyError(f"there is no {name}")
        return self.opened(self.refs[name])

    def opened(self, value):
        body = opened(b"M", self.object("manifest", value["manifest_at"]))
        need(blake3(body).digest() == value["manifest"], "manifest does not match its name")
        manifest = read_manifest(body)
        sealed = self.object("map", value["map_at"])
        return manifest, read_map(opened(b"P", sealed, 2), sealed[5], value["manifest"], manifest)

    def restore(self, saved, dest):
        """Section 15, steps 3 and 4."""
        manifest, frames = saved
        folders = []
        for entry in manifest["entries"]:
            path = os.path.join(os.fsencode(dest), entry["path"]) if entry["path"] else os.fsencode(dest)
            if entry["kind"] == 1:
                os.makedirs(path, exist_ok=True)
                folders.append((path, entry))
            elif entry["kind"] == 2:
                os.symlink(entry["target"], path)
                os.utime(path, ns=(entry["mtime"],) * 2, follow_symlinks=False)
            else:
                with open(path, "xb") as file:
                    self.fill(file, entry, frames)
                finish(path, entry)
        for path, entry in reversed(folders):
            finish(path, entry)

    def fill(self, file, entry, frames):
        at = 0
        for hole, first, count in entry["pieces"]:
            at += hole
            for index in range(first, first + count):
                file.seek(at)
                at += file.write(self.chunk(frames, index))
        file.truncate(entry["size"])

    def chunk(self, frames, index):
        wanted, length, pack, offset, stored, codec, base = frames[index]
        frame = self.get(f"pack/{ulid(pack[0])}/{ulid(pack[1])}", offset, stored)
        if codec == 0:
            plain = frame
        elif codec == 1:
            plain = ZstdDecompressor().decompress(frame, max_output_size=length)
        elif codec == 2:
            plain = planes.decode(frame, length)
        elif codec == 3:
            plain = planes.difference(frame, self.chunk(frames, base - 1), length)
        elif codec == 4:
            plain = planes.derived(frame, self.chunk(frames, base - 1), length)
        elif codec == 5:
            plain = bundles.part(frame, self.chunk(frames, base - 1), length)
        else:
            plain = bundles.decode(frame, self.chunk(frames, base - 1) if base else None, length)
        need(len(plain) == length and blake3(plain).digest() == wanted, "chunk does not match its id")
        return plain


def finish(path, entry):
    os.chmod(path, entry["mode"])
    os.utime(path, ns=(entry["mtime"],) * 2)


def read_value(wire, version):
    value = {"version": version, "manifest": wire.take(32), "manifest_at": wire.owned(), "map_at": wire.owned()}
    wire.svar(), wire.var(), wire.var(), wire.var(), wire.var(32)
    value["facts"] = read_facts(wire)
    attempt = wire.text()
    need(not attempt or good_attempt(attempt), "attempt")
    return value


def good_attempt(text):
    return len(text) <= 64 and NAME.fullmatch(text) and "/" not in text and text not in (".", "..")


def read_session(wire):
    wire.take(16), wire.var(), wire.var(), wire.take(16)
    if wire.flag():
        read_attempt(wire)
        wire.var()


def read_attempt(wire):
    name, attempt, ranks = read_name(wire), wire.text(), wire.var(32)
    need(good_attempt(attempt) and ranks > 0, "attempt")
    return name, attempt, ranks


def read_facts(wire):
    metrics = wire.list(lambda: (wire.text(), *struct.unpack("<d", wire.take(8))))
    names = [name for name, _ in metrics]
    need(len(names) <= 64 and names == sorted(set(names)), "metrics are too many or not sorted")
    need(all(NAME.fullmatch(n) and len(n) <= 128 and "/" not in n and n not in (".", "..") for n in names), "metric's name")
    need(all(math.isfinite(number) for _, number in metrics), "metric is not finite")
    world_size, framework = wire.var(32), wire.bytes()
    need(len(framework) <= 64, "framework is too long")
    framework = framework.decode()
    need(all(unicodedata.category(letter) != "Cc" for letter in framework), "framework")
    return {"metrics": dict(metrics), "world_size": world_size or None, "framework": framework or None}


def read_name(wire):
    name = wire.text()
    need(NAME.fullmatch(name) and not {".", ".."} & set(name.split("/")), "bad name")
    return name


def read_info(wire):
    return wire.var(), wire.var(), wire.var()


def snapshot(data, number):
    wire = Wire(opened(b"S", data, latest=2))
    need(wire.var() == number, "snapshot is of another entry")
    wire.var()
    refs = dict(wire.list(lambda: (read_name(wire), read_value(wire, wire.var()))))
    wire.list(lambda: (wire.owned(), read_info(wire), wire.var()))
    wire.list(lambda: read_session(wire))
    wire.list(lambda: (wire.owned(), wire.var(), wire.svar(), wire.var(), wire.flag()))
    wire.list(lambda: (wire.owned(), wire.var(), wire.flag()))
    removed = {}
    if data[5] == 2:
        labels = wire.list(lambda: (read_name(wire), read_labels(wire)))
        removed = dict(wire.list(lambda: read_removed(wire)))
        policy = wire.flag() and (wire.var(), wire.take(32))
        declassified = wire.list(lambda: (read_name(wire), read_declassified(wire)))
        need(labels or removed or policy or declassified, "snapshot of version 2 has nothing that needs it")
    wire.finish()
    return refs, removed, number


LABELS = ["residency", "sensitivity", "tenant", "purpose", "derived-from"]


def read_labels(wire):
    labels = wire.list(lambda: (wire.fixed(1), wire.list(wire.text)))
    tags = [tag for tag, _ in labels]
    know(all(1 <= tag <= len(LABELS) for tag in tags), "label")
    need(tags == sorted(set(tags)), "labels are not sorted")
    need(all(values == sorted(set(values)) and len(values) <= 32 for _, values in labels), "values of a label")
    need(all(values or tag == 1 for tag, values in labels), "label without values")
    return labels


def read_declassified(wire):
    manifest, labels, _, reason, signature = wire.take(32), read_labels(wire), read_labels(wire), wire.text(), wire.bytes()
    need(len(reason.encode()) <= 1024 and len(signature) <= 32 << 10, "declassification")
    return manifest, labels


def read_removed(wire):
    name, version, at, _ = read_name(wire), wire.var(), wire.var(), wire.svar()
    return (name, version), (at, read_value(wire, version))


def apply(refs, removed, data, number):
    wire = Wire(opened(b"L", data))
    wire.take(16)
    if wire.flag():
        wire.take(16)
    wire.svar()
    actions = wire.list(lambda: (wire.fixed(1), Wire(wire.bytes())))
    wire.finish()
    before = {name: value["version"] for name, value in refs.items()}, {key: at for key, (at, _) in removed.items()}
    for tag, payload in actions:
        act((refs, removed), before, tag, payload, number)
        payload.finish()


def act(now, before, tag, payload, number):
    know(1 <= tag <= 19, "action")
    (refs, removed), (versions, takers) = now, before
    if tag == 7:
        name, expected = read_name(payload), payload.var()
        need(versions.get(name) == (expected - 1 if expected else None), "a ref is set that moved")
        refs[name] = read_value(payload, number)
    elif tag == 8:
        name, expected = read_name(payload), payload.var()
        need(versions.get(name) == expected, "a ref is removed that moved")
        del refs[name]
    elif tag == 9:
        old, new = payload.owned(), payload.owned()
        for value in [*refs.values(), *(value for _, value in removed.values())]:
            value["map_at"] = new if value["map_at"] == old else value["map_at"]
    elif tag == 14:
        payload.take(16)
        read_attempt(payload)
    elif tag == 15:
        name, version = read_name(payload), payload.var()
        need(versions.get(name) == version, "a value is kept that the name has not")
        if refs.get(name, {}).get("version") == version:
            removed[name, version] = number, dict(refs[name])
    elif tag == 16:
        key, at = (read_name(payload), payload.var()), payload.var()
        need(takers.get(key) == at, "what is forgotten is not kept")
        removed.pop(key, None)
    elif tag == 17:
        read_name(payload), read_labels(payload)
    elif tag == 18:
        name, (manifest, _) = read_name(payload), read_declassified(payload)
        need(name in versions, "a name is declassified that is not there")
    else:
        payload.take(len(payload.data))


def read_manifest(body):
    """Section 9."""
    wire = Wire(body)
    form = wire.fixed(1)
    need(form < 2, "form")
    labels = dict(wire.list(lambda: (wire.text(), wire.text())))
    ids = wire.list(lambda: wire.take(32))
    chunks = [(digest, wire.var(32)) for digest in ids]
    need(all(0 < length <= 16 << 20 for _, length in chunks), "length of a chunk")
    entries, path = [], None
    for _ in range(wire.var()):
        shared = wire.var()
        need(shared <= len(path or b""), "path shares too much")
        after = (path or b"")[:shared] + wire.bytes()
        need(path is None or after > path, "paths are not sorted")
        path = after
        parts = path.split(b"/") if path else []
        need(len(path) <= 4096 and b"\0" not in path and not {b"", b".", b".."} & set(parts), "path")
        entries.append(read_entry(wire, path, chunks))
    wire.finish()
    folders = {entry["path"] for entry in entries if entry["kind"] == 1}
    if form == 1:
        need(len(entries) == 1 and entries[0]["kind"] == 0 and path and b"/" not in path, "single file")
    else:
        need(b"" in folders, "root")
        need(all(e["path"].rpartition(b"/")[0] in folders for e in entries[1:]), "parent is no folder")
    return {"form": form, "labels": labels, "chunks": chunks, "entries": entries}


def read_entry(wire, path, chunks):
    kind = wire.fixed(1)
    entry = {"path": path, "kind": kind, "mode": wire.var(32), "mtime": wire.svar()}
    need(kind < 3 and entry["mode"] <= 0o7777, "kind or mode")
    if kind == 2:
        entry["target"] = wire.bytes()
    if kind == 0:
        entry["size"], entry["cut"] = wire.var(), wire.fixed(1)
        need(1 <= entry["cut"] <= 3, "cut")
        entry["pieces"] = wire.list(lambda: (wire.var(), wire.var(32), wire.var(32)))
        need(all(first + count <= len(chunks) for _, first, count in entry["pieces"]), "piece names no chunk")
        used = sum(hole + sum(length for _, length in chunks[f:f + n]) for hole, f, n in entry["pieces"])
        need(used <= entry["size"], "pieces are longer than their file")
        wire.list(lambda: read_tensor(wire, entry["size"]))
    return entry


def read_tensor(wire, size):
    wire.text(), wire.text()
    shape, start, end = wire.list(wire.var), wire.var(), wire.var()
    need(start <= end <= size, "tensor lies outside its file")
    if wire.flag():
        whole, offsets = [wire.var() for _ in shape], [wire.var() for _ in shape]
        need(all(at + n <= dim for at, n, dim in zip(offsets, shape, whole)), "part lies outside its tensor")


HOPS = {0: 0, 1: 0, 2: 0, 3: 1, 4: 9, 5: 8} | {6 + steps: steps for steps in range(8)}


def read_map(body, version, wanted, manifest):
    """Section 10: for each chunk of the manifest, then each further one, (id, length, pack, offset, stored, codec, base)."""
    wire = Wire(body)
    need(wire.take(32) == wanted, "map of another manifest")
    packs = wire.list(lambda: (wire.owned(), wire.var(), wire.var(32), wire.var(32)))
    count, further = wire.var(), wire.var()
    need(count == len(manifest["chunks"]), "map of another length")
    chunks = manifest["chunks"] + [(wire.take(32), wire.var(32)) for _ in range(further)]
    need(all(0 < length <= 16 << 20 for _, length in chunks), "length of a chunk")
    frames = []
    for digest, length in chunks:
        pack, ordinal, offset, stored = wire.var(32), wire.var(32), wire.var(), wire.var(32)
        codec, base = wire.fixed(1), wire.var(32)
        know(codec in HOPS, "codec")
        need(pack < len(packs), "frame names no pack")
        owned, end, _, held = packs[pack]
        need(offset + stored <= end and ordinal < held, "frame lies outside its pack")
        frames.append((digest, length, owned, offset, stored, codec, base))
    if version == 2:
        need(any([wire.var(32) for *_, base in frames if base]), "map of version 2 without a length")
    wire.finish()
    for *_, codec, base in frames:
        if HOPS[codec] == 0:
            need(base == 0, "base of what needs none")
        else:
            need(0 < base <= len(frames) and HOPS[frames[base - 1][5]] < HOPS[codec], "base that is none")
    return frames


def main(arguments):
    verb, rest = arguments[:1], arguments[1:]
    if verb == ["list"] and len(rest) == 1:
        print("\n".join(sorted(Repository(rest[0]).refs)))
    elif verb == ["facts"] and len(rest) == 2:
        print(json.dumps(Repository(rest[0]).refs[rest[1]]["facts"]))
    elif verb == ["restore"] and len(rest) == 3:
        root, name, dest = rest
        os.makedirs(dest, exist_ok=True)
        repository = Repository(root)
        repository.restore(repository.saved(name), dest)
    elif verb == ["kept"] and len(rest) == 1:
        for (name, version), (at, _) in sorted(Repository(rest[0]).removed.items()):
            print(name, version, at)
    elif verb == ["back"] and len(rest) == 4:
        root, name, version, dest = rest
        os.makedirs(dest, exist_ok=True)
        repository = Repository(root)
        repository.restore(repository.opened(repository.removed[name, int(version)][1]), dest)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
