//! Input that may never come, as a pipe's may not: its reader can be stopped nevertheless.

use std::io::{self, Read};
use std::sync::Arc;

use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};

use super::{CONNECTION_COUNT, REQUEST_BYTES, STOP_WAIT, Stop};

/// Input that is read on a thread that is never joined.
#[derive(Debug)]
pub(crate) struct Awaited {
    pieces: Receiver<io::Result<Vec<u8>>>,
    piece: Vec<u8>,
    /// So much of the piece was given away.
    taken: usize,
    stop: Arc<Stop>,
}

impl Awaited {
    /// Opening is done there as well: that of a named pipe waits for its other end.
    pub(crate) fn new<R: Read>(
        open: impl FnOnce() -> io::Result<R> + Send + 'static,
        stop: &Arc<Stop>,
    ) -> Self {
        let (send, pieces) = bounded(CONNECTION_COUNT);
        std::thread::spawn(move || {
            let mut input = match open() {
                Ok(input) => input,
                Err(error) => return drop(send.send(Err(error))),
            };
            loop {
                let mut piece = vec![0; REQUEST_BYTES];
                let read = input.read(&mut piece);
                let last = match &read {
                    Ok(len) => *len == 0,
                    Err(error) => error.kind() != io::ErrorKind::Interrupted,
                };
                let sent = send.send(read.map(|len| {
                    piece.truncate(len);
                    piece
                }));
                if last || sent.is_err() {
                    return;
                }
            }
        });
        Self { pieces, piece: Vec::new(), taken: 0, stop: Arc::clone(stop) }
    }
}

impl Read for Awaited {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        while self.taken == self.piece.len() {
            self.stop.check().map_err(|error| io::Error::other(error.to_string()))?;
            match self.pieces.recv_timeout(STOP_WAIT) {
                Ok(piece) => (self.piece, self.taken) = (piece?, 0),
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => return Ok(0),
            }
            if self.piece.is_empty() {
                return Ok(0);
            }
        }
        let rest = &self.piece[self.taken..];
        let len = rest.len().min(into.len());
        into[..len].copy_from_slice(&rest[..len]);
        self.taken += len;
        Ok(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_read_are_those_that_came() {
        let bytes: Vec<u8> = (0..251).cycle().take(3 * REQUEST_BYTES + 17).collect();
        let (there, mut read) = (bytes.clone(), Vec::new());
        let stop = Arc::default();
        let mut input = Awaited::new(|| Ok(io::Cursor::new(there)), &stop);
        assert_eq!(input.read(&mut []).unwrap(), 0);
        input.read_to_end(&mut read).unwrap();
        assert!(read == bytes);
        assert_eq!(input.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_failed_open_is_reported() {
        let nowhere = || std::fs::File::open("/nowhere/at/all");
        let mut input = Awaited::new(nowhere, &Arc::default());
        assert_eq!(input.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn silence_ends_when_it_is_stopped() {
        let (reader, _writer) = io::pipe().unwrap();
        let stop = Arc::<Stop>::default();
        let mut input = Awaited::new(|| Ok(reader), &stop);
        stop.set();
        assert!(input.read(&mut [0]).unwrap_err().to_string().contains("interrupted"));
    }
}
