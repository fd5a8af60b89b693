//! From a file into a volume.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blockd_media::error::Error;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use nix::unistd::{Whence, lseek};

use super::increment::{self, Record};
use super::port::{Connect, Lasting};
use super::progress::Progress;
use super::zeroes::stretches;
use super::{CONNECTION_COUNT, Failure, REQUEST_BYTES, STOP_WAIT, Stop, first_error, joined};

/// Where the bytes come from.
#[derive(Debug)]
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
    Stream(Box<dyn ReadDebug>),
    /// An incremental backup: ranges that it does not name are left as they are.
    Increment(increment::Reader<Box<dyn Read + Send>>),
}

/// A reader that can be shown in a debug print.
pub(crate) trait ReadDebug: Read + Send + std::fmt::Debug {}

impl<T: Read + Send + std::fmt::Debug> ReadDebug for T {}

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
    /// How long to wait for a daemon that has gone away.
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

/// A request to be made.
enum Piece {
    Data { offset: u64, data: Vec<u8> },
    Zero { offset: u64, len: u64 },
}

impl Import<'_> {
    /// Copies everything and makes it durable.
    ///
    /// # Errors
    /// The first failure on either side. The volume is then incomplete.
    pub(crate) fn run(&self, source: Source) -> Result<Imported, Error> {
        let (pieces, work) = bounded(CONNECTION_COUNT);
        let (used, spare) = bounded(4 * CONNECTION_COUNT);
        // All connections stand before the first byte moves: that one cannot be made is said at
        // once.
        let ports = (0..CONNECTION_COUNT)
            .map(|_| Lasting::connect(self.target, self.patience, self.stop))
            .collect::<Result<Vec<_>, _>>()?;
        let mut done = Imported::default();
        let failed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let mut writers = Vec::new();
            for mut port in ports {
                let (work, used) = (work.clone(), used.clone());
                let failed = &failed;
                writers.push(scope.spawn(move || {
                    let ended = self.write(&mut port, &work, &used);
                    failed.fetch_or(ended.is_err(), Ordering::Relaxed);
                    ended
                }));
            }
            // The writers hold theirs: once all have failed, sending fails too.
            drop((work, used));
            let feed = Feed { import: self, pieces, spare, failed: &failed, done: &mut done };
            let mut results = vec![feed.run(source)];
            results.extend(writers.into_iter().map(joined));
            // A writer's failure says why the reader could not go on.
            results.rotate_left(1);
            first_error(results)
        })?;
        let mut port = Lasting::connect(self.target, self.patience, self.stop)?;
        port.request("flush", |port| port.flush())?;
        Ok(done)
    }

    fn write(
        &self,
        port: &mut Lasting<'_>,
        work: &Receiver<Piece>,
        used: &Sender<Vec<u8>>,
    ) -> Result<(), Failure> {
        for piece in work {
            match piece {
                Piece::Data { offset, data } => {
                    port.request("write", |port| port.write(offset, &data))?;
                    self.progress.add(data.len() as u64);
                    // A buffer too many is let go.
                    let _ = used.try_send(data);
                }
                Piece::Zero { offset, len } => {
                    if !self.empty {
                        port.request("write zeroes", |port| port.zero(offset, len))?;
                    }
                    self.progress.add(len);
                }
            }
        }
        Ok(())
    }
}

/// The side of the file.
struct Feed<'a> {
    import: &'a Import<'a>,
    pieces: Sender<Piece>,
    spare: Receiver<Vec<u8>>,
    /// A writer has ended early: the work of the others is of no use.
    failed: &'a AtomicBool,
    done: &'a mut Imported,
}

impl Feed<'_> {
    fn run(mut self, source: Source) -> Result<(), Failure> {
        let end = match source {
            Source::File { file, size_bytes, name } => self.file(&file, size_bytes, &name)?,
            Source::Stream(stream) => self.stream(stream)?,
            Source::Increment(reader) => return self.increment(reader),
        };
        self.done.source_bytes = end;
        // The rest of the volume has to read as zeroes, whatever it held before.
        let block = self.import.block_bytes as u64;
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
                let want = (data.end - offset).min(REQUEST_BYTES as u64);
                let mut buffer = self.buffer(usize::try_from(want).unwrap_or(REQUEST_BYTES));
                file.read_exact_at(&mut buffer, offset).map_err(failed)?;
                self.data(offset, buffer)?;
                offset += want;
            }
        }
        Ok(size_bytes)
    }

    /// Imports a stream. It is read on a thread that is never joined: input may never come, and the
    /// transfer has to be able to end nevertheless.
    fn stream(&mut self, mut stream: Box<dyn ReadDebug>) -> Result<u64, Failure> {
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
                Err(RecvTimeoutError::Disconnected) => return Ok(offset),
            };
            let buffer = read.map_err(|source| Error::io("reading standard input", source))?;
            let len = buffer.len() as u64;
            if offset + len > self.import.size_bytes {
                let allowed = "enough for all of the input";
                return Err(Error::invalid("size", self.import.size_bytes, allowed).into());
            }
            self.data(offset, buffer)?;
            offset += len;
        }
    }

    fn increment(
        &mut self,
        mut reader: increment::Reader<Box<dyn Read + Send>>,
    ) -> Result<(), Failure> {
        loop {
            let next = reader.next();
            // A read that fails because it was stopped is no fault of the input.
            self.import.stop.check()?;
            let Some(record) = next? else { break };
            match record {
                Record::Data { offset, data } => {
                    self.done.written_bytes += data.len() as u64;
                    self.send(Piece::Data { offset, data })?;
                }
                Record::Zeroes { offset, len } => self.zero(offset, offset + len)?,
            }
        }
        self.done.source_bytes = reader.read_bytes();
        Ok(())
    }

    /// Sends a buffer on, without its zeroes.
    fn data(&mut self, offset: u64, mut buffer: Vec<u8>) -> Result<(), Failure> {
        let whole = buffer.len().next_multiple_of(self.import.block_bytes);
        buffer.resize(whole, 0);
        let stretches = stretches(&buffer);
        if let [only] = stretches.as_slice()
            && !only.zero
        {
            self.done.written_bytes += buffer.len() as u64;
            return self.send(Piece::Data { offset, data: buffer });
        }
        for stretch in stretches {
            let start = offset + stretch.range.start as u64;
            if stretch.zero {
                self.zero(start, start + stretch.range.len() as u64)?;
                continue;
            }
            let mut data = self.buffer(0);
            data.extend_from_slice(&buffer[stretch.range]);
            self.done.written_bytes += data.len() as u64;
            self.send(Piece::Data { offset: start, data })?;
        }
        Ok(())
    }

    fn zero(&mut self, mut from: u64, to: u64) -> Result<(), Failure> {
        /// The daemon does not take longer stretches in one request.
        const MAX_ZERO_BYTES: u64 = 1 << 30;
        while from < to {
            let len = (to - from).min(MAX_ZERO_BYTES);
            self.send(Piece::Zero { offset: from, len })?;
            from += len;
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

    fn buffer(&self, len: usize) -> Vec<u8> {
        let mut buffer = self.spare.try_recv().unwrap_or_default();
        buffer.resize(len, 0);
        buffer
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

    use super::super::memory::Memory;
    use super::*;

    fn import(memory: &Memory, source: Source, empty: bool) -> Result<Imported, Error> {
        let (stop, progress) = (Stop::default(), Progress::none());
        let import = Import {
            target: memory,
            size_bytes: memory.bytes().len() as u64,
            block_bytes: 512,
            empty,
            patience: Duration::from_secs(10),
            stop: &stop,
            progress: &progress,
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
        let memory = Memory::new(64 << 20);
        let data = pattern(64 << 20);
        memory.break_every(7);
        let source = Source::Stream(Box::new(Cursor::new(data.clone())));
        import(&memory, source, true).unwrap();
        assert!(memory.bytes() == data);
    }

    #[test]
    fn a_stopped_import_is_an_error() {
        let memory = Memory::new(1 << 20);
        let (stop, progress) = (Stop::default(), Progress::none());
        stop.set();
        let import = Import {
            target: &memory,
            size_bytes: 1 << 20,
            block_bytes: 512,
            empty: true,
            patience: Duration::ZERO,
            stop: &stop,
            progress: &progress,
        };
        let source = Source::Stream(Box::new(Cursor::new(pattern(4096))));
        assert_eq!(import.run(source).unwrap_err().to_string(), "transfer: interrupted");
    }
}
