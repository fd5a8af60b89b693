//! The replay of a sequence: calls start in their order, those that overlap run beside each other,
//! and one that begins after another has ended waits for it.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use blockd_csi_base::grpc::code_name;
use blockd_record::recording::Call;
use blockd_testkit::clock::Clock;
use tonic::Code;

use super::bindings::Bindings;
use super::calls::{Answer, Calls};
use super::kubelet;
use super::sequence::{Action, Entry, Retry, Sequence};
use super::step::{Held, Step};
use crate::csi::rig::Rig;

/// Pauses of a replay are no longer than this, whatever the sequence has.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// A call that is repeated so long does not end.
const LONGEST_RETRY: Duration = Duration::from_secs(120);

/// Calls beside each other: the provisioner's default of --worker-threads, and some of the others.
const MOST_AT_ONCE: usize = 128;

/// How far a replay has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    Done,
    /// The machine is to be started anew; the replay goes on with this entry.
    Reboot(usize),
}

/// A replay against a daemon and its plugin.
#[derive(Debug)]
pub struct Replay<'a> {
    rig: &'a mut Rig,
    calls: Arc<Calls>,
    shared: Arc<Shared>,
    held: Held,
}

#[derive(Debug)]
struct Shared {
    bindings: Mutex<Bindings>,
    kubelet_dir: PathBuf,
}

/// A call that is under way.
struct Running {
    end_ms: f64,
    thread: JoinHandle<Result<()>>,
}

impl<'a> Replay<'a> {
    /// A replay that calls the plugin by its socket.
    ///
    /// # Errors
    /// When threads can't be started.
    pub fn new(rig: &'a mut Rig) -> Result<Self> {
        let socket = rig.plugin.socket();
        Self::through(rig, &socket)
    }

    /// The same by another socket, as that of a recorder.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn through(rig: &'a mut Rig, socket: &Path) -> Result<Self> {
        let kubelet_dir = rig.plugin.kubelet_dir();
        let bindings = Mutex::new(Bindings::new(&kubelet_dir.to_string_lossy()));
        let shared = Arc::new(Shared { bindings, kubelet_dir });
        Ok(Self { calls: Calls::new(socket)?, rig, shared, held: Held::new() })
    }

    /// Replays all of a sequence.
    ///
    /// # Errors
    /// When an answer differs, a look at the node fails, or the sequence has a reboot.
    pub fn run(&mut self, sequence: &Sequence) -> Result<()> {
        match self.run_from(sequence, 0)? {
            Progress::Done => Ok(()),
            Progress::Reboot(_) => Err(anyhow!("{} needs a machine to reboot", sequence.name)),
        }
    }

    /// Replays a sequence from an entry on, up to its end or a reboot.
    ///
    /// # Errors
    /// When an answer differs, or a look at the node fails.
    pub fn run_from(&mut self, sequence: &Sequence, from: usize) -> Result<Progress> {
        let scale = sequence.header.pause_scale.unwrap_or_default();
        let mut running: Vec<Running> = Vec::new();
        let mut last_end_ms = sequence.entries.get(from).map_or(0.0, |entry| entry.start_ms);
        let mut log = self.rig.plugin.log().len();
        for (index, entry) in sequence.entries.iter().enumerate().skip(from) {
            let place = format!("{}:{}", sequence.name, entry.line);
            let (over, rest): (Vec<_>, Vec<_>) =
                running.into_iter().partition(|one| one.end_ms <= entry.start_ms);
            running = rest;
            for one in over {
                last_end_ms = f64::max(last_end_ms, one.end_ms);
                joined(one)?;
            }
            if running.is_empty() {
                log = self.rig.plugin.log().len();
                pause((entry.start_ms - last_end_ms) * scale);
            }
            last_end_ms = f64::max(last_end_ms, entry.start_ms);
            ensure!(running.len() < MOST_AT_ONCE, "{place}: too many calls at once");
            match &entry.action {
                Action::Step(Step::Reboot {}) => {
                    ensure!(running.is_empty(), "{place}: a reboot while calls are under way");
                    return Ok(Progress::Reboot(index + 1));
                }
                Action::Step(step) => {
                    let bindings = self.bindings();
                    let done = step.run(self.rig, &bindings, log, &mut self.held);
                    done.with_context(|| format!("{place}: {step:?}"))?;
                }
                Action::Call { call, retry } => {
                    running.push(self.begin(place, entry, call, retry.clone(), scale));
                }
            }
        }
        running.into_iter().try_for_each(joined)?;
        self.calls.disconnect();
        Ok(Progress::Done)
    }

    /// The values of placeholders so far.
    #[must_use]
    pub fn bindings(&self) -> Bindings {
        self.shared.bindings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Goes on with the values of an earlier part.
    pub fn bind(&mut self, bindings: Bindings) {
        *self.shared.bindings.lock().unwrap_or_else(PoisonError::into_inner) = bindings;
    }

    fn begin(
        &self,
        place: String,
        entry: &Entry,
        call: &Call,
        retry: Option<Retry>,
        scale: f64,
    ) -> Running {
        let (calls, shared, call) =
            (Arc::clone(&self.calls), Arc::clone(&self.shared), call.clone());
        let thread = std::thread::spawn(move || {
            let done = repeat(&calls, &shared, &call, retry.as_ref(), scale);
            done.with_context(|| format!("{place}: {}", call.method))
        });
        Running { end_ms: entry.end_ms, thread }
    }
}

fn joined(running: Running) -> Result<()> {
    running.thread.join().map_err(|_| anyhow!("a thread panicked"))?
}

fn pause(milliseconds: f64) {
    let pause = Duration::try_from_secs_f64(milliseconds / 1e3).unwrap_or_default();
    std::thread::sleep(pause.min(LONGEST_PAUSE));
}

/// Makes a call, again if its caller would, and compares the answer.
fn repeat(
    calls: &Calls,
    shared: &Shared,
    call: &Call,
    retry: Option<&Retry>,
    scale: f64,
) -> Result<()> {
    let start = Clock::start();
    let mut number = 0;
    loop {
        let answer = one(calls, shared, call)?;
        let code = code_name(answer.status.code());
        let again = retry.filter(|retry| retry.on.iter().any(|one| one == code));
        match again {
            Some(retry) if code != call.code => {
                let text = answer.status.message();
                ensure!(start.elapsed() < LONGEST_RETRY, "{code} after {number} repeats: {text}");
                pause(retry.by.pause(number).as_secs_f64() * 1e3 * scale);
                number += 1;
            }
            _ => return compare(shared, call, &answer),
        }
    }
}

fn one(calls: &Calls, shared: &Shared, call: &Call) -> Result<Answer> {
    let bindings = shared.bindings.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let request = bindings.json(&call.request)?;
    let method = call.method.rsplit('/').next().unwrap_or_default();
    kubelet::before(method, &request)?;
    let deadline = call.deadline_ms.map(Duration::from_millis);
    let answer = calls.call(call.connection, &call.method, &request, deadline)?;
    if answer.status.code() == Code::Ok {
        kubelet::after(method, &request, &shared.kubelet_dir);
    }
    Ok(answer)
}

fn compare(shared: &Shared, call: &Call, answer: &Answer) -> Result<()> {
    let (code, text) = (code_name(answer.status.code()), answer.status.message());
    ensure!(code == call.code, "it ended with {code}, not {}: {text}", call.code);
    let mut bindings = shared.bindings.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(expected) = &call.response {
        let actual = answer.messages.first().context("no answer")?;
        bindings.compare("answer", expected, actual)?;
    }
    if let Some(expected) = &call.responses {
        let actual = serde_json::Value::Array(answer.messages.clone());
        bindings.compare("answers", expected, &actual)?;
    }
    Ok(())
}
