//! A socket that gives up in time, below TLS: a handshake reads on and on within one call, as long
//! as its peer sends a byte now and then.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use blockd_media::clock::Clock;

use crate::transfer::Stop;

/// The time until which a socket works. Its link sets it.
#[derive(Clone, Debug)]
pub(super) struct Until {
    clock: Clock,
    /// By the clock.
    ns: Arc<AtomicU64>,
    stop: Arc<Stop>,
}

impl Until {
    pub(super) fn new(stop: &Arc<Stop>) -> Self {
        Self { clock: Clock::start(), ns: Arc::default(), stop: Arc::clone(stop) }
    }

    /// Sets it to this long from now.
    pub(super) fn set(&self, limit: Duration) {
        let limit = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        self.ns.store(self.clock.ns().saturating_add(limit), Ordering::Relaxed);
    }

    /// An error that the link sees as one more wait that was too long: it looks why.
    fn check(&self) -> io::Result<()> {
        let is_over = self.clock.ns() >= self.ns.load(Ordering::Relaxed);
        if is_over { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
    }
}

/// A socket that fails with a timeout once its time is over.
#[derive(Debug)]
pub(super) struct Socket {
    tcp: TcpStream,
    until: Until,
}

impl Socket {
    pub(super) fn new(tcp: TcpStream, until: &Until) -> Self {
        Self { tcp, until: until.clone() }
    }
}

impl Read for Socket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.until.check()?;
        // Not so for what is written: an answer says that this end was stopped.
        self.until.stop.check().map_err(|_| io::ErrorKind::TimedOut)?;
        self.tcp.read(into)
    }
}

impl Write for Socket {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.until.check()?;
        self.tcp.write(data)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.tcp.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// As a handshake does: one call that reads until it has a whole record.
    #[test]
    fn a_call_that_reads_on_ends_although_its_peer_drips() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let dripping = std::thread::spawn(move || {
            let mut tcp = TcpStream::connect(address).unwrap();
            while tcp.write_all(&[22]).is_ok() {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let until = Until::new(&Arc::default());
        let mut socket = Socket::new(listener.accept().unwrap().0, &until);
        until.set(Duration::from_millis(20));
        let mut bytes = Vec::new();
        let failed = socket.read_to_end(&mut bytes).unwrap_err();
        assert_eq!(failed.kind(), io::ErrorKind::TimedOut);
        // A stop ends it too, whatever time is left.
        until.set(Duration::MAX);
        assert_eq!(socket.read(&mut [0]).unwrap(), 1);
        until.stop.set();
        assert_eq!(socket.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(socket);
        dripping.join().unwrap();
    }
}
