//! Hosts as members of pools: this node's part of them, and the takeover from a node that is gone.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use blockd_media::clock::Clock;
use blockd_nbd::client::Client;
use cli_support::{Daemon, LIMIT, pattern};
use serde_json::{Value, json};

const FIRST: &str = "3f2b8c1d-0e4a-4d5b-9c6f-7a8b9c0d1e2f";
const SECOND: &str = "a0000001-0e4a-4d5b-9c6f-7a8b9c0d1e2f";

fn node(id: &str) -> String {
    format!("[node]\nid = \"{id}\"\nhook_timeout = \"1s\"")
}

#[test]
fn a_pool_shows_what_its_node_has_and_no_volume_may_be_called_so() {
    let daemon = Daemon::start_with("128M", &node(FIRST));
    let uri = daemon.ok(&["add", "--nbd", "--size", "64M", "data"]);
    fs::write(daemon.dir.join("image"), pattern(3 << 20, 5)).unwrap();
    daemon.ok(&["import", "image", "more"]);
    // The grant for this write is larger than it needs.
    let mut client =
        Client::connect(&uri.trim_end().parse().unwrap(), &Default::default()).unwrap();
    client.write(0, &[1; 4096], true).unwrap();
    let shown = daemon.json(&["pool", "show"])["pool"].clone();
    let [free, journal] = ["free", "journal"].map(|kind| format!("node-{FIRST}-{kind}"));
    let objects = shown["node_objects"].as_array().unwrap();
    let rows: Vec<[&Value; 2]> = objects.iter().map(|one| [&one["name"], &one["kind"]]).collect();
    assert_eq!(json!(rows), json!([[free, "free"], [journal, "journal"]]));
    assert_eq!(objects[0]["total_bytes"], shown["reserved_bytes"]);
    assert!(objects[0]["total_bytes"].as_u64() > Some(0), "{shown}");
    // Making volumes is in the log.
    assert!(objects[1]["used_bytes"].as_u64() >= Some(4096), "{shown}");
    assert!(objects[1]["total_bytes"].as_u64() >= objects[1]["used_bytes"].as_u64());
    let text = daemon.ok(&["pool", "show"]);
    assert!(text.contains(&free) && text.contains(&journal), "{text}");
    assert!(!daemon.ok(&["list"]).contains("node-"), "they are no volumes");
    client.disconnect().unwrap();
    daemon.ok(&["snapshot", "data=then"]);
    let taken = format!("then={free}");
    for arguments in [
        &["add", "--size", "1M", &free][..],
        &["add", "--size", "1M", "node-web"],
        &["clone", "then", &journal],
        &["import", "image", &free],
        &["snapshot", &taken],
        &["pool", "create", &free, "--memory", "--size", "64M"],
    ] {
        let (code, error) = daemon.failure(arguments);
        assert!(code == 3 && error.starts_with("name is node-"), "{arguments:?}: {code} {error}");
        assert!(error.contains("not begin with \"node-\""), "{error}");
    }
    assert_eq!(daemon.json(&["list"])["volumes"].as_array().unwrap().len(), 3);
}

#[test]
fn a_pool_has_the_objects_of_its_node_once_from_its_first_opening_on() {
    let mut daemon = Daemon::start_with("128M", &node(FIRST));
    for _ in 0..3 {
        let shown = daemon.json(&["pool", "show"])["pool"].clone();
        let objects = shown["node_objects"].as_array().unwrap();
        let names: Vec<&Value> = objects.iter().map(|one| &one["name"]).collect();
        let expected = ["free", "journal"].map(|kind| format!("node-{FIRST}-{kind}"));
        assert_eq!(json!(names), json!(expected));
        assert_eq!(daemon.json(&["list"])["volumes"], json!([]));
        assert!(daemon.terminate().success());
        daemon.start_again();
    }
}

#[test]
fn status_says_since_when_writes_wait_for_a_full_pool() {
    let daemon = Daemon::start_with("16M", &node(FIRST));
    fs::write(daemon.dir.join("image"), pattern(32 << 20, 5)).unwrap();
    let before = blockd_media::clock::wall_ms().unsigned_abs();
    let mut import = daemon.command(&["import", "image", "data"]).spawn().unwrap();
    let clock = Clock::start();
    let pool = loop {
        let pool = daemon.json(&["node", "status"])["pools"][0].clone();
        if pool["blocked_writes"].as_u64() > Some(0) {
            break pool;
        }
        assert!(clock.elapsed() < LIMIT, "{pool}");
        std::thread::sleep(Duration::from_millis(20));
    };
    let now = blockd_media::clock::wall_ms().unsigned_abs();
    let since = pool["blocked_since_unix_ms"].as_u64().unwrap();
    assert!((before..=now).contains(&since), "{before} {since} {now}");
    assert!(pool["parked"].as_u64() >= pool["blocked_writes"].as_u64(), "{pool}");
    let text = daemon.ok(&["node", "status"]);
    assert!(text.contains(" write(s) for space, since 20"), "{text}");
    import.kill().unwrap();
    import.wait().unwrap();
}

#[test]
fn status_says_what_is_waited_for_and_since_when() {
    // Less than a quantum from the start on.
    let mut daemon = Daemon::start_with("16M", &node(FIRST));
    assert!(daemon.terminate().success());
    let socket = daemon.ring_dir().join("extend.sock");
    daemon.process.arguments = vec![format!("--listen=default={}", socket.display())];
    daemon.start_again();
    daemon.ok(&["add", "--nbd", "--size", "1G", "data"]);
    let status = daemon.json(&["node", "status"]);
    assert_eq!((&status["node"]["id"], &status["node"]["state"]), (&FIRST.into(), &"this".into()));
    let pool = &status["pools"][0];
    assert_eq!(json!([pool["name"], pool["state"], pool["epoch"]]), json!(["default", "open", 2]));
    let waits = ["waiting", "parked", "blocked_writes", "blocked_since_unix_ms"];
    assert_eq!(json!(waits.map(|key| &pool[key])), json!([[], 0, 0, null]));
    assert_eq!(pool["objects"].as_array().unwrap().len(), 2);

    let path = socket.to_str().unwrap();
    let request = ["extend-request", "--socket", path, "--wait", "data", "1G", "0", "0"];
    // The first gets what is left, and the next waits.
    daemon.ok(&request);
    let mut waiting = daemon.command(&request).spawn().unwrap();
    let clock = Clock::start();
    let one = loop {
        let status = daemon.json(&["node", "status", "default"]);
        let one = status["pools"][0]["waiting"][0].clone();
        if !one.is_null() {
            break one;
        }
        assert!(clock.elapsed() < LIMIT, "{status}");
        std::thread::sleep(Duration::from_millis(20));
    };
    assert_eq!(json!([one["volume"], one["room_bytes"]]), json!(["data", 1 << 30]));
    let now = blockd_media::clock::wall_ms().unsigned_abs();
    let since = one["since_unix_ms"].as_u64().unwrap();
    assert!(now >= since && now - since < 60_000, "{now} {one}");
    let peer = format!("pid {}", waiting.id());
    assert!(one["peer"].as_str().unwrap().ends_with(&peer), "{one}");
    let text = daemon.ok(&["node", "status"]);
    assert!(text.contains("data for up to 1 GiB, since 20"), "{text}");
    waiting.kill().unwrap();
    waiting.wait().unwrap();
    let (code, error) = daemon.failure(&["node", "status", "none"]);
    assert!(code == 4 && error.contains("none"), "{code} {error}");
}

/// A pool that one host has left without closing it, and another host.
struct Two {
    /// The one that has it.
    first: Daemon,
    /// The other one's folder: its configuration, state and hooks.
    place: PathBuf,
}

impl Two {
    fn new() -> Self {
        let first = Daemon::start_with("256M", &node(FIRST));
        fs::write(first.dir.join("image"), pattern(3 << 20, 5)).unwrap();
        first.ok(&["import", "image", "data"]);
        let place = first.dir.join("second");
        fs::create_dir(&place).unwrap();
        // The same boot of the same machine, so that the delta ring is where it was.
        let config = fs::read_to_string(first.config()).unwrap().replace(FIRST, SECOND);
        let state = format!("state_dir = {:?}", first.dir);
        assert!(config.contains(&state));
        let config = config.replace(&state, &format!("state_dir = {:?}", place.join("state")));
        fs::create_dir(place.join("state")).unwrap();
        fs::write(place.join("blockd.toml"), config).unwrap();
        Self { first, place }
    }

    fn pool(&self) -> PathBuf {
        self.first.dir.join("default.pool")
    }

    fn hook(&self, folder: &str, name: &str, text: &str, mode: u32) -> PathBuf {
        let folder = self.place.join("hooks").join(folder);
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join(name);
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    fn config(&self) -> String {
        self.place.join("blockd.toml").display().to_string()
    }

    fn refused(&self, verb: &str, more: &[&str]) -> (i32, String) {
        let config = self.config();
        self.first.failure(&[&["node", verb, "--config", &config], more].concat())
    }

    fn done(&self, verb: &str, more: &[&str]) -> Value {
        let config = self.config();
        self.first.json(&[&["node", verb, "--config", &config], more].concat())
    }

    /// Whether the pool is as its first host left it: of its log, nothing was replayed.
    fn is_left(&self) -> bool {
        let checked = self.first.json(&["pool", "check", self.pool().to_str().unwrap()]);
        checked["clean"] == false
    }

    /// Tries scripts that end badly, and finds that nothing has changed.
    fn bad_hooks(&self, verb: &str, folder: &str, more: &[&str]) {
        let before = fs::read(self.pool()).unwrap();
        let nodes = || fs::read(self.place.join("state/nodes.json")).ok();
        let remembered = nodes();
        let ran = self.place.join("ran");
        let earlier = self.hook(folder, "10-first", &format!("echo $1 > {ran:?}"), 0o755);
        let later = self.place.join("later");
        self.hook(folder, "30-last", &format!("touch {later:?}"), 0o755);
        for (text, mode, problem) in [
            ("echo no power switch; exit 3", 0o755, "exit code 3: no power switch"),
            ("true", 0o644, "is not executable"),
            ("true", 0o777, "can be written by other users"),
            ("sleep 1000", 0o755, "did not end within 1.0 s"),
        ] {
            let bad = self.hook(folder, "20-bad", text, mode);
            let (code, error) = self.refused(verb, more);
            assert!(code == 7 && error.contains(problem), "{code} {error}");
            assert!(error.contains("20-bad") && error.contains("stays as it is"), "{error}");
            // A script that cannot be run is found before any runs.
            assert_eq!(fs::remove_file(&ran).is_ok(), mode == 0o755, "{problem}");
            fs::remove_file(bad).unwrap();
        }
        assert!(!later.exists(), "what comes behind a failure does not run");
        assert!(fs::read(self.pool()).unwrap() == before, "not a byte has changed");
        assert_eq!(nodes(), remembered);
        fs::remove_file(earlier).unwrap();
        fs::remove_file(self.place.join("hooks").join(folder).join("30-last")).unwrap();
    }
}

#[test]
fn a_host_that_is_gone_is_declared_dead_and_its_pool_taken_over() {
    let mut two = Two::new();
    let ran = two.place.join("ran");
    let hook = two.hook("pre-declare-dead.d", "50-fence", &format!("echo $1 > {ran:?}"), 0o755);
    let (code, error) = two.refused("declare-dead", &[FIRST]);
    assert!(code == 7 && error.contains("is in use on this host"), "{code} {error}");
    assert!(!ran.exists(), "a host that was seen alive is not fenced");
    let (code, error) = two.refused("declare-dead", &[SECOND]);
    assert!(code == 3 && error.contains("this one runs"), "{code} {error}");
    let (code, _) = two.refused("declare-dead", &["node-1"]);
    assert_eq!(code, 3);
    let unknown = FIRST.replace("3f2b", "4f2b");
    let (code, _) = two.refused("declare-dead", &[&unknown]);
    assert_eq!(code, 4);
    fs::remove_file(hook).unwrap();

    two.first.kill();
    let config = two.config();
    let refused = two.first.run(&["serve", "--config", &config]);
    let error = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(7), "{error}");
    assert!(error.contains("another node, 3f2b8c1d-"), "{error}");
    assert!(error.contains("blockd node declare-dead"), "{error}");
    two.bad_hooks("declare-dead", "pre-declare-dead.d", &[FIRST]);
    assert!(two.is_left());

    let pools = "echo \"$1 takes $BLOCKD_POOLS\"";
    two.hook("pre-declare-dead.d", "10-say", pools, 0o755);
    let done = two.done("declare-dead", &[FIRST]);
    assert_eq!(json!([done["changed"], done["node"]]), json!([true, FIRST]));
    assert_eq!(done["hooks"][0]["output"], format!("{FIRST} takes default"));
    assert_eq!(done["pools"][0]["pool"], "default");
    let replayed = ["log_changes", "ring_changes"].map(|key| done["pools"][0][key].as_u64());
    assert!(replayed.into_iter().flatten().sum::<u64>() > 0, "{done}");
    assert!(!two.is_left());
    let again = two.done("declare-dead", &[FIRST]);
    assert_eq!(json!([again["changed"], again["hooks"]]), json!([false, []]));

    // The other host has the pool now, with everything in it.
    let config = fs::read_to_string(two.config()).unwrap();
    let own = two.first.config();
    fs::rename(&own, two.first.dir.join("old.toml")).unwrap();
    fs::write(own, config).unwrap();
    two.first.start_again();
    two.first.ok(&["export", "data", "copy"]);
    let read = |name: &str| fs::read(two.first.dir.join(name)).unwrap();
    assert!(read("image") == read("copy"));
    let nodes = two.first.json(&["node", "list"])["nodes"].clone();
    let row = |at: usize| json!([nodes[at]["id"], nodes[at]["state"], nodes[at]["pools"]]);
    assert_eq!(row(0), json!([SECOND, "this", ["default"]]));
    assert_eq!(row(1), json!([FIRST, "dead", ["default"]]));
    let text = two.first.ok(&["node", "list"]);
    assert!(text.starts_with("NODE ") && text.contains(FIRST), "{text}");

    // Forgetting needs no daemon to end: the pool does not name the dead one any more.
    two.bad_hooks_while_serving();
    two.hook("pre-forget.d", "10-say", "echo gone; echo for good", 0o755);
    let done = two.done("forget", &[&FIRST[..8]]);
    assert_eq!(json!([done["changed"], done["pools"]]), json!([true, []]));
    assert_eq!(done["hooks"][0]["output"], "gone\nfor good");
    assert_eq!(two.first.json(&["node", "list"])["nodes"].as_array().unwrap().len(), 1);
    let (code, _) = two.refused("forget", &[FIRST]);
    assert_eq!(code, 4);
    let (code, _) = two.refused("forget", &[SECOND, "--force"]);
    assert_eq!(code, 3);
}

impl Two {
    /// The same for forgetting, with a pool that is served.
    fn bad_hooks_while_serving(&self) {
        for (text, mode, problem) in
            [("exit 1", 0o755, "exit code 1"), ("true", 0o644, "is not"), ("sleep 9", 0o755, "end")]
        {
            let bad = self.hook("pre-forget.d", "20-bad", text, mode);
            let (code, error) = self.refused("forget", &[FIRST]);
            assert!(code == 7 && error.contains(problem), "{code} {error}");
            fs::remove_file(bad).unwrap();
        }
        let nodes = self.first.json(&["node", "list"])["nodes"].clone();
        assert_eq!(nodes[1]["id"], FIRST, "it is still known");
    }
}

#[test]
fn pools_that_can_not_be_read_keep_no_other_from_a_takeover() {
    let mut two = Two::new();
    two.first.kill();
    let mut config = fs::read_to_string(two.config()).unwrap();
    for (name, start) in [("blank", &[0; 8]), ("bad", b"BLOCKDsb")] {
        let path = two.place.join(name);
        let mut bytes = vec![0; 16 << 20];
        bytes[..8].copy_from_slice(start);
        fs::write(&path, bytes).unwrap();
        let table = format!("[[pool]]\nname = {name:?}\npath = {path:?}\nsize = \"16M\"\n");
        config.push_str(&table);
    }
    fs::write(two.config(), config).unwrap();
    let unknown = FIRST.replace("3f2b", "4f2b");
    let (_, error) = two.refused("declare-dead", &[&unknown]);
    assert!(error.contains("no other pool names node 4f2b8c1d-"), "{error}");
    let done = two.done("declare-dead", &[FIRST]);
    assert_eq!(json!([done["changed"], done["pools"][0]["pool"]]), json!([true, "default"]));
    // No pool was made yet on the blank one.
    let unread = done["unread"].as_array().unwrap();
    assert!(unread.len() == 1 && unread[0]["pool"] == "bad", "{done}");
    assert!(!two.is_left());
    // What can't be read may name it still.
    let (code, error) = two.refused("forget", &[FIRST]);
    let names = error.contains("can't be read: bad (") && error.contains("or use --force to");
    assert!(code == 7 && names, "{code} {error}");
    assert_eq!(two.done("declare-dead", &[FIRST])["changed"], false, "it is still known");
    let done = two.done("forget", &[FIRST, "--force"]);
    assert_eq!(json!([done["changed"], done["unread"][0]["pool"]]), json!([true, "bad"]));
}

#[test]
fn a_host_that_was_not_declared_dead_is_forgotten_only_by_force() {
    let mut two = Two::new();
    let (code, error) = two.refused("forget", &[FIRST, "--force"]);
    assert!(code == 7 && error.contains("is in use on this host"), "{code} {error}");
    // The grant for this write is larger than it needs.
    let uri = two.first.ok(&["add", "--nbd", "--size", "64M", "live"]);
    let uri = uri.trim_end().parse().unwrap();
    let mut client = Client::connect(&uri, &Default::default()).unwrap();
    client.write(0, &[1; 4096], true).unwrap();
    let sizes = |pool: &Value| ["free_bytes", "reserved_bytes"].map(|key| pool[key].as_u64());
    let before = sizes(&two.first.json(&["pool", "show"])["pool"]);
    assert!(before[1] > Some(0), "the first host holds nothing that could become free: {before:?}");
    two.first.kill();
    drop(client);
    let (code, error) = two.refused("forget", &[FIRST]);
    assert!(code == 7 && error.contains("may be alive"), "{code} {error}");
    two.bad_hooks("forget", "pre-forget.d", &[FIRST, "--force"]);
    assert!(two.is_left());
    let done = two.done("forget", &[FIRST, "--force"]);
    assert_eq!(json!([done["changed"], done["pools"][0]["pool"]]), json!([true, "default"]));
    let replayed = ["log_changes", "ring_changes"].map(|key| done["pools"][0][key].as_u64());
    assert!(replayed.into_iter().flatten().sum::<u64>() > 0, "{done}");
    assert!(!two.is_left());
    let (code, _) = two.refused("forget", &[FIRST, "--force"]);
    assert_eq!(code, 4, "nothing names it any more");

    // The objects of the forgotten host are gone and what it held is free: the other host has
    // objects of its own, an empty reserve, and what was answered.
    let config = fs::read_to_string(two.config()).unwrap();
    let own = two.first.config();
    fs::rename(&own, two.first.dir.join("old.toml")).unwrap();
    fs::write(own, config).unwrap();
    two.first.start_again();
    let shown = two.first.json(&["pool", "show"])["pool"].clone();
    assert!(!shown.to_string().contains(FIRST), "{shown}");
    let objects = shown["node_objects"].as_array().unwrap();
    assert_eq!(objects[0]["name"], format!("node-{SECOND}-free"));
    assert_eq!(objects[0]["total_bytes"], 0);
    assert_eq!(objects[1]["name"], format!("node-{SECOND}-journal"));
    let [free, reserved] = before.map(Option::unwrap);
    // The reserve of the first host is free again.
    assert_eq!(sizes(&shown), [Some(free + reserved), Some(0)]);
    two.first.ok(&["export", "data", "copy"]);
    let read = |name: &str| fs::read(two.first.dir.join(name)).unwrap();
    assert!(read("image") == read("copy"));
}

#[test]
fn a_host_that_closed_its_pool_leaves_it_to_any_other() {
    let mut two = Two::new();
    assert!(two.first.terminate().success());
    let config = fs::read_to_string(two.config()).unwrap();
    fs::write(two.first.config(), config).unwrap();
    two.first.start_again();
    assert_eq!(two.first.json(&["list"])["volumes"].as_array().unwrap().len(), 1);
    two.first.kill();
    // Its own, it recovers itself.
    two.first.start_again();
    let nodes = two.first.json(&["node", "list"])["nodes"].clone();
    assert_eq!(nodes.as_array().unwrap().len(), 1, "{nodes}");
}

#[test]
fn a_pool_that_another_host_has_left_is_named_beside_those_that_are_served() {
    let mut two = Two::new();
    two.first.kill();
    let mut second = Daemon::start_with("64M", &node(SECOND));
    assert!(second.terminate().success());
    let config = fs::read_to_string(second.config()).unwrap();
    let left = format!("{config}[[pool]]\nname = \"left\"\npath = {:?}\n", two.pool());
    fs::write(second.config(), left).unwrap();
    second.start_not_ready();
    let nodes = second.json(&["node", "list"])["nodes"].clone();
    let row = |at: usize| json!([nodes[at]["id"], nodes[at]["state"], nodes[at]["pools"]]);
    assert_eq!(row(0), json!([SECOND, "this", ["default"]]));
    // Its number is all that is on media.
    assert_eq!(row(1), json!([&FIRST[..8], "unknown", ["left"]]));
    let status = second.json(&["node", "status", "left"])["pools"][0].clone();
    assert_eq!(json!([status["state"], status["epoch"]]), json!(["failed", 0]));
    assert!(status["failure"].as_str().unwrap().contains("another node, 3f2b8c1d-"), "{status}");
    assert!(two.is_left());

    // Its delta ring is not where this one looks, and the machine has not been off.
    let config = second.config().display().to_string();
    let dead = ["node", "declare-dead", "--config", &config, &FIRST[..8]];
    let (code, error) = second.failure(&dead);
    assert!(code == 7 && error.contains("loses answered writes"), "{code} {error}");
    assert!(two.is_left());
    let done = second.json(&[&dead[..], &["--accept-loss"]].concat());
    assert_eq!(json!([done["changed"], done["pools"][0]["pool"]]), json!([true, "left"]));
    let nodes = second.json(&["node", "list"])["nodes"].clone();
    assert_eq!(json!([nodes[1]["id"], nodes[1]["state"]]), json!([&FIRST[..8], "dead"]));
    assert!(second.terminate().success());
    second.start_again();
    assert_eq!(second.json(&["pool", "show", "left"])["pool"]["state"], "open");
    assert_eq!(second.json(&["show", "--pool", "left", "data"])["volume"]["size_bytes"], 3 << 20);
}

#[test]
fn a_pool_that_can_not_be_opened_keeps_no_other_from_a_takeover() {
    let mut two = Two::new();
    let more = two.first.dir.join("more.pool");
    let path = more.to_str().unwrap();
    two.first.ok(&["pool", "create", "more", "--path", path, "--size", "64M"]);
    two.first.ok(&["import", "--pool", "more", "image", "data"]);
    let id = two.first.json(&["pool", "show"])["pool"]["id"].clone();
    two.first.kill();
    let table = format!("[[pool]]\nname = \"more\"\npath = {path:?}\nsize = \"64M\"\n");
    let config = fs::read_to_string(two.config()).unwrap();
    fs::write(two.config(), config + &table).unwrap();
    // The first of the two has lost its delta ring.
    fs::remove_file(two.first.ring_dir().join(format!("ring-{}", id.as_str().unwrap()))).unwrap();
    let (code, error) = two.refused("declare-dead", &[FIRST]);
    assert!(code == 7 && error.contains("pool default") && error.contains("loses"), "{error}");
    assert!(error.contains("taken over: pool more"), "{error}");
    assert!(two.is_left());
    assert_eq!(two.first.json(&["pool", "check", path])["clean"], true);
    let taken = || {
        let nodes = fs::read(two.place.join("state/nodes.json")).unwrap();
        serde_json::from_slice::<Value>(&nodes).unwrap()["entries"][0]["pools"].clone()
    };
    assert_eq!(taken(), json!(["more"]));
    // It is not forgotten with a pool that names it.
    let (_, error) = two.refused("forget", &[FIRST]);
    assert!(error.contains("may be alive"), "{error}");
    let (code, error) = two.refused("forget", &[FIRST, "--force"]);
    assert!(code == 7 && error.contains("pool default"), "{code} {error}");
    assert_eq!(taken(), json!(["more"]));
    let done = two.done("declare-dead", &[FIRST, "--accept-loss"]);
    assert_eq!(json!([done["changed"], done["pools"][0]["pool"]]), json!([true, "default"]));
    assert_eq!(taken(), json!(["default", "more"]));
    assert!(!two.is_left());
}

#[test]
fn a_spare_device_that_holds_another_pool_keeps_no_pool_from_a_takeover() {
    let mut two = Two::new();
    let other = Daemon::start("64M");
    two.first.kill();
    let config = fs::read_to_string(two.config()).unwrap();
    let spare = format!("[[pool]]\nspare_devices = [{:?}]\n", other.dir.join("default.pool"));
    assert!(config.contains("[[pool]]\n"));
    fs::write(two.config(), config.replace("[[pool]]\n", &spare)).unwrap();
    let done = two.done("declare-dead", &[FIRST]);
    assert_eq!(json!([done["changed"], done["pools"][0]["pool"]]), json!([true, "default"]));
    assert!(!two.is_left());
    assert_eq!(other.json(&["pool", "show"])["pool"]["state"], "open");
}
