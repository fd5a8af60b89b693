//! A volume in memory, for tests, whose connections break on request.

use std::io;
use std::sync::{Arc, Mutex};

use super::port::{Allocation, Connect, Holds, Port, PortError};

const GRAIN: usize = 4096;

#[derive(Debug, Default)]
struct State {
    bytes: Vec<u8>,
    mapped: Vec<bool>,
    requests: u64,
    break_every: u64,
    flushed: bool,
}

/// The volume.
#[derive(Clone, Debug)]
pub(super) struct Memory(Arc<Mutex<State>>);

impl Memory {
    pub(super) fn new(size: usize) -> Self {
        let mapped = vec![false; size.div_ceil(GRAIN)];
        Self(Arc::new(Mutex::new(State { bytes: vec![0; size], mapped, ..State::default() })))
    }

    pub(super) fn of(bytes: Vec<u8>) -> Self {
        let memory = Self::new(bytes.len());
        let mut port = memory.clone();
        for (index, grain) in bytes.chunks(GRAIN).enumerate() {
            if grain.iter().any(|byte| *byte != 0) {
                port.write((index * GRAIN) as u64, grain).unwrap();
            }
        }
        memory
    }

    /// From now on each n-th request loses its connection, half of them after it was done.
    pub(super) fn break_every(&self, n: u64) {
        self.0.lock().unwrap().break_every = n;
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        self.0.lock().unwrap().bytes.clone()
    }

    pub(super) fn mapped_count(&self) -> usize {
        self.0.lock().unwrap().mapped.iter().filter(|mapped| **mapped).count()
    }

    pub(super) fn flushed(&self) -> bool {
        self.0.lock().unwrap().flushed
    }

    fn request<T>(
        &self,
        offset: u64,
        len: u64,
        act: impl FnOnce(&mut State, usize, usize) -> T,
    ) -> Result<T, PortError> {
        let mut state = self.0.lock().unwrap();
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

impl Port for Memory {
    fn read(&mut self, offset: u64, buffer: &mut [u8]) -> Result<(), PortError> {
        let len = buffer.len() as u64;
        self.request(offset, len, |state, start, end| {
            buffer.copy_from_slice(&state.bytes[start..end]);
        })
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), PortError> {
        self.request(offset, data.len() as u64, |state, start, end| {
            state.bytes[start..end].copy_from_slice(data);
            state.mapped[start / GRAIN..end.div_ceil(GRAIN)].fill(true);
            state.flushed = false;
        })
    }

    fn zero(&mut self, offset: u64, len: u64) -> Result<(), PortError> {
        self.request(offset, len, |state, start, end| {
            state.bytes[start..end].fill(0);
            state.mapped[start.div_ceil(GRAIN)..end / GRAIN].fill(false);
            state.flushed = false;
        })
    }

    fn flush(&mut self) -> Result<(), PortError> {
        self.request(0, 0, |state, _, _| state.flushed = true)
    }

    fn allocation(&mut self, offset: u64, len: u64) -> Result<Vec<Allocation>, PortError> {
        self.request(offset, len, |state, start, end| {
            let first = state.mapped[start / GRAIN];
            let run = state.mapped[start / GRAIN..].iter().take_while(|next| **next == first);
            let stop = ((start / GRAIN + run.count()) * GRAIN).min(end);
            let holds = if first { Holds::Data } else { Holds::Zero };
            vec![Allocation { len: (stop - start) as u64, holds }]
        })
    }
}

impl Connect for Memory {
    fn connect(&self) -> Result<Box<dyn Port>, PortError> {
        Ok(Box::new(self.clone()))
    }

    fn address(&self) -> &str {
        "memory"
    }
}
