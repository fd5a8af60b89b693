//! Errors between a client and its server.

use std::io;

/// Why something did not work.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("the address is {uri}: {why}")]
    Uri { uri: String, why: &'static str },
    #[error("can't connect to {address}")]
    Connect { address: String, source: io::Error },
    /// The connection is of no more use.
    #[error("the connection to the server failed")]
    Io(#[source] io::Error),
    #[error("the server did not answer in time")]
    TimedOut,
    /// The server ended the connection.
    #[error("the server hung up")]
    HungUp,
    /// The server violated the protocol.
    #[error("the server broke the protocol: {0}")]
    Protocol(&'static str),
    /// The server does not grant what was negotiated for. Its reply and its words.
    #[error("the server refused {what}: {message} (reply {reply:#x})")]
    Refused { what: &'static str, reply: u32, message: String },
    /// A request failed. The connection lives.
    #[error("{what} failed: {error}")]
    Request { what: &'static str, error: RequestError },
    /// A request that the server would refuse, and is not sent.
    #[error("{what} of {len} bytes at {offset}: {why}")]
    BadRequest { what: &'static str, offset: u64, len: u64, why: &'static str },
    /// An earlier failure ended the connection.
    #[error("the connection failed before")]
    Broken,
}

/// A server's answer to a request that it did not carry out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestError {
    /// As it came over the wire: one of `codec::errno`, if the server keeps to the document.
    pub errno: u32,
    /// For people; may be empty.
    pub message: String,
}

impl std::fmt::Display for RequestError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        use crate::codec::errno;
        let meaning = match self.errno {
            errno::EPERM => "not permitted",
            errno::EIO => "IO error",
            errno::ENOMEM => "out of memory",
            errno::EINVAL => "invalid request",
            errno::ENOSPC => "no space",
            errno::EOVERFLOW => "too large",
            errno::ENOTSUP => "not supported",
            errno::ESHUTDOWN => "the server is shutting down",
            _ => "unknown error",
        };
        write!(f, "{meaning} (errno {})", self.errno)?;
        if self.message.is_empty() { Ok(()) } else { write!(f, ": {}", self.message) }
    }
}

impl From<io::Error> for ClientError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::TimedOut,
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe => Self::HungUp,
            _ => Self::Io(error),
        }
    }
}
