//! Calls of the kernel's device mapper, without the process that dmsetup takes for each: see
//! `Documentation/admin-guide/device-mapper` and `linux/dm-ioctl.h` of the kernel. The machines are
//! all little-endian.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

/// Bytes of `struct dm_ioctl`, which stands before what a call takes.
const HEAD: usize = 312;
/// Bytes of a name with the zero behind it.
const NAME: usize = 128;
/// Bytes of `struct dm_target_spec`.
const TARGET: usize = 40;
/// The group of the calls' numbers.
const GROUP: u8 = 0xfd;
/// The version of the interface that has all that is used here.
const VERSION: u32 = 4;

/// The calls that are used, by their numbers.
#[derive(Clone, Copy, Debug)]
enum Call {
    Create = 3,
    Remove = 4,
    /// Without its flag it resumes.
    Suspend = 6,
    Load = 9,
    Message = 14,
}

/// The device mapper's control device.
#[derive(Debug)]
pub(super) struct Control(File);

impl Control {
    /// Opens it, as root.
    pub(super) fn open() -> Result<Self> {
        const PATH: &str = "/dev/mapper/control";
        Ok(Self(OpenOptions::new().read(true).write(true).open(PATH).context(PATH)?))
    }

    /// Sends a message to a device's first target.
    pub(super) fn message(&self, device: &str, message: &str) -> Result<()> {
        let mut rest = 0_u64.to_le_bytes().to_vec();
        rest.extend(message.bytes());
        rest.push(0);
        self.call(Call::Message, device, &rest).map(|_| ())
    }

    /// Makes a device with one target, and returns its node.
    pub(super) fn create(
        &self,
        device: &str,
        sectors: u64,
        kind: &str,
        parameters: &str,
    ) -> Result<PathBuf> {
        self.call(Call::Create, device, &[])?;
        let mut target = vec![0; TARGET];
        target[8..16].copy_from_slice(&sectors.to_le_bytes());
        target[24..24 + kind.len()].copy_from_slice(kind.as_bytes());
        target.extend(parameters.bytes());
        target.push(0);
        self.call(Call::Load, device, &target)?;
        let number = self.call(Call::Suspend, device, &[])?;
        let minor = number & 0xff | number >> 12 & 0xf_ff00;
        Ok(PathBuf::from(format!("/dev/dm-{minor}")))
    }

    /// Removes a device that is not open.
    pub(super) fn remove(&self, device: &str) -> Result<()> {
        self.call(Call::Remove, device, &[]).map(|_| ())
    }

    /// Returns the device's number.
    fn call(&self, call: Call, device: &str, rest: &[u8]) -> Result<u64> {
        ensure!(device.len() < NAME, "{device} is too long");
        let len = HEAD + rest.len();
        // Words, since the kernel's structure has some.
        let mut words = vec![0_u64; len.div_ceil(8)];
        let bytes = u32::try_from(words.len() * 8)?;
        let targets = u32::from(matches!(call, Call::Load));
        let mut head = Vec::with_capacity(HEAD);
        for number in [VERSION, 0, 0, bytes, u32::try_from(HEAD)?, targets] {
            head.extend(number.to_le_bytes());
        }
        head.resize(48, 0);
        head.extend(device.bytes());
        head.resize(HEAD, 0);
        head.extend(rest);
        head.resize(words.len() * 8, 0);
        for (word, bytes) in words.iter_mut().zip(head.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into()?);
        }
        let request = nix::request_code_readwrite!(GROUP, call as u8, HEAD);
        // SAFETY: the buffer is as long as its head says, aligned for the structure, and lives
        // until the call returns; the kernel reads and writes no more than that length.
        let done = unsafe { libc::ioctl(self.0.as_raw_fd(), request, words.as_mut_ptr()) };
        nix::errno::Errno::result(done).with_context(|| format!("{call:?} of {device}"))?;
        Ok(words[5])
    }
}
