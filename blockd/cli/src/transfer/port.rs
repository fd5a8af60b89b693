//! A volume's bytes as a transfer sees them, and a connection that waits for a daemon to come back.

use std::io;
use std::time::Duration;

use blockd_media::clock::Clock;
use blockd_media::error::Error;

use super::Stop;

/// Between two attempts to connect.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// A stretch of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Allocation {
    /// How long it is.
    pub(crate) len: u64,
    /// The content of the stretch.
    pub(crate) holds: Holds,
}

/// The kind of a stretch's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holds {
    /// The stretch has to be read.
    Data,
    /// The stretch reads as zeroes.
    Zero,
    /// Where only changes are asked for: the range has its former content.
    Same,
}

/// Why a request failed.
#[derive(Debug)]
pub(crate) enum PortError {
    /// The connection is gone, and the request perhaps not done: it may be sent again.
    Lost(io::Error),
    /// The volume answered that it cannot.
    Refused(io::Error),
}

/// One connection, with one request at a time.
pub(crate) trait Port: Send {
    /// Fills the buffer from the volume.
    fn read(&mut self, offset: u64, buffer: &mut [u8]) -> Result<(), PortError>;
    /// Writes the data to the volume.
    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), PortError>;
    /// Makes a stretch read as zeroes, without taking space for it.
    fn zero(&mut self, offset: u64, len: u64) -> Result<(), PortError>;
    /// Makes everything durable that was answered on any connection.
    fn flush(&mut self) -> Result<(), PortError>;
    /// The content of the volume from `offset` on: one stretch or more, up to `len` at most.
    fn allocation(&mut self, offset: u64, len: u64) -> Result<Vec<Allocation>, PortError>;
}

/// Makes connections.
pub(crate) trait Connect: Sync {
    /// A new connection.
    fn connect(&self) -> Result<Box<dyn Port>, PortError>;
    /// Where to, for errors.
    fn address(&self) -> &str;
}

/// A connection that is made anew when it breaks, and repeats the request that it broke under.
/// Every request of a transfer can be repeated: it has the same effect twice.
pub(crate) struct Lasting<'a> {
    target: &'a dyn Connect,
    port: Option<Box<dyn Port>>,
    /// How long to go on without an answer.
    patience: Duration,
    stop: &'a Stop,
}

impl<'a> Lasting<'a> {
    /// The first connection: nothing is waited for.
    pub(crate) fn connect(
        target: &'a dyn Connect,
        patience: Duration,
        stop: &'a Stop,
    ) -> Result<Self, Error> {
        let port = target.connect().map_err(|error| failed(target, "connect", error))?;
        Ok(Self { target, port: Some(port), patience, stop })
    }

    /// Sends a request until it is answered.
    pub(crate) fn request<T>(
        &mut self,
        what: &str,
        mut request: impl FnMut(&mut dyn Port) -> Result<T, PortError>,
    ) -> Result<T, Error> {
        let clock = Clock::start();
        loop {
            self.stop.check()?;
            let lost = match self.attempt(&mut request) {
                Ok(answer) => return Ok(answer),
                Err(PortError::Lost(error)) => error,
                Err(refused) => return Err(failed(self.target, what, refused)),
            };
            self.port = None;
            if clock.elapsed() >= self.patience {
                return Err(failed(self.target, what, PortError::Lost(lost)));
            }
            std::thread::sleep(RETRY_PAUSE.min(self.patience));
        }
    }

    fn attempt<T>(
        &mut self,
        request: &mut impl FnMut(&mut dyn Port) -> Result<T, PortError>,
    ) -> Result<T, PortError> {
        let port = match &mut self.port {
            Some(port) => port,
            // A daemon that is starting may refuse what it will do later.
            None => self.port.insert(self.target.connect().map_err(|error| match error {
                PortError::Lost(error) | PortError::Refused(error) => PortError::Lost(error),
            })?),
        };
        request(port.as_mut())
    }
}

fn failed(target: &dyn Connect, what: &str, error: PortError) -> Error {
    let address = target.address();
    match error {
        PortError::Lost(source) => Error::Unreachable {
            address: address.to_owned(),
            problem: format!("{what}: the connection is gone: {source}"),
        },
        PortError::Refused(source) => Error::io(format!("{address}: {what}"), source),
    }
}

#[cfg(test)]
mod tests {
    use blockd_media::error::ErrorKind;

    use super::super::memory::Memory;
    use super::*;

    #[test]
    fn a_broken_connection_is_made_anew_and_the_request_repeated() {
        let memory = Memory::new(8192);
        let stop = Stop::default();
        let mut port = Lasting::connect(&memory, Duration::from_secs(5), &stop).unwrap();
        memory.break_every(2);
        for round in 0..10_u8 {
            port.request("write", |port| port.write(0, &[round; 512])).unwrap();
        }
        assert_eq!(memory.bytes()[0], 9);
    }

    #[test]
    fn patience_ends() {
        let memory = Memory::new(8192);
        let stop = Stop::default();
        let mut port = Lasting::connect(&memory, Duration::from_millis(1), &stop).unwrap();
        memory.break_every(1);
        let error = port.request("flush", |port| port.flush()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable);
    }

    #[test]
    fn a_request_that_the_volume_refuses_is_not_repeated() {
        let memory = Memory::new(512);
        let stop = Stop::default();
        let mut port = Lasting::connect(&memory, Duration::from_secs(60), &stop).unwrap();
        let error = port.request("write", |port| port.write(512, &[1; 512])).unwrap_err();
        assert!(error.to_string().contains("memory: write: "), "{error}");
    }
}
