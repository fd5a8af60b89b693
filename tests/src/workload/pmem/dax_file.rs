//! A pool in a file of a file system with DAX, on a volume that is a namespace; and bad blocks of
//! the device below it. An access to one is a fault that the kernel answers with SIGBUS.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use blockd_testkit::daemon::{Daemon, Settings};

use super::direct;
use crate::workload::guest::shell;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
/// Bytes of the volume below, and of the pool's file.
const BELOW: u64 = 128 * MIB;
const POOL: u64 = 96 * MIB;
const FOLDER: &str = "/mnt/dax";
/// Bytes in front of the pool's own.
const HEADER: u64 = 2 * MIB;

/// Serves such a pool, before and after a block of it goes bad.
///
/// # Errors
/// When something is not as it has to be.
pub(super) fn check(direct: &Daemon) -> Result<String> {
    let device = direct::add(direct, "below", BELOW, &["--no-erase"])?;
    let below = device.display();
    shell(&format!("mkfs.ext4 -q -b 4096 {below}; mkdir -p {FOLDER}"))?;
    shell(&format!("mount -t ext4 -o dax {below} {FOLDER}"))?;
    let file = Path::new(FOLDER).join("pool");
    let settings = Settings {
        pool: Some(file.clone()),
        pool_size: POOL,
        pool_lines: "kind = \"pmem\"\n".to_owned(),
        ..Settings::default()
    };
    let mut daemon = Daemon::new("dax", &settings)?;
    daemon.start()?;
    let pool = &daemon.cli(&["pool", "show", "default"])?["pool"];
    ensure!(pool["durability"] == "power-safe", "a file with DAX: {pool}");
    daemon.cli(&["add", "--nbd", "--size", "8M", "v"])?;
    let content = |block: u64| block.to_le_bytes().repeat(512);
    let mut connection = daemon.connect("v")?;
    for block in 1..=16 {
        connection.write(block * BLOCK, &content(block))?;
    }
    drop(connection);
    ensure!(daemon.stop()?.success(), "{}", daemon.last_words());
    let bad = place(&file, &content(7))?;
    let sector = sector(&file, bad)?;
    let name = device.file_name().context("a device without a name")?.to_string_lossy();
    fs::write(format!("/sys/block/{name}/badblocks"), format!("{sector} 8"))
        .context("a block goes bad")?;
    daemon.start()?;
    let mut connection = daemon.connect("v")?;
    for block in 1..=16 {
        let read = connection.read(block * BLOCK, usize::try_from(BLOCK)?);
        match (block, read) {
            (7, Err(error)) => {
                let text = format!("{error:#}");
                // EIO, and the connection goes on.
                ensure!(text.ends_with(": error 5"), "a bad block: {text}");
            }
            (7, Ok(_)) => anyhow::bail!("a bad block was read"),
            (_, read) => ensure!(read? == content(block), "block {block} is another"),
        }
    }
    drop(connection);
    daemon.stop()?;
    shell(&format!("umount {FOLDER}"))?;
    direct.cli(&["del", "--pool", direct::POOL, "below"])?;
    Ok("EIO of a bad block below a file with DAX".to_owned())
}

/// Where in the file a block with this content is. The lane that it went through has another copy.
fn place(file: &Path, content: &[u8]) -> Result<u64> {
    let open = File::open(file)?;
    let mut page = vec![0; content.len()];
    for at in (HEADER..open.metadata()?.len()).step_by(usize::try_from(BLOCK)?) {
        open.read_exact_at(&mut page, at)?;
        if page == content {
            return Ok(at);
        }
    }
    anyhow::bail!("what was written is not in the file")
}

/// The device's sector at which this byte of a file is.
fn sector(file: &Path, at: u64) -> Result<u64> {
    let (block, blocks) = (at / BLOCK, |text: &str| text.trim().parse::<u64>().ok());
    let text = shell(&format!("filefrag -v -b4096 {}", file.display()))?;
    for line in text.lines() {
        // "   0:        0..   24575:      34816..     59391:  24576:             last,eof"
        let fields: Vec<&str> = line.split([':', '.']).filter(|part| !part.is_empty()).collect();
        if let [_, first, last, physical, ..] = fields.as_slice()
            && let (Some(first), Some(last), Some(physical)) =
                (blocks(first), blocks(last), blocks(physical))
            && (first..=last).contains(&block)
        {
            return Ok((physical + block - first) * (BLOCK / 512));
        }
    }
    anyhow::bail!("byte {at} is nowhere in {text}")
}
