//! io-uring directly beside tokio-uring, by a server of nothing but messages.
#![forbid(unsafe_code)]

use anyhow::Result;
use blockd_bench::echo::{self, Server, Way};
use blockd_bench::stats::{Ratio, median};
use blockd_bench::{facts, syscalls};
use clap::Parser;

/// Answers 28-byte requests with 16 + 4096 bytes at queue depth 32 over a Unix socket, in turns on
/// each kind of server, and prints the time of each request.
#[derive(Debug, Parser)]
struct Arguments {
    /// Seconds of each run
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Interleaved rounds
    #[arg(long, default_value_t = 11)]
    rounds: usize,
    /// Internal: be the server of this name on standard input
    #[arg(long, hide = true)]
    serve: Option<String>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if let Some(name) = &arguments.serve {
        return echo::serve(Way::named(name)?);
    }
    facts::print();
    let ways: Vec<Way> = Way::ALL.into_iter().filter(|way| way.built()).collect();
    if ways.len() < Way::ALL.len() {
        println!("note: built without --features tokio-uring: only our own ring");
    }
    let mut rates = vec![Vec::new(); ways.len()];
    let mut cpu = vec![Vec::new(); ways.len()];
    let mut control = Vec::new();
    for _ in 0..arguments.rounds {
        for (index, way) in ways.iter().enumerate() {
            let figures = echo::run(*way, arguments.seconds)?;
            rates[index].push(figures.rate);
            cpu[index].push(figures.cpu_ns);
        }
        control.push(echo::run(Way::Direct, arguments.seconds)?.rate);
    }
    println!(
        "\n{} rounds of {} s, medians; rate beside {}: median [5 %, 95 %]\n",
        arguments.rounds,
        arguments.seconds,
        Way::Direct.name()
    );
    println!(
        "{:<26} {:>10} {:>12} {:>14} {:>14}  rate beside",
        "server", "requests/s", "CPU ns/req", "syscalls/req", "enters/req"
    );
    for (index, way) in ways.iter().enumerate() {
        let calls = count(*way, arguments.seconds)?;
        let ratio = ratio(&rates[index], &rates[0]);
        println!(
            "{:<26} {:>10.0} {:>12.0} {:>14} {:>14}  {ratio}",
            way.name(),
            median(&rates[index]).unwrap_or(0.0),
            median(&cpu[index]).unwrap_or(0.0),
            calls.0,
            calls.1,
        );
    }
    println!("{:<26} {:>68}  {}", "A/A", "", ratio(&control, &rates[0]));
    Ok(())
}

fn ratio(a: &[f64], b: &[f64]) -> String {
    let ratios: Vec<f64> = a.iter().zip(b).map(|(a, b)| a / b).collect();
    Ratio::of(&ratios).map_or_else(|| "-".to_owned(), |ratio| ratio.to_string())
}

/// System calls and `io_uring_enter`s per request, as text, of a run of its own.
fn count(way: Way, seconds: f64) -> Result<(String, String)> {
    let mut server = Server::start(way)?;
    let counter = syscalls::Counter::start(&[server.pid()])?;
    let replies = server.load(seconds)?;
    let counts = counter.map(syscalls::Counter::end).transpose()?;
    server.end()?;
    let each = |count: Option<u64>| {
        count
            .map_or_else(|| "-".to_owned(), |count| format!("{:.3}", count as f64 / replies as f64))
    };
    Ok((each(counts.map(|counts| counts.all)), each(counts.map(|counts| counts.enters))))
}
