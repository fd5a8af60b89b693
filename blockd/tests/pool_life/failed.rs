//! Pools that have failed are closed and opened without a restart of the daemon.

use std::time::Duration;

use blockd_media::clock::Clock;

use super::cli_support::{Daemon, LIMIT, connect, pattern};
use super::{BYTES, Case, Traffic, client};

/// Answered writes that were not flushed survive where no flush has failed.
#[test]
fn a_pool_that_another_program_overwrote_is_opened_again_with_every_answered_write() {
    use std::os::unix::fs::FileExt;
    let mut case = Case::with_data();
    let config = std::fs::read_to_string(case.daemon.config()).unwrap();
    assert!(case.daemon.terminate().success());
    std::fs::write(case.daemon.config(), config + "[health]\ninterval = \"1s\"\n").unwrap();
    case.daemon.start_again();
    let daemon = &case.daemon;
    let traffic = Traffic::start(daemon);
    let mut writer = client(daemon, "w", "data");
    writer.write(0, &pattern(BYTES, 5), false).unwrap();
    let media = std::fs::OpenOptions::new().read(true).write(true).open(&case.pool).unwrap();
    let mut front = vec![0; 8192];
    media.read_exact_at(&mut front, 0).unwrap();
    media.write_all_at(&vec![0xa5; 8192], 0).unwrap();
    let clock = Clock::start();
    while case.state() != "failed" {
        assert!(clock.elapsed() < LIMIT, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(100));
    }
    let (_, error) = daemon.failure(&["pool", "open", "w"]);
    assert!(error.contains("`blockd pool close --force w`"), "{error}");
    assert!(writer.read(0, &mut vec![0; 4096]).is_err(), "a failed pool reads");
    let error = case.refused(&["pool", "close", "w"]);
    assert!(error.contains("1 volume attached"), "{error}");
    let before = std::fs::read(&case.pool).unwrap();
    let closed = daemon.json(&["pool", "close", "--force", "w"]);
    assert_eq!((&closed["changed"], &closed["pool"]["state"]), (&true.into(), &"closed".into()));
    assert!(std::fs::read(&case.pool).unwrap() == before, "a close after a failure has written");
    media.write_all_at(&front, 0).unwrap();
    daemon.ok(&["pool", "open", "w"]);
    let mut bytes = vec![0; BYTES];
    client(daemon, "w", "data").read(0, &mut bytes).unwrap();
    assert!(bytes == pattern(BYTES, 5), "an answered write is lost");
    traffic.end();
    daemon.ok(&["pool", "close", "--force", "w"]);
    let checked = daemon.json(&["pool", "check", case.path()]);
    assert_eq!((&checked["clean"], &checked["damaged"]), (&true.into(), &false.into()));
}

/// Slots of workers take memory after the pool's own: a pool that is not served for want of it is
/// closed again, and opens once there is some.
#[test]
fn a_pool_without_memory_for_its_ring_opens_once_there_is_some() {
    assert!(nix::unistd::geteuid().is_root(), "not run: a mount needs root");
    let mut daemon = Daemon::start("64M");
    assert!(daemon.terminate().success());
    let folder = daemon.process.runtime().to_owned();
    let mount = |flags, size| {
        nix::mount::mount(Some("none"), &folder, Some("tmpfs"), flags, Some(size)).unwrap();
    };
    // For one pool with two workers, 1.5 MiB, and for another one's own slot of 512 KiB.
    mount(nix::mount::MsFlags::empty(), "size=2300K");
    daemon.start_again();
    daemon.ok(&["add", "--nbd", "--size", "8M", "data"]);
    let path = daemon.dir.join("second").to_str().unwrap().to_owned();
    let create = ["pool", "create", "second", "--path", &path, "--size", "64M"];
    for _ in 0..2 {
        let (code, error) = daemon.failure(&create);
        assert!(code == 6 && error.contains("delta ring"), "{code} {error}");
    }
    connect(&daemon, "data").write(0, &[7; 4096], true).unwrap();
    mount(nix::mount::MsFlags::MS_REMOUNT, "size=8M");
    daemon.ok(&create);
    daemon.ok(&["add", "--nbd", "--pool", "second", "--size", "8M", "other"]);
    client(&daemon, "second", "other").write(0, &[7; 4096], true).unwrap();
    assert!(daemon.terminate().success());
    nix::mount::umount2(&folder, nix::mount::MntFlags::MNT_DETACH).unwrap();
}
