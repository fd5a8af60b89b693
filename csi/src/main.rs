//! The plugin's process.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use blockd_csi::error::Error;
use blockd_csi::options::Options;
use blockd_csi::{logging, server};
use clap::Parser as _;
use tokio::signal::unix::{SignalKind, signal};

fn main() -> ExitCode {
    let options = Options::parse();
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("blockd-csi: error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<(), Error> {
    logging::start(options.log_format)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .enable_all()
        .build()
        .map_err(|error| Error::io("start threads", error))?;
    runtime.block_on(async {
        let listen = |kind| signal(kind).map_err(|error| Error::io("listen to signals", error));
        let (mut term, mut int) =
            (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
        let stop = async move {
            tokio::select! {
                _ = term.recv() => {}
                _ = int.recv() => {}
            }
        };
        server::serve(options, stop).await
    })
}

/// Threads of the process: it waits for the daemon and for tools, and computes nothing.
const WORKERS: usize = 2;
