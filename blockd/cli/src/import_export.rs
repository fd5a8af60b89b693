//! `blockd import`, `export`, `send` and `receive`: arguments, the volume's part in it, and the
//! output afterwards. The bytes are moved by `transfer`.

mod apply;
mod export;
mod import;
mod output;
mod remote;
pub(crate) mod rounds;
pub(crate) mod send;

pub(crate) use apply::receive::Receive;
use blockd_media::error::Error;
use blockd_nbd::client::{ServerAddress, Uri};
pub(crate) use export::Export;
pub(crate) use import::Import;

use std::future::Future;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use blockd_api::v1::{self, GetVolumeRequest, Volume};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use super::client::Client;
use super::transfer::increment::Identity;
use super::transfer::{Stop, qemu};
use super::{amount, answers};

/// Waits for a transfer. Ctrl-C and SIGTERM end it in order: it is stopped, and then still waited
/// for. A signal between two calls counts for the next one, since the first call has taken its
/// default action away, which is to end the process.
async fn interruptible<T>(
    stop: &Arc<Stop>,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let mut signalled = signalled()?;
    let mut work = std::pin::pin!(work);
    tokio::select! {
        done = &mut work => return done,
        _ = signalled.wait_for(|seen| *seen) => stop.set(),
    }
    work.await
}

/// Whether a signal to end has come.
fn signalled() -> Result<watch::Receiver<bool>, Error> {
    static SEEN: OnceLock<watch::Receiver<bool>> = OnceLock::new();

    if let Some(seen) = SEEN.get() {
        return Ok(seen.clone());
    }
    let failed = |source| Error::io("listening for signals", source);
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let (sender, seen) = watch::channel(false);
    tokio::spawn(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        // The static one receives always.
        let _ = sender.send(true);
    });
    Ok(SEEN.get_or_init(|| seen).clone())
}

/// Runs what blocks on a thread made for that.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        Err(Error::Unexpected { what: "transfer".to_owned(), problem: error.to_string() })
    })
}

/// The address of an attached volume.
fn address(volume: &Volume) -> Result<Uri, Error> {
    let uri: Result<Uri, _> = volume.nbd_uri.parse();
    uri.map_err(|error| Error::Unexpected {
        what: format!("the address of volume {}", volume.name),
        problem: error.to_string(),
    })
}

/// The same for qemu.
fn qemu_export(volume: &Volume, patience: Duration) -> Result<qemu::Export, Error> {
    let uri = address(volume)?;
    let ServerAddress::Unix(path) = uri.server else {
        return Err(Error::in_use(
            format!("volume {}", volume.name),
            "is not served on a Unix socket, which qcow2 needs",
        ));
    };
    let socket = path.into_os_string().into_string();
    let socket = socket.map_err(|path| Error::invalid("NBD socket", path.display(), "UTF-8"))?;
    Ok(qemu::Export { socket, name: uri.export, reconnect_seconds: patience.as_secs() })
}

/// The volume once the transfer's own connections are gone: the daemon sees their end a moment
/// after us, and what comes next, like `del`, should not be refused for them.
async fn settled(client: &mut Client, volume: &Volume, others: u32) -> Result<Volume, Error> {
    /// Far more than it takes. Connections that are still there then are not waited for.
    const MAX_LOOKS: u32 = 200;
    const LOOK: Duration = Duration::from_millis(10);

    let mut looks = 0;
    loop {
        let request = GetVolumeRequest { name: volume.name.clone(), pool: volume.pool.clone() };
        let now = answers::volume(client.get_volume(request).await?.volume)?;
        looks += 1;
        if now.connections <= others || looks == MAX_LOOKS {
            return Ok(now);
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// A volume or snapshot as a backup names it.
fn identity(volume: &Volume) -> Identity {
    let (id, name) = (volume.id, volume.name.clone());
    let (size_bytes, made_unix_ms) = (amount(volume.size_bytes), amount(volume.made_unix_ms));
    Identity { id, name, size_bytes, made_unix_ms }
}

/// The id of a pool, of its 32 digits.
fn pool_id(pool: &v1::Pool) -> Result<[u8; 16], Error> {
    let number = u128::from_str_radix(&pool.id, 16).map_err(|error| Error::Unexpected {
        what: format!("the id of pool {}", pool.name),
        problem: error.to_string(),
    });
    number.map(u128::to_be_bytes)
}

/// The error of a name that is taken.
fn taken(name: &str, problem: &str) -> Error {
    let message = format!("{name} {problem}");
    let kind = blockd_media::error::ErrorKind::Exists.row().wire.into();
    Error::Remote(v1::ErrorDetail {
        kind,
        field: "name".to_owned(),
        value: name.to_owned(),
        allowed: "a name that is not taken".to_owned(),
        message,
    })
}
