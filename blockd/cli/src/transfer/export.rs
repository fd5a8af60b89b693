//! From a volume into a file.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use blockd_media::error::Error;
use crossbeam_channel::{Receiver, Sender, bounded};

use super::increment::Writer;
use super::port::{Allocation, Connect, Holds, Lasting, Request};
use super::progress::Progress;
use super::zeroes::stretches;
use super::{CONNECTION_COUNT, DEPTH, Failure, REQUEST_BYTES, Stop, first_error, joined};

/// The length of one query of the volume's allocation.
const ALLOCATION_BYTES: u64 = 1 << 30;

/// Where the bytes go.
pub(crate) enum Sink {
    /// A file with nothing but a hole of the volume's size: zeroes are left out, and the threads
    /// that read the volume write it.
    File(File),
    /// Standard output, or whatever else has to be written from the beginning to the end.
    Stream(Box<dyn Write + Send>),
    /// An incremental backup, and whether its zeroes are written.
    Increment(Backup, bool),
}

/// A backup whose end is not written yet.
pub(crate) type Backup = Writer<Box<dyn Write + Send>>;

/// The result of an export.
pub(crate) struct Exported {
    /// Bytes that were written, by earlier attempts as well.
    pub(crate) written_bytes: u64,
    /// The backup, which its end makes valid: the caller may first check what was read.
    pub(crate) backup: Option<Backup>,
}

/// The parameters of an export.
pub(crate) struct Export<'a> {
    /// The volume.
    pub(crate) source: &'a dyn Connect,
    /// Its size.
    pub(crate) size_bytes: u64,
    /// Where to begin.
    pub(crate) from_bytes: u64,
    /// Of the output, for errors.
    pub(crate) name: &'a str,
    /// How long to wait for a daemon that has gone away.
    pub(crate) patience: Duration,
    /// To end early.
    pub(crate) stop: &'a Stop,
    /// Counts each byte.
    pub(crate) progress: &'a Progress,
    /// Counts bytes of data that are written, also where the export fails.
    pub(crate) written_bytes: &'a AtomicU64,
}

/// A range to be read, and where its bytes go if not into the file: the writer takes them in the
/// order of the volume.
struct Order {
    offset: u64,
    len: usize,
    answer: Option<Sender<Vec<u8>>>,
}

/// A piece of the volume for the writer.
enum Piece {
    Data { offset: u64, answer: Receiver<Vec<u8>> },
    Zero { offset: u64, len: u64 },
    Same { len: u64 },
}

impl Export<'_> {
    /// Copies everything and makes it durable, except for the end of a backup.
    ///
    /// # Errors
    /// The first failure on either side. The output is then incomplete.
    pub(crate) fn run(&self, mut sink: Sink) -> Result<Exported, Error> {
        let (orders, work) = bounded::<Order>(CONNECTION_COUNT * DEPTH);
        let (pieces, answers) = bounded(CONNECTION_COUNT * DEPTH);
        let (used, spare) = bounded(CONNECTION_COUNT * DEPTH);
        let connect = || Lasting::connect(self.source, self.patience, self.stop);
        let map = connect()?;
        let ports = (0..CONNECTION_COUNT).map(|_| connect()).collect::<Result<Vec<_>, _>>()?;
        let failed = AtomicBool::new(false);
        let file = match &sink {
            Sink::File(file) => Some(file.try_clone().map_err(|source| self.failed(source))?),
            Sink::Stream(_) | Sink::Increment(..) => None,
        };
        std::thread::scope(|scope| {
            let mut readers = Vec::new();
            for port in ports {
                let (work, spare) = (work.clone(), spare.clone());
                let (file, failed) = (file.as_ref(), &failed);
                let reader = Reader { export: self, port, file, orders: Vec::new() };
                readers.push(scope.spawn(move || {
                    let ended = reader.run(&work, &spare);
                    failed.fetch_or(ended.is_err(), Ordering::Relaxed);
                    ended
                }));
            }
            drop((work, spare));
            let pieces = file.is_none().then_some(pieces);
            let feed = Feed { export: self, map, orders, pieces, failed: &failed };
            let feeder = scope.spawn(move || feed.run());
            let writer = self.write(&mut sink, &answers, &used);
            // Threads that wait for the writer must see that it is gone.
            drop((answers, used));
            let mut results: Vec<_> = readers.into_iter().map(joined).collect();
            results.extend([joined(feeder), writer]);
            first_error(results)
        })?;
        let synced = match sink {
            Sink::File(file) => file.sync_all().map(|()| None),
            Sink::Stream(mut stream) => stream.flush().map(|()| None),
            Sink::Increment(writer, _) => Ok(Some(writer)),
        };
        let backup = synced.map_err(|source| self.failed(source))?;
        Ok(Exported { written_bytes: self.written_bytes.load(Ordering::Relaxed), backup })
    }

    fn failed(&self, source: io::Error) -> Error {
        Error::io(format!("writing {}", self.name), source)
    }

    fn write(
        &self,
        sink: &mut Sink,
        pieces: &Receiver<Piece>,
        used: &Sender<Vec<u8>>,
    ) -> Result<(), Failure> {
        for piece in pieces {
            match piece {
                Piece::Zero { offset, len } => {
                    let written = match sink {
                        Sink::File(_) | Sink::Increment(_, false) => Ok(()),
                        Sink::Stream(stream) => {
                            io::copy(&mut io::Read::take(io::repeat(0), len), stream).map(drop)
                        }
                        Sink::Increment(writer, true) => writer.zeroes(offset, len),
                    };
                    written.map_err(|source| self.failed(source))?;
                    self.progress.skip(len);
                }
                Piece::Same { len } => self.progress.skip(len),
                Piece::Data { offset, answer } => {
                    let data = answer.recv().map_err(|_| Failure::Peer)?;
                    let written = match sink {
                        Sink::File(_) => Ok(0),
                        Sink::Stream(stream) => stream.write_all(&data).map(|()| data.len() as u64),
                        Sink::Increment(writer, zeroes) => {
                            write_increment(writer, *zeroes, offset, &data)
                        }
                    };
                    let written = written.map_err(|source| self.failed(source))?;
                    self.written_bytes.fetch_add(written, Ordering::Relaxed);
                    self.progress.add(data.len() as u64);
                    let _ = used.try_send(data);
                }
            }
        }
        Ok(())
    }
}

/// Queries the volume's allocation, and queues its data for reading.
struct Feed<'a> {
    export: &'a Export<'a>,
    map: Lasting<'a>,
    orders: Sender<Order>,
    /// Where the output is written in the order of the volume.
    pieces: Option<Sender<Piece>>,
    /// A reader has ended early: the work of the others is of no use.
    failed: &'a AtomicBool,
}

impl Feed<'_> {
    fn run(mut self) -> Result<(), Failure> {
        let size_bytes = self.export.size_bytes;
        let mut offset = self.export.from_bytes;
        self.export.progress.skip(offset);
        while offset < size_bytes {
            let len = (size_bytes - offset).min(ALLOCATION_BYTES);
            let known = self.map.request("block status", |port| port.allocation(offset, len))?;
            for Allocation { len, holds } in known {
                let end = (offset + len).min(size_bytes);
                let len = end - offset;
                match holds {
                    Holds::Data => self.data(offset, end)?,
                    Holds::Zero => self.skip(Piece::Zero { offset, len }, len)?,
                    Holds::Same => self.skip(Piece::Same { len }, len)?,
                }
                offset = end;
            }
        }
        Ok(())
    }

    fn skip(&self, piece: Piece, len: u64) -> Result<(), Failure> {
        self.export.stop.check()?;
        match &self.pieces {
            Some(pieces) => pieces.send(piece).map_err(|_| Failure::Peer),
            None => {
                self.export.progress.skip(len);
                Ok(())
            }
        }
    }

    fn data(&self, mut offset: u64, end: u64) -> Result<(), Failure> {
        while offset < end {
            self.export.stop.check()?;
            if self.failed.load(Ordering::Relaxed) {
                return Err(Failure::Peer);
            }
            // Requests end at multiples of their size, as extents do.
            let next = (offset + 1).next_multiple_of(REQUEST_BYTES as u64).min(end);
            let len = usize::try_from(next - offset).unwrap_or(REQUEST_BYTES);
            let (answer, piece) = match &self.pieces {
                Some(pieces) => {
                    let (answer, receiver) = bounded(1);
                    (Some(answer), Some((pieces, Piece::Data { offset, answer: receiver })))
                }
                None => (None, None),
            };
            self.orders.send(Order { offset, len, answer }).map_err(|_| Failure::Peer)?;
            if let Some((pieces, piece)) = piece {
                pieces.send(piece).map_err(|_| Failure::Peer)?;
            }
            offset = next;
        }
        Ok(())
    }
}

/// A connection that ranges are read through.
struct Reader<'a> {
    export: &'a Export<'a>,
    port: Lasting<'a>,
    /// The output, where its parts may be written in any order.
    file: Option<&'a File>,
    /// Orders in flight.
    orders: Vec<Order>,
}

impl Reader<'_> {
    /// Reads ranges until there are no more, several at a time.
    fn run(mut self, work: &Receiver<Order>, spare: &Receiver<Vec<u8>>) -> Result<(), Failure> {
        loop {
            let idle = self.orders.is_empty();
            let order = if idle {
                work.recv().ok()
            } else if self.orders.len() < DEPTH {
                work.try_recv().ok()
            } else {
                None
            };
            match order {
                Some(order) => {
                    if let Ok(buffer) = spare.try_recv() {
                        self.port.recycle(buffer);
                    }
                    self.port.send(Request::Read { offset: order.offset, len: order.len })?;
                    self.orders.push(order);
                }
                None if idle => return Ok(()),
                None => self.receive()?,
            }
        }
    }

    /// Waits for one range to be read, and passes its bytes on.
    fn receive(&mut self) -> Result<(), Failure> {
        let (request, data) = self.port.receive()?;
        let Request::Read { offset, .. } = request else { return Ok(()) };
        let at = self.orders.iter().position(|order| order.offset == offset);
        let Some(Order { answer, .. }) = at.map(|at| self.orders.swap_remove(at)) else {
            return Ok(());
        };
        if let Some(answer) = answer {
            return answer.send(data).map_err(|_| Failure::Peer);
        }
        if let Some(file) = self.file {
            let written = write_sparse(file, offset, &data);
            let written = written.map_err(|source| self.export.failed(source))?;
            self.export.written_bytes.fetch_add(written, Ordering::Relaxed);
        }
        self.export.progress.add(data.len() as u64);
        self.port.recycle(data);
        Ok(())
    }
}

/// Writes what is not zero; the file has a hole there already.
fn write_sparse(file: &File, offset: u64, data: &[u8]) -> io::Result<u64> {
    let mut written = 0;
    for stretch in stretches(data).into_iter().filter(|stretch| !stretch.zero) {
        let data = &data[stretch.range.clone()];
        file.write_all_at(data, offset + stretch.range.start as u64)?;
        written += data.len() as u64;
    }
    Ok(written)
}

/// Writes what is not zero, and of the rest no more than that.
fn write_increment(writer: &mut Backup, zeroes: bool, offset: u64, data: &[u8]) -> io::Result<u64> {
    let mut written = 0;
    for stretch in stretches(data) {
        let (start, len) = (offset + stretch.range.start as u64, stretch.range.len() as u64);
        match (stretch.zero, zeroes) {
            (true, true) => writer.zeroes(start, len)?,
            (true, false) => {}
            (false, _) => {
                writer.data(start, &data[stretch.range])?;
                written += len;
            }
        }
    }
    Ok(written)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::sync::{Arc, Mutex};

    use super::super::memory::Memory;
    use super::*;

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl Write for Kept {
        fn write(&mut self, data: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(data);
            Ok(data.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn volume() -> Memory {
        let mut bytes = vec![0; (5 << 20) + 512];
        bytes[(1 << 20) + 100..(3 << 20) + 5000].fill(9);
        bytes[(5 << 20) + 511] = 1;
        Memory::of(bytes)
    }

    fn export(memory: &Memory, sink: Sink) -> Result<u64, Error> {
        export_with(memory, sink, &Progress::none())
    }

    fn export_with(memory: &Memory, sink: Sink, progress: &Progress) -> Result<u64, Error> {
        let stop = Stop::default();
        let export = Export {
            source: memory,
            size_bytes: memory.bytes().len() as u64,
            from_bytes: 0,
            name: "output",
            patience: Duration::from_secs(10),
            stop: &stop,
            progress,
            written_bytes: &AtomicU64::new(0),
        };
        let done = export.run(sink)?;
        if let Some(backup) = done.backup {
            backup.finish().unwrap();
        }
        Ok(done.written_bytes)
    }

    /// A file of this size, which has no name any more.
    fn file(name: &str, size: usize) -> File {
        let path = std::env::temp_dir().join(format!("blockd-{}-{name}", std::process::id()));
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.set_len(size as u64).unwrap();
        file
    }

    fn bytes_of(file: &File) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    #[test]
    fn a_file_gets_the_bytes_and_the_holes() {
        let memory = volume();
        let file = file("export", memory.bytes().len());
        let again = file.try_clone().unwrap();
        let written = export(&memory, Sink::File(file)).unwrap();
        assert!(bytes_of(&again) == memory.bytes());
        let blocks = again.metadata().unwrap().blocks();
        assert!(written < 3 << 20 && blocks * 512 < 4 << 20, "{written}");
    }

    #[test]
    fn all_connections_have_their_requests_in_flight() {
        let memory = Memory::of(vec![7; 32 << 20]);
        memory.hold(CONNECTION_COUNT * DEPTH);
        let file = file("export-deep", 32 << 20);
        let again = file.try_clone().unwrap();
        export(&memory, Sink::File(file)).unwrap();
        assert!(bytes_of(&again) == memory.bytes());
        assert_eq!(memory.most_in_flight(), CONNECTION_COUNT * DEPTH);
    }

    #[test]
    fn holes_take_no_requests_and_no_part_of_the_rate() {
        const SIZE: usize = 64 << 20;
        let mut bytes = vec![0; SIZE];
        bytes[3 << 20..4 << 20].fill(1);
        let memory = Memory::of(bytes);
        for ordered in [false, true] {
            let (before, progress) = (memory.requests(), Progress::none());
            let sink = match ordered {
                true => Sink::Stream(Box::new(Kept::default())),
                false => Sink::File(file("export-holes", SIZE)),
            };
            export_with(&memory, sink, &progress).unwrap();
            // Four of data, and three queries: a hole, the data, a hole.
            assert_eq!(memory.requests() - before, 4 + 3);
            assert_eq!(progress.done(), (SIZE as u64, 1 << 20));
        }
    }

    #[test]
    fn a_file_gets_every_byte_over_broken_connections() {
        let memory = volume();
        memory.break_every(5);
        let file = file("export-broken", memory.bytes().len());
        let again = file.try_clone().unwrap();
        export(&memory, Sink::File(file)).unwrap();
        assert!(bytes_of(&again) == memory.bytes());
    }

    #[test]
    fn a_stream_gets_every_byte_in_order_also_over_broken_connections() {
        let memory = volume();
        memory.break_every(5);
        let kept = Kept::default();
        export(&memory, Sink::Stream(Box::new(kept.clone()))).unwrap();
        assert!(*kept.0.lock().unwrap() == memory.bytes());
    }

    #[test]
    fn a_reader_that_goes_away_ends_the_export() {
        struct Full;
        impl Write for Full {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::Error::from(io::ErrorKind::StorageFull))
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let error = export(&volume(), Sink::Stream(Box::new(Full))).unwrap_err();
        assert_eq!(error.kind(), blockd_media::error::ErrorKind::NoSpace);
    }
}
