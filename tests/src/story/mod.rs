//! The story of a pool that fills up, with a real daemon and a fast writer over NBD: it is low and
//! grows, its growth is stopped, writes are throttled and then wait, it is grown by hand and they
//! go on. The reports come from the daemon; the written data is read and compared.

pub mod events;
#[cfg(test)]
mod example;
pub mod plot;
pub mod writer;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::{Daemon, Settings};
use blockd_testkit::nbd::Connection;
use serde_json::{Value, json};

use events::{Listener, State, Voice};
use plot::{Note, Sample};
use writer::{Compared, Writer};

const MIB: u64 = 1 << 20;
const VOLUME: &str = "data";
/// Limit on a step of the story beyond its intended time, for a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Requests in flight when a pool becomes full may still be answered within this time.
const SETTLE: Duration = Duration::from_secs(3);

/// How long and how large the story is.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pool: u64,
    /// Bytes a second that the writer has in mind.
    rate: u64,
    low: &'static str,
    very_low: &'static str,
    /// How far the daemon grows the pool's file by itself; then a hook goes on.
    limit: u64,
    step: u64,
    /// Times that the hook makes the file longer before it is stopped.
    hooks: usize,
    /// How long writes are left waiting; after 30 s the daemon reports it.
    waiting: Duration,
    /// By how much the pool is grown by hand.
    more: u64,
    /// For how long the writer goes on after that.
    after: Duration,
    /// Between two looks.
    look: Duration,
    /// Between two lines of figures.
    figures: f64,
}

impl Plan {
    /// Two minutes.
    #[must_use]
    pub const fn long() -> Self {
        Self {
            pool: 768 * MIB,
            rate: 32 * MIB,
            low: "12s",
            very_low: "3s",
            limit: 1280 * MIB,
            step: 256 * MIB,
            hooks: 2,
            waiting: Duration::from_secs(31),
            more: 1024 * MIB,
            after: Duration::from_secs(8),
            look: Duration::from_millis(200),
            figures: 5.0,
        }
    }

    /// Twenty seconds.
    #[must_use]
    pub const fn short() -> Self {
        Self {
            pool: 256 * MIB,
            rate: 48 * MIB,
            low: "4s",
            very_low: "1s",
            limit: 320 * MIB,
            step: 64 * MIB,
            hooks: 1,
            waiting: Duration::from_secs(2),
            more: 256 * MIB,
            after: Duration::from_millis(1500),
            look: Duration::from_millis(100),
            figures: 2.0,
        }
    }
}

/// The results of a run. It has passed when `failures` is empty.
#[derive(Debug)]
pub struct Outcome {
    pub figures: Value,
    pub svg: String,
    pub failures: Vec<String>,
    pub summary: String,
}

/// Runs the story.
///
/// # Errors
/// When it cannot run: the daemon does not start, or its observer fails.
pub fn run(plan: Plan, seed: u64, is_quiet: bool) -> Result<Outcome> {
    let voice = Voice { begun: Clock::start(), is_quiet };
    let mut story = Story::begin(plan, seed, voice)?;
    let mut failures = Vec::new();
    let result = story.go().and_then(|()| story.end());
    let compared = result.unwrap_or_else(|error| {
        failures.push(format!("{error:#}"));
        Compared::default()
    });
    for (count, what) in
        [(compared.differ, "differ"), (compared.unsound, "have another checksum than they say")]
    {
        if count > 0 {
            failures.push(format!("{count} blocks {what}"));
        }
    }
    failures.extend(events::compare(&story.listener.all(), &story.daemon.log()).err());
    story.outcome(compared, failures)
}

struct Story {
    plan: Plan,
    voice: Voice,
    /// Ends before its daemon does.
    listener: Listener,
    daemon: Daemon,
    /// `None` once it has ended.
    writer: Option<Writer>,
    /// Reads existing data, all the time.
    reader: Connection,
    slowest_read: Duration,
    samples: Vec<Sample>,
    notes: Vec<Note>,
    written: u64,
    said_at: f64,
    blocked: u64,
    /// Stops the hook.
    stop: PathBuf,
}

impl Story {
    fn begin(plan: Plan, seed: u64, voice: Voice) -> Result<Self> {
        let settings = Settings { pool_size: plan.pool, ..Settings::default() };
        let mut daemon = Daemon::new("story", &settings)?;
        let (hook, stop) = (daemon.folder().join("hook"), daemon.folder().join("stop"));
        write_hook(&hook, &stop, daemon.pool(), plan.step)?;
        daemon.configure(&Settings {
            pool_size: plan.pool,
            pool_lines: format!(
                "[pool.space]\nlow = {:?}\nvery_low = {:?}\nquantum = \"1M\"\ngrow_limit = {}\n\
                 grow_step = {}\nhook = {hook:?}\n",
                plan.low, plan.very_low, plan.limit, plan.step
            ),
            tables: "[metrics]\naddress = \"127.0.0.1:0\"".to_owned(),
            ..Settings::default()
        })?;
        voice.say(&format!(
            "a pool of {} MiB; its file may grow to {} MiB, {} MiB at a time, then a hook goes on",
            plan.pool / MIB,
            plan.limit / MIB,
            plan.step / MIB
        ));
        daemon.start()?;
        daemon.add(VOLUME, 16 * plan.pool)?;
        let listener = Listener::start(&daemon, voice)?;
        let reader = daemon.connect(VOLUME)?;
        voice.say(&format!(
            "a writer of {} MiB/s of data with checksums, over NBD; low is {} of that, very low {}",
            plan.rate / MIB,
            plan.low,
            plan.very_low
        ));
        let writer = Some(Writer::start(&daemon, VOLUME, plan.rate, seed)?);
        Ok(Self {
            plan,
            voice,
            daemon,
            listener,
            writer,
            reader,
            slowest_read: Duration::ZERO,
            samples: Vec::new(),
            notes: Vec::new(),
            written: 0,
            said_at: 0.0,
            blocked: 0,
            stop,
        })
    }

    /// All that happens, in order.
    fn go(&mut self) -> Result<()> {
        let plan = self.plan;
        self.until("the pool is low", |story| story.listener.count("space_low") > 0)?;
        let grown = usize::try_from((plan.limit - plan.pool) / plan.step)? + plan.hooks;
        self.until("the pool has grown by itself", |story| {
            story.listener.count("pool_grown") >= grown
        })?;
        self.until("it has enough space again", |story| story.listener.state() == State::Normal)?;
        fs::write(&self.stop, "").context("stopping the hook")?;
        self.note("the grower is stopped");
        self.until("the pool is very low", |story| {
            matches!(story.listener.state(), State::VeryLow | State::Full)
        })?;
        self.until("the pool is full", |story| {
            story.listener.state() == State::Full && story.blocked > 0
        })?;
        self.stand_still()?;
        fs::remove_file(&self.stop).context("letting the hook go on")?;
        let at = self.bytes();
        let more = format!("+{}M", plan.more / MIB);
        self.daemon.cli(&["pool", "grow", "--size", &more])?;
        self.note(&format!("blockd pool grow --size {more}"));
        self.until("writes go on", |story| story.bytes() > at && story.blocked == 0)?;
        self.until("it has enough space again", |story| story.listener.state() == State::Normal)?;
        let until = self.voice.now() + plan.after.as_secs_f64();
        self.until("some more is written", |story| story.voice.now() >= until)
    }

    /// Nothing is written as long as the pool is full, and no write fails.
    fn stand_still(&mut self) -> Result<()> {
        let settled = self.voice.now() + SETTLE.as_secs_f64();
        self.until("what was under way ends", |story| story.voice.now() >= settled)?;
        let (at, reminders) = (self.bytes(), self.listener.count("writes_blocked"));
        self.slowest_read = Duration::ZERO;
        let until = self.voice.now() + self.plan.waiting.as_secs_f64();
        self.until("writes have waited", |story| story.voice.now() >= until)?;
        ensure!(self.bytes() == at, "{} bytes were written to a full pool", self.bytes() - at);
        if self.plan.waiting > Duration::from_secs(30) {
            self.until("the daemon reports how long writes wait", |story| {
                story.listener.count("writes_blocked") > reminders
            })?;
        }
        self.voice.say(&format!(
            "no write was answered, none failed; the slowest read of what is there took {:.0} ms",
            self.slowest_read.as_secs_f64() * 1000.0
        ));
        Ok(())
    }

    /// Ends the writer, and reads all that it wrote.
    fn end(&mut self) -> Result<Compared> {
        let writer = self.writer.take().context("there is no writer")?;
        let written = writer.finish(&self.daemon)?;
        self.written = written.bytes;
        self.voice.say("reading all of it");
        let compared = written.compare(&self.daemon)?;
        ensure!(compared.bytes == written.bytes, "only {} bytes compared", compared.bytes);
        self.voice.say(&format!(
            "{} MiB read: {} blocks differ, {} have a wrong checksum",
            compared.bytes / MIB,
            compared.differ,
            compared.unsound
        ));
        Ok(compared)
    }

    fn bytes(&self) -> u64 {
        self.writer.as_ref().map_or(self.written, Writer::bytes)
    }

    fn pool(&self) -> Result<Value> {
        Ok(self.daemon.cli(&["pool", "show"])?["pool"].clone())
    }

    fn note(&mut self, text: &str) {
        self.voice.say(text);
        self.notes.push(Note { at: self.voice.now(), text: text.to_owned() });
    }

    /// Looks again and again until something is so.
    fn until(&mut self, what: &str, mut holds: impl FnMut(&Self) -> bool) -> Result<()> {
        let begun = Clock::start();
        while !holds(self) {
            ensure!(begun.elapsed() < PATIENCE + self.plan.waiting, "not in time: {what}");
            std::thread::sleep(self.plan.look);
            self.look()?;
        }
        Ok(())
    }

    fn look(&mut self) -> Result<()> {
        let asked = Clock::start();
        self.reader.read(0, 4096).context("reading")?;
        self.slowest_read = self.slowest_read.max(asked.elapsed());
        let pool = self.pool()?;
        let Some(writer) = &self.writer else { return Ok(()) };
        if let Some(error) = writer.error() {
            bail!("a write has failed: {error}");
        }
        let (at, bytes, delay) = (self.voice.now(), writer.bytes(), writer.take_delay());
        let before = self.samples.last().map_or(0.0, |last| last.at);
        let mib = |bytes: u64| bytes as f64 / MIB as f64;
        let field = |name: &str| pool[name].as_u64().with_context(|| format!("no {name}: {pool}"));
        self.blocked = field("blocked_writes")?;
        let sample = Sample {
            at,
            rate: mib(bytes - self.written) / (at - before).max(0.001),
            free: mib(field("free_bytes")?),
            low: mib(field("low_bytes")?),
            very_low: mib(field("very_low_bytes")?),
            delay: delay.as_secs_f64(),
        };
        self.written = bytes;
        self.samples.push(sample);
        if at - self.said_at >= self.plan.figures {
            self.said_at = at;
            self.voice.say(&format!(
                "  {:.1} MiB/s, {:.1} MiB left, slowest write {:.0} ms",
                sample.rate,
                sample.free,
                sample.delay * 1000.0
            ));
        }
        Ok(())
    }

    fn outcome(&self, compared: Compared, mut failures: Vec<String>) -> Result<Outcome> {
        let events = self.listener.all();
        let crossings = events::crossings(&events);
        for state in State::ALL {
            if !crossings.iter().any(|one| one.1 == state) {
                failures.push(format!("the pool was never {}", state.name()));
            }
        }
        let metrics = self.daemon.metrics()?;
        let slowed = metric(&metrics, "blockd_throttled_writes_total");
        let slowed_seconds = metric(&metrics, "blockd_throttle_seconds_total");
        if slowed <= 0.0 {
            failures.push("no write was slowed down".to_owned());
        }
        let longest = |state| longest_delay(&self.samples, &crossings, state);
        let summary = format!(
            "{} MiB written, {} blocks differ, {} checksums wrong, {} crossings reported once; \
             {slowed:.0} writes slowed down, none for more than {:.1} s",
            self.written / MIB,
            compared.differ,
            compared.unsound,
            crossings.len(),
            longest(State::VeryLow),
        );
        let title = "A pool fills up, slows its writer down, lets it wait, and goes on";
        let svg = plot::svg(&self.samples, &crossings, &self.notes, title);
        let figures = json!({
            "seconds": self.voice.now(),
            "written_bytes": self.written,
            "compared_bytes": compared.bytes,
            "blocks_that_differ": compared.differ,
            "wrong_checksums": compared.unsound,
            "slowed_writes": slowed,
            "slowed_seconds": slowed_seconds,
            "slowest_read_while_full_seconds": self.slowest_read.as_secs_f64(),
            "longest_delay_seconds": {
                "low": longest(State::Low),
                "very_low": longest(State::VeryLow),
                "full": longest(State::Full),
            },
            "crossings": crossings,
            "logged": events::logged(&self.daemon.log()),
            "events": events,
            "notes": self.notes,
            "samples": self.samples,
            "failures": failures,
        });
        Ok(Outcome { figures, svg, failures, summary })
    }
}

/// A program that makes the pool's file longer, unless it is stopped.
fn write_hook(hook: &Path, stop: &Path, pool: &Path, step: u64) -> Result<()> {
    let text = format!(
        "#!/bin/sh\nif [ -e {stop:?} ]; then echo stopped; exit 1; fi\ntruncate -s +{step} {pool:?}\n"
    );
    fs::write(hook, text).context("writing the hook")?;
    fs::set_permissions(hook, fs::Permissions::from_mode(0o755)).context("the hook's mode")
}

/// The longest delay that was seen in a state.
fn longest_delay(samples: &[Sample], crossings: &[(f64, State)], state: State) -> f64 {
    let at_the_time = |at: f64| {
        let entered = crossings.iter().rfind(|crossing| crossing.0 <= at);
        entered.map_or(State::Normal, |crossing| crossing.1)
    };
    let seen = samples.iter().filter(|one| at_the_time(one.at) == state);
    seen.map(|one| one.delay).fold(0.0, f64::max)
}

/// The sum of a metric over its labels.
fn metric(metrics: &str, name: &str) -> f64 {
    let lines = metrics.lines().filter(|line| line.strip_prefix(name).is_some_and(is_labelled));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

fn is_labelled(rest: &str) -> bool {
    rest.starts_with('{') || rest.starts_with(' ')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_is_the_sum_over_its_labels() {
        let text = "# TYPE a counter\na_total{p=\"x\"} 1.5\na_total{p=\"y\"} 2\na_total_more 7\n";
        assert!((metric(text, "a_total") - 3.5).abs() < 1e-9);
        assert!(metric(text, "b").abs() < 1e-9);
    }

    #[test]
    fn a_delay_counts_for_the_state_in_which_it_was_seen() {
        let sample =
            |at, delay| Sample { at, rate: 0.0, free: 0.0, low: 0.0, very_low: 0.0, delay };
        let samples = [sample(1.0, 0.1), sample(3.0, 2.0), sample(5.0, 30.0)];
        let crossings = [(2.0, State::VeryLow), (4.0, State::Full)];
        let longest = |state| longest_delay(&samples, &crossings, state);
        assert_eq!(State::ALL.map(longest), [0.1, 0.0, 2.0, 30.0]);
    }
}
