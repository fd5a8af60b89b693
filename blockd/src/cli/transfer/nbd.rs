//! An export of an NBD server as a transfer's port.

use std::io;
use std::time::Duration;

use super::port::{Allocation, Connect, Port, PortError};
use crate::nbd_client::{Client, ClientError, ConnectOptions, RequestError, Uri};

/// How long an answer may take. A write may wait for space for so long.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Where a volume is served.
#[derive(Debug)]
pub(crate) struct Target {
    uri: Uri,
    shown: String,
    size_bytes: u64,
}

impl Target {
    /// By its address. A volume of another size is not the one that is meant.
    pub(crate) fn new(uri: Uri, size_bytes: u64) -> Self {
        let shown = uri.to_string();
        Self { uri, shown, size_bytes }
    }
}

impl Connect for Target {
    fn connect(&self) -> Result<Box<dyn Port>, PortError> {
        let options = ConnectOptions { timeout: ANSWER_TIMEOUT, depth: 1, ..Default::default() };
        let client = Client::connect(&self.uri, &options).map_err(error)?;
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
    fn read(&mut self, offset: u64, buffer: &mut [u8]) -> Result<(), PortError> {
        Client::read(self, offset, buffer).map_err(error)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), PortError> {
        Client::write(self, offset, data, false).map_err(error)
    }

    fn zero(&mut self, offset: u64, len: u64) -> Result<(), PortError> {
        Client::write_zeroes(self, offset, len, false).map_err(error)
    }

    fn flush(&mut self) -> Result<(), PortError> {
        Client::flush(self).map_err(error)
    }

    fn allocation(&mut self, offset: u64, len: u64) -> Result<Vec<Allocation>, PortError> {
        if self.facts().base_allocation.is_none() {
            return Ok(vec![Allocation { len, zero: false }]);
        }
        let ranges = self.block_status(offset, len).map_err(error)?;
        if ranges.is_empty() {
            let nothing = io::Error::other("the server says nothing about this range");
            return Err(PortError::Refused(nothing));
        }
        Ok(ranges
            .into_iter()
            .map(|range| Allocation { len: range.len, zero: range.zero })
            .collect())
    }
}

/// Whether trying again may help. A server that ends its work comes back.
fn error(error: ClientError) -> PortError {
    use crate::frontend::nbd::codec::errno;

    match error {
        ClientError::Request { error: RequestError { errno, .. }, .. }
            if errno == errno::ESHUTDOWN =>
        {
            PortError::Lost(io::Error::other("the server is shutting down"))
        }
        ClientError::Request { error, .. } => PortError::Refused(answered(&error)),
        ClientError::Uri { .. } | ClientError::Refused { .. } | ClientError::BadRequest { .. } => {
            PortError::Refused(io::Error::other(error.to_string()))
        }
        ClientError::Connect { source, .. } | ClientError::Io(source) => PortError::Lost(source),
        ClientError::TimedOut
        | ClientError::HungUp
        | ClientError::Protocol(_)
        | ClientError::Broken => PortError::Lost(io::Error::other(error.to_string())),
    }
}

/// An answer as an error of the operating system, so that its kind is known.
fn answered(error: &RequestError) -> io::Error {
    use crate::frontend::nbd::codec::errno;

    let kind = match error.errno {
        errno::ENOSPC => io::ErrorKind::StorageFull,
        errno::EPERM => io::ErrorKind::PermissionDenied,
        errno::EINVAL => io::ErrorKind::InvalidInput,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error.to_string())
}
