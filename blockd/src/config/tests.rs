use std::collections::BTreeSet;
use std::path::Path;

use blockd_control::config::SpaceConfig;
use blockd_mapper::space::{Mark, Marks};
use blockd_media::error::ErrorKind;
use blockd_media::place::Places;

use super::*;

/// The documented example.
const EXAMPLE: &str = include_str!("../../../deploy/blockd.toml");

fn parse(text: &str) -> Result<Config, Error> {
    Config::parse(text, Some(Path::new("/etc/b.toml")), &Places::of_root())
}

/// The example with its optional tables switched on: a `#` right before a key or table goes away.
fn example_with_options() -> String {
    let line = |line: &str| match line.strip_prefix('#') {
        Some(rest) if rest.starts_with(|c: char| c.is_ascii_lowercase() || c == '[') => {
            format!("{rest}\n")
        }
        _ => format!("{line}\n"),
    };
    EXAMPLE.lines().map(line).collect()
}

fn keys(prefix: &str, value: &toml::Value, into: &mut BTreeSet<String>) {
    match value {
        toml::Value::Table(table) => {
            for (name, value) in table {
                keys(&format!("{prefix}.{name}"), value, into);
            }
        }
        toml::Value::Array(values) if values.iter().any(toml::Value::is_table) => {
            for value in values {
                keys(prefix, value, into);
            }
        }
        _ => {
            into.insert(prefix.to_owned());
        }
    }
}

#[test]
fn the_example_has_the_defaults() {
    let example: file::File = toml::from_str(EXAMPLE).unwrap();
    let example = example.completed(&Places::of_root());
    assert_eq!(example, file::File::default().completed(&Places::of_root()));
}

#[test]
fn the_options_of_the_example_have_the_defaults() {
    let all: file::File = toml::from_str(&example_with_options()).unwrap();
    for listener in all.nbd.listeners {
        let (unix, tcp, tls) = (listener.unix.clone(), listener.tcp.clone(), listener.tls.clone());
        assert_eq!(listener, file::Listener { unix, tcp, tls, ..Default::default() });
    }
    for pool in all.pools {
        let (name, path, size) = (pool.name.clone(), pool.path.clone(), pool.size.clone());
        let devices = pool.devices.clone();
        assert_eq!(pool, file::Pool { name, path, size, devices, ..Default::default() });
    }
}

#[test]
fn the_example_has_every_key_and_says_what_it_means() {
    let everything = file::File {
        pools: vec![file::Pool::default()],
        nbd: file::Nbd { listeners: vec![file::Listener::default()], ..Default::default() },
        ..Default::default()
    };
    let (mut there, mut documented) = (BTreeSet::new(), BTreeSet::new());
    keys("", &toml::Value::try_from(&everything).unwrap(), &mut there);
    keys("", &toml::from_str(&example_with_options()).unwrap(), &mut documented);
    assert_eq!(documented, there);
    let lines: Vec<&str> = EXAMPLE.lines().collect();
    for (index, line) in lines.iter().enumerate() {
        let key = line.trim_start_matches('#').split_once(" = ");
        if key.is_none() || line.starts_with("# ") {
            continue;
        }
        assert!(index > 0 && lines[index - 1].starts_with("# "), "{line} is not explained");
    }
}

#[test]
fn no_file_is_a_pool_in_a_file_and_a_socket() {
    let config = Config::parse("", None, &Places::of_root()).unwrap();
    assert_eq!(config.control_socket, Path::new("/run/blockd/control.sock"));
    assert_eq!(config.default_pool, "default");
    assert_eq!(config.pools[0].devices[0].path, Path::new("/var/lib/blockd/default.pool"));
    let path = PathBuf::from("/run/blockd/nbd.sock");
    assert_eq!(config.nbd.listeners[0].address, ListenAddress::Unix { path, mode: 0o600 });
    assert_eq!(config.metrics, None);
}

#[test]
fn metrics_are_served_on_the_loopback_unless_an_address_is_named() {
    let address = |text: &str| parse(&format!("[metrics]\naddress = {text:?}")).unwrap().metrics;
    assert_eq!(address("9641"), Some("127.0.0.1:9641".parse().unwrap()));
    assert_eq!(address("[::1]:9641"), Some("[::1]:9641".parse().unwrap()));
    assert_eq!(address("0.0.0.0:9641"), Some("0.0.0.0:9641".parse().unwrap()));
    assert_eq!(address(""), None);
}

#[test]
fn deadlines_of_connections_have_defaults_and_idle_ones_may_stay() {
    let nbd = parse("").unwrap().nbd;
    assert_eq!(nbd.receive_timeout, Duration::from_secs(30));
    assert_eq!(nbd.idle_timeout, None);
    assert_eq!((nbd.listeners[0].max_connections, nbd.max_connections_per_peer), (8192, 1024));
    let nbd = parse("[nbd]\nreceive_timeout = \"1s\"\nidle_timeout = \"2h\"").unwrap().nbd;
    assert_eq!(nbd.receive_timeout, Duration::from_secs(1));
    assert_eq!(nbd.idle_timeout, Some(Duration::from_hours(2)));
}

#[test]
fn folders_move_with_their_keys() {
    let config = parse("runtime_dir = \"/r\"\nstate_dir = \"/s/\"").unwrap();
    assert_eq!(config.control_socket, Path::new("/r/control.sock"));
    assert_eq!(config.pools[0].devices[0].path, Path::new("/s/default.pool"));
}

#[test]
fn a_namespace_stands_in_place_of_a_path() {
    let uuid = "8d9cbb33-7a5c-4b60-9c6f-3a2f1f8f9a10";
    let text = format!("[[pool]]\nname = \"a\"\nkind = \"pmem\"\nnamespace = {uuid:?}");
    let path = parse(&text).unwrap().pools[0].devices[0].path.clone();
    assert_eq!(path.to_str(), Some(&*format!("namespace:{uuid}")));
    assert!(blockd_media::pool::is_there(&path));
    let pool = |rest: &str| format!("[[pool]]\nname = \"a\"\nnamespace = \"x\"\n{rest}");
    for (text, expected) in [
        (pool(""), "/etc/b.toml:3: pool.namespace is x: must be left out unless"),
        (pool("kind = \"pmem\""), "/etc/b.toml:3: pool.namespace is x: must be a uuid"),
        (
            pool("kind = \"pmem\"\npath = \"/a\""),
            "/etc/b.toml:3: pool.namespace is x: must be left out beside path",
        ),
    ] {
        let error = parse(&text).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{text}\n{error}\n{expected}");
    }
}

/// Row: P9.
#[test]
fn a_region_stands_in_place_of_a_path_with_a_share_of_it() {
    let uuid = "8d9cbb33-7a5c-4b60-9c6f-3a2f1f8f9a10";
    let pool =
        |rest: &str| format!("[[pool]]\nname = \"a\"\nkind = \"pmem\"\nregion = \"0x1f\"\n{rest}");
    let other = format!("[[pool]]\nname = \"b\"\nkind = \"pmem\"\nnamespace = {uuid:?}\n");
    let config = parse(&(pool("create_namespaces = true\npercentage = 50\n") + &other)).unwrap();
    let share = config.pools[0].region.as_ref().unwrap();
    assert_eq!(
        (share.key.to_string().as_str(), share.percentage, share.create),
        ("0x1f", 50, true)
    );
    assert_eq!(share.others, [Path::new(&format!("namespace:{uuid}"))]);
    assert_eq!(config.pools[1].region, None);
    let share = parse(&pool("")).unwrap().pools[0].region.clone().unwrap();
    assert_eq!((share.percentage, share.create), (100, false));
    let file = |rest: &str| format!("[[pool]]\nname = \"a\"\npath = \"/a\"\n{rest}");
    for (text, expected) in [
        (pool("path = \"/a\""), "/etc/b.toml:4: pool.region is 0x1f: must be left out beside path"),
        (pool("").replace("0x1f", "1f"), "/etc/b.toml:4: pool.region is 1f: must be a set cookie"),
        (
            pool("create_namespaces = true\npercentage = 0"),
            "/etc/b.toml:6: pool.percentage is 0: must be from 1 to 100",
        ),
        (
            pool("create_namespaces = true\npercentage = 101"),
            "/etc/b.toml:6: pool.percentage is 101: must be from 1 to 100",
        ),
        (pool("percentage = 50"), "/etc/b.toml:5: pool.percentage is 50: must be left out unless"),
        (
            pool("spare_devices = [\"/b\"]"),
            "/etc/b.toml:5: pool.spare_devices is 1: must be left out for a pool in persistent",
        ),
        (
            pool("") + &pool("").replace("\"a\"", "\"b\""),
            "/etc/b.toml:8: pool.region is 0x1f: must be another region",
        ),
        (
            file("create_namespaces = true"),
            "/etc/b.toml:4: pool.create_namespaces is true: must be false unless kind is pmem",
        ),
        (file("region = \"0x1f\""), "/etc/b.toml:4: pool.region is 0x1f: must be left out unless"),
    ] {
        let error = parse(&text).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{text}\n{error}\n{expected}");
    }
}

#[test]
fn each_wrong_value_is_refused_with_file_line_key_value_and_what_is_allowed() {
    let long = format!("\ncontrol_socket = \"/{}\"", "x".repeat(107));
    let pool = |rest: &str| format!("[[pool]]\nname = \"a\"\npath = \"/a\"\n{rest}");
    let two = "[[pool]]\nname = \"a\"\npath = \"/a\"\n[[pool]]\nname = \"b\"\npath = \"/a\"";
    let same = "[[pool]]\nname = \"a\"\npath = \"/a\"\n[[pool]]\nname = \"a\"\npath = \"/b\"";
    let cases: Vec<(String, &str)> = vec![
        ("runtime_dir = \"run\"".into(), "/etc/b.toml:1: runtime_dir is run: must be an absolute"),
        (long, "/etc/b.toml:2: control_socket is /xxx"),
        ("stop_timeout = \"0s\"".into(), "/etc/b.toml:1: stop_timeout is 0s: must be a time from"),
        ("stop_timeout = \"soon\"".into(), "/etc/b.toml:1: stop_timeout is soon: must be a time"),
        ("default_pool = \"x\"".into(), "/etc/b.toml:1: default_pool is x: must be the name of"),
        ("[log]\nformat = \"xml\"".into(), "/etc/b.toml:2: log.format is xml: must be text or"),
        ("[log]\nlevel = \"a=b=c\"".into(), "/etc/b.toml:2: log.level is a=b=c: must be error,"),
        ("[metrics]\naddress = \"x\"".into(), "/etc/b.toml:2: metrics.address is x: must be HOST"),
        ("[workers]\ncount = -1".into(), "/etc/b.toml:2: workers.count is -1: must be from 1 to"),
        (
            "[workers]\nbuffer_size = 1".into(),
            "/etc/b.toml:2: workers.buffer_size is 1: must be a size from 4M to 1G",
        ),
        (
            "[nbd]\nmax_requests = 0".into(),
            "/etc/b.toml:2: nbd.max_requests is 0: must be from 1 to 1024",
        ),
        (
            "[[nbd.listener]]\nunix = \"/a\"\n\n[[nbd.listener]]\ntcp = \"nowhere\"".into(),
            "/etc/b.toml:5: nbd.listener.tcp is nowhere: must be HOST:PORT",
        ),
        (
            "[[nbd.listener]]\ntls = \"off\"".into(),
            "/etc/b.toml:1: nbd.listener.unix is \"\": must be given",
        ),
        (
            "[[nbd.listener]]\nunix = \"/a\"\nmode = \"1777\"".into(),
            "/etc/b.toml:3: nbd.listener.mode is 1777: must be permission bits",
        ),
        (
            "[[nbd.listener]]\nunix = \"/a\"\ntls = \"required\"".into(),
            "/etc/b.toml:3: nbd.listener.tls is required: must be off, as",
        ),
        (
            "[nbd.tls]\ncertificate = \"/a\"".into(),
            "/etc/b.toml:1: nbd.tls.key is \"\": must be a file",
        ),
        ("[[pool]]\nname = \"a/b\"".into(), "/etc/b.toml:2: pool.name is a/b: must be 1 to 128"),
        ("[[pool]]\nname = \"a\"".into(), "/etc/b.toml:1: pool.path is \"\": must be an absolute"),
        (pool("size = \"10GB\""), "/etc/b.toml:4: pool.size is 10GB: must be a size"),
        (pool("size = \"100%\""), "/etc/b.toml:4: pool.size is 100%: must be from 1% to 99%"),
        (pool("size = -1"), "/etc/b.toml:4: pool.size is -1: must be a size"),
        (pool("kind = \"tape\""), "/etc/b.toml:4: pool.kind is tape: must be auto, file,"),
        (pool("extent_size = \"96K\""), "/etc/b.toml:4: pool.extent_size is 96K: must be a power"),
        (pool("extent_size = \"2M\""), "/etc/b.toml:4: pool.extent_size is 2M: must be a size"),
        (pool("devices = [\"/b\"]"), "/etc/b.toml:3: pool.path is /a: must be left out"),
        (pool("spare_devices = [\"b\"]"), "/etc/b.toml:4: pool.spare_devices is b: must be an abs"),
        (pool("spare_devices = [\"/a\"]"), "/etc/b.toml:3: pool.path is /a: must be another path"),
        (two.into(), "/etc/b.toml:6: pool.path is /a: must be another path"),
        (same.into(), "/etc/b.toml:5: pool.name is a: must be another name"),
        (
            "[[pool]]\nname = \"a\"\nkind = \"memory\"".into(),
            "/etc/b.toml:1: pool.size is 0: must be more than 0",
        ),
    ];
    for (text, expected) in cases {
        let error = parse(&text).unwrap_err();
        assert!(error.to_string().starts_with(expected), "{text}\n{error}\n{expected}");
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
}

#[test]
fn each_wrong_limit_of_connections_is_refused_with_file_line_key_value_and_what_is_allowed() {
    for (text, expected) in [
        (
            "[nbd]\nreceive_timeout = \"0s\"",
            "/etc/b.toml:2: nbd.receive_timeout is 0s: must be a time from 1s to 3600s",
        ),
        (
            "[nbd]\nidle_timeout = \"8days\"",
            "/etc/b.toml:2: nbd.idle_timeout is 8days: must be a time from 0s to 604800s",
        ),
        (
            "[nbd]\nmax_connections = 65537",
            "/etc/b.toml:2: nbd.max_connections is 65537: must be from 1 to 65536",
        ),
        (
            "[nbd]\nmax_connections_per_peer = 0",
            "/etc/b.toml:2: nbd.max_connections_per_peer is 0: must be from 1 to 65536",
        ),
    ] {
        let error = parse(text).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{text}\n{error}\n{expected}");
    }
}

#[test]
fn each_wrong_space_policy_is_refused_with_file_line_key_value_and_what_is_allowed() {
    let seconds =
        "must be seconds of writing like 20s, a part of the pool like 5%, a size like 10G";
    let not_less = "must be less than low, which is";
    let cases = [
        ("low = \"soon\"", format!("5: pool.space.low is soon: {seconds}")),
        ("low = \"0s\"", format!("5: pool.space.low is 0s: {seconds}")),
        ("low = \"101%\"", format!("5: pool.space.low is 101%: {seconds}")),
        ("low = \"off\"", format!("5: pool.space.low is off: {seconds}")),
        ("very_low = \"-1\"", format!("5: pool.space.very_low is -1: {seconds}")),
        ("very_low = \"20s\"", format!("5: pool.space.very_low is 20s: {not_less} 20s")),
        (
            "low = \"5%\"\nvery_low = \"6%\"",
            format!("6: pool.space.very_low is 6%: {not_less} 5%, and in the same unit"),
        ),
        ("low = \"10G\"", format!("4: pool.space.very_low is 5s: {not_less} 10G")),
        ("quantum = 0", "5: pool.space.quantum is 0: must be a size from 64K to 64G".into()),
        ("quantum = \"65G\"", "5: pool.space.quantum is 65G: must be a size from 64K".into()),
        ("quantum = -1", "5: pool.space.quantum is -1: must be a size from 64K to 64G".into()),
        ("fold_rate = \"65G\"", "5: pool.space.fold_rate is 65G: must be a size from 0 to".into()),
        (
            "fold_rate = \"1023K\"",
            "5: pool.space.fold_rate is 1023K: must be 0 for no folds".into(),
        ),
        (
            "overprovision_ratio = \"0.99\"",
            "5: pool.space.overprovision_ratio is 0.99: must be a ratio from 1.0 to 1000".into(),
        ),
        (
            "overprovision_ratio = \"200%\"",
            "5: pool.space.overprovision_ratio is 200%: must be a ratio".into(),
        ),
        ("grow_limit = -1", "5: pool.space.grow_limit is -1: must be a size in bytes".into()),
        ("grow_step = \"x\"", "5: pool.space.grow_step is x: must be a size in bytes".into()),
        ("hook = \"h\"", "5: pool.space.hook is h: must be an absolute path".into()),
        (
            "hook = \"/no/such\"",
            "5: pool.space.hook is /no/such: must be a program that can be run: examine".into(),
        ),
        (
            "hook = \"/proc/self/status\"",
            "5: pool.space.hook is /proc/self/status: must be a program that can be run: \
             /proc/self/status is not executable"
                .into(),
        ),
        ("hook_timeout = \"0s\"", "5: pool.space.hook_timeout is 0s: must be a time from".into()),
        ("marks = 1", "5: unknown field `marks`, expected one of".into()),
    ];
    for (lines, expected) in cases {
        let text = format!("[[pool]]\nname = \"a\"\npath = \"/a\"\n[pool.space]\n{lines}");
        let error = parse(&text).unwrap_err().to_string();
        assert!(error.starts_with(&format!("/etc/b.toml:{expected}")), "{text}\n{error}");
    }
}

#[test]
fn a_space_policy_has_all_its_settings_in_one_place() {
    let text = "[[pool]]\nname = \"a\"\npath = \"/a\"\nread_cache = \"256M\"\n\
                [pool.extend]\nsocket = \"/run/s\"\n\
                [pool.space]\nlow = \"10%\"\nvery_low = \"2%\"\nquantum = \"32M\"\nfold_rate = 0\n\
                overprovision_ratio = \"1.5\"\ngrow_limit = \"1T\"\ngrow_step = \"1G\"\n\
                hook = \"/bin/sh\"\nhook_timeout = \"90s\"";
    let pool = parse(text).unwrap().pools.remove(0);
    assert_eq!(pool.extend_socket.as_deref(), Some(Path::new("/run/s")));
    let expected = SpaceConfig {
        marks: Some(Marks { low: Mark::Percent(10), very_low: Mark::Percent(2) }),
        quantum: 32 << 20,
        fold_rate: 0,
        read_cache: 256 << 20,
        overprovision_percent: Some(150),
        grow_limit: 1 << 40,
        grow_step: 1 << 30,
        hook: Some(PathBuf::from("/bin/sh")),
        hook_timeout: Duration::from_secs(90),
    };
    assert_eq!(pool.space, expected);
    let none = parse("[[pool]]\nname = \"a\"\npath = \"/a\"").unwrap().pools.remove(0);
    assert_eq!((none.space, none.extend_socket), (SpaceConfig::default(), None));
}

#[test]
fn a_wrong_read_cache_is_refused_with_what_is_allowed() {
    for (kind, value, allowed) in [
        ("file", "\"65G\"", "65G: must be a size from 0 to"),
        ("file", "\"1M\"", "1M: must be 0 for no cache, or a size from 16M to 64G"),
        ("file", "-1", "-1: must be a size from 0 to"),
        ("pmem", "\"64M\"", "64M: must be 0 for a pool in memory"),
    ] {
        let text = format!(
            "[[pool]]\nname = \"a\"\npath = \"/a\"\nkind = \"{kind}\"\nread_cache = {value}"
        );
        let error = parse(&text).unwrap_err().to_string();
        let expected = format!("/etc/b.toml:5: pool.read_cache is {allowed}");
        assert!(error.starts_with(&expected), "{text}\n{error}");
    }
}

#[test]
fn an_invalid_configuration_is_refused_with_file_and_line() {
    let cases = [
        ("\nx = 1", "/etc/b.toml:2: unknown field `x`, expected one of"),
        ("[pool]\n", "/etc/b.toml:1: "),
        ("[log]\nlevels = \"x\"", "/etc/b.toml:2: unknown field `levels`"),
        ("[workers]\ncount = \"x\"", "/etc/b.toml:2: count: invalid type: string \"x\", expected"),
        ("a = = 1", "/etc/b.toml:1: "),
        ("runtime_dir = \"/a", "/etc/b.toml:1: "),
        ("\0\u{1}", "/etc/b.toml:1: "),
    ];
    for (text, expected) in cases {
        let error = parse(text).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{text:?}\n{error}\n{expected}");
        assert!(!error.contains('\n'), "{error:?}");
    }
}

#[test]
fn the_shown_configuration_can_be_read_again() {
    let places = Places::of_root();
    let file = parse::complete(&example_with_options(), None, &places).unwrap();
    let again = parse::complete(&toml::to_string(&file).unwrap(), None, &places).unwrap();
    assert_eq!(again, file);
}
