//! A boot storm: clones of one image that are read at the same time, each through a device of its
//! own. With the pool's read cache the disk is read about once.

use std::fs;
use std::path::Path;
use std::sync::Barrier;

use anyhow::{Context, Result, bail, ensure};
use blockd_testkit::daemon::{Daemon, Settings};
use fastrand::Rng;

use super::super::device::{Buffer, Device};
use super::super::{device_of, guest};

/// Readers, each of a clone of its own.
const READERS: usize = 20;
/// Bytes of a request, of the same seed.
const REQUEST: usize = 128 << 10;
/// Bytes of a sector in the kernel's counters.
const SECTOR: u64 = 512;
/// Percent of the image that may be read from the disk: pages of metadata as well.
const MOST_PERCENT: u64 = 110;
/// The pool's disk.
const DISK: &str = "vda";

/// Reads an image by all clones at once, without the cache and with it.
///
/// # Errors
/// When a byte differs, or the disk is read more than it may be.
pub(super) fn storm(mib: u64) -> Result<String> {
    let image = mib << 20;
    let without = read_from_disk(image, "")?;
    let with = read_from_disk(image, &format!("read_cache = \"{}M\"\n", 2 * mib))?;
    ensure!(
        with * 100 <= image * MOST_PERCENT,
        "{READERS} readers of {image} bytes read {with} from the disk with a cache"
    );
    // Else the cache shows nothing.
    ensure!(without > image * 2, "{without} bytes of {image} were read without a cache");
    let times = |bytes: u64| bytes as f64 / image as f64;
    Ok(format!(
        "{READERS} readers of {mib} MiB read {:.3} times of it from the disk, {:.1} without a cache",
        times(with),
        times(without)
    ))
}

/// Bytes that the disk was read for all readers.
fn read_from_disk(image: u64, pool_lines: &str) -> Result<u64> {
    let mut daemon = guest::start(Settings {
        pool: Some(Path::new("/dev").join(DISK)),
        // Requests without a copy read past the cache.
        tables: "[ublk]\nzero_copy = \"off\"\n".to_owned(),
        pool_lines: pool_lines.to_owned(),
        ..Settings::default()
    })?;
    let read = storm_of(&daemon, image).with_context(|| daemon.last_words())?;
    ensure!(daemon.stop()?.success(), "the daemon's end: {}", daemon.last_words());
    Ok(read)
}

fn storm_of(daemon: &Daemon, image: u64) -> Result<u64> {
    guest::add_device(daemon, "image", image)?;
    let device = Device::open(&device_of("image"))?;
    let mut buffer = Buffer::default();
    for at in (0..image).step_by(REQUEST) {
        Rng::with_seed(at).fill(buffer.of(REQUEST));
        device.write(at, &buffer)?;
    }
    device.flush()?;
    drop(device);
    daemon.cli(&["snapshot", "image=golden"])?;
    let readers = READERS.to_string();
    daemon.cli(&["clone", "golden", "--count", &readers, "--name-template", "vm-{}", "--ublk"])?;
    let before = sectors_read()?;
    let begin = Barrier::new(READERS);
    std::thread::scope(|scope| {
        let read = |number: usize| {
            let begin = &begin;
            scope.spawn(move || {
                let device = Device::open(&device_of(&format!("vm-{number}")));
                begin.wait();
                compare(&device?, image).with_context(|| format!("reader {number}"))
            })
        };
        let readers: Vec<_> = (1..=READERS).map(read).collect();
        readers
            .into_iter()
            .try_for_each(|reader| reader.join().unwrap_or_else(|_| bail!("a thread panicked")))
    })?;
    let read = (sectors_read()? - before) * SECTOR;
    for number in 1..=READERS {
        daemon.cli(&["del", "--force", &format!("vm-{number}")])?;
    }
    daemon.cli(&["del", "golden"])?;
    daemon.cli(&["del", "image"])?;
    Ok(read)
}

fn compare(device: &Device, image: u64) -> Result<()> {
    let (mut found, mut expected) = (Buffer::default(), vec![0; REQUEST]);
    for at in (0..image).step_by(REQUEST) {
        device.read(at, REQUEST, &mut found)?;
        Rng::with_seed(at).fill(&mut expected);
        ensure!(found.bytes() == expected, "the request at {at} has other bytes");
    }
    Ok(())
}

fn sectors_read() -> Result<u64> {
    let path = format!("/sys/block/{DISK}/stat");
    let text = fs::read_to_string(&path)?;
    let count = text.split_whitespace().nth(2).context("the third number")?;
    count.parse().with_context(|| format!("{path}: {text}"))
}
