//! The command line as clap sees it. The arguments of a verb stand in the verb's own file.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use blockd_media::error::KINDS;
use clap::{CommandFactory, Parser, Subcommand};

use super::duration::duration;
use super::{
    add, attach, cells, clone, completions, del, diff, events, extend_request, features, health,
    import_export, man, node, pmem, pool, pool_tools, recover, rename, reset, resize, rollback,
    set, snapshot, space, top, tune, volumes,
};

/// The whole command line.
#[derive(Debug, Parser)]
#[command(
    name = "blockd",
    version,
    about = "Thin-provisioned block devices from user space",
    long_about = "Thin-provisioned block devices from user space.\n\n\
        `blockd serve` is the daemon; every other verb speaks to it through its control socket. \
        A volume lives in a pool, takes space only for what is written to it, and is a block \
        device or served over NBD while it is attached.",
    after_help = "Example:\n  blockd serve &\n  blockd add --size 10G data\n\n\
        `blockd VERB --help` says more about a verb; `--help` here, about units and exit codes.",
    propagate_version = false,
    arg_required_else_help = true
)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub verb: Verb,
}

/// Options of every verb.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    /// Control socket of the daemon [default: /run/blockd/control.sock, or in $XDG_RUNTIME_DIR]
    #[arg(long, global = true, env = "BLOCKD_SOCKET", hide_env_values = true, value_name = "PATH")]
    pub socket: Option<PathBuf>,

    /// Print JSON; sizes are bytes, and what the keys mean stays the same
    #[arg(long, global = true)]
    pub json: bool,

    /// Print sizes as exact bytes
    #[arg(long, global = true)]
    pub bytes: bool,

    /// How long the daemon may take to answer one call: 500ms, 30s, 2m
    #[arg(long, global = true, value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub timeout: Duration,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    Serve(Serve),
    #[command(subcommand)]
    Config(Config),
    Add(add::Add),
    Del(del::Del),
    List(volumes::List),
    Show(volumes::Show),
    Resize(resize::Resize),
    Rename(rename::Rename),
    Set(set::Set),
    Snapshot(snapshot::Snapshot),
    Clone(clone::Clone),
    Rollback(rollback::Rollback),
    Reset(reset::Reset),
    Diff(diff::Diff),
    Space(space::Space),
    Attach(attach::Attach),
    Detach(attach::Detach),
    Recover(recover::Recover),
    Features(features::Features),
    Import(import_export::Import),
    Export(import_export::Export),
    Send(import_export::send::Send),
    Receive(import_export::Receive),
    Move(import_export::rounds::Move),
    Replicate(import_export::rounds::Replicate),
    #[command(subcommand)]
    Pool(pool::Pool),
    #[command(subcommand)]
    Vg(cells::GroupVerb),
    #[command(subcommand)]
    Cell(cells::CellVerb),
    #[command(subcommand)]
    Pmem(pmem::Pmem),
    #[command(subcommand)]
    Journal(pool_tools::Journal),
    #[command(subcommand)]
    Node(node::Node),
    Health(health::Health),
    Tune(tune::Tune),
    Top(top::Top),
    Events(events::Events),
    ExtendRequest(extend_request::ExtendRequest),
    Completions(completions::Completions),
    Man(man::Man),
    Version(Version),
}

/// Run the daemon
///
/// Opens the pools of the configuration and serves their volumes until SIGTERM. Volumes that were
/// attached when it last ran are attached again. Without a configuration there is one pool,
/// "default", in a sparse file of the state directory, made at the first start.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd serve --config /etc/blockd/blockd.toml")]
pub(crate) struct Serve {
    /// Configuration (TOML) [default: /etc/blockd/blockd.toml, or in ~/.config, if it is there]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Unix socket for requests for more space of the default pool, or of POOL; for several pools
    /// it is said several times. Goes before the configuration's pool.extend.socket
    #[arg(long, value_name = "[POOL=]PATH")]
    pub listen: Vec<String>,
}

/// Check or show a configuration
///
/// Neither needs a daemon or changes anything.
#[derive(Debug, Subcommand)]
#[command(after_help = "Example:\n  blockd config check --config /etc/blockd/blockd.toml")]
pub(crate) enum Config {
    /// Read a configuration and name all that is wrong in it
    ///
    /// Each mistake is an error in a line of its own, with its line in the file, and the exit code
    /// is 3: of values and keys, sockets or devices that are named twice, certificates that are not
    /// usable, and paths at which there is something else. Settings that work and are dangerous,
    /// and folders that are missing or not writable at present, are warnings. Nothing is changed.
    #[command(after_help = "Example:\n  blockd config check --config /etc/blockd/blockd.toml")]
    Check(ConfigFile),
    /// Print a configuration as the daemon understands it, with every default
    #[command(after_help = "Example:\n  blockd config show > blockd.toml")]
    Show(ConfigFile),
}

/// Which configuration.
#[derive(Debug, clap::Args)]
pub(crate) struct ConfigFile {
    /// Configuration (TOML) [default: /etc/blockd/blockd.toml, or in ~/.config, if it is there]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Print the version, and the daemon's when one answers
///
/// Not an error if no daemon answers.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd version --json")]
pub(crate) struct Version {}

/// The command line with everything that is put together at run time.
#[must_use]
pub(crate) fn command() -> clap::Command {
    Arguments::command().after_long_help(format!("{UNITS}\n{}", exit_codes()))
}

const UNITS: &str = "Volumes:\n  \
    A volume is NAME, in the daemon's default pool or that of --pool, or POOL/NAME; /NAME is one\n  \
    of the default pool.\n\n\
    Units:\n  \
    A size is a whole number with a unit, 10G for 10 GiB. K M G T P E are powers of 1024, KiB to\n  \
    EiB say the same, and a number alone is bytes.\n";

/// The table of exit codes, as help and manual show it.
#[must_use]
pub(crate) fn exit_codes() -> String {
    let mut codes: BTreeMap<u8, &str> = KINDS.iter().map(|row| (row.exit, row.text)).collect();
    codes.insert(0, "done, or there was nothing to do");
    codes.insert(2, "the command line cannot be understood");
    let mut text = "Exit codes:\n".to_owned();
    for (code, meaning) in codes {
        text.push_str(&format!("  {code:>3}  {meaning}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }

    /// Every verb says what it does, how it is called, and by an example.
    #[test]
    fn every_verb_explains_itself() {
        fn walk(command: &clap::Command, path: &str) {
            for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
                let path = format!("{path} {}", sub.get_name());
                let about = sub.get_about().map(ToString::to_string).unwrap_or_default();
                assert!(!about.is_empty() && !about.contains('\n'), "{path}: {about}");
                assert!(about.len() <= 72 && !about.ends_with('.'), "{path}: {about}");
                let after = sub.get_after_help().map(ToString::to_string).unwrap_or_default();
                assert!(after.contains(&format!("Example:\n  {path}")), "{path}: {after}");
                for argument in sub.get_arguments() {
                    assert!(argument.get_help().is_some(), "{path}: {}", argument.get_id());
                }
                walk(sub, &path);
            }
        }
        walk(&command(), "blockd");
    }
}
