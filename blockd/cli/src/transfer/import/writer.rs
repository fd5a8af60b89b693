//! A thread of an import: it reads pieces of the file, and writes them through its connection.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use blockd_media::error::Error;
use crossbeam_channel::Receiver;

use super::super::port::{Lasting, Request};
use super::super::zeroes::stretches;
use super::super::{DEPTH, Failure};
use super::{Import, Piece};

/// A connection that pieces are written through.
pub(super) struct Writer<'a> {
    pub(super) import: &'a Import<'a>,
    pub(super) port: Lasting<'a>,
    /// The source and its name, if its pieces are read here.
    pub(super) file: Option<(&'a File, &'a str)>,
    pub(super) written_bytes: &'a AtomicU64,
    /// Buffers of requests that are done.
    pub(super) spare: Vec<Vec<u8>>,
    /// Set once another writer has failed.
    pub(super) failed: &'a AtomicBool,
}

impl Writer<'_> {
    /// Writes pieces until there are no more, several at a time.
    pub(super) fn run(mut self, work: &Receiver<Piece>) -> Result<(), Failure> {
        loop {
            // What is left would only be waited for as long again.
            if self.failed.load(Ordering::Relaxed) {
                return Err(Failure::Peer);
            }
            let idle = self.port.in_flight() == 0;
            let piece = if idle {
                work.recv().ok()
            } else if self.port.in_flight() < DEPTH {
                work.try_recv().ok()
            } else {
                None
            };
            match piece {
                Some(Piece::Data { offset, data }) => self.data(offset, data)?,
                Some(Piece::File { offset, len }) => self.read(offset, len)?,
                Some(Piece::Zero { offset, len }) => {
                    self.port.send(Request::Zero { offset, len })?;
                }
                None if idle => return Ok(()),
                None => self.receive()?,
            }
        }
    }

    fn read(&mut self, offset: u64, len: usize) -> Result<(), Failure> {
        let Some((file, name)) = self.file else { return Err(Failure::Peer) };
        let mut data = self.spare.pop().unwrap_or_default();
        data.resize(len, 0);
        let read = file.read_exact_at(&mut data, offset);
        read.map_err(|source| Error::io(format!("reading {name}"), source))?;
        self.data(offset, self.import.padded(data))
    }

    /// Sends data, without its zeroes.
    fn data(&mut self, offset: u64, data: Vec<u8>) -> Result<(), Failure> {
        let stretches = stretches(&data);
        if let [only] = stretches.as_slice()
            && !only.zero
        {
            return self.write(offset, data);
        }
        for stretch in stretches {
            let (start, len) = (offset + stretch.range.start as u64, stretch.range.len() as u64);
            if !stretch.zero {
                let mut part = self.spare.pop().unwrap_or_default();
                part.clear();
                part.extend_from_slice(&data[stretch.range]);
                self.write(start, part)?;
            } else if self.import.empty {
                self.import.progress.skip(len);
            } else {
                self.send(Request::Zero { offset: start, len })?;
            }
        }
        self.keep(data);
        Ok(())
    }

    fn write(&mut self, offset: u64, data: Vec<u8>) -> Result<(), Failure> {
        self.written_bytes.fetch_add(data.len() as u64, Ordering::Relaxed);
        self.send(Request::Write { offset, data })
    }

    /// Sends a request when there is room for it.
    fn send(&mut self, request: Request) -> Result<(), Failure> {
        if self.port.in_flight() >= DEPTH {
            self.receive()?;
        }
        Ok(self.port.send(request)?)
    }

    /// Waits for one request to be done.
    fn receive(&mut self) -> Result<(), Failure> {
        match self.port.receive()?.0 {
            Request::Write { data, .. } => {
                self.import.progress.add(data.len() as u64);
                self.keep(data);
            }
            Request::Zero { len, .. } => self.import.progress.skip(len),
            Request::Read { .. } => {}
        }
        Ok(())
    }

    fn keep(&mut self, buffer: Vec<u8>) {
        if self.spare.len() < DEPTH {
            self.spare.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crossbeam_channel::bounded;

    use super::super::super::Stop;
    use super::super::super::memory::Memory;
    use super::super::super::progress::Progress;
    use super::*;

    #[test]
    fn no_piece_is_written_once_another_writer_has_failed() {
        let (memory, stop, progress) = (Memory::new(8192), Stop::default(), Progress::none());
        let patience = Duration::from_secs(10);
        let import = Import {
            target: &memory,
            size_bytes: 8192,
            block_bytes: 512,
            empty: true,
            is_first: true,
            patience,
            stop: &stop,
            progress: &progress,
        };
        let port = Lasting::connect(&memory, patience, &stop).unwrap();
        let (pieces, work) = bounded(1);
        pieces.send(Piece::Data { offset: 0, data: vec![1; 512] }).unwrap();
        let (count, failed) = (AtomicU64::new(0), AtomicBool::new(true));
        let writer = Writer {
            import: &import,
            port,
            file: None,
            written_bytes: &count,
            spare: Vec::new(),
            failed: &failed,
        };
        assert!(matches!(writer.run(&work), Err(Failure::Peer)));
        assert_eq!((memory.requests(), work.len()), (0, 1));
    }
}
