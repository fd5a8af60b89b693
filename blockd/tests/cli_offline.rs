//! The binary as a user meets it, where no daemon is needed: help, documents, errors, exit codes.
#![expect(clippy::unwrap_used, reason = "a helper that fails fails its test")]

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use blockd_testkit::clock::Clock;

/// A run with nothing of the caller's surroundings.
fn blockd(arguments: &[&str]) -> Output {
    command(arguments).output().unwrap()
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_blockd"));
    command.args(arguments).stdin(Stdio::null()).env_remove("BLOCKD_SOCKET");
    command
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// The exit code and the one line on standard error.
fn failure(arguments: &[&str]) -> (i32, String) {
    let output = blockd(arguments);
    let line = text(&output.stderr);
    assert!(line.starts_with("blockd: error: ") && line.lines().count() == 1, "{line}");
    (output.status.code().unwrap(), line.trim_end()["blockd: error: ".len()..].to_owned())
}

fn temporary(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_file(&path);
    path
}

#[test]
fn the_document_is_what_help_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/CLI.md");
    let document = std::fs::read_to_string(path).unwrap();
    let output = blockd(&["man", "--markdown"]);
    assert!(
        document == text(&output.stdout),
        "docs/CLI.md is out of date: `cargo run -p blockd -- man --markdown > docs/CLI.md`"
    );
}

#[test]
fn help_is_there_for_every_verb_and_names_the_exit_codes() {
    let output = blockd(&["--help"]);
    let help = text(&output.stdout);
    assert!(output.status.success() && help.contains("Exit codes:\n    0  done"), "{help}");
    for verb in ["serve", "add", "import", "top"] {
        let output = blockd(&[verb, "--help"]);
        let help = text(&output.stdout);
        assert!(output.status.success() && help.contains("Example:"), "{help}");
    }
}

#[test]
fn manual_pages_are_written_for_every_verb() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("man");
    let output = blockd(&["man", "--dir", dir.to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    for page in ["blockd.1", "blockd-add.1", "blockd-pool-map.1"] {
        assert!(dir.join(page).is_file(), "{page}");
    }
    let main = blockd(&["man"]);
    assert!(text(&main.stdout).contains("Exit codes"));
}

#[test]
fn completions_know_the_verbs() {
    for shell in ["bash", "zsh", "fish"] {
        let script = blockd(&["completions", shell]);
        assert!(text(&script.stdout).contains("BLOCKD_COMPLETE"), "{shell}");
        // As the script asks, with the index of the word.
        let mut asked = command(&["--", "blockd", "expo"]);
        let output = asked.env("BLOCKD_COMPLETE", shell).env("_CLAP_COMPLETE_INDEX", "1").output();
        let candidates = output.unwrap().stdout;
        assert!(text(&candidates).starts_with("export"), "{shell}: {}", text(&candidates));
    }
}

#[test]
fn a_command_line_that_makes_no_sense_is_exit_code_2() {
    for arguments in [
        &["no-such-verb"][..],
        &["add", "data"],
        &["add", "--size"],
        &["list", "--timeout", "soon"],
        &["list", "--timeout", "5"],
        &["pool", "map", "--width", "0"],
        &["pool", "create", "p"],
    ] {
        assert_eq!(blockd(arguments).status.code(), Some(2), "{arguments:?}");
    }
}

#[test]
fn values_are_checked_before_the_daemon_is_asked() {
    let nowhere = ["--socket", "/nonexistent/socket"];
    for (arguments, line) in [
        (&["add", "data", "--size", "10X"][..], "size is 10X: must be a whole number"),
        (&["add", "data", "--size", "8E"], "size is 8E: must be"),
        (&["add", "data", "--size", "1.5G"], "size is 1.5G: must be"),
        (
            &["add", "data", "--size", "1G", "--block-size", "1000"],
            "block-size is 1000: must be 512, 1024, 2048 or 4096",
        ),
        (&["resize", "data", "--size", "-1"], "size is -1: must be"),
        (
            &["pool", "create", "p", "--memory", "--size", "1G", "--extent-size", "2M"],
            "extent-size is 2M: must be a power of two from 64K to 1M",
        ),
        (&["import", "-", "data"], "size is missing: must be given as --size for standard input"),
        (&["import", "/proc", "data"], "FILE is /proc: must be a file"),
    ] {
        let (code, error) = failure(&[&nowhere, arguments].concat());
        assert_eq!(code, 3, "{error}");
        assert!(error.starts_with(line), "{error}");
    }
}

#[test]
fn an_image_that_is_not_there_is_named() {
    let (code, error) = failure(&["import", "/nonexistent.img", "data"]);
    assert_eq!(code, 4);
    assert!(error.starts_with("open /nonexistent.img: "), "{error}");
}

#[test]
fn a_missing_daemon_is_named_with_its_socket() {
    let (code, error) = failure(&["--socket", "/nonexistent/control.sock", "list"]);
    let expected = "/nonexistent/control.sock: no daemon answers there: start one with \
                    `blockd serve`";
    assert_eq!((code, error.as_str()), (8, expected));
    let from_environment =
        command(&["list"]).env("BLOCKD_SOCKET", "/nonexistent/control.sock").output().unwrap();
    assert_eq!(text(&from_environment.stderr).trim_end(), format!("blockd: error: {expected}"));
}

#[test]
fn a_path_that_is_no_socket_or_too_long_is_said_to_be() {
    let (code, error) = failure(&["--socket", "/etc/passwd", "list"]);
    assert_eq!((code, error.as_str()), (8, "/etc/passwd: is not a socket"));
    let long = format!("/{}", "x".repeat(200));
    let (code, error) = failure(&["--socket", &long, "list"]);
    assert_eq!(code, 3);
    assert!(error.ends_with("must be a path of 1 to 107 bytes"), "{error}");
}

#[test]
fn a_daemon_that_does_not_answer_is_given_up() {
    let path = temporary("silent.sock");
    let _silent = UnixListener::bind(&path).unwrap();
    let (code, error) =
        failure(&["--socket", path.to_str().unwrap(), "--timeout", "300ms", "list"]);
    assert_eq!(code, 8);
    assert!(error.ends_with("the daemon gave no answer within 300ms"), "{error}");
}

/// Answers each call with headers alone, and keeps the connection.
fn send_headers_alone(mut client: UnixStream) {
    const PREFACE: usize = 24;
    const HEADERS: u8 = 1;
    // A frame: its length, kind, flags and stream. `:status` 200, then the content type.
    let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    let mut headers = vec![0, 0, 19, HEADERS, 4, 0, 0, 0, 1, 0x88, 0x5f, 16];
    headers.extend(b"application/grpc");
    let mut frame = [0; 9];
    let _ = client.write_all(&settings).and_then(|()| client.read_exact(&mut [0; PREFACE]));
    while client.read_exact(&mut frame).is_ok() {
        let len = u32::from_be_bytes([0, frame[0], frame[1], frame[2]]);
        client.read_exact(&mut vec![0; len as usize]).unwrap();
        if frame[3] == HEADERS {
            client.write_all(&headers).unwrap();
        }
    }
}

#[test]
fn a_daemon_whose_answer_does_not_end_is_given_up() {
    let path = temporary("headers.sock");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            std::thread::spawn(move || send_headers_alone(client.unwrap()));
        }
    });
    let socket = path.to_str().unwrap();
    // One with a single answer, and one with a stream.
    for verb in [&["list"][..], &["diff", "v"]] {
        let arguments = [&["--socket", socket, "--timeout", "300ms"], verb].concat();
        let mut child = command(&arguments).stderr(Stdio::piped()).spawn().unwrap();
        let clock = Clock::start();
        while child.try_wait().unwrap().is_none() {
            if clock.elapsed() > Duration::from_secs(30) {
                child.kill().unwrap();
                panic!("{verb:?} goes on");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let output = child.wait_with_output().unwrap();
        let error = text(&output.stderr).trim_end();
        assert_eq!(output.status.code(), Some(8), "{error}");
        assert!(error.ends_with("the daemon gave no answer within 300ms"), "{error}");
    }
}

#[test]
fn errors_come_in_parts_with_json() {
    let output = blockd(&["--json", "add", "data", "--size", "0x10"]);
    assert_eq!(output.status.code(), Some(3));
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let error = &answer["error"];
    assert_eq!(error["code"], 3);
    assert_eq!(error["kind"], "invalid");
    assert_eq!(error["field"], "size");
    assert_eq!(error["value"], "0x10");
    assert!(error["allowed"].as_str().unwrap().starts_with("a whole number"));
    assert!(error["message"].as_str().unwrap().starts_with("size is 0x10"));
}

#[test]
fn a_configuration_is_checked_without_a_daemon() {
    let path = temporary("bad.toml");
    std::fs::write(&path, "no_such_key = 1\n").unwrap();
    let (code, error) = failure(&["config", "check", "--config", path.to_str().unwrap()]);
    assert!(code == 3 && error.contains("no_such_key"), "{code} {error}");
    // All mistakes at once, each in a line of its own.
    let two = "stop_timeout = \"never\"\n[log]\nlevel = \"inof\"\nno_such_key = 1\n";
    std::fs::write(&path, two).unwrap();
    let arguments = ["config", "check", "--config", path.to_str().unwrap()];
    let output = blockd(&arguments);
    let errors: Vec<&str> = text(&output.stderr).lines().collect();
    assert_eq!((output.status.code(), errors.len()), (Some(3), 3), "{errors:#?}");
    for (line, part) in
        [(":1: stop_timeout", "never"), (":3: log.level", "inof"), (":4", "no_such")]
    {
        let found = errors.iter().any(|error| error.contains(line) && error.contains(part));
        assert!(found, "{line}: {errors:#?}");
    }
    let output = blockd(&[&["--json"], &arguments[..]].concat());
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&answer["valid"], &answer["error"]["code"]), (&false.into(), &3.into()));
    assert_eq!(answer["errors"].as_array().unwrap().len(), 3);
    std::fs::write(&path, "").unwrap();
    let output = blockd(&["config", "check", "--config", path.to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn the_version_needs_no_daemon() {
    let output = blockd(&["--socket", "/nonexistent/control.sock", "--json", "version"]);
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["version"], env!("CARGO_PKG_VERSION"));
    assert!(answer["daemon"].is_null());
    // The same as `--version` prints, which names the commit of a release.
    let build = answer["build"].as_str().unwrap();
    let printed = blockd(&["--version"]);
    assert_eq!(text(&printed.stdout), format!("blockd {build}\n"));
    let rest = build.strip_prefix(env!("CARGO_PKG_VERSION")).unwrap();
    let commit = rest.strip_prefix(" (").and_then(|rest| rest.strip_suffix(')'));
    let is_commit =
        |text: &str| text.len() >= 9 && text.starts_with(|c: char| c.is_ascii_hexdigit());
    assert!(rest.is_empty() || commit.is_some_and(is_commit), "{build}");
}

#[test]
fn tools_for_pools_name_what_is_no_pool() {
    let empty = temporary("no.pool");
    std::fs::write(&empty, vec![0; 1 << 20]).unwrap();
    let path = empty.to_str().unwrap();
    let (code, error) = failure(&["pool", "check", path]);
    assert_eq!(code, 10, "{error}");
    assert!(error.contains("superblock"), "{error}");
    let (code, error) = failure(&["pool", "check", "/nonexistent.pool"]);
    assert_eq!((code, error.starts_with("open /nonexistent.pool: ")), (4, true), "{error}");
    let (code, error) = failure(&["pool", "check", "/proc"]);
    assert_eq!((code, error), (3, "PATH is /proc: must be a file or a block device".to_owned()));
}
