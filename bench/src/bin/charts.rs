//! Charts of results that a bench has written as JSON.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use anyhow::{Context, Result};
use blockd_bench::results;
use clap::Parser;

/// Draws the results that benches have written with `--json`: an SVG for each claim group. Nothing
/// is measured.
#[derive(Debug, Parser)]
struct Arguments {
    /// Files of `bench nbd`, `ublk`, `counts`, `mapper` or `--device`, or a baseline of `counts`
    #[arg(required = true)]
    results: Vec<PathBuf>,
    /// The folder of the charts
    #[arg(long, value_name = "FOLDER")]
    svg: PathBuf,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    for path in &arguments.results {
        let read = || -> Result<_> { Ok(serde_json::from_slice(&std::fs::read(path)?)?) };
        let drawn = read().and_then(|figures| results::write(&figures, &arguments.svg));
        drawn.with_context(|| path.display().to_string())?;
    }
    Ok(())
}
