//! The plugin's process, those of the scheduler's extender and of the recorder, a tool for images,
//! and commands for people who run a cluster.
#![forbid(unsafe_code)]

use std::future::Future;
use std::pin::Pin;
use std::process::ExitCode;

use blockd_csi::config::Config;
use blockd_csi::error::Error;
use blockd_csi::ids::Names;
use blockd_csi::operator::{lost_node, moving, orphans};
use blockd_csi::options::Options;
use blockd_csi::parameters::Keys;
use blockd_csi::{logging, privileges, server};
use blockd_csi_base::options::LogFormat;
use clap::Parser as _;
use tokio::signal::unix::{SignalKind, signal};

fn main() -> ExitCode {
    blockd_api::lookup::restrict();
    let mut words = std::env::args_os();
    let program = words.next().unwrap_or_default();
    let mut rest = words.peekable();
    // The plugin has no words of its own, only options: these can mean nothing else.
    let result = if rest.next_if(|word| word == "extender").is_some() {
        let options = blockd_extender::Options::parse_from(std::iter::once(program).chain(rest));
        let log_format = options.log_format;
        run(log_format, |stop| async move {
            let plugin = plugin(&options)?;
            Ok(blockd_extender::serve(&options, &plugin, stop).await?)
        })
    } else if rest.next_if(|word| word == "kata-image").is_some() {
        let options = blockd_kata::Options::parse_from(std::iter::once(program).chain(rest));
        options.run().map_err(Failure::from)
    } else if rest.next_if(|word| word == "record").is_some() {
        let options = blockd_record::Options::parse_from(std::iter::once(program).chain(rest));
        run(LogFormat::Text, |stop| async move {
            options.check()?;
            let listener = server::bind(&options.listen, options.listen_group)?;
            let version = concat!("blockd-csi ", env!("BLOCKD_VERSION"));
            Ok(blockd_record::serve(&options, version, listener, stop).await?)
        })
    } else if rest.next_if(|word| word == "orphans").is_some() {
        let options = orphans::Options::parse_from(std::iter::once(program).chain(rest));
        once(options.run())
    } else if rest.next_if(|word| word == "move").is_some() {
        let options = moving::Options::parse_from(std::iter::once(program).chain(rest));
        once(options.run())
    } else if rest.next_if(|word| word == "lost-node").is_some() {
        let options = lost_node::Options::parse_from(std::iter::once(program).chain(rest));
        options.run().map_err(Failure::from)
    } else {
        let options = Options::parse();
        // Before the first thread is started.
        privileges::keep_only(privileges::needed(&options)).map_err(Failure::from).and_then(|()| {
            run(options.log_format, |stop| async move { Ok(server::serve(&options, stop).await?) })
        })
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("blockd-csi: error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Facts of the plugins that run with the extender's configuration.
fn plugin(options: &blockd_extender::Options) -> Result<blockd_extender::Plugin, Error> {
    let driver = &options.driver_name;
    let config = Config::load(options.config.as_deref(), &Names::new(driver))?;
    Ok(blockd_extender::Plugin {
        class_parameter: Keys::new(driver).device_class(),
        default_class: config.class("class", None)?.name.clone(),
        default_size: config.default_size,
    })
}

type Failure = Box<dyn std::error::Error>;

type Stop = Pin<Box<dyn Future<Output = ()>>>;

/// Runs a command that ends by itself.
fn once(work: impl Future<Output = Result<(), Error>>) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Error::io("start a runtime", error))?;
    Ok(runtime.block_on(work)?)
}

/// Runs one of them until a signal stops it.
fn run<F: Future<Output = Result<(), Failure>>>(
    log_format: LogFormat,
    work: impl FnOnce(Stop) -> F,
) -> Result<(), Failure> {
    logging::start(log_format)?;
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
        work(Box::pin(stop)).await
    })
}

/// Threads of the process: it waits for the daemon and for tools, and computes nothing.
const WORKERS: usize = 2;
