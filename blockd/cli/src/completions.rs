//! `blockd completions`, and the answers to the scripts that it prints: the shell runs blockd for
//! each completion, which asks the daemon for the names of volumes and pools.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::Duration;

use blockd_api::v1::{ListPoolsRequest, ListVolumesRequest, VolumeKind};
use blockd_media::error::Error;
use clap::{Arg, Command};
use clap_complete::env::Shells;
use clap_complete::{ArgValueCandidates, CompleteEnv, CompletionCandidate, Shell};

use super::Context;
use super::client::Client;

/// The variable that the scripts set. Clap's default is `COMPLETE`, which a user's environment may
/// have for another purpose.
const VARIABLE: &str = "BLOCKD_COMPLETE";

/// The longest that the daemon may take to answer. The shell waits as long; after that there are no
/// names.
const LIMIT: Duration = Duration::from_secs(1);

/// Arguments that name a new volume or pool, which the daemon does not know yet. The socket of
/// `extend-request` is not the control socket.
const NEW: [(&[&str], &str); 6] = [
    (&["add"], "name"),
    (&["clone"], "name"),
    (&["extend-request"], "name"),
    (&["pool", "create"], "pool"),
    (&["pool", "import"], "pool"),
    (&["pmem", "create"], "pool"),
];

/// Print completions for a shell
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  blockd completions bash > /etc/bash_completion.d/blockd",
    long_about = "Print completions for a shell\n\nNeeds no daemon. While a daemon answers, the \
                  names of its volumes and pools are completed as well."
)]
pub(crate) struct Completions {
    /// The shell
    pub shell: Shell,
}

impl Completions {
    pub(super) fn run(&self, context: &Context) -> Result<(), Error> {
        let name = self.shell.to_string();
        let mut text = Vec::new();
        let written = match Shells::builtins().completer(&name) {
            Some(shell) => {
                shell.write_registration(VARIABLE, "blockd", "blockd", "blockd", &mut text)
            }
            None => Err(std::io::ErrorKind::Unsupported.into()),
        };
        written.map_err(|source| Error::io("making completions", source))?;
        context.output.text(&String::from_utf8_lossy(&text))
    }
}

/// Prints candidates and ends the process, if a completion script has started it; returns
/// otherwise.
pub(super) fn answer(line: fn() -> Command) {
    CompleteEnv::with_factory(|| with_names(line(), &[])).var(VARIABLE).complete();
}

/// Names of the daemon that an argument takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Names {
    /// Volumes and snapshots.
    All,
    Volumes,
    Snapshots,
    Pools,
}

impl Names {
    /// The names that an argument of a verb takes, by its id.
    fn of(verb: &[&str], id: &str) -> Option<Self> {
        if NEW.contains(&(verb, id)) {
            return None;
        }
        match id {
            "name" | "names" => Some(Self::All),
            "volumes" => Some(Self::Volumes),
            "snapshot" | "since" => Some(Self::Snapshots),
            "pool" => Some(Self::Pools),
            _ => None,
        }
    }

    /// The names that the daemon has; none where no daemon answers in time.
    fn candidates(self) -> Vec<CompletionCandidate> {
        let words: Vec<OsString> = std::env::args_os().collect();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let names = runtime.map(|runtime| runtime.block_on(self.ask(&words)));
        let names = names.ok().and_then(Result::ok).unwrap_or_default();
        names.into_iter().filter(|name| is_plain(name)).map(CompletionCandidate::new).collect()
    }

    async fn ask(self, words: &[OsString]) -> Result<Vec<String>, Error> {
        let variable = || std::env::var_os("BLOCKD_SOCKET");
        let socket = value_of(words, "--socket").or_else(variable).map(PathBuf::from);
        let mut client = Client::connect(socket.as_deref(), LIMIT).await?;
        if self == Self::Pools {
            let pools = client.list_pools(ListPoolsRequest {}).await?.pools;
            return Ok(pools.into_iter().map(|pool| pool.name).collect());
        }
        let pool = value_of(words, "--pool").unwrap_or_default().to_string_lossy().into_owned();
        let volumes = client.list_volumes(ListVolumesRequest { pool, brief: true }).await?.volumes;
        let fits = |kind| match self {
            Self::Volumes => kind == VolumeKind::Volume,
            Self::Snapshots => kind == VolumeKind::Snapshot,
            Self::All | Self::Pools => true,
        };
        let fitting = volumes.into_iter().filter(|volume| fits(volume.kind()));
        Ok(fitting.map(|volume| volume.name).collect())
    }
}

/// Adds completion by the daemon's names to a command and its verbs. `verb` is the path of the
/// command.
fn with_names(command: Command, verb: &[&str]) -> Command {
    let add = |argument: Arg| match Names::of(verb, argument.get_id().as_str()) {
        Some(names) => argument.add(ArgValueCandidates::new(move || names.candidates())),
        None => argument,
    };
    command.mut_args(add).mut_subcommands(|sub| {
        let name = sub.get_name().to_owned();
        with_names(sub, &[verb, &[name.as_str()]].concat())
    })
}

/// The value of an option in a command line that is not complete.
fn value_of(words: &[OsString], option: &str) -> Option<OsString> {
    let assigned = |word: &OsString| {
        Some(OsString::from(word.to_str()?.strip_prefix(option)?.strip_prefix('=')?))
    };
    let next = words.windows(2).find(|pair| pair[0] == *OsStr::new(option));
    next.map(|pair| pair[1].clone()).or_else(|| words.iter().find_map(assigned))
}

/// Whether a shell takes a name as it is. It inserts candidates without quotes: a space would make
/// two words of one, and other characters a command.
fn is_plain(name: &str) -> bool {
    let is_known = |c: char| c.is_alphanumeric() || "._-@+:%,".contains(c);
    !name.starts_with('-') && name.chars().all(is_known)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args;

    #[test]
    fn arguments_that_name_volumes_and_pools_are_completed() {
        let line = with_names(args::command(), &[]);
        let is_completed = |path: &[&str], id: &str| {
            let verb = path.iter().fold(&line, |verb, name| verb.find_subcommand(name).unwrap());
            let argument = verb.get_arguments().find(|one| one.get_id() == id).unwrap();
            argument.get::<ArgValueCandidates>().is_some()
        };
        for (path, id) in NEW {
            assert!(!is_completed(path, id), "{path:?} {id}");
        }
        let known: [(&[&str], &str); 10] = [
            (&["show"], "name"),
            (&["show"], "pool"),
            (&["snapshot"], "volumes"),
            (&["clone"], "snapshot"),
            (&["rollback"], "snapshot"),
            (&["space"], "names"),
            (&["export"], "since"),
            (&["pool", "show"], "pool"),
            (&["pool", "rename"], "pool"),
            (&["pool", "feature", "enable"], "pool"),
        ];
        for (path, id) in known {
            assert!(is_completed(path, id), "{path:?} {id}");
        }
        assert!(!is_completed(&["diff"], "from"), "it is a place in the volume");
    }

    #[test]
    fn an_option_of_the_line_is_found() {
        let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        let found = |text| value_of(&words(text), "--socket");
        assert_eq!(found("blockd --socket /a show"), Some("/a".into()));
        assert_eq!(found("blockd show --socket=/b x"), Some("/b".into()));
        assert_eq!(found("blockd show --sockets /c --socket"), None);
    }

    #[test]
    fn names_that_a_shell_would_run_are_not_offered() {
        assert!(["data", "data@monday", "a.b_c-1", "größe"].iter().all(|name| is_plain(name)));
        let others = ["a b", "$(reboot)", "a;b", "`a`", "-f", "a'b", "a*", "~", "#"];
        assert!(!others.iter().any(|name| is_plain(name)));
    }
}
