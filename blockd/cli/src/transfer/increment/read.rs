//! Reading an incremental backup, and believing nothing of it.

use std::io::{self, Read};

use blockd_media::error::Error;
use xxhash_rust::xxh3::Xxh3;

use super::{
    COMPRESSED, DATA, END, HEAD_BYTES, HEADER_BYTES, Header, MAX_DATA_BYTES, ZEROES, sum_of,
    u32_at, u64_at,
};

/// The same as a length in a head.
const MAX_RECORD_BYTES: u64 = MAX_DATA_BYTES as u64;

/// A record of a file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Record {
    Data { offset: u64, data: Vec<u8> },
    Zeroes { offset: u64, len: u64 },
}

/// Reads a file from its beginning to its end, and judges each part before it gives it away.
pub(crate) struct Reader<R> {
    from: R,
    name: String,
    header: Header,
    /// The checksum of the whole file, boxed because it is large.
    whole: Box<Xxh3>,
    /// Behind the record before.
    at: u64,
    record_count: u64,
    data_bytes: u64,
    read_bytes: u64,
    is_strange: bool,
}

impl<R> std::fmt::Debug for Reader<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reader").field("header", &self.header).finish_non_exhaustive()
    }
}

impl<R: Read> Reader<R> {
    /// Reads the header. `name` is for errors.
    ///
    /// # Errors
    /// When it can't be read, or is none that this version understands.
    pub(crate) fn begin(mut from: R, name: &str) -> Result<Self, Error> {
        let mut bytes = [0; HEADER_BYTES];
        take(&mut from, &mut bytes, name)?;
        let header = Header::decode(&bytes).map_err(|problem| corrupt(name, &problem))?;
        let mut whole = Box::new(Xxh3::new());
        whole.update(&bytes);
        Ok(Self {
            from,
            name: name.to_owned(),
            at: header.from_bytes,
            header,
            whole,
            record_count: 0,
            data_bytes: 0,
            read_bytes: HEADER_BYTES as u64,
            is_strange: false,
        })
    }

    pub(crate) fn header(&self) -> &Header {
        &self.header
    }

    /// The end of the last record: where a stream begins that has only what comes behind it.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    /// Whether the records are not those that were written, though the checksum of each is right:
    /// one may be missing or another's, and those before are not to be believed either.
    pub(crate) fn is_strange(&self) -> bool {
        self.is_strange
    }

    /// Bytes of the file up to here.
    pub(crate) fn read_bytes(&self) -> u64 {
        self.read_bytes
    }

    /// The next record; none after the last, when the file is known to be whole.
    ///
    /// # Errors
    /// When it can't be read, was cut or changed, or is nothing that a writer makes.
    pub(crate) fn next(&mut self) -> Result<Option<Record>, Error> {
        let mut head = [0; HEAD_BYTES];
        self.take(&mut head)?;
        let (kind, first, second) = (u32_at(&head, 0), u64_at(&head, 8), u64_at(&head, 16));
        // How much data follows is believed only where it can't do harm; then the sum decides.
        // Until then a record of another form is one that was damaged.
        let mut data = Vec::new();
        let (second, stored) = match kind {
            DATA => (second, second),
            // A frame that is not shorter than its data is written as data.
            COMPRESSED if self.header.is_compressed => (u32_at(&head, 16).into(), second >> 32),
            COMPRESSED => return Err(self.unknown_record()),
            _ => (second, 0),
        };
        let is_data = kind == DATA || kind == COMPRESSED;
        if is_data {
            let len = usize::try_from(stored).ok().filter(|len| *len <= MAX_DATA_BYTES);
            let (Some(len), ..=MAX_RECORD_BYTES) = (len, second) else {
                return Err(self.unknown_record());
            };
            data.resize(len, 0);
            self.take(&mut data)?;
        }
        if sum_of(&head, &data) != u32_at(&head, 4) {
            let number = self.record_count + 1;
            let problem = format!("was changed: the checksum of record {number} is wrong");
            return Err(corrupt(&self.name, &problem));
        }
        if kind == END {
            return self.end(first, second);
        }
        let end = first.checked_add(second).filter(|end| *end <= self.header.snapshot.size_bytes);
        let block = u64::from(self.header.block_bytes);
        let whole = first.is_multiple_of(block) && second.is_multiple_of(block) && second > 0;
        let (Some(end), true, true) = (end, whole, first >= self.at) else {
            return Err(self.strange());
        };
        // A record that is refused is not behind the position: a resumed stream has it again.
        let record = match kind {
            DATA => Record::Data { offset: first, data },
            COMPRESSED => Record::Data { offset: first, data: self.inflate(&data, second)? },
            ZEROES => Record::Zeroes { offset: first, len: second },
            _ => return Err(self.strange()),
        };
        self.at = end;
        self.record_count += 1;
        self.data_bytes += if is_data { second } else { 0 };
        Ok(Some(record))
    }

    /// The data of a frame of zstd, which has to be of this length.
    fn inflate(&mut self, frame: &[u8], len: u64) -> Result<Vec<u8>, Error> {
        let len = usize::try_from(len).unwrap_or(MAX_DATA_BYTES);
        match zstd::bulk::decompress(frame, len) {
            Ok(data) if data.len() == len => Ok(data),
            Ok(_) | Err(_) => Err(self.strange()),
        }
    }

    fn end(&mut self, records: u64, data_bytes: u64) -> Result<Option<Record>, Error> {
        if (records, data_bytes) != (self.record_count, self.data_bytes) {
            return Err(self.strange());
        }
        let expected = self.whole.digest();
        let mut sum = [0; 8];
        self.take(&mut sum)?;
        if sum != expected.to_le_bytes() {
            self.is_strange = true;
            return Err(corrupt(&self.name, "was changed: the checksum at its end is wrong"));
        }
        loop {
            match self.from.read(&mut [0]) {
                Ok(0) => return Ok(None),
                Ok(_) => return Err(corrupt(&self.name, "goes on after its end")),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(failed(&self.name, source)),
            }
        }
    }

    fn take(&mut self, into: &mut [u8]) -> Result<(), Error> {
        take(&mut self.from, into, &self.name)?;
        self.whole.update(into);
        self.read_bytes += into.len() as u64;
        Ok(())
    }

    /// An error that the checksums do not explain: see [`Self::is_strange`].
    fn strange(&mut self) -> Error {
        self.is_strange = true;
        self.unknown_record()
    }

    fn unknown_record(&self) -> Error {
        let number = self.record_count + 1;
        let problem = format!("has a record, number {number}, that no version of blockd writes");
        corrupt(&self.name, &problem)
    }
}

fn take(from: &mut impl Read, into: &mut [u8], name: &str) -> Result<(), Error> {
    from.read_exact(into).map_err(|source| match source.kind() {
        io::ErrorKind::UnexpectedEof => {
            corrupt(name, "ends in the middle: it was cut short, or is still being written")
        }
        _ => failed(name, source),
    })
}

fn failed(name: &str, source: io::Error) -> Error {
    Error::io(format!("reading {name}"), source)
}

fn corrupt(name: &str, problem: &str) -> Error {
    Error::Corrupt { what: name.to_owned(), problem: problem.to_owned() }
}
