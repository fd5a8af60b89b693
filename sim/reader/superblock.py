"""The devices of a pool, and the superblock copies on them."""

import os
import struct
from dataclasses import dataclass

from checksums import crc_fits

BLOCK = 4096
IN_USE, LEAVING, REMOVED, SHRINKING = range(4)
EXTENT_SIZES = [65536 << i for i in range(5)]


class Refused(Exception):
    """Why the pool can't be read."""


class Unknown(Refused):
    """A version or feature that this reader doesn't know."""


def require(condition, message, error=Refused):
    if not condition:
        raise error(message)


class Image:
    """One file or device that is part of a pool."""

    def __init__(self, path):
        self.path = path
        self.file = open(path, "rb")
        self.size = self.file.seek(0, os.SEEK_END)

    def read(self, at, size):
        self.file.seek(at)
        data = self.file.read(size)
        require(len(data) == size, f"{self.path}: ends before byte {at + size}")
        return data


@dataclass
class Device:
    uuid: bytes
    size: int
    first: int
    extents: int
    sector: int
    state: int
    keeps: int
    image: Image = None

    @property
    def present(self):
        return self.state != REMOVED

    @property
    def lasting(self):
        """The extents that it has, or keeps."""
        return self.keeps if self.state == SHRINKING else self.extents


class Superblock:
    FIELDS = (
        "magic crc major minor compat ro_compat incompat pool node extent_size epoch generation"
        " before clean this_device devices catalogue_levels reserved open_id boot_id wal_start"
        " wal_extents catalogue_records tail_sequence tail_hash checkpoint_lsn root root_sum"
        " reserve_start reserve_extents next_id"
    ).split()
    LAYOUT = struct.Struct("<8sIHHQQQ16sIIQQQBBBBIQ16sQIIQQQQQQII")

    def __init__(self, block):
        self.block = block
        for name, value in zip(self.FIELDS, self.LAYOUT.unpack_from(block)):
            setattr(self, name, value)
        version, bits = f"{self.major}.{self.minor}", self.incompat
        require(self.major == 1, f"unknown version {version}", Unknown)
        require(bits & ~3 == 0, f"version {version}, unknown incompat bits {bits:#x}", Unknown)
        self.composite = bits & 1 == 1
        self.features = self.compat | self.ro_compat
        self.labels_root = struct.unpack_from("<QQ", block, 192) if self.compat & 4 else (0, 0)
        if not self.features:
            unused = block[92:96] + block[192:512] + block[512 + 64 * self.devices :]
            for at in range(512, 512 + 64 * self.devices, 64):
                unused += block[at + 46 : at + 48] + block[at + 56 : at + 64]
            require(not any(unused), "superblock: reserved bytes aren't zero")
        require(self.extent_size in EXTENT_SIZES, f"superblock: extent size {self.extent_size}")
        require(1 <= self.devices <= 16, f"superblock: {self.devices} devices")
        require(self.this_device < self.devices, "superblock: this device isn't in the table")
        require(self.clean <= 1 and self.wal_extents >= 1, "superblock: bad clean or wal_extents")
        self.table = [self._device(512 + 64 * i) for i in range(self.devices)]
        self.sub_block = max(4096, self.extent_size // 64)
        self.pages = self.extent_size // BLOCK
        self._check_table()

    def _device(self, at):
        return Device(*struct.unpack_from("<16sQQQIxB2xQ", self.block, at))

    def _check_table(self):
        end = 0
        states = [device.state for device in self.table]
        known = states[0] in (IN_USE, SHRINKING) and max(states) <= SHRINKING
        known &= states.count(LEAVING) + states.count(SHRINKING) <= 1
        known &= any(states) == (self.incompat & 2 != 0)
        require(known, f"superblock: states of devices {states}")
        for i, device in enumerate(self.table):
            if not device.present:
                none = device.size == device.extents == 0 and device.first >= end
                require(none, f"superblock: bad removed device {i} in the table")
                continue
            good = 3 <= device.extents <= device.size // self.extent_size
            if device.state == SHRINKING:
                good &= 3 <= device.keeps < device.extents
            else:
                good &= device.keeps == 0
            good &= device.sector in (512, 1024, 2048, 4096)
            good &= device.first >= end if i else device.first == 0
            end = device.first + device.extents
            require(good and end <= 1 << 40, f"superblock: bad device {i} in the table")
        require(len({d.uuid for d in self.table}) == self.devices, "superblock: UUID twice")
        runs = [("log", self.wal_start, self.wal_extents, self.table[:1])]
        if self.reserve_extents:
            runs.append(("reserve", self.reserve_start, self.reserve_extents, self.table))
        for what, start, extents, devices in runs:
            inside = [d.first < start and start + extents < d.first + d.lasting for d in devices]
            require(any(inside), f"superblock: the {what} isn't within a device")

    @property
    def identity(self):
        """All that is equal in the copies of one generation, but for the labels."""
        block = self.block
        return block[:8] + block[12:89] + block[90:192] + block[208 if self.compat & 4 else 192 :]

    @property
    def uuid(self):
        return self.table[self.this_device].uuid


def superblock_at(image, at):
    """The copy there, or None if it isn't sound; refuses one that is of an unknown version."""
    if at + BLOCK > image.size:
        return None
    block = image.read(at, BLOCK)
    if block[:8] != b"BLOCKDsb" or not crc_fits(block, 8):
        return None
    try:
        return Superblock(block)
    except Unknown as why:
        raise Refused(f"{image.path}: copy at byte {at}: {why}") from None
    except Refused:
        return None


def superblocks_of(image):
    """The sound copies on one device."""
    found = [s for s in (superblock_at(image, 0), superblock_at(image, BLOCK)) if s]
    if found:
        ends = {(s.table[s.this_device].extents - 1) * s.extent_size for s in found}
    else:
        ends = {(image.size // size - 1) * size for size in EXTENT_SIZES if size <= image.size}
    for end in ends:
        for at in (end, end + BLOCK):
            copy = superblock_at(image, at)
            # User data may look like a superblock: a real one lies at the offset that it names.
            if copy and (copy.table[copy.this_device].extents - 1) * copy.extent_size == end:
                found.append(copy)
    return found
