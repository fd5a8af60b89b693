//! `blockd pool close`, and `blockd pool open` after it.

use serde_json::json;

use super::{BYTES, Case, Traffic, client, has_data};

#[test]
fn a_pool_is_closed_and_checked_and_opened_while_another_goes_on() {
    let case = Case::with_data();
    let daemon = &case.daemon;
    let traffic = Traffic::start(daemon);
    let error = case.refused(&["pool", "close", "w"]);
    assert!(error.contains("1 volume attached (data)") && error.contains("use force"), "{error}");
    assert_eq!(case.state(), "open");
    daemon.ok(&["detach", "--pool", "w", "data"]);
    assert_eq!(daemon.ok(&["pool", "close", "w"]), "w: closed\n");
    assert_eq!(daemon.ok(&["pool", "close", "w"]), "w: unchanged, it was closed already\n");
    assert_eq!(case.state(), "closed");
    traffic.goes_on();
    // Its log is empty, and tools that read and write can have it beside the daemon.
    let checked = daemon.json(&["pool", "check", case.path()]);
    assert_eq!((&checked["clean"], &checked["damaged"]), (&true.into(), &false.into()));
    let log = daemon.ok(&["journal", "dump", case.path()]);
    assert_eq!(log, "0 block(s), 0 change(s), 0 to be replayed\n");
    assert_eq!(daemon.json(&["journal", "replay", case.path()])["changed"], false);
    assert_eq!(daemon.json(&["pool", "repair", case.path()])["changed"], false);
    assert!(daemon.ok(&["pool", "dump", case.path()]).contains("data"));
    // Calls about its volumes say what helps.
    let (_, error) = daemon.failure(&["show", "--pool", "w", "data"]);
    assert!(error.contains("closed by `blockd pool close`"), "{error}");
    assert!(error.contains("`blockd pool open w`"), "{error}");
    assert!(daemon.ok(&["health", "--check"]).starts_with("healthy"));
    assert_eq!(daemon.ok(&["pool", "open", "w"]), "w: open\n");
    assert_eq!(daemon.json(&["pool", "open", "w"])["changed"], false);
    has_data(daemon, "w");
    traffic.end();
}

#[test]
fn a_forced_close_detaches_and_an_open_attaches_again() {
    let case = Case::with_data();
    let daemon = &case.daemon;
    let mut connected = client(daemon, "w", "data");
    connected.write(0, &vec![7; 4096], false).unwrap();
    let closed = daemon.json(&["pool", "close", "--force", "w"]);
    assert_eq!(closed["changed"], true);
    assert_eq!(closed["detached_volumes"], json!(["data"]));
    assert_eq!(closed["closed_connections"], 1);
    assert_eq!(closed["pool"]["state"], "closed");
    assert!(connected.read(0, &mut vec![0; 4096]).is_err(), "the connection lives");
    let again = daemon.json(&["pool", "close", "--force", "w"]);
    assert_eq!((&again["changed"], &again["detached_volumes"]), (&json!(false), &json!([])));
    daemon.ok(&["pool", "open", "w"]);
    let mut bytes = vec![0; BYTES];
    client(daemon, "w", "data").read(0, &mut bytes).unwrap();
    assert!(bytes[..4096] == vec![7; 4096], "an answered write is lost");
}

#[test]
fn a_closed_pool_stays_closed_until_it_is_opened() {
    let mut case = Case::with_data();
    case.daemon.ok(&["pool", "close", "--force", "w"]);
    case.daemon.kill();
    case.daemon.start_again();
    assert_eq!(case.state(), "closed");
    case.daemon.hang_up();
    assert!(case.daemon.terminate().success());
    case.daemon.start_again();
    assert_eq!(case.state(), "closed");
    assert_eq!(case.daemon.json(&["pool", "open", "w"])["changed"], true);
    has_data(&case.daemon, "w");
    assert!(case.daemon.terminate().success());
    case.daemon.start_again();
    assert_eq!(case.state(), "open");
    assert_eq!(case.daemon.json(&["show", "--pool", "w", "data"])["volume"]["attached"], true);
}

#[test]
fn the_only_pool_can_be_closed_and_the_daemon_stays_for_it() {
    let mut daemon = super::Daemon::start("64M");
    daemon.ok(&["pool", "close"]);
    assert!(daemon.terminate().success());
    daemon.start_again();
    let closed = daemon.json(&["pool", "close", "default"]);
    assert_eq!((&closed["changed"], &closed["pool"]["state"]), (&json!(false), &json!("closed")));
    daemon.ok(&["pool", "open"]);
    daemon.ok(&["add", "--nbd", "--size", "1M", "data"]);
}

#[test]
fn a_pool_in_memory_is_not_closed_and_an_unknown_one_is_not_found() {
    let case = Case::new();
    case.daemon.ok(&["pool", "create", "m", "--memory", "--size", "64M"]);
    let error = case.refused(&["pool", "close", "--force", "m"]);
    assert!(error.contains("in the daemon's memory"), "{error}");
    let (code, error) = case.daemon.failure(&["pool", "close", "none"]);
    assert!(code == 4 && error.contains("none"), "{error}");
}

#[test]
fn a_closed_pool_is_moved_to_another_path_by_a_reload() {
    let mut case = Case::new();
    let config = std::fs::read_to_string(case.daemon.config()).unwrap();
    let places = ["old.pool", "new.pool"].map(|name| case.daemon.dir.join(name));
    let table = |path: &std::path::Path| {
        format!("{config}[[pool]]\nname = \"c\"\npath = {path:?}\nsize = \"64M\"\n")
    };
    assert!(case.daemon.terminate().success());
    std::fs::write(case.daemon.config(), table(&places[0])).unwrap();
    case.daemon.start_again();
    case.daemon.ok(&["add", "--nbd", "--pool", "c", "--size", "8M", "data"]);
    case.daemon.ok(&["pool", "close", "--force", "c"]);
    std::fs::rename(&places[0], &places[1]).unwrap();
    let error = case.refused(&["pool", "open", "c"]);
    assert!(error.contains("is missing"), "{error}");
    std::fs::write(case.daemon.config(), table(&places[1])).unwrap();
    case.daemon.hang_up();
    let clock = blockd_media::clock::Clock::start();
    while !case.daemon.run(&["show", "--pool", "c", "data"]).status.success() {
        assert!(clock.elapsed() < super::LIMIT, "{}", case.daemon.log());
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    assert!(places.map(|path| path.exists()) == [false, true]);
}
