//! Examines a driver of the Container Storage Interface through its socket:
//! `csi_conformance --endpoint unix:///run/csi.sock --skip-node`. Without an endpoint it starts
//! blockd and its plugin, and examines that.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use blockd_tests::csi::rig::{Rig, Settings};
use blockd_tests::csi::{self, Options, Report};
use clap::Parser;

/// Walks the specification call by call and error by error.
#[derive(Parser, Debug)]
struct Arguments {
    /// The driver's socket; without one, blockd's own is started.
    #[arg(long, value_name = "unix:///PATH")]
    endpoint: Option<String>,
    /// A parameter of each volume.
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    parameters: Vec<(String, String)>,
    /// A mutable parameter that the driver takes.
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    mutable_parameters: Vec<(String, String)>,
    /// The file system of volumes that are mounted.
    #[arg(long, default_value = "ext4")]
    fs_type: String,
    /// Bytes of a volume.
    #[arg(long, default_value_t = 64 << 20)]
    size: i64,
    /// Stage, publish and mount nothing.
    #[arg(long)]
    skip_node: bool,
    /// Where to stage; this program has to run where the driver mounts.
    #[arg(long, default_value = "/var/lib/kubelet/plugins/kubernetes.io/csi")]
    staging_dir: PathBuf,
    /// Where to publish.
    #[arg(long, default_value = "/var/lib/kubelet/pods")]
    target_dir: PathBuf,
    /// Look at what blockd was asked for beyond the specification as well.
    #[arg(long)]
    rows: bool,
    /// Only cases with this in their name.
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Seconds that a call may take.
    #[arg(long, default_value_t = 60)]
    limit: u64,
    /// Print the names of all cases.
    #[arg(long)]
    list: bool,
    /// Print a line for each case.
    #[arg(long)]
    verbose: bool,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("it is not of the form key=value")?;
    Ok((key.to_owned(), value.to_owned()))
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.list {
        for (name, file) in csi::list() {
            println!("{file}::{name}");
        }
        return ExitCode::SUCCESS;
    }
    match run(&arguments) {
        Ok(report) => {
            if arguments.json {
                println!("{}", serde_json::to_string_pretty(&report).unwrap_or_default());
            } else {
                report.print(arguments.verbose);
            }
            if report.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("csi_conformance: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<Report> {
    let Some(endpoint) = &arguments.endpoint else { return run_ours(arguments) };
    csi::run(&Options {
        endpoint: endpoint.clone(),
        parameters: arguments.parameters.iter().cloned().collect(),
        mutable_parameters: arguments.mutable_parameters.iter().cloned().collect(),
        fs_type: arguments.fs_type.clone(),
        size: arguments.size,
        skip_node: arguments.skip_node,
        only_host: false,
        staging_dir: arguments.staging_dir.clone(),
        target_dir: arguments.target_dir.clone(),
        rows: arguments.rows,
        only: arguments.only.clone(),
        limit: Duration::from_secs(arguments.limit),
    })
}

/// The plugin that is built from these sources, on a pool in a file. There are no block devices
/// then, so the node's part is for a virtual machine.
fn run_ours(arguments: &Arguments) -> Result<Report> {
    let rig = Rig::start("suite", &Settings::default())?;
    let options = Options { only: arguments.only.clone(), ..rig.options() };
    let mut report = csi::run(&options).with_context(|| rig.plugin.last_words())?;
    // The daemon sees what the plugin does not list.
    let left = rig.control()?.names()?;
    report.leaked.extend(left.into_iter().map(|name| format!("{name} in the daemon")));
    Ok(report)
}
