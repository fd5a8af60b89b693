//! Clients beside a device under attack. Requests to a block device can't be given up, so that each
//! client is a thread that is looked at from outside.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Result;
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::Daemon;
use blockd_testkit::nbd::Connection;
use blockd_testkit::tools;

use super::super::device::{Buffer, Device};
use super::super::device_of;
use super::{EXPORT, EXTENT, NEIGHBOUR, VICTIM, WRITTEN};

const BLOCK: usize = 4096;
/// Where first writes begin in a volume.
const FIRST_WRITES: u64 = 3 << 40;
/// An operation that takes longer is reported as stuck.
const PATIENCE: Duration = Duration::from_secs(4);
/// The least time between two control calls, each of which starts a process.
const PACE: Duration = Duration::from_millis(200);

/// Number of the next extent for a first write, over all volumes and attempts.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// The operation that a client repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Victim {
    Read,
    Write,
    Fsync,
    FirstWrite,
    NbdRead,
    Control,
}

impl Victim {
    pub(super) const ALL: [Self; 6] =
        [Self::Read, Self::Write, Self::Fsync, Self::FirstWrite, Self::NbdRead, Self::Control];
}

/// The results of a client.
#[derive(Clone, Debug)]
pub(super) struct Figures {
    pub(super) per_second: f64,
    pub(super) worst: Duration,
    pub(super) problem: Option<String>,
}

#[derive(Debug)]
struct State {
    operations: u32,
    worst: Duration,
    began: Option<Clock>,
    error: Option<String>,
    took: Duration,
}

/// A client's thread, and what is known of it.
struct Client {
    state: Arc<Mutex<State>>,
    thread: JoinHandle<()>,
}

/// Victims whose time is over.
pub(super) struct Measured {
    clients: Vec<Client>,
    figures: Vec<Figures>,
}

impl Measured {
    /// The results of each victim.
    pub(super) fn figures(&self) -> Vec<Figures> {
        self.figures.clone()
    }

    /// Waits for threads whose operation was stuck.
    pub(super) fn join(self) {
        for client in self.clients {
            // One that panicked has no operations and was reported.
            let _ = client.thread.join();
        }
    }
}

/// Runs victims at the same time, and beside each a neighbour that does the same if asked for.
pub(super) fn measure(
    daemon: &Daemon,
    victims: &[Victim],
    window: Duration,
    beside_neighbours: bool,
) -> Result<Measured> {
    let mut clients = Vec::new();
    for victim in victims {
        clients.push(client(daemon, *victim, VICTIM, window)?);
    }
    if beside_neighbours {
        for victim in victims {
            clients.push(client(daemon, *victim, NEIGHBOUR, window)?);
        }
    }
    let start = Clock::start();
    let over = || clients.iter().all(|client| client.thread.is_finished());
    while !over() && start.elapsed() < window + PATIENCE {
        std::thread::sleep(Duration::from_millis(10));
    }
    let figures = clients.iter().take(victims.len()).map(|client| client.figures(window)).collect();
    Ok(Measured { clients, figures })
}

impl Client {
    fn figures(&self, window: Duration) -> Figures {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let stuck = state.began.map(|began| began.elapsed());
        let took = state.took.max(window) + stuck.unwrap_or_default();
        let problem = stuck.map(|stuck| format!("no answer for {:.1} s", stuck.as_secs_f64()));
        Figures {
            per_second: f64::from(state.operations) / took.as_secs_f64(),
            worst: state.worst.max(stuck.unwrap_or_default()),
            problem: state.error.clone().or(problem),
        }
    }
}

fn client(
    daemon: &Daemon,
    victim: Victim,
    volume: &'static str,
    window: Duration,
) -> Result<Client> {
    let mut operation = operation(daemon, victim, volume)?;
    let state = State {
        operations: 0,
        worst: Duration::ZERO,
        began: None,
        error: None,
        took: Duration::ZERO,
    };
    let state = Arc::new(Mutex::new(state));
    let shared = Arc::clone(&state);
    let pace = if victim == Victim::Control { PACE } else { Duration::ZERO };
    let thread = std::thread::spawn(move || {
        let start = Clock::start();
        while start.elapsed() < window {
            let begin = Clock::start();
            shared.lock().unwrap_or_else(PoisonError::into_inner).began = Some(begin);
            let result = operation();
            let took = begin.elapsed();
            let mut state = shared.lock().unwrap_or_else(PoisonError::into_inner);
            state.began = None;
            state.worst = state.worst.max(took);
            state.took = start.elapsed();
            if let Err(error) = result {
                state.error = Some(format!("{error:#}"));
                return;
            }
            state.operations += 1;
            drop(state);
            std::thread::sleep(pace.saturating_sub(took));
        }
    });
    Ok(Client { state, thread })
}

type Operation = Box<dyn FnMut() -> Result<()> + Send>;

fn operation(daemon: &Daemon, victim: Victim, volume: &'static str) -> Result<Operation> {
    let mut random = fastrand::Rng::with_seed(1);
    let mut place = move || random.u64(..WRITTEN / BLOCK as u64) * BLOCK as u64;
    match victim {
        Victim::NbdRead => {
            let mut connection: Connection = daemon.connect(EXPORT)?;
            return Ok(Box::new(move || connection.read(place(), BLOCK).map(drop)));
        }
        Victim::Control => {
            let mut list = daemon.program_command();
            list.env("BLOCKD_SOCKET", daemon.control_socket()).args(["--timeout", "4s", "list"]);
            return Ok(Box::new(move || tools::output(&mut list).map(drop)));
        }
        _ => {}
    }
    let device = Device::open(&device_of(volume))?;
    let mut buffer = Buffer::default();
    buffer.of(BLOCK).fill(0x77);
    Ok(Box::new(move || match victim {
        Victim::Read => device.read(place(), BLOCK, &mut buffer),
        Victim::FirstWrite => {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            device.write(FIRST_WRITES + number * EXTENT, &buffer)
        }
        Victim::Fsync => {
            device.write(place(), &buffer)?;
            device.flush()
        }
        _ => device.write(place(), &buffer),
    }))
}
