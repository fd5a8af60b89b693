//! Runs commands, one after the other, against a daemon in folders of their own: those of a page,
//! or an operator's.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use blockd_testkit::folder::Folder;

use super::page::{Block, Language, Page, words};
use super::words::NOT_RUN;

/// The beginning of every session.
const BEGIN: &str = include_str!("session.sh");

/// Seconds for a session; the longest takes twenty on an idle machine.
const LIMIT_SECONDS: &str = "300";

/// Places that documents name, and those of a session.
const PLACES: [(&str, &str); 8] = [
    ("/srv/", "$PLACE/srv/"),
    ("/etc/blockd/", "$PLACE/"),
    ("/dev/sdb", "$PLACE/srv/fast.pool"),
    ("/dev/sdc", "$PLACE/srv/new.pool"),
    ("/dev/shm/", "$RUN/"),
    ("/run/blockd/", "$RUN/"),
    ("'nbd+unix:///", "\"nbd+unix:///"),
    ("nbd.sock'", "nbd.sock\""),
];

/// A session that has ended, and where its files were.
#[derive(Debug)]
pub(crate) struct Session {
    /// The output of its commands.
    pub(crate) output: String,
    /// The folder on a disk.
    pub(crate) place: PathBuf,
    /// The folder on a tmpfs.
    pub(crate) run: PathBuf,
}

/// Runs a script behind the beginning of every session, in a shell.
///
/// # Errors
/// When the shell ends with an error, which has the last lines of the session.
pub(crate) fn run_script(root: &Path, programs: &Path, script: &str) -> Result<Session> {
    let programs = programs.canonicalize().context("no programs")?;
    let folder = Folder::new("docs")?;
    // Delta rings have to be on a tmpfs.
    let runtime = Folder::below(Path::new("/dev/shm"), "docs")?;
    fs::create_dir(folder.path().join("state"))?;
    let file = folder.path().join("session.sh");
    fs::write(&file, format!("{BEGIN}{script}"))
        .with_context(|| format!("writing {}", file.display()))?;
    let log = folder.path().join("session.log");
    let printed = fs::File::create(&log)?;
    let mut bash = Command::new("timeout");
    bash.args([LIMIT_SECONDS, "bash"]).arg(&file).stdin(Stdio::null());
    bash.env("BLOCKD", programs.join("blockd")).env("BLOCKD_CSI", programs.join("blockd-csi"));
    bash.env("PLACE", folder.path()).env("RUN", runtime.path()).env("ROOT", root);
    let status =
        bash.stdout(printed.try_clone()?).stderr(printed).status().context("starting bash")?;
    if !status.success() {
        let (session, daemon) = (tail(&log), tail(&folder.path().join("daemon.log")));
        bail!("{status}\n{session}\nthe daemon's log:\n{daemon}");
    }
    let output = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
    Ok(Session { output, place: folder.path().into(), run: runtime.path().into() })
}

/// Runs the commands of a page and returns their number; a page without any starts no daemon.
///
/// # Errors
/// When a command fails; the error has the last lines of the session.
pub(super) fn run(root: &Path, programs: &Path, page: &Page) -> Result<usize> {
    let blocks = || page.blocks.iter().filter(|block| block.not_run.is_none());
    let count = blocks().flat_map(Block::commands).filter(|(_, line)| is_run(line)).count();
    let configurations = blocks().filter(|block| block.language == Language::Toml).count();
    if count + configurations == 0 {
        return Ok(0);
    }
    run_script(root, programs, &script(page)).with_context(|| page.path.clone())?;
    Ok(count + configurations)
}

/// The last lines of a file. One that can't be read is not shown: the error is reported anyway.
fn tail(path: &Path) -> String {
    let text = fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}

fn script(page: &Page) -> String {
    let mut script = String::new();
    let serves = |block: &Block| block.text.contains("blockd serve");
    if !page.blocks.iter().any(serves) {
        script.push_str("systemctl start blockd\n");
    }
    for block in page.blocks.iter().filter(|block| block.not_run.is_none()) {
        script.push_str(&format!(": {}:{}\n", page.path, block.line));
        if !block.first.is_empty() {
            script.push_str(&format!("{}\n", placed(&block.first)));
        }
        if block.language == Language::Toml {
            let text = &block.text;
            script.push_str(&format!("cat >part.toml <<'END'\n{text}END\n"));
            script.push_str("blockd config check --config part.toml\n");
        }
        for (_, line) in block.commands().iter().filter(|(_, line)| is_run(line)) {
            script.push_str(&format!("{}\n", placed(line)));
        }
    }
    script.push_str("systemctl stop blockd\n");
    script
}

/// Whether a session runs a line: each of its programs can be run anywhere.
fn is_run(line: &str) -> bool {
    let programs = words(line);
    !programs.iter().any(|words| NOT_RUN.iter().any(|(program, _)| words[0] == *program))
}

fn placed(line: &str) -> String {
    PLACES.iter().fold(line.to_owned(), |line, (place, ours)| line.replace(place, ours))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_has_the_commands_of_a_page_at_places_of_its_own() {
        let text = "<!-- run first: blockd add --size 1G db -->\n```sh\nmount /dev/x /mnt\n\
                    blockd pool check /srv/fast.pool   # all of it\n```\n\
                    <!-- not run: no disk -->\n```sh\nls\n```\n";
        let page = Page::read("A.md", text).unwrap();
        assert_eq!(
            script(&page),
            "systemctl start blockd\n: A.md:3\nblockd add --size 1G db\n\
             blockd pool check $PLACE/srv/fast.pool   # all of it\nsystemctl stop blockd\n"
        );
    }

    #[test]
    fn a_page_that_starts_the_daemon_finds_none() {
        let page = Page::read("A.md", "```console\n$ target/release/blockd serve\n```\n").unwrap();
        assert!(!script(&page).contains("\nsystemctl start blockd\n"));
    }
}
