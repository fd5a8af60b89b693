//! Pools that are given up or made by an explicit word, and lists that are lost or damaged.

use std::fs;
use std::path::Path;

use super::cli_support::{Daemon, wait_until};
use super::{Case, IN_USE};

#[test]
fn only_an_explicit_word_starts_a_missing_pool_anew() {
    let mut case = Case::new();
    case.restart(|case| fs::rename(&case.pool, case.moved()).unwrap());
    let path = case.pool.to_str().unwrap().to_owned();
    let create = ["pool", "create", "w", "--path", &path, "--size", "64M"];
    let (code, error) = case.daemon.failure(&create);
    assert!(code == IN_USE && error.contains("missing"), "{error}");
    assert!(!case.pool.exists());
    case.daemon.ok(&[&create[..], &["--replace-missing"]].concat());
    assert_eq!(case.daemon.json(&["list", "--pool", "w"])["volumes"].as_array().unwrap().len(), 0);
    // The new one is remembered in its place: the daemon becomes ready.
    assert!(case.daemon.terminate().success());
    case.daemon.start_again();
}

#[test]
fn a_pool_with_volumes_survives_the_loss_of_the_state_directory() {
    let mut case = Case::new();
    case.restart(|case| fs::remove_file(case.daemon.dir.join("served.json")).unwrap());
    case.is_whole();
}

#[test]
fn another_pool_is_neither_replaced_nor_adopted_by_an_explicit_word() {
    let mut case = Case::new();
    case.restart(|case| {
        fs::rename(&case.pool, case.moved()).unwrap();
        case.exchange();
    });
    let before = fs::read(&case.pool).unwrap();
    let path = case.pool.to_str().unwrap().to_owned();
    let error = case.refused(&["pool", "create", "w", "--replace-missing"]);
    assert!(error.contains(&path) && error.contains("holds another pool"), "{error}");
    assert!(fs::read(&case.pool).unwrap() == before, "the other pool was written to");
    case.is_missing("holds another pool");
    fs::rename(case.moved(), &case.pool).unwrap();
    // It is not missing any more: the word changes nothing.
    case.daemon.ok(&["pool", "create", "w", "--replace-missing"]);
    case.is_whole();
}

#[test]
fn a_missing_pool_is_started_anew_as_it_is_configured() {
    let mut case = Case::with("size = \"90%\"");
    let second = case.pool.with_file_name("second.pool");
    for devices in [1, 2] {
        if devices == 2 {
            // Now with two devices, of which both go.
            assert!(case.daemon.terminate().success());
            let first = format!("path = {:?}\nsize = \"90%\"", case.pool);
            let both = format!("devices = [{:?}, {second:?}]\nsize = \"64M\"", case.pool);
            case.configure(&first, &both);
            fs::remove_file(&case.pool).unwrap();
            case.daemon.start_not_ready();
            case.refused(&["pool", "open", "w"]);
            case.daemon.ok(&["pool", "create", "w", "--replace-missing"]);
            assert!(second.exists());
        }
        case.daemon.ok(&["add", "--nbd", "--pool", "w", "--size", "1M", "old"]);
        case.restart(|case| {
            fs::remove_file(&case.pool).unwrap();
            let _ = fs::remove_file(&second);
        });
        case.refused(&["pool", "open", "w"]);
        let path = case.pool.to_str().unwrap().to_owned();
        let (_, error) = case.daemon.failure(&[
            "pool",
            "create",
            "w",
            "--path",
            "/elsewhere",
            "--replace-missing",
        ]);
        assert!(error.contains(&path) && error.contains("/elsewhere"), "{error}");
        case.daemon.ok(&["pool", "create", "w", "--path", &path, "--replace-missing"]);
        case.daemon.ok(&["pool", "create", "w", "--replace-missing"]);
        let list = case.daemon.json(&["list", "--pool", "w"]);
        assert_eq!(list["volumes"].as_array().unwrap().len(), 0, "{list}");
        assert_eq!(second.exists(), devices == 2);
        // It stays a pool of the configuration.
        assert!(!case.daemon.dir.join("pools.json").exists());
        case.restart(|_| ());
        assert_eq!(case.daemon.json(&["version"])["daemon"]["ready"], true);
    }
}

#[test]
fn a_pool_of_which_only_some_devices_are_there_is_not_created() {
    let mut case = Case::new();
    assert!(case.daemon.terminate().success());
    let second = case.pool.with_file_name("second.pool");
    let both = format!("devices = [{:?}, {second:?}]", case.pool);
    case.configure(&format!("path = {:?}", case.pool), &both);
    case.configure("name = \"w\"", "name = \"pair\"");
    fs::rename(&case.pool, case.moved()).unwrap();
    for file in ["served.json", "attachments.json"] {
        fs::remove_file(case.daemon.dir.join(file)).unwrap();
    }
    case.daemon.start_again();
    case.daemon.ok(&["add", "--nbd", "--pool", "pair", "--size", "1M", "data"]);
    let away = |path: &Path| path.with_extension("away");
    for gone in [case.pool.clone(), second] {
        case.restart(|_| fs::rename(&gone, away(&gone)).unwrap());
        let error = case.refused(&["pool", "open", "pair"]);
        let absent = format!("pool pair is missing: {} does not exist", gone.display());
        assert!(error.contains(&absent), "{error}");
        let error = case.refused(&["pool", "create", "pair", "--replace-missing"]);
        assert!(error.contains("holds a device of this pool"), "{error}");
        assert!(!gone.exists(), "{} was made", gone.display());
        fs::rename(away(&gone), &gone).unwrap();
        case.daemon.ok(&["pool", "open", "pair"]);
        case.daemon.ok(&["show", "--pool", "pair", "data"]);
    }
}

#[test]
fn a_pool_with_attachments_or_made_at_run_time_counts_as_served_without_the_list() {
    let mut case = Case::new();
    let made = case.pool.with_file_name("made.pool");
    let path = made.to_str().unwrap().to_owned();
    case.daemon.ok(&["pool", "create", "made", "--path", &path, "--size", "64M"]);
    let away = made.with_extension("away");
    case.restart(|case| {
        fs::remove_file(case.daemon.dir.join("served.json")).unwrap();
        fs::rename(&case.pool, case.moved()).unwrap();
        fs::rename(&made, &away).unwrap();
    });
    for name in ["w", "made"] {
        let error = case.refused(&["pool", "open", name]);
        assert!(error.contains("is missing") && error.contains("served before"), "{error}");
    }
    assert!(!case.pool.exists() && !made.exists(), "a pool was made anew");
    fs::rename(case.moved(), &case.pool).unwrap();
    fs::rename(&away, &made).unwrap();
    for name in ["w", "made"] {
        case.daemon.ok(&["pool", "open", name]);
    }
    case.is_whole();
}

#[test]
fn a_damaged_list_of_served_pools_is_not_to_be_removed_while_a_pool_is_missing() {
    let mut case = Case::new();
    let list = case.daemon.dir.join("served.json");
    case.restart(|case| {
        fs::rename(&case.pool, case.moved()).unwrap();
        let text = fs::read(&list).unwrap();
        fs::write(&list, &text[..text.len() / 2]).unwrap();
        // The daemon stays for a pool that needs no list.
        let config = fs::read_to_string(case.daemon.config()).unwrap();
        let memory = "[[pool]]\nname = \"m\"\nkind = \"memory\"\nsize = \"64M\"\n";
        fs::write(case.daemon.config(), config.replace("[metrics]", &format!("{memory}[metrics]")))
            .unwrap();
    });
    let (_, error) = case.daemon.failure(&["pool", "open", "w"]);
    let advice = "remove it only while the files and disks of all pools are there";
    assert!(error.contains("served.json") && error.contains(advice), "{error}");
    assert!(!case.pool.exists());
}

#[test]
fn a_pool_made_at_run_time_does_not_accept_loss_for_another_pool() {
    let mut daemon = Daemon::start_with("256M", "accept_loss = true");
    let made = daemon.dir.join("made.pool");
    daemon.ok(&["pool", "create", "made", "--path", made.to_str().unwrap(), "--size", "64M"]);
    daemon.ok(&["add", "--nbd", "--pool", "made", "--size", "1M", "data"]);
    daemon.kill();
    for entry in fs::read_dir(daemon.ring_dir()).unwrap() {
        let path = entry.unwrap().path();
        if path.file_name().unwrap().to_str().unwrap().starts_with("ring-") {
            fs::remove_file(path).unwrap();
        }
    }
    daemon.start_not_ready();
    daemon.ok(&["list"]);
    let (_, error) = daemon.failure(&["list", "--pool", "made"]);
    assert!(error.contains("delta ring"), "{error}");
    daemon.kill();
    let path = made.to_str().unwrap();
    daemon.ok(&["journal", "replay", "--accept-loss", path]);
    daemon.start_again();
    daemon.ok(&["list", "--pool", "made"]);
}

#[test]
fn a_daemon_whose_only_pool_has_lost_its_ring_stays_up_and_opens_it_after_a_reload() {
    let mut daemon = Daemon::start_with("64M", "accept_loss = false");
    daemon.ok(&["add", "--nbd", "--size", "1M", "data"]);
    daemon.kill();
    for entry in fs::read_dir(daemon.ring_dir()).unwrap() {
        let path = entry.unwrap().path();
        if path.file_name().unwrap().to_str().unwrap().starts_with("ring-") {
            fs::remove_file(path).unwrap();
        }
    }
    daemon.start_not_ready();
    let health = daemon.run(&["--json", "health"]);
    let said = String::from_utf8(health.stdout).unwrap();
    assert!(said.contains("ring-lost"), "{said}");
    let config = fs::read_to_string(daemon.config()).unwrap();
    let lost = config.replace("accept_loss = false", "accept_loss = true");
    fs::write(daemon.config(), lost).unwrap();
    daemon.hang_up();
    wait_until("the pool is not opened", || daemon.json(&["version"])["daemon"]["ready"] == true);
    assert_eq!(daemon.json(&["show", "data"])["volume"]["attached"], true);
}
