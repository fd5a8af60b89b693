//! The README's walk-through, run as it stands there.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use cli_support::Daemon;

/// The commands of a section, as one script for each fenced block.
fn blocks(section: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut inside = false;
    for line in section.lines() {
        if line.starts_with("```") {
            inside = line == "```sh";
            if inside {
                blocks.push(String::new());
            }
        } else if inside {
            let block: &mut String = blocks.last_mut().unwrap();
            block.push_str(line);
            block.push('\n');
        }
    }
    blocks
}

#[test]
fn the_walk_through_works() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let readme = fs::read_to_string(root.join("README.md")).unwrap();
    let section = readme.split("\n## ").find(|part| part.starts_with("From nothing")).unwrap();
    let blocks = blocks(section);
    // The first block builds and starts the daemon. The one started here has folders of its own.
    assert!(blocks[0].ends_with("target/release/blockd serve\n") && blocks.len() > 2);
    let daemon = Daemon::start("8G");
    let place = daemon.dir.join("clone");
    fs::create_dir_all(place.join("target/release")).unwrap();
    symlink(env!("CARGO_BIN_EXE_blockd"), place.join("target/release/blockd")).unwrap();
    symlink(root.join("docs").canonicalize().unwrap(), place.join("docs")).unwrap();
    let script = format!("set -ex\n{}", blocks[1..].concat());
    let path = std::env::var("PATH").unwrap_or_default();
    let output = Command::new("bash")
        .args(["-c", &script])
        .current_dir(&place)
        .env("BLOCKD_SOCKET", daemon.socket())
        .env("PATH", format!("{path}:/usr/sbin:/sbin"))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let (said, errors) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}{errors}{}", daemon.log());
    assert!(said.contains("volume example"), "{said}");
    assert_eq!(daemon.json(&["list"])["volumes"].as_array().unwrap().len(), 0);
}

#[test]
fn the_first_two_commands_are_the_demo_and_the_tests() {
    let readme =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md")).unwrap();
    let blocks = blocks(&readme);
    assert_eq!(blocks[..2], ["cargo ci demo\n", "cargo ci test\n"]);
}
