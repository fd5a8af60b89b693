//! Making an incremental backup.

use std::io::{self, Write};

use xxhash_rust::xxh3::Xxh3;

use super::{COMPRESSED, DATA, END, Header, MAX_DATA_BYTES, ZEROES, head};

/// Levels of compression: those of zstd that need no more memory than any machine has.
pub(crate) const LEVELS: std::ops::RangeInclusive<i32> = 1..=19;

/// Writes a file from its beginning to its end.
pub(crate) struct Writer<W> {
    out: W,
    /// The checksum of the whole file, boxed because it is large.
    whole: Box<Xxh3>,
    record_count: u64,
    data_bytes: u64,
    /// Absent: data is written as it is.
    compressor: Option<zstd::bulk::Compressor<'static>>,
}

impl<W: Write> Writer<W> {
    /// Writes the header.
    pub(crate) fn begin(out: W, header: &Header) -> io::Result<Self> {
        let whole = Box::new(Xxh3::new());
        let mut writer = Self { out, whole, record_count: 0, data_bytes: 0, compressor: None };
        writer.put(&header.encode())?;
        Ok(writer)
    }

    /// The same, and data is compressed at this level of zstd where that makes it shorter. The
    /// header has to allow it.
    pub(crate) fn compressing(self, level: i32) -> io::Result<Self> {
        Ok(Self { compressor: Some(zstd::bulk::Compressor::new(level)?), ..self })
    }

    /// Writes the snapshot's data at `offset`, behind all earlier records.
    pub(crate) fn data(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut offset = offset;
        for part in data.chunks(MAX_DATA_BYTES) {
            let len = part.len() as u64;
            let frame = self.compressor.as_mut().map(|zstd| zstd.compress(part)).transpose()?;
            let (kind, second, bytes) = match &frame {
                Some(frame) if frame.len() < part.len() => {
                    (COMPRESSED, len | (frame.len() as u64) << 32, frame.as_slice())
                }
                _ => (DATA, len, part),
            };
            self.put(&head(kind, offset, second, bytes))?;
            self.put(bytes)?;
            self.record_count += 1;
            self.data_bytes += len;
            offset += len;
        }
        Ok(())
    }

    /// Writes a range that reads as zeroes, behind all earlier records.
    pub(crate) fn zeroes(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.put(&head(ZEROES, offset, len, &[]))?;
        self.record_count += 1;
        Ok(())
    }

    /// Writes the end, without which the file is worth nothing. Gives back what it is written to.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.put(&head(END, self.record_count, self.data_bytes, &[]))?;
        let sum = self.whole.digest();
        self.out.write_all(&sum.to_le_bytes())?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.whole.update(bytes);
        self.out.write_all(bytes)
    }
}
