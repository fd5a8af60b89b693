//! `cargo ci`: the one tool of the project. It needs nothing but cargo; `setup` installs the other
//! tools of its steps.

#![forbid(unsafe_code)]

mod built;
mod charts;
mod check;
mod command;
mod demo;
mod docs;
mod flags;
mod forward;
mod image;
mod manifests;
mod messages;
mod package;
mod release;
mod requirements;
mod rules;
mod rustdoc;
mod screens;
mod setup;
mod steps;
mod test;
mod tidy;
mod watchdog;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "cargo ci", about = "Checks, tests and benches of blockd")]
struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Formatting, lints, documents: all that needs no test to run
    Check,
    /// The project's own lint
    Tidy,
    /// Does every line of docs/REQUIREMENTS.md name a test that exists?
    Requirements {
        /// Let a line say `pending` in place of a test
        #[arg(long)]
        allow_pending: bool,
    },
    /// Is every text that the programs print in docs/MESSAGES.md?
    Messages {
        /// Write the document
        #[arg(long)]
        write: bool,
    },
    /// Run every command in the documents that can be run here, and check the words of all others
    Docs {
        /// Write the drawing and the page of the configuration
        #[arg(long)]
        write: bool,
        /// Build the book in place of that, by mdBook
        #[arg(long, conflicts_with = "write")]
        book: bool,
    },
    /// Compare the pictures in docs/screens with the programs' output for an example
    Screens {
        /// Write the pictures, and the screens that tests of `blockd top` expect
        #[arg(long)]
        write: bool,
    },
    /// Alert rules, their tests and the dashboards of deploy/, by promtool
    Rules {
        /// Check the metrics of this program of the daemon in place of them, by promtool as well
        #[arg(long, value_name = "PROGRAM")]
        daemon: Option<PathBuf>,
    },
    /// Check the files of deploy/ for Kubernetes: by Helm and kustomize, by the schemas of its API,
    /// and by tests of versions, probes and rights
    Manifests,
    /// Every test, in its short form unless asked otherwise
    Test {
        /// The long form: minutes of simulation in place of seconds
        #[arg(long)]
        long: bool,
        #[command(subcommand)]
        what: Option<Tests>,
    },
    /// The protocol model, or with `hosts` that of several hosts; arguments go to its binary
    Model(Forwarded),
    /// The simulator of the real mapper; arguments go to its binary
    Sim(Forwarded),
    /// Crash at every IO boundary of short traces; arguments go to its binary
    Crash(Forwarded),
    /// Benches against their budgets, or on a disk of this machine
    #[command(args_conflicts_with_subcommands = true, arg_required_else_help = true)]
    Bench {
        #[command(subcommand)]
        what: Option<Bench>,
        #[command(flatten)]
        device: Device,
    },
    /// The mapper on a real file through io_uring; arguments go to its binary
    Pump(Forwarded),
    /// A virtual machine with the daemon in it runs a workload (fs, kill, power, moves, logwrites,
    /// stress, demo, thin, space, csi, health, pmem, safety, neighbours) or a script; arguments go
    /// to its binary
    Vm(Forwarded),
    /// A file system in a thin volume, the daemon killed meanwhile, every file compared
    Demo {
        #[command(subcommand)]
        what: Option<Demos>,
    },
    /// Gather the contents of the images of daemon and plugin, try them as a root file system, and
    /// build the images if buildah is installed
    Image {
        /// Use the existing release binaries, without building them
        #[arg(long)]
        built: bool,
    },
    /// Debian packages of daemon and plugin, judged, installed into a folder, upgraded, used there
    Package {
        /// Use the existing release binaries, without building them
        #[arg(long)]
        built: bool,
        /// Upgrade from this package of the daemon, not from the same program as an older version
        #[arg(long, value_name = "FILE")]
        previous: Option<PathBuf>,
    },
    /// Everything that is published: an archive and Debian packages of programs that need no
    /// library, with a bill of materials and checksums, tried on an older Debian
    Release {
        /// Use the existing programs of a release, without building them
        #[arg(long)]
        built: bool,
        /// Write the files, their sizes and checksums as JSON
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
    },
    /// Installs what tests and benches need and this machine lacks
    Setup,
}

#[derive(Debug, Subcommand)]
enum Tests {
    /// The daemon dies under verified load, again and again; arguments go to its binary
    Kill(Forwarded),
    /// Persistent memory: its package, pools and volumes in memory of this machine, and the
    /// plugin's volumes
    Pmem,
    /// Mistakes of an operator, odd devices and odd images: a line for each
    Safety,
    /// Random chains of snapshots sent between pools, either end killed at every message
    Send,
    /// Steps of an operator with every verb of `blockd`, and their expected output
    Operator {
        /// Write the output of the steps to their file
        #[arg(long)]
        write: bool,
    },
    /// Attackers and heavy neighbours beside other clients: a simulation of the scheduler, then a
    /// real daemon; arguments go to the latter's binary
    Neighbours(Forwarded),
    /// The CSI plugin: the conformance suite and its own tests; with arguments, those go to the
    /// suite, and it alone runs
    Csi(Forwarded),
}

#[derive(Debug, Subcommand)]
enum Demos {
    /// A pool fills up: low, very low, full, and on it goes; arguments go to its binary
    Space(Forwarded),
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// The mapper's figures beside their budgets, then the pump; charts as with `nbd`
    Mapper(Forwarded),
    /// The NBD server beside others; arguments go to its binary. `--svg FOLDER` draws a chart of
    /// each claim group at the end
    Nbd(Forwarded),
    /// ublk devices beside others in a virtual machine; arguments go to its binary, charts as with
    /// `nbd`
    Ublk(Forwarded),
    /// Instructions, system calls and context switches of the server for each operation, in a
    /// virtual machine; arguments go to its binary, charts as with `nbd`
    Counts(Forwarded),
    /// Charts of results that one of these has written with `--json`; arguments go to its binary
    Charts(Forwarded),
    /// Measure tenants that share one daemon; arguments go to its binary
    Isolation(Forwarded),
    /// CPU time of calls of the control API with 10 volumes and with 10,000; arguments go to its
    /// binary
    Control(Forwarded),
    /// `blockd import` and `export` beside nbdcopy and qemu-img, and `list` with 10,000 volumes;
    /// arguments go to its binary
    Tools(Forwarded),
    /// Clones of one image, up to 5,000, beside overlays of qemu; arguments go to its binary
    Clones(Forwarded),
    /// Measure the costs of snapshots; arguments go to its binary
    Snapshot(Forwarded),
    /// Listing a thousand volumes, and its effect on their IO; arguments go to its binary
    Csi(Forwarded),
    /// Persistent memory: bare copies, NBD, ublk; arguments go to its binary, and --quick to all
    Pmem(Forwarded),
}

/// A disk of this machine: everything on it is lost.
#[derive(Debug, clap::Args)]
struct Device {
    /// The job files raw on this disk, then on a volume of a pool on it; asks before erasing
    #[arg(long, value_name = "PATH")]
    device: Option<PathBuf>,
    /// Erase it without asking
    #[arg(long, requires = "device")]
    yes: bool,
    /// Shorter runs on less of the disk
    #[arg(long, requires = "device")]
    quick: bool,
    /// Where the figures go as JSON
    #[arg(long, requires = "device", value_name = "FILE")]
    json: Option<PathBuf>,
    /// Where a chart of them goes
    #[arg(long, requires = "device", value_name = "FILE")]
    svg: Option<PathBuf>,
}

impl Device {
    /// The words for the binary, if a disk was named.
    fn words(&self) -> Option<Vec<String>> {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let mut words = vec!["--device".to_owned(), text(self.device.as_ref()?)];
        words.extend(self.yes.then(|| "--yes".to_owned()));
        words.extend(self.quick.then(|| "--quick".to_owned()));
        for (name, path) in [("--json", &self.json), ("--svg", &self.svg)] {
            if let Some(path) = path {
                words.extend([name.to_owned(), text(path)]);
            }
        }
        Some(words)
    }
}

#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
struct Forwarded {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

fn main() -> ExitCode {
    if let Some(code) = rustdoc::called() {
        return code;
    }
    let arguments = Arguments::parse();
    match run(&arguments.action) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("cargo ci: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// True when all was well; failures are already printed.
fn run(action: &Action) -> Result<bool> {
    let root = command::workspace_root()?;
    let root: &Path = &root;
    match action {
        Action::Check => Ok(check::run(root)),
        Action::Tidy => tidy::run(root).map(|()| true),
        Action::Requirements { allow_pending } => {
            requirements::run(root, *allow_pending).map(|()| true)
        }
        Action::Messages { write } => messages::run(root, *write).map(|()| true),
        Action::Docs { write: true, .. } => docs::write(root).map(|()| true),
        Action::Docs { book: true, .. } => {
            let mut steps = steps::Steps::new();
            steps.run("book", || docs::book(root));
            Ok(steps.finish())
        }
        Action::Docs { .. } => docs::run(root).map(|()| true),
        Action::Screens { write } => screens::run(root, *write).map(|()| true),
        Action::Rules { daemon: Some(program) } => rules::metrics::run(root, program).map(|_| true),
        Action::Rules { daemon: None } => rules::run(root).map(|()| true),
        Action::Manifests => {
            let mut steps = steps::Steps::new();
            check::manifests(&mut steps, root);
            test::manifests(&mut steps, root);
            Ok(steps.finish())
        }
        Action::Test { what: Some(Tests::Kill(rest)), .. } => {
            forward::kill(root, &rest.arguments).map(|()| true)
        }
        Action::Test { what: Some(Tests::Csi(rest)), .. } => {
            Ok(test::csi::run(root, &rest.arguments))
        }
        Action::Test { what: Some(Tests::Neighbours(rest)), .. } => {
            Ok(test::neighbours::run(root, &rest.arguments))
        }
        Action::Test { what: Some(Tests::Operator { write }), .. } => {
            Ok(test::operator::run(root, *write))
        }
        Action::Test { what: Some(Tests::Safety), .. } => Ok(test::safety::run(root)),
        Action::Test { what: Some(Tests::Send), .. } => Ok(test::send::run(root)),
        Action::Test { what: Some(Tests::Pmem), .. } => Ok(test::pmem::run(root)),
        Action::Test { long, what: None } => Ok(test::run(root, *long)),
        Action::Model(rest) => forward::sim(root, "model", &rest.arguments).map(|()| true),
        Action::Sim(rest) => forward::sim(root, "sim", &rest.arguments).map(|()| true),
        Action::Crash(rest) => forward::sim(root, "crash", &rest.arguments).map(|()| true),
        Action::Bench { what, device } => bench(root, what.as_ref(), device).map(|()| true),
        Action::Pump(rest) => forward::pump(root, &rest.arguments).map(|()| true),
        Action::Vm(rest) => forward::vm(root, &rest.arguments).map(|()| true),
        Action::Demo { what: None } => demo::run(root),
        Action::Demo { what: Some(Demos::Space(rest)) } => {
            forward::demo_space(root, &rest.arguments).map(|()| true)
        }
        Action::Image { built } => Ok(image::run(root, *built)),
        Action::Package { built, previous } => Ok(package::run(root, *built, previous.as_deref())),
        Action::Release { built, json } => Ok(release::run(root, *built, json.as_deref())),
        Action::Setup => setup::run().map(|()| true),
    }
}

fn bench(root: &Path, what: Option<&Bench>, device: &Device) -> Result<()> {
    match what {
        Some(Bench::Mapper(rest)) => charts::run(root, &rest.arguments, forward::bench_mapper),
        Some(Bench::Nbd(rest)) => charts::run(root, &rest.arguments, forward::bench_nbd),
        Some(Bench::Ublk(rest)) => charts::run(root, &rest.arguments, forward::bench_ublk),
        Some(Bench::Counts(rest)) => charts::run(root, &rest.arguments, forward::bench_counts),
        Some(Bench::Charts(rest)) => forward::bench_charts(root, &rest.arguments),
        Some(Bench::Isolation(rest)) => forward::bench_isolation(root, &rest.arguments),
        Some(Bench::Control(rest)) => forward::bench_control(root, &rest.arguments),
        Some(Bench::Tools(rest)) => forward::bench_tools(root, &rest.arguments),
        Some(Bench::Clones(rest)) => forward::bench_clones(root, &rest.arguments),
        Some(Bench::Snapshot(rest)) => forward::bench_snapshot(root, &rest.arguments),
        Some(Bench::Csi(rest)) => forward::bench_csi(root, &rest.arguments),
        Some(Bench::Pmem(rest)) => forward::bench_pmem(root, &rest.arguments),
        None => {
            let words =
                device.words().context("which bench? `cargo ci bench --help` lists them")?;
            forward::bench_device(root, &words)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        <Arguments as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn a_disk_is_no_bench_of_its_own() {
        let words = ["ci", "bench", "--device", "/dev/x", "--yes", "--svg", "y"];
        let parsed = Arguments::try_parse_from(words).unwrap();
        let Action::Bench { what: None, device } = parsed.action else {
            panic!("not taken for a disk: {parsed:?}");
        };
        assert_eq!(device.words().unwrap(), ["--device", "/dev/x", "--yes", "--svg", "y"]);
        assert!(Arguments::try_parse_from(["ci", "bench", "--yes"]).is_err());
        assert!(Arguments::try_parse_from(["ci", "bench", "--device", "/dev/x", "nbd"]).is_err());
    }

    #[test]
    fn arguments_of_another_binary_are_not_ours_to_read() {
        let words = ["ci", "sim", "--seed", "1", "--mutate", "--help", "--", "x"];
        let parsed = Arguments::try_parse_from(words).unwrap();
        let Action::Sim(rest) = parsed.action else {
            panic!("not taken for sim: {parsed:?}");
        };
        assert_eq!(rest.arguments, &words[2..]);
    }
}
