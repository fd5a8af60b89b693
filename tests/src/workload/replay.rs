//! The log of device-mapper's `log-writes`, read by its description: a superblock, then each write
//! as it was completed, with its data behind it.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};

const MAGIC: u64 = 0x006a_7366_7773_6872;
const VERSION: u64 = 1;
const FLUSH: u64 = 1 << 0;
const FUA: u64 = 1 << 1;
const DISCARD: u64 = 1 << 2;
const MARK: u64 = 1 << 3;

/// Words of an entry's header.
const HEADER: u64 = 32;

/// One write, discard, flush or mark.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Bytes.
    offset: u64,
    len: u64,
    flags: u64,
    /// Where its data lies in the log.
    data: u64,
    /// The text of a mark.
    pub mark: Option<String>,
}

impl Entry {
    /// The bytes of the disk that it concerns.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.len
    }

    /// The range is discarded, and there is no data.
    #[must_use]
    pub fn is_discard(&self) -> bool {
        self.flags & DISCARD != 0
    }

    /// All that was completed before it is durable.
    #[must_use]
    pub fn is_flush(&self) -> bool {
        self.flags & (FLUSH | FUA) != 0
    }
}

/// A log.
#[derive(Debug)]
pub struct Log {
    file: File,
    pub entries: Vec<Entry>,
}

impl Log {
    /// Reads all entries.
    ///
    /// # Errors
    /// When it is none, or ends too early.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
        let word = |at: u64| -> Result<u64> {
            let mut bytes = [0; 8];
            file.read_exact_at(&mut bytes, at).context("the log ends too early")?;
            Ok(u64::from_le_bytes(bytes))
        };
        let (magic, version, count) = (word(0)?, word(8)?, word(16)?);
        let sector = word(24)? & 0xffff_ffff;
        ensure!(magic == MAGIC && version == VERSION, "no log of writes: {magic:#x} {version}");
        ensure!(sector.is_power_of_two() && sector >= 512, "a log with sectors of {sector}");
        let mut entries = Vec::new();
        let mut at = sector;
        for _ in 0..count {
            let [first, sectors, flags, text] =
                [word(at)?, word(at + 8)?, word(at + 16)?, word(at + 24)?];
            ensure!(text <= sector - HEADER, "a mark of {text} bytes");
            let mut mark = None;
            if flags & MARK != 0 {
                let mut bytes = vec![0; usize::try_from(text)?];
                file.read_exact_at(&mut bytes, at + HEADER)?;
                let text = String::from_utf8_lossy(&bytes);
                mark = Some(text.trim_end_matches('\0').to_owned());
            }
            let (offset, len) = (first * sector, sectors * sector);
            entries.push(Entry { offset, len, flags, data: at + sector, mark });
            at += sector + if flags & DISCARD == 0 { len } else { 0 };
        }
        Ok(Self { file, entries })
    }

    /// The bytes that an entry leaves in its range: zeroes where it discards.
    ///
    /// # Errors
    /// When reading fails.
    pub fn data(&self, entry: &Entry) -> Result<Vec<u8>> {
        let mut data = vec![0; usize::try_from(entry.len)?];
        if !entry.is_discard() {
            self.file.read_exact_at(&mut data, entry.data).context("the data of an entry")?;
        }
        Ok(data)
    }

    /// Does to an image what an entry did.
    ///
    /// # Errors
    /// When reading or writing fails.
    pub fn apply(&self, entry: &Entry, image: &File) -> Result<()> {
        image.write_all_at(&self.data(entry)?, entry.offset).context("writing the image")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockd_testkit::folder::Folder;

    #[test]
    fn a_log_is_replayed_as_it_was_written() {
        let folder = Folder::new("replay").unwrap();
        let (log, image) = (folder.path().join("log"), folder.path().join("image"));
        let sector = |words: &[u64], text: &[u8]| {
            let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            bytes.extend(text);
            bytes.resize(512, 0);
            bytes
        };
        let parts = [
            sector(&[MAGIC, VERSION, 4, 512], &[]),
            sector(&[2, 1, 0, 0], &[]),
            vec![7; 512],
            sector(&[0, 0, MARK, 4], b"here"),
            sector(&[1, 2, DISCARD, 0], &[]),
            sector(&[0, 1, FLUSH, 0], &[]),
            vec![9; 512],
        ];
        std::fs::write(&log, parts.concat()).unwrap();
        std::fs::write(&image, [1; 2048]).unwrap();
        let log = Log::open(&log).unwrap();
        let file = File::options().write(true).open(&image).unwrap();
        let seen = |count: usize| {
            for entry in &log.entries[..count] {
                log.apply(entry, &file).unwrap();
            }
            let bytes = std::fs::read(&image).unwrap();
            bytes.chunks(512).map(|sector| sector[0]).collect::<Vec<_>>()
        };
        assert_eq!(seen(1), [1, 1, 7, 1]);
        assert_eq!(log.entries[1].mark.as_deref(), Some("here"));
        assert_eq!(seen(4), [9, 0, 0, 1]);
        let flushes: Vec<bool> = log.entries.iter().map(Entry::is_flush).collect();
        assert_eq!(flushes, [false, false, false, true]);
    }
}
