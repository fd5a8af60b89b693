"""The two checksums of blockd's format, in plain Python."""

import struct

MASK = (1 << 64) - 1


def _crc_table():
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        yield byte


CRC_TABLE = list(_crc_table())


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC_TABLE[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def crc_fits(block, at):
    """Whether the CRC at offset `at` fits the block, with its own four bytes taken as zero."""
    return crc32c(block[:at] + bytes(4) + block[at + 4 :]) == struct.unpack_from("<I", block, at)[0]


SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
P32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
P64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
STRIPE_KEYS = [struct.unpack_from("<8Q", SECRET, 8 * i) for i in range(16)]
SCRAMBLE_KEYS = struct.unpack_from("<8Q", SECRET, 128)
LAST_KEYS = struct.unpack_from("<8Q", SECRET, 121)
MERGE_KEYS = struct.unpack_from("<8Q", SECRET, 11)


def _accumulate(acc, data, at, keys):
    for i, value in enumerate(struct.unpack_from("<8Q", data, at)):
        key = value ^ keys[i]
        acc[i ^ 1] += value
        acc[i] += (key & 0xFFFFFFFF) * (key >> 32)


def xxh3_64(data):
    """XXH3, 64 bits, seed 0, default secret, for more than 240 bytes: all that a reader needs."""
    assert len(data) > 240
    acc = [P32[2], P64[0], P64[1], P64[2], P64[3], P32[1], P64[4], P32[0]]
    stripes = (len(data) - 1) // 64
    for n in range(stripes):
        _accumulate(acc, data, 64 * n, STRIPE_KEYS[n % 16])
        if n % 16 == 15:
            for i in range(8):
                a = acc[i] & MASK
                acc[i] = (a ^ a >> 47 ^ SCRAMBLE_KEYS[i]) * P32[0] & MASK
    _accumulate(acc, data, len(data) - 64, LAST_KEYS)
    result = len(data) * P64[0]
    for i in range(0, 8, 2):
        product = (acc[i] & MASK ^ MERGE_KEYS[i]) * (acc[i + 1] & MASK ^ MERGE_KEYS[i + 1])
        result += product & MASK ^ product >> 64
    result &= MASK
    result = (result ^ result >> 37) * 0x165667919E3779F9 & MASK
    return result ^ result >> 32
