//! Connections whose requests are sent as they are, for load generators and for tests of servers.

use std::io::{self, Read, Write};

use super::handshake::Negotiation;
use super::{ClientError, ConnectOptions, ExportFacts, reply};
use crate::codec::request::{EXTENDED_HEADER_BYTES, Header};

/// A connection over any stream. It checks no request and remembers none, so requests may be wrong
/// or incomplete, and clones of the stream may send and receive on different threads.
#[derive(Debug)]
pub struct RawConnection<S> {
    pub stream: S,
    pub facts: ExportFacts,
}

/// A reply without its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawReply {
    pub cookie: u64,
    /// 0 for success, or one of `codec::errno`.
    pub errno: u32,
}

/// Begins to negotiate.
pub fn greet(stream: &mut (impl Read + Write)) -> Result<(), ClientError> {
    Negotiation { stream }.greet()
}

/// Makes the server begin TLS. Options follow on the encrypted stream.
pub fn start_tls(stream: &mut (impl Read + Write)) -> Result<(), ClientError> {
    Negotiation { stream }.start_tls()
}

impl<S: Read + Write> RawConnection<S> {
    /// Negotiates on a stream without TLS.
    pub fn connect(
        mut stream: S,
        export: &str,
        options: &ConnectOptions,
    ) -> Result<Self, ClientError> {
        greet(&mut stream)?;
        Self::enter(stream, export, options)
    }

    /// Negotiates on a stream after [`greet`].
    pub fn enter(
        mut stream: S,
        export: &str,
        options: &ConnectOptions,
    ) -> Result<Self, ClientError> {
        let facts = Negotiation { stream: &mut stream }.go(export, options)?;
        Ok(Self { stream, facts })
    }

    /// Sends a request, and as many bytes of payload as the caller chooses.
    pub fn send(&mut self, header: &Header, payload: &[u8]) -> io::Result<()> {
        let mut message = Vec::with_capacity(EXTENDED_HEADER_BYTES + payload.len());
        header.encode(self.facts.extended, &mut message);
        message.extend_from_slice(payload);
        self.stream.write_all(&message)?;
        // A stream with TLS may keep bytes back.
        self.stream.flush()
    }

    /// Receives a reply. The data of a successful read with a simple reply follows it and has to be
    /// read from the stream; the content of other replies is dropped.
    pub fn receive(&mut self) -> Result<RawReply, ClientError> {
        let mut errno = 0;
        loop {
            let head = reply::head(&mut self.stream, self.facts.structured, self.facts.extended)?;
            let found = reply::skip(&mut self.stream, head)?;
            // The first error stays.
            errno = if errno == 0 { found } else { errno };
            if head.done {
                return Ok(RawReply { cookie: head.cookie, errno });
            }
        }
    }
}
