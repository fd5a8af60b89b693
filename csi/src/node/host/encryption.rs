//! Encryption of devices, by `cryptsetup`.

use std::path::Path;
use std::process::Output;
use std::time::Duration;

use blockd_luks::{Call, HEADER_BYTES, Key, Mapping, Outcome, PROGRAM};
use parking_lot::Mutex;

use super::{Host, tools};
use crate::error::Error;
use crate::node::mountinfo::Device;
use crate::node::world::{Encryption, Result};

/// Held while a key is derived: each derivation takes 64 MiB, and a node that starts stages all of
/// its volumes at once.
static DERIVING: Mutex<()> = Mutex::new(());

/// How long a call may run: a derivation takes a second of a slow processor, and the least of
/// sensible limits of bandwidth lets a header be written at 1 MiB/s.
const LIMIT: Duration = Duration::from_secs(60 + HEADER_BYTES / (1 << 20) * 2);

impl Encryption for Host {
    fn mapping(&self, name: &str) -> Result<Option<Mapping>> {
        Mapping::find(name).map_err(|error| Error::io("the list of block devices", error))
    }

    fn encrypt(&self, device: &Device, key: &Key) -> Result<()> {
        tracing::info!(device = %device.path.display(), "encrypt");
        let call = Call::format(&device.path, key);
        match run(&call, &device.path)? {
            (Outcome::Done, _) => Ok(()),
            (outcome, output) => Err(failed(outcome, &device.path, &output)),
        }
    }

    fn open(&self, device: &Device, name: &str, key: &Key, read_only: bool) -> Result<bool> {
        tracing::debug!(device = %device.path.display(), name, read_only, "open encryption");
        accepted(&Call::open(&device.path, name, key, read_only), &device.path)
    }

    /// The program tries a mapping that is in use again for 5 s: the kernel releases a device
    /// shortly after its last unmount, and so do programs that probe new devices.
    fn close(&self, name: &str) -> Result<bool> {
        tracing::debug!(name, "close encryption");
        match run(&Call::close(name), Path::new(name))? {
            (Outcome::Done, _) => Ok(true),
            (Outcome::Busy, _) => Ok(false),
            // Another process closed it.
            _ if self.mapping(name)?.is_none() => Ok(true),
            (outcome, output) => Err(failed(outcome, Path::new(name), &output)),
        }
    }

    fn resize(&self, name: &str, node: &Path, key: &Key) -> Result<bool> {
        tracing::debug!(name, "resize encryption");
        accepted(&Call::resize(name, key), node)
    }

    fn is_key(&self, device: &Device, key: &Key) -> Result<bool> {
        accepted(&Call::test(&device.path, key), &device.path)
    }

    fn add_key(&self, device: &Device, existing: &Key, new: &Key) -> Result<bool> {
        tracing::info!(device = %device.path.display(), "add key slot");
        accepted(&Call::add_key(&device.path, existing, new), &device.path)
    }

    fn remove_key(&self, device: &Device, key: &Key) -> Result<bool> {
        tracing::info!(device = %device.path.display(), "remove key slot");
        accepted(&Call::remove_key(&device.path, key), &device.path)
    }
}

/// Whether the key of a call was accepted.
fn accepted(call: &Call<'_>, subject: &Path) -> Result<bool> {
    match run(call, subject)? {
        (Outcome::Done, _) => Ok(true),
        (Outcome::WrongKey, _) => Ok(false),
        (outcome, output) => Err(failed(outcome, subject, &output)),
    }
}

fn run(call: &Call<'_>, subject: &Path) -> Result<(Outcome, Output)> {
    let mut command =
        call.command().map_err(|error| Error::io(format!("input of {PROGRAM}"), error))?;
    // The device mapper's library would wait for the answer of the host's udev, which does not
    // reach a container. The kernel makes the nodes that are used here.
    command.env("DM_DISABLE_UDEV", "1");
    let _deriving = call.derives().then(|| DERIVING.lock());
    let output = tools::run_command(PROGRAM, command, subject, LIMIT)?;
    Ok((Outcome::of(output.status.code()), output))
}

fn failed(outcome: Outcome, subject: &Path, output: &Output) -> Error {
    let what = format!("{PROGRAM} {}", subject.display());
    let problem = tools::explained(output.status.to_string(), output);
    match outcome {
        Outcome::Busy => Error::in_use(what, format_args!("finds it in use: {problem}")),
        Outcome::OutOfMemory => {
            Error::unexpected(what, "needs 64 MiB of memory to derive the key, and got none")
        }
        _ => Error::unexpected(what, problem),
    }
}
