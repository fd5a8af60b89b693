//! Tools that work on a pool's file while no daemon has it.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use blockd_mapper::format::Place;
use blockd_mapper::format::superblock::Superblock;
use blockd_mapper::io::Page;
use blockd_nbd::client::Client;
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
fn the_last_checkpoint_of_a_pool_that_is_served_is_checked() {
    let (mut daemon, pool) = with_data();
    let path = pool.to_str().unwrap();
    assert!(daemon.terminate().success());
    daemon.start_again();
    // New writes go to the log and to places that the checkpoint has for free.
    daemon.ok(&["snapshot", "data=taken"]);
    std::fs::write(daemon.dir.join("image"), pattern(5 << 20, 6)).unwrap();
    daemon.ok(&["import", "image", "more"]);
    let text = daemon.ok(&["pool", "check", "--online", path]);
    assert!(text.contains("as of its last checkpoint (generation "), "{text}");
    assert!(text.ends_with("sound\n"), "{text}");
    let checked = daemon.json(&["pool", "check", "--online", path]);
    let values = ["online", "damaged", "volumes", "snapshots"].map(|key| checked[key].clone());
    assert_eq!(serde_json::json!(values), serde_json::json!([true, false, 1, 0]), "{checked}");
    assert!(checked["generation"].as_u64() > Some(1), "{checked}");
    // No process was killed: a damaged copy of the superblock is the disk's fault.
    let file = std::fs::File::options().write(true).open(&pool).unwrap();
    let copy = std::fs::read(&pool).unwrap()[4096..8192].to_vec();
    file.write_all_at(&[7; 64], 4096 + 700).unwrap();
    let output = daemon.run(&["--json", "pool", "check", "--online", path]);
    assert_eq!(output.status.code(), Some(10));
    let finding = &parsed(&output)["findings"][0];
    assert_eq!((&finding["severity"], &finding["kind"]), (&"damage".into(), &"superblock".into()));
    file.write_all_at(&copy, 4096).unwrap();
    // Where one of its pages rots, the daemon doesn't see it, and the check does.
    let bytes = std::fs::read(&pool).unwrap();
    let leaves = (0..bytes.len()).step_by(4096);
    for at in leaves.filter(|&at| bytes[at..].starts_with(b"BDpg\x01")) {
        file.write_all_at(&[7; 64], at as u64 + 100).unwrap();
    }
    let output = daemon.run(&["--json", "pool", "check", "--online", path]);
    assert_eq!(output.status.code(), Some(10));
    let checked = parsed(&output);
    let finding = &checked["findings"][0];
    assert_eq!((&finding["kind"], &finding["volume"]), (&"tree".into(), &"data".into()));
    daemon.kill();
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
    let nothing = daemon.ok(&["pool", "repair", path]);
    assert_eq!(nothing, "the pool is sound: there is nothing to repair\n");
    file.write_all_at(&[7; 64], 4096 + 100).unwrap();
    assert_eq!(daemon.json(&["pool", "repair", path])["changed"], true);
    assert!(daemon.ok(&["pool", "check", path]).ends_with("sound\n"));
}

#[test]
fn metadata_that_is_gone_comes_back_from_a_dump() {
    let (mut daemon, pool) = with_data();
    let path = pool.to_str().unwrap();
    assert!(daemon.terminate().success());
    let text = daemon.ok(&["pool", "dump", path]);
    assert!(text.starts_with("blockd dump 1\npool ") && text.contains(" name data\n"), "{text}");
    let dumped = daemon.json(&["pool", "dump", "--output", "dump", path]);
    assert_eq!((&dumped["volumes"], &dumped["lost"]), (&1.into(), &serde_json::json!([])));
    assert_eq!(std::fs::read_to_string(daemon.dir.join("dump")).unwrap(), text);

    let restore = ["pool", "restore", "--from", "dump", path];
    let (code, error) = daemon.failure(&restore);
    assert!(code == 7 && error.contains("is sound"), "{code} {error}");
    std::fs::write(daemon.dir.join("cut"), &text[..text.len() / 2]).unwrap();
    let (code, error) = daemon.failure(&["pool", "restore", "--from", "cut", path]);
    assert!(code == 10 && error.starts_with("cut: it was cut short"), "{code} {error}");

    let file = std::fs::File::options().read(true).write(true).open(&pool).unwrap();
    let bytes = std::fs::read(&pool).unwrap();
    let pages = (0..bytes.len()).step_by(4096).filter(|&at| bytes[at..].starts_with(b"BDpg"));
    for at in pages {
        file.write_all_at(&[0; 4096], at as u64).unwrap();
    }
    let output = daemon.run(&["--json", "pool", "check", path]);
    assert_eq!(parsed(&output)["findings"][0]["kind"], "catalogue");
    let would = daemon.json(&["pool", "repair", "--dry-run", path]);
    assert_eq!((&would["damaged"], &would["changed"]), (&true.into(), &false.into()));
    assert_eq!(would["lost"].as_array().unwrap().len(), 1, "{would}");
    assert!(daemon.ok(&restore).contains("1 volume(s)"));
    assert!(daemon.ok(&["pool", "check", path]).ends_with("sound\n"));
    daemon.start_again();
    daemon.ok(&["export", "data", "copy"]);
    let [image, copy] = ["image", "copy"].map(|name| std::fs::read(daemon.dir.join(name)).unwrap());
    assert!(image == copy, "every byte is back");
}

#[test]
fn the_owner_of_a_place_on_the_disk_is_reported() {
    let (mut daemon, pool) = with_data();
    assert!(daemon.terminate().success());
    let path = pool.to_str().unwrap();
    let rmap = |offset: &str, length: &str| {
        let claims = daemon.json(&["pool", "rmap", "--offset", offset, "--length", length, path]);
        claims["claims"].as_array().unwrap().clone()
    };
    assert_eq!(rmap("0", "1")[0]["kind"], "superblock");
    // A piece of the image is looked for on the disk; the tool has to know where it belongs.
    let image = std::fs::read(daemon.dir.join("image")).unwrap();
    let bytes = std::fs::read(&pool).unwrap();
    let piece = 300 << 12;
    let at =
        (0..bytes.len()).step_by(4096).find(|&at| bytes[at..].starts_with(&image[piece..][..64]));
    let at = at.unwrap() as u64;
    let found = rmap(&at.to_string(), "4K");
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((&found[0]["kind"], &found[0]["volume"]), (&"data".into(), &"data".into()));
    let [first, start] = ["first_byte", "volume_byte"].map(|key| found[0][key].as_u64().unwrap());
    assert_eq!(start + (at - first), piece as u64);
    assert!(rmap("200M", "1M").is_empty());
    let (code, error) = daemon.failure(&["pool", "rmap", "--offset", "256M", path]);
    assert!(code == 3 && error.starts_with("range is "), "{code} {error}");
}

#[test]
fn the_delta_ring_of_a_killed_daemon_is_dropped_by_a_repair_only_where_that_is_accepted() {
    let (mut daemon, pool) = with_data();
    let path = pool.to_str().unwrap();
    assert!(daemon.terminate().success());
    daemon.start_again();
    daemon.kill();
    let file = std::fs::File::options().write(true).open(&pool).unwrap();
    let bytes = std::fs::read(&pool).unwrap();
    let pages = (0..bytes.len()).step_by(4096).filter(|&at| bytes[at..].starts_with(b"BDpg\x01"));
    for at in pages {
        file.write_all_at(&[0; 4096], at as u64).unwrap();
    }
    let would = daemon.json(&["pool", "repair", "--dry-run", path]);
    assert_eq!((&would["damaged"], &would["drops_ring"]), (&true.into(), &true.into()));
    let (code, error) = daemon.failure(&["pool", "repair", path]);
    assert!(code == 7 && error.contains("else pass --accept-loss"), "{code} {error}");
    let text = daemon.ok(&["pool", "repair", "--accept-loss", path]);
    assert!(text.starts_with("lost: answered writes in the delta ring"), "{text}");
    assert!(daemon.ok(&["pool", "check", path]).ends_with("sound\n"));
}

#[test]
fn a_place_without_a_known_owner_is_called_free_only_where_all_changes_were_read() {
    let (mut daemon, pool) = with_data();
    let path = pool.to_str().unwrap();
    let rmap = ["pool", "rmap", "--offset", "200M", path];
    assert!(daemon.terminate().success());
    assert_eq!(daemon.ok(&rmap), "free\n");
    daemon.start_again();
    daemon.kill();
    let text = daemon.ok(&rmap);
    assert!(text.starts_with("no known owner: the pool was not closed in order"), "{text}");
    daemon.start_again();
    assert!(daemon.terminate().success());
    let file = std::fs::File::options().write(true).open(&pool).unwrap();
    let bytes = std::fs::read(&pool).unwrap();
    let pages = (0..bytes.len()).step_by(4096).filter(|&at| bytes[at..].starts_with(b"BDpg\x01"));
    for at in pages {
        file.write_all_at(&[0; 4096], at as u64).unwrap();
    }
    let output = daemon.run(&rmap);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("no known owner: a part of the metadata"), "{text}");
    assert_eq!(output.status.code(), Some(10));
}

#[test]
fn the_log_is_shown_and_emptied() {
    let (mut daemon, pool) = with_data();
    let path = pool.to_str().unwrap();
    // A pool in use is its daemon's.
    let (code, error) = daemon.failure(&["journal", "replay", path]);
    assert!(code == 7 && error.contains("in use by a daemon"), "{code} {error}");
    daemon.kill();
    let ring = daemon.ring_dir();
    let ring = ring.to_str().unwrap();
    let shown = daemon.ok(&["journal", "dump", path]);
    assert!(shown.contains(" create volume 1 size 3145728 ") && shown.contains(" map volume 1 "));
    let would = daemon.json(&["journal", "replay", "--dry-run", "--ring-dir", ring, path]);
    assert_eq!(would["changed"], false);
    let other = daemon.ring_dir().join("other");
    std::fs::create_dir(&other).unwrap();
    let other = other.to_str().unwrap();
    let (code, error) = daemon.failure(&["journal", "replay", "--ring-dir", other, path]);
    assert!(code == 7 && error.contains("loses answered writes"), "{code} {error}");
    let done = daemon.json(&["journal", "replay", "--ring-dir", ring, path]);
    assert_eq!((&done["changed"], &done["log_changes"]), (&true.into(), &would["log_changes"]));
    assert_eq!(daemon.json(&["journal", "replay", path])["changed"], false);
    let shown = daemon.ok(&["journal", "dump", path]);
    assert_eq!(shown, "0 block(s), 0 change(s), 0 to be replayed\n");
    assert_eq!(daemon.json(&["pool", "check", path])["clean"], true);
}

/// The files of a pool that a replay may change: its own, and its delta ring's.
fn pool_and_ring(daemon: &Daemon, pool: &Path) -> (Vec<u8>, Vec<u8>) {
    let entries = std::fs::read_dir(daemon.ring_dir()).unwrap().map(|entry| entry.unwrap().path());
    let is_ring = |path: &PathBuf| path.file_name().unwrap().as_bytes().starts_with(b"ring-");
    let rings: Vec<_> = entries.filter(is_ring).collect();
    assert_eq!(rings.len(), 1, "{rings:?}");
    (std::fs::read(pool).unwrap(), std::fs::read(&rings[0]).unwrap())
}

#[test]
fn a_dry_run_of_journal_replay_prints_the_counts_of_the_real_run_and_writes_nothing() {
    // No commit comes by itself while the test runs.
    let mut daemon = Daemon::start_with("1G", "commit_interval = \"60s\"");
    let uri = daemon.ok(&["add", "--size", "1G", "data"]);
    let mut client = Client::connect(&uri.trim_end().parse().unwrap(), &Default::default());
    let client = client.as_mut().unwrap();
    client.write(0, &pattern(1 << 20, 1), false).unwrap();
    client.flush().unwrap();
    let unflushed = pattern(5 << 20, 2);
    for (piece, offset) in unflushed.chunks(1 << 18).zip((8 << 20..).step_by(1 << 18)) {
        client.write(offset, piece, false).unwrap();
    }
    daemon.kill();
    let pool = daemon.dir.join("default.pool");
    let (path, ring) = (pool.to_str().unwrap(), daemon.ring_dir());
    let replay = ["journal", "replay", "--ring-dir", ring.to_str().unwrap(), path];
    let dry = [&replay[..], &["--dry-run"]].concat();
    let before = pool_and_ring(&daemon, &pool);
    let would = daemon.json(&dry);
    let said = daemon.ok(&dry);
    // Not assert_eq: a failure would print the pool.
    assert!(pool_and_ring(&daemon, &pool) == before, "a dry run has written");
    let counts = |run: &Value| {
        let each = ["log_blocks", "log_changes", "ring_changes"];
        each.map(|key| run[key].as_u64().unwrap())
    };
    let [blocks, changes, from_ring] = counts(&would);
    assert!(would["changed"] == false && blocks > 0 && from_ring >= 20, "{would}");
    assert_eq!(
        said,
        format!(
            "{changes} change(s) would be replayed from {blocks} block(s) of the log, {from_ring} \
             from the delta ring\n"
        )
    );
    // Where the ring is missing, both refuse in the same words.
    let other = ring.join("other");
    std::fs::create_dir(&other).unwrap();
    let elsewhere = ["journal", "replay", "--ring-dir", other.to_str().unwrap(), path];
    let refused = daemon.failure(&[&elsewhere[..], &["--dry-run"]].concat());
    assert!(std::fs::read_dir(&other).unwrap().next().is_none(), "a dry run made a ring");
    assert!(refused.0 == 7 && refused.1.contains("loses answered writes"), "{refused:?}");
    assert_eq!(daemon.failure(&elsewhere), refused);
    let done = daemon.json(&replay);
    assert_eq!((counts(&done), &done["changed"]), (counts(&would), &true.into()));
    assert_eq!(counts(&daemon.json(&dry)), [0; 3], "a clean pool has nothing to replay");
    daemon.start_again();
    daemon.ok(&["export", "data", "copy"]);
    let copy = std::fs::read(daemon.dir.join("copy")).unwrap();
    assert!(copy[8 << 20..][..unflushed.len()] == unflushed, "an answered write is gone");
}

#[test]
fn a_detached_volume_leaves_nothing_in_the_log() {
    let (mut daemon, pool) = with_data();
    let path = pool.to_str().unwrap();
    assert_eq!(daemon.json(&["detach", "data"])["changed"], true);
    daemon.kill();
    let shown = daemon.ok(&["journal", "dump", path]);
    assert_eq!(shown, "0 block(s), 0 change(s), 0 to be replayed\n");
    // The pool was not closed: it is the log that is empty, and the trees have it all.
    let checked = daemon.json(&["pool", "check", path]);
    assert_eq!((&checked["clean"], &checked["damaged"]), (&false.into(), &false.into()));
    daemon.start_again();
    daemon.ok(&["export", "data", "copy"]);
    let [image, copy] = ["image", "copy"].map(|name| std::fs::read(daemon.dir.join(name)).unwrap());
    assert!(image == copy);
}

/// Needs `thin_restore` and `thin_check`, which `cargo ci setup` installs.
#[test]
fn dm_thins_own_tools_take_the_xml() {
    let (mut daemon, pool) = with_data();
    daemon.kill();
    let path = pool.to_str().unwrap();
    // Answered writes may be in the delta ring, and look like never written.
    let (code, error) =
        daemon.failure(&["pool", "dump", "--thin-xml", "--fill", "--output", "early.xml", path]);
    assert!(code == 7 && error.contains("was not closed in order"), "{code} {error}");
    daemon.start_again();
    assert!(daemon.terminate().success());
    let dump = ["pool", "dump", "--thin-xml", "--fill", "--output", "pool.xml", path];
    let dumped = daemon.json(&dump);
    assert_eq!((&dumped["output"], &dumped["filled"]), (&"pool.xml".into(), &true.into()));
    let run = |program: &str, arguments: &[&str]| {
        let mut command = std::process::Command::new(program);
        let output = command.args(arguments).current_dir(&daemon.dir).output();
        let output =
            output.unwrap_or_else(|error| panic!("{program}: {error}; see cargo ci setup"));
        let printed = [output.stdout, output.stderr].concat();
        assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&printed));
        String::from_utf8_lossy(&printed).into_owned()
    };
    let file = std::fs::File::create(daemon.dir.join("thin.metadata")).unwrap();
    file.set_len(8 << 20).unwrap();
    run("thin_restore", &["-i", "pool.xml", "-o", "thin.metadata"]);
    run("thin_check", &["thin.metadata"]);
    // dm-thin finds the imported 12 extents of 256 KiB.
    let dumped = run("thin_dump", &["thin.metadata"]);
    assert!(dumped.contains("mapped_blocks=\"12\""), "{dumped}");
    let image = std::fs::read(daemon.dir.join("image")).unwrap();
    let data = std::fs::read(&pool).unwrap();
    let mut bytes = vec![0; image.len()];
    for line in dumped.lines().filter(|line| line.contains("_mapping ")) {
        let number = |name: &str| -> Option<usize> {
            let from = line.find(&format!("{name}=\""))? + name.len() + 2;
            line[from..].split('"').next()?.parse().ok()
        };
        let origin = number("origin_begin").or_else(|| number("origin_block")).unwrap();
        let block = number("data_begin").or_else(|| number("data_block")).unwrap();
        let len = number("length").unwrap_or(1) << 18;
        bytes[origin << 18..][..len].copy_from_slice(&data[block << 18..][..len]);
    }
    assert!(bytes == image, "by the map that dm-thin has");
}

#[test]
fn a_pool_with_composite_entries_is_no_pool_of_dm_thin_and_leaves_no_xml() {
    let mut daemon = Daemon::start("256M");
    let uri = daemon.ok(&["add", "--nbd", "--size", "8M", "data"]);
    let mut client = Client::connect(&uri.trim_end().parse().unwrap(), &Default::default());
    let client = client.as_mut().unwrap();
    client.write(0, &pattern(1 << 20, 1), true).unwrap();
    daemon.ok(&["snapshot", "data=then"]);
    client.write(4096, &pattern(4096, 2), true).unwrap();
    assert!(daemon.terminate().success());
    let pool = daemon.dir.join("default.pool");
    let dump = ["pool", "dump", "--thin-xml", "--output", "pool.xml", pool.to_str().unwrap()];
    // Twice, as after an attempt to correct the cause.
    for _ in 0..2 {
        let (_, error) = daemon.failure(&dump);
        assert!(error.contains("composite entries is 1: must be 0 for dm-thin"), "{error}");
        assert!(error.contains("`blockd pool feature disable composite`"), "{error}");
        assert!(!daemon.dir.join("pool.xml").exists(), "a dump that was refused is left");
    }
    daemon.start_again();
    daemon.ok(&["pool", "feature", "disable", "composite", "default", "--wait", "1m"]);
    assert!(daemon.terminate().success());
    daemon.ok(&dump);
    // A file that was there before is not ours.
    let (_, error) = daemon.failure(&dump);
    assert!(error.contains("exists") && daemon.dir.join("pool.xml").exists(), "{error}");
}

#[test]
fn a_pool_is_made_older_only_where_that_loses_nothing() {
    let (mut daemon, pool) = with_data();
    daemon.kill();
    let path = pool.to_str().unwrap();
    let to = |version: &str| daemon.failure(&["pool", "downgrade", "--to", version, path]);
    let (major, minor) = (blockd_mapper::format::FORMAT_MAJOR, blockd_mapper::format::FORMAT_MINOR);
    let own = format!("{major}.{minor}");
    let (code, error) = to(&own);
    assert!(code == 7 && error.contains("was not closed in order"), "{code} {error}");
    let (code, error) = to("77.0");
    assert!(code == 3 && error.contains("no more than"), "{code} {error}");
    assert_eq!(to("old").0, 3);
    daemon.start_again();
    assert!(daemon.terminate().success());
    let (code, error) = daemon.failure(&["pool", "downgrade", "--to", &own, path]);
    let hint =
        "uses features 0x1, which 1.0 doesn't know: run `blockd pool feature disable composite`";
    assert!(code != 0 && error.contains(hint), "{error}");
    let mut plain = Daemon::start_with("64M", "composite = false");
    assert!(plain.terminate().success());
    let of_plain = plain.dir.join("default.pool").display().to_string();
    let printed = daemon.ok(&["pool", "downgrade", "--to", &own, &of_plain]);
    assert_eq!(printed, format!("the pool is of version {own} already\n"));
    let (code, error) = daemon.failure(&["pool", "downgrade", "--to", "0.0", &of_plain]);
    assert!(code == 3 && error.contains("this build writes"), "{code} {error}");
}

/// Sets feature words of every copy of the superblock, as a later release would.
fn set_features(pool: &std::path::Path, ro_compat: u64, incompat: u64) {
    let file = std::fs::File::options().read(true).write(true).open(pool).unwrap();
    let bytes = std::fs::read(pool).unwrap();
    for at in (0..bytes.len()).step_by(4096).filter(|&at| bytes[at..].starts_with(b"BLOCKDsb")) {
        let superblock = Superblock::decode(&bytes[at..at + 4096], Place::Memory).unwrap();
        let mut page = Page::zeroed();
        Superblock { ro_compat, incompat, ..superblock }.encode(&mut page);
        file.write_all_at(&page.0, at as u64).unwrap();
    }
}

#[test]
fn a_dump_is_not_restored_over_what_a_later_release_has_written() {
    let (mut daemon, pool) = with_data();
    assert!(daemon.terminate().success());
    let path = pool.to_str().unwrap();
    daemon.json(&["pool", "dump", "--output", "dump", path]);
    let whole = std::fs::read(&pool).unwrap();
    let file = std::fs::File::options().write(true).open(&pool).unwrap();
    let pages = (0..whole.len()).step_by(4096).filter(|&at| whole[at..].starts_with(b"BDpg"));
    for at in pages {
        file.write_all_at(&[0; 4096], at as u64).unwrap();
    }
    let damaged = std::fs::read(&pool).unwrap();
    let restore = ["pool", "restore", "--from", "dump", path];
    let cases = [
        (1 << 41, 0, "features 0x20000000000 are unknown"),
        (0, 1 << 42, "incompatible features 0x40000000000"),
    ];
    for (ro_compat, incompat, named) in cases {
        std::fs::write(&pool, &damaged).unwrap();
        set_features(&pool, ro_compat, incompat);
        let before = std::fs::read(&pool).unwrap();
        let (code, error) = daemon.failure(&restore);
        assert!(code == 7 && error.contains("a later release"), "{code} {error}");
        assert!(error.contains(named) && error.contains("--force"), "{error}");
        assert!(std::fs::read(&pool).unwrap() == before, "not a byte is written");
        daemon.ok(&[&restore[..], &["--force"]].concat());
        assert!(daemon.ok(&["pool", "check", path]).ends_with("sound\n"));
    }
}

#[test]
fn a_dump_is_restored_from_a_file_alone() {
    let (mut daemon, pool) = with_data();
    assert!(daemon.terminate().success());
    let path = pool.to_str().unwrap();
    daemon.json(&["pool", "dump", "--output", "dump", path]);
    let before = std::fs::read(&pool).unwrap();
    // It is read twice, and a pipe has nothing the second time.
    let piped = daemon
        .command(&["pool", "restore", "--force", "--from", "/dev/stdin", path])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let dump = std::fs::read(daemon.dir.join("dump")).unwrap();
    // It may have ended before it reads all of that.
    let _ = std::io::Write::write_all(&mut piped.stdin.as_ref().unwrap(), &dump);
    let output = piped.wait_with_output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(3) && error.contains("a pipe"), "{output:?}");
    assert!(std::fs::read(&pool).unwrap() == before, "not a byte is written");
    daemon.ok(&["pool", "restore", "--force", "--from", "dump", path]);
}

#[test]
fn a_pool_from_before_the_frozen_format_is_refused_by_its_version_and_left_alone() {
    let (mut daemon, pool) = with_data();
    assert!(daemon.terminate().success());
    let path = pool.to_str().unwrap();
    let file = std::fs::File::options().write(true).open(&pool).unwrap();
    let bytes = std::fs::read(&pool).unwrap();
    for at in (0..bytes.len()).step_by(4096).filter(|&at| bytes[at..].starts_with(b"BLOCKDsb")) {
        let superblock = Superblock::decode(&bytes[at..at + 4096], Place::Memory).unwrap();
        let mut page = Page::zeroed();
        Superblock { major: 0, minor: 1, ..superblock }.encode(&mut page);
        file.write_all_at(&page.0, at as u64).unwrap();
    }
    let before = std::fs::read(&pool).unwrap();
    for tool in [&["pool", "check", path][..], &["pool", "repair", path], &["pool", "dump", path]] {
        let (_, error) = daemon.failure(tool);
        assert!(error.contains("format 0.1"), "{tool:?}: {error}");
    }
    let config = daemon.config();
    let output = daemon.run(&["serve", "--config", config.to_str().unwrap()]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && errors.contains("format 0.1"), "{errors}");
    assert!(std::fs::read(&pool).unwrap() == before, "not a byte is written");
}

#[test]
fn a_pool_with_features_of_a_later_release_is_only_read_or_refused_by_name() {
    let (mut daemon, pool) = with_data();
    assert!(daemon.terminate().success());
    let path = pool.to_str().unwrap();
    set_features(&pool, 1 << 41, 0);
    let before = std::fs::read(&pool).unwrap();
    daemon.start_again();
    assert!(daemon.log().contains("features 0x20000000000 are not known here: only read from"));
    let (code, error) = daemon.failure(&["add", "--size", "1M", "more"]);
    assert!(code == 7 && error.contains("is read-only"), "{code} {error}");
    assert_eq!(daemon.json(&["show", "data"])["volume"]["read_only"], true);
    daemon.ok(&["export", "data", "copy"]);
    let [image, copy] = ["image", "copy"].map(|name| std::fs::read(daemon.dir.join(name)).unwrap());
    assert!(image == copy);
    assert!(daemon.terminate().success());
    assert!(std::fs::read(&pool).unwrap() == before, "not a byte is written");
    assert!(daemon.ok(&["pool", "check", path]).contains("features 0x20000000000 are unknown"));
    let (code, error) = daemon.failure(&["pool", "downgrade", "--to", "1.0", path]);
    assert!(code == 7 && error.contains("uses features 0x20000000000"), "{code} {error}");
    for writes in [&["pool", "repair", path][..], &["journal", "replay", path]] {
        daemon.run(writes);
        assert!(std::fs::read(&pool).unwrap() == before, "{writes:?} writes to it");
    }

    set_features(&pool, 0, 1 << 42);
    let before = std::fs::read(&pool).unwrap();
    for tool in [&["pool", "check", path][..], &["pool", "dump", path], &["pool", "repair", path]] {
        let (_, error) = daemon.failure(tool);
        assert!(error.contains("incompatible features 0x40000000000"), "{tool:?}: {error}");
    }
    let config = daemon.config();
    let output = daemon.run(&["serve", "--config", config.to_str().unwrap()]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{errors}");
    assert!(errors.contains("incompatible features 0x40000000000"), "{errors}");
    assert!(std::fs::read(&pool).unwrap() == before, "not a byte is written");
}

/// A killed daemon's answered writes are in memory only. One that may not write shows them, and
/// leaves them to the next that may.
#[test]
fn a_pool_that_may_only_be_read_shows_what_was_answered_and_keeps_it() {
    let mut daemon = Daemon::start("1G");
    let uri = daemon.ok(&["add", "--size", "1G", "data"]);
    let data = pattern(1 << 20, 9);
    let mut client = Client::connect(&uri.trim_end().parse().unwrap(), &Default::default());
    client.as_mut().unwrap().write(0, &data, false).unwrap();
    daemon.kill();
    let pool = daemon.dir.join("default.pool");
    set_features(&pool, 1 << 40, 0);
    let before = std::fs::read(&pool).unwrap();
    daemon.start_again();
    assert!(daemon.log().contains("only read from"), "{}", daemon.log());
    let mut client = Client::connect(&uri.trim_end().parse().unwrap(), &Default::default());
    let client = client.as_mut().unwrap();
    let mut read = vec![0; data.len()];
    client.read(0, &mut read).unwrap();
    assert!(read == data, "an answered write is not shown");
    assert!(client.write(0, &data, false).unwrap_err().to_string().contains("read-only"));
    assert!(daemon.terminate().success());
    assert!(std::fs::read(&pool).unwrap() == before, "the pool was written");
    set_features(&pool, 0, 0);
    daemon.start_again();
    daemon.ok(&["export", "data", "copy"]);
    let copy = std::fs::read(daemon.dir.join("copy")).unwrap();
    assert!(copy[..data.len()] == data, "an answered write is gone");
}
