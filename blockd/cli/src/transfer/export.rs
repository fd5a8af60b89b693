//! From a volume into a file.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use blockd_media::error::Error;
use crossbeam_channel::{Receiver, Sender, bounded};

use super::increment::Writer;
use super::port::{Allocation, Connect, Holds, Lasting};
use super::progress::Progress;
use super::zeroes::stretches;
use super::{CONNECTION_COUNT, Failure, REQUEST_BYTES, Stop, first_error, joined};

/// The length of one query of the volume's allocation.
const ALLOCATION_BYTES: u64 = 1 << 30;

/// Where the bytes go.
pub(crate) enum Sink {
    /// A file with nothing but a hole of the volume's size: zeroes are left out.
    File(File),
    /// Standard output, or whatever else has to be written from the beginning to the end.
    Stream(Box<dyn Write + Send>),
    /// An incremental backup, and whether zeroes are written: where there is a base, it may have
    /// had data there.
    Increment(Writer<Box<dyn Write + Send>>, bool),
}

/// The parameters of an export.
pub(crate) struct Export<'a> {
    /// The volume.
    pub(crate) source: &'a dyn Connect,
    /// Its size.
    pub(crate) size_bytes: u64,
    /// Of the output, for errors.
    pub(crate) name: &'a str,
    /// How long to wait for a daemon that has gone away.
    pub(crate) patience: Duration,
    /// To end early.
    pub(crate) stop: &'a Stop,
    /// Counts each byte.
    pub(crate) progress: &'a Progress,
}

/// A request, and where its answer goes: the writer takes answers in the order of the volume.
struct Order {
    offset: u64,
    len: usize,
    answer: Sender<Vec<u8>>,
}

/// A piece of the volume for the writer.
enum Piece {
    Data { offset: u64, answer: Receiver<Vec<u8>> },
    Zero { offset: u64, len: u64 },
    Same { len: u64 },
}

impl Export<'_> {
    /// Copies everything and makes it durable. Returns the bytes that were written.
    ///
    /// # Errors
    /// The first failure on either side. The output is then incomplete.
    pub(crate) fn run(&self, mut sink: Sink) -> Result<u64, Error> {
        let (orders, work) = bounded::<Order>(CONNECTION_COUNT);
        let (pieces, answers) = bounded(2 * CONNECTION_COUNT);
        let (used, spare) = bounded(4 * CONNECTION_COUNT);
        let mut map = Lasting::connect(self.source, self.patience, self.stop)?;
        let ports = (0..CONNECTION_COUNT)
            .map(|_| Lasting::connect(self.source, self.patience, self.stop))
            .collect::<Result<Vec<_>, _>>()?;
        let mut written_bytes = 0;
        std::thread::scope(|scope| {
            let mut readers = Vec::new();
            for mut port in ports {
                let (work, spare) = (work.clone(), spare.clone());
                readers.push(scope.spawn(move || read(&mut port, &work, &spare)));
            }
            drop((work, spare));
            let feeder = scope.spawn(move || self.feed(&mut map, &orders, &pieces));
            let writer = self.write(&mut sink, &answers, &used, &mut written_bytes);
            // Threads that wait for the writer must see that it is gone.
            drop((answers, used));
            let mut results: Vec<_> = readers.into_iter().map(joined).collect();
            results.extend([joined(feeder), writer]);
            first_error(results)
        })?;
        let synced = match sink {
            Sink::File(file) => file.sync_all(),
            Sink::Stream(mut stream) => stream.flush(),
            Sink::Increment(writer, _) => writer.finish().map(drop),
        };
        synced.map_err(|source| self.failed(source))?;
        Ok(written_bytes)
    }

    fn failed(&self, source: io::Error) -> Error {
        Error::io(format!("writing {}", self.name), source)
    }

    /// Queries the volume's allocation, and queues its data for reading.
    fn feed(
        &self,
        map: &mut Lasting<'_>,
        orders: &Sender<Order>,
        pieces: &Sender<Piece>,
    ) -> Result<(), Failure> {
        let mut offset = 0;
        while offset < self.size_bytes {
            let len = (self.size_bytes - offset).min(ALLOCATION_BYTES);
            let known = map.request("block status", |port| port.allocation(offset, len))?;
            for Allocation { len, holds } in known {
                let end = (offset + len).min(self.size_bytes);
                let len = end - offset;
                let piece = match holds {
                    Holds::Data => None,
                    Holds::Zero => Some(Piece::Zero { offset, len }),
                    Holds::Same => Some(Piece::Same { len }),
                };
                if let Some(piece) = piece {
                    self.stop.check()?;
                    pieces.send(piece).map_err(|_| Failure::Peer)?;
                    offset = end;
                }
                while offset < end {
                    self.stop.check()?;
                    let len = (end - offset).min(REQUEST_BYTES as u64);
                    let (answer, receiver) = bounded(1);
                    let piece = Piece::Data { offset, answer: receiver };
                    let len_bytes = usize::try_from(len).unwrap_or(REQUEST_BYTES);
                    orders
                        .send(Order { offset, len: len_bytes, answer })
                        .map_err(|_| Failure::Peer)?;
                    pieces.send(piece).map_err(|_| Failure::Peer)?;
                    offset += len;
                }
            }
        }
        Ok(())
    }

    fn write(
        &self,
        sink: &mut Sink,
        pieces: &Receiver<Piece>,
        used: &Sender<Vec<u8>>,
        written_bytes: &mut u64,
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
                    self.progress.add(len);
                }
                Piece::Same { len } => self.progress.add(len),
                Piece::Data { offset, answer } => {
                    let data = answer.recv().map_err(|_| Failure::Peer)?;
                    let written = match sink {
                        Sink::File(file) => write_sparse(file, offset, &data),
                        Sink::Stream(stream) => stream.write_all(&data).map(|()| data.len() as u64),
                        Sink::Increment(writer, zeroes) => {
                            write_increment(writer, *zeroes, offset, &data)
                        }
                    };
                    *written_bytes += written.map_err(|source| self.failed(source))?;
                    self.progress.add(data.len() as u64);
                    let _ = used.try_send(data);
                }
            }
        }
        Ok(())
    }
}

fn read(
    port: &mut Lasting<'_>,
    work: &Receiver<Order>,
    spare: &Receiver<Vec<u8>>,
) -> Result<(), Failure> {
    for order in work {
        let mut buffer = spare.try_recv().unwrap_or_default();
        buffer.resize(order.len, 0);
        port.request("read", |port| port.read(order.offset, &mut buffer))?;
        order.answer.send(buffer).map_err(|_| Failure::Peer)?;
    }
    Ok(())
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
fn write_increment(
    writer: &mut Writer<Box<dyn Write + Send>>,
    zeroes: bool,
    offset: u64,
    data: &[u8],
) -> io::Result<u64> {
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
        let (stop, progress) = (Stop::default(), Progress::none());
        let export = Export {
            source: memory,
            size_bytes: memory.bytes().len() as u64,
            name: "output",
            patience: Duration::from_secs(10),
            stop: &stop,
            progress: &progress,
        };
        export.run(sink)
    }

    #[test]
    fn a_file_gets_the_bytes_and_the_holes() {
        let memory = volume();
        let size = memory.bytes().len();
        let path = std::env::temp_dir().join(format!("blockd-{}-export", std::process::id()));
        let file = File::options().write(true).create_new(true).open(&path).unwrap();
        file.set_len(size as u64).unwrap();
        let written = export(&memory, Sink::File(file)).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let metadata = std::fs::metadata(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(bytes == memory.bytes());
        assert!(written < 3 << 20 && metadata.blocks() * 512 < 4 << 20, "{written}");
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
