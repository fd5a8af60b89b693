//! Neighbours of a real daemon: each attack beside each kind of victim, over each transport. A
//! victim on another volume keeps half of the throughput that it has beside a well-behaved
//! neighbour that does the same, no operation takes more than a second longer than there, and a
//! second after the attacker's sockets are closed nothing of it is left.
//!
//! Figures by the wall clock depend on what else the machine does, so that a miss is measured again
//! before it counts.

mod attack;
mod client;
mod ends;
mod left;
mod raw;
mod site;
mod table;
mod victim;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use blockd_testkit::clock::Clock;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde::Serialize;

use attack::Running;
use site::{Identity, NEIGHBOUR, Site, VICTIM};
use victim::Prepared;

pub use attack::{Attack, Did};
pub use ends::End;
pub use raw::Raw;
pub use site::Transport;
pub use table::Table;
pub use victim::{Figures, Victim};

/// The least part of a victim's throughput that is left to it.
const LEAST_SHARE: f64 = 0.5;
/// The same beside those that use the media as much as any neighbour may: a victim with one request
/// at a time waits for their share of the queue. If plain files on the same disk have less of it,
/// [`LEAST_SHARE`] of that.
const LEAST_SHARE_OF_MEDIA: f64 = 0.05;
/// The most by which its worst latency grows, in milliseconds.
const MOST_BEYOND_MS: f64 = 1000.0;
/// Descriptors of this process: connections of the attack with most of them, twice.
const DESCRIPTORS: u64 = 4096;

/// The parameters of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The daemon's program; without one, that of [`blockd_testkit::tools::blockd`].
    pub program: Option<PathBuf>,
    /// Where the pools' files go; without one, where temporary files go.
    pub folder: Option<PathBuf>,
    pub attacks: Vec<Attack>,
    pub victims: Vec<Victim>,
    pub transports: Vec<Transport>,
    /// How long each measurement takes.
    pub window: Duration,
    /// All victims at the same time, beside as many neighbours or the attacker, rather than one
    /// after the other.
    pub together: bool,
    /// How often a cell is measured until a miss counts.
    pub attempts: u32,
    /// Whether detach and the end of the daemon are timed as well.
    pub ends: bool,
}

/// A victim beside an attack.
#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    pub attack: Attack,
    pub transport: Transport,
    pub victim: Victim,
    pub beside_neighbour: Figures,
    pub beside_attack: Figures,
    pub attempts: u32,
    /// Why it counts as missed.
    pub misses: Vec<String>,
}

impl Cell {
    /// The part of its throughput that the victim keeps.
    #[must_use]
    pub fn share(&self) -> f64 {
        self.beside_attack.per_second / self.beside_neighbour.per_second.max(f64::MIN_POSITIVE)
    }

    fn judge(&mut self, raw: Option<Raw>) {
        let share = self.share();
        let plain = raw.and_then(|raw| raw.of(self.victim)).unwrap_or(1.0);
        let least = match self.attack.uses_media() {
            true => LEAST_SHARE_OF_MEDIA.min(LEAST_SHARE * plain),
            false => LEAST_SHARE,
        };
        if share < least {
            self.misses.push(format!("share {share:.2}"));
        }
        let beyond = self.beside_attack.worst_ms - self.beside_neighbour.worst_ms;
        if beyond > MOST_BEYOND_MS {
            self.misses.push(format!("worst {beyond:.0} ms beyond"));
        }
        if let Some(problem) = &self.beside_attack.problem {
            self.misses.push(problem.clone());
        }
    }
}

/// The remains of an attack after its end.
#[derive(Clone, Debug, Serialize)]
pub struct Left {
    pub attack: Attack,
    pub transport: Transport,
    pub did: Did,
    /// When everything was free, after the sockets were closed.
    pub free_after_ms: Option<f64>,
    /// The resources that were still held.
    pub left: Option<String>,
    pub attempts: u32,
}

/// All that was measured.
#[derive(Debug, Default, Serialize)]
pub struct Outcome {
    /// The shares that plain files keep, if they were measured.
    pub raw: Option<Raw>,
    pub cells: Vec<Cell>,
    pub left: Vec<Left>,
    pub ends: Vec<End>,
}

impl Outcome {
    /// How much was missed.
    #[must_use]
    pub fn misses(&self) -> usize {
        let cells = self.cells.iter().filter(|cell| !cell.misses.is_empty()).count();
        let left = self.left.iter().filter(|left| left.left.is_some()).count();
        cells + left + self.ends.iter().filter(|end| end.problem.is_some()).count()
    }
}

/// Runs the matrix.
///
/// # Errors
/// When a daemon does not start, an attack does not reach it, or a victim gets nowhere beside a
/// well-behaved neighbour. A missed limit is not an error.
pub fn run(options: &Options, table: &mut Table) -> Result<Outcome> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, soft.max(DESCRIPTORS.min(hard)), hard)?;
    let mut matrix =
        Matrix { options, identity: Identity::new()?, site: None, outcome: Outcome::default() };
    if !options.together && options.attacks.iter().any(|attack| attack.uses_media()) {
        let raw = Raw::measure(options.folder.as_deref(), options.window)?;
        table.raw(&raw);
        matrix.outcome.raw = Some(raw);
    }
    for transport in &options.transports {
        let mut beside = matrix.baseline(*transport, &options.victims)?;
        for attack in &options.attacks {
            let pair = (*attack, *transport);
            matrix
                .pair(pair, &mut beside, table)
                .with_context(|| format!("{} over {}", attack.name(), transport.name()))?;
        }
    }
    drop(matrix.site.take());
    if options.ends {
        for end in ends::run(options, &matrix.identity)? {
            table.end(&end);
            matrix.outcome.ends.push(end);
        }
    }
    Ok(matrix.outcome)
}

/// Victims and what they have beside a well-behaved neighbour.
type Beside = Vec<(Victim, Figures)>;

struct Matrix<'a> {
    options: &'a Options,
    identity: Identity,
    /// A daemon that nothing is wrong with.
    site: Option<Site>,
    outcome: Outcome,
}

impl Matrix<'_> {
    fn site(&mut self) -> Result<Site> {
        match self.site.take() {
            Some(site) => Ok(site),
            None => {
                let Options { program, folder, .. } = self.options;
                Site::start(program.as_deref(), folder.as_deref(), &self.identity)
            }
        }
    }

    /// Measures victims beside a client of the same kind on another volume.
    fn baseline(&mut self, transport: Transport, victims: &[Victim]) -> Result<Beside> {
        let site = self.site()?;
        let mut all = Vec::new();
        for group in self.groups(victims) {
            let pair =
                [VICTIM, NEIGHBOUR].map(|volume| prepare(&site, transport, group, volume, true));
            let [victims, neighbours] = pair;
            let clients = [victims?, neighbours?].into_iter().flatten().collect();
            let figures = self.measure(clients);
            all.extend(group.iter().copied().zip(figures));
        }
        for (victim, figures) in &all {
            if let Some(problem) = &figures.problem {
                anyhow::bail!("{} beside a well-behaved neighbour: {problem}", victim.name());
            }
        }
        self.site = Some(site);
        Ok(all)
    }

    /// The victims in groups that are measured at the same time.
    fn groups<'v>(&self, victims: &'v [Victim]) -> std::slice::Chunks<'v, Victim> {
        victims.chunks(if self.options.together { victims.len().max(1) } else { 1 })
    }

    /// Runs all clients at the same time.
    fn measure(&self, clients: Vec<Prepared<'_>>) -> Vec<Figures> {
        let window = self.options.window;
        std::thread::scope(|scope| {
            let run = |client: Prepared<'_>| client.measure(window);
            let threads: Vec<_> =
                clients.into_iter().map(|client| scope.spawn(move || run(client))).collect();
            let failed = || Figures { problem: Some("it panicked".into()), ..Figures::default() };
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| failed())).collect()
        })
    }

    /// An attack over a transport, until everything holds or was missed often enough.
    fn pair(
        &mut self,
        (attack, transport): (Attack, Transport),
        beside: &mut Beside,
        table: &mut Table,
    ) -> Result<()> {
        let mut missed = self.options.victims.clone();
        let mut is_left = true;
        for attempt in 1..=self.options.attempts.max(1) {
            let is_last = attempt >= self.options.attempts;
            if attempt > 1 {
                replace(beside, self.baseline(transport, &missed)?);
            }
            let (figures, mut left) = self.round(attack, transport, &missed)?;
            if attempt > 1 {
                // The machine may have become slower meanwhile.
                let after = self.baseline(transport, &missed)?;
                replace(beside, slower(after, beside));
            }
            let mut next = Vec::new();
            for (victim, beside_attack) in figures {
                let found = beside.iter().find(|(other, _)| *other == victim);
                let beside_neighbour = found.context("a victim without comparison")?.1.clone();
                let mut cell = Cell {
                    attack,
                    transport,
                    victim,
                    beside_neighbour,
                    beside_attack,
                    attempts: attempt,
                    misses: Vec::new(),
                };
                cell.judge(self.outcome.raw);
                if cell.misses.is_empty() || is_last {
                    table.cell(&cell);
                    self.outcome.cells.push(cell);
                } else {
                    next.push(victim);
                }
            }
            left.attempts = attempt;
            if is_left && (left.left.is_none() || is_last) {
                is_left = false;
                table.left(&left);
                self.outcome.left.push(left);
            }
            missed = next;
            if missed.is_empty() && !is_left {
                break;
            }
        }
        Ok(())
    }

    /// One attack: victims beside it, its end, and what is left then.
    fn round(
        &mut self,
        attack: Attack,
        transport: Transport,
        victims: &[Victim],
    ) -> Result<(Beside, Left)> {
        let site = self.site()?;
        let before = left::quiet(&site)?;
        let connect = !attack.is_met_by_new_connections();
        let mut groups = Vec::new();
        for group in self.groups(victims) {
            groups.push((group, prepare(&site, transport, group, VICTIM, connect)?));
        }
        let running = Running::start(attack, &site, transport)?;
        let mut all = Vec::new();
        for (group, clients) in groups {
            all.extend(group.iter().copied().zip(self.measure(clients)));
        }
        let ended = running.end();
        let closed = Clock::start();
        let nothing = left::nothing(&site, transport, &before, closed);
        let left = Left {
            attack,
            transport,
            did: ended.did,
            free_after_ms: nothing.as_ref().ok().map(|took| took.as_secs_f64() * 1e3),
            left: nothing.err(),
            attempts: 1,
        };
        // The remains of an attack would be attributed to the next one.
        if left.left.is_none() {
            ended.clean_up(&site)?;
            self.site = Some(site);
        }
        Ok((all, left))
    }
}

/// Puts new figures in place of old ones.
fn replace(beside: &mut Beside, with: Beside) {
    for (victim, figures) in with {
        beside.iter_mut().filter(|old| old.0 == victim).for_each(|old| old.1 = figures.clone());
    }
}

/// Of each victim's two figures those with less throughput.
fn slower(mut one: Beside, other: &Beside) -> Beside {
    for (victim, figures) in &mut one {
        let slower = |(of, other): &&(Victim, Figures)| {
            of == victim && other.per_second < figures.per_second
        };
        if let Some((_, other)) = other.iter().find(slower) {
            *figures = other.clone();
        }
    }
    one
}

fn prepare<'a>(
    site: &'a Site,
    transport: Transport,
    victims: &[Victim],
    volume: &'static str,
    connect: bool,
) -> Result<Vec<Prepared<'a>>> {
    let prepared = |victim: &Victim| Prepared::new(*victim, site, transport, volume, connect);
    victims.iter().map(prepared).collect()
}
