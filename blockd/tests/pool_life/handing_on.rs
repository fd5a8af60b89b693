//! `blockd pool export`, `blockd pool import` and `blockd pool scan`.

use std::fs;

use blockd_testkit::other_host::OtherHost;
use serde_json::json;

use super::{Case, Daemon, Loop, Traffic, has_data};

#[test]
fn a_pool_goes_from_one_daemon_to_another_and_back_while_others_go_on() {
    let case = Case::with_data();
    let (here, there) = (&case.daemon, Daemon::start("128M"));
    let traffic = [Traffic::start(here), Traffic::start(&there)];
    let error = case.refused(&["pool", "export", "w"]);
    assert!(error.contains("1 volume attached (data)"), "{error}");
    let (code, error) = there.failure(&["pool", "import", "v", case.path()]);
    assert!(code == 7 && error.contains("is in use by process"), "{error}");
    let exported = here.json(&["pool", "export", "--force", "w"]);
    assert_eq!(exported["detached_volumes"], json!(["data"]));
    assert_eq!(exported["paths"], json!([case.path()]));
    assert_eq!(here.ok(&["pool", "export", "w"]), "w: there was no such pool\n");
    let (code, _) = here.failure(&["pool", "show", "w"]);
    assert_eq!(code, 4);
    // By another name: names are not on the media.
    let imported = there.json(&["pool", "import", "v", case.path()]);
    assert_eq!(imported["changed"], true);
    assert_eq!(imported["pool"]["id"], exported["pool_id"]);
    let again = there.json(&["pool", "import", "v", case.path()]);
    assert_eq!(again["changed"], false);
    has_data(&there, "v");
    let (code, error) = there.failure(&["pool", "import", "u", case.path()]);
    assert!(code == 7 && error.contains("belongs to pool v"), "{error}");
    there.ok(&["del", "--pool", "v", "data"]);
    there.ok(&["import", "--pool", "v", here.dir.join("image").to_str().unwrap(), "data"]);
    there.ok(&["pool", "export", "--force", "v"]);
    here.ok(&["pool", "import", "w", case.path()]);
    has_data(here, "w");
    traffic.into_iter().for_each(Traffic::end);
}

#[test]
fn an_imported_pool_is_opened_at_the_next_start_and_an_exported_one_is_not() {
    let mut case = Case::with_data();
    case.daemon.ok(&["pool", "export", "--force", "w"]);
    assert!(case.daemon.terminate().success());
    case.daemon.start_again();
    assert!(!case.daemon.run(&["pool", "show", "w"]).status.success());
    let path = case.path().to_owned();
    case.daemon.ok(&["pool", "import", "w", &path]);
    case.daemon.kill();
    case.daemon.start_again();
    has_data(&case.daemon, "w");
    // The file was there before: a deletion leaves it.
    case.daemon.ok(&["pool", "delete", "--force", "--yes", "w"]);
    assert!(case.pool.exists());
}

/// The list of pools can be read, and not replaced.
#[test]
fn a_pool_that_was_not_remembered_is_by_the_next_call() {
    let mut case = Case::with_data();
    let blocked = case.daemon.dir.join("pools.json.next");
    let created = case.daemon.dir.join("c.pool");
    let path = case.path().to_owned();
    let create = ["pool", "create", "c", "--path", created.to_str().unwrap(), "--size", "64M"];
    case.daemon.ok(&["pool", "export", "--force", "w"]);
    fs::create_dir(&blocked).unwrap();
    let import = ["pool", "import", "w", &path];
    for words in [&import[..], &create] {
        for _ in 0..2 {
            let (_, error) = case.daemon.failure(words);
            assert!(error.ends_with("repeat the call"), "{error}");
        }
    }
    fs::remove_dir(&blocked).unwrap();
    assert_eq!(case.daemon.json(&import)["changed"], false);
    case.daemon.ok(&create);
    case.daemon.kill();
    case.daemon.start_again();
    has_data(&case.daemon, "w");
    case.daemon.ok(&["pool", "show", "c"]);
}

#[test]
fn another_pool_in_the_place_of_a_closed_one_is_not_exported_for_it() {
    let case = Case::with_data();
    case.daemon.ok(&["pool", "close", "--force", "w"]);
    let mut other = Daemon::start("64M");
    assert!(other.terminate().success());
    let moved = case.pool.with_extension("elsewhere");
    fs::rename(&case.pool, &moved).unwrap();
    fs::copy(other.dir.join("default.pool"), &case.pool).unwrap();
    let error = case.refused(&["pool", "export", "w"]);
    assert!(error.contains("holds another pool"), "{error}");
    fs::rename(&moved, &case.pool).unwrap();
    assert_eq!(case.daemon.json(&["pool", "export", "w"])["paths"], json!([case.path()]));
}

#[test]
fn a_closed_pool_keeps_its_device_under_every_path() {
    let case = Case::with_data();
    case.daemon.ok(&["pool", "close", "--force", "w"]);
    let link = case.daemon.dir.join("link");
    std::os::unix::fs::symlink(&case.pool, &link).unwrap();
    let path = link.to_str().unwrap();
    for words in [&["pool", "import", "v", path][..], &["pool", "create", "v", "--path", path]] {
        let error = case.refused(words);
        assert!(error.contains("belongs to pool w"), "{error}");
    }
    case.daemon.ok(&["pool", "open", "w"]);
    assert_eq!(case.daemon.json(&["pool", "import", "w", path])["changed"], false);
}

#[test]
fn a_closed_pool_with_an_unused_spare_is_exported() {
    let mut case = Case::new();
    let config = fs::read_to_string(case.daemon.config()).unwrap();
    let [pool, spare] = ["c.pool", "c.spare"].map(|name| case.daemon.dir.join(name));
    fs::File::create(&spare).unwrap().set_len(64 << 20).unwrap();
    let table = format!(
        "[[pool]]\nname = \"c\"\npath = {pool:?}\nsize = \"64M\"\n\
         spare_devices = [{spare:?}]\n"
    );
    assert!(case.daemon.terminate().success());
    fs::write(case.daemon.config(), format!("{config}{table}")).unwrap();
    case.daemon.start_again();
    case.daemon.ok(&["pool", "close", "c"]);
    fs::write(case.daemon.config(), config).unwrap();
    case.daemon.hang_up();
    let clock = blockd_media::clock::Clock::start();
    let exported = loop {
        let output = case.daemon.run(&["--json", "pool", "export", "c"]);
        if output.status.success() {
            break serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap();
        }
        let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(clock.elapsed() < super::LIMIT, "{complaint}");
        std::thread::sleep(std::time::Duration::from_millis(50));
    };
    assert_eq!(exported["paths"], json!([pool]));
}

#[test]
fn what_is_no_pool_is_not_imported_and_nothing_is_made() {
    let case = Case::new();
    let (empty, absent) = (case.daemon.dir.join("empty"), case.daemon.dir.join("absent"));
    fs::File::create(&empty).unwrap().set_len(64 << 20).unwrap();
    let error = case.refused(&["pool", "import", "e", empty.to_str().unwrap()]);
    assert!(error.contains("holds no pool"), "{error}");
    let (code, _) = case.daemon.failure(&["pool", "import", "e", absent.to_str().unwrap()]);
    assert_eq!(code, 4);
    assert!(!absent.exists() && fs::read(&empty).unwrap().iter().all(|byte| *byte == 0));
    let (code, error) = case.daemon.failure(&["pool", "import", "w", empty.to_str().unwrap()]);
    assert!(code == 5 && error.contains("path"), "{error}");
    // A closed pool is exported too; a failed one has to be opened first.
    case.daemon.ok(&["pool", "close", "w"]);
    let error = case.refused(&["pool", "import", "w", case.path()]);
    assert!(error.contains("blockd pool open"), "{error}");
    case.daemon.ok(&["pool", "export", "w"]);
    case.daemon.ok(&["pool", "import", "w", case.path()]);
}

#[test]
fn a_scan_finds_pools_with_and_without_a_daemon() {
    let mut case = Case::with_data();
    let dir = case.daemon.dir.to_str().unwrap().to_owned();
    let scan = |case: &Case, path: &str| case.daemon.json(&["pool", "scan", path]);
    let id = case.daemon.json(&["pool", "show", "w"])["pool"]["id"].clone();
    let pid = case.daemon.json(&["version"])["daemon"]["pid"].clone();
    let found = scan(&case, &format!("{dir}/w*"));
    let pool = &found["pools"][0];
    assert_eq!((&pool["pool_id"], &pool["process"]), (&id, &pid), "{found}");
    assert_eq!((&pool["complete"], &pool["clean"]), (&json!(true), &json!(false)));
    assert_eq!(pool["devices"][0]["paths"], json!([case.path()]));
    assert_eq!(pool["size_bytes"], 64 << 20);
    assert!(case.daemon.terminate().success());
    // All that is in a directory: two pools, and files that are none.
    let found = scan(&case, &dir);
    let pools = found["pools"].as_array().unwrap();
    assert_eq!(pools.len(), 2, "{found}");
    assert!(pools.iter().all(|pool| pool["clean"] == true && pool["process"].is_null()));
    assert!(
        found["without_pool"]
            .as_array()
            .unwrap()
            .iter()
            .any(|path| { path.as_str().unwrap().ends_with("image") })
    );
    let text = case.daemon.ok(&["pool", "scan", case.path()]);
    assert!(text.contains("closed in order") && text.contains("composite"), "{text}");
    assert!(text.ends_with("1 pool(s) found; 0 path(s) hold none\n"), "{text}");
    let (code, _) = case.daemon.failure(&["pool", "scan", "/nowhere/at/all"]);
    assert_eq!(code, 4);
    // Of a pool whose superblocks are damaged, that is said.
    let media = fs::OpenOptions::new().write(true).open(&case.pool).unwrap();
    use std::os::unix::fs::FileExt;
    for at in [0, 4096, (64 << 20) - (256 << 10), (64 << 20) - (256 << 10) + 4096] {
        media.write_all_at(&[0xff; 64], at + 512).unwrap();
    }
    let found = scan(&case, case.path());
    assert_eq!(found["pools"], json!([]));
    assert!(found["problems"][0]["text"].as_str().unwrap().contains("damaged"), "{found}");
}

#[test]
fn a_pool_that_another_host_has_open_is_not_imported() {
    if !nix::unistd::geteuid().is_root() {
        println!("not run: loop devices need root");
        return;
    }
    let case = Case::new();
    let here = &case.daemon;
    let file = here.dir.join("disk");
    fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
    let disks = [Loop::attach(&file), Loop::attach(&file)];
    let paths = disks.each_ref().map(|disk| disk.0.to_str().unwrap());
    here.ok(&["pool", "create", "d", "--path", paths[0]]);
    here.ok(&["add", "--nbd", "--pool", "d", "--size", "8M", "data"]);
    let mut there = Daemon::start("64M");
    assert!(there.terminate().success());
    there.process.move_to(OtherHost::new().unwrap());
    there.start_again();
    let (code, error) = there.failure(&["--timeout", "2m", "pool", "import", "d", paths[1]]);
    assert!(code == 7 && error.contains("on another host"), "{error}");
    assert_eq!(there.json(&["pool", "list"])["pools"].as_array().unwrap().len(), 1);
    here.ok(&["pool", "export", "--force", "d"]);
    there.ok(&["--timeout", "2m", "pool", "import", "d", paths[1]]);
    there.ok(&["show", "--pool", "d", "data"]);
    there.ok(&["pool", "export", "d"]);
}
