//! Isolation of tenants that share one daemon, over NBD on Unix sockets: shares of equal and
//! unequal tenants, and the latency of a light tenant beside a heavy one.

mod tenant;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use self::tenant::{Found, Tenant, together};
use crate::load::{Order, Pattern, exactly};
use crate::nbd::claims::Medium;
use crate::nbd::client::Client;
use crate::nbd::server::{Image, Server};
use crate::nbd::{Folders, ours};
use crate::stats::median;

/// Volumes of each daemon, one for each tenant.
const TENANTS: usize = 16;
/// At the start of each run nothing is counted.
const WARM_UP: Duration = Duration::from_millis(200);

/// Everything that a run needs to know.
#[derive(Clone, Debug)]
pub struct Bench {
    /// The daemon's program.
    pub blockd: PathBuf,
    /// Another build of it.
    pub before: Option<PathBuf>,
    /// Workers of each daemon.
    pub workers: u32,
    /// Seconds of each run.
    pub seconds: f64,
    /// How often each run is repeated, in turns with the other build.
    pub rounds: usize,
    /// Bytes of a volume.
    pub volume: u64,
    /// Only cases with this in their name.
    pub only: Option<String>,
}

/// The figure that a case shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Shown {
    /// The first tenant's part of all bytes.
    Share,
    /// Jain's index of all tenants' operations: 1 when all have the same.
    Jain,
    /// The first tenant's latencies.
    Victim,
}

/// Tenants that run at the same time.
struct Case {
    name: &'static str,
    shown: Shown,
    /// One for each volume, from the first on.
    tenants: Vec<Shape>,
}

/// The requests of a tenant.
#[derive(Clone, Copy)]
struct Shape {
    write: bool,
    bytes: usize,
    depth: usize,
}

const fn reads(bytes: usize, depth: usize) -> Shape {
    Shape { write: false, bytes, depth }
}

const fn writes(bytes: usize, depth: usize) -> Shape {
    Shape { write: true, bytes, depth }
}

fn cases() -> Vec<Case> {
    const SHORT: usize = 4 << 10;
    const LONG: usize = 128 << 10;
    let victim = reads(SHORT, 1);
    let case = |name, shown, tenants| Case { name, shown, tenants };
    vec![
        case("two equal readers, 4k, 16", Shown::Share, vec![reads(SHORT, 16); 2]),
        case("two equal writers, 4k, 16", Shown::Share, vec![writes(SHORT, 16); 2]),
        case(
            "depth 8 beside 128, 4k reads",
            Shown::Share,
            [8, 128].map(|d| reads(SHORT, d)).into(),
        ),
        case("16 equal readers, 4k, 4", Shown::Jain, vec![reads(SHORT, 4); TENANTS]),
        case("victim alone", Shown::Victim, vec![victim]),
        case("victim beside an equal one", Shown::Victim, vec![victim; 2]),
        case("victim beside 128k writes, 32", Shown::Victim, vec![victim, writes(LONG, 32)]),
        case("victim beside 128k reads, 32", Shown::Victim, vec![victim, reads(LONG, 32)]),
    ]
}

/// A figure of now and of before.
#[derive(Clone, PartialEq, Debug)]
pub struct Figure {
    /// The case.
    pub case: &'static str,
    /// The name of the case.
    pub name: &'static str,
    /// Digits behind the point.
    pub digits: usize,
    /// The figure of this build.
    pub now: Spread,
    /// The figure of the other build.
    pub before: Option<Spread>,
}

/// The results of the rounds of a case.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Spread {
    /// The median; of longest times the longest.
    pub figure: f64,
    /// The lowest.
    pub low: f64,
    /// The highest.
    pub high: f64,
}

impl Spread {
    fn of(name: &str, values: &[f64]) -> Option<Self> {
        let low = values.iter().copied().reduce(f64::min)?;
        let high = values.iter().copied().reduce(f64::max)?;
        let figure = if name == LONGEST { high } else { median(values)? };
        Some(Self { figure, low, high })
    }
}

/// A name, a number of digits, and the figure of one run.
type One = (&'static str, usize, f64);

impl Bench {
    /// All cases on one medium.
    ///
    /// # Errors
    /// When a daemon fails, or a tenant gets no reply.
    pub fn measure(&self, medium: Medium, folders: &Folders) -> Result<Vec<Figure>> {
        let is_wanted =
            |case: &Case| self.only.as_ref().is_none_or(|only| case.name.contains(only.as_str()));
        let mut figures = Vec::new();
        let now = Rig::start(self, &self.blockd, medium, "now", folders)?;
        let before = self.before.as_ref();
        let before = before
            .map(|program| Rig::start(self, program, medium, "before", folders))
            .transpose()?;
        for case in cases().iter().filter(|case| is_wanted(case)) {
            let mut runs = Vec::new();
            let mut runs_before = Vec::new();
            for round in 0..self.rounds {
                // The other build goes first in every second round.
                if round % 2 == 0 {
                    runs.push(self.once(&now, case)?);
                }
                if let Some(before) = &before {
                    runs_before.push(self.once(before, case).context("the other build")?);
                }
                if round % 2 == 1 {
                    runs.push(self.once(&now, case)?);
                }
            }
            figures.extend(combined(case.name, &runs, &runs_before));
        }
        Ok(figures)
    }

    fn once(&self, rig: &Rig, case: &Case) -> Result<Vec<One>> {
        let tenants = case.tenants.iter().zip(&rig.exports).zip(1..);
        let tenants = tenants.map(|((shape, uri), seed)| {
            let &Shape { write, bytes, depth } = shape;
            let order = Order::Random(seed);
            let pattern = Pattern { write, bytes, depth, span: self.volume, order };
            Tenant { uri, pattern }
        });
        let tenants: Vec<Tenant<'_>> = tenants.collect();
        let found = together(&tenants, WARM_UP, Duration::from_secs_f64(self.seconds));
        let found = found.with_context(|| format!("{}: {}", case.name, rig.server.words()))?;
        figures(case, &found, self.seconds)
    }
}

fn figures(case: &Case, found: &[Found], seconds: f64) -> Result<Vec<One>> {
    let operations: Vec<f64> = found.iter().map(|one| one.operations as f64).collect();
    let bytes: Vec<f64> =
        operations.iter().zip(&case.tenants).map(|(count, of)| count * of.bytes as f64).collect();
    let first = found.first().context("a case without tenants")?;
    Ok(match case.shown {
        Shown::Share => vec![
            ("share of the first", 3, bytes[0] / bytes.iter().sum::<f64>()),
            ("IOPS, all", 0, operations.iter().sum::<f64>() / seconds),
        ],
        Shown::Jain => vec![
            ("Jain index", 4, jain(&operations)),
            ("IOPS, all", 0, operations.iter().sum::<f64>() / seconds),
        ],
        Shown::Victim => {
            ensure!(!first.latencies_ns.is_empty(), "{}: no operation ended", case.name);
            let mut all = vec![("IOPS", 0, operations[0] / seconds)];
            all.extend([("p50, us", 0, 0.5), ("p99, us", 0, 0.99)].map(|(name, digits, part)| {
                (name, digits, quantile(&first.latencies_ns, part) / 1000.0)
            }));
            all.push((LONGEST, 0, quantile(&first.latencies_ns, 1.0) / 1000.0));
            if let Some(neighbour) = bytes.get(1) {
                all.push(("neighbour, MiB/s", 1, neighbour / seconds / f64::from(1 << 20)));
            }
            all
        }
    })
}

/// The figure for which the longest of the rounds counts.
const LONGEST: &str = "max, us";

fn combined(case: &'static str, runs: &[Vec<One>], before: &[Vec<One>]) -> Vec<Figure> {
    let of = |runs: &[Vec<One>], index: usize, name: &str| {
        let values: Vec<f64> =
            runs.iter().filter_map(|run| run.get(index)).map(|one| one.2).collect();
        Spread::of(name, &values)
    };
    let Some(first) = runs.first() else { return Vec::new() };
    let figure = |(index, &(name, digits, _)): (usize, &One)| {
        let before = of(before, index, name);
        Some(Figure { case, name, digits, now: of(runs, index, name)?, before })
    };
    first.iter().enumerate().filter_map(figure).collect()
}

/// Returns a quantile of sorted values.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a rank from 0 to the number of values"
)]
fn quantile(sorted: &[u64], part: f64) -> f64 {
    let rank = (sorted.len() as f64 * part).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0) as f64
}

/// (sum)² / (count × sum of squares): 1 when all have the same, 1/count when one has everything.
fn jain(values: &[f64]) -> f64 {
    let sum: f64 = values.iter().sum();
    let squares: f64 = values.iter().map(|value| value * value).sum();
    sum * sum / (values.len() as f64 * squares)
}

/// A daemon with a written volume for each tenant.
struct Rig {
    server: Server,
    exports: Vec<String>,
}

impl Rig {
    fn start(
        bench: &Bench,
        program: &Path,
        medium: Medium,
        name: &str,
        folders: &Folders,
    ) -> Result<Self> {
        let disk = medium == Medium::Disk;
        let place = if disk { &folders.disk } else { &folders.memory }.path();
        let image = Image {
            snapshots: 0,
            folder: folders.memory.path().join(format!("{name}-{medium:?}")),
            file: place.join(format!("{name}.image")),
            size: bench.volume * TENANTS as u64,
            medium,
        };
        let server = ours::start_empty(&image, program, Some(bench.workers))?;
        let server = server.with_image_removed(&image);
        let mut exports = Vec::new();
        let (filling, requests) = Pattern::filling(bench.volume);
        for number in 0..TENANTS {
            let volume = format!("tenant-{number}");
            let uri = ours::add_volume(&image, program, &volume, bench.volume)?;
            let mut client = Client::connect(&uri)?;
            client.run(&filling, exactly(requests)).with_context(|| server.words())?;
            client.leave()?;
            exports.push(uri);
        }
        Ok(Self { server, exports })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jains_index_is_one_for_equals() {
        assert!((jain(&[5.0; 16]) - 1.0).abs() < 1e-9);
        assert!((jain(&[1.0, 0.0, 0.0, 0.0]) - 0.25).abs() < 1e-9);
    }

    #[test]
    fn quantiles_of_few_values() {
        let values: Vec<u64> = (1..=100).collect();
        assert_eq!([0.5, 0.99, 1.0].map(|part| quantile(&values, part)), [50.0, 99.0, 100.0]);
        assert_eq!(quantile(&[7], 0.5), 7.0);
    }

    #[test]
    fn of_longest_times_the_longest_counts() {
        let run = |value| vec![("p50, us", 0, value), (LONGEST, 0, value)];
        let runs = [run(1.0), run(3.0), run(9.0)];
        let figures = combined("case", &runs, &[]);
        assert_eq!(figures.iter().map(|one| one.now.figure).collect::<Vec<_>>(), [3.0, 9.0]);
        assert_eq!((figures[0].now.low, figures[0].now.high), (1.0, 9.0));
        assert_eq!(figures[0].before, None);
    }

    #[test]
    fn every_tenant_has_a_volume() {
        assert!(cases().iter().all(|case| (1..=TENANTS).contains(&case.tenants.len())));
    }
}
