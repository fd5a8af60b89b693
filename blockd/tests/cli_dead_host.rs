//! A daemon that was killed, and another one that takes its cells over: both share a folder.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use blockd_testkit::tools::free_port;
use cli_support::{Daemon, connect, pattern};
use serde_json::{Value, json};

const MIB: usize = 1 << 20;

/// The daemon with this number, in the same folder as the others. Its node is another one.
fn daemon(folder: &Path, host: u32) -> Daemon {
    daemon_of(folder, host, &format!("4f2b8c1{host}"))
}

/// The same with the number of its node.
fn daemon_of(folder: &Path, host: u32, node: &str) -> Daemon {
    let port = free_port().unwrap();
    let config = format!(
        "[node]\nid = \"{node}-0e4a-4d5b-9c6f-7a8b9c0d1e2f\"\nhook_timeout = \"5s\"\n\
         [hosts]\nlisten = \"127.0.0.1:{port}\"\n"
    );
    let daemon = Daemon::start_with("64M", &config);
    let (folder, host) = (folder.display().to_string(), host.to_string());
    daemon.ok(&["vg", "add", "--folder", &folder, "--host", &host, "local"]);
    daemon
}

/// Cells are on disk, as their pools need O_DIRECT.
fn shared() -> blockd_testkit::folder::Folder {
    blockd_testkit::folder::Folder::below(Path::new(env!("CARGO_TARGET_TMPDIR")), "dead").unwrap()
}

/// Two daemons; the second one has these cells, each with a volume `data` of its own content.
fn prepared(folder: &Path, cells: &[&str]) -> [Daemon; 2] {
    with_cells([1, 2].map(|host| daemon(folder, host)), cells)
}

fn with_cells(hosts: [Daemon; 2], cells: &[&str]) -> [Daemon; 2] {
    for cell in cells {
        hosts[1].ok(&["cell", "create", "--size", "64M", &format!("local/{cell}")]);
        hosts[1].ok(&["add", "data", "--pool", cell, "--size", "32M", "--nbd"]);
        connect(&hosts[1], &format!("{cell}/data")).write(0, &content(cell), true).unwrap();
    }
    hosts
}

fn content(cell: &str) -> Vec<u8> {
    pattern(MIB, cell.len() as u64)
}

/// Takes a cell, which no host has, and compares its volume.
fn holds(daemon: &Daemon, cell: &str) {
    daemon.ok(&["cell", "take", &format!("local/{cell}")]);
    daemon.ok(&["attach", "--nbd", "data", "--pool", cell]);
    let mut read = vec![0; MIB];
    connect(daemon, &format!("{cell}/data")).read(0, &mut read).unwrap();
    assert!(read == content(cell), "{cell} has another content");
}

fn hook(daemon: &Daemon, folder: &str, name: &str, text: &str) -> PathBuf {
    let folder = daemon.config().parent().unwrap().join("hooks").join(folder);
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join(name);
    fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

fn states(daemon: &Daemon) -> Value {
    let listed = daemon.json(&["cell", "list"]);
    let cells = listed["cells"].as_array().unwrap().iter();
    cells.map(|cell| json!([cell["name"], cell["state"]])).collect()
}

fn dead(daemon: &Daemon) -> Value {
    daemon.json(&["vg", "list"])["groups"][0]["dead"].clone()
}

#[test]
fn the_cells_of_a_daemon_that_was_killed_are_taken_over_and_released() {
    let folder = shared();
    let mut hosts = prepared(folder.path(), &["one", "three"]);
    hosts[1].kill();
    assert_eq!(states(&hosts[0]), json!([["one", "elsewhere"], ["three", "elsewhere"]]));
    let declared = hosts[0].json(&["node", "declare-dead", "local/2"]);
    assert_eq!(json!([declared["changed"], declared["node"]]), json!([true, "local/2"]));
    for (at, cell) in ["one", "three"].iter().enumerate() {
        let taken = &declared["cells"][at];
        assert_eq!(json!([taken["cell"], taken["outcome"]]), json!([cell, "released"]));
        assert!(taken["failure"].is_null() && taken["log_changes"].as_u64() > Some(0), "{taken}");
    }
    assert_eq!(states(&hosts[0]), json!([["one", "free"], ["three", "free"]]));
    let record = dead(&hosts[0]);
    assert_eq!(json!([record[0]["host"], record[0]["cells"]]), json!([2, ["one", "three"]]));
    let text = hosts[0].ok(&["node", "list"]);
    assert!(text.contains("local/2") && text.contains("dead"), "{text}");
    assert!(hosts[0].ok(&["vg", "list"]).contains("DEAD HOSTS"));
    // It is so already.
    let again = hosts[0].json(&["node", "declare-dead", "local/2"]);
    assert_eq!(json!([again["changed"], again["cells"], again["hooks"]]), json!([false, [], []]));
    let text = hosts[0].ok(&["node", "declare-dead", "local/2"]);
    assert_eq!(text, "host local/2: was declared dead already\n");
    for cell in ["one", "three"] {
        holds(&hosts[0], cell);
    }
}

#[test]
fn a_daemon_that_runs_is_never_fenced() {
    let folder = shared();
    let mut hosts = prepared(folder.path(), &["one"]);
    for (arguments, problem) in [
        (["node", "declare-dead", "local/2"].as_slice(), "host local/2 answers: its daemon runs"),
        (&["node", "declare-dead", "--force", "local/2"], "has a daemon that runs"),
        (&["node", "forget", "local/2"], "was not declared dead"),
        (&["node", "forget", "--force", "local/2"], "has a daemon that runs"),
        (&["cell", "take", "--fence", "local/one"], "has a daemon that runs"),
        (&["node", "declare-dead", "local/1"], "this one runs, and can't be declared dead"),
        (&["node", "forget", "--force", "local/1"], "this one runs, and can't be forgotten"),
        (&["node", "declare-dead", "local/7"], "host local/7 does not exist"),
        (&["node", "declare-dead", "none/2"], "volume group none does not exist"),
        (&["node", "declare-dead", "local/x"], "must be GROUP/NUMBER"),
        (&["node", "declare-dead", "--accept-loss", "local/2"], "left out with GROUP/NUMBER"),
        (&["node", "declare-dead", "--force", "3f2b8c1d"], "it is for GROUP/NUMBER"),
    ] {
        let (_, found) = hosts[0].failure(arguments);
        assert!(found.contains(problem), "{arguments:?}: {found}");
    }
    assert_eq!(states(&hosts[1]), json!([["one", "open"]]));
    let mut read = vec![0; MIB];
    connect(&hosts[1], "one/data").read(0, &mut read).unwrap();
    assert!(read == content("one") && dead(&hosts[0]) == json!([]));
    // Two daemons with one number are one too many.
    hosts[0].kill();
    let other = daemon_with_number_in_use(folder.path());
    assert!(other.contains("has another daemon with the number 2, which runs"), "{other}");
}

fn daemon_with_number_in_use(folder: &Path) -> String {
    let other = Daemon::start("64M");
    let folder = folder.display().to_string();
    other.failure(&["vg", "add", "--folder", &folder, "--host", "2", "local"]).1
}

#[test]
fn scripts_run_before_anything_is_changed() {
    let folder = shared();
    let mut hosts = prepared(folder.path(), &["one"]);
    hosts[1].kill();
    let ran = hosts[0].dir.join("ran");
    hook(&hosts[0], "pre-declare-dead.d", "10-first", &format!("echo $1 > {ran:?}"));
    let bad = hook(&hosts[0], "pre-declare-dead.d", "20-bad", "echo no power switch; exit 3");
    let last = hook(&hosts[0], "pre-declare-dead.d", "30-last", &format!("echo last > {ran:?}"));
    let (code, error) = hosts[0].failure(&["node", "declare-dead", "local/2"]);
    assert!(code == 7 && error.contains("exit code 3: no power switch"), "{code} {error}");
    assert!(error.contains("stays as it is"), "{error}");
    assert_eq!(fs::read_to_string(&ran).unwrap(), "local/2\n");
    assert_eq!((states(&hosts[0]), dead(&hosts[0])), (json!([["one", "elsewhere"]]), json!([])));
    fs::remove_file(bad).unwrap();
    fs::remove_file(last).unwrap();
    hook(&hosts[0], "pre-declare-dead.d", "20-good", "echo \"$BLOCKD_NODE had $BLOCKD_POOLS\"");
    let text = hosts[0].ok(&["node", "declare-dead", "local/2"]);
    let expected = ["20-good: done\n  local/2 had one\n", "cell one: taken over, "];
    assert!(expected.iter().all(|part| text.contains(part)), "{text}");
    assert!(text.ends_with("host local/2: declared dead\n"), "{text}");
    // And before it is forgotten.
    let bad = hook(&hosts[0], "pre-forget.d", "10-bad", "exit 4");
    let (_, error) = hosts[0].failure(&["node", "forget", "local/2"]);
    assert!(error.contains("exit code 4"), "{error}");
    assert_eq!(dead(&hosts[0])[0]["host"], 2);
    fs::remove_file(bad).unwrap();
    let forgotten = hosts[0].json(&["node", "forget", "local/2"]);
    assert_eq!(forgotten["changed"], true);
    assert_eq!(dead(&hosts[0]), json!([]));
    let text = hosts[0].ok(&["node", "forget", "local/2"]);
    assert_eq!(text, "host local/2: there was no such host\n");
    holds(&hosts[0], "one");
}

#[test]
fn a_daemon_that_comes_back_has_lost_its_cells_and_is_dead_no_more() {
    let folder = shared();
    let mut hosts = prepared(folder.path(), &["one", "three"]);
    hosts[1].kill();
    // Over a restart of the daemon that has declared it dead.
    hosts[0].ok(&["node", "declare-dead", "local/2"]);
    hosts[0].kill();
    hosts[0].start_again();
    assert_eq!(dead(&hosts[0])[0]["host"], 2);
    hosts[1].start_again();
    let (_, problem) = hosts[1].failure(&["pool", "show", "one"]);
    assert!(problem.contains("pool one does not exist"), "{problem}");
    assert_eq!(dead(&hosts[0]), json!([]));
    assert!(!hosts[0].ok(&["node", "list"]).contains("local/2"));
    let (_, problem) = hosts[0].failure(&["node", "forget", "local/2"]);
    assert!(problem.contains("or has come back since"), "{problem}");
    // It can have them again, in order.
    holds(&hosts[1], "one");
    holds(&hosts[0], "three");
    hosts[1].kill();
    let declared = hosts[0].json(&["node", "declare-dead", "local/2"]);
    assert_eq!(declared["cells"].as_array().unwrap().len(), 1, "{declared}");
    assert_eq!(dead(&hosts[0]).as_array().unwrap().len(), 1);
}

#[test]
fn a_cell_that_can_not_be_taken_over_is_named_and_the_others_are() {
    let folder = shared();
    let mut hosts = prepared(folder.path(), &["one", "three"]);
    // A pool of that name is here already.
    hosts[0].ok(&["pool", "create", "one", "--memory", "--size", "64M"]);
    hosts[1].kill();
    let output = hosts[0].run(&["--json", "node", "declare-dead", "local/2"]);
    assert_eq!(output.status.code(), Some(7));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("1 of its 2 cell(s) could not be taken over"), "{error}");
    let declared: Value = serde_json::from_slice(&output.stdout).unwrap();
    let failed = &declared["cells"][0];
    assert_eq!(json!([failed["cell"], failed["outcome"]]), json!(["one", "failed"]));
    assert!(failed["failure"].as_str().unwrap().contains("is here already"), "{failed}");
    assert_eq!(declared["cells"][1]["outcome"], "released");
    assert_eq!(dead(&hosts[0])[0]["pending_cells"], json!(["one"]));
    let (_, problem) = hosts[0].failure(&["node", "forget", "local/2"]);
    assert!(problem.contains("has cells that were not taken over"), "{problem}");
    hosts[0].ok(&["pool", "rename", "one", "other"]);
    let declared = hosts[0].json(&["node", "declare-dead", "local/2"]);
    assert_eq!(json!([declared["changed"], declared["cells"][0]["cell"]]), json!([true, "one"]));
    holds(&hosts[0], "one");
}

#[test]
fn clients_on_standby_get_the_cell_of_a_daemon_that_was_killed() {
    let folder = shared();
    // Daemons of one machine are one node, unless their configurations differ.
    let hosts = [1, 2].map(|host| daemon_of(folder.path(), host, "4f2b8c1d"));
    let mut hosts = with_cells(hosts, &["one"]);
    let standby = hosts[0].json(&["cell", "standby", "--nbd", "local/one", "data"]);
    hosts[1].kill();
    let declared = hosts[0].json(&["node", "declare-dead", "local/2"]);
    assert_eq!(declared["cells"][0]["outcome"], "kept");
    let uri = standby["where"].as_str().unwrap().parse().unwrap();
    let mut client = blockd_nbd::client::Client::connect(&uri, &Default::default()).unwrap();
    let mut read = vec![0; MIB];
    client.read(0, &mut read).unwrap();
    assert!(read == content("one"));
}
