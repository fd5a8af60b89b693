//! Notifications to the service manager.

use std::time::Duration;

use blockd_control::pool;
use blockd_control::services::Control;
use sd_notify::NotifyState;

/// Says something to the service manager, if there is one.
pub(super) fn send(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "cannot notify the service manager");
    }
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
            send(&[NotifyState::Watchdog]);
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
