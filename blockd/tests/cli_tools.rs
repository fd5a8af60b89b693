//! Tools that work on a pool's file while no daemon has it.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use cli_support::{Daemon, pattern};
use serde_json::Value;

/// A daemon with a volume in which there is something, and the path of its pool.
fn with_data() -> (Daemon, PathBuf) {
    let daemon = Daemon::start("256M");
    std::fs::write(daemon.dir.join("image"), pattern(3 << 20, 5)).unwrap();
    daemon.ok(&["import", "image", "data"]);
    let pool = daemon.dir.join("default.pool");
    (daemon, pool)
}

fn parsed(output: &std::process::Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_pool_is_checked_when_its_daemon_is_gone() {
    let (mut daemon, pool) = with_data();
    let path = pool.to_str().unwrap();
    let (code, error) = daemon.failure(&["pool", "check", path]);
    assert!(code == 7 && error.contains("in use"), "{code} {error}");
    daemon.kill();
    let before = std::fs::read(&pool).unwrap();
    let checked = daemon.json(&["pool", "check", path]);
    assert_eq!((&checked["damaged"], &checked["clean"]), (&false.into(), &false.into()));
    assert_eq!(checked["volumes"], 1);
    assert!(daemon.ok(&["pool", "check", path]).ends_with("sound\n"));
    assert!(std::fs::read(&pool).unwrap() == before, "a check writes nothing");
}

#[test]
fn damage_is_one_value_and_an_exit_code() {
    let (mut daemon, pool) = with_data();
    daemon.kill();
    let file = std::fs::File::options().read(true).write(true).open(&pool).unwrap();
    let path = pool.to_str().unwrap();
    // Closed in order, all copies have to be right.
    daemon.start_again();
    let serving = daemon.terminate();
    assert!(serving.success());
    file.write_all_at(&[7; 64], 4096 + 100).unwrap();
    let output = daemon.run(&["--json", "pool", "check", path]);
    assert_eq!(output.status.code(), Some(10));
    let checked = parsed(&output);
    assert_eq!(checked["damaged"], true);
    let finding = &checked["findings"][0];
    assert_eq!((&finding["severity"], &finding["kind"]), (&"damage".into(), &"superblock".into()));
    let (code, error) = daemon.failure(&["pool", "check", path]);
    assert_eq!((code, error.as_str()), (10, "pool: 1 damage(s) found"));
    daemon.start_again();
    assert!(daemon.terminate().success());
    assert!(daemon.ok(&["pool", "check", path]).ends_with("sound\n"), "the start has healed it");
}
