//! Encrypted volumes: no plaintext on the media, wrong keys, clones, growth, new keys, and deaths
//! of the plugin while a header and a file system are made. Secrets are looked for in the words of
//! all processes as they run, and in the logs afterwards.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use blockd_csi::proto::volume_content_source::{SnapshotSource, Type, VolumeSource};
use blockd_csi::proto::{CreateSnapshotRequest, DeleteSnapshotRequest, VolumeContentSource};
use blockd_testkit::clock::Clock;
use memchr::memmem::{self, Finder};
use nix::fcntl::OFlag;
use tonic::Code;

use super::life::{self, Shape, Volume};
use super::node::{device_of, insist, mounted_from, total};
use crate::csi::rig::Rig;
use crate::csi::{Driver, refused};
use crate::workload::device::Buffer;
use crate::workload::guest;

const MIB: i64 = 1 << 20;

/// All keys begin with it, so that one search finds any.
const SECRET: &str = "secret-of-a-volume-";

/// Bytes that are written: a page with a text of its own, over and over.
const PAGE: usize = 4096;
const PAGES: usize = 256;

/// A call of `cryptsetup` with a key takes ten times as long, or more.
const LOOK_PAUSE: Duration = Duration::from_millis(20);

/// How much of the disk is read at once.
const READ_BYTES: usize = 4 << 20;

struct Encryption<'a> {
    rig: &'a mut Rig,
    driver: Driver,
    made: u32,
}

type Step = (&'static str, fn(&mut Encryption<'_>) -> Result<()>);

const STEPS: [Step; 5] = [
    ("plaintext on the media", |it| it.plaintext()),
    ("wrong keys, and clones with the key of their source", |it| it.clones()),
    ("growth with the key", |it| it.grow()),
    ("a new key", |it| it.rotate()),
    ("deaths while a volume is encrypted", |it| it.deaths()),
];

/// All steps, counted. Nothing is left after any.
///
/// # Errors
/// When one fails, or a secret is where others can read it.
pub(super) fn all(rig: &mut Rig) -> Result<usize> {
    let over = AtomicBool::new(false);
    let looks = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let watching = scope.spawn(|| watch(&over, &looks));
        let result = steps(rig);
        over.store(true, Ordering::Relaxed);
        let watched = watching.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?;
        result?;
        watched
    })?;
    let looks = looks.load(Ordering::Relaxed);
    println!("secrets: in no words of processes, in {looks} looks at words of cryptsetup");
    ensure!(looks > 0, "no cryptsetup was seen");
    for text in [rig.plugin.log(), rig.daemon.log()] {
        ensure!(!text.is_empty() && !text.contains(SECRET), "a secret is logged");
    }
    Ok(STEPS.len())
}

fn steps(rig: &mut Rig) -> Result<()> {
    let driver = rig.plugin.driver()?;
    let mut it = Encryption { rig, driver, made: 0 };
    for (name, step) in STEPS {
        let start = Clock::start();
        step(&mut it).with_context(|| format!("{name}; {}", it.rig.plugin.last_words()))?;
        life::nothing_left(it.rig, name)?;
        println!("{name}: ok, {:.1} s", start.elapsed().as_secs_f64());
    }
    Ok(())
}

/// Looks at the words and the environment of all processes but this one until it is over, and
/// counts those of `cryptsetup`.
fn watch(over: &AtomicBool, looks: &AtomicU64) -> Result<()> {
    while !over.load(Ordering::Relaxed) {
        for entry in fs::read_dir("/proc")?.flatten() {
            let is_process = entry.file_name().to_string_lossy().parse::<u32>();
            if is_process.is_err() || is_process == Ok(std::process::id()) {
                continue;
            }
            // It may have ended meanwhile.
            let Ok(words) = fs::read(entry.path().join("cmdline")) else { continue };
            let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
            if contains(&words, b"cryptsetup") {
                looks.fetch_add(1, Ordering::Relaxed);
            }
            let shown = String::from_utf8_lossy(&words).replace('\0', " ");
            ensure!(!contains(&words, SECRET.as_bytes()), "a secret is in the words: {shown}");
            let is_there = contains(&environment, SECRET.as_bytes());
            ensure!(!is_there, "a secret is in the environment of {shown}");
        }
        std::thread::sleep(LOOK_PAUSE);
    }
    Ok(())
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    memmem::find(bytes, part).is_some()
}

fn secrets(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|(name, key)| ((*name).to_owned(), format!("{SECRET}{key}"))).collect()
}

/// Gives a volume that is to be made encryption, with this key.
pub(super) fn encrypt(volume: &mut Volume, key: &str) {
    volume.parameters.insert("encryption".to_owned(), "luks2".to_owned());
    volume.secrets = secrets(&[("key", key)]);
}

/// Pages with a text.
fn pattern(text: &str) -> Vec<u8> {
    let mut page = text.as_bytes().to_vec();
    page.resize(PAGE, b'.');
    page.repeat(PAGES)
}

impl Encryption<'_> {
    /// A volume with this key; `None`: one that is not encrypted.
    fn volume(&mut self, shape: Shape, mib: i64, key: Option<&str>) -> Result<Volume> {
        self.made += 1;
        let name = format!("e{}", self.made);
        let mut volume = Volume::new(self.rig, &name, shape, mib * MIB)?;
        if let Some(key) = key {
            encrypt(&mut volume, key);
        }
        Ok(volume)
    }

    fn up(&mut self, shape: Shape, mib: i64, key: Option<&str>) -> Result<Volume> {
        let mut volume = self.volume(shape, mib, key)?;
        volume.create(&self.driver)?;
        self.publish(&volume)?;
        Ok(volume)
    }

    fn publish(&self, volume: &Volume) -> Result<()> {
        volume.stage(&self.driver)?;
        Ok(volume.publish(&self.driver, 0)?)
    }

    fn unpublish(&self, volume: &Volume) -> Result<()> {
        volume.unpublish(&self.driver, 0)?;
        Ok(volume.unstage(&self.driver)?)
    }

    fn delete(&self, volume: &Volume) -> Result<()> {
        volume.delete(&self.driver)?;
        volume.gone()
    }

    fn down(&self, volume: &Volume) -> Result<()> {
        self.unpublish(volume)?;
        self.delete(volume)
    }

    fn restart(&mut self) -> Result<()> {
        self.rig.plugin.start()?;
        self.driver = self.rig.plugin.driver()?;
        Ok(())
    }

    /// Three volumes, of which the one that is not encrypted shows that the search finds anything.
    fn plaintext(&mut self) -> Result<()> {
        let block = self.up(Shape::Block, 32, Some("block"))?;
        let hidden = self.up(Shape::Mount("ext4"), 64, Some("one"))?;
        let shown = self.up(Shape::Mount("ext4"), 64, None)?;
        let texts = [
            "PLAINTEXT-OF-THE-ENCRYPTED-VOLUME",
            "PLAINTEXT-OF-THE-OTHER-VOLUME",
            "PLAINTEXT-OF-THE-ENCRYPTED-DEVICE",
        ];
        let file = File::options().write(true).open(block.target(0))?;
        file.write_all_at(&pattern(texts[2]), 0)?;
        file.sync_all()?;
        drop(file);
        for (volume, text) in [&hidden, &shown].into_iter().zip(texts) {
            let path = volume.target(0).join("file");
            fs::write(&path, pattern(text))?;
            File::open(&path)?.sync_all()?;
        }
        guest::shell("sync")?;
        let device = mounted_from(&hidden.target(0))?;
        ensure!(device.starts_with("/dev/dm-"), "it is mounted from {device}");
        let bytes = guest::shell(&format!("blockdev --getsize64 {device}"))?;
        ensure!(bytes.trim() == (64 * MIB).to_string(), "the mapping has {bytes} bytes");
        let counts = on_media(&texts)?;
        println!(
            "media: pages of the encrypted volumes {} and {}, of the other {}",
            counts[0], counts[2], counts[1]
        );
        ensure!(counts[0] == 0, "plaintext of an encrypted volume is on the media");
        ensure!(counts[2] == 0, "plaintext of an encrypted device is on the media");
        ensure!(counts[1] >= PAGES, "{} of {PAGES} pages are found", counts[1]);
        ensure!(!hidden.stats(&self.driver, 0)?, "abnormal");
        // Restarts of plugin and daemon leave the mapping where it is.
        self.rig.plugin.kill()?;
        self.rig.daemon.kill()?;
        self.rig.daemon.start()?;
        self.restart()?;
        insist("staging again", || hidden.stage(&self.driver))?;
        insist("publishing again", || hidden.publish(&self.driver, 0))?;
        ensure!(mounted_from(&hidden.target(0))? == device, "it is mounted anew");
        ensure!(fs::read(hidden.target(0).join("file"))? == pattern(texts[0]), "other data");
        self.down(&hidden)?;
        self.down(&shown)?;
        self.block(&block, &pattern(texts[2]))
    }

    fn clones(&mut self) -> Result<()> {
        let source = self.up(Shape::Mount("xfs"), 320, Some("source"))?;
        let path = source.target(0).join("file");
        fs::write(&path, b"before")?;
        File::open(&path)?.sync_all()?;
        let snapshot = self.driver.create_snapshot(CreateSnapshotRequest {
            source_volume_id: source.id.clone(),
            name: "s-encrypted".to_owned(),
            ..Default::default()
        })?;
        let snapshot = snapshot.snapshot.context("no snapshot")?;
        ensure!(snapshot.size_bytes == 320 * MIB, "{snapshot:?}");
        let of_snapshot =
            Type::Snapshot(SnapshotSource { snapshot_id: snapshot.snapshot_id.clone() });
        let of_volume = Type::Volume(VolumeSource { volume_id: source.id.clone() });
        for of in [of_snapshot, of_volume] {
            let mut plain = self.volume(Shape::Mount("xfs"), 320, None)?;
            plain.source = Some(VolumeContentSource { r#type: Some(of.clone()) });
            refused(plain.create(&self.driver), Code::InvalidArgument)?;
            plain.gone()?;
            let mut clone = self.volume(Shape::Mount("xfs"), 320, Some("wrong"))?;
            clone.source.clone_from(&plain.source);
            clone.create(&self.driver)?;
            for _ in 0..2 {
                let status = refused(clone.stage(&self.driver), Code::Unauthenticated)?;
                let said = status.message();
                ensure!(said.contains("secrets.key opens none of its key slots"), "{said}");
                ensure!(!said.contains(SECRET), "a secret is in an error");
            }
            ensure!(!self.rig.control()?.volume(&clone.id)?.attached, "it is left attached");
            clone.secrets.clone_from(&source.secrets);
            self.publish(&clone)?;
            ensure!(fs::read(clone.target(0).join("file"))? == b"before", "other data");
            self.down(&clone)?;
        }
        let request =
            DeleteSnapshotRequest { snapshot_id: snapshot.snapshot_id, secrets: HashMap::new() };
        self.driver.delete_snapshot(request)?;
        self.down(&source)
    }

    /// The end of a device with a holder, as the kubelet has over each block volume.
    fn block(&self, volume: &Volume, written: &[u8]) -> Result<()> {
        let name = device_of(&volume.target(0))?;
        ensure!(name.starts_with("/dev/dm-"), "it is {name}");
        // Discards pass through.
        guest::shell(&format!("blkdiscard --offset 16M {name}"))?;
        let target = volume.target(0).display().to_string();
        let held = guest::shell(&format!("losetup --find --show {target}"))?.trim().to_owned();
        volume.unpublish(&self.driver, 0)?;
        refused(volume.unstage(&self.driver), Code::FailedPrecondition)?;
        guest::shell(&format!("losetup -d {held}"))?;
        insist("unstaging after the holder", || volume.unstage(&self.driver))?;
        self.publish(volume)?;
        let mut there = vec![0; written.len()];
        File::open(volume.target(0))?.read_exact(&mut there)?;
        ensure!(there == written, "other data");
        self.down(volume)
    }

    fn grow(&mut self) -> Result<()> {
        let mut volume = self.up(Shape::Mount("ext4"), 64, Some("grow"))?;
        volume.grow(&self.driver, 128 * MIB)?;
        let right = volume.secrets.clone();
        let old_kernel = guest::shell("uname -r")?.starts_with("6.12");
        if old_kernel {
            // The kernel shows the new size once the device is attached anew.
            refused(volume.node_grow(&self.driver, 0), Code::FailedPrecondition)?;
            self.unpublish(&volume)?;
            self.publish(&volume)?;
        } else {
            volume.secrets.clear();
            refused(volume.node_grow(&self.driver, 0), Code::InvalidArgument)?;
            volume.secrets = secrets(&[("key", "wrong")]);
            refused(volume.node_grow(&self.driver, 0), Code::Unauthenticated)?;
            volume.secrets = right;
        }
        let size = volume.node_grow(&self.driver, 0)?;
        ensure!(size == 128 * MIB, "{size}");
        let total = total(&volume.target(0))?;
        ensure!(total > u64::try_from(96 * MIB)?, "{total} bytes after growing");
        self.down(&volume)
    }

    fn rotate(&mut self) -> Result<()> {
        let mut volume = self.up(Shape::Mount("ext4"), 64, Some("old"))?;
        fs::write(volume.target(0).join("file"), b"kept")?;
        self.unpublish(&volume)?;
        volume.secrets = secrets(&[("key", "new"), ("previousKey", "older")]);
        refused(volume.stage(&self.driver), Code::Unauthenticated)?;
        volume.secrets = secrets(&[("key", "new"), ("previousKey", "old")]);
        self.publish(&volume)?;
        // A repeat with both finds nothing to do.
        volume.stage(&self.driver)?;
        self.unpublish(&volume)?;
        volume.secrets = secrets(&[("key", "old")]);
        refused(volume.stage(&self.driver), Code::Unauthenticated)?;
        volume.secrets = secrets(&[("key", "new")]);
        self.publish(&volume)?;
        ensure!(fs::read(volume.target(0).join("file"))? == b"kept", "other data");
        self.down(&volume)
    }

    /// The plugin is killed as soon as a tool runs, or the step after it is logged.
    fn deaths(&mut self) -> Result<()> {
        for tool in ["luksFormat", "open\0--type", "mkfs.ext4"] {
            let mut volume = self.volume(Shape::Mount("ext4"), 64, Some("death"))?;
            volume.create(&self.driver)?;
            std::thread::scope(|scope| -> Result<()> {
                let (driver, staged) = (&self.driver, &volume);
                let staging = scope.spawn(move || staged.stage(driver));
                wait_for(tool, || staging.is_finished())?;
                self.rig.plugin.kill()?;
                let _ = staging.join();
                Ok(())
            })
            .with_context(|| format!("a death at {tool}"))?;
            self.restart()?;
            insist("staging after a death", || volume.stage(&self.driver))?;
            volume.publish(&self.driver, 0)?;
            fs::write(volume.target(0).join("file"), b"kept")?;
            self.unpublish(&volume)?;
            self.publish(&volume)?;
            ensure!(fs::read(volume.target(0).join("file"))? == b"kept", "other data");
            self.down(&volume)?;
        }
        Ok(())
    }
}

/// Waits for a process with that in its words.
fn wait_for(word: &str, is_over: impl Fn() -> bool) -> Result<()> {
    while !is_over() {
        for entry in fs::read_dir("/proc")?.flatten() {
            let words = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            if contains(&words, word.as_bytes()) {
                return Ok(());
            }
        }
    }
    bail!("the call was over before {word:?} was seen")
}

/// On how many pages of the pool's disk each text is.
fn on_media(texts: &[&str]) -> Result<Vec<usize>> {
    // From the disk itself: the page cache may be older.
    let mut options = File::options();
    options.read(true).custom_flags(OFlag::O_DIRECT.bits());
    let disk = options.open("/dev/vda").context("opening the pool's disk")?;
    let (mut buffer, mut at) = (Buffer::default(), 0);
    let mut counts = vec![0; texts.len()];
    let finders: Vec<_> = texts.iter().map(|text| Finder::new(text.as_bytes())).collect();
    // Most of the disk was never written.
    let zeroes = vec![0; READ_BYTES];
    loop {
        let count = disk.read_at(buffer.of(READ_BYTES), at)?;
        if count == 0 {
            return Ok(counts);
        }
        at += u64::try_from(count)?;
        let read = &buffer.bytes()[..count];
        if read == &zeroes[..count] {
            continue;
        }
        for page in read.chunks(PAGE).filter(|page| *page != &zeroes[..PAGE]) {
            for (finder, found) in finders.iter().zip(&mut counts) {
                *found += usize::from(finder.find(page).is_some());
            }
        }
    }
}
