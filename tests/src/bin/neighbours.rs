//! `cargo ci test neighbours`: what attackers and heavy neighbours leave to clients of a daemon.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, ensure};
use blockd_testkit::clock::Clock;
use blockd_tests::neighbours::{self, Attack, Options, Table, Transport, Victim};
use clap::{Parser, ValueEnum};

/// The victims that the short form measures, all at the same time.
const SHORT: [Victim; 4] = [Victim::Read, Victim::Write, Victim::Connect, Victim::Metrics];

/// Measures what clients of one volume get beside a well-behaved neighbour and beside an attacker:
/// at least half the throughput, no operation more than 1 s longer, and nothing of the attacker is
/// left 1 s after it is gone. Misses are measured again before they count.
#[derive(Parser, Debug)]
#[command(name = "cargo ci test neighbours")]
struct Arguments {
    /// Four victims at the same time, over Unix sockets and TCP: less than a minute.
    #[arg(long)]
    short: bool,
    /// Only this attack; may be repeated.
    #[arg(long, value_name = "ATTACK")]
    only: Vec<Attack>,
    /// Only this victim; may be repeated.
    #[arg(long, value_name = "VICTIM")]
    victim: Vec<Victim>,
    /// Only over this transport; may be repeated.
    #[arg(long, value_name = "TRANSPORT")]
    over: Vec<Transport>,
    /// Seconds of each measurement [default: 2, or 1 with --short].
    #[arg(long)]
    seconds: Option<f64>,
    /// Attempts until a miss counts. On two processors the same victim beside the same neighbour
    /// can be twice as fast in one second as in the next.
    #[arg(long, default_value_t = 5)]
    attempts: u32,
    /// The daemon's program [default: a release build].
    #[arg(long, value_name = "PATH")]
    program: Option<PathBuf>,
    /// Where the pools' files go [default: where temporary files go].
    #[arg(long, value_name = "PATH")]
    folder: Option<PathBuf>,
    /// Print the figures as JSON, and nothing else.
    #[arg(long)]
    json: bool,
}

impl Arguments {
    fn options(&self) -> Result<Options> {
        let seconds = self.seconds.unwrap_or(if self.short { 1.0 } else { 2.0 });
        ensure!((0.1..=600.0).contains(&seconds), "--seconds {seconds}: must be from 0.1 to 600");
        let transports: &[Transport] = if self.short {
            &[Transport::Unix, Transport::Tcp]
        } else {
            Transport::value_variants()
        };
        let victims = if self.short { &SHORT[..] } else { Victim::value_variants() };
        Ok(Options {
            program: self.program.clone(),
            folder: self.folder.clone(),
            attacks: chosen(&self.only, Attack::value_variants()),
            victims: chosen(&self.victim, victims),
            transports: chosen(&self.over, transports),
            window: Duration::from_secs_f64(seconds),
            together: self.short,
            attempts: self.attempts.max(1),
            ends: self.only.is_empty(),
        })
    }
}

/// The named ones, or all if none is named.
fn chosen<T: Copy>(named: &[T], all: &[T]) -> Vec<T> {
    if named.is_empty() { all.to_vec() } else { named.to_vec() }
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("neighbours: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<bool> {
    let start = Clock::start();
    let outcome = neighbours::run(&arguments.options()?, &mut Table::new(arguments.json))?;
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&outcome)?);
    }
    let (measured, misses) = (outcome.cells.len(), outcome.misses());
    ensure!(measured > 0, "nothing was measured");
    let seconds = start.elapsed().as_secs_f64();
    eprintln!("neighbours: {measured} pairs, {misses} missed, {seconds:.0} s");
    Ok(misses == 0)
}
