//! Notifications to the service manager.

use std::ffi::OsStr;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use blockd_control::pool;
use blockd_control::services::Control;
use sd_notify::NotifyState;

/// How long a service manager that does not read is waited for. `sd_notify::notify` waits for ever,
/// and a daemon that waits can't end.
const SEND_LIMIT: Duration = Duration::from_secs(2);

/// Says something to the service manager, if there is one.
pub(super) fn send(states: &[NotifyState<'_>]) {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET") else { return };
    if let Err(error) = send_to(&socket, states) {
        tracing::warn!(%error, "cannot notify the service manager");
    }
}

/// Source: `sd_notify(3)`; an address that begins with `@` is an abstract name.
fn send_to(socket: &OsStr, states: &[NotifyState<'_>]) -> std::io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    let text: String = states.iter().map(|state| format!("{state}\n")).collect();
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
            send(&[NotifyState::ExtendTimeoutUsec(micros)]);
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
            // It may take as long as the limit: not on a thread that serves calls.
            let _ = tokio::task::spawn_blocking(|| send(&[NotifyState::Watchdog])).await;
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
        if !failed && tokio::time::timeout(limit, pool::space(&handle)).await.is_err() {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_manager_that_does_not_read_holds_nothing_up() {
        let folder = blockd_testkit::folder::Folder::new("notify").unwrap();
        let path = folder.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        let states = [NotifyState::Ready, NotifyState::Watchdog];
        send_to(path.as_os_str(), &states).unwrap();
        let mut buffer = [0; 64];
        let length = manager.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..length], b"READY=1\nWATCHDOG=1\n");
        let full = UnixDatagram::unbound().unwrap();
        full.set_nonblocking(true).unwrap();
        while full.send_to(b"x", &path).is_ok() {}
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || sender.send(send_to(path.as_os_str(), &states)));
        let result = receiver.recv_timeout(20 * SEND_LIMIT).expect("it hangs");
        assert_eq!(result.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    }
}
