//! From a file into a volume.

mod writer;

use std::fs::File;
use std::io::{self, Read};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use blockd_media::error::Error;
use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use nix::unistd::{Whence, lseek};

use super::increment::Record;
use super::port::{Allocation, Connect, Holds, Lasting};
use super::progress::Progress;
use super::{
    CONNECTION_COUNT, DEPTH, Failure, REQUEST_BYTES, STOP_WAIT, Stop, first_error, joined,
};
use writer::Writer;

/// Where the bytes come from.
pub(crate) enum Source {
    /// A regular file or a block device: holes are skipped.
    File {
        /// Open for reading.
        file: File,
        /// Its size when it was opened.
        size_bytes: u64,
        /// For errors.
        name: String,
    },
    /// Standard input, or whatever else cannot be read twice.
    Stream(Box<dyn Read + Send>),
    /// The records of a backup, up to the first `None`: ranges that they do not name are left as
    /// they are.
    Records(Records),
    /// No bytes: the volume reads as zeroes from the block on that has this offset.
    Zeroes {
        /// The first byte.
        from: u64,
    },
}

/// Returns the next record at each call.
pub(crate) type Records = Box<dyn FnMut() -> Result<Option<Record>, Error> + Send>;

/// The parameters of an import.
pub(crate) struct Import<'a> {
    /// The volume.
    pub(crate) target: &'a dyn Connect,
    /// Its size.
    pub(crate) size_bytes: u64,
    /// The unit in which it is written.
    pub(crate) block_bytes: usize,
    /// Whether the volume holds nothing but zeroes so far.
    pub(crate) empty: bool,
    /// Whether nothing was connected to it before: a daemon that has gone away since is waited for.
    pub(crate) is_first: bool,
    /// How long to wait for a daemon that has gone away, or a write for space.
    pub(crate) patience: Duration,
    /// To end early.
    pub(crate) stop: &'a Stop,
    /// Counts each byte.
    pub(crate) progress: &'a Progress,
}

/// The result of an import.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Imported {
    /// Bytes of the source.
    pub(crate) source_bytes: u64,
    /// Bytes of them that were sent.
    pub(crate) written_bytes: u64,
}

/// How long after the end of a stream a signal may come that has ended its writer as well: far more
/// than it takes.
const SIGNAL_WAIT: Duration = Duration::from_millis(300);

/// Longest range that is made to read as zeroes by one request.
const MAX_ZERO_BYTES: u64 = 1 << 30;

/// A part of the volume to be written.
#[derive(Debug)]
enum Piece {
    /// Bytes that were read already.
    Data { offset: u64, data: Vec<u8> },
    /// Bytes of the file, at the same offset. The thread that writes them reads them.
    File { offset: u64, len: usize },
    /// Zeroes, where the volume may hold something else.
    Zero { offset: u64, len: u64 },
}

impl Import<'_> {
    /// Copies everything and makes it durable.
    ///
    /// # Errors
    /// The first failure on either side. The volume is then incomplete.
    pub(crate) fn run(&self, source: Source) -> Result<Imported, Error> {
        let (pieces, work) = bounded(CONNECTION_COUNT * DEPTH);
        // All connections stand before the first byte moves: that one cannot be made is said at
        // once.
        let connect = || match self.is_first {
            true => Lasting::connect(self.target, self.patience, self.stop),
            false => Lasting::again(self.target, self.patience, self.stop),
        };
        let ports = (0..CONNECTION_COUNT).map(|_| connect()).collect::<Result<Vec<_>, _>>()?;
        // Zeroes of a backup are where its base had data: no use in looking.
        let looks = !self.empty && !matches!(source, Source::Records(_));
        let map = if looks { Some(connect()?) } else { None };
        let (mut source_bytes, written_bytes) = (0, AtomicU64::new(0));
        let failed = AtomicBool::new(false);
        let file = match &source {
            Source::File { file, name, .. } => {
                let again = file.try_clone();
                let again = again.map_err(|cause| Error::io(format!("reading {name}"), cause))?;
                Some((again, name.clone()))
            }
            Source::Stream(_) | Source::Records(_) | Source::Zeroes { .. } => None,
        };
        let file = file.as_ref().map(|(file, name)| (file, name.as_str()));
        std::thread::scope(|scope| {
            let mut writers = Vec::new();
            for port in ports {
                let (work, failed, written_bytes) = (work.clone(), &failed, &written_bytes);
                let spare = Vec::new();
                let port = port.beside(failed);
                let writer = Writer { import: self, port, file, written_bytes, spare, failed };
                writers.push(scope.spawn(move || match writer.run(&work) {
                    // The first to fail says why: what others say may be only that they were ended.
                    Err(_) if failed.swap(true, Ordering::Relaxed) => Err(Failure::Peer),
                    ended => ended,
                }));
            }
            // The writers hold theirs: once all have failed, sending fails too.
            drop(work);
            let source_bytes = &mut source_bytes;
            let feed = Feed { import: self, pieces, map, failed: &failed, source_bytes };
            let mut results = vec![feed.run(source)];
            results.extend(writers.into_iter().map(joined));
            // A writer's failure says why the reader could not go on.
            results.rotate_left(1);
            first_error(results)
        })?;
        let mut port = Lasting::again(self.target, self.patience, self.stop)?;
        port.request("flush", |port| port.flush())?;
        Ok(Imported { source_bytes, written_bytes: written_bytes.into_inner() })
    }

    /// Whole blocks of the volume: behind the source's end there are zeroes.
    fn padded(&self, mut data: Vec<u8>) -> Vec<u8> {
        data.resize(data.len().next_multiple_of(self.block_bytes), 0);
        data
    }
}

/// The side of the source.
struct Feed<'a> {
    import: &'a Import<'a>,
    pieces: Sender<Piece>,
    /// A connection to look for holes of the volume.
    map: Option<Lasting<'a>>,
    /// A writer has ended early: the work of the others is of no use.
    failed: &'a AtomicBool,
    source_bytes: &'a mut u64,
}

impl Feed<'_> {
    fn run(mut self, source: Source) -> Result<(), Failure> {
        let block = self.import.block_bytes as u64;
        let end = match source {
            Source::File { file, size_bytes, name } => self.file(&file, size_bytes, &name)?,
            Source::Stream(stream) => self.stream(stream)?,
            Source::Records(records) => return self.records(records),
            Source::Zeroes { from } => {
                return self.zero(from - from % block, self.import.size_bytes);
            }
        };
        *self.source_bytes = end;
        // The rest of the volume has to read as zeroes, whatever it held before.
        self.zero(end.next_multiple_of(block), self.import.size_bytes)
    }

    fn file(&mut self, file: &File, size_bytes: u64, name: &str) -> Result<u64, Failure> {
        let failed = |source| Error::io(format!("reading {name}"), source);
        let mut offset = 0;
        while offset < size_bytes {
            let data = next_data(file, offset, size_bytes).map_err(failed)?;
            self.zero(offset, data.start)?;
            offset = data.start;
            while offset < data.end {
                // Pieces end at multiples of their size, as extents do.
                let next = (offset + 1).next_multiple_of(REQUEST_BYTES as u64).min(data.end);
                let len = usize::try_from(next - offset).unwrap_or(REQUEST_BYTES);
                self.send(Piece::File { offset, len })?;
                offset = next;
            }
        }
        Ok(size_bytes)
    }

    /// Imports a stream. It is read on a thread that is never joined: input may never come, and the
    /// transfer has to be able to end nevertheless.
    fn stream(&mut self, mut stream: Box<dyn Read + Send>) -> Result<u64, Failure> {
        let (filled, buffers) = bounded(CONNECTION_COUNT);
        std::thread::spawn(move || {
            loop {
                let mut buffer = vec![0; REQUEST_BYTES];
                let read = fill(&mut *stream, &mut buffer);
                let last = !matches!(read, Ok(REQUEST_BYTES));
                let sent = filled.send(read.map(|len| {
                    buffer.truncate(len);
                    buffer
                }));
                if last || sent.is_err() {
                    return;
                }
            }
        });
        let mut offset = 0;
        loop {
            self.import.stop.check()?;
            let read = match buffers.recv_timeout(STOP_WAIT) {
                Ok(read) => read,
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => break,
            };
            let buffer = read.map_err(|source| Error::io("reading standard input", source))?;
            let len = buffer.len() as u64;
            if offset + len > self.import.size_bytes {
                let allowed = "enough for all of the input";
                return Err(Error::invalid("size", self.import.size_bytes, allowed).into());
            }
            self.send(Piece::Data { offset, data: self.import.padded(buffer) })?;
            offset += len;
        }
        // Ctrl-C goes to all programs of a pipeline, and the end of the writer's output may be here
        // before the signal. An input that was cut off so is not a whole one.
        std::thread::sleep(SIGNAL_WAIT);
        self.import.stop.check()?;
        Ok(offset)
    }

    fn records(&mut self, mut records: Records) -> Result<(), Failure> {
        loop {
            let next = records();
            // A read that fails because it was stopped is no fault of the input.
            self.import.stop.check()?;
            let Some(record) = next? else { break };
            match record {
                Record::Data { offset, data } => self.send(Piece::Data { offset, data })?,
                Record::Zeroes { offset, len } => self.zero(offset, offset + len)?,
            }
        }
        Ok(())
    }

    /// Makes a range read as zeroes where it holds anything else.
    fn zero(&mut self, mut from: u64, to: u64) -> Result<(), Failure> {
        if self.import.empty {
            self.import.progress.skip(to.saturating_sub(from));
            return Ok(());
        }
        while from < to {
            let len = (to - from).min(MAX_ZERO_BYTES);
            let known = match &mut self.map {
                Some(map) => map.request("block status", |port| port.allocation(from, len))?,
                None => vec![Allocation { len, holds: Holds::Data }],
            };
            for part in known {
                let len = part.len.min(to - from);
                match part.holds {
                    Holds::Zero => self.import.progress.skip(len),
                    Holds::Data | Holds::Same => self.send(Piece::Zero { offset: from, len })?,
                }
                from += len;
            }
        }
        Ok(())
    }

    fn send(&mut self, piece: Piece) -> Result<(), Failure> {
        self.import.stop.check()?;
        if self.failed.load(Ordering::Relaxed) {
            return Err(Failure::Peer);
        }
        self.pieces.send(piece).map_err(|_| Failure::Peer)
    }
}

/// Reads until the buffer is full or the input ends.
fn fill(stream: &mut dyn Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match stream.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// The next stretch with data at or after `offset`; empty and at the end when there is none. A file
/// system without holes has data everywhere.
fn next_data(file: &File, offset: u64, size_bytes: u64) -> io::Result<std::ops::Range<u64>> {
    let seek = |offset: u64, whence| -> io::Result<Option<u64>> {
        let signed = i64::try_from(offset).map_err(io::Error::other)?;
        match lseek(file, signed, whence) {
            Ok(found) => Ok(Some(u64::try_from(found).map_err(io::Error::other)?)),
            Err(nix::errno::Errno::ENXIO) => Ok(None),
            Err(nix::errno::Errno::EINVAL | nix::errno::Errno::EOPNOTSUPP) => Ok(Some(offset)),
            Err(error) => Err(error.into()),
        }
    };
    let Some(start) = seek(offset, Whence::SeekData)?.filter(|start| *start < size_bytes) else {
        return Ok(size_bytes..size_bytes);
    };
    match seek(start, Whence::SeekHole)? {
        // Where holes are unknown, the seek stays where it was.
        Some(end) if end > start => Ok(start..end.min(size_bytes)),
        _ => Ok(start..size_bytes),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;
    use std::os::unix::fs::FileExt;
    use std::sync::Arc;

    use super::super::memory::Memory;
    use super::*;

    fn import(memory: &Memory, source: Source, empty: bool) -> Result<Imported, Error> {
        import_with(memory, source, empty, &Progress::none())
    }

    fn import_with(
        memory: &Memory,
        source: Source,
        empty: bool,
        progress: &Progress,
    ) -> Result<Imported, Error> {
        import_until(&Stop::default(), memory, source, empty, progress)
    }

    fn import_until(
        stop: &Stop,
        memory: &Memory,
        source: Source,
        empty: bool,
        progress: &Progress,
    ) -> Result<Imported, Error> {
        let import = Import {
            target: memory,
            size_bytes: memory.bytes().len() as u64,
            block_bytes: 512,
            empty,
            is_first: true,
            patience: Duration::from_secs(10),
            stop,
            progress,
        };
        import.run(source)
    }

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|at| u8::try_from(at % 251).unwrap() | 1).collect()
    }

    fn file(name: &str, parts: &[(u64, &[u8])], size_bytes: u64) -> Source {
        let path = std::env::temp_dir().join(format!("blockd-{}-{name}", std::process::id()));
        let file =
            File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.set_len(size_bytes).unwrap();
        for (offset, data) in parts {
            file.write_all_at(data, *offset).unwrap();
        }
        Source::File { file, size_bytes, name: name.to_owned() }
    }

    #[test]
    fn holes_and_zeroes_of_a_file_take_no_space() {
        let memory = Memory::new(8 << 20);
        let data = pattern(100_000);
        let source = file("holes", &[(3 << 20, &data), (4 << 20, &[0; 1 << 20])], 6 << 20);
        let done = import(&memory, source, true).unwrap();
        assert_eq!(done.source_bytes, 6 << 20);
        assert_eq!(&memory.bytes()[3 << 20..(3 << 20) + data.len()], &data);
        assert!(memory.mapped_count() <= 26, "{}", memory.mapped_count());
        assert!(memory.flushed());
    }

    #[test]
    fn the_former_content_of_the_volume_is_gone() {
        let memory = Memory::of(vec![7; 3 << 20]);
        let source = file("before", &[(0, &pattern(1000))], 1 << 20);
        import(&memory, source, false).unwrap();
        assert_eq!(memory.bytes()[..1000], pattern(1000));
        assert!(memory.bytes()[1000..].iter().all(|byte| *byte == 0));
        assert_eq!(memory.mapped_count(), 1);
    }

    #[test]
    fn zeroes_begin_with_the_block_that_has_their_first_byte() {
        let memory = Memory::of(vec![7; 3 << 20]);
        import(&memory, Source::Zeroes { from: (1 << 20) + 700 }, false).unwrap();
        let bytes = memory.bytes();
        let (kept, zeroes) = bytes.split_at((1 << 20) + 512);
        assert!(kept.iter().all(|byte| *byte == 7) && zeroes.iter().all(|byte| *byte == 0));
        assert!(memory.flushed());
    }

    #[test]
    fn all_connections_have_their_requests_in_flight() {
        const SIZE: usize = 32 << 20;
        let data = pattern(SIZE);
        for stream in [false, true] {
            let memory = Memory::new(SIZE);
            memory.hold(CONNECTION_COUNT * DEPTH);
            let source = match stream {
                true => Source::Stream(Box::new(Cursor::new(data.clone()))),
                false => file("deep", &[(0, &data)], SIZE as u64),
            };
            import(&memory, source, true).unwrap();
            assert!(memory.bytes() == data);
            assert_eq!(memory.most_in_flight(), CONNECTION_COUNT * DEPTH, "{stream}");
        }
    }

    #[test]
    fn holes_of_both_sides_take_no_requests_and_no_part_of_the_rate() {
        const SIZE: u64 = 64 << 20;
        let mut bytes = vec![0; 64 << 20];
        bytes[8 << 20..9 << 20].fill(9);
        let data = pattern(1 << 20);
        for (empty, memory) in [(true, Memory::new(64 << 20)), (false, Memory::of(bytes))] {
            let (before, progress) = (memory.requests(), Progress::none());
            let source = file("both", &[(3 << 20, &data)], SIZE);
            import_with(&memory, source, empty, &progress).unwrap();
            // Four of data and the flush. A volume that held something has a query for the hole in
            // front of the data, three for that behind it, and its data is made zeroes.
            let queries = if empty { 0 } else { 4 + 1 };
            assert_eq!(memory.requests() - before, 4 + 1 + queries, "{empty}");
            assert_eq!(progress.done(), (SIZE, 1 << 20));
            assert_eq!(memory.mapped_count(), 256);
            assert_eq!(memory.bytes()[3 << 20..4 << 20], data);
        }
    }

    #[test]
    fn a_stream_is_padded_to_a_block_and_may_not_be_too_long() {
        let memory = Memory::new(2 << 20);
        let data = pattern((1 << 20) + 1000);
        let source = Source::Stream(Box::new(Cursor::new(data.clone())));
        let done = import(&memory, source, true).unwrap();
        assert_eq!(done, Imported { source_bytes: 1_049_576, written_bytes: (1 << 20) + 1024 });
        assert_eq!(memory.bytes()[..data.len()], data);
        let source = Source::Stream(Box::new(Cursor::new(pattern((2 << 20) + 1))));
        let error = import(&memory, source, true).unwrap_err();
        assert_eq!(error.to_string(), "size is 2097152: must be enough for all of the input");
    }

    #[test]
    fn connections_that_break_again_and_again_lose_nothing() {
        let memory = Memory::new(16 << 20);
        let data = pattern(16 << 20);
        memory.break_every(7);
        let source = Source::Stream(Box::new(Cursor::new(data.clone())));
        import(&memory, source, true).unwrap();
        assert!(memory.bytes() == data);
    }

    #[test]
    fn a_stopped_import_is_an_error() {
        let memory = Memory::new(1 << 20);
        let stop = Stop::default();
        stop.set();
        let source = Source::Stream(Box::new(Cursor::new(pattern(4096))));
        let error = import_until(&stop, &memory, source, true, &Progress::none()).unwrap_err();
        assert_eq!(error.to_string(), "transfer: interrupted");
    }

    #[test]
    fn a_stream_that_ends_as_it_is_stopped_is_not_taken_for_a_whole_one() {
        /// Ends as a pipe does whose writer was interrupted: our own signal is seen last.
        struct CutOff(Arc<Stop>);

        impl Read for CutOff {
            fn read(&mut self, _into: &mut [u8]) -> io::Result<usize> {
                Ok(0)
            }
        }

        impl Drop for CutOff {
            fn drop(&mut self) {
                let stop = Arc::clone(&self.0);
                std::thread::spawn(move || {
                    std::thread::sleep(STOP_WAIT / 2);
                    stop.set();
                });
            }
        }

        let memory = Memory::new(1 << 20);
        let stop = Arc::<Stop>::default();
        let source = Source::Stream(Box::new(CutOff(Arc::clone(&stop))));
        let error = import_until(&stop, &memory, source, true, &Progress::none()).unwrap_err();
        assert_eq!(error.to_string(), "transfer: interrupted");
    }
}
