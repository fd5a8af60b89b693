//! Images that virtual machines see as a device of persistent memory, with a file system on it.
//!
//! Such an image is a file that is given to the machine as an NVDIMM without labels. Its front lets
//! the kernel make an `fsdax` namespace of it by itself: a superblock of `nd_pfn` that says where
//! the data begins. For the host there is a partition table before that, by which tools find the
//! file system. In the machine `/dev/pmem0` is the file system itself; with a partition table
//! inside of the data, `/dev/pmem0p1` is.
#![forbid(unsafe_code)]

pub mod options;
mod pfn;
mod table;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

pub use self::options::Options;
use self::table::{SECTOR, Table};

/// Bytes before the data: partition table and superblock. Also the alignment of everything, so that
/// a page of 2 MiB in the machine is one on the host.
pub const FRONT: u64 = 2 << 20;

/// The smallest image: nothing smaller holds a file system worth the name.
pub const SMALLEST: u64 = 16 << 20;

/// An image's form.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Image {
    /// Bytes of the file, a multiple of [`FRONT`].
    size: u64,
    /// Whether the machine's device has a partition table.
    has_table: bool,
}

impl Image {
    /// Returns the largest image that fits into `bytes`; `None` when that is too small for an
    /// image.
    #[must_use]
    pub const fn within(bytes: u64, has_table: bool) -> Option<Self> {
        let size = bytes - bytes % FRONT;
        if size < SMALLEST { None } else { Some(Self { size, has_table }) }
    }

    /// Bytes of the file.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// Where the file system begins in the file.
    #[must_use]
    pub const fn file_system(&self) -> u64 {
        if self.has_table { FRONT + FRONT } else { FRONT }
    }

    /// Bytes of the file system.
    #[must_use]
    pub const fn file_system_bytes(&self) -> u64 {
        self.size - self.file_system()
    }

    /// Writes such an image to a file. The area of the file system is left unchanged; holes stay
    /// holes.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, file: &File) -> io::Result<()> {
        if file.metadata()?.len() != self.size {
            file.set_len(self.size)?;
        }
        file.write_all_at(&Table::new(FRONT, self.size - FRONT).encode(), 0)?;
        file.write_all_at(&pfn::encode(FRONT), pfn::AT)?;
        if self.has_table {
            let inside = Table::new(FRONT, self.size - 2 * FRONT);
            file.write_all_at(&inside.encode(), FRONT)?;
        }
        file.sync_all()
    }

    /// Reads the image from a file. The error says why the file is not an image.
    ///
    /// # Errors
    /// The file cannot be read, or is not an image of this driver.
    pub fn read(file: &File) -> io::Result<Self> {
        let bad = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
        let size = file.metadata()?.len();
        if size < SMALLEST || size % FRONT != 0 {
            return Err(bad("its size is none of an image"));
        }
        let mut sector = [0; SECTOR];
        file.read_exact_at(&mut sector, 0)?;
        if Table::decode(&sector) != Some(Table::new(FRONT, size - FRONT)) {
            return Err(bad("its partition table is none of an image"));
        }
        let mut block = [0; pfn::BYTES];
        file.read_exact_at(&mut block, pfn::AT)?;
        if pfn::decode(&block) != Some(FRONT) {
            return Err(bad("its superblock is damaged, or none of an image"));
        }
        file.read_exact_at(&mut sector, FRONT)?;
        let inside = Table::new(FRONT, size - 2 * FRONT);
        Ok(Self { size, has_table: Table::decode(&sector) == Some(inside) })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// A file that is gone when it is closed.
    fn file() -> File {
        let name = format!("csi-kata-{}-{:?}", std::process::id(), std::thread::current().id());
        let path = std::env::temp_dir().join(name);
        let mut options = std::fs::OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        file
    }

    fn at(file: &File, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        file.read_exact_at(&mut bytes, at).unwrap();
        bytes
    }

    fn number(bytes: &[u8]) -> u64 {
        bytes.iter().rev().fold(0, |number, &byte| number * 256 + u64::from(byte))
    }

    /// Row P26: each byte of the front, by the descriptions of the formats.
    ///
    /// Row: P26.
    #[test]
    fn an_image_is_a_partition_table_a_superblock_and_room() {
        let file = file();
        let image = Image::within(256 * MIB, false).unwrap();
        image.write(&file).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 256 * MIB);
        let front = at(&file, 0, usize::try_from(FRONT).unwrap());
        // The partition: not active, Linux, from sector 4096 to the end.
        let entry = &front[446..462];
        assert_eq!((entry[0], entry[4]), (0, 0x83));
        assert_eq!(number(&entry[8..12]), 4096);
        assert_eq!(number(&entry[12..16]), 254 * MIB / 512);
        assert_eq!(&front[510..512], &[0x55, 0xaa]);
        assert!(front[..446].iter().chain(&front[462..510]).all(|&byte| byte == 0));
        // The superblock.
        let block = &front[4096..8192];
        assert_eq!(&block[..16], b"NVDIMM_PFN_INFO\0");
        assert!(block[16..48].iter().all(|&byte| byte == 0), "no ids");
        assert_eq!(number(&block[48..52]), 0, "flags");
        assert_eq!((number(&block[52..54]), number(&block[54..56])), (0, 2), "version");
        assert_eq!(number(&block[56..64]), FRONT, "data");
        assert_eq!(number(&block[64..72]), 0, "pages");
        assert_eq!(number(&block[72..76]), 1, "mode RAM");
        assert_eq!((number(&block[76..80]), number(&block[80..84])), (0, 0), "nothing cut off");
        assert_eq!(number(&block[84..88]), FRONT, "alignment");
        assert!(block[88..4088].iter().all(|&byte| byte == 0));
        // Fletcher-64, by sums that can't overflow.
        let (mut low, mut high) = (0_u128, 0_u128);
        for word in block[..4088].chunks(4) {
            low += u128::from(number(word));
            high += low % (1 << 32);
        }
        // The checksum's own words count as zeroes.
        high += 2 * (low % (1 << 32));
        let sum = ((high % (1 << 32)) << 32) + low % (1 << 32);
        assert_eq!(u128::from(number(&block[4088..])), sum);
        // Nothing else.
        let rest = front[512..4096].iter().chain(&front[8192..]);
        assert!(rest.copied().all(|byte| byte == 0));
        assert!(at(&file, FRONT, 4096).iter().all(|&byte| byte == 0));
        // And nothing of the rest was written.
        assert!(file.metadata().unwrap().blocks() * 512 < MIB);
        assert_eq!((image.file_system(), image.file_system_bytes()), (FRONT, 254 * MIB));
    }

    /// Row: P28.
    #[test]
    fn a_partition_table_inside_is_an_option() {
        let file = file();
        let image = Image::within(64 * MIB, true).unwrap();
        image.write(&file).unwrap();
        let inside = at(&file, FRONT, 512);
        let entry = &inside[446..462];
        // As the machine counts, from where its device begins.
        assert_eq!((entry[4], number(&entry[8..12])), (0x83, 4096));
        assert_eq!(number(&entry[12..16]), 60 * MIB / 512);
        assert_eq!(&inside[510..], &[0x55, 0xaa]);
        assert_eq!((image.file_system(), image.file_system_bytes()), (4 * MIB, 60 * MIB));
        assert_eq!(Image::read(&file).unwrap(), image);
    }

    #[test]
    fn an_image_is_read_back_and_a_changed_one_is_refused() {
        let file = file();
        let image = Image::within(32 * MIB, false).unwrap();
        image.write(&file).unwrap();
        // The content of the file system does not matter.
        file.write_all_at(&[0xff; 4096], FRONT).unwrap();
        assert_eq!(Image::read(&file).unwrap(), image);
        for place in [446 + 8, 446 + 12, 511, 4096, 4096 + 16, 4096 + 57, 4096 + 4000, 8191] {
            let before = at(&file, place, 1);
            file.write_all_at(&[before[0] ^ 1], place).unwrap();
            assert!(Image::read(&file).is_err(), "{place}");
            file.write_all_at(&before, place).unwrap();
        }
        file.set_len(34 * MIB).unwrap();
        assert!(Image::read(&file).is_err());
        // Rewriting the front keeps the content.
        image.write(&file).unwrap();
        assert_eq!(Image::read(&file).unwrap(), image);
        assert_eq!(at(&file, FRONT, 4096), [0xff; 4096]);
    }

    #[test]
    fn sizes_are_rounded_down_to_whole_pages_and_tables_end_where_they_can() {
        assert_eq!(Image::within(SMALLEST - 1, false), None);
        let of = |bytes| Image::within(bytes, false).unwrap().size();
        assert_eq!((of(SMALLEST), of(SMALLEST + FRONT - 1)), (SMALLEST, SMALLEST));
        let file = file();
        // Beyond 2 TiB such a table can't count; the machine does not need it.
        let image = Image::within(3 << 40, false).unwrap();
        if image.write(&file).is_ok() {
            assert_eq!(number(&at(&file, 446 + 12, 4)), u64::from(u32::MAX));
            assert_eq!(Image::read(&file).unwrap(), image);
        }
    }
}
