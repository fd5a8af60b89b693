//! The daemon's reports during the story: its events as they come, and its log.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::Daemon;
use blockd_testkit::tools;
use serde::Serialize;
use serde_json::Value;

/// Prints lines with the seconds since the story began, or nothing when only figures are requested.
#[derive(Clone, Copy, Debug)]
pub struct Voice {
    pub begun: Clock,
    pub is_quiet: bool,
}

impl Voice {
    /// Seconds since the story began.
    #[must_use]
    pub fn now(&self) -> f64 {
        self.begun.elapsed().as_secs_f64()
    }

    /// A line.
    pub fn say(&self, text: &str) {
        if !self.is_quiet {
            println!("[{:5.1} s] {text}", self.now());
        }
    }
}

/// How much of a pool is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    Normal,
    Low,
    VeryLow,
    Full,
}

impl State {
    /// All of them, from the best.
    pub const ALL: [Self; 4] = [Self::Normal, Self::Low, Self::VeryLow, Self::Full];

    /// For people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Normal => "normal",
            Self::Low => "low",
            Self::VeryLow => "very low",
            Self::Full => "full",
        }
    }

    /// The state that an event reports.
    fn of_event(kind: &str) -> Option<Self> {
        match kind {
            "space_normal" => Some(Self::Normal),
            "space_low" => Some(Self::Low),
            "space_very_low" => Some(Self::VeryLow),
            "space_full" => Some(Self::Full),
            _ => None,
        }
    }

    /// The state that a line of the log reports.
    fn of_line(line: &str) -> Option<Self> {
        let texts = [
            ("pool default has enough space again", Self::Normal),
            ("pool default is low:", Self::Low),
            ("pool default is very low", Self::VeryLow),
            ("pool default is full:", Self::Full),
        ];
        texts.into_iter().find_map(|(text, state)| line.contains(text).then_some(state))
    }
}

/// An event, when it came.
#[derive(Clone, Debug, Serialize)]
pub struct Event {
    /// Seconds since the story began.
    pub at: f64,
    pub kind: String,
    pub text: String,
    /// Events before it that were missed.
    pub missed: u64,
}

/// Receives the daemon's events and prints each of them.
#[derive(Debug)]
pub struct Listener {
    child: Child,
    events: Arc<Mutex<Vec<Event>>>,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    /// Begins with what the daemon remembers.
    ///
    /// # Errors
    /// When the command can't be started.
    pub fn start(daemon: &Daemon, voice: Voice) -> Result<Self> {
        let mut command = Command::new(tools::blockd()?);
        command.env("BLOCKD_SOCKET", daemon.control_socket());
        command.args(["--json", "events", "--replay"]).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().context("starting blockd events")?;
        let output = child.stdout.take().context("blockd events prints nowhere")?;
        let events = Arc::<Mutex<Vec<Event>>>::default();
        let shared = Arc::clone(&events);
        let thread = std::thread::spawn(move || {
            for line in BufReader::new(output).lines() {
                let Some(event) = line.ok().and_then(|line| read(&line, voice.now())) else {
                    return;
                };
                voice.say(&format!("event: {}", event.text));
                shared.lock().unwrap_or_else(PoisonError::into_inner).push(event);
            }
        });
        Ok(Self { child, events, thread: Some(thread) })
    }

    /// All that came so far.
    #[must_use]
    pub fn all(&self) -> Vec<Event> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether an event of this kind has come.
    #[must_use]
    pub fn count(&self, kind: &str) -> usize {
        self.all().iter().filter(|event| event.kind == kind).count()
    }

    /// The pool's state by the last event.
    #[must_use]
    pub fn state(&self) -> State {
        crossings(&self.all()).last().map_or(State::Normal, |last| last.1)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn read(line: &str, at: f64) -> Option<Event> {
    let event: Value = serde_json::from_str(line).ok()?;
    Some(Event {
        at,
        kind: event["kind"].as_str()?.to_owned(),
        text: event["text"].as_str()?.to_owned(),
        missed: event["missed"].as_u64()?,
    })
}

/// When the pool came into which state. Events remind of a state that goes on: that is none.
#[must_use]
pub fn crossings(events: &[Event]) -> Vec<(f64, State)> {
    let mut found: Vec<(f64, State)> = Vec::new();
    let states = events.iter().filter_map(|one| Some((one.at, State::of_event(&one.kind)?)));
    for (at, state) in states {
        if found.last().is_none_or(|last| last.1 != state) {
            found.push((at, state));
        }
    }
    found
}

/// The states that the log reports, line by line.
#[must_use]
pub fn logged(log: &str) -> Vec<State> {
    log.lines().filter_map(State::of_line).collect()
}

/// Whether the log reports each crossing exactly once.
///
/// # Errors
/// With what is wrong.
pub fn compare(events: &[Event], log: &str) -> Result<(), String> {
    let crossed: Vec<State> = crossings(events).into_iter().map(|one| one.1).collect();
    let logged = logged(log);
    if let Some(twice) = logged.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("the log reports twice that the pool is {}", twice[0].name()));
    }
    if crossed != logged {
        return Err(format!("events report {crossed:?}, the log {logged:?}"));
    }
    if let Some(event) = events.iter().find(|event| event.missed > 0) {
        return Err(format!("{} events before {:?} were missed", event.missed, event.text));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(at: f64, kind: &str) -> Event {
        Event { at, kind: kind.to_owned(), text: String::new(), missed: 0 }
    }

    #[test]
    fn a_reminder_is_no_crossing_and_a_line_too_many_is_noticed() {
        let kinds =
            ["ready", "space_low", "pool_grown", "space_normal", "space_full", "space_full"];
        let events: Vec<Event> = kinds.iter().map(|kind| event(1.0, kind)).collect();
        let states: Vec<State> = crossings(&events).into_iter().map(|one| one.1).collect();
        assert_eq!(states, [State::Low, State::Normal, State::Full]);
        let line = |state| match state {
            State::Normal => "INFO pool default has enough space again: 1 GiB of 2 GiB\n",
            State::Low => "WARN pool default is low: 3 MiB of 2 GiB left\n",
            State::VeryLow => "ERROR pool default is very low, and writes that need space wait\n",
            State::Full => "ERROR pool default is full: writes that need space wait\n",
        };
        let log: String = states.iter().map(|state| line(*state)).collect();
        assert_eq!(compare(&events, &log), Ok(()));
        assert!(compare(&events, &format!("{log}{}", line(State::Full))).is_err());
        assert!(compare(&events, &format!("{log}{}", line(State::VeryLow))).is_err());
        assert!(compare(&events[..3], &log).is_err());
        assert_eq!(logged("pool default has grown by 3 MiB\n"), []);
    }
}
