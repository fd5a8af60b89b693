//! Cells in a folder of one host, through the command line: made, grown, released and taken, with
//! their volumes, over a kill of the daemon.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use std::fs;

use cli_support::{Daemon, connect_patient, pattern};
use serde_json::{Value, json};

const MIB: usize = 1 << 20;

/// A daemon with the group `local`, in a folder of its own.
fn prepared() -> Daemon {
    let daemon = Daemon::start("64M");
    let folder = daemon.dir.join("cells");
    fs::create_dir(&folder).unwrap();
    let folder = folder.display().to_string();
    let added = daemon.json(&["vg", "add", "--folder", &folder, "local"]);
    assert_eq!((&added["changed"], &added["group"]["host"]), (&json!(true), &json!(1)));
    assert_eq!(daemon.json(&["vg", "add", "--folder", &folder, "local"])["changed"], false);
    daemon
}

fn cells(daemon: &Daemon) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let listed = daemon.json(&["cell", "list"]);
    let cells = listed["cells"].as_array().unwrap().iter();
    cells.map(|cell| (text(&cell["name"]), text(&cell["state"]))).collect()
}

fn state(name: &str, state: &str) -> [(String, String); 1] {
    [(name.to_owned(), state.to_owned())]
}

#[test]
fn a_cell_grows_from_its_group_is_released_and_taken_and_survives_a_kill() {
    let mut daemon = prepared();
    let made = daemon.ok(&["cell", "create", "--size", "64M", "local/one"]);
    assert_eq!(made, "local/one: made, 64 MiB, pool one is open\n");
    daemon.ok(&["add", "data", "--pool", "one", "--size", "1G"]);
    // Three times as much as the cell has.
    let data = pattern(192 * MIB, 7);
    let mut client = connect_patient(&daemon, "one/data");
    for (at, part) in data.chunks(MIB).enumerate() {
        client.write((at * MIB) as u64, part, false).unwrap();
    }
    client.flush().unwrap();
    drop(client);
    let size = daemon.json(&["cell", "list"])["cells"][0]["device_bytes"].as_u64().unwrap();
    assert!(size > 1024 * MIB as u64, "{size}");
    daemon.kill();
    daemon.start_again();
    assert_eq!(cells(&daemon), state("one", "open"));
    let (_, problem) = daemon.failure(&["cell", "release", "local/one"]);
    assert!(problem.contains("detach first"), "{problem}");
    let released = daemon.json(&["cell", "release", "--force", "local/one"]);
    assert_eq!(released["detached_volumes"], json!(["data"]));
    assert_eq!(cells(&daemon), state("one", "free"));
    let (_, problem) = daemon.failure(&["pool", "show", "one"]);
    assert!(problem.contains("pool one does not exist"), "{problem}");
    let taken = daemon.json(&["cell", "take", "local/one"]);
    assert_eq!((&taken["changed"], &taken["fenced_host"]), (&json!(true), &Value::Null));
    assert_eq!(taken["cell"]["state"], "open");
    daemon.ok(&["attach", "data", "--pool", "one"]);
    let mut client = connect_patient(&daemon, "one/data");
    let mut read = vec![0; MIB];
    for (at, part) in data.chunks(MIB).enumerate() {
        client.read((at * MIB) as u64, &mut read).unwrap();
        assert!(read == part, "MiB {at} differs");
    }
}

#[test]
fn a_group_that_is_lost_drops_its_cells_also_over_a_restart_and_no_other_pool() {
    let mut daemon = prepared();
    daemon.ok(&["cell", "create", "--size", "64M", "local/one"]);
    assert_eq!(daemon.ok(&["node", "lost", "local"]), "local: lost, dropped one\n");
    let (_, problem) = daemon.failure(&["add", "data", "--pool", "one", "--size", "8M"]);
    assert!(problem.contains("membership is lost"), "{problem}");
    daemon.ok(&["add", "other", "--size", "8M"]);
    daemon.kill();
    daemon.start_not_ready();
    let (_, problem) = daemon.failure(&["cell", "take", "local/one"]);
    assert!(problem.contains("this host was fenced from volume group local"), "{problem}");
    let (_, problem) = daemon.failure(&["pool", "open", "one"]);
    assert!(problem.contains("this host was fenced from volume group local"), "{problem}");
    daemon.ok(&["show", "other"]);
}

#[test]
fn cells_are_named_with_their_group_and_mistakes_change_nothing() {
    let daemon = prepared();
    for (arguments, problem) in [
        (["cell", "create", "--size", "64M", "one"].as_slice(), "must be GROUP/CELL"),
        (&["cell", "create", "--size", "64M", "local/One"], "name is One: must be 1 to 64 of"),
        (&["cell", "create", "--size", "64M", "none/one"], "volume group none does not exist"),
        (&["cell", "create", "--size", "64M", "local/default"], "pool default is here already"),
        (&["cell", "create", "--size", "900P", "local/one"], "no space"),
        (&["cell", "take", "local/one"], "cell one does not exist"),
        (&["cell", "release", "local/one"], "cell one does not exist"),
        (&["vg", "add", "--folder", "/nowhere", "other"], "folder /nowhere does not exist"),
        (&["vg", "add", "--folder", "/tmp", "local"], "exists with folder"),
    ] {
        let (_, found) = daemon.failure(arguments);
        assert!(found.contains(problem), "{arguments:?}: {found}");
    }
    assert!(cells(&daemon).is_empty());
    assert_eq!(daemon.ok(&["cell", "delete", "local/one"]), "local/one: there was no such cell\n");
    daemon.ok(&["cell", "create", "--size", "64M", "local/one"]);
    let (_, problem) = daemon.failure(&["vg", "remove", "local"]);
    assert!(problem.contains("has cell one: release it first"), "{problem}");
    daemon.ok(&["cell", "delete", "local/one"]);
    assert_eq!(daemon.ok(&["vg", "remove", "local"]), "local: removed\n");
    assert_eq!(daemon.ok(&["vg", "remove", "local"]), "local: there was no such volume group\n");
}
