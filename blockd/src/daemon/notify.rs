//! Notifications to the service manager.

use std::ffi::{OsStr, OsString};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use blockd_control::services::Control;
use blockd_engine::pool::PoolHandle;
use sd_notify::NotifyState;

/// How long a service manager that does not read is waited for. `sd_notify::notify` waits for ever,
/// and a daemon that waits can't end.
const SEND_LIMIT: Duration = Duration::from_secs(2);

/// Notifies the service manager, if there is one, and returns when the states are sent.
pub(super) async fn send(states: &[NotifyState<'_>]) {
    if let Some(socket) = std::env::var_os("NOTIFY_SOCKET") {
        send_beside(socket, states).await;
    }
}

/// Sends on a thread that may block: those of the runtime serve calls.
async fn send_beside(socket: OsString, states: &[NotifyState<'_>]) {
    let text: String = states.iter().map(|state| format!("{state}\n")).collect();
    let sent = tokio::task::spawn_blocking(move || send_to(&socket, &text)).await;
    if let Err(error) = sent.unwrap_or_else(|error| Err(std::io::Error::other(error))) {
        tracing::warn!(%error, "cannot notify the service manager");
    }
}

/// Source: `sd_notify(3)`; an address that begins with `@` is an abstract name. Blocks.
fn send_to(socket: &OsStr, text: &str) -> std::io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_write_timeout(Some(SEND_LIMIT))?;
    socket.send_to_addr(text.as_bytes(), &address).map(drop)
}

/// The time that the service manager grants with each extension, beyond the pause to the next one.
const EXTENSION: Duration = Duration::from_secs(60);
/// How often it is asked to.
const EXTENSION_PAUSE: Duration = Duration::from_secs(20);

/// Extends the service manager's start timeout while this lasts: pools wait for IO of a daemon that
/// died, each with its own limit.
pub(super) async fn extending<T>(work: impl Future<Output = T>) -> T {
    let extend = async {
        let micros = u32::try_from(EXTENSION.as_micros()).unwrap_or(u32::MAX);
        loop {
            send(&[NotifyState::ExtendTimeoutUsec(micros)]).await;
            tokio::time::sleep(EXTENSION_PAUSE).await;
        }
    };
    tokio::select! {
        result = work => result,
        () = extend => unreachable!("it never ends"),
    }
}

/// Notifies the service manager's watchdog, where it is enabled, while the daemon lives: tasks run,
/// and pool threads answer.
pub(super) async fn watchdog(control: Control) {
    let Some(limit) = sd_notify::watchdog_enabled() else { return };
    let pause = limit / 3;
    loop {
        if pools_answer(&control, pause).await {
            send(&[NotifyState::Watchdog]).await;
        } else {
            tracing::error!("a pool's thread does not answer");
        }
        tokio::time::sleep(pause).await;
    }
}

async fn pools_answer(control: &Control, limit: Duration) -> bool {
    for known in control.known_pools() {
        let failed = known.failure().is_some();
        let Ok(handle) = known.state else { continue };
        if !failed && !answers(&handle, limit).await {
            return false;
        }
    }
    true
}

/// Whether a pool's thread answers. A file system below the pool need not: one that hangs is no
/// reason to end the other pools.
async fn answers(pool: &PoolHandle, limit: Duration) -> bool {
    tokio::time::timeout(limit, pool.own_space()).await.is_ok()
}

#[cfg(test)]
mod tests {
    use blockd_media::pool::PoolSpec;
    use blockd_media::{DeviceKind, DeviceSpec};

    use super::*;

    /// Sends until the socket takes no more.
    fn fill(path: &std::path::Path) {
        let full = UnixDatagram::unbound().unwrap();
        full.set_nonblocking(true).unwrap();
        while full.send_to(b"x", path).is_ok() {}
    }

    #[tokio::test]
    async fn a_runtime_thread_serves_others_while_a_notification_is_sent() {
        let folder = blockd_testkit::folder::Folder::new("notify").unwrap();
        let path = folder.path().join("notify");
        let _manager = UnixDatagram::bind(&path).unwrap();
        fill(&path);
        let states = [NotifyState::Ready];
        tokio::select! {
            biased;
            () = send_beside(path.into_os_string(), &states) => panic!("it did not wait"),
            () = tokio::time::sleep(Duration::from_millis(10)) => {}
        }
    }

    #[tokio::test]
    async fn a_file_system_that_hangs_below_a_pool_does_not_end_the_daemon() {
        let folder = blockd_testkit::folder::Folder::new("hangs").unwrap();
        let (path, kind) = (folder.path().join("pool"), DeviceKind::File);
        let size = Some(64 << 20);
        let device = DeviceSpec { path, kind, size, preallocate: false, direct: false };
        let spec = PoolSpec::new("p", device, "/dev/shm".into());
        drop(blockd_engine::pool::create(&spec).unwrap());
        let (pool, _) = blockd_engine::pool::open(&spec).unwrap();
        let mut hung = None;
        let _result = pool.look_below(|look| hung = Some(look));
        assert!(hung.is_some() && answers(&pool, Duration::from_millis(500)).await);
        pool.close().await.unwrap();
    }

    #[test]
    fn a_service_manager_that_does_not_read_holds_nothing_up() {
        let folder = blockd_testkit::folder::Folder::new("notify").unwrap();
        let path = folder.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        let text = "READY=1\nWATCHDOG=1\n";
        send_to(path.as_os_str(), text).unwrap();
        let mut buffer = [0; 64];
        let length = manager.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..length], text.as_bytes());
        fill(&path);
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || sender.send(send_to(path.as_os_str(), text)));
        let result = receiver.recv_timeout(20 * SEND_LIMIT).expect("it hangs");
        assert_eq!(result.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    }
}
