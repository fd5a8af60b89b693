//! `cargo ci demo`: a real file system in a thin volume, a daemon killed while it is written, and
//! every byte of every file compared afterwards. Then snapshots: the differences between two of
//! them, a clone, a backup, a rollback, each image by its checksum.

mod files;
mod snapshots;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use blockd_testkit::daemon::{Daemon, Settings};

use crate::{command, setup};
use blockd_testkit::clock::Clock;

/// The size of the volume that clients see.
const VOLUME_SIZE: &str = "10G";

/// The pool's file, sparse. Far less than the volume's size.
const POOL_SIZE: u64 = 2 << 30;

/// The daemon is killed once so much of the image has arrived, in percent.
const KILL_AT_PERCENT: u64 = 25;

/// Attempts, since an import may end before the demo sees it running.
const MAX_ATTEMPTS: u32 = 5;

/// Time between two checks of the import's progress.
const LOOK: Duration = Duration::from_millis(5);

/// How long an import may take on a slow machine.
const IMPORT_LIMIT: Duration = Duration::from_secs(300);

/// The result of the demo.
struct Verdict {
    files: u64,
    bytes: u64,
    differ: u64,
}

/// Runs the demo; true when nothing differs.
///
/// # Errors
/// Which step could not be done. Whatever was started and made is gone then, too.
pub(crate) fn run(root: &Path) -> Result<bool> {
    let watch = Clock::start();
    let step = |text: &str| println!("\n[{:5.1} s] {text}", watch.elapsed().as_secs_f64());
    step(
        "requirements of the demo: libclang to build; mke2fs, e2fsck and debugfs to make a file \
         system \
         and to look into it",
    );
    setup::ensure(&setup::DEMO)?;
    step("compiling blockd: minutes the first time, and seconds afterwards");
    let settings =
        Settings { program: Some(build(root)?), pool_size: POOL_SIZE, ..Settings::default() };
    let mut daemon = Daemon::new("demo", &settings)?;
    let folder = daemon.folder().to_path_buf();
    println!("  everything is made in {}", folder.display());

    step("starting a daemon on a pool of 2 GiB in a sparse file");
    daemon.start()?;

    step("making an ext4 image of 10 GiB with files of this machine");
    let originals = folder.join("originals");
    let kept = files::gather(&originals)?;
    println!("  {} files, {} MiB", kept.count, kept.bytes >> 20);
    let image = folder.join("image");
    make_image(&originals, &image)?;

    step("adding a thin volume of 10 GiB, and writing the image into it");
    println!("$ blockd add --size {VOLUME_SIZE} demo");
    show(&daemon, &["add", "--size", VOLUME_SIZE, "demo"])?;
    println!("$ blockd import image demo --overwrite     (and kill -9 of the daemon meanwhile)");
    import_and_kill(&mut daemon, &image)?;

    step("the pool and the volume now");
    show(&daemon, &["pool", "map", "--width", "64"])?;
    show(&daemon, &["show", "demo"])?;
    let pool_bytes = allocated(daemon.pool())?;
    println!(
        "\n  image {} MiB, of which {} MiB hold data; pool file {} MiB on disk",
        std::fs::metadata(&image)?.len() >> 20,
        allocated(&image)? >> 20,
        pool_bytes >> 20
    );

    step("stopping the daemon in order, starting it again, and exporting the volume");
    stop(&mut daemon)?;
    daemon.start()?;
    let exported = folder.join("exported");
    println!("$ blockd export demo exported");
    show(&daemon, &["export", "demo", text(&exported)?])?;

    step("checking the file system, and comparing every file with the original");
    let verdict = compare(&folder, &exported, &originals)?;
    let images = snapshots::run(&daemon, &folder, &root.join("docs"), step)?;
    stop(&mut daemon)?;
    drop(daemon);
    println!("\ndemo: {} files, {} bytes, {} differ", verdict.files, verdict.bytes, verdict.differ);
    println!("demo: {} images of snapshots and clones, {} differ", images.count, images.differ);
    Ok(verdict.differ == 0 && verdict.files > 0 && images.differ == 0)
}

/// Runs a command of the daemon; its output is shown.
fn show(daemon: &Daemon, words: &[&str]) -> Result<()> {
    command::run(&mut daemon.command(words)).with_context(|| daemon.last_words())
}

/// Runs a command of the daemon and returns its output.
fn quiet(daemon: &Daemon, words: &[&str]) -> Result<String> {
    command::output(&mut daemon.command(words))
}

/// Ends the daemon in order.
fn stop(daemon: &mut Daemon) -> Result<()> {
    let status = daemon.stop()?;
    ensure!(status.success(), "the daemon ended with {status}; {}", daemon.last_words());
    Ok(())
}

/// The daemon as a development build: it is compiled sooner than a release build, and `cargo ci`
/// has compiled some of its packages already.
fn build(root: &Path) -> Result<PathBuf> {
    let mut cargo = command::cargo(root);
    command::run(cargo.args(["build", "--package", "blockd", "--bin", "blockd"]))?;
    let binary = command::target_dir(root).join("debug/blockd");
    binary.canonicalize().with_context(|| format!("no binary at {}", binary.display()))
}

/// A sparse image; mke2fs fills it without mounting anything, so that no privilege is needed.
fn make_image(originals: &Path, image: &Path) -> Result<()> {
    let mut mke2fs = tool("mke2fs");
    mke2fs.args(["-q", "-t", "ext4", "-L", "demo", "-d"]).arg(originals);
    command::run(mke2fs.arg(image).arg(VOLUME_SIZE))?;
    println!("  {} MiB of it hold data", allocated(image)? >> 20);
    Ok(())
}

/// Kills the daemon in the middle of an import, which has to go on with the next daemon.
fn import_and_kill(daemon: &mut Daemon, image: &Path) -> Result<()> {
    for _ in 0..MAX_ATTEMPTS {
        let mut import = Running(
            daemon
                .command(&["import", text(image)?, "demo", "--overwrite"])
                .spawn()
                .context("starting the import")?,
        );
        if wait_for_share(daemon, &mut import, allocated(image)? * KILL_AT_PERCENT / 100)? {
            daemon.kill()?;
            println!("  the daemon is killed; the import waits");
            std::thread::sleep(Duration::from_millis(500));
            if import.0.try_wait()?.is_some() {
                bail!("the import ended although no daemon was there");
            }
            daemon.start()?;
            println!("  a new daemon runs; the import goes on");
            return import.success();
        }
        import.success()?;
        println!("  the import was done before the kill; once more, with an empty volume");
        quiet(daemon, &["del", "demo", "--force"])?;
        quiet(daemon, &["add", "--size", VOLUME_SIZE, "demo"])?;
    }
    bail!("the import was too fast to be interrupted, {MAX_ATTEMPTS} times")
}

/// Whether so much has arrived while the import still runs.
fn wait_for_share(daemon: &Daemon, import: &mut Running, share_bytes: u64) -> Result<bool> {
    let watch = Clock::start();
    while import.0.try_wait()?.is_none() {
        let shown = quiet(daemon, &["--json", "show", "demo"])?;
        let shown: serde_json::Value = serde_json::from_str(&shown)?;
        let mapped = shown["volume"]["mapped_bytes"].as_u64().context("no mapped_bytes")?;
        if mapped >= share_bytes {
            return Ok(import.0.try_wait()?.is_none());
        }
        if watch.elapsed() > IMPORT_LIMIT {
            bail!("the import takes longer than {IMPORT_LIMIT:?}");
        }
        std::thread::sleep(LOOK);
    }
    Ok(false)
}

/// The import. It must not outlive the demo.
struct Running(Child);

impl Running {
    fn success(&mut self) -> Result<()> {
        let watch = Clock::start();
        while watch.elapsed() < IMPORT_LIMIT {
            if let Some(status) = self.0.try_wait()? {
                if !status.success() {
                    bail!("the import failed: {status}");
                }
                return Ok(());
            }
            std::thread::sleep(LOOK);
        }
        bail!("the import does not end")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A missing file is fine.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn compare(folder: &Path, exported: &Path, originals: &Path) -> Result<Verdict> {
    let mut e2fsck = tool("e2fsck");
    command::run(e2fsck.args(["-f", "-n"]).arg(exported))?;
    let copies = folder.join("copies");
    std::fs::create_dir(&copies)?;
    // debugfs reads the file system without mounting it, without privileges.
    let mut debugfs = tool("debugfs");
    debugfs.args(["-R", &format!("rdump / {}", text(&copies)?)]).arg(exported);
    command::run(debugfs.stdin(Stdio::null()).stderr(Stdio::null()))?;
    let mut verdict = Verdict { files: 0, bytes: 0, differ: 0 };
    for relative in files::list(originals)? {
        let (original, copy) = (originals.join(&relative), copies.join(&relative));
        verdict.files += 1;
        match same(&original, &copy) {
            Ok((true, bytes)) => verdict.bytes += bytes,
            Ok((false, bytes)) => {
                verdict.bytes += bytes;
                verdict.differ += 1;
                println!("  differs: {}", relative.display());
            }
            Err(error) => {
                verdict.differ += 1;
                println!("  cannot be compared: {}: {error}", relative.display());
            }
        }
    }
    Ok(verdict)
}

/// Whether two files have the same bytes, and how many the first has.
fn same(one: &Path, other: &Path) -> std::io::Result<(bool, u64)> {
    let (one, other) = (std::fs::read(one)?, std::fs::read(other)?);
    Ok((one == other, one.len() as u64))
}

/// A program that an ordinary user's `PATH` may lack.
fn tool(program: &str) -> Command {
    let mut command = Command::new(program);
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/local/sbin:/usr/sbin:/sbin"));
    command
}

/// Bytes that a file takes on its file system.
fn allocated(path: &Path) -> Result<u64> {
    let metadata = std::fs::metadata(path)
        .with_context(|| format!("reading the metadata of {}", path.display()))?;
    Ok(metadata.blocks() * 512)
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("not UTF-8: {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differing_files_are_found() {
        let dir = std::env::temp_dir().join(format!("blockd-demo-test-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let paths = ["one", "same", "other"].map(|name| dir.join(name));
        for (path, bytes) in paths.iter().zip(["abc", "abc", "abd"]) {
            std::fs::write(path, bytes).unwrap();
        }
        assert_eq!(same(&paths[0], &paths[1]).unwrap(), (true, 3));
        assert_eq!(same(&paths[0], &paths[2]).unwrap(), (false, 3));
        assert!(same(&paths[0], &dir.join("missing")).is_err());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
