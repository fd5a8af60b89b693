//! A volume in memory, for tests, whose connections break on request.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use super::port::{Allocation, Answer, Connect, Holds, Port, PortError, Request};

const GRAIN: usize = 4096;

#[derive(Debug, Default)]
struct State {
    bytes: Vec<u8>,
    mapped: Vec<bool>,
    requests: u64,
    break_every: u64,
    flushed: bool,
    /// Requests that were sent and not answered, on all connections.
    in_flight: usize,
    most_in_flight: usize,
    /// Requests in flight that answers wait for.
    hold: usize,
}

/// How long an answer waits for more requests in flight.
const HOLD_TIME: Duration = Duration::from_millis(300);

/// The volume.
#[derive(Clone, Debug)]
pub(super) struct Memory(Arc<(Mutex<State>, Condvar)>);

/// A connection to it.
#[derive(Debug)]
struct MemoryPort {
    memory: Memory,
    sent: VecDeque<(u64, Queued)>,
    next: u64,
}

/// A request as it is on its way.
#[derive(Debug)]
enum Queued {
    Read(u64, usize),
    Write(u64, Vec<u8>),
    Zero(u64, u64),
}

impl Memory {
    pub(super) fn new(size: usize) -> Self {
        let mapped = vec![false; size.div_ceil(GRAIN)];
        let state = State { bytes: vec![0; size], mapped, ..State::default() };
        Self(Arc::new((Mutex::new(state), Condvar::new())))
    }

    pub(super) fn of(bytes: Vec<u8>) -> Self {
        let memory = Self::new(bytes.len());
        for (index, grain) in bytes.chunks(GRAIN).enumerate() {
            if grain.iter().any(|byte| *byte != 0) {
                memory.write((index * GRAIN) as u64, grain).unwrap();
            }
        }
        memory
    }

    /// From now on each n-th request loses its connection, half of them after it was done.
    pub(super) fn break_every(&self, n: u64) {
        self.state().break_every = n;
    }

    /// Holds answers back until this number of requests is in flight, for some time.
    pub(super) fn hold(&self, requests: usize) {
        self.state().hold = requests;
    }

    /// The most requests that were in flight at a time.
    pub(super) fn most_in_flight(&self) -> usize {
        self.state().most_in_flight
    }

    /// Requests that were carried out so far.
    pub(super) fn requests(&self) -> u64 {
        self.state().requests
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.0.lock().unwrap()
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        self.state().bytes.clone()
    }

    pub(super) fn mapped_count(&self) -> usize {
        self.state().mapped.iter().filter(|mapped| **mapped).count()
    }

    pub(super) fn flushed(&self) -> bool {
        self.state().flushed
    }

    fn request<T>(
        &self,
        offset: u64,
        len: u64,
        act: impl FnOnce(&mut State, usize, usize) -> T,
    ) -> Result<T, PortError> {
        let mut state = self.state();
        state.requests += 1;
        let breaks = state.break_every > 0 && state.requests.is_multiple_of(state.break_every);
        let lost = || PortError::Lost(io::Error::from(io::ErrorKind::ConnectionReset));
        if breaks && state.requests.is_multiple_of(2) {
            return Err(lost());
        }
        let end = usize::try_from(offset + len).unwrap();
        if end > state.bytes.len() {
            return Err(PortError::Refused(io::Error::from(io::ErrorKind::InvalidInput)));
        }
        let answer = act(&mut state, usize::try_from(offset).unwrap(), end);
        if breaks { Err(lost()) } else { Ok(answer) }
    }
}

impl Memory {
    fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>, PortError> {
        self.request(offset, len as u64, |state, start, end| state.bytes[start..end].to_vec())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), PortError> {
        self.request(offset, data.len() as u64, |state, start, end| {
            state.bytes[start..end].copy_from_slice(data);
            state.mapped[start / GRAIN..end.div_ceil(GRAIN)].fill(true);
            state.flushed = false;
        })
    }

    fn zero(&self, offset: u64, len: u64) -> Result<(), PortError> {
        self.request(offset, len, |state, start, end| {
            state.bytes[start..end].fill(0);
            state.mapped[start.div_ceil(GRAIN)..end / GRAIN].fill(false);
            state.flushed = false;
        })
    }
}

impl Port for MemoryPort {
    fn send(&mut self, request: &Request) -> Result<u64, PortError> {
        let queued = match request {
            Request::Read { offset, len } => Queued::Read(*offset, *len),
            Request::Write { offset, data } => Queued::Write(*offset, data.clone()),
            Request::Zero { offset, len } => Queued::Zero(*offset, *len),
        };
        self.next += 1;
        self.sent.push_back((self.next, queued));
        let mut state = self.memory.state();
        state.in_flight += 1;
        state.most_in_flight = state.most_in_flight.max(state.in_flight);
        self.memory.0.1.notify_all();
        Ok(self.next)
    }

    fn receive(&mut self) -> Result<Answer, PortError> {
        let state = self.memory.state();
        let is_held = |state: &mut State| state.most_in_flight < state.hold;
        drop(self.memory.0.1.wait_timeout_while(state, HOLD_TIME, is_held).unwrap());
        // Answers come in another order than requests.
        let (number, queued) = self.sent.pop_back().unwrap();
        self.memory.state().in_flight -= 1;
        let result = match queued {
            Queued::Read(offset, len) => self.memory.read(offset, len),
            Queued::Write(offset, data) => self.memory.write(offset, &data).map(|()| Vec::new()),
            Queued::Zero(offset, len) => self.memory.zero(offset, len).map(|()| Vec::new()),
        };
        match result {
            Ok(data) => Ok(Answer { number, result: Ok(data) }),
            Err(PortError::Refused(error)) => Ok(Answer { number, result: Err(error) }),
            Err(lost) => Err(lost),
        }
    }

    fn recycle(&mut self, _: Vec<u8>) {}

    fn flush(&mut self) -> Result<(), PortError> {
        self.memory.request(0, 0, |state, _, _| state.flushed = true)
    }

    fn allocation(&mut self, offset: u64, len: u64) -> Result<Vec<Allocation>, PortError> {
        self.memory.request(offset, len, |state, start, end| {
            let first = state.mapped[start / GRAIN];
            let run = state.mapped[start / GRAIN..].iter().take_while(|next| **next == first);
            let stop = ((start / GRAIN + run.count()) * GRAIN).min(end);
            let holds = if first { Holds::Data } else { Holds::Zero };
            vec![Allocation { len: (stop - start) as u64, holds }]
        })
    }
}

impl Drop for MemoryPort {
    fn drop(&mut self) {
        self.memory.state().in_flight -= self.sent.len();
    }
}

impl Connect for Memory {
    fn connect(&self) -> Result<Box<dyn Port>, PortError> {
        let memory = self.clone();
        Ok(Box::new(MemoryPort { memory, sent: VecDeque::new(), next: 0 }))
    }

    fn address(&self) -> &str {
        "memory"
    }
}
