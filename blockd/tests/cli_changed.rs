//! Bytes that count as changed after random writes to a volume with a snapshot, as `blockd diff`
//! lists them and as an incremental backup holds them: those of the blocks that were written.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;

use blockd_nbd::client::Client;
use cli_support::{Daemon, connect, pattern};
use serde_json::Value;

const MIB: usize = 1 << 20;
const SIZE: usize = 64 * MIB;
const BLOCK: usize = 4096;
const SECTOR: usize = 512;

/// A daemon with a volume `data` of blocks of 512 bytes, full of data.
fn filled() -> (Daemon, Client) {
    let daemon = Daemon::start("1G");
    daemon.ok(&["add", "data", "--size", "64M", "--block-size", "512"]);
    let mut client = connect(&daemon, "data");
    let bytes = pattern(MIB, 1);
    for at in (0..SIZE).step_by(MIB) {
        client.write(at as u64, &bytes, false).unwrap();
    }
    (daemon, client)
}

/// Writes that many times at random places, and adds the blocks that they touch.
fn write_at_random(
    client: &mut Client,
    (len, align): (usize, usize),
    count: usize,
    touched: &mut BTreeSet<usize>,
) {
    let mut random = fastrand::Rng::with_seed((len + align) as u64);
    for number in 0..count {
        let at = random.usize(..(SIZE - len) / align + 1) * align;
        client.write(at as u64, &pattern(len, number as u64), false).unwrap();
        touched.extend(at / BLOCK..(at + len).div_ceil(BLOCK));
    }
    client.flush().unwrap();
}

#[track_caller]
fn number(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap()).unwrap()
}

/// The blocks that `blockd diff --json` lists, all of them whole, and the bytes of data on its last
/// line.
#[track_caller]
fn listed(daemon: &Daemon, volume: &str, since: &str) -> (BTreeSet<usize>, usize) {
    let said = daemon.ok(&["diff", volume, "--since", since, "--json"]);
    let lines: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (sums, ranges) = lines.split_last().unwrap();
    let mut blocks = BTreeSet::new();
    for range in ranges {
        let (at, len) = (number(&range["offset_bytes"]), number(&range["length_bytes"]));
        assert!(at % BLOCK == 0 && len % BLOCK == 0 && range["state"] == "data", "{range}");
        blocks.extend(at / BLOCK..(at + len) / BLOCK);
    }
    assert_eq!(number(&sums["zero_bytes"]), 0);
    (blocks, number(&sums["data_bytes"]))
}

#[test]
fn diff_lists_exactly_the_blocks_that_were_written() {
    let (daemon, mut client) = filled();
    daemon.ok(&["snapshot", "data", "--tag", "one"]);
    let mut touched = BTreeSet::new();
    write_at_random(&mut client, (BLOCK, BLOCK), 200, &mut touched);
    write_at_random(&mut client, (SECTOR, SECTOR), 60, &mut touched);
    // Two blocks, most of them.
    write_at_random(&mut client, (BLOCK, SECTOR), 20, &mut touched);
    let expected = (touched.clone(), touched.len() * BLOCK);
    assert_eq!(listed(&daemon, "data", "data@one"), expected);
    daemon.ok(&["snapshot", "data", "--tag", "two"]);
    assert_eq!(listed(&daemon, "data@two", "data@one"), expected);
    // The overlays are shared by now: a write copies the blocks of the one that it replaces, and
    // they are listed too.
    let mut later = BTreeSet::new();
    write_at_random(&mut client, (2 * SECTOR, SECTOR), 100, &mut later);
    let all = touched.union(&later).copied().collect::<BTreeSet<_>>();
    assert_eq!(listed(&daemon, "data", "data@one"), (all.clone(), all.len() * BLOCK));
    let (found, bytes) = listed(&daemon, "data", "data@two");
    assert!(found.is_superset(&later) && found.is_subset(&all), "{found:?}");
    assert_eq!(bytes, found.len() * BLOCK);
}

#[test]
fn an_incremental_backup_has_little_more_than_the_blocks_that_were_written() {
    let (daemon, mut client) = filled();
    daemon.ok(&["snapshot", "data", "--tag", "one"]);
    daemon.ok(&["export", "data@one", "one.blkd", "--format", "backup"]);
    let mut touched = BTreeSet::new();
    write_at_random(&mut client, (BLOCK, BLOCK), 200, &mut touched);
    daemon.ok(&["snapshot", "data", "--tag", "two"]);
    daemon.ok(&["export", "data@two", "two.blkd", "--since", "data@one"]);
    let file = fs::metadata(daemon.dir.join("two.blkd")).unwrap();
    let (len, on_disk) = (file.len(), file.blocks() * 512);
    println!("{} bytes changed, {len} in the file, {on_disk} on disk", touched.len() * BLOCK);
    assert!(len >= (touched.len() * BLOCK) as u64, "{len}");
    // 1.1 MiB.
    assert!(len.max(on_disk) * 10 <= 11 * MIB as u64, "{len} {on_disk}");
    for backup in ["one.blkd", "two.blkd"] {
        daemon.ok(&["import", backup, "copy", "--apply"]);
    }
    let images = ["data", "copy"].map(|volume| {
        daemon.ok(&["export", volume, "image", "--force"]);
        fs::read(daemon.dir.join("image")).unwrap()
    });
    assert!(images[0] == images[1], "the copy differs");
}
