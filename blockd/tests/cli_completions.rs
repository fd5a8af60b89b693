//! Completions of bash, with names that only the daemon knows.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use std::path::Path;
use std::process::Command;

use cli_support::Daemon;

/// Loads the script that `blockd completions bash` prints and completes the last of these words as
/// bash does, with readline's variables set by hand.
const SCRIPT: &str = r#"
source <(blockd completions bash)
complete -p blockd >/dev/null || exit 9
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
COMP_TYPE=9
_clap_complete_blockd blockd "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\n' "${COMPREPLY[@]}"
"#;

/// The candidates for the last word of a command line.
fn completed(daemon: &Daemon, socket: Option<&Path>, words: &[&str]) -> Vec<String> {
    let binary = Path::new(env!("CARGO_BIN_EXE_blockd"));
    let path = std::env::var("PATH").unwrap();
    let mut bash = Command::new("bash");
    bash.args(["--norc", "--noprofile", "-c", SCRIPT, "bash"]).args(words);
    bash.env("PATH", format!("{}:{path}", binary.parent().unwrap().display()));
    bash.env_remove("BLOCKD_SOCKET").env("XDG_RUNTIME_DIR", "/nonexistent");
    bash.envs(socket.map(|socket| ("BLOCKD_SOCKET", socket)));
    let output = bash.current_dir(&daemon.dir).output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && complaint.is_empty(), "{words:?}: {complaint}");
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| line.trim_end().to_owned()).filter(|line| !line.is_empty()).collect()
}

#[test]
fn bash_completes_names_of_volumes_and_pools() {
    let daemon = Daemon::start("1G");
    for name in ["mail-data", "mail-log", "web", "mail$(reboot)"] {
        daemon.ok(&["add", "--size", "8M", name]);
    }
    daemon.ok(&["snapshot", "web=web-monday"]);
    let socket = daemon.socket();
    let at = |words: &[&str]| completed(&daemon, Some(&socket), words);
    // A name that bash would run is left out.
    assert_eq!(at(&["blockd", "show", "mail"]), ["mail-data", "mail-log"]);
    assert_eq!(at(&["blockd", "clone", "w"]), ["web-monday"], "a snapshot alone can be cloned");
    assert_eq!(at(&["blockd", "snapshot", "w"]), ["web"]);
    assert_eq!(at(&["blockd", "pool", "show", "d"]), ["default"]);
    assert_eq!(at(&["blockd", "list", "--pool", "d"]), ["default"]);
    assert_eq!(at(&["blockd", "attach", "web", "--read"]), ["--read-only"]);
    assert_eq!(at(&["blockd", "resx"]), Vec::<String>::new());
    assert_eq!(at(&["blockd", "resi"]), ["resize"]);
    // The name of a new volume is the user's to find.
    assert_eq!(at(&["blockd", "add", "we"]), Vec::<String>::new());
}

#[test]
fn the_socket_is_that_of_the_command_line() {
    let daemon = Daemon::start("1G");
    daemon.ok(&["add", "--size", "8M", "web"]);
    let socket = daemon.socket().to_str().unwrap().to_owned();
    let words = ["blockd", "--socket", &socket, "show", "w"];
    assert_eq!(completed(&daemon, None, &words), ["web"]);
    // Without a daemon there are no names, and no error in the middle of a line.
    let nowhere = Path::new("/nonexistent/control.sock");
    assert_eq!(completed(&daemon, Some(nowhere), &["blockd", "show", "w"]), Vec::<String>::new());
}
