//! The same server on tokio-uring, as in its documentation.

use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use anyhow::{Result, ensure};
use tokio_uring::buf::BoundedBuf;
use tokio_uring::net::UnixStream;

use super::{DATA_BYTES, DEPTH, HEADER_BYTES, REPLY_BYTES, REQUEST_BYTES};

/// Requests that one read can bring.
const BATCH: usize = 64;

/// One loop: read, write the replies of all that came with one `writev`. Buffers go round, so that
/// only the runtime itself allocates.
pub(super) fn serve(socket: OwnedFd) -> Result<u64> {
    tokio_uring::start(async move {
        let stream = UnixStream::from_std(std::os::unix::net::UnixStream::from(socket));
        let mut requests = Requests::new();
        let mut spare: Vec<Vec<u8>> = (0..BATCH).map(|_| reply()).collect();
        let mut answered = 0;
        while let Some(count) = requests.next(&stream).await? {
            let batch = spare.split_off(spare.len() - count);
            let (sent, batch) = stream.writev(batch).await;
            let sent = sent?;
            spare.extend(batch);
            let whole = count * REPLY_BYTES;
            if sent < whole {
                finish(&stream, sent, whole).await?;
            }
            answered += count as u64;
        }
        Ok(answered)
    })
}

/// A task for each request, and `write_all` by whichever has its turn.
pub(super) fn serve_tasks(socket: OwnedFd) -> Result<u64> {
    tokio_uring::start(async move {
        let stream = UnixStream::from_std(std::os::unix::net::UnixStream::from(socket));
        let stream = Rc::new(stream);
        // One reply at a time may be on its way, or they would mix.
        let turn = Rc::new(tokio::sync::Mutex::new(()));
        let answered = Rc::new(Cell::new(0));
        let spare = Rc::new(std::cell::RefCell::new(vec![reply(); DEPTH]));
        let mut requests = Requests::new();
        while let Some(count) = requests.next(&stream).await? {
            for _ in 0..count {
                let (stream, turn) = (Rc::clone(&stream), Rc::clone(&turn));
                let (answered, spare) = (Rc::clone(&answered), Rc::clone(&spare));
                tokio_uring::spawn(async move {
                    let buffer = spare.borrow_mut().pop().unwrap_or_else(reply);
                    let _turn = turn.lock().await;
                    let (sent, buffer) = stream.write_all(buffer).await;
                    if sent.is_ok() {
                        answered.set(answered.get() + 1);
                    }
                    spare.borrow_mut().push(buffer);
                });
            }
        }
        Ok(answered.get())
    })
}

fn reply() -> Vec<u8> {
    let mut reply = vec![0; HEADER_BYTES];
    reply.resize(HEADER_BYTES + DATA_BYTES, 0x5a);
    reply
}

/// Writes the rest of a short `writev`.
async fn finish(stream: &UnixStream, sent: usize, whole: usize) -> Result<()> {
    let mut at = sent;
    while at < whole {
        let from = at % REPLY_BYTES;
        let (done, _) = stream.write_all(reply().slice(from..)).await;
        done?;
        at += REPLY_BYTES - from;
    }
    Ok(())
}

/// Requests as they come in.
struct Requests {
    buffer: Option<Vec<u8>>,
    /// Bytes of a request that has come in part.
    part: usize,
}

impl Requests {
    fn new() -> Self {
        Self { buffer: Some(vec![0; BATCH * REQUEST_BYTES]), part: 0 }
    }

    /// How many whole requests one read has brought; `None` when the client is gone.
    async fn next(&mut self, stream: &UnixStream) -> Result<Option<usize>> {
        loop {
            let buffer = self.buffer.take().unwrap_or_default();
            let (moved, slice) = stream.read(buffer.slice(self.part..)).await;
            self.buffer = Some(slice.into_inner());
            let moved = moved?;
            if moved == 0 {
                ensure!(self.part == 0, "the client left within a request");
                return Ok(None);
            }
            let bytes = self.part + moved;
            self.part = bytes % REQUEST_BYTES;
            if bytes >= REQUEST_BYTES {
                return Ok(Some(bytes / REQUEST_BYTES));
            }
        }
    }
}
