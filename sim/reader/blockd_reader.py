#!/usr/bin/env python3
"""Reads a blockd pool, written from docs/ON_DISK_FORMAT.md alone.

    blockd_reader.py IMAGE [IMAGE2 ...] info
    blockd_reader.py IMAGE [IMAGE2 ...] volumes
    blockd_reader.py IMAGE [IMAGE2 ...] labels
    blockd_reader.py IMAGE [IMAGE2 ...] read NAME [--out FILE]
    blockd_reader.py IMAGE [IMAGE2 ...] dump DIRECTORY
    blockd_reader.py IMAGE [IMAGE2 ...] check

`read` writes the content of one volume, `dump` lists all and writes that of each to a file of its
name (a name has no slash). `check` verifies what no single page shows: that no extent is used for
two things.

It needs nothing but Python's standard library, and never writes to an image. The delta ring is not
on media, so what is shown is what a loss of power would have left. Exit status: 0 when all is well,
1 with `blockd_reader: ...` on standard error when the pool is refused.
"""

import os
import re
import struct
import sys
import unicodedata
import uuid
from dataclasses import dataclass, field

from checksums import crc_fits, xxh3_64
from superblock import BLOCK, Image, Refused, require, superblocks_of

ENTRIES = 256  # of a leaf
FANOUT = 252  # references of an index page
RECORDS = 15  # of a catalogue page
LEAF, INDEX, CATALOGUE, UNDER, LABELS = 1, 2, 3, 4, 5
MAP, UNMAP, UNMAP_LEAF, CREATE, DELETE, RESIZE, SNAPSHOT, CLONE, ROLLBACK = range(1, 10)
GROUP, RENAME, COMPOSITE = 10, 11, 67
DIRECTIONS = {0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)}
DIRECTIONS = {chr(c) for c in DIRECTIONS}
NAMED = (CREATE, SNAPSHOT, CLONE, RENAME)


# ---- volumes


@dataclass
class Volume:
    id: int
    lineage: int
    origin: int
    block: int
    size: int
    created: int
    kind: int
    name: str
    made: int = 0
    levels: int = 0
    root: tuple = (0, 0)
    labels: dict = field(default_factory=dict)
    # logical extent -> (physical extent, bitmap) of each layer: one, or an overlay and its base
    entries: dict = field(default_factory=dict)


def name_from(data, what):
    try:
        name = data.decode()
    except UnicodeDecodeError:
        raise Refused(f"{what}: its name isn't UTF-8") from None
    good = 1 <= len(data) <= 128 and name not in (".", "..") and not name.startswith("node-")
    good &= "/" not in name and all(unicodedata.category(c) != "Cc" for c in name)
    require(good, f"{what}: bad name {name!r}")
    return name


def good_key(key):
    """Whether a label may have this key."""
    prefix, slash, name = key.rpartition("/")
    part = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
    good = re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", name)
    if slash:
        good = good and len(prefix) <= 253 and re.fullmatch(rf"{part}(\.{part})*", prefix)
    return bool(good)


def labels_from(text, what):
    """The labels on a page, by key."""
    end = text.find(b"\0")
    text, rest = (text[:end], text[end:]) if end >= 0 else (text, b"")
    require(not any(rest), f"{what}: bytes behind the labels")
    try:
        lines = text.decode().split("\n")
    except UnicodeDecodeError:
        raise Refused(f"{what}: labels aren't UTF-8") from None
    require(lines.pop() == "", f"{what}: the last label has no end")
    pairs = [line.partition("=") for line in lines]
    for key, equals, value in pairs:
        require(equals and good_key(key), f"{what}: bad label {key!r}")
        good = len(value.encode()) <= 256 and all(unicodedata.category(c) != "Cc" for c in value)
        good &= not any(c in DIRECTIONS for c in value)
        require(good, f"{what}: bad value of label {key!r}")
    keys = [key for key, _, _ in pairs]
    require(1 <= len(keys) <= 32 and keys == sorted(set(keys)), f"{what}: labels out of order")
    return {key: value for key, _, value in pairs}


class Pool:
    """The state of a pool: that of the checkpoint, with the log applied."""

    def __init__(self, paths):
        self.page_extents = set()
        self.log_blocks = self.pages_read = 0
        self.under_pages = {}  # address -> the leaf page that names it
        self.volumes = {}
        self._choose([Image(path) for path in paths])
        self.places = {}  # of the catalogue -> volume
        self._read_catalogue()
        self.lost_labels = self._read_labels()
        for volume in self.volumes.values():
            self._read_tree(volume)
        self._replay()

    def _choose(self, images):
        copies = [(image, superblocks_of(image)) for image in images]
        for image, found in copies:
            require(found, f"{image.path}: no superblock copy is sound")
        everything = [s for _, found in copies for s in found]
        require(len({s.pool for s in everything}) == 1, "the devices are of different pools")
        newest = max(s.generation for s in everything)
        newest = [s for s in everything if s.generation == newest]
        same = len({s.identity for s in newest}) == 1
        require(same, "superblock copies of one generation differ: two writers were at work")
        self.sb = newest[0]
        roots = {s.labels_root for s in newest}
        require(len(roots - {(0, 0)}) <= 1, "superblock copies of one generation name two label trees")
        if (0, 0) in roots:
            self.sb.labels_root = (0, 0)
        self.copies = len(newest)
        by_uuid = {device.uuid: device for device in self.sb.table}
        for image, found in copies:
            copy = max(found, key=lambda s: s.generation)
            device = by_uuid.get(copy.uuid)
            require(device, f"{image.path}: isn't in the pool's table")
            if not device.present:
                continue
            require(not device.image, f"{image.path}: a device twice")
            stale = copy.generation + 1 < self.sb.generation
            require(not stale, f"{image.path}: stale, of generation {copy.generation}")
            require(image.size >= device.size, f"{image.path}: has shrunk from {device.size} bytes")
            device.image = image
        for i, device in enumerate(self.sb.table):
            require(device.image or not device.present, f"device {i} ({uuid.UUID(bytes=device.uuid)}) is missing")

    def read_extent(self, extent, at, size):
        for device in self.sb.table:
            if device.first <= extent < device.first + device.extents:
                return device.image.read((extent - device.first) * self.sb.extent_size + at, size)
        raise Refused(f"physical extent {extent} isn't on any device")

    # ---- pages

    def page(self, reference, kind, level, index, tree=None):
        """The page a reference leads to, with everything checked that its parent knows of it."""
        address, page_sum = reference
        extent, number = divmod(address, self.sb.pages)
        what = f"page {address} (kind {kind}, level {level}, index {index})"
        block = self.read_extent(extent, number * BLOCK, BLOCK)
        require(block[:4] == b"BDpg", f"{what}: no page is there")
        require(crc_fits(block, 8), f"{what}: CRC doesn't fit")
        require(xxh3_64(block) == page_sum, f"{what}: isn't the one its parent names (sum)")
        has = struct.unpack_from("<BBHxxxxI16sIHHQQQ", block, 4)
        known = (1, 2) if kind == LEAF and self.sb.composite else (1,)
        require(has[2] in known, f"{what}: unknown version {has[2]}")
        require(has[4] == self.sb.pool, f"{what}: of another pool")
        require((has[0], has[1], has[8]) == (kind, level, index), f"{what}: another page")
        require(tree is None or has[3] == tree, f"{what}: of another tree")
        require(has[7] == 0, f"{what}: reserved bytes aren't zero")
        self.page_extents.add(extent)
        self.pages_read += 1
        return block, has[6]

    def bottom(self, root, levels, kind, count, tree=None):
        """Walks down from a root; yields (index, page, entries in use) of each bottom page."""
        require(count <= FANOUT**levels, f"{levels} levels are too few for {count} pages")
        todo = [(root, levels, 0)]
        while todo:
            reference, level, index = todo.pop()
            if reference[0] == 0:
                require(reference[1] == 0, "a reference to no page has a sum")
                continue
            require(index < -(-count // FANOUT**level), "a reference leads beyond the end")
            page, used = self.page(reference, INDEX if level else kind, level, index, tree)
            if level == 0:
                yield index, page, used
                continue
            below = list(struct.iter_unpack("<QQ", page[64:]))
            require(sum(r != (0, 0) for r in below) == used, f"index page {index}: bad count")
            todo += [(r, level - 1, FANOUT * index + i) for i, r in enumerate(below)]

    def _read_catalogue(self):
        sb = self.sb
        count = -(-sb.catalogue_records // RECORDS)
        pages = self.bottom((sb.root, sb.root_sum), sb.catalogue_levels, CATALOGUE, count, 0)
        for index, page, used in pages:
            require(not any(page[3904:]), "catalogue: reserved bytes aren't zero")
            for place in range(RECORDS):
                record = page[64 + 256 * place : 320 + 256 * place]
                if any(record):
                    require(index * RECORDS + place < sb.catalogue_records, "record beyond the end")
                    volume = self._volume(record)
                    self._add(volume)
                    self.places[index * RECORDS + place] = volume
                    used -= 1
            require(used == 0, f"catalogue page {index}: bad count")

    def _read_labels(self):
        """Reads the labels. Returns how many pages of them are damaged: that costs nothing else."""
        places, levels = self.sb.catalogue_records, 1
        while FANOUT**levels < places:
            levels += 1
        todo, lost = [(self.sb.labels_root, levels, 0)], 0
        while todo:
            reference, level, index = todo.pop()
            if reference[0] == 0:
                continue
            try:
                require(index * FANOUT**level < places, "a reference leads beyond the end")
                if level:
                    page, used = self.page(reference, INDEX, level, index, 0)
                    below = list(struct.iter_unpack("<QQ", page[64:]))
                    require(sum(r != (0, 0) for r in below) == used, "index page: bad count")
                    todo += [(r, level - 1, FANOUT * index + i) for i, r in enumerate(below)]
                    continue
                require(index in self.places, f"labels of place {index}, which is empty")
                volume = self.places[index]
                page, used = self.page(reference, LABELS, 0, index, volume.id)
                labels = labels_from(page[64:], f"volume {volume.id}")
                require(len(labels) == used, f"volume {volume.id}: bad count of labels")
                volume.labels = labels
            except Refused:
                lost += 1
        return lost

    def _volume(self, record):
        id, lineage, origin, block, size, created, address, root_sum, kind, levels, length = (
            struct.unpack_from("<IIIIQQQQBBB", record)
        )
        what = f"volume {id}"
        require(1 <= length <= 128, f"{what}: name of {length} bytes")
        require(not any(record[128 + length :]), f"{what}: bytes behind its name")
        if not self.sb.features:
            rest = record[51:56] + record[64:128]
            require(not any(rest), f"{what}: reserved bytes aren't zero, or unknown flags")
        made = int.from_bytes(record[56:64], "little")
        require(made < 1 << 56, f"{what}: made at {made}")
        name = name_from(record[128 : 128 + length], what)
        require(levels <= 4 and kind in (1, 2), f"{what}: kind {kind}, {levels} levels")
        root = (address, root_sum)
        return Volume(id, lineage, origin, block, size, created, kind, name, made, levels, root)

    def _add(self, volume):
        what = f"volume {volume.id}"
        require(volume.id and volume.id not in self.volumes, f"{what}: twice, or 0")
        require(volume.lineage, f"{what}: no lineage")
        good = volume.block in [512 << i for i in range(8)]
        require(good, f"{what}: logical block of {volume.block} bytes")
        self._check_size(volume, volume.size)
        require(all(v.name != volume.name for v in self.volumes.values()), f"{what}: name taken")
        self.volumes[volume.id] = volume

    def _check_size(self, volume, size):
        good = 0 < size <= 1 << 50 and size % volume.block == 0
        require(good, f"volume {volume.id}: bad size {size}")

    def slots(self, volume):
        return -(-volume.size // (ENTRIES * self.sb.extent_size))

    def _read_tree(self, volume):
        what = f"volume {volume.id}"
        if volume.levels == 0:
            require(volume.root == (0, 0), f"{what}: a root without levels")
            return
        for slot, page, used in self.bottom(volume.root, volume.levels, LEAF, self.slots(volume)):
            version, what = page[6], f"volume {volume.id}, leaf {slot}"
            entries = self._entries(what, page, used, range(version + 1))
            overlays = {i for i, entry in entries.items() if entry[0] == 2}
            require((version == 2) == bool(overlays), f"{what}: version {version}")
            bases = self._bases(what, page, slot) if overlays else {}
            require(set(bases) == overlays, f"{what}: its under page has other entries")
            for i, (_, physical, bits) in entries.items():
                self._map(volume, slot * ENTRIES + i, (physical, bits), *bases.get(i, ()))

    def _entries(self, what, page, used, kinds):
        """The entries of a leaf or under page that aren't unmapped, by their place."""
        require(not any(page[3664 if 2 in kinds else 3648 :]), f"{what}: reserved bytes aren't zero")
        entries = {}
        for i, (low, high, kind, bits) in enumerate(struct.iter_unpack("<IBBQ", page[64:3648])):
            require(kind in kinds, f"{what}: entry {i} is of kind {kind}: unsupported")
            require(kind or not (low or high or bits), f"{what}: bad entry {i}")
            if kind:
                entries[i] = (kind, low | high << 32, bits)
        require(len(entries) == used, f"{what}: bad count")
        return entries

    def _bases(self, what, leaf, slot):
        """The bases of a leaf's composite entries, by their place."""
        reference = struct.unpack_from("<QQ", leaf, 3648)
        require(reference[0], f"{what}: no under page")
        address = reference[0]
        parent = self.under_pages.setdefault(address, leaf)
        require(parent == leaf, f"under page {address}: two parents")
        page, used = self.page(reference, UNDER, 0, slot)
        entries = self._entries(f"{what}, under page", page, used, (0, 1))
        return {i: [(physical, bits)] for i, (_, physical, bits) in entries.items()}

    def valid(self, volume, extent):
        """The bits of the sub-blocks that begin within the volume."""
        left = volume.size - extent * self.sb.extent_size
        whole = self.sb.extent_size // self.sb.sub_block
        return (1 << max(0, min(whole, -(-left // self.sb.sub_block)))) - 1

    def _map(self, volume, extent, *layers):
        where = f"volume {volume.id}, extent {extent}"
        require(extent * self.sb.extent_size < volume.size, f"{where}: beyond the volume's size")
        for physical, bits in layers:
            require(bits & ~self.valid(volume, extent) == 0, f"{where}: bits beyond the end")
            on = any(d.first < physical < d.first + d.extents - 1 for d in self.sb.table)
            require(on, f"{where}: physical extent {physical} can't hold data")
        require(len({p for p, _ in layers}) == len(layers), f"{where}: overlay and base are one")
        volume.entries[extent] = layers

    # ---- log

    def _replay(self):
        sb, blocks = self.sb, self.sb.wal_extents * self.sb.pages
        log = self.read_extent(sb.wal_start, 0, blocks * BLOCK)
        places = [log[BLOCK * i : BLOCK * (i + 1)] for i in range(blocks)]
        sequence, before, epoch, lsn = sb.tail_sequence, sb.tail_hash, 0, 0
        while self.log_blocks < blocks:
            block = places[sequence % blocks]
            head = self._log_head(block)
            if not head or (head[3], head[5]) != (sequence, before) or head[0] < epoch:
                break
            epoch = head[0]
            require(epoch <= sb.epoch, f"log block {sequence}: of a later epoch, {epoch}")
            require(head[2] == 1, f"log block {sequence}: unknown version {head[2]}")
            lsn = self._apply_block(block, head, sequence, lsn)
            sequence, before = sequence + 1, xxh3_64(block)
            self.log_blocks += 1
        for place, block in enumerate(places):
            found = int.from_bytes(block[40:48], "little")
            if not (sequence < found < sequence + blocks and found % blocks == place):
                continue
            head = self._log_head(block)
            if head and head[1] & 0x8000 and epoch <= head[0] <= sb.epoch:
                raise Refused(f"log block {sequence} is damaged: block {found} was written behind it")

    def _log_head(self, block):
        """(epoch, units, version, sequence, base LSN, sum before), or None if it isn't a block."""
        if block[:4] != b"BDwl" or block[8:24] != self.sb.pool or not crc_fits(block, 4):
            return None
        return struct.unpack_from("<QxxxxHHQQQ", block, 24)

    def _apply_block(self, block, head, sequence, lsn):
        what, units, base = f"log block {sequence}", head[1] & 0x7FFF, head[4]
        require(1 <= units <= 126, f"{what}: {units} units")
        require(not any(block[64 + 32 * units :]), f"{what}: bytes behind its units")
        at = 0
        while at < units:
            unit = block[64 + 32 * at : 96 + 32 * at]
            kind, length, delta, volume, a, b, c = struct.unpack("<BBHIQQQ", unit)
            known = 1 <= kind <= 11 or kind == COMPOSITE and self.sb.composite
            require(known or not 12 <= kind <= 127, f"{what}: kind {kind} is unsupported")
            require(known and volume, f"{what}: unsound record")
            require(at or delta == 0, f"{what}: its first LSN isn't its base")
            require(base + delta > lsn, f"{what}: LSNs don't rise")
            lsn = base + delta
            require(length >= 1 and at + length <= units, f"{what}: unsound length")
            further = []
            for j in range(1, length):
                more = block[64 + 32 * (at + j) : 96 + 32 * (at + j)]
                require(more[:8] == bytes([255, j]) + unit[2:8], f"{what}: unsound further unit")
                further.append(more[8:])
            for record in self._single(what, further, kind, volume, a, b, c):
                if lsn > self.sb.checkpoint_lsn:
                    self._apply(f"record {lsn}", lsn, *record)
            at += length
        return lsn

    def _single(self, what, further, kind, volume, a, b, c):
        """The record with its name, or with the base of a composite entry; for a group one like it
        for each of its snapshots."""
        made = c >> 8
        if kind == COMPOSITE:
            require(len(further) == 1, f"{what}: unsound length")
            base, bits, zero = struct.unpack("<QQQ", further[0])
            require(not zero, f"{what}: unused fields aren't zero")
            return [(kind, volume, a, b, c, (base, bits), 0)]
        if kind != GROUP:
            name = self._name(what, further, c & 255) if kind in NAMED else b""
            require(not further, f"{what}: unsound length")
            return [(kind, volume, a, b, c, name, made)]
        require(2 <= a <= 16 and not b and not c & 255, f"{what}: unsound group")
        records = []
        for id in range(volume, volume + a):
            require(further, f"{what}: unsound length")
            source, zero, length = struct.unpack("<QQQ", further.pop(0))
            name = self._name(what, further, length)
            records.append((SNAPSHOT, id, source, zero, length, name, made))
        require(not further, f"{what}: unsound length")
        return records

    def _name(self, what, further, length):
        """Takes a name of `length` bytes off the further units."""
        count = -(-length // 24)
        require(1 <= count <= len(further), f"{what}: unsound length")
        name = b"".join(further[:count])
        del further[:count]
        require(not any(name[length:]), f"{what}: bytes behind a name")
        return name_from(name[:length], what)

    def _apply(self, what, lsn, kind, id, a, b, c, name, made):
        unused = {MAP: (), COMPOSITE: (), CREATE: (), CLONE: (), SNAPSHOT: (b,), DELETE: (a, b, c)}
        unused[RENAME] = (a, b, made)
        unused[ROLLBACK] = (c,)
        require(not any(unused.get(kind, (b, c))), f"{what}: unused fields aren't zero")
        if kind == CREATE:
            return self._add(Volume(id, id, 0, b, a, lsn, 1, name, made))
        other = self.volumes.get(a if kind in (SNAPSHOT, CLONE, ROLLBACK) else id)
        require(other, f"{what}: its volume doesn't exist")
        if kind in (SNAPSHOT, CLONE):
            size, new = (other.size, 2) if kind == SNAPSHOT else (b, 1)
            require(size >= other.size, f"{what}: a clone smaller than its source")
            copy = Volume(id, other.lineage, a, other.block, size, lsn, new, name, made)
            copy.entries = dict(other.entries)
            return self._add(copy)
        volume = self.volumes.get(id)
        require(volume, f"{what}: volume {id} doesn't exist")
        # Data of a snapshot may have been moved.
        allowed = kind in (DELETE, RENAME, MAP, COMPOSITE, UNMAP)
        require(allowed or volume.kind == 1, f"{what}: changes a snapshot")
        if kind == MAP:
            self._map(volume, a, (b, c))
        elif kind == COMPOSITE:
            self._map(volume, a, (b, c), name)
        elif kind == UNMAP:
            volume.entries.pop(a, None)
        elif kind == UNMAP_LEAF:
            for extent in range(a * ENTRIES, (a + 1) * ENTRIES):
                volume.entries.pop(extent, None)
        elif kind == DELETE:
            del self.volumes[id]
        elif kind == RENAME:
            taken = any(v.name == name for v in self.volumes.values())
            require(not taken, f"{what}: name taken")
            volume.name = name
        elif kind == RESIZE:
            self._check_size(volume, a)
            volume.size = a
            for extent, layers in list(volume.entries.items()):
                mask = self.valid(volume, extent)
                layers = tuple((physical, bits & mask) for physical, bits in layers)
                if len(layers) == 2 and layers[1][1] & ~layers[0][1] == 0:
                    layers = layers[:1]
                volume.entries[extent] = layers
                if not any(bits for _, bits in layers):
                    del volume.entries[extent]
        else:
            require(other.kind == 2, f"{what}: rollback to a volume that isn't a snapshot")
            if b:
                self._check_size(volume, b)
                require(b >= other.size, f"{what}: a size below the snapshot's")
            volume.size, volume.entries = b or other.size, dict(other.entries)

    # ---- queries of a pool

    def contents(self, volume):
        """Yields (byte of the volume, bytes) of everything that may not be zero, in order."""
        size, sub = self.sb.extent_size, self.sb.sub_block
        for extent, layers in sorted(volume.entries.items()):
            for i in range(size // sub):
                at = extent * size + i * sub
                physical = next((p for p, bits in layers if bits >> i & 1), None)
                if physical is not None:
                    yield at, self.read_extent(physical, i * sub, min(sub, volume.size - at))

    def check(self):
        """Checks the users of all extents across pages. Returns the number of free extents."""
        sb, taken = self.sb, {}
        for device in sb.table:
            taken |= {device.first: "superblock", device.first + device.extents - 1: "superblock"}
        for extent in range(sb.wal_start, sb.wal_start + sb.wal_extents):
            taken[extent] = "log"
        for extent in self.page_extents:
            require(extent not in taken, f"extent {extent}: pages and {taken.get(extent)}")
            taken[extent] = "pages"
        for extent in range(sb.reserve_start, sb.reserve_start + sb.reserve_extents):
            taken.setdefault(extent, "reserve")
        for volume in self.volumes.values():
            require(volume.id < sb.next_id or volume.created > sb.checkpoint_lsn, "bad next id")
            seen = set()
            for extent, layers in volume.entries.items():
                owner = f"extent {extent} of lineage {volume.lineage}"
                for physical, _ in layers:
                    require(physical not in seen, f"volume {volume.id}: extent {physical} twice")
                    seen.add(physical)
                    other = taken.setdefault(physical, owner)
                    require(other == owner, f"extent {physical}: {owner} and {other}")
        return sum(device.extents for device in sb.table) - len(taken)


# ---- commands


def write_out(pool, volume, path):
    with open(path, "wb") if path else os.fdopen(1, "wb", closefd=False) as out:
        position = 0
        for at, data in list(pool.contents(volume)) + [(volume.size, b"")]:
            while position < at and not path:
                position += out.write(bytes(min(at - position, 1 << 20)))
            if path:
                out.seek(at)
            out.write(data)
            position = at + len(data)
        if path:
            out.truncate(volume.size)


def show_info(pool):
    sb = pool.sb
    print(f"pool {uuid.UUID(bytes=sb.pool)}, version {sb.major}.{sb.minor}, {'clean' if sb.clean else 'dirty'}")
    print(f"extents of {sb.extent_size} bytes, sub-blocks of {sb.sub_block}")
    print(f"generation {sb.generation} ({pool.copies} copies), epoch {sb.epoch}, checkpoint {sb.checkpoint_lsn}")
    print(f"{pool.pages_read} pages read, {pool.log_blocks} blocks of the log from {sb.tail_sequence}")
    for i, device in enumerate(sb.table):
        if not device.present:
            print(f"device {i}: has left the pool")
            continue
        print(f"device {i}: {device.image.path}, {uuid.UUID(bytes=device.uuid)},"
              f" extents {device.first} to {device.first + device.extents - 1}")


def show_volumes(pool):
    for _, v in sorted(pool.volumes.items()):
        kind = "snapshot" if v.kind == 2 else "volume"
        print(f"{v.id}\t{kind}\t{v.size}\t{v.block}\t{v.origin}\t{v.lineage}\t{len(v.entries)}\t{v.made}\t{v.name}")


def show_labels(pool):
    for _, v in sorted(pool.volumes.items()):
        for key, value in v.labels.items():
            print(f"{v.name}\t{key}={value}")
    print(f"{pool.lost_labels} pages of labels are damaged")


def main(arguments):
    operands = {"info": (0,), "volumes": (0,), "labels": (0,), "read": (1, 3), "dump": (1,), "check": (0,)}
    at = next((i for i, a in enumerate(arguments) if a in operands), 0)
    images, command, *rest = arguments[:at], *(arguments[at:] or [None])
    if not images or len(rest) not in operands[command] or rest[1:2] not in ([], ["--out"]):
        sys.exit(__doc__)
    try:
        pool = Pool(images)
        if command in ("info", "check"):
            show_info(pool)
        if command in ("volumes", "dump"):
            show_volumes(pool)
        if command == "labels":
            show_labels(pool)
        if command == "check":
            print(f"ok: {len(pool.volumes)} volumes, {pool.check()} extents free")
        if command == "dump":
            for volume in pool.volumes.values():
                write_out(pool, volume, os.path.join(rest[0], volume.name))
        if command == "read":
            named = [v for v in pool.volumes.values() if v.name == rest[0]]
            require(named, f"no volume is called {rest[0]!r}")
            write_out(pool, named[0], rest[2] if rest[1:] else None)
    except (Refused, OSError) as why:
        sys.exit(f"blockd_reader: {why}")


if __name__ == "__main__":
    main(sys.argv[1:])
