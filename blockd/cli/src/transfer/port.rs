//! A volume's bytes as a transfer sees them, and a connection that waits for a daemon to come back.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
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
    /// There was no answer for this time, and the request is perhaps not done either.
    Silent(Duration),
    /// The volume answered that it cannot.
    Refused(io::Error),
}

/// A request of which several are in flight. Each has the same effect twice, so that it can be sent
/// again.
#[derive(Debug)]
pub(crate) enum Request {
    /// Reads a range.
    Read { offset: u64, len: usize },
    /// Writes the data.
    Write { offset: u64, data: Vec<u8> },
    /// Makes a range read as zeroes, without taking space for it.
    Zero { offset: u64, len: u64 },
}

impl Request {
    /// In words, for errors.
    const fn name(&self) -> &'static str {
        match self {
            Self::Read { .. } => "read",
            Self::Write { .. } => "write",
            Self::Zero { .. } => "write zeroes",
        }
    }
}

/// The answer to a request.
#[derive(Debug)]
pub(crate) struct Answer {
    /// The number of the request.
    pub(crate) number: u64,
    /// The bytes of a read, else nothing; an error when the volume cannot.
    pub(crate) result: io::Result<Vec<u8>>,
}

/// One connection.
pub(crate) trait Port: Send {
    /// Sends a request, and returns a number that no other one in flight has.
    fn send(&mut self, request: &Request) -> Result<u64, PortError>;
    /// Waits for the answer to a request in flight, whichever it is.
    fn receive(&mut self) -> Result<Answer, PortError>;
    /// Takes the bytes of a read back, to be used again.
    fn recycle(&mut self, buffer: Vec<u8>);
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

/// Makes one connection; an error says where to.
pub(crate) fn connect(target: &dyn Connect) -> Result<Box<dyn Port>, Error> {
    target.connect().map_err(|error| failed(target, "connect", error))
}

/// A connection that is made anew when it breaks, and repeats the requests that it broke under.
pub(crate) struct Lasting<'a> {
    target: &'a dyn Connect,
    port: Option<Box<dyn Port>>,
    /// Requests in flight, in the order in which they were sent.
    sent: VecDeque<Sent>,
    /// How long to go on without an answer, to each request.
    patience: Duration,
    stop: &'a Stop,
    /// Set once another connection of the same import has failed.
    failed: Option<&'a AtomicBool>,
}

/// A request in flight.
struct Sent {
    number: u64,
    request: Request,
    /// Since when it waits for an answer, without the time in which the daemon was away.
    clock: Clock,
}

impl<'a> Lasting<'a> {
    /// The first connection: nothing is waited for.
    pub(crate) fn connect(
        target: &'a dyn Connect,
        patience: Duration,
        stop: &'a Stop,
    ) -> Result<Self, Error> {
        Ok(Self { port: Some(connect(target)?), ..Self::unconnected(target, patience, stop) })
    }

    /// A further connection: a daemon that has gone away since is waited for.
    pub(crate) fn again(
        target: &'a dyn Connect,
        patience: Duration,
        stop: &'a Stop,
    ) -> Result<Self, Error> {
        let mut lasting = Self::unconnected(target, patience, stop);
        lasting.request("connect", |_| Ok(())).map(|()| lasting)
    }

    fn unconnected(target: &'a dyn Connect, patience: Duration, stop: &'a Stop) -> Self {
        Self { target, port: None, sent: VecDeque::new(), patience, stop, failed: None }
    }

    /// Repeats nothing once `failed` is set: another connection of the same import has failed.
    pub(crate) fn beside(self, failed: &'a AtomicBool) -> Self {
        Self { failed: Some(failed), ..self }
    }

    /// Requests that were sent and not answered.
    pub(crate) fn in_flight(&self) -> usize {
        self.sent.len()
    }

    /// Sends a request and does not wait for its answer.
    pub(crate) fn send(&mut self, request: Request) -> Result<(), Error> {
        self.stop.check()?;
        let number = match self.port.as_mut().map(|port| port.send(&request)) {
            Some(Ok(number)) => number,
            Some(Err(refused @ PortError::Refused(_))) => {
                return Err(failed(self.target, request.name(), refused));
            }
            // `receive` connects again, and sends it with all others.
            Some(Err(PortError::Lost(_) | PortError::Silent(_))) | None => {
                self.port = None;
                0
            }
        };
        self.sent.push_back(Sent { number, request, clock: Clock::start() });
        Ok(())
    }

    /// Waits until a request in flight is answered. Returns it, and the bytes of a read.
    pub(crate) fn receive(&mut self) -> Result<(Request, Vec<u8>), Error> {
        let Answer { number, result } = self.request("transfer", |port| port.receive())?;
        let at = self.sent.iter().position(|sent| sent.number == number);
        let Some(Sent { request, .. }) = at.and_then(|at| self.sent.remove(at)) else {
            return Err(Error::Unexpected {
                what: self.target.address().to_owned(),
                problem: "an answer to a request that was not sent".to_owned(),
            });
        };
        match result {
            Ok(data) => Ok((request, data)),
            Err(error) => Err(failed(self.target, request.name(), PortError::Refused(error))),
        }
    }

    /// Takes the bytes of a read back.
    pub(crate) fn recycle(&mut self, buffer: Vec<u8>) {
        if let Some(port) = &mut self.port {
            port.recycle(buffer);
        }
    }

    /// Repeats a call until the connection lasts for it.
    pub(crate) fn request<T>(
        &mut self,
        what: &str,
        mut call: impl FnMut(&mut dyn Port) -> Result<T, PortError>,
    ) -> Result<T, Error> {
        let clock = Clock::start();
        loop {
            self.stop.check()?;
            let lost = match self.attempt(&mut call) {
                Ok(answer) => return Ok(answer),
                Err(refused @ PortError::Refused(_)) => {
                    return Err(failed(self.target, what, refused));
                }
                Err(lost) => lost,
            };
            let is_away = matches!(lost, PortError::Lost(_)) || self.port.is_none();
            self.port = None;
            if is_away {
                self.sent.iter_mut().for_each(|sent| sent.clock = Clock::start());
            }
            // A change that waits for space is given up although others are answered meanwhile.
            let changes = |sent: &&Sent| !matches!(sent.request, Request::Read { .. });
            let waited = self.sent.iter().find(changes).map(|oldest| oldest.clock.elapsed());
            if waited.unwrap_or_default().max(clock.elapsed()) >= self.patience {
                return Err(failed(self.target, what, lost));
            }
            std::thread::sleep(RETRY_PAUSE.min(self.patience));
            if self.failed.is_some_and(|failed| failed.load(Ordering::Relaxed)) {
                return Err(failed(self.target, what, lost));
            }
        }
    }

    fn attempt<T>(
        &mut self,
        call: &mut impl FnMut(&mut dyn Port) -> Result<T, PortError>,
    ) -> Result<T, PortError> {
        if let Some(port) = &mut self.port {
            return call(port.as_mut());
        }
        // A daemon that is starting may refuse what it will do later.
        let mut port = self.target.connect().map_err(|error| match error {
            PortError::Refused(error) => PortError::Lost(error),
            lost => lost,
        })?;
        for sent in &mut self.sent {
            sent.number = port.send(&sent.request)?;
        }
        call(self.port.insert(port).as_mut())
    }
}

fn failed(target: &dyn Connect, what: &str, error: PortError) -> Error {
    let address = target.address();
    match error {
        PortError::Lost(source) => Error::Unreachable {
            address: address.to_owned(),
            problem: format!("{what}: the connection is gone: {source}"),
        },
        PortError::Silent(time) => Error::Unreachable {
            address: address.to_owned(),
            problem: format!(
                "{what}: no answer within {time:?}: if the pool is full, writes wait (`blockd pool \
                 show`)"
            ),
        },
        PortError::Refused(source) => Error::io(format!("{address}: {what}"), source),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use blockd_media::error::ErrorKind;

    use super::super::memory::Memory;
    use super::*;

    fn write(offset: u64, value: u8) -> Request {
        Request::Write { offset, data: vec![value; 512] }
    }

    #[test]
    fn a_broken_connection_is_made_anew_and_its_requests_repeated() {
        let memory = Memory::new(8192);
        let stop = Stop::default();
        let mut port = Lasting::connect(&memory, Duration::from_secs(5), &stop).unwrap();
        memory.break_every(3);
        for round in 0..5_u8 {
            for at in 0..2_u8 {
                port.send(write(u64::from(at) * 512, round * 2 + at)).unwrap();
            }
            while port.in_flight() > 0 {
                port.receive().unwrap();
            }
        }
        assert_eq!((memory.bytes()[0], memory.bytes()[512]), (8, 9));
        port.send(Request::Read { offset: 512, len: 512 }).unwrap();
        let (request, data) = port.receive().unwrap();
        assert!(matches!(request, Request::Read { offset: 512, .. }) && data == [9; 512]);
    }

    #[test]
    fn patience_ends() {
        let memory = Memory::new(8192);
        let stop = Stop::default();
        let mut port = Lasting::connect(&memory, Duration::from_millis(1), &stop).unwrap();
        memory.break_every(1);
        let error = port.request("flush", |port| port.flush()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable);
        port.send(write(0, 1)).unwrap();
        assert_eq!(port.receive().unwrap_err().kind(), ErrorKind::Unreachable);
    }

    /// The daemon is there, and its pool may be full.
    #[test]
    fn a_connection_without_answers_is_not_called_gone() {
        let memory = Memory::new(8192);
        let stop = Stop::default();
        let mut port = Lasting::connect(&memory, Duration::ZERO, &stop).unwrap();
        let silent = |_: &mut dyn Port| Err::<(), _>(PortError::Silent(Duration::from_secs(30)));
        let error = port.request("transfer", silent).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable);
        let expected = "memory: transfer: no answer within 30s: if the pool is full, writes wait";
        assert!(error.to_string().starts_with(expected), "{error}");
    }

    /// Answers one request on each connection, the newest, and then none.
    struct Trickling(Vec<u64>);

    const SILENCE: Duration = Duration::from_millis(20);

    impl Connect for AtomicUsize {
        fn connect(&self) -> Result<Box<dyn Port>, PortError> {
            self.fetch_add(1, Ordering::Relaxed);
            Ok(Box::new(Trickling(Vec::new())))
        }

        fn address(&self) -> &'static str {
            "trickle"
        }
    }

    impl Port for Trickling {
        fn send(&mut self, _: &Request) -> Result<u64, PortError> {
            let number = self.0.len() as u64;
            self.0.push(number);
            Ok(number)
        }

        fn receive(&mut self) -> Result<Answer, PortError> {
            if let Some(number) = self.0.pop().filter(|number| *number > 0) {
                self.0.clear();
                return Ok(Answer { number, result: Ok(Vec::new()) });
            }
            std::thread::sleep(SILENCE);
            Err(PortError::Silent(SILENCE))
        }

        fn recycle(&mut self, _: Vec<u8>) {}

        fn flush(&mut self) -> Result<(), PortError> {
            Ok(())
        }

        fn allocation(&mut self, _: u64, len: u64) -> Result<Vec<Allocation>, PortError> {
            Ok(vec![Allocation { len, holds: Holds::Data }])
        }
    }

    fn fails_after(port: &mut Lasting<'_>) -> usize {
        (0..8).for_each(|at| port.send(write(at * 512, 1)).unwrap());
        while port.receive().is_ok() {}
        port.in_flight()
    }

    #[test]
    fn a_request_is_given_up_in_time_although_others_are_answered() {
        let (connections, stop) = (AtomicUsize::new(0), Stop::default());
        let mut port = Lasting::connect(&connections, 2 * SILENCE, &stop).unwrap();
        // Without the limit, seven are answered.
        assert!(fails_after(&mut port) >= 6);
    }

    #[test]
    fn nothing_is_repeated_once_another_connection_has_failed() {
        let (connections, stop) = (AtomicUsize::new(0), Stop::default());
        let failed = AtomicBool::new(false);
        let port = Lasting::connect(&connections, Duration::from_secs(60), &stop).unwrap();
        let mut port = port.beside(&failed);
        failed.store(true, Ordering::Relaxed);
        assert_eq!((fails_after(&mut port), connections.into_inner()), (7, 1));
    }

    #[test]
    fn a_request_that_the_volume_refuses_is_not_repeated() {
        let memory = Memory::new(512);
        let stop = Stop::default();
        let mut port = Lasting::connect(&memory, Duration::from_secs(60), &stop).unwrap();
        port.send(write(512, 1)).unwrap();
        let error = port.receive().unwrap_err();
        assert!(error.to_string().contains("memory: write: "), "{error}");
    }
}
