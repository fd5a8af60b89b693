//! An export of an NBD server as a transfer's port.

use std::io;
use std::time::Duration;

use blockd_nbd::CHANGED_SINCE;
use blockd_nbd::client::{
    self, ChangedRange, Client, ClientError, ConnectOptions, RequestError, StatusRange, Uri,
};
use blockd_nbd::codec::errno;

use super::DEPTH;
use super::port::{Allocation, Answer, Connect, Holds, Port, PortError, Request};

/// How long an answer may take. A write may wait for space for so long.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Where a volume is served.
#[derive(Debug)]
pub(crate) struct Target {
    uri: Uri,
    shown: String,
    size_bytes: u64,
    /// The metadata context of the changes, where only these are requested.
    changes: Option<String>,
}

impl Target {
    /// By its address. A volume of another size is not the one that is meant.
    pub(crate) fn new(uri: Uri, size_bytes: u64) -> Self {
        let shown = uri.to_string();
        Self { uri, shown, size_bytes, changes: None }
    }

    /// The same, and only what has changed since a snapshot is of interest.
    pub(crate) fn since(uri: Uri, size_bytes: u64, snapshot: &str) -> Self {
        let changes = Some(format!("{CHANGED_SINCE}{snapshot}"));
        Self { changes, ..Self::new(uri, size_bytes) }
    }
}

impl Connect for Target {
    fn connect(&self) -> Result<Box<dyn Port>, PortError> {
        let options = ConnectOptions {
            timeout: ANSWER_TIMEOUT,
            depth: DEPTH,
            base_allocation: self.changes.is_none(),
            contexts: self.changes.iter().cloned().collect(),
            ..Default::default()
        };
        let client = Client::connect(&self.uri, &options).map_err(error)?;
        if let Some((context, None)) = client.facts().contexts.first() {
            let problem = format!("has no {context}: was the snapshot deleted?");
            return Err(PortError::Refused(io::Error::other(problem)));
        }
        if client.size() != self.size_bytes {
            let problem = format!("has {} bytes, not {}", client.size(), self.size_bytes);
            return Err(PortError::Refused(io::Error::other(problem)));
        }
        Ok(Box::new(client))
    }

    fn address(&self) -> &str {
        &self.shown
    }
}

impl Port for Client {
    fn send(&mut self, request: &Request) -> Result<u64, PortError> {
        let request = match *request {
            Request::Read { offset, len } => {
                // A length beyond that is refused as too long.
                client::Request::Read { offset, len: u32::try_from(len).unwrap_or(u32::MAX) }
            }
            Request::Write { offset, ref data } => {
                client::Request::Write { offset, data, fua: false }
            }
            Request::Zero { offset, len } => {
                client::Request::WriteZeroes { offset, len, no_hole: false, fast_zero: false }
            }
        };
        Client::send(self, request).map_err(error)
    }

    fn receive(&mut self) -> Result<Answer, PortError> {
        let done = Client::receive(self).map_err(error)?;
        let number = done.cookie;
        match done.result {
            Ok(()) => Ok(Answer { number, result: Ok(done.data) }),
            Err(error) if error.errno == errno::ESHUTDOWN => Err(PortError::Lost(shutting_down())),
            Err(error) => Ok(Answer { number, result: Err(answered(&error)) }),
        }
    }

    fn recycle(&mut self, buffer: Vec<u8>) {
        Client::recycle(self, buffer);
    }

    fn flush(&mut self) -> Result<(), PortError> {
        Client::flush(self).map_err(error)
    }

    fn allocation(&mut self, offset: u64, len: u64) -> Result<Vec<Allocation>, PortError> {
        let known: Vec<Allocation> = if !self.facts().contexts.is_empty() {
            let ranges = self.changes(offset, len).map_err(error)?;
            let holds = |range: &ChangedRange| match (range.changed, range.zero) {
                (false, _) => Holds::Same,
                (true, false) => Holds::Data,
                (true, true) => Holds::Zero,
            };
            ranges.iter().map(|range| Allocation { len: range.len, holds: holds(range) }).collect()
        } else if self.facts().base_allocation.is_none() {
            vec![Allocation { len, holds: Holds::Data }]
        } else {
            let ranges = self.block_status(offset, len).map_err(error)?;
            let holds = |zero| if zero { Holds::Zero } else { Holds::Data };
            let known =
                |range: StatusRange| Allocation { len: range.len, holds: holds(range.zero) };
            ranges.into_iter().map(known).collect()
        };
        if known.is_empty() {
            let nothing = io::Error::other("the server says nothing about this range");
            return Err(PortError::Refused(nothing));
        }
        Ok(known)
    }
}

/// Whether trying again may help. A server that ends its work comes back.
fn error(error: ClientError) -> PortError {
    match error {
        ClientError::Request { error: RequestError { errno, .. }, .. }
            if errno == errno::ESHUTDOWN =>
        {
            PortError::Lost(shutting_down())
        }
        ClientError::Request { error, .. } => PortError::Refused(answered(&error)),
        ClientError::Uri { .. } | ClientError::Refused { .. } | ClientError::BadRequest { .. } => {
            PortError::Refused(io::Error::other(error.to_string()))
        }
        ClientError::Connect { source, .. } | ClientError::Io(source) => PortError::Lost(source),
        ClientError::TimedOut => PortError::Silent(ANSWER_TIMEOUT),
        ClientError::HungUp | ClientError::Protocol(_) | ClientError::Broken => {
            PortError::Lost(io::Error::other(error.to_string()))
        }
    }
}

fn shutting_down() -> io::Error {
    io::Error::other("the server is shutting down")
}

/// An answer as an error of the operating system, so that its kind is known.
fn answered(error: &RequestError) -> io::Error {
    let kind = match error.errno {
        errno::ENOSPC => io::ErrorKind::StorageFull,
        errno::EPERM => io::ErrorKind::PermissionDenied,
        errno::EINVAL => io::ErrorKind::InvalidInput,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error.to_string())
}
