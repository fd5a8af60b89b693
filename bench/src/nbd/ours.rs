//! Starts blockd and sets up its volumes, by its configuration and its command line.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::claims::Medium;
use super::server::{Image, Kind, Server, spawn};

/// The volume.
pub(super) const VOLUME: &str = "bench";

/// The pool's own space, beyond the volume's size: a 32nd for granted but unused extents, and
/// metadata.
const POOL_EXTRA: u64 = 256 << 20;

/// Bytes of the file for a volume of this size.
#[must_use]
pub(super) fn pool_bytes(size: u64) -> u64 {
    size + size / 32 + POOL_EXTRA
}

/// Starts the daemon on the image's file with one volume of the image's size.
pub(super) fn start(image: &Image, blockd: &Path) -> Result<Server> {
    let mut server = start_empty(image, blockd, None)?;
    server.uri = add(image, blockd)?;
    Ok(server)
}

/// Starts the daemon on the image's file without a volume. Without `workers` it has as many
/// as by default.
pub(crate) fn start_empty(image: &Image, blockd: &Path, workers: Option<u32>) -> Result<Server> {
    fs::create_dir_all(&image.folder)?;
    let file = image.folder.join("blockd.toml");
    let workers = workers.map(|count| format!("\n[workers]\ncount = {count}\n"));
    fs::write(&file, configuration(image) + &workers.unwrap_or_default())?;
    let mut command = Command::new(blockd);
    command.arg("serve").arg("--config").arg(&file);
    let child = spawn(&mut command, &image.folder)?;
    let uri = super::server::uri("", &nbd(image));
    let mut server = Server::new(Kind::Blockd, child, uri, &image.folder);
    server.await_socket(&nbd(image))?;
    server.await_socket(&control(image))?;
    Ok(server)
}

/// Makes the volume; the address of its export.
pub(super) fn add(image: &Image, blockd: &Path) -> Result<String> {
    add_volume(image, blockd, VOLUME, image.size)
}

/// Makes a volume of this name and size; the address of its export.
pub(crate) fn add_volume(image: &Image, blockd: &Path, name: &str, size: u64) -> Result<String> {
    let size = size.to_string();
    let answer = ask(image, blockd, &["add", "--size", &size, "--nbd", name, "--json"])?;
    let answer: Value = serde_json::from_str(&answer).context("blockd add --json")?;
    Ok(answer["uri"].as_str().context("blockd add: no uri")?.to_owned())
}

/// Takes a snapshot of this name of a volume.
pub(super) fn snapshot(image: &Image, blockd: &Path, volume: &str, name: &str) -> Result<()> {
    ask(image, blockd, &["snapshot", &format!("{volume}={name}")]).map(|_| ())
}

/// Returns the number of composite entries of the pool.
pub(super) fn composite_entries(image: &Image, blockd: &Path) -> Result<u64> {
    let answer = ask(image, blockd, &["pool", "show", "bench", "--json"])?;
    let answer: Value = serde_json::from_str(&answer).context("blockd pool show --json")?;
    let entries = answer["pool"]["folds"]["composite_entries"].as_u64();
    entries.context("blockd pool show: no composite_entries")
}

pub(super) fn ask(image: &Image, blockd: &Path, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new(blockd);
    command.args(arguments).arg("--socket").arg(control(image));
    let output = command.output().context("start blockd")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "blockd {}: {errors}", arguments.join(" "));
    Ok(String::from_utf8(output.stdout)?)
}

fn nbd(image: &Image) -> PathBuf {
    image.folder.join("run").join("nbd.sock")
}

fn control(image: &Image) -> PathBuf {
    image.folder.join("run").join("control.sock")
}

fn configuration(image: &Image) -> String {
    let folder = image.folder.display();
    let size = pool_bytes(image.size) + image.snapshots;
    let file = image.file.display();
    let device = match image.medium {
        Medium::Memory => "kind = \"memory\"\n".to_owned(),
        Medium::Pmem => format!("kind = \"pmem\"\npath = \"{file}\"\n"),
        Medium::PmemTorn => {
            format!("kind = \"pmem\"\npath = \"{file}\"\natomicity = \"none\"\n")
        }
        Medium::Tmpfs | Medium::Disk => {
            let direct = image.medium == Medium::Disk;
            format!(
                "kind = \"file\"\npath = \"{file}\"\npreallocate = true\ndirect = {direct}\n\
                 volatile = true\n"
            )
        }
    };
    format!(
        "runtime_dir = \"{folder}/run\"\nstate_dir = \"{folder}/state\"\n\n[log]\nlevel = \
         \"warn\"\n\n[[pool]]\nname = \"bench\"\nsize = {size}\n{device}"
    )
}
