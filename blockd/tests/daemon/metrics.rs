//! The reports of a daemon on itself, and on volumes that are held back.

use super::*;

/// The value of a metric without labels, or with any.
fn value(metrics: &str, name: &str) -> Option<f64> {
    let of = |line: &&str| line.split(['{', ' ']).next() == Some(name);
    metrics.lines().find(of)?.rsplit(' ').next()?.parse().ok()
}

#[test]
fn metrics_have_the_queries_of_alerts_and_dashboard_and_the_names_of_identities() {
    const NODE: &str = "3f2b8c1d-0e4a-4d5b-9c6f-7a8b9c0d1e2f";
    let health = "[health]\ninterval = \"1s\"";
    let more = format!("[metrics]\naddress = \"127.0.0.1:0\"\n[node]\nid = \"{NODE}\"\n{health}");
    let place = Place::new(&more);
    let daemon = Daemon::start(&place);
    fs::write(place.path("image"), vec![7; 8 << 20]).unwrap();
    let image = place.path("image").display().to_string();
    let imported = place.blockd(&["import", &image, "v"]);
    assert!(imported.status.success(), "{imported:?}");
    assert!(place.blockd(&["snapshot", "v=s"]).status.success());
    let _client = place.with_reserve("w");
    // Causes are reported only where there is one.
    let replicated = "blockd.io/replicated-unix-ms=1700000000000";
    let set = ["set", "v", "--quota", "8M", "--label", replicated];
    assert!(place.blockd(&set).status.success());
    let deployed =
        [include_str!("../../../deploy/alerts.yml"), include_str!("../../../deploy/grafana.json")];
    let words =
        deployed.iter().flat_map(|text| text.split(|c: char| !c.is_alphanumeric() && c != '_'));
    let asked: Vec<&str> = words.filter(|word| word.starts_with("blockd_")).collect();
    let clock = Clock::start();
    let metrics = loop {
        let (_, metrics) = daemon.get("/metrics");
        let missing: Vec<_> = asked.iter().filter(|name| value(&metrics, name).is_none()).collect();
        if missing.is_empty() {
            break metrics;
        }
        // How fast it fills is known a moment after it was written.
        assert!(clock.elapsed() < LIMIT, "{missing:?}\n{metrics}");
        // A reader that does not read the daemon's output blocks it after some time.
        daemon.wait_for("WATCHDOG=1");
    };
    // So is everything that is documented.
    let rows = include_str!("../../../docs/METRICS.md").lines();
    let rows = rows.filter_map(|line| line.strip_prefix("| `blockd_")?.split_once("` | "));
    let names = rows.map(|(name, rest)| match rest.starts_with("histogram") {
        true => format!("blockd_{name}_count"),
        false => format!("blockd_{name}"),
    });
    // Persistent memory is reported only where there is some.
    let names = names.filter(|name| !name.starts_with("blockd_pmem_"));
    let missing: Vec<String> = names.filter(|name| value(&metrics, name).is_none()).collect();
    assert_eq!(missing, [""; 0]);
    let shown = place.blockd(&["pool", "show", "--json"]);
    let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
    let id = shown["pool"]["id"].as_str().unwrap();
    let parts =
        [&id[..8], &id[8..12], &id[12..16], &id[16..20], &id[20..], &NODE.replace('-', "_")];
    let name = |what: &str| format!("sr_{}_{what}", parts.join("_"));
    let held = shown["pool"]["reserved_bytes"].as_f64().unwrap() / 65536.0;
    assert!(held > 0.0, "{shown}");
    assert_eq!(value(&metrics, &name("free")), Some(held), "{metrics}");
    assert_eq!(value(&metrics, "blockd_reserve_free_extents"), Some(held));
    for (metric, key) in
        [("reserve_free_extents", "free"), ("reserve_refills_total", "allocations")]
    {
        let line = format!("blockd_{metric}{{pool=\"default\",node=\"{NODE}\"}} ");
        let found = metrics.lines().find_map(|found| found.strip_prefix(&line)?.parse().ok());
        assert_eq!(found, value(&metrics, &name(key)), "{line}\n{metrics}");
    }
    let per_volume = "blockd_volume_refills_total{pool=\"default\",volume=\"v\"} ";
    let of_the_volume = metrics.lines().find_map(|found| found.strip_prefix(per_volume));
    assert!(of_the_volume.is_some_and(|count| count != "0"), "{metrics}");
    let refills = value(&metrics, &name("allocations")).unwrap();
    assert!(refills >= 1.0 && value(&metrics, "blockd_reserve_refills_total") == Some(refills));
    let cause = r#"{pool="default",volume="v",code="quota-full",severity="failure"} 1"#;
    assert!(metrics.contains(&format!("blockd_health_cause{cause}")), "{metrics}");
    for (of, expected) in [("shared", 8 << 20), ("exclusive", 0), ("mapped", 8 << 20)] {
        let line = format!("blockd_volume_{of}_bytes{{pool=\"default\",volume=\"v\"}} {expected}");
        assert!(metrics.lines().any(|found| found == line), "{line}\n{metrics}");
    }
    assert!(
        metrics.contains("blockd_volume_passed_reserves_total{pool=\"default\",volume=\"v\"} 0")
    );
    assert_eq!(daemon.end(Signal::SIGTERM).code(), Some(0));
}

/// The value of a metric of the volume `v`, for one reason.
fn held(metrics: &str, name: &str, reason: &str) -> f64 {
    let line = format!("{name}{{pool=\"default\",volume=\"v\",reason=\"{reason}\"}} ");
    let found = metrics.lines().find_map(|found| found.strip_prefix(&line));
    found.and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{line}\n{metrics}"))
}

/// A client sends more requests than its volume's limits admit.
#[test]
fn a_volume_that_its_limits_hold_back_is_seen_in_metrics_top_and_tune() {
    const ENOUGH: f64 = 0.2;
    let place = Place::new("[metrics]\naddress = \"127.0.0.1:0\"");
    let daemon = Daemon::start(&place);
    daemon.listen();
    let mut client = place.with_reserve("v");
    let (_, metrics) = daemon.get("/metrics");
    assert_eq!(held(&metrics, "blockd_holds_total", "limit"), 0.0);
    assert!(place.blockd(&["set", "v", "--iops", "20"]).status.success());
    let ends = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stop = std::sync::Arc::clone(&ends);
    let reader = std::thread::spawn(move || {
        while !stop.load(Ordering::Relaxed) {
            while client.room() {
                client.send(Request::Read { offset: 0, len: 4096 }).unwrap();
            }
            let done = client.receive().unwrap();
            client.recycle(done.data);
        }
    });
    let clock = Clock::start();
    loop {
        let (_, metrics) = daemon.get("/metrics");
        let seen = held(&metrics, "blockd_holds_total", "limit") >= 1.0
            && held(&metrics, "blockd_hold_seconds_total", "limit") > ENOUGH
            && held(&metrics, "blockd_held_back", "limit") == 1.0;
        if seen {
            break;
        }
        assert!(clock.elapsed() < LIMIT, "{metrics}");
    }
    let json = |arguments: &[&str]| -> serde_json::Value {
        let shown = place.blockd(arguments);
        serde_json::from_slice(&shown.stdout).unwrap_or_else(|error| panic!("{error}: {shown:?}"))
    };
    let top = json(&["--json", "top", "--once"]);
    let limit = &top["volumes"][0]["held"][1];
    assert_eq!(limit["reason"], "limit", "{top}");
    assert!(limit["ns_per_second"].as_f64().unwrap() > ENOUGH * 1e9, "{top}");
    let tune = json(&["--json", "tune"]);
    let first = &tune["held"][0];
    assert_eq!((&first["volume"], &first["reason"]), (&"v".into(), &"limit".into()), "{tune}");
    // Without limits nothing is held back any more.
    assert!(place.blockd(&["set", "v", "--iops", "0"]).status.success());
    let clock = Clock::start();
    while held(&daemon.get("/metrics").1, "blockd_held_back", "limit") > 0.0 {
        assert!(clock.elapsed() < LIMIT);
    }
    ends.store(true, Ordering::Relaxed);
    reader.join().unwrap();
    assert_eq!(daemon.end(Signal::SIGTERM).code(), Some(0));
}

/// A write that waits for space, and whose connection is not received from meanwhile.
#[test]
fn a_connection_that_waits_for_space_is_seen_while_it_waits() {
    let place = Place::new("[metrics]\naddress = \"127.0.0.1:0\"");
    let daemon = Daemon::start(&place);
    daemon.listen();
    let mut client = place.with_reserve("v");
    let data = vec![7; 256 << 10];
    // All of the volume is more than the pool has, with its metadata.
    let writer = std::thread::spawn(move || {
        for at in 0..256 {
            while !client.room() {
                client.receive()?;
            }
            client.send(Request::Write { offset: at * (256 << 10), data: &data, fua: false })?;
        }
        while client.in_flight() > 0 {
            client.receive()?;
        }
        Ok::<_, blockd_nbd::client::ClientError>(())
    });
    let clock = Clock::start();
    let mut longest = 0.0;
    // Counted while it lasts: the hold has not ended.
    while longest < 1.0 {
        let (_, metrics) = daemon.get("/metrics");
        if held(&metrics, "blockd_held_back", "space") == 1.0 {
            longest = held(&metrics, "blockd_hold_seconds_total", "space");
        }
        assert!(clock.elapsed() < LIMIT, "{metrics}");
    }
    let tune = place.blockd(&["tune"]);
    let text = String::from_utf8(tune.stdout).unwrap();
    assert!(text.contains("(space): the pool is full: blockd pool grow default"), "{text}");
    assert!(place.blockd(&["del", "v", "--force"]).status.success());
    assert!(writer.join().unwrap().is_err());
    assert_eq!(daemon.end(Signal::SIGTERM).code(), Some(0));
}
