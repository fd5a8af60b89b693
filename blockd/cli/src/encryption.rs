//! LUKS2 above a volume's block device, on this host: `blockd add --encrypt` makes and opens it,
//! and verbs that remove the device close it first.

use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use blockd_api::v1::{GetVolumeRequest, Volume};
use blockd_luks::{Call, GRANULE_BYTES, HEADER_BYTES, KIND, Key, MAX_KEY_BYTES, Mapping, Outcome};
use blockd_media::clock::Clock;
use blockd_media::error::{Error, ErrorKind, shown};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, Flock, FlockArg, fcntl};

use super::amount;
use super::client::Client;
use super::labels::Pairs;

/// The label of encrypted volumes, for people and for the next `add`.
const LABEL: &str = "blockd.io/encryption";

/// How long another call may have the device: it writes a header and derives a key, in seconds on
/// a disk that works.
const LOCK_LIMIT: Duration = Duration::from_secs(60);
/// Between two tries.
const LOCK_PAUSE: Duration = Duration::from_millis(100);

/// Begins the names of mappings that are made here.
const PREFIX: &str = "blockd-";

/// The folder of the mappings' names.
const MAPPER: &str = "/dev/mapper";

/// Characters of the name of a mapping: a limit of the device mapper.
const MAX_NAME: usize = 127;

/// Characters that the device mapper keeps as they are in names, beside letters and digits.
const PLAIN: &str = "#+-.:=@_";

/// Programs for administrators lie there, and not every `PATH` has it.
const TOOLS: &str = "/usr/local/sbin:/usr/sbin:/sbin";

/// The socket of udev. Where it does not run, the device mapper's library would wait for it.
const UDEV: &str = "/run/udev/control";

/// Encryption of a new volume, or of one that was added with it.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct EncryptionArguments {
    /// Encrypt it with LUKS2 by cryptsetup, on this host. Prints the mapping to use,
    /// like /dev/mapper/blockd-POOL-NAME
    #[arg(long, requires = "key_file", conflicts_with_all = ["nbd", "usage"])]
    pub encrypt: bool,

    /// The file with the key: 1 to 4096 bytes, taken as they are
    #[arg(long, value_name = "FILE", requires = "encrypt")]
    pub key_file: Option<PathBuf>,
}

/// An encryption that was asked for.
pub(super) struct Encryption {
    key: Key,
}

impl EncryptionArguments {
    /// Reads the key.
    pub(super) fn read(&self) -> Result<Option<Encryption>, Error> {
        let Some(path) = &self.key_file else { return Ok(None) };
        let key = Key::read(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::InvalidData => {
                let allowed = format!("a file of 1 to {MAX_KEY_BYTES} bytes");
                Error::invalid("key-file", format!("{}, {error}", path.display()), allowed)
            }
            _ => Error::file("reading", path, error),
        })?;
        Ok(Some(Encryption { key }))
    }
}

impl Encryption {
    /// The size of the device of a volume with this size for data, which was given as `text`.
    pub(super) fn device_bytes(text: &str, bytes: i64) -> Result<i64, Error> {
        let granule = GRANULE_BYTES.cast_signed();
        let whole = bytes.checked_add(HEADER_BYTES.cast_signed());
        whole.filter(|_| bytes % granule == 0).ok_or_else(|| {
            Error::invalid("size", text, "a multiple of 4 KiB with --encrypt, below 8 EiB")
        })
    }

    /// The label that the volume gets.
    pub(super) fn label(labels: &mut Pairs) {
        labels.insert(LABEL.to_owned(), KIND.to_owned());
    }

    /// Refuses a volume that is there and holds data that is not encrypted, before it is changed.
    pub(super) async fn check(client: &mut Client, name: &str, pool: &str) -> Result<(), Error> {
        let Some(volume) = found(client, name, pool).await? else { return Ok(()) };
        mapping_name(&volume)?;
        if is_encrypted(&volume) || volume.valid_bytes == 0 {
            return Ok(());
        }
        let problem = format!(
            "holds data, and has no label {LABEL}={KIND}: set that with `blockd set --label` if it \
             is a copy of an encrypted volume, else copy the data to a volume that is new"
        );
        Err(Error::in_use(format!("volume {}", shown(name)), problem))
    }

    /// Opens the mapping over an attached volume; a volume that was never written gets a header
    /// before. Returns the mapping's path, and whether anything was changed.
    pub(super) async fn open(
        &self,
        client: &mut Client,
        volume: &Volume,
    ) -> Result<(String, bool), Error> {
        let name = mapping_name(volume)?;
        let device = local_device(volume)?;
        // Until this call ends, and what it has started: another one may be making the header.
        let mut lock = locked(device, LOCK_LIMIT)?;
        if let Some((open, mapping)) = over(volume)? {
            ended(&Call::test(device, &self.key), &volume.name)?;
            let has_grown = self.grow(volume, &open, &mapping)?;
            // A volume that was renamed has the mapping by its former name.
            let path = Path::new(MAPPER).join(&open);
            let path = if path.exists() { path } else { mapping.path };
            return Ok((path.display().to_string(), has_grown));
        }
        match find(&name)? {
            Some(there) if !there.over.is_empty() => {
                let problem = "is open over another volume, which was renamed: detach that first";
                return Err(Error::in_use(format!("{MAPPER}/{name}"), problem));
            }
            // Over a device that is gone.
            Some(_) => close_mapping(&name)?,
            None => {}
        }
        let now = found(client, &volume.name, &volume.pool).await?;
        let is_unwritten = now.is_some_and(|now| now.valid_bytes == 0);
        if is_unwritten && is_blank(device, &mut lock)? {
            ended(&Call::format(device, &self.key), &volume.name)?;
        }
        ended(&Call::open(device, &name, &self.key, volume.read_only), &volume.name)?;
        Ok((path_of(&name)?, true))
    }

    /// Makes an open mapping as large as its device, which may show its volume's size later than
    /// the volume has it: then there is a warning. Returns whether that changed it.
    fn grow(&self, volume: &Volume, name: &str, mapping: &Mapping) -> Result<bool, Error> {
        let whole = amount(volume.size_bytes).saturating_sub(HEADER_BYTES);
        if mapping.size_bytes == whole {
            return Ok(false);
        }
        ended(&Call::resize(name, &self.key), &volume.name)?;
        let now = find(name)?.map_or(mapping.size_bytes, |now| now.size_bytes);
        if now != whole {
            let text = "the mapping has its old size until the volume is detached and added again";
            super::set::warn(&[text.to_owned()]);
        }
        Ok(now != mapping.size_bytes)
    }
}

/// Whether a volume was added with --encrypt.
pub(super) fn is_encrypted(volume: &Volume) -> bool {
    volume.labels.contains_key(LABEL)
}

/// The part of a size that is for data, which people see.
pub(super) fn data_bytes(volume: &Volume, bytes: u64) -> u64 {
    bytes.saturating_sub(if is_encrypted(volume) { HEADER_BYTES } else { 0 })
}

/// The size of the device for a new size of a volume: that of an encrypted one is of its data.
pub(super) async fn resized_bytes(
    client: &mut Client,
    (name, pool): (&str, &str),
    (text, bytes): (&str, i64),
) -> Result<i64, Error> {
    match found(client, name, pool).await? {
        Some(volume) if is_encrypted(&volume) => Encryption::device_bytes(text, bytes),
        _ => Ok(bytes),
    }
}

/// The path of an open mapping: by its name, or by the kernel's where nothing made that.
fn path_of(name: &str) -> Result<String, Error> {
    let path = format!("{MAPPER}/{name}");
    match find(name)? {
        Some(mapping) if !Path::new(&path).exists() => Ok(mapping.path.display().to_string()),
        _ => Ok(path),
    }
}

/// Closes the mapping over a volume, if it is open: its device is about to go. With `force`, a
/// volume is left alone whose pool is not served: its device can go all the same, and only the pool
/// says whether it is encrypted.
pub(super) async fn close(
    client: &mut Client,
    name: &str,
    pool: &str,
    force: bool,
) -> Result<(), Error> {
    match found(client, name, pool).await {
        Ok(Some(volume)) => close_over(&volume),
        Ok(None) => Ok(()),
        Err(error) if force && error.kind() == ErrorKind::Io => {
            let name = shown(name);
            let text = format!(
                "{error}; if volume {name} was added with --encrypt, its mapping may still be \
                 open: close it with `cryptsetup close`"
            );
            super::set::warn(&[text]);
            Ok(())
        }
        Err(error) => Err(error),
    }
}

fn close_over(volume: &Volume) -> Result<(), Error> {
    match over(volume)? {
        Some((name, _)) if name.starts_with(PREFIX) => close_mapping(&name),
        _ => Ok(()),
    }
}

/// The mapping over a volume, by whatever name: the volume may have been renamed since.
fn over(volume: &Volume) -> Result<Option<(String, Mapping)>, Error> {
    if volume.device_path.is_empty() {
        return Ok(None);
    }
    let found = Mapping::over(volume.device_major, volume.device_minor);
    found.map_err(|error| Error::io("reading /sys/block", error))
}

/// Locks a device against other calls like this one. The lock is inherited by the programs that are
/// started: one that goes on after its call was killed keeps it.
fn locked(device: &Path, limit: Duration) -> Result<Flock<File>, Error> {
    let file = File::open(device).map_err(|error| Error::file("opening", device, error))?;
    fcntl(&file, FcntlArg::F_SETFD(FdFlag::empty()))
        .map_err(|error| Error::file("locking", device, error.into()))?;
    let (mut file, clock) = (file, Clock::start());
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((_, Errno::EWOULDBLOCK)) if clock.elapsed() >= limit => {
                let problem = "is locked by another `add --encrypt`, or by a cryptsetup that one \
                               has left: wait for its end, or end it";
                return Err(Error::in_use(device.display().to_string(), problem));
            }
            Err((back, Errno::EWOULDBLOCK)) => file = back,
            Err((_, error)) => return Err(Error::file("locking", device, error.into())),
        }
        std::thread::sleep(LOCK_PAUSE);
    }
}

/// Whether the place of a header reads as zeroes.
fn is_blank(device: &Path, lock: &mut File) -> Result<bool, Error> {
    let mut piece = vec![0; 1 << 20];
    for _ in 0..HEADER_BYTES >> 20 {
        lock.read_exact(&mut piece).map_err(|error| Error::file("reading", device, error))?;
        if piece.iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
    }
    Ok(true)
}

async fn found(client: &mut Client, name: &str, pool: &str) -> Result<Option<Volume>, Error> {
    let request = GetVolumeRequest { name: name.to_owned(), pool: pool.to_owned() };
    match client.get_volume(request).await {
        Ok(answer) => super::answers::volume(answer.volume).map(Some),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The name of a volume's mapping. Hyphens within its parts are doubled, so that no two volumes
/// have the same.
fn mapping_name(volume: &Volume) -> Result<String, Error> {
    let part = |text: &str| text.replace('-', "--");
    let name = format!("{PREFIX}{}-{}", part(&volume.pool), part(&volume.name));
    let is_plain = |c: char| c.is_ascii_alphanumeric() || PLAIN.contains(c);
    if name.len() <= MAX_NAME && name.chars().all(is_plain) {
        return Ok(name);
    }
    let allowed = format!(
        "letters, digits and {PLAIN} with --encrypt, at most {MAX_NAME} with the pool's name and \
         doubled hyphens"
    );
    Err(Error::invalid("name", &volume.name, allowed))
}

/// The node of a volume's block device, which has to be on this host.
fn local_device(volume: &Volume) -> Result<&Path, Error> {
    let path = Path::new(&volume.device_path);
    let is_it = fs::metadata(path).is_ok_and(|data| {
        let (major, minor) = (volume.device_major, volume.device_minor);
        data.file_type().is_block_device()
            && data.rdev() == nix::sys::stat::makedev(major.into(), minor.into())
    });
    if is_it {
        return Ok(path);
    }
    let place = if volume.device_path.is_empty() { "none" } else { &volume.device_path };
    let problem = format!(
        "has no block device on this host ({place}): --encrypt needs the ublk driver, and a daemon \
         that runs here"
    );
    Err(Error::in_use(format!("volume {}", shown(&volume.name)), problem))
}

fn find(name: &str) -> Result<Option<Mapping>, Error> {
    Mapping::find(name).map_err(|error| Error::io("reading /sys/block", error))
}

fn close_mapping(name: &str) -> Result<(), Error> {
    match run(&Call::close(name))? {
        (Outcome::Done, _) => Ok(()),
        (Outcome::Busy, _) => {
            let problem = "is in use: unmount it, or end what has it open";
            Err(Error::in_use(format!("{MAPPER}/{name}"), problem))
        }
        (_, output) => Err(failed(&format!("{MAPPER}/{name}"), &output)),
    }
}

/// Runs a call that uses the key for a volume.
fn ended(call: &Call<'_>, volume: &str) -> Result<(), Error> {
    let what = format!("volume {}", shown(volume));
    match run(call)? {
        (Outcome::Done, _) => Ok(()),
        (Outcome::WrongKey, _) => {
            let problem = "is encrypted, and the key of --key-file opens none of its key slots";
            Err(Error::in_use(what, problem))
        }
        (Outcome::OutOfMemory, _) => {
            Err(Error::in_use(what, "can't be opened: deriving the key takes 64 MiB of memory"))
        }
        (Outcome::Busy, _) => Err(Error::in_use(what, "has its device in use")),
        (Outcome::Failed, output) => Err(failed(&what, &output)),
    }
}

fn run(call: &Call<'_>) -> Result<(Outcome, Output), Error> {
    let failed = |error| Error::io("starting cryptsetup, of the package cryptsetup-bin", error);
    let mut command = call.command().map_err(failed)?;
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("LC_ALL", "C").env("PATH", format!("{path}:{TOOLS}"));
    if !Path::new(UDEV).exists() {
        command.env("DM_DISABLE_UDEV", "1");
    }
    let output = command.output().map_err(failed)?;
    Ok((Outcome::of(output.status.code()), output))
}

fn failed(what: &str, output: &Output) -> Error {
    let text = String::from_utf8_lossy(&output.stderr);
    let words: Vec<&str> = text.split_whitespace().collect();
    let problem = format!("cryptsetup failed ({}): {}", output.status, words.join(" "));
    Error::Unexpected { what: what.to_owned(), problem: shown(problem) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(pool: &str, name: &str) -> Volume {
        Volume { pool: pool.to_owned(), name: name.to_owned(), ..Volume::default() }
    }

    #[test]
    fn each_volume_has_a_mapping_of_its_own() {
        let name = |pool, name| mapping_name(&volume(pool, name)).unwrap();
        assert_eq!(name("default", "data"), "blockd-default-data");
        assert_eq!(name("a-b", "c"), "blockd-a--b-c");
        assert_ne!(name("a-b", "c"), name("a", "b-c"));
        for bad in ["with space", "ünicode", &"x".repeat(120)] {
            let error = mapping_name(&volume("default", bad)).unwrap_err().to_string();
            assert!(error.contains("with --encrypt"), "{error}");
        }
    }

    #[test]
    fn the_header_is_on_top_of_the_size() {
        assert_eq!(Encryption::device_bytes("1M", 1 << 20).unwrap(), 17 << 20);
        for bytes in [512, 4097, i64::MAX & !4095] {
            let error = Encryption::device_bytes("", bytes).unwrap_err().to_string();
            assert!(error.contains("a multiple of 4 KiB"), "{error}");
        }
    }

    #[test]
    fn a_device_of_another_host_is_refused() {
        let volume = Volume { device_path: "/dev/null".to_owned(), ..volume("default", "data") };
        let error = local_device(&volume).unwrap_err().to_string();
        assert!(error.contains("a daemon that runs here"), "{error}");
    }

    #[test]
    fn a_device_that_another_call_has_is_refused_when_the_time_is_over() {
        let path = std::env::temp_dir().join(format!("cli-lock-{}", std::process::id()));
        fs::write(&path, "").unwrap();
        let first = locked(&path, Duration::ZERO).unwrap();
        let error = locked(&path, Duration::ZERO).map(drop).unwrap_err().to_string();
        assert!(error.contains("is locked by another"), "{error}");
        drop(first);
        locked(&path, Duration::ZERO).unwrap();
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_key_file_that_cannot_be_is_named_and_not_shown() {
        let path = std::env::temp_dir().join(format!("cli-key-{}", std::process::id()));
        fs::write(&path, "").unwrap();
        let arguments = EncryptionArguments { encrypt: true, key_file: Some(path.clone()) };
        let error = arguments.read().map(drop).unwrap_err().to_string();
        assert!(error.contains("key-file") && error.contains("1 to 4096 bytes"), "{error}");
        fs::remove_file(&path).unwrap();
        let error = arguments.read().map(drop).unwrap_err().to_string();
        assert!(error.contains("cli-key-"), "{error}");
    }
}
