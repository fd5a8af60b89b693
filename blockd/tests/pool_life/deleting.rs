//! `blockd pool delete`.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::{BYTES, Case, Daemon, Loop, Traffic, client};

/// Whether both ends of a file or disk are zeroes, as a new pool needs.
fn is_unused(path: &Path) -> bool {
    let bytes = fs::read(path).unwrap();
    let ends = [&bytes[..2 << 20], &bytes[bytes.len() - (2 << 20)..]];
    ends.iter().all(|end| end.iter().all(|byte| *byte == 0))
}

#[test]
fn an_empty_pool_is_deleted_with_its_file_while_another_goes_on() {
    let mut case = Case::new();
    let traffic = Traffic::start(&case.daemon);
    case.daemon.ok(&["add", "--nbd", "--pool", "w", "--size", "8M", "data"]);
    case.daemon.ok(&["snapshot", "--pool", "w", "data", "--tag", "x"]);
    let error = case.refused(&["pool", "delete", "w"]);
    assert!(error.contains("1 volume and 1 snapshot"), "{error}");
    case.daemon.ok(&["del", "--pool", "w", "data@x"]);
    case.daemon.ok(&["del", "--pool", "w", "data"]);
    let said = case.daemon.ok(&["pool", "delete", "w"]);
    assert_eq!(said, format!("w: deleted\n{}: the file is removed\n", case.path()));
    assert!(!case.pool.exists());
    assert_eq!(case.daemon.ok(&["pool", "delete", "w"]), "w: there was no such pool\n");
    let (code, _) = case.daemon.failure(&["pool", "show", "w"]);
    assert_eq!(code, 4);
    traffic.end();
    // Nothing of it is missed, and its name and place can be used again.
    assert!(case.daemon.terminate().success());
    case.daemon.start_again();
    let path = case.path().to_owned();
    case.daemon.ok(&["pool", "create", "w", "--path", &path, "--size", "64M"]);
    assert_eq!(case.daemon.json(&["list", "--pool", "w"])["volumes"], json!([]));
}

#[test]
fn a_pool_is_deleted_with_its_volumes_when_that_is_confirmed() {
    let case = Case::with_data();
    let mut connected = client(&case.daemon, "w", "data");
    let (code, error) = case.daemon.failure(&["pool", "delete", "--force", "w"]);
    assert!(code == 3 && error.contains("yes is false"), "{error}");
    assert_eq!(case.state(), "open");
    let deleted = case.daemon.json(&["pool", "delete", "--force", "--yes", "w"]);
    assert_eq!((&deleted["changed"], &deleted["deleted_volumes"]), (&json!(true), &json!(1)));
    let device = json!({"path": case.path(), "erased": true, "removed": true});
    assert_eq!(deleted["devices"], json!([device]));
    assert!(connected.read(0, &mut vec![0; BYTES]).is_err());
    assert!(!case.pool.exists());
}

#[test]
fn a_file_that_was_there_before_stays_and_holds_no_pool() {
    let case = Case::new();
    let path = case.daemon.dir.join("given");
    fs::File::create(&path).unwrap().set_len(64 << 20).unwrap();
    let path = path.to_str().unwrap();
    case.daemon.ok(&["pool", "create", "given", "--path", path]);
    let said = case.daemon.ok(&["pool", "delete", "given"]);
    assert!(said.contains("erased, holds no pool any more"), "{said}");
    assert!(is_unused(Path::new(path)));
    let (code, error) = case.daemon.failure(&["pool", "check", path]);
    assert!(code != 0, "{error}");
    case.daemon.ok(&["pool", "create", "again", "--path", path]);
}

#[test]
fn a_disk_is_erased_and_can_be_used_again() {
    if !nix::unistd::geteuid().is_root() {
        println!("not run: loop devices need root");
        return;
    }
    let case = Case::new();
    let file = case.daemon.dir.join("disk");
    fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
    let disk = Loop::attach(&file);
    let path = disk.0.to_str().unwrap();
    case.daemon.ok(&["pool", "create", "d", "--path", path]);
    case.daemon.ok(&["add", "--nbd", "--pool", "d", "--size", "8M", "data"]);
    case.daemon.ok(&["pool", "delete", "--force", "--yes", "d"]);
    assert!(disk.0.exists() && is_unused(&disk.0), "something is left of the pool or its claim");
    case.daemon.ok(&["pool", "create", "e", "--path", path]);
}

#[test]
fn a_disk_that_holds_something_else_by_now_is_not_written_to() {
    if !nix::unistd::geteuid().is_root() {
        println!("not run: loop devices need root");
        return;
    }
    let case = Case::new();
    let file = case.daemon.dir.join("disk");
    fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
    let disk = Loop::attach(&file);
    let path = disk.0.to_str().unwrap();
    case.daemon.ok(&["pool", "create", "d", "--path", path]);
    case.daemon.ok(&["pool", "close", "d"]);
    // The page of the claim is free, so that a claim would be taken at once.
    let mut others = vec![0x5A; 64 << 20];
    others[8192..12_288].fill(0);
    let device = fs::File::options().write(true).open(&disk.0).unwrap();
    device.write_all_at(&others, 0).unwrap();
    device.sync_all().unwrap();
    let deleted = case.daemon.json(&["pool", "delete", "--force", "--yes", "d"]);
    assert_eq!(
        (&deleted["changed"], &deleted["devices"][0]["erased"]),
        (&json!(true), &json!(false))
    );
    assert!(fs::read(&disk.0).unwrap() == others, "something else was written to");
}

#[test]
fn a_closed_or_missing_pool_is_deleted_by_force_and_others_are_left_alone() {
    let mut case = Case::with_data();
    case.daemon.ok(&["pool", "close", "--force", "w"]);
    let error = case.refused(&["pool", "delete", "w"]);
    assert!(error.contains("is not open"), "{error}");
    // Another pool lies there now.
    let mut other = Daemon::start("64M");
    assert!(other.terminate().success());
    let moved = case.pool.with_extension("elsewhere");
    fs::rename(&case.pool, &moved).unwrap();
    fs::copy(other.dir.join("default.pool"), &case.pool).unwrap();
    let before = fs::read(&case.pool).unwrap();
    let deleted = case.daemon.json(&["pool", "delete", "--force", "--yes", "w"]);
    assert_eq!(deleted["devices"][0]["erased"], false);
    assert!(fs::read(&case.pool).unwrap() == before, "another pool was written to");
    assert!(case.daemon.terminate().success());
    case.daemon.start_again();
    // The data of the deleted one is still where it was moved to.
    case.daemon.ok(&["pool", "import", "w", moved.to_str().unwrap()]);
    super::has_data(&case.daemon, "w");
}

#[test]
fn a_pool_of_the_configuration_is_deleted_only_without_its_table() {
    let mut case = Case::new();
    let config = fs::read_to_string(case.daemon.config()).unwrap();
    let path = case.daemon.dir.join("c.pool");
    let table = format!("[[pool]]\nname = \"c\"\npath = {path:?}\nsize = \"64M\"\n");
    assert!(case.daemon.terminate().success());
    fs::write(case.daemon.config(), format!("{config}{table}")).unwrap();
    case.daemon.start_again();
    for verb in ["delete", "export"] {
        let error = case.refused(&["pool", verb, "c"]);
        assert!(error.contains("remove its [[pool]] table"), "{error}");
    }
    fs::write(case.daemon.config(), config).unwrap();
    case.daemon.hang_up();
    let clock = blockd_media::clock::Clock::start();
    while !case.daemon.run(&["pool", "delete", "c"]).status.success() {
        assert!(clock.elapsed() < super::LIMIT, "{}", case.daemon.log());
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    // The daemon does not know who made the file.
    assert!(is_unused(&path));
    case.daemon.ok(&["pool", "create", "m", "--memory", "--size", "64M"]);
    assert_eq!(case.daemon.ok(&["pool", "delete", "m"]), "m: deleted\n");
}

/// A daemon that has exported the pool `default`, which lies elsewhere than the one by default of a
/// configuration without a pool, and which that had a table of before. And the path of the pool.
fn without_table() -> (Daemon, PathBuf) {
    let mut daemon = Daemon::start("64M");
    let config = fs::read_to_string(daemon.config()).unwrap();
    assert!(daemon.terminate().success());
    let path = daemon.dir.join("elsewhere.pool");
    fs::rename(daemon.dir.join("default.pool"), &path).unwrap();
    let config = config.replace("/default.pool", "/elsewhere.pool");
    fs::write(daemon.config(), &config).unwrap();
    daemon.start_again();
    let export = || daemon.run(&["pool", "export", "default"]);
    assert!(!export().status.success());
    let (without, _) = config.split_once("[[pool]]").unwrap();
    fs::write(daemon.config(), without).unwrap();
    daemon.hang_up();
    let clock = blockd_media::clock::Clock::start();
    while !export().status.success() {
        assert!(clock.elapsed() < super::LIMIT, "{}", daemon.log());
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    (daemon, path)
}

#[test]
fn the_only_pool_of_the_configuration_is_exported_without_its_table() {
    let (daemon, path) = without_table();
    daemon.ok(&["pool", "import", "again", path.to_str().unwrap()]);
    assert!(!daemon.dir.join("default.pool").exists());
}

#[test]
fn a_pool_with_the_name_of_the_one_by_default_is_opened_where_it_was_imported() {
    let (mut daemon, path) = without_table();
    let path = path.to_str().unwrap();
    daemon.ok(&["pool", "import", "default", path]);
    for _ in 0..2 {
        assert!(daemon.terminate().success());
        daemon.start_again();
        assert_eq!(daemon.json(&["pool", "show", "default"])["pool"]["state"], "open");
        // It is forgotten like any other, with no table to be removed before.
        assert_eq!(daemon.json(&["pool", "export", "default"])["paths"], json!([path]));
        daemon.ok(&["pool", "import", "default", path]);
    }
    assert!(!daemon.dir.join("default.pool").exists());
}

/// The list of pools can be read, and not replaced.
#[test]
fn a_pool_that_could_not_be_forgotten_keeps_its_attachments() {
    let case = Case::with_data();
    let blocked = case.daemon.dir.join("pools.json.next");
    fs::create_dir(&blocked).unwrap();
    let (_, error) = case.daemon.failure(&["pool", "delete", "--force", "--yes", "w"]);
    assert!(error.contains("pools.json"), "{error}");
    fs::remove_dir(&blocked).unwrap();
    case.daemon.ok(&["pool", "open", "w"]);
    assert_eq!(case.daemon.json(&["show", "--pool", "w", "data"])["volume"]["attached"], true);
    super::has_data(&case.daemon, "w");
}

/// The daemon is killed after it has forgotten the pool, and before it has forgotten where its
/// volumes were attached.
#[test]
fn attachments_of_a_pool_that_was_forgotten_go_with_it() {
    let mut case = Case::with_data();
    let attachments = case.daemon.dir.join("attachments.json");
    let before = fs::read(&attachments).unwrap();
    case.daemon.ok(&["pool", "delete", "--force", "--yes", "w"]);
    assert!(fs::read(&attachments).unwrap() != before, "nothing was attached");
    let elsewhere = case.daemon.dir.join("new.pool");
    let elsewhere = elsewhere.to_str().unwrap();
    let create = ["pool", "create", "w", "--path", elsewhere, "--size", "64M"];
    let mut start_with = |attached: &[u8]| {
        case.daemon.kill();
        fs::write(&attachments, attached).unwrap();
        case.daemon.start_again();
        case.daemon.run(&create).status.success()
    };
    // Those of an older release do not name the pool that they are of, and it may come back.
    let text = String::from_utf8(before.clone()).unwrap();
    let mut parts = text.split("\"pool_id\":\"");
    let mut older = parts.next().unwrap().to_owned();
    for part in parts {
        older += "\"pool_id\":";
        older += &part[part.find('"').unwrap()..].replacen('"', "\"\"", 1);
    }
    assert!(older.len() < text.len(), "{text}");
    assert!(!start_with(older.as_bytes()), "attachments without an identity were dropped");
    assert!(start_with(&before), "attachments of a deleted pool stand in the way");
}

/// The daemon is killed after it has forgotten the pool, or before: never is there half a pool.
#[test]
fn a_pool_is_whole_or_gone_after_a_crash() {
    let mut case = Case::with_data();
    let before = fs::read(case.daemon.dir.join("pools.json")).unwrap();
    for wait_us in [0, 2_000, 10_000, 30_000, 100_000] {
        let command = case.daemon.command(&["pool", "delete", "--force", "--yes", "w"]).spawn();
        let mut command = command.unwrap();
        std::thread::sleep(std::time::Duration::from_micros(wait_us));
        case.daemon.kill();
        let _ = command.wait().unwrap();
        case.daemon.start_again();
        if case.daemon.run(&["pool", "show", "w"]).status.success() {
            super::has_data(&case.daemon, "w");
            continue;
        }
        let now = fs::read(case.daemon.dir.join("pools.json")).unwrap();
        assert!(now != before);
        // Forgotten: its file is whole, erased or removed, and a new one can be made elsewhere.
        let elsewhere = case.daemon.dir.join("new.pool");
        let elsewhere = elsewhere.to_str().unwrap();
        case.daemon.ok(&["pool", "create", "w", "--path", elsewhere, "--size", "64M"]);
        return;
    }
    case.daemon.ok(&["pool", "delete", "--force", "--yes", "w"]);
}
